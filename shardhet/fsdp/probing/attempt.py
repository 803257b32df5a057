"""All runs of one probe on one rank, under one assumption about the model's arguments."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import nan
from typing import Any

import torch
from torch import Tensor

from shardhet.comm import devices
from shardhet.comm.failure import LostPeerError
from shardhet.fsdp.microbatch.batching import BatchAxis, Join, Rule, named_leaves
from shardhet.fsdp.microbatch.chosen import rows_in, with_samples
from shardhet.fsdp.microbatch.loss import LossUsedError
from shardhet.fsdp.microbatch.signature import ModelCall, lists_of_entries
from shardhet.fsdp.microbatch.surroundings import (
    HIGH,
    LOW,
    MIDDLE,
    NUMBERS,
    CheckpointedError,
    HostGenerators,
    restored_random_state,
    tell_of_caches,
)
from shardhet.fsdp.probing.comparing import (
    CACHED,
    DRAWS,
    KEPT,
    UNFORESEEN,
    Cut,
    Law,
    Refusal,
    are_close,
)
from shardhet.fsdp.probing.gradients import MIXED, OUTSIDE, GradientCut, Gradients, go_together
from shardhet.fsdp.probing.module_state import Number, kept_of_samples
from shardhet.fsdp.probing.order import FAILED, GatherFailed, PeerFailed
from shardhet.fsdp.probing.probe import Place, Probe, ProbedModel
from shardhet.fsdp.probing.rules import (
    LARGE,
    OTHER_PARTS,
    PARTS,
    SMALL,
    Axes,
    empty_output_of,
    mixed,
    rows_of,
    without_samples,
)
from shardhet.fsdp.probing.watch import StaysUnsharded
from shardhet.records.layout import Span

# Further runs on samples of the large one, and runs that others are the parts of.
RUNS = {"rest": (2,), "one": (0,), "other": (1, 2), "again": (0, 1, 0)}
Way = tuple[str, tuple[str, str], tuple[Span, Span]]
CUTS: Sequence[Way] = (
    ("large", ("small", "rest"), PARTS),
    ("large", ("one", "other"), OTHER_PARTS),
    # A sample that is there twice: labels of a probe are often all unlike.
    ("again", ("small", "one"), PARTS),
)
# Of a mean over what counts in samples, one more.
SECOND = {"second": (1,)}
CUTS_OF_MEANS = (*CUTS, ("other", ("second", "rest"), (Span(0, 1), Span(1, 2))))

# One forward on all ranks: the result of the call on this one, and the segments.
RunOnce = Callable[[Probe | None, Callable[[], Any]], tuple[Any, Any]]
RunModule = Callable[[tuple[Any, ...], dict[str, Any], tuple[Any, ...]], Any]


@dataclass(eq=False, kw_only=True)
class Attempt:
    """All runs of one probe; ``axes`` says which arguments are assumed to hold samples."""

    model: ProbedModel
    run_once: RunOnce
    call: ModelCall | None
    whole: ModelCall | None = None  # with all tokens, if ``call`` has few
    is_of_few: bool  # whether some rank's has
    axes: Axes
    run_module: RunModule
    has_gradients: bool
    splits: bool
    is_alone: bool  # whether no other rank computes

    def __post_init__(self) -> None:
        self.segments: Any = ()
        self.is_refused = False  # whether the error is one of HetFSDP's, not the model's own
        self.reductions: dict[str, frozenset[Join] | None] = {}  # see ``Findings``
        self._is_cut = self.has_gradients and self.splits
        self._outputs: dict[str, Any] = {}  # by run
        self._leaves: dict[str, dict[str, Any]] = {}  # of them, by place
        self._unlike: set[str] = set()  # runs whose calls have arguments of other kinds
        self._gradients: dict[str, dict[Place, Gradients]] = {}  # that were asked for, by run
        self._rows: dict[str, list[BatchAxis]] = {}  # outputs with rows for samples
        self._numbers: Sequence[str] = ()  # where the output has what has none
        self._is_in_forward = False  # in which others learn of what is raised
        self._generators = HostGenerators()
        self.probe: Probe | None = None
        if self.call is not None:
            self.probe = Probe(self.model, has_gradients=self.has_gradients, splits=self.splits)
            self.probe.is_behind = self.call.is_behind

    def run(self) -> BaseException | None:
        """The error found on this rank; None if there is none here.  Collective."""
        try:
            with restored_random_state(self.model.device), self._generators.restored():
                _, self.segments = self._forward("small", range(SMALL), kind="small")
                _check_draws(self)
                self._forward("large", range(LARGE), kind="large")
                if self.is_of_few:
                    _check_whole(self)
                self._check_outputs()
                _check_kept(self)
                if self.model.caches.is_asked_for:
                    _check_caches(self)
                    tell_of_caches()
        except PeerFailed:
            return None
        except StaysUnsharded as found:
            return found
        except Refusal as refusal:
            self.is_refused = True
            drawn = "" if self.probe is None else self.probe.watcher.drawn
            return ValueError(UNFORESEEN.format(drawn, refusal)) if drawn else refusal.error
        except LostPeerError:
            raise
        except Exception as error:
            if not self._is_in_forward:
                self._any_rank(FAILED)
            self.is_refused = isinstance(error, LossUsedError | CheckpointedError)
            if any(words in str(error) for words in _NO_GRAPH):
                self.is_refused = True
                return ValueError(_GRADIENT_INSIDE.format(error))
            return error
        return None

    def _forward(
        self,
        name: str,
        samples: Sequence[int],
        *,
        kind: str = "rest",
        word: int = LOW,
        factor: float = 1.0,
        asked: Sequence[str] = (),
    ) -> tuple[Any, Any]:
        """One forward on ``samples``, of a kind of ``Probe.running``: "whole" has all tokens.

        Generators of the host draw numbers near that of ``word``, floating arguments of the
        first sample are multiplied by ``factor``, and gradients are kept of the outputs that
        are ``asked`` for.
        """

        def run() -> Any:
            call = self.whole if kind == "whole" else self.call
            assert call is not None
            assert self.probe is not None
            args, kwargs, loss_inputs = with_samples(call, self.axes, samples, factor)
            self._generators.begin(word)
            self.probe.watcher.drawn_one = NUMBERS[word] if self.splits else 0.5
            given = rows_in(call, self.axes, (args, kwargs, loss_inputs))
            with self.probe.running(kind, given, samples):
                output = self.run_module(args, kwargs, loss_inputs)
                if kind != "plain":
                    self.probe.check_output(output)
                if kind == "large" and self.has_gradients:
                    self.probe.repeat()
                self._leaves[name] = named_leaves(output)
                for place in asked:
                    self.probe.keep_gradients(place, self._leaves[name][place])
            self._gradients[name] = self.probe.gradients
            return output

        self._is_in_forward = True
        self._outputs[name], segments = self.run_once(self.probe, run)
        self._is_in_forward = False
        if self.probe is not None and self.probe.is_unlike:
            self._unlike.add(name)
        return self._outputs[name], segments

    @contextmanager
    def _together(self) -> Iterator[None]:
        """A context whose ``Refusal`` on one rank is that of all.  Collective."""
        refusal = None
        try:
            yield
        except Refusal as found:
            refusal = found
        if self._any_rank(refusal is not None):
            raise PeerFailed if refusal is None else refusal

    def _check_outputs(self) -> None:
        """Find the laws of outputs; raise if a row depends on the rank's other samples."""
        with self._together():
            if self.call is not None:
                small, large = self._leaves["small"], self._leaves["large"]
                rows = rows_of(small, large, is_alone=self.is_alone)
                if self._is_cut:
                    self._rows, self._numbers = rows, without_samples([small, large])
        own = self._is_cut and self.probe is not None and self.probe.own
        if not self._any_rank(bool(self._rows or self._numbers or own)):
            return
        for name, samples in RUNS.items():
            self._forward(name, samples)
        with self._together():
            self._check_rows(CUTS)
            if self._numbers:
                self._numbers = without_samples([*self._leaves.values()])
                ways = [self._laws(way) for way in CUTS]
                for at in self._numbers:
                    self.reductions[at] = frozenset.intersection(*(each[at] for each in ways))
        self._check_gradients()
        if self._any_rank(_has_values(self)):
            _try_values(self)

    def _check_rows(self, ways: Sequence[Way]) -> None:
        """Raise if outputs that have a row for each sample have other ones in some runs."""
        pairs = [
            (name, part, span)
            for name, parts, spans in ways
            for part, span in zip(parts, spans, strict=True)
            if self._unlike.isdisjoint((name, part))
        ]
        for at, axes in self._rows.items():
            if not any(all(self._has_rows(at, axis, *each) for each in pairs) for axis in axes):
                what = mixed(self._named(at), self._leaf("large", at))
                raise Law.INDEPENDENT.refusal(f"{what} of the batch, by code outside of units")

    def _has_rows(self, at: str, axis: BatchAxis, name: str, part: str, span: Span) -> bool:
        """Whether an output for some samples has the rows of these in the output for all, or
        rows of another length, as of the longest of the samples.
        """
        assert self.probe is not None
        whole, some = self._leaf(name, at), self._leaf(part, at)
        is_like = some.shape == axis.shape(whole.shape, span.numel)
        return not is_like or are_close(
            axis.narrow(whole, span, LARGE), some, self.probe.watcher.eps
        )

    def _check_gradients(self) -> None:
        """Find what numbers are that are neither sums nor means over samples; raise if code
        outside of units has a backward of its own that mixes samples.
        """
        unclear = [at for at, law in self.reductions.items() if not law]
        leaves = {at: torch.as_tensor(self._leaf("large", at)) for at in unclear}
        scalars = [at for at, leaf in leaves.items() if leaf.requires_grad and not leaf.dim()]
        self.reductions |= dict.fromkeys(unclear)
        own = [] if self.probe is None else self.probe.own
        if not self._any_rank(bool(scalars or own)):
            return
        asked = [*scalars, *(place for place in own if isinstance(place, str))]
        runs = {"small": range(SMALL), "large": range(LARGE), **RUNS, **SECOND}
        for name, samples in runs.items():
            self._forward(name, samples, asked=asked)
        with self._together():
            means = [at for at in scalars if _is_mean(self, at)]
            self.reductions |= dict.fromkeys(means, frozenset[Join]())
            if len(means) < len(scalars) and self.call and lists_of_entries(self.call):
                raise Law.ADDS_UP.refusal("model(...): a loss is no sum over samples")
            for place in own:
                is_independent = place in self._rows or not isinstance(place, str)
                law = {Join.SUM} if is_independent else self.reductions.get(str(place))
                ways = [way for way in CUTS[:2] if law and self._have_kept(way, place)]
                cuts = [self._cut(way, place) for way in ways]
                if not all(each.add_up(as_mean=law == {Join.MEAN}) for each in cuts):
                    raise Law.GRADIENTS.refusal(f"{self._named(place)}{OUTSIDE}{MIXED}")

    def _have_kept(self, way: Way, place: Place) -> bool:
        return all(place in self._gradients[each] for each in (way[0], *way[1]))

    def _cut(self, way: Way, place: Place) -> GradientCut:
        """Gradients of what is at a place, in some runs."""
        assert self.probe is not None
        whole, *parts = [self._gradients[each].get(place, {}) for each in (way[0], *way[1])]
        bar = min(64 * max(self.probe.watcher.eps, 1e-12), 3e-2)
        rules = self.probe.rules  # of units' results; what else has gradients is shared

        def rule_of(key: Any) -> Rule:
            return rules[key[0]].outputs[key[1]] if isinstance(key, tuple) else Join.SHARED

        return GradientCut(whole, parts, way[2], rule_of, bar)

    def _any_rank(self, flag: float) -> bool:
        """Whether it is set on any rank.  Raises ``PeerFailed`` if it is ``FAILED`` on one."""
        rows = self.model.control.exchange([flag, 0.0, 0.0, 0.0])  # as visits are told
        flags = [row[0] for row in rows]
        if FAILED in flags and flag != FAILED:
            raise PeerFailed
        return any(flags)

    def _leaf(self, name: str, at: str) -> Any:
        return self._leaves[name].get(at, nan)

    def _number(self, name: str, at: str) -> Tensor:
        """What is without samples in the output of a run, in float64."""
        return torch.as_tensor(self._leaf(name, at)).detach().double()

    def _named(self, place: Place) -> str:
        if not isinstance(place, str):
            return f"an argument of unit {place[0].fqn!r}"
        return f"model(...): output {[*self._leaves['large']].index(place)}"

    def _laws(self, way: Way, amplified: float = 1.0) -> dict[str, frozenset[Join]]:
        """Of each number, which laws it follows in these runs."""
        found = {}
        for at in self._numbers:
            one, *parts = [self._number(name, at) for name in (way[0], *way[1])]
            found[at] = frozenset(Cut(one, parts, way[2]).reductions(self._eps * amplified))
        return found

    @property
    def _eps(self) -> float:
        """Epsilon of the narrowest dtype of a loss; float32's if one is computed from that."""
        leaves = [self._leaf("large", at) for at in self._numbers]
        tensors = [each for each in leaves if isinstance(each, Tensor)]
        dtypes = [each.dtype for each in tensors if each.is_floating_point()]
        computed = min(
            self.probe.watcher.eps if self.probe else 0.0, torch.finfo(torch.float32).eps
        )
        return max((max(torch.finfo(each).eps, computed) for each in dtypes), default=0.0)


def empty_output(attempt: Attempt) -> bytes:
    """The output for no samples, on the meta device, pickled."""
    small, large = attempt._outputs["small"], attempt._outputs["large"]
    return empty_output_of(small, large, attempt._outputs.get("whole", small))


def _check_whole(attempt: Attempt) -> None:
    """Raise if units are called in another way for all tokens of a sample."""
    _, segments = attempt._forward("whole", (0,), kind="whole")
    with attempt._together():
        if segments != attempt.segments or "whole" in attempt._unlike:
            raise Law.INDEPENDENT.refusal("model(...): few tokens are computed otherwise")


def _is_mean(attempt: Attempt, at: str) -> bool:
    """Whether a number is a mean over what counts in each sample, such as valid tokens."""
    cuts = {way: attempt._cut(way, at) for way in CUTS_OF_MEANS}
    shares = [
        cut.share([float(attempt._number(x, at)) for x in (way[0], *way[1])], attempt._eps)
        for way, cut in cuts.items()
    ]
    return None not in shares and go_together(shares, cuts[CUTS[0]].bar)


def _check_kept(attempt: Attempt) -> None:
    """Raise if what a forward keeps of its samples changes what the next one computes."""
    kept: dict[Number, Any] = {}
    if attempt.probe is not None and attempt.has_gradients and not attempt.is_alone:
        values = attempt.probe.values
        kept = kept_of_samples(values["small"], values["large"], attempt.probe.watcher.eps)
    if not attempt._any_rank(bool(kept)):
        return
    if attempt.probe is not None:
        attempt.probe.begins_with = kept
    attempt._forward("afresh", range(SMALL))
    with attempt._together():
        if attempt.probe is not None:
            attempt.probe.begins_with = {}
            names = ", ".join(".".join(filter(None, key)) for key in kept)
            refusal = Law.REPEATS.refusal(KEPT.format(names))
            _check_same(attempt, "small", "afresh", refusal)


def _has_values(attempt: Attempt) -> bool:
    """Whether any argument holds floating values of samples."""
    pairs = zip(() if attempt.call is None else attempt.call.leaves, attempt.axes, strict=False)
    return any(axis is not None and leaf.is_floating_point() for leaf, axis in pairs)


def _check_same(attempt: Attempt, one: str, other: str, refusal: Refusal) -> None:
    """Raise it unless what a run returns is the same in another, up to rounding."""
    if attempt.probe is None:
        return
    eps, ones, others = attempt.probe.watcher.eps, attempt._leaves[one], attempt._leaves[other]
    is_same = other == "plain" or ones.keys() == others.keys()  # with caches there are more
    for at, each in ones.items():
        if isinstance(each, Tensor):
            like = others.get(at)
            is_same &= isinstance(like, Tensor) and are_close(each, like, eps)
    if not is_same:
        raise refusal


def _check_draws(attempt: Attempt) -> None:
    """Raise if the small forward depends on numbers that the host's generators draw."""
    drawn = attempt._generators.drawn()
    if attempt.splits and attempt.probe is not None and attempt.probe.watcher.has_drawn_one:
        drawn.append("torch's generator outside of units (perhaps layers skipped at random)")
    if not attempt._any_rank(bool(drawn)):
        return
    found = Law.REPEATS.refusal(DRAWS.format(" and ".join(drawn) or "a generator"))
    for name, word in (("middle", MIDDLE), ("high", HIGH)):
        _, segments = attempt._forward(name, range(SMALL), kind="small", word=word)
        with attempt._together():
            if segments != attempt.segments and drawn:
                raise found
            _check_same(attempt, "small", name, found)


def _check_caches(attempt: Attempt) -> None:
    """Raise if the model computes something else with the caches that are switched off.

    It is called with samples rolled along their other dimension: positions that begin anew
    within a row are among them if positions are passed at all.
    """
    first = 0 if attempt.call is None else attempt.call.num_samples
    rolled = range(first, first + SMALL)
    attempt._forward("rolled", rolled)
    with attempt.model.caches.on():
        attempt._forward("plain", rolled, kind="plain")
    with attempt._together():
        _check_same(attempt, "rolled", "plain", Refusal(ValueError(CACHED)))


def _try_values(attempt: Attempt) -> None:
    """Raise if samples mix once the first is zero, or large; note which numbers are no sums
    then.  Of a mean, values may choose what it is over.
    """
    # An accelerator does not outlive a value that is an index and too large.
    is_on_host = devices.is_on_host(attempt.model.device)
    for factor in (0.0, 2.0**10) if is_on_host else (0.0,):
        one, large = f"one times {factor}", f"large times {factor}"
        try:
            attempt._forward(one, (0,), factor=factor)
            attempt._forward(large, range(LARGE), factor=factor)
        except (LostPeerError, GatherFailed):
            raise
        except (Exception, Refusal, StaysUnsharded, PeerFailed):
            continue  # the model does not take such values
        way = (large, (one, "other"), OTHER_PARTS)
        found = attempt._laws(way, max(factor, 1.0))
        for at, law in attempt.reductions.items():
            if law and law - {Join.MEAN} - found[at]:
                attempt.reductions[at] = None
        with attempt._together():
            attempt._check_rows([way])


# What torch.autograd.grad says of a unit's result, which has no graph in a probe.
_NO_GRAPH = ("to not have been used in the graph", "does not have a grad_fn")
_GRADIENT_INSIDE = (
    "model(...): its forward asks for a gradient (torch.autograd.grad, or backward) through "
    "units ({}). Let one unit hold all of what is differentiated there: HetFSDP(units=[...])."
)
