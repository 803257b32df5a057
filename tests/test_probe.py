"""What a unit's inputs and outputs are is known and not guessed: exact, or refused by name."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardhet import HetFSDP, Plan
from shardhet.fsdp.microbatch.chosen import _rolled
from shardhet.fsdp.probing.attempt import Attempt
from shardhet.fsdp.probing.comparing import HUGE, are_close
from shardhet.fsdp.probing.prober import _tell_of_alike_samples
from tests.beside import Beside, backward_in_rounds, check, refuses, squared, summed
from tests.edge_plans import IN_ROUNDS, both_ways, plan_for
from tests.selection import one_in
from tests.small_models import (
    NUM_SAMPLES,
    UNITS,
    WIDTH,
    Mixer,
    Net,
    Unit,
    draw,
    kind,
    linear,
    through,
)
from tests.worlds import on_ranks


class Precision(NamedTuple):
    """What a model is cast to, and computes in."""

    dtype: torch.dtype = torch.float64
    param_dtype: torch.dtype | None = None
    autocast: torch.dtype | None = None

    def wrap(self, module: nn.Module, plan: Plan, **options: Any) -> HetFSDP:
        module.to(self.dtype)
        return HetFSDP(module, plan, param_dtype=self.param_dtype, **options)

    def call(self, model: HetFSDP, x: Tensor) -> Any:
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
PAIRS = Plan.by_hand(microbatch_sizes=[2], state_shares=[1.0], num_rounds=2)


def of_lengths(*lengths: int) -> list[Tensor]:
    return [draw(NUM_SAMPLES, length, WIDTH) for length in lengths]


# What is exact


class Position(nn.Module):
    """A table that is looked up once for all samples."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, WIDTH)

    def forward(self, positions: Tensor) -> Tensor:
        return self.table(positions)


def relative_bias(self: Any, x: Tensor, bias: Tensor | None = None) -> Any:
    """Gives a bias that is the same for all samples beside its result, as T5 does."""
    bias = self.bias[: x.shape[1], : x.shape[1]] if bias is None else bias
    return x + bias @ self.linear(x).tanh(), bias


def tiled(self: Any, x: Tensor, both: Tensor) -> tuple[Tensor, Tensor]:
    """Two copies of the batch, one after the other, as one input."""
    one, two = self.linear(both).tanh().unflatten(0, (2, -1))
    return x * one + two, torch.cat([one, two])


def hands_on(finish: Callable[[Any, Tensor, Any], Tensor], first: Any = None) -> Any:
    """Passes on what the last unit has returned beside its result."""

    def forward(self: Net, x: Tensor) -> Tensor:
        beside = first(x) if first is not None else None
        for unit in self.units:
            x, beside = unit(x, beside)
        return finish(self, x, beside)

    return kind(forward)


def folded(self: Any, x: Tensor, keep: Tensor) -> Tensor:
    """Takes two rows of a mask for each sample."""
    return x + self.linear(x) * keep.unflatten(0, (-1, 2)).all(1)[..., None]


def keeps_small(self: Net, x: Tensor) -> Tensor:
    return self.head(through(self, x, (x[..., 0] < 5).repeat_interleave(2, 0)))


def attention(**options: Any) -> Any:
    return nn.MultiheadAttention(WIDTH, 2, **options)


SequenceFirst = kind(lambda self, x: x + self.attention(x, x, x, need_weights=False)[0], Unit)
Biased = kind(lambda self, x, bias: x + self.attention(x, x, x, attn_mask=bias)[0], Unit)
Lstm = kind(lambda self, x, states=None: self.lstm(x, states), Unit)
NUMBERS: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda y: y.square().sum(),
    "mean": lambda y: y.square().mean(),
    "balance": lambda y: (y.mean((0, 1)) * y.square().mean((0, 1))).sum(),
    "zero": lambda y: (y - y.detach()).mean(),  # only gradients tell that it is a mean
}


def with_numbers(name: str) -> Net:
    """Units give a single number beside their results, which joins the loss."""

    def beside(self: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.linear(x).tanh()
        return y, NUMBERS[name](y)

    def forward(self: Net, x: Tensor) -> Tensor:
        total = x.new_zeros(())
        for unit in self.units:
            x, number = unit(x)
            # A mean counts for its samples, so that what is returned is a sum.
            total = total + number * (len(x) if name in ("mean", "zero") else 1)
        return self.head(x).square().sum() + total

    return kind(forward)(kind(beside, Unit))


def with_mask(chooses: bool, dtype: torch.dtype) -> Net:
    """A mean beside a result, perhaps over what a mask chooses, equally many of each sample."""

    def masked(self: Any, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        y = self.linear(x).tanh()
        return y * mask[:, :, None], (y[mask > 0] if chooses else y).square().mean()

    def forward(self: Net, x: Tensor) -> Tensor:
        mask = (torch.arange(3) < 2).expand(len(x), 3).to(dtype)
        total = x.new_zeros(())
        for unit in self.units:
            x, number = unit(x, mask)
            total = total + number * len(x)
        return self.head(x).square().sum() + total

    return kind(forward)(kind(masked, Unit))


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
        return self.head(self.norm(through(self, self.wte(tokens))))


def lower(length: int) -> Tensor:
    return torch.ones(length, length, dtype=torch.float64).tril()


Masked = kind(lambda self, x: self.head(through(self, x, lower(x.shape[1]))))
Bias = kind(relative_bias, Unit)
TABLE = draw(NUM_SAMPLES, WIDTH)  # a row for each position and none for samples
WORDS = [torch.randint(0, 7, (NUM_SAMPLES, 3)) for _ in range(2)]


class Row(NamedTuple):
    """A model, its samples of each step, the sum of its losses, and options of HetFSDP."""

    module: nn.Module
    samples: Sequence[Tensor]
    loss: Any = squared
    options: dict[str, Any] = {}  # noqa: RUF012 -- nobody writes it


def of_sequences(length: int) -> Row:
    def loss(model: nn.Module, x: Tensor) -> Any:
        return model(x.transpose(0, 1)).square().sum(), len(x)

    net = Net(lambda: SequenceFirst(attention=attention()))
    return Row(net, of_lengths(length, length), loss, {"batch_dim": 1})


def of_mask() -> Row:
    """Its mask's rows are all alike but in one later batch, and one's last sample."""
    samples = of_lengths(3, 3, 3, 3)
    samples[1][1, 2, 0] = samples[3][4, 1, 0] = 9.0
    return Row(kind(keeps_small)(kind(folded, Unit)), samples)


def tied(*units: Any) -> Callable[[], Row]:
    return lambda: Row(Tied(), WORDS, options={"units": units})


EXACT: dict[str, Callable[[], Row]] = {
    "lengths become equal to a batch": lambda: Row(
        Masked(Mixer), of_lengths(11, 5, 2, 3, 1, 4)
    ),
    "lengths are equal to the batch": lambda: Row(Masked(Mixer), of_lengths(5)),
    "sequence first": lambda: of_sequences(7),
    "sequence first, equal lengths": lambda: of_sequences(NUM_SAMPLES),
    "a table as long as the batch": lambda: Row(
        kind(lambda self, x, table: self.units[1](self.units[0](x + table) + table))(Mixer),
        of_lengths(5),
        lambda model, x: squared(model, x, TABLE),
    ),
    "a bias for every sample and head": lambda: Row(
        kind(
            lambda self, x: self.head(
                through(self, x, (x @ x.transpose(1, 2)).repeat_interleave(2, 0))
            )
        )(lambda: Biased(attention=attention(batch_first=True))),
        of_lengths(4, 5),
    ),
    "a mask with rows that are alike at first": of_mask,
    "two copies of the batch": lambda: Row(
        hands_on(
            lambda net, x, both: (
                net.head(x) + both.mean() * 0 + net.head(both.unflatten(0, (2, -1))[1])
            ),
            lambda x: torch.cat([x, x.square()]),
        )(kind(tiled, Unit)),
        of_lengths(4, 5),
    ),
    "states with the batch in the middle": lambda: Row(
        hands_on(lambda net, x, states: net.head(x) + net.head(states[0][-1])[:, None])(
            lambda: Lstm(lstm=nn.LSTM(WIDTH, WIDTH, num_layers=2, batch_first=True))
        ),
        of_lengths(3) * 2,
    ),
    "positions without samples": lambda: Row(
        kind(
            lambda self, x: Net.forward(
                self, x + self.position(torch.arange(x.shape[1])[None])
            )
        )(Mixer, position=Position()),
        of_lengths(4, 5, 2),
        options={"units": [Position, Mixer]},
    ),
    "a bias without samples": lambda: Row(
        hands_on(lambda net, x, bias: net.head(x) + bias.sum())(
            lambda: Bias(bias=nn.Parameter(torch.randn(11, 11)))
        ),
        of_lengths(4, 5, 2),
        options={"units": [Bias]},
    ),
    **{
        f"a {name} beside the result": lambda name=name: Row(
            with_numbers(name), of_lengths(3) * 2, summed
        )
        for name in ("sum", "mean", "zero")
    },
    **{
        f"a mean beside a mask of {dtype}": lambda dtype=dtype: Row(
            with_mask(chooses=False, dtype=dtype), of_lengths(3) * 2, summed
        )
        for dtype in (torch.bool, torch.float64)
    },
    "tied to a unit's embedding": tied(Mixer, "wte"),
    "tied to a unit's head": tied(Mixer, "head"),
    "tied between two units": tied(Mixer, "wte", "head"),
}  # fmt: skip


@both_ways
@pytest.mark.parametrize("name", EXACT)
def test_what_is_odd_is_exact(name: str, recomputes: bool) -> None:
    torch.manual_seed(1)
    row = EXACT[name]()
    check(plan_for(recomputes), row.module, row.samples, row.loss, **row.options)


def test_rows_of_a_mask_that_were_alike_have_to_be() -> None:
    row = of_mask()
    words = "not 10 rows that are alike in dimension 0"
    model = HetFSDP(row.module, plan_for(recomputes=False))
    refuses(model, ValueError, words, row.samples[-1])


# What cannot be shown right, in any precision


def leaks(self: Any, x: Tensor) -> Tensor:
    y = self.linear(x)
    self.kept = y.square().sum()
    return y.tanh()


def appends(self: Any, x: Tensor, memory: Any) -> Tensor:
    memory.append(self.linear(x))
    return x + sum(memory)


def counts(self: Any, x: Tensor) -> Tensor:
    self.calls += 1
    return self.linear(x)


def tells_by_attribute(self: Net, x: Tensor) -> Tensor:
    for unit in self.units:
        unit.mask = x.sum((1, 2), keepdim=True).sigmoid()
    return Net.forward(self, x)


class Counting(Unit):
    """Counts its calls in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    forward = counts


class Memory:
    """Has a state."""

    def __init__(self) -> None:
        self.states: list[Tensor] = []

    def append(self, state: Tensor) -> None:
        self.states.append(state)

    def __iter__(self) -> Any:
        return iter(self.states)


def remembers(make: Callable[[], Any]) -> Net:
    return kind(lambda self, x: self.head(through(self, x, make())))(kind(appends, Unit))


def hooked() -> Net:
    """Reads what a hook has caught inside of a unit."""
    caught: list[Tensor] = []

    def forward(self: Net, x: Tensor) -> Tensor:
        caught.clear()
        return Net.forward(self, x) + caught[0].square().sum()

    net = kind(forward)(Leaking)
    net.units[0].linear.register_forward_hook(lambda *call: caught.append(call[2]))
    return net


def spread(x: Tensor) -> Tensor:
    """A loss of the samples' spread, which is not a number for a single one."""
    return x.square().sum() + len(x) * x.std(0).sum()


def balanced(x: Tensor) -> Tensor:
    """A load-balancing loss, computed outside of units from what they return."""
    return x.square().sum() + NUMBERS["balance"](x)


def of_output(finish: Callable[[Tensor], Tensor]) -> Net:
    return kind(lambda self, x: finish(Net.forward(self, x)))(Mixer)


Leaking = kind(leaks, Unit)
Told = kind(lambda self, x: Mixer.forward(self, x) * self.mask, Mixer, mask=None)
NO_SUM = "no sum or mean over samples"
MIXES: dict[str, Callable[[Tensor], Tensor]] = {
    "a load-balancing loss outside": balanced,
    "a loss of the spread": spread,
    "without the first": lambda x: x[1:].square().sum(),
    "every other": lambda x: x[::2].square().sum(),
}
REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "samples in a dimension that nobody named": (
        lambda: Net(lambda: SequenceFirst(attention=attention())),
        r"unit 'units.0'.*batch_dim=",
    ),
    "a load-balancing loss": (
        lambda: with_numbers("balance"),
        r"neither the same, nor the sum|a mean, perhaps only|no sum or mean over",
    ),
    "samples mixed outside of units": (
        lambda: kind(
            lambda self, x: self.head(self.units[1]((y := self.units[0](x)) - y.mean(0)))
        )(Mixer),
        "mixes samples",
    ),
    "each mixed with the one before it": (
        lambda: kind(lambda self, x: Net.forward(self, x + x[torch.arange(len(x)) // 2 * 2]))(
            Mixer
        ),
        "depends for one sample on the other samples",
    ),
    **{what: (lambda mix=mix: of_output(mix), NO_SUM) for what, mix in MIXES.items()},
    "an attribute read outside": (
        lambda: kind(lambda self, x: Net.forward(self, x) + sum(u.kept for u in self.units))(
            Leaking
        ),
        "'units.0'.*did not return is used outside",
    ),
    "a hook's catch": (hooked, "'units.0'.*did not return is used outside"),
    "a mask told by an attribute": (
        lambda: kind(tells_by_attribute)(Told),
        "'units.0' uses a tensor.*not among its arguments",
    ),
    "a list": (lambda: remembers(list), "'units.0' changes a list or dict"),
    "an object with a list": (lambda: remembers(Memory), "'units.0' changes a Memory"),
    "a buffer": (lambda: Net(Counting), "buffer 'units.0.calls' is written"),
    "noise outside": (
        lambda: of_output(lambda x: x + torch.randn_like(x)),
        "random numbers outside of units",
    ),
}


@both_ways
@every_precision
@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_shown_right_is_refused(
    what: str, precision: Precision, recomputes: bool
) -> None:
    make, words = REFUSED[what]
    # Code outside of units may mix what is in one round, so that only backward refuses it.
    is_outside = what in MIXES or what == "samples mixed outside of units"
    model = precision.wrap(make(), plan_for(recomputes, num_rounds=1 + is_outside))
    call = partial(precision.call, model)
    [x] = of_lengths(NUM_SAMPLES if "dimension" in what else 3)
    if is_outside:
        call = partial(backward_in_rounds, model, call)
    refuses(model, ValueError, words, x, call=call)


@pytest.mark.parametrize("what", MIXES)
def test_code_outside_of_units_may_mix_what_one_rank_has_in_one_round(what: str) -> None:
    plan = plan_for(recomputes=False)
    Beside(of_output(MIXES[what]), plan, loss=summed).step(*of_lengths(3))


# And what is refused in float64


def of_targets(which: Callable[[Tensor], Tensor]) -> nn.Module:
    """A mean over targets that count, as their values say."""

    def forward(self: Unit, x: Tensor, y: Tensor) -> Tensor:
        return (self.linear(x) - y)[which(y)].square().mean()

    units = iter([linear, kind(forward, Unit)])
    return kind(lambda self, x: self.units[1](self.units[0](x), x.abs()))(lambda: next(units)())


def at_least_one(self: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """A sum over what a mask chooses, and how much that is, or 1."""
    return (self.linear(x) * (x > 0.5)).square().sum(), (x > 0.5).sum().clamp(min=1)


def counts_outside(self: Net, x: Tensor) -> tuple[Tensor, Tensor]:
    chosen = x[..., :1] > 0.5
    count = torch.maximum(chosen.sum(), torch.ones_like(chosen.sum()))
    return (Net.forward(self, x) * chosen).square().sum(), count


PERHAPS = r"unit 'units.1': output 0 is a mean, perhaps only"
MASKED = r"'units.0': output 1 is a mean, perhaps only"
BOUNDED = r" returns a single number .* within bounds"
REFUSED_IN_FLOAT64: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "no NaN": (lambda: of_targets(lambda y: ~y.isnan()), PERHAPS),
    "above zero": (lambda: of_targets(lambda y: y > 0), PERHAPS),
    "not negative": (lambda: of_targets(lambda y: y >= 0), PERHAPS),
    "rows that are not zero": (lambda: of_targets(lambda y: y.abs().sum(-1) > 0), PERHAPS),
    "a mean over a mask of bool": (lambda: with_mask(chooses=True, dtype=torch.bool), MASKED),
    "of float64": (lambda: with_mask(chooses=True, dtype=torch.float64), MASKED),
    "of int64": (lambda: with_mask(chooses=True, dtype=torch.int64), MASKED),
    # Of integers nobody knows what does not count.
    "beside int64": (lambda: with_mask(chooses=False, dtype=torch.int64), MASKED),
    "a unit's count of at least one": (
        lambda: kind(lambda self, x: self.units[0](x))(kind(at_least_one, Unit), 1),
        f"unit 'units.0'{BOUNDED}",
    ),
    "a count of at least one": (lambda: kind(counts_outside)(Mixer), rf"model\(...\){BOUNDED}"),
}


@pytest.mark.parametrize("what", REFUSED_IN_FLOAT64)
def test_what_values_may_change_later_is_refused(what: str) -> None:
    make, words = REFUSED_IN_FLOAT64[what]
    module = make()
    units = [f"units.{i}" for i in range(len(module.units))]  # type: ignore[arg-type]
    model = HetFSDP(module, plan_for(recomputes=False), units=units)
    refuses(model, ValueError, words, *of_lengths(3))


def test_a_plain_number_that_would_be_one_microbatchs_is_refused() -> None:
    plan = Plan.by_hand(microbatch_sizes=[2], num_microbatches=[3], state_shares=[1.0])
    model = HetFSDP(Net(Mixer), plan, loss_fn=lambda y: (y.square().sum(), len(y)))
    words = "returns a plain number that depends on how many"
    refuses(model, ValueError, words, draw(6, 3, WIDTH))


def test_a_result_for_all_samples_that_comes_to_differ_between_microbatches_is_refused() -> (
    None
):
    longest = kind(lambda self, x, lengths: (self.linear(x), lengths.max()), Unit)

    def forward(self: Net, x: Tensor, lengths: Tensor) -> Tensor:
        x, most = self.units[0](x, lengths)
        return x[:, : int(most)].square().sum()

    model = HetFSDP(kind(forward)(longest, 1), plan_for(recomputes=False), units=["units.0"])
    [x], lengths = of_lengths(3), torch.full((NUM_SAMPLES,), 3)
    model.backward(model(x, lengths), NUM_SAMPLES)
    model.zero_grad()
    lengths[:2] = 1
    refuses(
        model, ValueError, r"output of shape \(\) .* differs between microbatches", x, lengths
    )


# What a model returns as its loss and its number of tokens


def pair_of(pair: Callable[[Tensor], Any]) -> Net:
    """Returns a loss and what goes with it, given its errors by sample."""
    return kind(lambda self, x: pair(Net.forward(self, x).square().sum((1, 2))))()


NO_SUMS = {
    "a mean": (lambda e: (e.mean(), 1), "the loss is what the model returns"),
    "a mean and a tensor": (
        lambda e: (e.mean(), torch.tensor(len(e))),
        "the loss is what the model returns",
    ),
    "one more": (
        lambda e: (e.sum(), len(e) + 1),
        "the number of tokens is what the model returns, 3 here",
    ),
    "a tensor, one more": (
        lambda e: (e.sum(), torch.tensor(len(e) + 1)),
        "the number of tokens is what the model returns, 3 here",
    ),
    "at least one": (
        lambda e: (e.sum(), (e > 0).sum().clamp(min=1).double()),
        "kept within bounds",
    ),
    "one in place of zero": (
        lambda e: (e.sum(), torch.where((e > 0).sum() == 0, 1, (e > 0).sum())),
        "kept within bounds",
    ),
}


@pytest.mark.parametrize("what", NO_SUMS)
def test_a_pair_that_does_not_add_up_is_refused_where_a_batch_is_cut(what: str) -> None:
    pair, words = NO_SUMS[what]
    whole = Plan.by_hand(microbatch_sizes=[2], state_shares=[1.0])
    assert HetFSDP(pair_of(pair), whole, units=UNITS).forward_backward(draw(2, 3, WIDTH))
    with pytest.raises(ValueError, match=words):
        HetFSDP(pair_of(pair), PAIRS, units=UNITS).forward_backward(draw(4, 3, WIDTH))


def test_a_count_that_is_kept_above_zero_after_the_model_is_warned_of() -> None:
    model = HetFSDP(Net(), PAIRS, units=UNITS)
    for counted in (torch.ones(2), torch.zeros(2)):
        errors = model(draw(2, 3, WIDTH)).square().sum((1, 2)) * counted
        with nullcontext() if counted.any() else pytest.warns(UserWarning, match="has 1 token"):
            model.backward(errors.sum(), counted.sum().clamp(min=1))


# Rounding


def split_k(self: Any, x: Tensor) -> Tensor:
    """A product that is summed in another order for another number of rows, as kernels do."""
    parts = 1 + x.shape[0] % 3
    pairs = zip(x.chunk(parts, -1), self.weight.chunk(parts, 1), strict=True)
    return sum(a @ b.T for a, b in pairs)  # type: ignore[return-value]


def split_k_net(balance: float) -> Net:
    """Sums squares in float32, with a little load balancing if ``balance``."""

    def forward(self: Net, x: Tensor) -> Tensor:
        for unit in self.units:
            x = x + unit(x).relu()
        x = x.float()
        return x.square().sum() * (1 + balance * x.mean((0, 1)).square().sum())

    make = kind(split_k, Unit)
    return kind(forward)(lambda: make(weight=nn.Parameter(torch.randn(32, 32) / 32**0.5)), 3)


@pytest.mark.parametrize("name", one_in(3, ["bf16", "fp16", "autocast"]))
def test_rounding_is_told_from_a_thousandth_of_mixing(name: str) -> None:
    precision, units = PRECISIONS[name], [f"units.{i}" for i in range(3)]
    for seed in range(5):
        torch.manual_seed(seed)
        x = torch.randn(NUM_SAMPLES, 3, 32)
        fine, mixed = (
            precision.wrap(split_k_net(balance), IN_ROUNDS, units=units)
            for balance in (0.0, 1e-3)
        )
        backward_in_rounds(fine, precision.call, fine, x)
        call = partial(backward_in_rounds, mixed, precision.call, mixed)
        refuses(mixed, ValueError, NO_SUM, x, call=call)


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


def classifier(reduction: str, balance: float = 0.0) -> Any:
    """The loss of valid tokens, with a little load balancing if ``balance``."""

    def forward(self: Net, x: Tensor, labels: Tensor) -> Tensor:
        logits = Net.forward(self, x).flatten(0, 1)
        loss = F.cross_entropy(logits, labels.flatten(), reduction=reduction)
        return loss + balance * logits.softmax(-1).mean(0).square().sum()

    return kind(forward)(Mixer)


@pytest.mark.parametrize("first", [[0, 1, 2], [0, 1, -100], [-100] * 3])
def test_a_mean_over_valid_tokens_is_no_mixture(first: list[int]) -> None:
    targets = torch.tensor([first, [-100, 1, -100], [2, 2, -100], [-100] * 3, [0, 1, 1]])

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        num_valid = (targets != -100).sum()
        return model(x, labels=y) * num_valid, num_valid

    Beside(classifier("mean"), plan_for(recomputes=False), loss=loss).step(
        *of_lengths(3), targets
    )


@pytest.mark.parametrize("third", [[0, 1, 1], [-100] * 3])
def test_a_little_load_balancing_beside_a_mean_over_valid_tokens_is_refused(
    third: list[int],
) -> None:
    targets = torch.tensor([[0, -100, -100], [2, 1, -100], third, [0, 1, 2], [1, 1, 1]])

    def loss(model: HetFSDP, x: Tensor) -> Tensor:
        return model(x, targets) * NUM_SAMPLES

    for seed in range(4):
        torch.manual_seed(seed)
        [x] = of_lengths(3)
        fine, mixed = (HetFSDP(classifier("mean", b), IN_ROUNDS) for b in (0.0, 1e-3))
        backward_in_rounds(fine, loss, fine, x)
        call = partial(backward_in_rounds, mixed, loss, mixed)
        refuses(mixed, ValueError, NO_SUM, x, call=call)


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_sums_and_means_over_samples_take_six_runs(
    reduction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs, calls = [], []
    forward, run = Attempt._forward, Mixer.forward

    def noted(attempt: Attempt, name: str, *args: Any, **kwargs: Any) -> Any:
        runs.append(name)
        return forward(attempt, name, *args, **kwargs)

    def counted(unit: Mixer, *args: Any, **kwargs: Any) -> Tensor:
        calls.append(unit)
        return run(unit, *args, **kwargs)

    monkeypatch.setattr(Attempt, "_forward", noted)
    monkeypatch.setattr(Mixer, "forward", counted)
    model = HetFSDP(classifier(reduction), plan_for(recomputes=False))
    model(*of_lengths(3), labels=torch.ones(NUM_SAMPLES, 3, dtype=torch.long))
    assert runs[:6] == ["small", "large", "rest", "one", "other", "again"]
    assert all("times" in each for each in runs[6:])  # floating arguments, zero and large
    # Each of two units: for two samples, for three and for parts of them; in the runs that
    # follow, for changed samples alone; and for the three microbatches of the step.
    assert len(calls) == 2 * (1 + 4 + len(runs[6:]) + 3)


# A mask in one step and none in another


def sometimes_masked(self: Net, x: Tensor) -> Tensor:
    """Leaves the mask out where no sample needs one."""
    needs_mask = bool((x[:, 0, 0] > 1).any())
    mask = (x[:, :, :1] < 1).to(x.dtype) * x[:, None, :, 0] if needs_mask else None
    return self.head(through(self, x, mask))


@both_ways
@pytest.mark.parametrize("first", [False, True])
def test_masks_that_depend_on_values(first: bool, recomputes: bool) -> None:
    torch.manual_seed(0)  # of other samples a probe may show that they decide on each other's
    both = Beside(kind(sometimes_masked)(Mixer), plan_for(recomputes), loss=squared)
    for step in range(4):
        x = draw(NUM_SAMPLES, 3 if step < 2 else NUM_SAMPLES, WIDTH).clamp(max=0.9)
        if (step % 2 == 0) == first:
            x[step, 0, 0] = 2.0  # one sample of another microbatch at each step
            x[(step + 1) % 5, 0, 0] = 2.0
        both.step(x)


@pytest.mark.parametrize(
    ("sample", "rolled"),
    [
        ([1, 1, 0, 0], [1, 1, 1, 0]),  # padding does not come to the front
        ([0, 0, 0, 1], [1, 0, 0, 0]),  # nothing would be left of it
        ([0, 1, 2, 3], [3, 0, 1, 2]),
    ],
)
def test_a_mask_in_a_probe_begins_as_it_did(sample: list[int], rolled: list[int]) -> None:
    assert _rolled(torch.tensor([sample]), 1, 1).tolist() == [rolled]


# Batch norm


def normed(self: Any, x: Tensor) -> Tensor:
    return self.norm(self.linear(x).transpose(1, 2)).transpose(1, 2).tanh()


def norms_first(self: Net, x: Tensor) -> Tensor:
    return Net.forward(self, self.norm(x.transpose(1, 2)).transpose(1, 2))


@both_ways
@pytest.mark.parametrize("world_size", [1, 3])
@on_ranks()
def test_batch_norm_follows_the_order_of_samples(
    rank: int, world_size: int, recomputes: bool
) -> None:
    torch.manual_seed(3)
    unit = kind(normed, Unit)
    reference = kind(norms_first)(
        lambda: unit(norm=nn.BatchNorm1d(WIDTH)), norm=nn.BatchNorm1d(WIDTH, momentum=None)
    )
    samples = of_lengths(3, 3, 3)
    plan = plan_for(recomputes, world_size=world_size)
    model = check(plan, reference, samples, units=(unit, "head"))
    expected = dict(reference.named_buffers())
    for fqn, buffer in model.named_buffers():
        torch.testing.assert_close(buffer, expected[fqn], rtol=1e-12, atol=1e-14, msg=fqn)
    for each in (model, reference):
        each.eval()
    with torch.no_grad():
        torch.testing.assert_close(model(samples[0]), reference(samples[0]))
