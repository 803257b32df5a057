"""What a unit's inputs and outputs are is known and not guessed: exact, or refused by name."""

import copy
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardhet import HetFSDP, Plan
from shardhet.fsdp.probing.attempt import Attempt
from shardhet.fsdp.probing.comparing import HUGE, are_close
from shardhet.fsdp.probing.prober import _tell_of_alike_samples
from tests.selection import one_in
from tests.worlds import run_ranks

WIDTH = 6
NUM_SAMPLES = 5
BAR = 1e-12

Step = Callable[[nn.Module, Tensor], Tensor]  # a model and its samples to the sum of losses


def plan_for(recomputes: bool, *, world_size: int = 1) -> Plan:
    if world_size == 1:
        return Plan.by_hand(
            microbatch_sizes=[2],
            rank_batch_sizes=[NUM_SAMPLES],
            state_shares=[1.0],
            recompute=recomputes,
        )
    return Plan.by_hand(
        microbatch_sizes=[2, 1, 0],
        rank_batch_sizes=[3, 2, 0],
        state_shares=[0.5, 0.2, 0.3],
        recompute=recomputes,
    )


class Precision(NamedTuple):
    """What a model is cast to, and computes in."""

    dtype: torch.dtype = torch.float64
    param_dtype: torch.dtype | None = None
    autocast: torch.dtype | None = None

    def wrap(self, module: nn.Module, plan: Plan, **options: Any) -> HetFSDP:
        module.to(self.dtype)
        return HetFSDP(module, plan, param_dtype=self.param_dtype, **options)

    def call(self, model: nn.Module, x: Tensor) -> Any:
        with torch.autocast("cpu", self.autocast, enabled=self.autocast is not None):
            return model(x.to(self.dtype))


PRECISIONS = {
    "float64": Precision(),
    "bf16": Precision(torch.float32, torch.bfloat16),
    "fp16": Precision(torch.float32, torch.float16),
    "autocast": Precision(torch.float32, autocast=torch.bfloat16),
}
every_precision = pytest.mark.parametrize(
    "precision", PRECISIONS.values(), ids=PRECISIONS.keys()
)
both_ways = pytest.mark.parametrize("recomputes", [False, True])


def check(
    plan: Plan,
    reference: nn.Module,
    samples: Sequence[Tensor],
    step: Step,
    *,
    sample_dim: int = 0,
    **options: Any,
) -> HetFSDP:
    """A step for each of ``samples``, beside plain PyTorch over the plan's microbatches."""
    model = HetFSDP(copy.deepcopy(reference), plan, **options)
    for x in samples:
        for each in (model, reference):
            each.zero_grad()
        first = plan.first_sample(model.position)
        own = x.narrow(sample_dim, first, plan.ranks[model.position].rank_batch_size)
        mean = model.backward(step(model, own), own.shape[sample_dim])
        total = 0.0
        for rank in plan.ranks:
            for size in rank.microbatch_sizes:
                piece, x = x.split([size, x.shape[sample_dim] - size], sample_dim)
                loss = step(reference, piece) / plan.global_batch_size
                loss.backward()
                total += float(loss.detach())
        assert mean == pytest.approx(total, rel=BAR)
        compare_grads(model, reference)
    return model


def compare_grads(model: HetFSDP, reference: nn.Module) -> None:
    grads = {fqn: param.grad for fqn, param in reference.named_parameters()}
    largest = max(float(g.abs().max()) for g in grads.values() if g is not None)
    boxes = model.sharded_state_dict()
    for fqn, param in model.named_parameters():
        expected, rows = grads[fqn], boxes[fqn].rows
        assert (param.grad is None) == (expected is None), fqn
        if expected is not None and param.grad is not None and param.numel():
            error = (
                (param.grad.as_subclass(Tensor) - expected[rows.start : rows.stop]).abs().max()
            )
            assert float(error) <= BAR * largest, fqn


class Net(nn.Module):
    """Units one after the other, and a head outside of them."""

    def __init__(self, make_unit: Callable[[], nn.Module], num_units: int = 2) -> None:
        super().__init__()
        self.units = nn.ModuleList(make_unit() for _ in range(num_units))
        self.head = nn.Linear(WIDTH, 3)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        for unit in self.units:
            x = unit(x)
        return self.head(x)


def squared(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().sum()


IN_ROUNDS = Plan.by_hand(microbatch_sizes=[2], rank_batch_sizes=[NUM_SAMPLES], num_rounds=2)


def backward_in_rounds(model: HetFSDP, call: Callable[..., Any], *args: Any) -> None:
    """A step of two rounds of what the call returns."""
    scaler = torch.amp.GradScaler("cpu", enabled=model._backward.is_float16)
    for _ in range(2):
        model.backward(scaler.scale(call(*args)), NUM_SAMPLES)


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


# Lengths that are equal by chance


class Mixer(nn.Module):
    """Positions are mixed by a matrix that is passed beside the samples."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x_BTD: Tensor, mask_TT: Tensor | None = None) -> Tensor:
        y_BTD = self.linear(x_BTD).tanh()
        return x_BTD + (y_BTD if mask_TT is None else mask_TT @ y_BTD)


class MaskedNet(Net):
    """Makes the matrix anew in every forward."""

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        mask = torch.ones(length, length, dtype=x.dtype).tril()
        for unit in self.units:
            x = unit(x, mask_TT=mask)
        return self.head(x)


@pytest.mark.sampled(2)
@both_ways
@pytest.mark.parametrize("world_size", [1, 3])
def test_lengths_that_become_equal_to_a_batch_later(world_size: int, recomputes: bool) -> None:
    run_ranks(_colliding_lengths, world_size, plan_for(recomputes, world_size=world_size))


def _colliding_lengths(rank: int, plan: Plan) -> None:
    torch.manual_seed(1)
    samples = [draw(NUM_SAMPLES, length, WIDTH) for length in (11, 5, 2, 3, 1, 4)]
    check(plan, MaskedNet(Mixer), samples, squared)


@both_ways
def test_lengths_that_are_equal_to_the_batch_from_the_start(recomputes: bool) -> None:
    check(plan_for(recomputes), MaskedNet(Mixer), [draw(5, 5, WIDTH)], squared)


class SequenceFirst(nn.Module):
    """Attention over dim 0, as torch's own layers have it."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2)

    def forward(self, x_TBD: Tensor) -> Tensor:
        return x_TBD + self.attention(x_TBD, x_TBD, x_TBD, need_weights=False)[0]


@both_ways
@pytest.mark.parametrize("length", [7, NUM_SAMPLES])
def test_sequence_first_models(length: int, recomputes: bool) -> None:
    samples = [draw(length, NUM_SAMPLES, WIDTH) for _ in range(2)]
    check(plan_for(recomputes), Net(SequenceFirst), samples, squared, sample_dim=1, batch_dim=1)


@every_precision
def test_samples_in_a_dimension_that_nobody_named_are_refused(precision: Precision) -> None:
    torch.manual_seed(0)
    model = precision.wrap(Net(SequenceFirst), plan_for(recomputes=False))
    with pytest.raises(ValueError, match=r"unit 'units.0'.*batch_dim="):
        precision.call(model, draw(NUM_SAMPLES, NUM_SAMPLES, WIDTH))


class Table(nn.Module):
    """Uses a table that has a row for each position and none for samples."""

    def __init__(self) -> None:
        super().__init__()
        self.units = nn.ModuleList([Mixer(), Mixer()])
        self.double()

    def forward(self, x: Tensor, table_TD: Tensor) -> Tensor:
        for unit in self.units:
            x = unit(x + table_TD)
        return x


def test_an_argument_without_samples_whose_length_is_the_batch() -> None:
    table = draw(NUM_SAMPLES, WIDTH)

    def step(model: nn.Module, x: Tensor) -> Tensor:
        return model(x, table).square().sum()

    check(plan_for(recomputes=False), Table(), [draw(5, 5, WIDTH)], step)


# Dimensions that hold the batch times something


class Biased(nn.Module):
    """Attention with a bias for every sample and head."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, x_BTD: Tensor, bias_STT: Tensor) -> Tensor:
        return x_BTD + self.attention(x_BTD, x_BTD, x_BTD, attn_mask=bias_STT)[0]


class BiasedNet(Net):
    """The bias has the heads beside each sample."""

    def forward(self, x: Tensor) -> Tensor:
        bias_BTT = x @ x.transpose(1, 2)
        for unit in self.units:
            x = unit(x, bias_BTT.repeat_interleave(2, 0))
        return self.head(x)


class Tiled(nn.Module):
    """Two copies of the batch, one after the other, as one input."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x_BTD: Tensor, both_STD: Tensor) -> tuple[Tensor, Tensor]:
        one, two = self.linear(both_STD).tanh().unflatten(0, (2, -1))
        return x_BTD * one + two, torch.cat([one, two])


class TiledNet(Net):
    """The copies differ."""

    def forward(self, x: Tensor) -> Tensor:
        both = torch.cat([x, x.square()])
        for unit in self.units:
            x, both = unit(x, both)
        return self.head(x) + both.mean() * 0 + self.head(both.unflatten(0, (2, -1))[1])


@both_ways
@pytest.mark.parametrize("make", [lambda: BiasedNet(Biased), lambda: TiledNet(Tiled)])
def test_batches_times_heads(make: Callable[[], nn.Module], recomputes: bool) -> None:
    samples = [draw(NUM_SAMPLES, length, WIDTH) for length in (4, 5)]
    check(plan_for(recomputes), make(), samples, squared)


class Folded(nn.Module):
    """Takes two rows of a mask for each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x_BTD: Tensor, keep_ST: Tensor) -> Tensor:
        return x_BTD + self.linear(x_BTD) * keep_ST.unflatten(0, (-1, 2)).all(1)[..., None]


class FoldedNet(Net):
    """Keeps what is small."""

    def forward(self, x: Tensor) -> Tensor:
        keep = x[..., 0] < 5
        for unit in self.units:
            x = unit(x, keep.repeat_interleave(2, 0))
        return self.head(x)


def test_rows_of_a_mask_that_are_all_alike_at_first() -> None:
    masked, at_last = draw(2, NUM_SAMPLES, 3, WIDTH)
    masked[1, 2, 0] = at_last[4, 1, 0] = 9.0
    samples = [draw(NUM_SAMPLES, 3, WIDTH), masked, draw(NUM_SAMPLES, 3, WIDTH), at_last]
    check(plan_for(recomputes=True), FoldedNet(Folded), samples, squared)
    model = HetFSDP(FoldedNet(Folded), plan_for(recomputes=False))
    with pytest.raises(ValueError, match="must be 10 long for 5 samples, with like rows"):
        model(at_last)


class Recurrent(nn.Module):
    """Hands its last states, [layers, B, H], to the next."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, num_layers=2, batch_first=True)

    def forward(self, x_BTD: Tensor, states: Any = None) -> tuple[Tensor, Any]:
        return self.lstm(x_BTD, states)


class RecurrentNet(Net):
    """Passes the states on."""

    def forward(self, x: Tensor) -> Tensor:
        states = None
        for unit in self.units:
            x, states = unit(x, states)
        return self.head(x) + self.head(states[0][-1])[:, None]


@both_ways
def test_states_with_the_batch_in_the_middle(recomputes: bool) -> None:
    check(plan_for(recomputes), RecurrentNet(Recurrent), [draw(5, 3, WIDTH)] * 2, squared)


# Without a batch


class Position(nn.Module):
    """A table that is looked up once for all samples."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, WIDTH)

    def forward(self, positions_1T: Tensor) -> Tensor:
        return self.table(positions_1T)


class PositionNet(Net):
    """Adds positions as GPT-2 does."""

    def __init__(self) -> None:
        super().__init__(Mixer)
        self.position = Position().double()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.position(torch.arange(x.shape[1])[None])
        return super().forward(x)


class RelativeBias(nn.Module):
    """Gives a bias that is the same for all samples beside its result, as T5 does."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(11, 11))
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
        length = x.shape[1]
        bias = self.bias[:length, :length] if bias is None else bias
        return x + bias @ self.linear(x).tanh(), bias


class RelativeBiasNet(Net):
    """The first unit's bias serves all."""

    def forward(self, x: Tensor) -> Tensor:
        bias = None
        for unit in self.units:
            x, bias = unit(x, bias)
        return self.head(x) + bias.sum()


@both_ways
@pytest.mark.parametrize("make", [PositionNet, lambda: RelativeBiasNet(RelativeBias)])
def test_units_and_outputs_without_samples(
    make: Callable[[], nn.Module], recomputes: bool
) -> None:
    samples = [draw(NUM_SAMPLES, length, WIDTH) for length in (4, 5, 2)]
    units = (Position, Mixer, RelativeBias)
    module = make()
    wanted = [kind for kind in units if any(isinstance(m, kind) for m in module.modules())]
    check(plan_for(recomputes), module, samples, squared, units=wanted)


# Single numbers


class Auxiliary(nn.Module):
    """Gives a single number beside its result."""

    kind = "sum"

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.linear(x).tanh()
        number = {
            "sum": y.square().sum(),
            "mean": y.square().mean(),
            "balance": (y.mean((0, 1)) * y.square().mean((0, 1))).sum(),
            "zero": (y - y.detach()).mean(),
        }[self.kind]
        return y, number


class Meaning(Auxiliary):
    kind = "mean"


class MeaningZero(Meaning):
    """Only gradients tell that it is a mean."""

    kind = "zero"


class Balancing(Auxiliary):
    kind = "balance"


class AuxiliaryNet(Net):
    """The numbers join the loss."""

    def forward(self, x: Tensor) -> Tensor:
        total = x.new_zeros(())
        for unit in self.units:
            x, number = unit(x)
            # A mean counts for its samples, so that what is returned is a sum.
            total = total + number * (len(x) if isinstance(unit, Meaning) else 1)
        return self.head(x).square().sum() + total


@both_ways
@pytest.mark.parametrize("kind", [Auxiliary, Meaning, MeaningZero])
def test_single_numbers_are_summed_or_averaged(kind: type[Auxiliary], recomputes: bool) -> None:
    samples = [draw(NUM_SAMPLES, 3, WIDTH)] * 2
    check(plan_for(recomputes), AuxiliaryNet(kind), samples, lambda model, x: model(x))


@every_precision
def test_a_load_balancing_loss_is_refused(precision: Precision) -> None:
    model = precision.wrap(AuxiliaryNet(Balancing), plan_for(recomputes=False))
    with pytest.raises(
        ValueError,
        match=r"neither the same, nor the sum|a mean, perhaps only|no sum or mean over",
    ):
        precision.call(model, draw(NUM_SAMPLES, 3, WIDTH))


class OfTargets(nn.Module):
    """A mean over targets that count, as their values say."""

    def __init__(self, counts: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.counts = nn.Linear(WIDTH, WIDTH), counts

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        which = self.counts(y)
        return (self.linear(x) - y)[which].square().mean()


class WithTargets(nn.Module):
    def __init__(self, counts: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.units = nn.ModuleList([nn.Linear(WIDTH, WIDTH), OfTargets(counts)])
        self.double()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.units[1](self.units[0](x), y)


@pytest.mark.parametrize(
    "counts",
    [lambda y: ~y.isnan(), lambda y: y > 0, lambda y: y >= 0, lambda y: y.abs().sum(-1) > 0],
    ids=["no NaN", "above zero", "not negative", "rows that are not zero"],
)
def test_a_mean_over_what_values_say_is_refused_though_all_count_at_first(counts: Any) -> None:
    model = HetFSDP(
        WithTargets(counts), plan_for(recomputes=False), units=["units.0", "units.1"]
    )
    with pytest.raises(ValueError, match=r"unit 'units.1': output 0 is a mean, perhaps only"):
        model(draw(NUM_SAMPLES, 3, WIDTH), draw(NUM_SAMPLES, 3, WIDTH).abs())


class Masked(nn.Module):
    """A mean beside a result, over what a mask chooses if ``chooses``."""

    def __init__(self, chooses: bool) -> None:
        super().__init__()
        self.linear, self.chooses = nn.Linear(WIDTH, WIDTH), chooses

    def forward(self, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        y = self.linear(x).tanh()
        return y * mask[:, :, None], (y[mask > 0] if self.chooses else y).square().mean()


class WithMask(Net):
    """Of a mask in which each sample has equally many."""

    def __init__(self, chooses: bool, dtype: torch.dtype) -> None:
        super().__init__(lambda: Masked(chooses))
        self.dtype = dtype

    def forward(self, x: Tensor) -> Tensor:
        mask = (torch.arange(3) < 2).expand(len(x), 3).to(self.dtype)
        total = x.new_zeros(())
        for unit in self.units:
            x, number = unit(x, mask)
            total = total + number * len(x)
        return self.head(x).square().sum() + total


@pytest.mark.parametrize("dtype", [torch.bool, torch.float64, torch.int64])
@pytest.mark.parametrize("chooses", [False, True])
def test_a_mean_beside_a_mask_is_tried(chooses: bool, dtype: torch.dtype) -> None:
    net, x = WithMask(chooses, dtype), draw(NUM_SAMPLES, 3, WIDTH)
    if not chooses and dtype is not torch.int64:  # of which nobody knows what does not count
        check(plan_for(recomputes=False), net, [x] * 2, lambda model, x: model(x))
        return
    with pytest.raises(ValueError, match=r"'units.0': output 1 is a mean, perhaps only"):
        HetFSDP(net, plan_for(recomputes=False))(x)


class Longest(nn.Module):
    """Returns the largest length beside its result."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        return self.linear(x), lengths.max()


class CutToLongest(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.units = nn.ModuleList([Longest()])
        self.double()

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        x, longest = self.units[0](x, lengths)
        return x[:, : int(longest)].square().sum()


def test_a_result_for_all_samples_that_comes_to_differ_between_microbatches_is_refused() -> (
    None
):
    model = HetFSDP(CutToLongest(), plan_for(recomputes=False), units=["units.0"])
    x, lengths = draw(NUM_SAMPLES, 3, WIDTH), torch.full((NUM_SAMPLES,), 3)
    model.backward(model(x, lengths), NUM_SAMPLES)
    lengths[:2] = 1
    with pytest.raises(
        ValueError, match=r"output of shape \(\) .* differs between microbatches"
    ):
        model(x, lengths)


# What a model returns as its loss and its number of tokens


class Pair(Net):
    """Returns a loss and what goes with it, given its errors by sample."""

    def __init__(self, pair: Callable[[Tensor], Any]) -> None:
        super().__init__(lambda: nn.Linear(WIDTH, WIDTH))
        self.pair = pair

    def forward(self, x: Tensor) -> Any:
        return self.pair(super().forward(x).square().sum((1, 2)))


NO_SUMS = {
    "a mean": (lambda errors: (errors.mean(), 1), "the loss is what the model returns"),
    "a mean and a tensor": (
        lambda errors: (errors.mean(), torch.tensor(len(errors))),
        "the loss is what the model returns",
    ),
    "one more": (
        lambda errors: (errors.sum(), len(errors) + 1),
        "the number of tokens is what the model returns, 3 here",
    ),
    "a tensor, one more": (
        lambda errors: (errors.sum(), torch.tensor(len(errors) + 1)),
        "the number of tokens is what the model returns, 3 here",
    ),
    "at least one": (
        lambda errors: (errors.sum(), (errors > 0).sum().clamp(min=1).double()),
        "kept within bounds",
    ),
    "one in place of zero": (
        lambda errors: (
            errors.sum(),
            torch.where((errors > 0).sum() == 0, 1, (errors > 0).sum()),
        ),
        "kept within bounds",
    ),
}


@pytest.mark.parametrize("kind", NO_SUMS)
@pytest.mark.parametrize("num_rounds", [1, 2])
def test_a_pair_that_does_not_add_up_is_refused_where_a_batch_is_cut(
    kind: str, num_rounds: int
) -> None:
    pair, words = NO_SUMS[kind]
    plan = Plan.by_hand(microbatch_sizes=[2], state_shares=[1.0], num_rounds=num_rounds)
    model = HetFSDP(Pair(pair), plan, units=["units.0", "units.1"])
    x = draw(2 * num_rounds, 3, WIDTH)
    if num_rounds == 1:
        assert model.forward_backward(x) is not None
        return
    with pytest.raises(ValueError, match=words):
        model.forward_backward(x)


def test_a_count_that_is_kept_above_zero_after_the_model_is_warned_of() -> None:
    plan = Plan.by_hand(microbatch_sizes=[2], state_shares=[1.0], num_rounds=2)
    model = HetFSDP(Net(lambda: nn.Linear(WIDTH, WIDTH)), plan, units=["units.0", "units.1"])
    for counts in (torch.ones(2), torch.zeros(2)):
        errors = model(draw(2, 3, WIDTH)).square().sum((1, 2)) * counts
        with nullcontext() if counts.any() else pytest.warns(UserWarning, match="has 1 token"):
            model.backward(errors.sum(), counts.sum().clamp(min=1))


def test_a_pair_of_a_sum_and_its_number_is_right() -> None:
    for pair in (
        lambda errors: (errors.sum(), len(errors)),
        lambda errors: (errors.sum() - 3 * len(errors), torch.tensor(float(len(errors)))),
        lambda errors: (errors.sum(), (errors < 0).sum() + len(errors), errors.max()),
    ):
        reference = Pair(pair)
        plan = Plan.by_hand(microbatch_sizes=[2], state_shares=[1.0], num_rounds=2)
        model = HetFSDP(copy.deepcopy(reference), plan, units=["units.0", "units.1"])
        x = draw(4, 3, WIDTH)
        model.forward_backward(x)
        loss_sum, number, *_ = reference(x)
        (loss_sum / number).backward()
        compare_grads(model, reference)


def test_a_load_balancing_loss_is_right_if_no_rank_splits() -> None:
    x = draw(NUM_SAMPLES, 3, WIDTH)
    whole = Plan.by_hand(microbatch_sizes=[NUM_SAMPLES], state_shares=[1.0])
    check(whole, AuxiliaryNet(Balancing), [x], lambda model, x: model(x))


class BalancedOutside(Net):
    """The load-balancing loss is computed outside of units from what they return."""

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        return x.square().sum() + (x.mean((0, 1)) * x.square().mean((0, 1))).sum()


class Spread(Net):
    """A loss of the samples' spread, which is not a number for a single one."""

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        return x.square().sum() + len(x) * x.std(0).sum()


class WithoutTheFirst(Net):
    """The loss leaves out the first sample of the rank's batch."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[1:].square().sum()


class EveryOther(Net):
    """The loss is that of the samples in even places."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[::2].square().sum()


class Paired(Net):
    """Each sample in an odd place is mixed with the one before it."""

    def forward(self, x: Tensor) -> Tensor:
        before = torch.arange(len(x)) // 2 * 2
        return super().forward(x + x[before])


class Centred(Net):
    """Samples are mixed outside of units."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.units[0](x)
        return self.head(self.units[1](x - x.mean(0)))


@pytest.mark.parametrize(
    ("make", "words"),
    [(Centred, "mixes samples"), (Paired, "depends for one sample on the other samples")]
    + [
        (make, "no sum or mean over samples")
        for make in (BalancedOutside, Spread, WithoutTheFirst, EveryOther)
    ],
)
@every_precision
def test_mixing_samples_outside_of_units_is_refused(
    make: type[Net], words: str, precision: Precision
) -> None:
    model = precision.wrap(make(Mixer), IN_ROUNDS)
    x = draw(NUM_SAMPLES, 3, WIDTH)
    with pytest.raises(ValueError, match=words):
        backward_in_rounds(model, precision.call, model, x)
    assert all(param.grad is None for param in model.parameters())


@pytest.mark.parametrize("make", [BalancedOutside, Spread, WithoutTheFirst, EveryOther])
def test_code_outside_of_units_may_mix_what_one_rank_has_in_one_round(make: type[Net]) -> None:
    reference, x = make(Mixer), draw(NUM_SAMPLES, 3, WIDTH)
    model = HetFSDP(copy.deepcopy(reference), plan_for(recomputes=False))
    model.backward(model(x), NUM_SAMPLES)
    (reference(x) / NUM_SAMPLES).backward()
    compare_grads(model, reference)


class AtLeastOne(nn.Module):
    """A unit that returns a sum over what a mask chooses, and how much that is, or 1."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.linear(x)
        return (y * (x > 0.5)).square().sum(), (x > 0.5).sum().clamp(min=1)


class InAUnit(nn.Module):
    """Returns what the unit returns."""

    def __init__(self) -> None:
        super().__init__()
        self.units = nn.ModuleList([AtLeastOne()])

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.units[0](x)


class Outside(Net):
    """Counts outside of units."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        chosen = x[..., :1] > 0.5
        count = torch.maximum(chosen.sum(), torch.ones_like(chosen.sum()))
        return (super().forward(x) * chosen).square().sum(), count


@pytest.mark.parametrize(
    "make, who", [(InAUnit, "unit 'units.0'"), (lambda: Outside(Mixer), r"model\(...\)")]
)
def test_a_count_that_is_at_least_one_is_refused(make: Any, who: str) -> None:
    model = HetFSDP(make().double(), plan_for(recomputes=False), units=["units.0"])
    with pytest.raises(ValueError, match=f"{who} returns a single number .* within bounds"):
        model(draw(NUM_SAMPLES, 3, WIDTH))


def sum_and_length(y: Tensor) -> tuple[Tensor, int]:
    return y.square().sum(), len(y)


def test_a_plain_number_that_would_be_one_microbatchs_is_refused() -> None:
    plan = Plan.by_hand(microbatch_sizes=[2], num_microbatches=[3], state_shares=[1.0])
    model = HetFSDP(Net(Mixer), plan, loss_fn=sum_and_length)
    with pytest.raises(ValueError, match="returns a plain number that depends on how many"):
        model(draw(6, 3, WIDTH))


class SplitK(nn.Module):
    """A product that is summed in another order for another number of rows, as kernels do."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(out, width) / width**0.5)

    def forward(self, x: Tensor) -> Tensor:
        parts = 1 + x.shape[0] % 3
        pairs = zip(x.chunk(parts, -1), self.weight.chunk(parts, 1), strict=True)
        return sum(a @ b.T for a, b in pairs)  # type: ignore[return-value]


class SplitKNet(nn.Module):
    """Sums squares in float32, with a little load balancing if ``balance``."""

    def __init__(self, balance: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(SplitK(32, 32) for _ in range(3))
        self.balance = balance

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x).relu()
        x = x.float()
        return x.square().sum() * (1 + self.balance * x.mean((0, 1)).square().sum())


@pytest.mark.parametrize("name", one_in(3, ["bf16", "fp16", "autocast"]))
def test_rounding_is_told_from_a_thousandth_of_mixing(name: str) -> None:
    precision = PRECISIONS[name]
    for seed in range(5):
        torch.manual_seed(seed)
        x = torch.randn(NUM_SAMPLES, 3, 32)
        fine, mixed = (
            precision.wrap(SplitKNet(balance), IN_ROUNDS, units=[SplitK])
            for balance in (0.0, 1e-3)
        )
        backward_in_rounds(fine, precision.call, fine, x)
        with pytest.raises(ValueError, match="no sum or mean over samples"):
            backward_in_rounds(mixed, precision.call, mixed, x)


@pytest.mark.parametrize(("largest", "is_a_result"), [(HUGE, True), (1.01 * HUGE, False)])
def test_differences_of_what_stands_beside_a_mask_count(
    largest: float, is_a_result: bool
) -> None:
    one = torch.tensor([1.0, 1.0, 1.0, largest], dtype=torch.float64)
    other = one + torch.tensor([1e-5, 0.0, 0.0, 0.0])
    assert are_close(other, one) is is_a_result


def test_samples_that_are_all_the_same_are_warned_of_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    _tell_of_alike_samples.cache_clear()
    model = HetFSDP(Net(Mixer), plan_for(recomputes=False))
    for _ in range(2):
        model(torch.ones(NUM_SAMPLES, 3, WIDTH, dtype=torch.float64))
    assert (
        sum("all samples of this batch are the same" in each for each in caplog.messages) == 1
    )


class OfValid(nn.Module):
    """The mean loss of valid tokens, with a little load balancing if ``balance``."""

    def __init__(self, net: nn.Module, balance: float = 0.0) -> None:
        super().__init__()
        self.net, self.balance = net, balance

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        logits = self.net(x)
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return loss + self.balance * logits.softmax(-1).mean((0, 1)).square().sum()


@pytest.mark.parametrize("first", [[0, 1, 2], [0, 1, -100], [-100] * 3])
def test_a_mean_over_valid_tokens_is_no_mixture(first: list[int]) -> None:
    reference = Net(Mixer)
    targets = torch.tensor([first, [-100, 1, -100], [2, 2, -100], [-100] * 3, [0, 1, 1]])
    model = HetFSDP(OfValid(copy.deepcopy(reference)), plan_for(recomputes=False))
    x = draw(NUM_SAMPLES, 3, WIDTH)
    num_valid = int((targets != -100).sum())
    model.backward(model(x, labels=targets) * num_valid, num_valid)
    OfValid(reference)(x, targets).backward()
    grads = {f"net.{fqn}": param.grad for fqn, param in reference.named_parameters()}
    for fqn, param in model.named_parameters():
        torch.testing.assert_close(param.grad, grads[fqn], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("third", [[0, 1, 1], [-100] * 3])
def test_a_little_load_balancing_beside_a_mean_over_valid_tokens_is_refused(
    third: list[int],
) -> None:
    targets = torch.tensor([[0, -100, -100], [2, 1, -100], third, [0, 1, 2], [1, 1, 1]])
    for seed in range(4):
        torch.manual_seed(seed)
        x, net = draw(NUM_SAMPLES, 3, WIDTH), Net(Mixer)
        fine, mixed = (HetFSDP(OfValid(copy.deepcopy(net), b), IN_ROUNDS) for b in (0.0, 1e-3))
        backward_in_rounds(fine, lambda m, x: m(x, targets) * NUM_SAMPLES, fine, x)
        with pytest.raises(ValueError, match="no sum or mean over samples"):
            backward_in_rounds(mixed, lambda m, x: m(x, targets) * NUM_SAMPLES, mixed, x)


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_sums_and_means_over_samples_take_six_runs(
    reduction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs, forward = [], Attempt._forward

    def noted(attempt: Attempt, name: str, *args: Any, **kwargs: Any) -> Any:
        runs.append(name)
        return forward(attempt, name, *args, **kwargs)

    class WithLoss(Net):
        def forward(self, x: Tensor, labels: Tensor) -> Tensor:
            logits = super().forward(x).flatten(0, 1)
            return F.cross_entropy(logits, labels.flatten(), reduction=reduction)

    calls = []
    run = Mixer.forward

    def counted(unit: Mixer, *args: Any, **kwargs: Any) -> Tensor:
        calls.append(unit)
        return run(unit, *args, **kwargs)

    monkeypatch.setattr(Attempt, "_forward", noted)
    monkeypatch.setattr(Mixer, "forward", counted)
    model = HetFSDP(WithLoss(Mixer), plan_for(recomputes=False))
    model(draw(NUM_SAMPLES, 3, WIDTH), labels=torch.ones(NUM_SAMPLES, 3, dtype=torch.long))
    assert runs[:6] == ["small", "large", "rest", "one", "other", "again"]
    assert all("times" in each for each in runs[6:])  # floating arguments, zero and large
    # Each of two units: for two samples, for three and for parts of them; in the runs that
    # follow, for changed samples alone; and for the three microbatches of the step.
    assert len(calls) == 2 * (1 + 4 + len(runs[6:]) + 3)


# What leaves or enters a unit on other ways


class Leaking(nn.Module):
    """Keeps a tensor in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.kept: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        self.kept = y.square().sum()
        return y.tanh()


class ReadsAttribute(Net):
    """Reads it outside."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + sum(unit.kept for unit in self.units)


class Hooked(Net):
    """Reads what a hook has caught inside of a unit."""

    def __init__(self, make_unit: Callable[[], nn.Module]) -> None:
        super().__init__(make_unit)
        self.caught: list[Tensor] = []
        self.units[0].linear.register_forward_hook(lambda *call: self.caught.append(call[2]))

    def forward(self, x: Tensor) -> Tensor:
        self.caught.clear()
        return super().forward(x) + self.caught[0].square().sum()


class Told(Mixer):
    """Is told the mask by an attribute."""

    mask: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x) * self.mask


class TellsByAttribute(Net):
    """Tells it."""

    def forward(self, x: Tensor) -> Tensor:
        for unit in self.units:
            unit.mask = x.sum((1, 2), keepdim=True).sigmoid()
        return super().forward(x)


class Appending(nn.Module):
    """Appends to a list, as to a cache."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, memory: Any) -> Tensor:
        memory.append(self.linear(x))
        return x + sum(memory)


class Remembering(Net):
    """Passes a list, or an object of a class that has one."""

    def forward(self, x: Tensor) -> Tensor:
        memory = self.make_memory()
        for unit in self.units:
            x = unit(x, memory)
        return self.head(x)

    def make_memory(self) -> Any:
        return []


class Memory:
    """Has a state."""

    def __init__(self) -> None:
        self.states: list[Tensor] = []

    def append(self, state: Tensor) -> None:
        self.states.append(state)

    def __iter__(self) -> Any:
        return iter(self.states)


class RemembersInObject(Remembering):
    def make_memory(self) -> Any:
        return Memory()


class Counting(nn.Module):
    """Counts its calls in a buffer."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.linear(x)


class RandomOutside(Net):
    """Noise that is added outside of units."""

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        return x + torch.randn_like(x)


@both_ways
@every_precision
@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: ReadsAttribute(Leaking), "'units.0'.*did not return is used outside"),
        (lambda: Hooked(Leaking), "'units.0'.*did not return is used outside"),
        (lambda: TellsByAttribute(Told), "'units.0' uses a tensor.*not among its arguments"),
        (lambda: Remembering(Appending), "'units.0' changes a list or dict"),
        (lambda: RemembersInObject(Appending), "'units.0' changes a Memory"),
        (lambda: Net(Counting), "buffer 'units.0.calls' is written"),
        (lambda: RandomOutside(Mixer), "random numbers outside of units"),
    ],
)
def test_what_cannot_be_shown_right_is_refused(
    make: Callable[[], nn.Module], words: str, precision: Precision, recomputes: bool
) -> None:
    model = precision.wrap(make(), plan_for(recomputes))
    with pytest.raises(ValueError, match=words):
        precision.call(model, draw(NUM_SAMPLES, 3, WIDTH))
    assert all(param.grad is None for param in model.parameters())


# A mask in one step and none in another


class SometimesMasked(Net):
    """Leaves the mask out where no sample needs one."""

    def forward(self, x: Tensor) -> Tensor:
        needs_mask = bool((x[:, 0, 0] > 1).any())
        mask = (x[:, :, :1] < 1).to(x.dtype) * x[:, None, :, 0] if needs_mask else None
        for unit in self.units:
            x = unit(x, mask)
        return self.head(x)


@both_ways
@pytest.mark.parametrize("first", [False, True])
def test_masks_that_depend_on_values(first: bool, recomputes: bool) -> None:
    torch.manual_seed(0)  # of other samples a probe may show that they decide on each other's
    samples = []
    for step in range(4):
        x = draw(NUM_SAMPLES, 3 if step < 2 else NUM_SAMPLES, WIDTH).clamp(max=0.9)
        if (step % 2 == 0) == first:
            x[step, 0, 0] = 2.0  # one sample of another microbatch at each step
            x[(step + 1) % 5, 0, 0] = 2.0
        samples.append(x)
    model = HetFSDP(SometimesMasked(Mixer), plan_for(recomputes))
    reference = SometimesMasked(Mixer)
    reference.load_state_dict(model.state_dict())
    for x in samples:
        for each in (model, reference):
            each.zero_grad()
        mask_of_all = x if (x[:, 0, 0] > 1).any() else None
        model.backward(squared(model, x), len(x))
        (squared(reference, x if mask_of_all is None else mask_of_all) / len(x)).backward()
        compare_grads(model, reference)


# Parameters that a unit and the root share


class Tied(nn.Module):
    """Embedding and head are one matrix; the head is used outside of units."""

    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(7, WIDTH)
        self.units = nn.ModuleList([Mixer(), Mixer()])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 7, bias=False)
        self.head.weight = self.wte.weight
        self.double()

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.wte(tokens)
        for unit in self.units:
            x = unit(x)
        return self.head(self.norm(x))


def _tied(rank: int, plan: Plan, units: tuple[Any, ...]) -> None:
    torch.manual_seed(2)
    samples = [torch.randint(0, 7, (NUM_SAMPLES, 3)) for _ in range(2)]
    check(plan, Tied(), samples, squared, units=units)


@pytest.mark.sampled
@both_ways
@pytest.mark.parametrize("units", [(Mixer, "wte"), (Mixer, "head"), (Mixer, "wte", "head")])
@pytest.mark.parametrize("world_size", [1, 3])
def test_a_parameter_that_a_unit_and_the_root_share(
    world_size: int, units: tuple[Any, ...], recomputes: bool
) -> None:
    run_ranks(_tied, world_size, plan_for(recomputes, world_size=world_size), units)


# Batch norm


class Normalised(nn.Module):
    """A linear layer and batch norm over positions."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.linear(x).transpose(1, 2)).transpose(1, 2).tanh()


class NormOutside(Net):
    """One more batch norm outside of units."""

    def __init__(self) -> None:
        super().__init__(Normalised)
        self.norm = nn.BatchNorm1d(WIDTH, momentum=None).double()

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x.transpose(1, 2)).transpose(1, 2)
        return super().forward(x)


def _batch_norm(rank: int, plan: Plan) -> None:
    torch.manual_seed(3)
    reference = NormOutside()
    samples = [draw(NUM_SAMPLES, 3, WIDTH) for _ in range(3)]
    model = check(plan, reference, samples, squared, units=(Normalised, "head"))
    expected = dict(reference.named_buffers())
    for fqn, buffer in model.named_buffers():
        torch.testing.assert_close(buffer, expected[fqn], rtol=1e-12, atol=1e-14, msg=fqn)
    for each in (model, reference):
        each.eval()
    with torch.no_grad():
        torch.testing.assert_close(model(samples[0]), reference(samples[0]))


@both_ways
@pytest.mark.parametrize("world_size", [1, 3])
def test_batch_norm_follows_the_order_of_samples(world_size: int, recomputes: bool) -> None:
    run_ranks(_batch_norm, world_size, plan_for(recomputes, world_size=world_size))
