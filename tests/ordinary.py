"""What the tests of torch's ordinary calls share: a small model, plain and as HetFSDP."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from shardhet import HetFSDP, Plan
from tests.parity import compare_grads, compare_params, part_of, rows_of
from tests.worlds import Outcome

WIDTH = 6
WITHIN_S = 10.0  # what fails on one rank has ended all of them


def says(outcomes: list[Outcome], *parts: str) -> None:
    """Every rank ended in time, and with all of this in its message."""
    for outcome in outcomes:
        assert not outcome.has_returned
        assert outcome.is_within(WITHIN_S), outcome.traceback
        for part in parts:
            assert part in outcome.message, outcome.traceback


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, 2 * width)
        self.outer = nn.Linear(2 * width, width, bias=False)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.outer(self.inner(x).tanh())


class Net(nn.Module):
    """Two blocks and a head, with a norm that stays with the root."""

    def __init__(self) -> None:
        super().__init__()
        self.config = {"width": WIDTH}
        self.blocks = nn.ModuleList([Block(WIDTH) for _ in range(2)])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 3)
        self.register_buffer("offset", torch.full((WIDTH,), 0.1))
        self.double()

    @property
    def dtype(self) -> torch.dtype:
        return next(self.parameters()).dtype

    def num_parameters(self) -> int:
        return sum(param.numel() for param in self.parameters())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        decays = [param for param in self.parameters() if param.dim() > 1]
        others = [param for param in self.parameters() if param.dim() <= 1]
        return torch.optim.AdamW([{"params": decays}, {"params": others, "weight_decay": 0.0}])

    def size_of_head(self) -> Tensor:
        return self.head.weight.norm()

    def read_head(self) -> float:
        return self.head.weight.sum().item()

    def zero_head(self) -> None:
        nn.init.zeros_(self.head.weight)

    def embed(self, x: Tensor) -> Tensor:
        return self.blocks[0](x)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, int]:
        x = x + self.offset
        for block in self.blocks:
            x = block(x)
        return (self.head(self.norm(x)) - y).square().sum(), len(x)


@dataclass
class Pair:
    """A plain model and the same as HetFSDP, trained side by side."""

    plan: Plan
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        torch.manual_seed(3)
        self.plain = Net()
        module = Net()
        module.load_state_dict(self.plain.state_dict())
        self.module = module
        self.prepare(module)
        self.model = HetFSDP(module, self.plan, units=[Block, "head"], **self.options)
        self.sizes = [rank.rank_batch_size for rank in self.plan.ranks]

    def prepare(self, module: Net) -> None:
        """What happens to the module before it is wrapped."""

    def batch(self) -> dict[str, Tensor]:
        num = sum(self.sizes)
        return {
            "x": torch.randn(num, WIDTH, dtype=torch.float64),
            "y": torch.randn(num, 3, dtype=torch.float64),
        }

    def mine(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """This rank's part."""
        return part_of(batch, self.sizes, self.model.position)

    def backward(self, batch: dict[str, Tensor] | None = None) -> None:
        """One forward and backward of both."""
        batch = self.batch() if batch is None else batch
        mean = self.model.backward(*self.model(**self.mine(batch)))
        loss_sum, num = self.plain(**batch)
        loss = loss_sum / num
        loss.backward()
        assert mean is not None
        assert abs(mean - loss.item()) < 1e-12 * abs(mean)

    def train(self, optimizers: Iterable[torch.optim.Optimizer], *, bar: float) -> None:
        """Three steps of both, after each of which they are the same."""
        for _ in range(3):
            self.backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            self.same_params(bar)

    def same_grads(self) -> None:
        units = dict.fromkeys((fqn for fqn, _ in self.plain.named_parameters()), "all")
        compare_grads(self.model, self.plain, units, where="here")

    def same_params(self, bar: float = 1e-12) -> None:
        compare_params(self.model, self.plain, bar=bar, where="here")

    def rows(self, fqn: str, whole: Tensor) -> Tensor:
        return rows_of(whole, self.model.sharded_state_dict()[fqn].rows)
