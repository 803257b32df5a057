"""Dropout outside of units, as a module and as a function: what one process draws."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from shardhet import HetFSDP, Plan
from shardhet.fsdp.microbatch.surroundings import DROPOUT_CALLS, microbatch_seed
from tests.edge_plans import every_plan
from tests.ordinary import WIDTH, Block
from tests.parity import compare_grads, part_of
from tests.worlds import on_ranks

SEED = 5
STEPS = 2
FOR_ALL = "once for all samples"


class Dropping(Block):
    """A unit that drops inside, as a function."""

    def forward(self, x: Tensor) -> Tensor:
        return functional.dropout(super().forward(x), 0.1, self.training)


class Net(nn.Module):
    """Drops four times outside of its units, and inside of each."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Dropping(WIDTH) for _ in range(2)])
        self.drop = nn.Dropout(0.3)
        self.head = nn.Linear(WIDTH, 3)
        self.table = nn.Parameter(torch.randn(WIDTH))
        self.last = 0.0  # may be switched on later
        self.on_draw: Callable[[str], None] = lambda fqn: None
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        self.on_draw(DROPOUT_CALLS)
        x = functional.dropout(x, p=0.2, training=self.training)
        self.on_draw(FOR_ALL)
        x = x + functional.dropout(self.table, 0.5, self.training)
        for i, block in enumerate(self.blocks):
            self.on_draw(f"blocks.{i}")
            x = block(x)
        self.on_draw("drop")
        x = self.drop(x)
        self.on_draw(DROPOUT_CALLS)
        x = functional.alpha_dropout(x, 0.4, self.training)
        self.on_draw(DROPOUT_CALLS)
        return self.head(functional.dropout(x, self.last, self.training))


def reference(net: Net, plan: Plan, step: int, x: Tensor) -> float:
    """Gradients of the mean square, from one microbatch after the other."""
    total, first = 0.0, 0
    for size in (size for rank in plan.ranks for size in rank.microbatch_sizes):
        calls: dict[str, int] = {}

        def draw(fqn: str, first: int = first, calls: dict[str, int] = calls) -> None:
            is_for_all = fqn == FOR_ALL
            fqn = DROPOUT_CALLS if is_for_all else fqn
            number = calls.get(fqn, 0)
            calls[fqn] = number + 1
            sample = 0 if is_for_all else first
            torch.manual_seed(microbatch_seed(SEED, step, fqn, number, sample))

        net.on_draw = draw
        loss = net(x[first : first + size]).square().sum() / len(x)
        loss.backward()
        total += loss.item()
        first += size
    return total


@every_plan
@on_ranks()
def test_functions_draw_as_modules_do(rank: int, plan: Plan) -> None:
    torch.manual_seed(3)
    plain, module = Net(), Net()
    module.load_state_dict(plain.state_dict())
    model = HetFSDP(module, plan, units=[Dropping, "head"], seed=SEED)
    sizes = [each.rank_batch_size for each in plan.ranks]
    units = dict.fromkeys((fqn for fqn, _ in plain.named_parameters()), "all")
    for step in range(STEPS):
        plain.last = module.last = 0.5 * step
        x = torch.randn(sum(sizes), WIDTH, dtype=torch.float64)
        mine = part_of({"x": x}, sizes, model.position)["x"]
        output = model(mine)
        loss = model.backward(output.square().sum(), len(mine))
        expected = reference(plain, plan, step, x)
        assert loss == pytest.approx(expected, rel=1e-12)
        compare_grads(model, plain, units, where=f"step {step}")
        with torch.no_grad():
            left_out = model.eval()(mine), plain.eval()(mine)
        torch.testing.assert_close(*left_out, rtol=1e-12, atol=1e-12)
        model.train(), plain.train()
        plain.zero_grad(), model.zero_grad()


class Checkpointed(nn.Module):
    """Computes part of its root code again in backward."""

    def __init__(self, drop: nn.Module | None, use_reentrant: bool) -> None:
        super().__init__()
        self.block = Dropping(WIDTH)
        self.last = Block(WIDTH)
        self.drop = drop
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(self._dropped, self.block(x), use_reentrant=self.use_reentrant)
        return self.last(x).sum(-1)

    def _dropped(self, x: Tensor) -> Tensor:
        y = functional.dropout(x, 0.5, self.training) if self.drop is None else self.drop(x)
        return y.sin()


class Within(Dropping):
    """A unit that computes part of itself again."""

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("by_module", [True, False])
@on_ranks(1)
def test_what_computes_root_dropout_again_is_refused(
    rank: int, by_module: bool, use_reentrant: bool
) -> None:
    module = Checkpointed(nn.Dropout(0.5) if by_module else None, use_reentrant)
    model = HetFSDP(
        module,
        Plan.by_hand(microbatch_sizes=[2], rank_batch_sizes=[3], state_shares=[1.0]),
        units=["block", "last"],
    )
    with pytest.raises(RuntimeError, match="outside of units and once more during backward"):
        model.backward(model(torch.randn(3, WIDTH)).sum(), 3)


class Both(nn.Module):
    """Dropout of the root, and units that compute themselves again."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Within(WIDTH) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = functional.dropout(block(x), 0.0, self.training)
        return x


@on_ranks(1)
def test_units_that_compute_again_beside_root_dropout_draw_their_own(rank: int) -> None:
    gradients = []
    for recompute in (False, True):
        torch.manual_seed(0)
        model = HetFSDP(
            Both(),
            Plan.by_hand(
                microbatch_sizes=[2],
                rank_batch_sizes=[3],
                state_shares=[1.0],
                recompute=recompute,
            ),
            units=[Within],
        )
        for _ in range(2):  # the second without the probe
            output = model(torch.ones(3, WIDTH))
            model.backward(output.square().sum(), 3)
        gradients.append([p.grad for p in model.parameters()])
    torch.testing.assert_close(*gradients, rtol=1e-6, atol=1e-6)
