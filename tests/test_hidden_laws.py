"""What the first three samples hide: laws that hold for their values and not for others'."""

import copy
from collections.abc import Callable
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import broadcast
from torch.nn.functional import cross_entropy

from shardhet import HetFSDP, Plan, Stage
from shardhet.fsdp.probing.comparing import Cut
from shardhet.fsdp.probing.prober import _laws_of_all
from tests.beside import backward_in_rounds
from tests.edge_plans import APART, IN_ROUNDS, UNEVEN, every_plan
from tests.ordinary import Pair, says
from tests.parity import compare_grads
from tests.small_models import WIDTH, Net, draw
from tests.worlds import ends_all_ranks, run_ranks, run_ranks_expecting_failure

UNITS = ["units.0", "units.1"]
LABELS = torch.tensor([0, 1, 2, 0, 1])  # those of a probe are all unlike
OfLabels = Callable[[Tensor, Tensor], Tensor]


def linear() -> nn.Module:
    return nn.Linear(WIDTH, WIDTH)


def by_count(labels: Tensor) -> Tensor:
    return 1 / torch.bincount(labels, minlength=3).clamp(min=1).double()


def summed(logits: Tensor, labels: Tensor) -> Tensor:
    return cross_entropy(logits, labels, by_count(labels), reduction="sum")


def averaged(logits: Tensor, labels: Tensor) -> Tensor:
    return cross_entropy(logits, labels, by_count(labels))


def per_label(logits: Tensor, labels: Tensor) -> Tensor:
    return cross_entropy(logits, labels, reduction="sum") / len(labels.unique())


class Labelled(Net):
    def __init__(self, loss: OfLabels) -> None:
        super().__init__(linear)
        self.loss = loss

    def forward(self, x: Tensor, labels: Tensor) -> tuple[Tensor, int]:
        return self.loss(super().forward(x), labels), len(labels)


@pytest.mark.parametrize("loss", [summed, averaged, per_label])
def test_a_loss_by_how_often_the_batch_has_a_label_is_refused(loss: OfLabels) -> None:
    model, x = HetFSDP(Labelled(loss), IN_ROUNDS, units=UNITS), draw(5, WIDTH)
    with pytest.raises(ValueError, match="what the model returns, which is no sum or mean"):
        backward_in_rounds(model, lambda: model(x, LABELS)[0])


@pytest.mark.parametrize("loss", [summed, averaged])
def test_a_loss_of_a_unit_by_how_often_the_batch_has_a_label_is_refused(
    loss: OfLabels,
) -> None:
    model = HetFSDP(
        Net(linear),
        IN_ROUNDS,
        units=[*UNITS, "head"],
        loss_fn=lambda output, labels: (loss(output, labels), torch.tensor(len(labels))),
    )
    with pytest.raises(ValueError, match="what the model returns, which is no sum or mean"):
        model.forward_backward(draw(10, WIDTH), loss_inputs=LABELS.repeat(2))
    assert all(param.grad is None for param in model.parameters())


def by_the_largest(x: Tensor) -> Tensor:
    return x / (x / 100).abs().max().clamp(min=1)


def without_zeros(x: Tensor) -> Tensor:
    return x * (x.flatten(1).any(1).sum() / len(x))


class Bounded(Net):
    def __init__(self, bound: Callable[[Tensor], Tensor], is_summed: bool) -> None:
        super().__init__(linear)
        self.bound, self.is_summed = bound, is_summed

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(self.bound(x))
        return y.square().sum() if self.is_summed else y


@pytest.mark.parametrize("is_summed", [True, False])
@pytest.mark.parametrize("bound", [by_the_largest, without_zeros])
def test_what_only_large_or_zero_samples_show_is_refused(
    bound: Callable[[Tensor], Tensor], is_summed: bool
) -> None:
    model, x = HetFSDP(Bounded(bound, is_summed), IN_ROUNDS, units=UNITS), draw(5, WIDTH)
    with pytest.raises(ValueError, match=r"no sum or mean|depends for one sample on the oth"):
        backward_in_rounds(model, model, x)


class Longest(nn.Module):
    """Computes as many positions as the longest of its samples has."""

    def __init__(self) -> None:
        super().__init__()
        self.units = nn.ModuleList([nn.Embedding(5, WIDTH), linear()])
        self.double()

    def forward(self, tokens: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        longest = int(mask.sum(1).max())
        x = self.units[1](self.units[0](tokens[:, :longest]))
        return (x.square().sum(-1) * mask[:, :longest]).sum(), mask.sum()


def _cuts_to_longest(rank: int, is_training: bool) -> None:
    stages = [Stage(units=(f"units.{i}",), num_ranks=1) for i in range(2)]
    model = HetFSDP(
        Longest(), Plan.by_hand(microbatch_sizes=[4, 4], num_rounds=2, stages=stages)
    )
    mask = torch.arange(12) < torch.tensor([11, 7, 9, 3, 5, 6, 4, 5])[:, None]
    batch = torch.randint(5, mask.shape), mask.long()
    with torch.set_grad_enabled(is_training):
        model.forward_backward(*batch) if is_training else model(*batch)


@pytest.mark.parametrize("is_training", [True, False])
def test_stages_refuse_what_has_another_shape_than_in_an_earlier_round(
    is_training: bool,
) -> None:
    for outcome in run_ranks_expecting_failure(_cuts_to_longest, 2, is_training):
        assert (
            "'units.0' hands over a tensor of shape (4, 6, 6), but the next stage expects"
            in outcome.message
        ), outcome.message


# What a forward keeps once a value is large


class Grows(nn.Module):
    """Computes with the longest position so far: by a buffer that follows it, by the number
    alone, outside of units or in one, or by a table that is long enough.
    """

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.longest = kind, 8
        self.units = nn.ModuleList([linear(), linear()])
        self.register_buffer("kept", self.made(), persistent=False)
        self.double()

    def made(self) -> Tensor:
        positions = torch.arange(self.longest, dtype=torch.float64)
        return positions.cos() if self.kind == "table" else 8 / (positions[-1:] + 1)

    def scaled(self, x: Tensor, positions: Tensor) -> Tensor:
        if positions.max() + 1 > self.longest:
            self.longest = int(positions.max()) + 1
            if self.kind in ("buffer", "table"):
                self.register_buffer("kept", self.made(), persistent=False)
        if self.kind in ("number", "in a unit"):
            return x * (8 / self.longest)
        return x * (self.kept[positions, None] if self.kind == "table" else self.kept)

    def forward(self, x: Tensor, positions: Tensor) -> tuple[Tensor, int]:
        if self.kind == "in a unit":
            x = self.units[0](x, positions)
        else:
            x = self.scaled(self.units[0](x), positions)
        return self.units[1](x).square().sum(), len(x)


class GrowsInside(Grows):
    """A unit of this kind."""

    def __init__(self) -> None:
        super().__init__("number")
        self.weight = nn.Parameter(torch.eye(WIDTH).double())
        del self.units

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        return self.scaled(x, positions) @ self.weight


LONG = [3, 5, 7, 6, 4, 2, 5, 20]
OF_EIGHT = {
    "ranks": Plan.by_hand(microbatch_sizes=[4, 4]),
    "stores": Plan.by_hand(microbatch_sizes=[2, 0, 6]),
    "rounds": Plan.by_hand(microbatch_sizes=[4], num_rounds=2),
    "stages": Plan.by_hand(
        microbatch_sizes=[4, 4],
        num_rounds=2,
        stages=[Stage(units=(f"units.{i}",), num_ranks=1) for i in range(2)],
    ),
    "microbatches": Plan.by_hand(microbatch_sizes=[4], rank_batch_sizes=[8]),
    "at once": Plan.by_hand(microbatch_sizes=[8]),
}


def _grows(rank: int, plan: Plan, kind: str) -> None:
    torch.manual_seed(0)
    reference, x = Grows(kind), draw(8, WIDTH)
    if kind == "in a unit":
        reference.units[0] = GrowsInside()
    model = HetFSDP(copy.deepcopy(reference), plan, units=UNITS)
    mine = model.plan.sample_indices(model.position)
    for positions in torch.tensor([[3, 5, 7, 6, 4, 2, 5, 1], LONG, LONG]):
        for each in (model, reference):
            each.zero_grad()
        model.forward_backward(x[mine], positions[mine])
        loss_sum, number = reference(x, positions)
        (loss_sum / number).backward()
        compare_grads(model, reference)


@pytest.mark.parametrize("kind", ["buffer", "number", "in a unit"])
@pytest.mark.parametrize("name", ["ranks", "stores", "rounds", "stages"])
def test_what_follows_the_largest_value_so_far_is_refused(name: str, kind: str) -> None:
    plan = OF_EIGHT[name]
    outcomes = run_ranks_expecting_failure(_grows, plan.world_size, plan, kind)
    says(outcomes, "that this forward has changed", "kept" if kind == "buffer" else "longest")


def test_what_follows_the_largest_value_is_refused_between_microbatches() -> None:
    cut = OF_EIGHT["microbatches"]
    outcomes = run_ranks_expecting_failure(_grows, 1, cut, "in a unit")
    says(outcomes, "that this forward has changed", "units.0.longest")
    run_ranks(_grows, 1, cut, "number")
    run_ranks(_grows, 1, OF_EIGHT["at once"], "in a unit")


@pytest.mark.parametrize("name", ["ranks", "stores", "rounds", "microbatches"])
def test_a_table_that_becomes_longer_on_one_rank_is_right(name: str) -> None:
    run_ranks(_grows, OF_EIGHT[name].world_size, OF_EIGHT[name], "table")


# What the program makes of numbers and vectors that the model returns

RETURNED: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda h: h.mean(),
    "sum": lambda h: h.sum(),
    "means": lambda h: h.mean(0),
    "sums": lambda h: h.sum(0),
    "products": lambda h: h.T @ h,
    "largest": lambda h: h.amax(0),
}
# By which factor a loss has to depend on them.
IS_MEAN = {"mean": True, "means": True, "sum": False, "sums": False, "products": False}


class Beside(Net):
    """Returns something of all samples beside rows of each."""

    def __init__(self, kind: str) -> None:
        super().__init__(linear)
        self.of_all = RETURNED[kind]

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = super().forward(x)
        return y, self.of_all(y)


def _uses_beside(rank: int, plan: Plan, kind: str, use: str) -> None:
    torch.manual_seed(0)
    reference, x = Beside(kind), draw(8, WIDTH)
    model = HetFSDP(copy.deepcopy(reference), plan, units=UNITS)
    mine = [*plan.sample_indices(model.position)]
    for _ in range(2):
        for part in torch.tensor(mine).long().chunk(plan.num_rounds):
            rows, of_all = model(x[part])
            model.backward(_loss(rows, of_all, use), len(part))
        rows, of_all = reference(x)
        (_loss(rows, of_all, use) / len(x)).backward()
        compare_grads(model, reference)
        for each in (model, reference):
            each.zero_grad()


def _loss(rows: Tensor, of_all: Tensor, use: str) -> Tensor:
    weights = torch.arange(1.0, of_all.numel() + 1).double().view(of_all.shape)
    used = {
        "square": of_all.square().sum(),
        "sum": (0.1 * of_all * weights).sum(),
        "mean": (0.1 * of_all * weights).sum() * len(rows),
        "not": of_all.detach().sum() * 0,
    }
    return rows.square().sum() + used[use]


@pytest.mark.parametrize("kind", RETURNED)
@pytest.mark.parametrize("name", ["ranks", "stores", "rounds"])
def test_a_loss_is_a_sum_of_what_the_model_returns_of_all_samples(name: str, kind: str) -> None:
    plan, right = OF_EIGHT[name], {True: "mean", False: "sum", None: "not"}[IS_MEAN.get(kind)]
    run_ranks(_uses_beside, plan.world_size, plan, kind, right)
    # Of ranks with equal numbers, "sum" and "mean" are the same but for a constant.
    for use in {"square", *(["sum", "mean"] if name == "stores" else [])} - {right}:
        outcomes = run_ranks_expecting_failure(_uses_beside, plan.world_size, plan, kind, use)
        says(outcomes, "the loss depends on output 1 of model(...), which is")


# What the program writes between steps


def on_rank_zero(pair: Pair) -> None:
    if pair.model.position == 0:
        pair.module.offset.fill_(2.0)


def on_the_last_rank(pair: Pair) -> None:
    if pair.model.position == pair.model.plan.world_size - 1:
        pair.module.offset = pair.module.offset + 1


def others_than_elsewhere(pair: Pair) -> None:
    pair.module.offset.fill_(1.0 + pair.model.position)


def a_number_of_its_own(pair: Pair) -> None:
    pair.module.norm.eps = 1e-3 * (1 + pair.model.position)


def on_all(pair: Pair) -> None:
    for each in (pair.plain, pair.module):
        each.offset.mul_(2.0)
        each.norm.eps = 1e-3


def as_rank_zero(pair: Pair) -> None:
    pair.plain.offset.fill_(0.7)
    if pair.model.position == 0:
        pair.module.offset.fill_(0.7)
    if pair.model.plan.world_size > 1:
        broadcast(pair.module.offset, 0)


def _writes(rank: int, plan: Plan, write: Callable[[Pair], None]) -> None:
    pair = Pair(plan)
    for _ in range(2):
        pair.backward()
    write(pair)
    for _ in range(2):
        pair.backward()
    pair.same_grads()


@every_plan
@pytest.mark.parametrize("write", [on_all, as_rank_zero])
def test_buffers_may_be_written_on_all_ranks(plan: Plan, write: Callable[[Pair], None]) -> None:
    run_ranks(_writes, len(plan.ranks), plan, write)


@pytest.mark.parametrize("plan", [UNEVEN, APART], ids=["uneven", "apart"])
@pytest.mark.parametrize(
    ("write", "name"),
    [
        (on_rank_zero, "offset"),
        (on_the_last_rank, "offset"),
        (others_than_elsewhere, "offset"),
        (a_number_of_its_own, "norm.eps"),
    ],
)
def test_what_ranks_write_unalike_is_named(
    plan: Plan, write: Callable[[Pair], None], name: str
) -> None:
    outcomes = run_ranks_expecting_failure(_writes, len(plan.ranks), plan, write)
    says(outcomes, f"not the same on all ranks: {name}. Write the same values")


class Shifted(nn.Linear):
    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH, dtype=torch.float64)
        self.register_buffer("shift", torch.zeros(WIDTH).double())

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.shift


class ShiftedTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.units = nn.ModuleList([Shifted(), Shifted()])

    def forward(self, x: Tensor) -> tuple[Tensor, int]:
        return self.units[1](self.units[0](x).tanh()).square().sum(), len(x)


def _writes_in_stages(rank: int, everywhere: bool) -> None:
    torch.manual_seed(0)
    stages = [Stage(units=(f"units.{i}",), num_ranks=1) for i in range(2)]
    plan = Plan.by_hand(microbatch_sizes=[4, 4], num_rounds=2, stages=stages)
    module = ShiftedTwice()
    plain = copy.deepcopy(module)
    model, x = HetFSDP(module, plan, units=UNITS), draw(8, WIDTH)
    for each in (plain, module):
        for _ in range(2):
            if each is plain:
                plain.zero_grad()
                loss_sum, num = plain(x)
                (loss_sum / num).backward()
            else:
                model.zero_grad()
                model.forward_backward(x)
            if everywhere or rank == 1:
                each.units[1].shift.add_(1.0)
    compare_grads(model, plain)
    model.forward_backward(x)


def test_stages_compare_written_buffers_too() -> None:
    run_ranks(_writes_in_stages, 2, True)
    outcomes = run_ranks_expecting_failure(_writes_in_stages, 2, False)
    says(outcomes, "not the same on all ranks: units.1.shift")


# What one rank alone raises beside its forwards


@ends_all_ranks(2, "no room")
def test_what_one_rank_raises_between_its_forwards_ends_all(rank: int) -> None:
    model = HetFSDP(Beside("sum"), OF_EIGHT["ranks"], units=UNITS)
    if rank == 1:
        mock.patch.object(Cut, "reductions", side_effect=OSError("no room")).start()
    model(draw(4, WIDTH))


def test_laws_are_in_one_order_on_ranks_whose_hashes_of_texts_differ() -> None:
    places = [f"['{i}']" for i in range(40)]
    found = [dict.fromkeys(places), dict.fromkeys(reversed(places[1:]))]
    assert list(_laws_of_all(found)) == places[1:]
    assert _laws_of_all([]) == {}
