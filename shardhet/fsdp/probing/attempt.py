"""All runs of one probe on one rank, under one assumption about the model's arguments."""

from collections.abc import Callable, Iterable, Sequence
from math import nan
from typing import Any

import torch
from torch import Tensor

from shardhet.comm import devices
from shardhet.comm.failure import LostPeerError
from shardhet.fsdp.microbatch.batching import BatchAxis, Join, named_leaves
from shardhet.fsdp.microbatch.caches import tell_of_caches
from shardhet.fsdp.microbatch.chosen import rows_in, with_samples
from shardhet.fsdp.microbatch.layered import tensors_in
from shardhet.fsdp.microbatch.loss import LossUsedError
from shardhet.fsdp.microbatch.root_dropout import CheckpointedError
from shardhet.fsdp.microbatch.signature import ModelCall
from shardhet.fsdp.probing.apart import Apart, outputs_apart, problem_of_pairs, without_samples
from shardhet.fsdp.probing.comparing import (
    Cut,
    are_close,
    are_numbers_equal,
    is_mean_over_some,
)
from shardhet.fsdp.probing.law import Law, Refusal
from shardhet.fsdp.probing.module_state import kept_of_samples
from shardhet.fsdp.probing.order import FAILED, GatherFailed, PeerFailed
from shardhet.fsdp.probing.probe import Probe, ProbedModel
from shardhet.fsdp.probing.rules import (
    LARGE,
    OTHER_PARTS,
    PARTS,
    SMALL,
    Axes,
    empty_output_of,
    mixed,
)
from shardhet.fsdp.probing.watch import StaysUnsharded
from shardhet.fsdp.sharding.host_draws import HIGH, LOW, MIDDLE, HostGenerators
from shardhet.fsdp.sharding.seeds import restored_random_state
from shardhet.records.layout import Span

# Further runs on samples of the large one, and runs that others are the parts of.
RUNS = {"rest": (2,), "one": (0,), "other": (1, 2), "again": (0, 1, 0)}
Runs = tuple[str, tuple[str, str], tuple[Span, Span]]
CUTS: Sequence[Runs] = (
    ("large", ("small", "rest"), PARTS),
    ("large", ("one", "other"), OTHER_PARTS),
    # A sample that is there twice: labels of a probe are often all unlike.
    ("again", ("small", "one"), PARTS),
)

# One forward on all ranks: the result of the call on this one, and the segments.
RunOnce = Callable[[Probe | None, Callable[[], Any]], tuple[Any, Any]]
RunModule = Callable[[tuple[Any, ...], dict[str, Any], tuple[Any, ...]], Any]


class Attempt:
    """All runs of one probe; ``axes`` says which arguments are assumed to hold samples."""

    def __init__(
        self,
        model: ProbedModel,
        run_once: RunOnce,
        call: ModelCall | None,
        axes: Axes,
        run_module: RunModule,
        has_gradients: bool,
        splits: bool,
    ) -> None:
        self.segments: Any = ()
        self.staying: int | None = None  # a unit that the model needs unsharded throughout
        self.is_refused = False  # whether the error is one of HetFSDP's, not the model's own
        self.probe: Probe | None = None
        self._model = model
        self._run_once = run_once
        self.call = call
        self.axes = axes
        self._run_module = run_module
        self.splits = splits
        self.is_alone = False  # whether no other rank computes
        self._has_gradients, self._is_cut = has_gradients, has_gradients and splits
        self._outputs: dict[str, Any] = {}
        self.laws: dict[str, frozenset[Join] | None] = {}  # see ``Findings``
        self._unlike: set[str] = set()  # runs whose calls have arguments of other kinds
        self._apart: Apart = []  # outputs with rows for samples
        self._numbers: Sequence[str] = ()  # where the output has what has none
        self._is_in_forward = False  # in which others learn of what is raised
        self._generators = HostGenerators()
        if call is not None:
            self.probe = Probe(model, has_gradients=has_gradients, splits=splits)
            self.probe.is_behind = call.is_behind

    def run(self) -> Exception | None:
        """The error found on this rank; None if there is none here.  Collective."""
        try:
            with restored_random_state(self._model.device), self._generators.restored():
                _, self.segments = self._forward("small", range(SMALL))
                _check_draws(self)
                self._forward("large", range(LARGE))
                laws = self._check_outputs()
                self._check_kept()
                if self._model.caches.is_asked_for:
                    self._raise_together(_problem_of_caches(self))
                    tell_of_caches()
                if self._any_rank(bool(laws or self._apart) and self._has_numbers()):
                    _try_values(self, laws)
        except PeerFailed:
            return None
        except StaysUnsharded as found:
            self.staying = found.unit
            return RuntimeError("never raised: the model is probed once more")
        except Refusal as refusal:
            self.is_refused = True
            drawn = "" if self.probe is None else self.probe.watcher.drawn
            return ValueError(_UNFORESEEN.format(drawn, refusal)) if drawn else refusal.error
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
        main: Sequence[int] | None = None,
        *,
        word: int = LOW,
        factor: float = 1.0,
    ) -> tuple[Any, Any]:
        """One forward on ``samples``; the first batched argument takes ``main`` if given.

        Generators of the host draw numbers near that of ``word``, and floating arguments of the
        first sample are multiplied by ``factor``.
        """
        kind = name if name in ("small", "large", "plain", "afresh") else "rest"

        def run() -> Any:
            assert self.call is not None
            assert self.probe is not None
            args, kwargs, loss_inputs = with_samples(
                self.call, self.axes, samples, main, factor
            )
            self._generators.begin(word)
            given = rows_in(self.call, self.axes, (args, kwargs, loss_inputs))
            with self.probe.running(kind, given, samples):
                output = self._run_module(args, kwargs, loss_inputs)
                if kind != "plain":
                    self.probe.check_output(output)
                if kind == "large" and self._has_gradients:
                    self.probe.repeat()
            return output

        self._is_in_forward = True
        self._outputs[name], segments = self._run_once(self.probe, run)
        self._is_in_forward = False
        if self.probe is not None and self.probe.is_unlike:
            self._unlike.add(name)
        return self._outputs[name], segments

    def _raise_together(self, problem: str | None) -> None:
        """Raise on all ranks if one has a problem.  Collective."""
        if self._any_rank(problem is not None):
            raise PeerFailed if problem is None else Refusal(ValueError(problem))

    def _check_outputs(self) -> list[set[Join]]:
        """Of each loss of the rank's batch, whether it is the sum or the mean of its samples'.

        Raises if one is neither, or if a row of an output depends on the rank's other samples.
        """
        problem = None
        if self.call is not None:
            small, large = self._outputs["small"], self._outputs["large"]
            self._apart = outputs_apart(small, large) if self._is_cut else []
            self._numbers = without_samples([small, large])
            problem = None if self.is_alone else problem_of_pairs(small, large)
        self._raise_together(problem)
        has_losses = self._any_rank(self.splits and bool(self._losses("large")))
        if not self._any_rank(bool(self._apart)) and not has_losses:
            return []
        for name, samples in RUNS.items():
            self._forward(name, samples)
        self._raise_together(self._problem_of_rows(CUTS))
        return self._check_losses() if has_losses else []

    def _problem_of_rows(self, ways: Sequence[Runs]) -> str | None:
        """What is wrong with outputs that have a row for each sample, in some of them only."""
        if self.probe is None:
            return None
        pairs = [
            (name, part, span)
            for name, parts, spans in ways
            for part, span in zip(parts, spans, strict=True)
            if self._unlike.isdisjoint((name, part))
        ]
        for i, axes in self._apart:
            whole = tensors_in(self._outputs["large"])[i]
            if not any(all(self._has_rows(i, axis, *each) for each in pairs) for axis in axes):
                what = mixed(f"model(...): output {i}", whole)
                return Law.APART.says(f"{what} of the rank's batch, by code outside of units")
            try:
                if ways is CUTS:
                    self.probe.check_backward(f"model(...): output {i}", whole, axes)
            except Refusal as refusal:
                return str(refusal)
        return None

    def _has_rows(self, i: int, axis: BatchAxis, name: str, part: str, span: Span) -> bool:
        """Whether output ``i`` for some samples has the rows of these in the output for all, or
        rows of another length, as of the longest of the samples.
        """
        assert self.probe is not None
        pair = [tensors_in(self._outputs[each])[i : i + 1] for each in (name, part)]
        for whole, some in zip(*pair, strict=True):
            is_like = some.shape == axis.shape(whole.shape, span.numel)
            eps = self.probe.eps
            return not is_like or are_close(axis.narrow(whole, span, LARGE), some, eps)
        return False

    def _check_kept(self) -> None:
        """Raise if what a forward keeps of its samples changes what the next one computes."""
        kept, problem = {}, None
        if self.probe is not None and self._has_gradients and not self.is_alone:
            values = self.probe.values
            kept = kept_of_samples(values["small"], values["large"], self.probe.eps)
        if not self._any_rank(bool(kept)):
            return
        if self.probe is not None:
            self.probe.begins_with = kept
        self._forward("afresh", range(SMALL))
        if self.probe is not None:
            self.probe.begins_with = {}
            small, again = self._outputs["small"], self._outputs["afresh"]
            if not _are_same(small, again, self.probe.eps):
                names = ", ".join(".".join(filter(None, key)) for key in kept)
                problem = Law.REPEATS.says(_KEPT.format(names))
        self._raise_together(problem)

    def _any_rank(self, flag: float) -> bool:
        """Whether it is set on any rank.  Raises ``PeerFailed`` if it is ``FAILED`` on one."""
        rows = self._model.control.exchange([flag, 0.0, 0.0, 0.0])  # as visits are told
        flags = [row[0] for row in rows]
        if FAILED in flags and flag != FAILED:
            raise PeerFailed
        return any(flags)

    def _has_numbers(self) -> bool:
        """Whether any argument holds floating values of samples."""
        pairs = zip(() if self.call is None else self.call.leaves, self.axes, strict=False)
        return any(axis is not None and leaf.is_floating_point() for leaf, axis in pairs)

    def _losses(self, name: str) -> list[Tensor]:
        """What is without samples in the model's output, in float64."""
        leaves = {} if self.call is None else named_leaves(self._outputs[name])
        return [torch.as_tensor(leaves.get(at, nan)).detach().double() for at in self._numbers]

    def _check_losses(self) -> list[set[Join]]:
        if self.call is not None:
            self._numbers = without_samples([*self._outputs.values()])
        laws = [set.intersection(*each) for each in zip(*map(self._laws, CUTS), strict=True)]
        unclear = [i for i, found in enumerate(laws) if not found]
        losses = self._scalars(unclear)
        if self._any_rank(bool(losses)):
            _check_means(self, losses)
        self.laws = dict(zip(self._numbers, map(frozenset, laws), strict=False))
        self._forget(i for i in unclear if i not in losses)
        return laws

    def _scalars(self, numbers: Sequence[int]) -> list[int]:
        """Those that are tensors; of others is asked how they are used."""
        leaves = {} if self.call is None else named_leaves(self._outputs["large"])
        found = {i: leaves[self._numbers[i]] for i in numbers}
        return [i for i, leaf in found.items() if isinstance(leaf, Tensor) and not leaf.dim()]

    def _forget(self, numbers: Iterable[int]) -> None:
        """Note that these are neither sums nor means."""
        self.laws |= dict.fromkeys([self._numbers[i] for i in numbers])

    def _laws(self, way: Runs, amplified: float = 1.0) -> list[set[Join]]:
        """Of each loss, which laws it follows in these runs."""
        whole, parts, spans = way
        found = zip(*map(self._losses, (whole, *parts)), strict=False)
        return [Cut(one, rest, spans).laws(self._eps * amplified) for one, *rest in found]

    @property
    def _eps(self) -> float:
        """Epsilon of the narrowest dtype of a loss; float32's if one is computed from that."""
        leaves = named_leaves(self._outputs["large"])
        tensors = [leaves[i] for i in self._numbers if isinstance(leaves[i], Tensor)]
        dtypes = [each.dtype for each in tensors if each.is_floating_point()]
        computed = min(self.probe.eps if self.probe else 0.0, torch.finfo(torch.float32).eps)
        return max((max(torch.finfo(each).eps, computed) for each in dtypes), default=0.0)

    def empty_output(self) -> bytes | None:
        """The output for no samples, on the meta device, pickled; None if it is not known."""
        if self.probe is None:
            return None
        return empty_output_of(self._outputs["small"], self._outputs["large"])


def _check_draws(attempt: Attempt) -> None:
    """Raise if the small forward depends on numbers that the host's generators draw."""
    drawn = attempt._generators.drawn()
    if not attempt._any_rank(bool(drawn)):
        return
    expected = attempt._outputs["small"]
    problem = None
    for word in (MIDDLE, HIGH):
        output, found = attempt._forward("small", range(SMALL), word=word)
        if attempt.probe is None:
            continue
        if found != attempt.segments or not _are_same(output, expected, attempt.probe.eps):
            problem = _DRAWS.format(" and ".join(drawn) or "a generator")
    attempt._raise_together(problem and Law.REPEATS.says(problem))


def _problem_of_caches(attempt: Attempt) -> str | None:
    """Whether the model computes something else with the caches that are switched off.

    It is called with samples rolled along their other dimension: positions that begin anew
    within a row are among them if positions are passed at all.
    """
    first = 0 if attempt.call is None else attempt.call.num_samples
    rolled = range(first, first + SMALL)
    attempt._forward("rolled", rolled)
    with attempt._model.caches.on():
        attempt._forward("plain", rolled)
    if attempt.call is None or attempt.probe is None:
        return None
    without, with_caches = (
        [each for each in tensors_in(attempt._outputs[name]) if each.is_floating_point()]
        for name in ("rolled", "plain")
    )
    remaining = iter(with_caches)  # among them the cache's own, if the model returns it
    for one in without:
        other = next((each for each in remaining if each.shape == one.shape), None)
        if other is None or not are_close(one, other, attempt.probe.eps):
            return _CACHED
    return None


def _try_values(attempt: Attempt, laws: Sequence[set[Join]]) -> None:
    """Raise if samples mix, or losses do not add up, once the first is zero, or large.

    Of a mean, values may choose what it is over.
    """
    # An accelerator does not outlive a value that is an index and too large.
    is_on_host = devices.is_on_host(attempt._model.device)
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
        found = zip(laws, attempt._laws(way, max(factor, 1.0)), strict=False)
        odd = [i for i, (law, other) in enumerate(found) if law - {Join.MEAN} - other]
        attempt._forget(odd)
        attempt._raise_together(
            _no_sum(attempt._scalars(odd)) or attempt._problem_of_rows([way])
        )


def _check_means(attempt: Attempt, unclear: Sequence[int]) -> None:
    """Raise if one of these losses is no mean over what counts in each sample."""
    attempt._forward("swapped", (1, 0))
    # Every other sample would be other samples in another order.
    pairs = enumerate(zip(attempt._losses("small"), attempt._losses("swapped"), strict=True))
    odd = [i for i, (one, other) in pairs if not are_numbers_equal(one, other, attempt._eps)]
    attempt._raise_together(_no_sum(attempt._scalars(odd)))
    values, changed = [], []
    for name, main in (("", (0, 1)), ("0", (2, 1)), ("1", (0, 3)), ("01", (2, 3))):
        attempt._forward(f"changed {name}", range(SMALL), main)
        values.append(attempt._losses(f"changed {name}"))
    for name, mains in (("0", (2, 1, 2)), ("1", (0, 3, 2))):
        attempt._forward(f"changed large {name}", range(LARGE), mains)
        changed.append(attempt._losses(f"changed large {name}"))
    for name, mains in (("0", (2, 1, 0)), ("1", (0, 3, 0))):
        attempt._forward(f"changed again {name}", (0, 1, 0), mains)
        changed.append(attempt._losses(f"changed again {name}"))
    ways = ((("small", "rest", "large"), changed[:2]), (("small", "one", "again"), changed[2:]))
    odd = [
        i
        for i in unclear
        for runs, of_large in ways
        if not is_mean_over_some(
            [attempt._losses(name)[i] for name in runs],
            [each[i] for each in values],
            [each[i] for each in of_large],
            attempt._eps,
        )
    ]
    attempt._raise_together(_no_sum(odd))


def _are_same(one: Any, other: Any, eps: float) -> bool:
    """Whether two outputs are equal up to rounding."""
    ones, others = tensors_in(one), tensors_in(other)
    pairs = zip(ones, others, strict=False)
    return len(ones) == len(others) and all(are_close(*pair, eps) for pair in pairs)


_CACHED = (
    "model(...): with a KV cache (config.use_cache=True) it computes something else than "
    "without, for instance for position_ids that begin anew within a row: without a cache "
    "they mean packed sequences that do not see each other. HetFSDP trains without caches. Say "
    "that you mean it, for plain PyTorch too: model.config.use_cache = False before wrapping; "
    "or leave out the argument that makes the difference."
)


_UNFORESEEN = (
    "{} of a kind that no probe can foresee, so it cannot be shown that samples do not mix "
    "({}) Draw them with torch.rand, randn, randint, bernoulli, multinomial or dropout."
)
_NO_SUM = (
    "model(...): scalar output {}, computed outside of units, is no sum or mean over samples"
)
_DRAWS = "model(...): it draws from {}, and what it computes depends on that"
_KEPT = (
    "model(...): a forward keeps values of its samples for the next one (attribute {}), and "
    "computes with them"
)
# What torch.autograd.grad says of a unit's result, which has no graph in a probe.
_NO_GRAPH = ("to not have been used in the graph", "does not have a grad_fn")
_GRADIENT_INSIDE = (
    "model(...): its forward asks for a gradient (torch.autograd.grad, or backward) through "
    "units ({}). Let one unit hold all of what is differentiated there: HetFSDP(units=[...])."
)


def _no_sum(losses: Sequence[int]) -> str | None:
    return Law.ADDS_UP.says(_NO_SUM.format(losses[0])) if losses else None
