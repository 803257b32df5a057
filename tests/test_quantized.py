"""Attributes and classes of parameters, which say how weights of few bits are meant.

bitsandbytes keeps scales as attributes and has classes of its own.  experiments/quantized tries
bitsandbytes itself.
"""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardhet import HetFSDP, Plan
from tests.small_models import Chain
from tests.worlds import on_ranks, run_ranks

PLAN = {"microbatch_sizes": [2, 1, 0], "rank_batch_sizes": [4, 3, 0]}
SHARES = [0.5, 0.1, 0.4]


class Adapted(nn.Module):
    """A frozen matrix of int8 and a low-rank one that is trained."""

    def __init__(self, width: int) -> None:
        super().__init__()
        whole = torch.randn(width, width, dtype=torch.float64)
        scale = whole.abs().amax(1, keepdim=True) / 127
        self.weight = nn.Parameter((whole / scale).round().to(torch.int8), requires_grad=False)
        self.weight.scale = scale  # type: ignore[attr-defined]
        self.down = nn.Linear(width, 2, bias=False, dtype=torch.float64)
        self.up = nn.Linear(2, width, bias=False, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        scale = getattr(self.weight, "scale", torch.ones((), dtype=torch.float64))
        self.weight.num_uses = getattr(self.weight, "num_uses", 0) + 1  # type: ignore
        return torch.tanh(x @ (self.weight * scale).T + self.up(self.down(x)))


def make() -> Chain:
    torch.manual_seed(0)
    return Chain(*(Adapted(6) for _ in range(3)))


def train_adapters(rank: int, plan: Plan) -> None:
    x = torch.randn(7, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    plain, model = make(), HetFSDP(make(), plan, units=[Adapted])
    assert {"scale"} == {name for each in model.parameters() for name in vars(each)}
    for _ in range(3):
        for each in (plain, model):
            trained = [param for param in each.parameters() if param.requires_grad]
            optimizer = torch.optim.SGD(trained, lr=0.1)
            if isinstance(each, HetFSDP):
                each.forward_backward(x[plan.sample_indices(rank)])
            else:
                loss_sum, count = each(x)
                (loss_sum / count).backward()
            optimizer.step()
            optimizer.zero_grad()
        found = model.state_dict()
        for name, expected in plain.state_dict().items() if rank == 0 else ():
            torch.testing.assert_close(found[name], expected, rtol=1e-12, atol=1e-12, msg=name)
        frozen = [each for each in model.parameters() if each.dtype == torch.int8]
        assert all(vars(each).get("num_uses", 0) > 0 for each in frozen) == (rank != 2), rank


@pytest.mark.parametrize("options", [{}, {"resident_units": True}, {"recompute": True}])
def test_attributes_of_parameters_are_there_inside_of_units(options: dict[str, bool]) -> None:
    plan = Plan.by_hand(**PLAN, state_shares=SHARES, **options)  # type: ignore[arg-type]
    run_ranks(train_adapters, 3, plan)


class Tripled(nn.Parameter):
    """A matrix that stands for three times its elements."""

    @classmethod
    def __torch_function__(
        cls, func: Any, _types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            found = func(*args, **(kwargs or {}))
            return 3 * found if func is F.linear else found


class TripledTensor(Tensor):
    """Likewise, but no subclass of ``nn.Parameter``."""


class WithTripled(nn.Module):
    def __init__(self, *, is_frozen: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = (nn.Linear(6, 6, dtype=torch.float64) for _ in range(2))
        self.first.weight = Tripled(self.first.weight.data, requires_grad=not is_frozen)

    def forward(self, x: Tensor) -> tuple[Tensor, int]:
        return self.last(self.first(x)).square().sum(), len(x)


@pytest.mark.parametrize("is_frozen", [False, True])
@on_ranks(3)
def test_classes_of_parameters_mean_the_same_inside_of_units(
    rank: int, is_frozen: bool
) -> None:
    x = torch.randn(7, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    plan = Plan.by_hand(**PLAN, state_shares=SHARES)  # type: ignore[arg-type]
    plain = WithTripled(is_frozen=is_frozen)
    model = HetFSDP(WithTripled(is_frozen=is_frozen), plan, units=["first", "last"])
    of_class = [each for each in model.parameters() if isinstance(each, Tripled)]
    assert len(of_class) == (not is_frozen)  # rows are in the same groups of an optimizer
    loss_sum, count = plain(x)
    (loss_sum / count).backward()
    mean = model.forward_backward(x[plan.sample_indices(rank)])
    assert mean == pytest.approx(loss_sum.item() / count, rel=1e-12)
    for each in (plain, model):
        trained = [param for param in each.parameters() if param.requires_grad]
        torch.optim.SGD(trained, lr=0.1).step()
    found = model.state_dict()
    for name, expected in plain.state_dict().items() if rank == 0 else ():
        torch.testing.assert_close(found[name], expected.data, rtol=1e-12, atol=1e-12)


@on_ranks(2, fresh_world=True)
def test_other_classes_of_tensors_are_refused_by_name(rank: int) -> None:
    layer = nn.Linear(3, 3)
    layer.weight = nn.Parameter(layer.weight.data.as_subclass(TripledTensor))
    with pytest.raises(ValueError, match="weight is a TripledTensor, a class of tensors"):
        HetFSDP(layer, Plan.by_hand(microbatch_sizes=[1, 1]))
