"""What the tests of checkpoints share: a model with odd parameters, and plans drawn by seed."""

import copy
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.nn import functional as F

from shardhet import HetFSDP, Plan

BATCH = 6  # samples of a global batch, under every plan
WORDS, WIDTH, TOKENS = 11, 5, 3
FORMS: list[dict[str, bool]] = [
    {
        "reshard_after_forward": forward,
        "reshard_after_backward": backward,
        "reduce_each_round": each,
    }
    for forward, backward in ((True, True), (False, True), (False, False))
    for each in (True, False)
]


class OddBlock(nn.Module):
    """Rows that no number of ranks divides, and perhaps a scalar."""

    def __init__(self, *, has_scalar: bool) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, 2 * WIDTH + 1)
        self.outer = nn.Linear(2 * WIDTH + 1, WIDTH, bias=False)
        self.scale = nn.Parameter(torch.tensor(0.9)) if has_scalar else None

    def forward(self, x: Tensor) -> Tensor:
        y = self.outer(self.inner(x).tanh())
        return x + (y if self.scale is None else self.scale * y)


class Odd(nn.Module):
    """Tied, frozen and unused parameters, buffers, and blocks."""

    def __init__(
        self, *, has_scalar: bool = True, is_tied: bool = True, has_unused: bool = True
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(OddBlock(has_scalar=has_scalar) for _ in range(2))
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.unused = nn.Parameter(torch.randn(3, 2)) if has_unused else None
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        if is_tied:
            self.head.weight = self.embedding.weight
        self.register_buffer("offset", torch.linspace(0, 0.1, WIDTH))
        self.register_buffer("num_words", torch.tensor(WORDS))
        self.register_buffer("cache", torch.zeros(2), persistent=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> tuple[Tensor, int]:
        x = self.embedding(tokens) + self.offset
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.frozen(x))
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
        return loss, targets.numel()


def with_gradients(optimizer: optim.Optimizer) -> Iterator[tuple[dict[str, Any], Any]]:
    """Each parameter that has a gradient, with its group."""
    for group in optimizer.param_groups:
        for param in group["params"]:
            if param.grad is not None:
                yield group, param


class Lion(optim.Optimizer):
    """Element by element, with a number of Python's among its states."""

    def __init__(self, params: Iterable[Any], lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr, "sign": (0.9, 1)})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group, param in with_gradients(self):
            state = self.state[param]
            mean = state.setdefault("mean", torch.zeros_like(param))
            state["count"] = state.get("count", 0) + 1
            mean.lerp_(param.grad, 0.1 / state["count"])
            param -= group["lr"] * mean.sign()


OPTIMIZERS: dict[str, Any] = {
    "adamw": optim.AdamW,
    "adam": lambda groups: optim.Adam(groups, lr=0.01, amsgrad=True),
    "sgd": lambda groups: optim.SGD(groups, lr=0.05, momentum=0.9, nesterov=True),
    "plain sgd": lambda groups: optim.SGD(groups, lr=0.05),
    "adagrad": lambda groups: optim.Adagrad(groups, lr=0.05),
    "rmsprop": lambda groups: optim.RMSprop(groups, momentum=0.5, centered=True),
    "nadam": optim.NAdam,
    "lion": Lion,
}


def make_optimizer(model: nn.Module, kind: str) -> optim.Optimizer:
    """Two groups with different options; frozen parameters are in none."""
    params = [param for param in model.parameters() if param.requires_grad]
    matrices = [param for param in params if param.dim() > 1]
    others = [param for param in params if param.dim() <= 1]
    optimizer: optim.Optimizer = OPTIMIZERS[kind](
        [{"params": matrices}, {"params": others, "lr": 0.02}]
    )
    return optimizer


class Together:
    """Several optimizers that step together."""

    def __init__(self, *each: optim.Optimizer) -> None:
        self.each = list(each)

    def step(self) -> None:
        for each in self.each:
            each.step()

    def zero_grad(self) -> None:
        for each in self.each:
            each.zero_grad()


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model, saved under one plan and loaded under another; None is a plain module."""

    seed: int
    optimizer: str
    has_scalar: bool  # a 0-d parameter; FSDP2 takes none
    has_unused: bool  # a parameter without gradients; FSDP2's checkpoints want all states
    is_tied: bool
    num_steps: int
    saved_as: Plan | int | None  # a number: ranks of FSDP2
    loaded_as: Plan | int | None

    def module(self) -> Odd:
        torch.manual_seed(self.seed)
        return Odd(
            has_scalar=self.has_scalar, is_tied=self.is_tied, has_unused=self.has_unused
        ).double()


def draw_case(seed: int) -> Case:
    """In a third of all cases one end is plain or FSDP2, by turns."""
    rng = random.Random(f"checkpoint {seed}")
    ends: list[Plan | int | None] = [draw_plan(rng), draw_plan(rng)]
    has_fsdp2 = False
    if seed % 3 == 2:
        end = rng.randrange(2)
        has_fsdp2 = seed % 2 == 0
        ends[end] = rng.randint(1, 4) if has_fsdp2 else None
    # FSDP2 wants a state of every parameter, which plain SGD has not.
    kinds = ["adamw", "sgd", "adam"] if has_fsdp2 else list(OPTIMIZERS)
    return Case(
        seed=seed,
        optimizer=kinds[seed % len(kinds)],
        has_scalar=not has_fsdp2 and rng.random() < 0.7,
        has_unused=not has_fsdp2,
        is_tied=rng.random() < 0.5,
        num_steps=rng.randint(1, 3) if has_fsdp2 else rng.randint(0, 3),
        saved_as=ends[0],
        loaded_as=ends[1],
    )


def draw_plan(
    rng: random.Random, world_size: int | None = None, *, has_rounds: bool = True
) -> Plan:
    """A plan for one to four ranks, some of which store nothing or compute nothing; in up to
    three rounds, of which the last may have fewer samples.
    """
    world_size = world_size or rng.randint(1, 4)
    places = [rng.randrange(world_size) for _ in range(BATCH)]  # of samples
    weights = [rng.choice([0, 0, 1, 2, 7]) for _ in range(world_size)]
    if not any(weights):
        weights[rng.randrange(world_size)] = 1
    microbatch_sizes = [rng.randint(1, 3) for _ in range(world_size)]
    recompute = rng.random() < 0.3
    num_rounds, round_size = rng.choice([(1, BATCH), (1, BATCH), (2, 3), (2, 4), (3, 2)])
    if not has_rounds:
        num_rounds, round_size = 1, BATCH
    return Plan.by_hand(
        microbatch_sizes=microbatch_sizes,
        rank_batch_sizes=[places[:round_size].count(i) for i in range(world_size)],
        state_shares=[weight / sum(weights) for weight in weights],
        recompute=recompute,
        num_rounds=num_rounds,
        global_batch_size=BATCH,
        **rng.choice(FORMS),
    )


def batch_of(step: int) -> dict[str, Tensor]:
    """The global batch of a step."""
    generator = torch.Generator().manual_seed(1000 + step)
    words = torch.randint(WORDS, (2, BATCH, TOKENS), generator=generator)
    return {"tokens": words[0], "targets": words[1]}


def wrap(module: nn.Module, plan: Plan, **options: Any) -> HetFSDP:
    return HetFSDP(module, plan, units=[OddBlock], **options)


def train(model: nn.Module, optimizer: Any, steps: Iterable[int]) -> list[float]:
    """The mean loss of every step, of a HetFSDP or of a plain module."""
    losses = []
    for step in steps:
        batch = batch_of(step)
        if isinstance(model, HetFSDP):
            own = model.plan.sample_indices(model.position)
            mean = model.forward_backward(**{name: each[own] for name, each in batch.items()})
            assert mean is not None
            losses.append(mean)
        else:
            loss_sum, num_tokens = model(**batch)
            (loss_sum / num_tokens).backward()
            losses.append(loss_sum.item() / num_tokens)
        optimizer.step()
        optimizer.zero_grad()
    return losses


State = dict[str, Any]  # whole tensors and numbers, by names of our own


@dataclass(frozen=True)
class Rows:
    """Some rows of a tensor."""

    start: int
    values: Tensor  # [rows, ...]; a scalar is one row


def whole_state(model: nn.Module, optimizer: optim.Optimizer) -> State:
    """All there is, put together from the rows of all ranks; without the code under test."""
    mine = _local_state(model, optimizer)
    everyones = model.exchange_objects(mine) if isinstance(model, HetFSDP) else [mine]
    whole: State = {}
    for name in dict.fromkeys(name for each in everyones for name in each):
        found = [each[name] for each in everyones if name in each]
        if isinstance(found[0], Rows):
            found.sort(key=lambda rows: rows.start)
            whole[name] = torch.cat([rows.values for rows in found])
        else:
            assert all(_same(each, found[0]) for each in found), name
            whole[name] = found[0]
    return whole


def _local_state(model: nn.Module, optimizer: optim.Optimizer) -> State:
    state: State = {}
    boxes = model.sharded_state_dict() if isinstance(model, HetFSDP) else None
    names = {param: fqn for fqn, param in model.named_parameters()}
    for param, fqn in names.items():
        start = 0 if boxes is None else boxes[fqn].rows.start

        def rows(tensor: Tensor, start: int = start) -> Rows:
            values = tensor.detach().clone()
            return Rows(start, values.view(1) if values.dim() == 0 else values)

        state[fqn] = rows(param)
        for name, value in optimizer.state.get(param, {}).items():
            is_scalar = name in ("step", "mu_product") or not isinstance(value, Tensor)
            if value is not None:
                state[f"{fqn}/{name}"] = copy.deepcopy(value) if is_scalar else rows(value)
    inner = model.module if isinstance(model, HetFSDP) else model
    state |= {fqn: buffer.clone() for fqn, buffer in inner.named_buffers()}
    return state | groups_of(optimizer, names)


def groups_of(optimizer: optim.Optimizer, names: dict[nn.Parameter, str]) -> State:
    """The options of every group, and the names of its parameters."""
    return {
        f"group {number}/{name}": [names[p] for p in value] if name == "params" else value
        for number, group in enumerate(optimizer.param_groups)
        for name, value in group.items()
    }


def check_same(found: State, expected: State) -> None:
    """Bit by bit."""
    assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
    for name, value in expected.items():
        assert _same(found[name], value), f"{name}: {found[name]} for {value}"


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
    return type(a) is type(b) and bool(a == b)
