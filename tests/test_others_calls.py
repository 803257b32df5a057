"""Arguments and habits of other people's loops: those of one process, or refused by name."""

import warnings
from collections import UserDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint_sequential

from shardhet import HetFSDP, Plan, Stage
from tests.ordinary import Block
from tests.worlds import run_ranks

WIDTH = 4
PLAN = Plan.by_hand(microbatch_sizes=[2, 1], num_rounds=2)
STAGES = Plan.by_hand(
    microbatch_sizes=[2, 1, 1],
    rank_batch_sizes=[2, 1, 1],
    num_rounds=2,
    stages=[
        Stage(units=("blocks.0",), num_ranks=1),
        Stage(units=("blocks.1", "head"), num_ranks=2),
    ],
)


class Encoding(UserDict[str, Any]):
    """As a tokenizer's result."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self.data[name]
        except KeyError as error:
            raise AttributeError(name) from error


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Block(WIDTH), Block(WIDTH))
        self.head = nn.Linear(WIDTH, 3)

    def run(self, x: Tensor) -> Tensor:
        return self.head(self.blocks[1](self.blocks[0](x)))

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, int]:
        return F.cross_entropy(self.run(x), y, reduction="sum"), len(y)


class InPlace(Net):
    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, int]:
        x.sub_(x.mean(1, keepdim=True))
        return super().forward(x, y)


class Encoded(Net):
    def forward(self, batch: Any) -> tuple[Tensor, int]:  # type: ignore[override]
        return super().forward(batch.x, batch["y"])


class Outside(Net):
    """As DiT: a part of a unit is called while the unit is not."""

    def run(self, x: Tensor) -> Tensor:
        first = self.blocks[0]
        return super().run(x) + self.head(first.outer(first.inner(x)))


class Targets(Net):
    """As DETR: one dict for each sample."""

    def forward(self, x: Tensor, y: list[dict[str, Tensor]]) -> Any:  # type: ignore[override]
        z = self.run(x)
        losses = [
            F.cross_entropy(z[i].expand(len(each["label"]), 3), each["label"], reduction="sum")
            for i, each in enumerate(y)
        ]
        return sum(losses), torch.tensor(sum(len(each["label"]) for each in y))


class Checkpointed(Net):
    def run(self, x: Tensor) -> Tensor:
        return self.head(checkpoint_sequential(self.blocks, 2, x, use_reentrant=False))


def batch_of(kind: type[Net], samples: range | list[int]) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(8, WIDTH, generator=generator, dtype=torch.float64)[samples]
    y = torch.randint(0, 3, (8,), generator=generator)[samples]
    if kind is Encoded:
        return {"batch": Encoding(x=x, y=y)}
    if kind is Targets:
        return {"x": x, "y": [{"label": each.expand(1 + i % 2)} for i, each in enumerate(y)]}
    return {"x": x, "y": y}


def train(
    rank: int, kind: type[Net], plan: Plan, unsets: Callable[[int, str], bool] | None = None
) -> None:
    """Three steps beside one process; ``unsets`` says whose gradients are dropped."""
    warnings.filterwarnings("ignore", message=".*stay unsharded")
    torch.manual_seed(0)
    plain, module = kind().double(), kind().double()
    module.load_state_dict(plain.state_dict())
    model = HetFSDP(module, plan)
    optimizers = [torch.optim.SGD(each.parameters(), 0.1, 0.9) for each in (plain, model)]
    for step in range(3):
        loss, num = plain(**batch_of(kind, range(plan.global_batch_size)))
        (loss / num).backward()
        if plan.stages:
            model.forward_backward(**batch_of(kind, list(plan.sample_indices(model.position))))
        for i in range(0 if plan.stages else plan.num_rounds):
            model.backward(*model(**batch_of(kind, plan.round_samples(model.position, i))))
        for each in (plain, model):
            for fqn, param in each.named_parameters():
                if unsets is not None and unsets(step, fqn):
                    param.grad = None
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for fqn, expected in plain.state_dict().items():
        box = model.sharded_state_dict()[fqn]
        own = expected[box.rows.start : box.rows.stop] if expected.dim() else expected
        assert (box.tensor - own).abs().sum() < 1e-12, fqn


@pytest.mark.parametrize(
    "kind, plan", [(InPlace, STAGES), (InPlace, PLAN), (Encoded, PLAN), (Outside, PLAN)]
)
def test_others_models_are_those_of_one_process(kind: type[Net], plan: Plan) -> None:
    run_ranks(train, plan.world_size, kind, plan)


def is_body_in_first_steps(step: int, fqn: str) -> bool:
    return step < 2 and fqn.startswith("blocks")


@pytest.mark.parametrize("plan", [STAGES, PLAN])
def test_parameters_are_trained_later_if_their_gradients_are_dropped(plan: Plan) -> None:
    run_ranks(train, plan.world_size, Net, plan, is_body_in_first_steps)


def refusal(rank: int, kind: type[Net], plan: Plan) -> str:
    try:
        train(rank, kind, plan)
    except (ValueError, RuntimeError) as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    "kind, sizes, sentence",
    [
        (Targets, [2, 2], "argument 'y' is a list with an entry for each sample"),
        (Targets, [1, 1], "argument 'y' is a list with an entry for each sample"),
        (Targets, [2, 1], "Each entry of a list counts as one"),
        (Checkpointed, [2, 1], "unit 'blocks.0' was called under gradient checkpointing"),
    ],
)
def test_what_cannot_be_cut_is_refused_by_its_name(
    kind: type[Net], sizes: list[int], sentence: str
) -> None:
    plan = Plan.by_hand(microbatch_sizes=sizes)
    for message in run_ranks(refusal, 2, kind, plan, fresh_world=True):
        assert sentence in message
        assert "does not run on some of its samples" not in message
