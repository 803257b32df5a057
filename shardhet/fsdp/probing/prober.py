"""Runs probes on all ranks together and combines what they find.

Every rank takes part in the gather of every visit; a rank without samples follows the others.
If one rank cannot continue, all ranks learn of it and leave the forward at the next visit.
"""

import logging
import pickle
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from itertools import product
from typing import Any

import torch
from torch import Tensor

from shardhet.comm.failure import LostPeerError
from shardhet.fsdp.microbatch.batching import (
    BatchingRules,
    Join,
    flatten,
    known_rules,
    unflatten,
)
from shardhet.fsdp.microbatch.chosen import few_tokens, has_unlike_samples, with_few_tokens
from shardhet.fsdp.microbatch.loss import LossUsedError
from shardhet.fsdp.microbatch.signature import ModelCall, lists_of_entries
from shardhet.fsdp.microbatch.surroundings import DROPOUT_CALLS, restored_random_state
from shardhet.fsdp.probing.attempt import Attempt, RunModule, empty_output
from shardhet.fsdp.probing.comparing import Refusal
from shardhet.fsdp.probing.module_state import Filled, Number
from shardhet.fsdp.probing.order import (
    END_OF_FORWARD,
    NOT_VISITING,
    GatherFailed,
    OrderFinder,
    PeerFailed,
)
from shardhet.fsdp.probing.probe import CallKey, Probe, ProbedModel, SeenInput, isolated
from shardhet.fsdp.probing.probed_call import ProbedCall
from shardhet.fsdp.probing.rules import LARGE, ArgumentsSeen, Axes, possible_axes
from shardhet.fsdp.probing.watch import StaysUnsharded
from shardhet.fsdp.sharding.unit import UnitState
from shardhet.fsdp.stages.flow import Result, Returned
from shardhet.records.schedule import Schedule, StepForm, make_schedule

logger = logging.getLogger(__name__)

ROOT = -1  # in place of the index of a unit


@dataclass(frozen=True, slots=True)
class Findings:
    """What a probe has found, valid for all calls of one kind."""

    rules: dict[CallKey, list[BatchingRules]]  # one for each kind of arguments seen
    schedule: Schedule
    always_unsharded: frozenset[int]  # units that are unsharded for the whole step
    splits: bool  # whether any rank has several microbatches
    is_certain: bool  # if False, they are used for one step only
    has_root_dropout: bool  # whether dropout is called as a function outside of units
    counted: tuple[Number, ...]  # attributes that code outside of units changes
    inputs: tuple[SeenInput, ...]  # of units, if this rank has samples
    empty_output: Any  # the model's output for no samples, on the meta device, or None
    are_batched: tuple[bool, ...]  # by leaf of the arguments: whether it holds samples
    # Of numbers, and tensors without samples, by their place in the model's output: whether
    # they are sums or means over samples, or both; empty for a mean over what counts in each;
    # None for anything else.
    reductions: Mapping[str, frozenset[Join] | None] = field(default_factory=dict)
    rewritten: frozenset[str] = frozenset()  # buffers, on every rank with samples
    # If results of units are followed: those of each call, if this rank has samples, and what
    # reaches each call, and the output.
    results: tuple[Result, ...] = ()
    reached: tuple[frozenset[Returned], ...] = ()
    altered: frozenset[Returned] = frozenset()  # on this rank, by code outside of units

    def make_empty_output(self, anchor: Tensor) -> Any:
        """The model's output for no samples, with its tensors as zeros where ``anchor`` is.

        It needs gradients where other ranks' does.
        """
        leaves, spec = flatten(self.empty_output)
        for i, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor):
                made = torch.zeros(leaf.shape, dtype=leaf.dtype, device=anchor.device)
                leaves[i] = made.add_(anchor) if leaf.requires_grad else made
        return unflatten(leaves, spec)


class Prober:
    """Runs probes of one model, with the same findings on every rank."""

    def __init__(self, model: ProbedModel, *, form: StepForm) -> None:
        self.module = model.module
        # Units that the model needs unsharded throughout.
        self.always_unsharded: frozenset[int] = frozenset()
        self._model = model
        self.units, self.root = model.units, model.root
        self._control = model.control
        self._form = form
        self.probe: Probe | None = None  # while it runs
        self._finder: OrderFinder
        self._filled = Filled()

    def find(
        self,
        call: ModelCall | None,
        run_module: RunModule,
        *,
        has_gradients: bool,
        splits: bool,
    ) -> Findings:
        """Probe the model; ``call`` is None on a rank without samples.  Collective.

        If the model cannot be trained as it is, raises the error of the rank that found it, on
        every rank.
        """
        try:
            if call is not None:
                self._filled.fill(ROOT, self._model.root)
            return self._find(call, run_module, has_gradients=has_gradients, splits=splits)
        except GatherFailed as failed:
            raise failed.error from None
        finally:
            self._filled.undo(ROOT)

    def _find(
        self,
        call: ModelCall | None,
        run_module: RunModule,
        *,
        has_gradients: bool,
        splits: bool,
        first: Exception | None = None,
    ) -> Findings:
        """``first``: the problem of a loss taken from the last unit's output, but its place."""
        attempts = self._attempts(call)
        problem = first
        few = call and with_few_tokens(call, self._model.rank_plan)
        has_loss = call is not None and not self._model.loss.leaves_out(call.with_all()[2])
        mine = [float(call is not None), float(few is not call), float(has_loss)]
        by_rank = self._control.exchange(mine)
        num_computing, has_few = sum(row[0] for row in by_rank), any(row[1] for row in by_rank)
        gathered = {
            p: i for p, i in self._model.gathered.items() if i not in self.always_unsharded
        }
        model = self._model.with_gathered(gathered, self._model.rows)
        for axes, is_of_few in product(attempts, [True, False] if has_few else [False]):
            attempt = Attempt(
                model=model,
                run_once=self.run_once,
                call=few if is_of_few else call,
                whole=call if is_of_few else None,
                is_of_few=is_of_few,
                axes=axes,
                run_module=run_module,
                has_gradients=has_gradients,
                splits=splits,
                is_alone=num_computing == 1,
            )
            found = attempt.run()
            always_unsharded = found.unit if isinstance(found, StaysUnsharded) else -1
            is_first = axes is attempts[0] and not is_of_few
            if is_first and isinstance(found, Exception) and first is None:
                problem = _explained(found, call, attempts, is_refused=attempt.is_refused)
            is_used = isinstance(found, LossUsedError)
            rows = self._control.exchange(
                [float(found is not None), always_unsharded, float(is_used)]
            )
            if not any(row[0] for row in rows):
                self._model.loss.is_settled |= any(row[2] for row in by_rank)  # rules say where
                return self._settle(attempt, has_gradients)
            if more := {int(row[1]) for row in rows if row[1] >= 0}:
                self._keep_unsharded(more)
            elif any(row[2] for row in rows) and self._model.loss.moves_out():
                first = None if isinstance(problem, LossUsedError) else problem
            else:
                continue
            return self._find(
                call, run_module, has_gradients=has_gradients, splits=splits, first=first
            )
        self._model.loss.is_outside &= self._model.loss.is_settled
        if problem is not None:
            raise problem
        while True:  # until the rank that has failed raises, which raises here
            self._control.exchange([0.0])

    def _keep_unsharded(self, units: set[int]) -> None:
        self.always_unsharded |= units
        names = ", ".join(repr(self.units[i].fqn) for i in sorted(units))
        warnings.warn(
            f"model(...): parameters of {names} are used while the unit is not being called "
            "(x @ embedding.weight.T, perhaps), so all of its parameters stay unsharded for "
            "the whole step. Plan for that memory, or use them inside the unit.",
            stacklevel=2,
        )

    def _attempts(self, call: ModelCall | None) -> list[Axes]:
        """Which arguments may hold samples.  Collective."""
        mine = None if call is None else ArgumentsSeen.of(call)
        on_ranks = self._control.exchange_objects(mine)
        return possible_axes([each for each in on_ranks if each is not None])

    def _settle(self, attempt: Attempt, has_gradients: bool) -> Findings:
        trainable = frozenset(i for i, unit in enumerate(self.units) if unit.is_trainable)
        schedule = make_schedule(
            attempt.segments,
            trainable_units=trainable,
            # Evaluation is one round, and has no backward that could use the parameters again.
            form=self._form if has_gradients else StepForm(),
            always_unsharded_units=self.always_unsharded,
        )
        probe = attempt.probe
        rules = {} if probe is None else probe.rules
        self._check_agreement(rules)
        flow = None if probe is None else probe.flow
        mine = probe and (
            empty_output(attempt),
            probe.counted,
            [] if flow is None else flow.reached,
            attempt.reductions,
            probe.rewritten,
            probe.examiner.is_certain,
            has_unlike_samples(attempt.call, attempt.axes, LARGE),
        )
        by_rank = [each for each in self._control.exchange_objects(mine) if each is not None]
        forms, counted, reached, laws, rewritten, certain, unlike = zip(*by_rank, strict=True)
        if not any(unlike):
            _tell_of_alike_samples()
        return Findings(
            rules={key: [found] for key, found in rules.items()},
            schedule=schedule,
            always_unsharded=self.always_unsharded,
            splits=attempt.splits,
            is_certain=all(certain) and any(unlike),
            counted=tuple(sorted(set().union(*counted))),
            has_root_dropout=any(key.fqn == DROPOUT_CALLS for key in rules),
            inputs=() if probe is None else tuple(probe.inputs),
            empty_output=pickle.loads(forms[0]),
            are_batched=tuple(axis is not None for axis in attempt.axes),
            results=() if flow is None else tuple(flow.results),
            reached=_together([each for each in reached if each]),
            reductions=_laws_of_all(laws),
            rewritten=frozenset(set.intersection(*rewritten)),
            altered=frozenset() if flow is None else frozenset(flow.altered),
        )

    def _check_agreement(self, rules: dict[CallKey, BatchingRules]) -> None:
        mine = {
            (*key, str(each.arguments)): (each.inputs, each.outputs)
            for key, each in rules.items()
        }
        agreed: dict[Any, Any] = {}
        for theirs in self._control.exchange_objects(mine):
            for key, found in theirs.items():
                if agreed.setdefault(key, found) != found:
                    raise ValueError(
                        f"unit {key[0]!r}: ranks find different rules for how its inputs and "
                        f"outputs depend on the batch: {agreed[key]} and {found}. Pass the "
                        "same kinds of arguments on every rank, with the batch in the same "
                        "dimension."
                    )

    def infer(
        self, call: ProbedCall, known: BatchingRules, *, of: ModelCall, splits: bool
    ) -> BatchingRules:
        """The rules of a unit's call that differs from the probed one.  Not collective.

        Raises ``ValueError`` if they cannot be found.
        """
        model = self._model.with_gathered({}, {})
        probe = Probe(model, has_gradients=torch.is_grad_enabled(), splits=splits)
        fewer, random = few_tokens(of, model.rank_plan), restored_random_state(model.device)
        try:
            with random, isolated(model), probe.watcher, probe.watcher.paused():
                number, rules = of.num_samples, known_rules(known)
                return probe.examiner.infer(call, number, rules, fewer)[0]
        except Refusal as refusal:
            raise refusal.error from None

    # While a probe runs

    def enter(self, unit_index: int, needs_backward: bool, fqn: str, arguments: Any) -> None:
        """Agree that the unit is called next, and unshard it.  Collective."""
        assert self.probe is not None
        runs, segment = self.probe.has_to_run(fqn, arguments), None
        with self.probe.watcher.paused():
            while segment is None or segment.unit != unit_index:
                segment = self._finder.visit(
                    unit_index, needs_backward=needs_backward, has_to_run=runs
                )
                assert segment is not None
                self._take(segment.unit)

    def _take(self, unit_index: int) -> None:
        if self._finder.has_to_run:
            self._reshard_all(but=(unit_index, *self.always_unsharded))
            self._unshard(unit_index)

    def _unshard(self, unit_index: int) -> None:
        unit = self.units[unit_index]
        with _while_others_wait():
            unit.unshard()
            unit.wait_for_unshard()
            if self.probe is not None:
                self._filled.fill(unit_index, unit)

    def _reshard_all(self, *, but: Iterable[int] = ()) -> None:
        with _while_others_wait():
            for i, unit in enumerate(self.units):
                if i not in but and unit.state is not UnitState.SHARDED:
                    self._filled.undo(i)
                    unit.reshard()

    def run_once(self, probe: Probe | None, run: Callable[[], Any]) -> tuple[Any, Any]:
        """One forward on all ranks: the result of ``run`` and the segments.  Collective.

        Raises the error of this rank, or ``PeerFailed`` if another rank failed.
        """
        is_behind = probe is not None and probe.is_behind
        names = [unit.fqn for unit in self.units]
        self._finder = OrderFinder(names, self._control, is_behind=is_behind)
        self.probe = probe
        try:
            for index in sorted(self.always_unsharded):
                self._unshard(index)
            output = None if probe is None else run()
            place = NOT_VISITING if probe is None else END_OF_FORWARD
            while (segment := self._finder.visit(place)) is not None:
                self._take(segment.unit)
            return output, self._finder.found
        except (LostPeerError, PeerFailed, GatherFailed):
            raise
        except (Exception, Refusal, StaysUnsharded):
            self._finder.fail()
            raise
        finally:
            self.probe = None
            self._reshard_all()


@contextmanager
def _while_others_wait() -> Iterator[None]:
    """Context in which this rank's errors, out of memory for one, become ``GatherFailed``."""
    try:
        yield
    except LostPeerError:
        raise
    except Exception as error:
        raise GatherFailed(error) from error


@cache
def _tell_of_alike_samples() -> None:
    logger.warning(
        "model(...): all samples of this batch are the same, which hides whether the model "
        "mixes them, so it is probed at every step until they differ. Made-up batches had "
        "better be random: torch.randn instead of torch.ones."
    )


def _together(
    reached: Sequence[Sequence[frozenset[Returned]]],
) -> tuple[frozenset[Returned], ...]:
    """What reaches each call on any rank."""
    return tuple(frozenset().union(*each) for each in zip(*reached, strict=True))


def _laws_of_all(
    found: Sequence[Mapping[str, frozenset[Join] | None]],
) -> dict[str, frozenset[Join] | None]:
    """What numbers are on every rank that has samples."""
    by_place = {  # in an order that is the same on all ranks: they exchange numbers in it
        at: [each[at] for each in found]
        for at in (found[0] if found else ())
        if all(at in each for each in found)
    }
    return {
        at: None if None in laws else frozenset.intersection(*laws)  # type: ignore[arg-type]
        for at, laws in by_place.items()
    }


def _explained(
    problem: Exception, call: ModelCall | None, attempts: Sequence[Axes], *, is_refused: bool
) -> Exception:
    """The problem, with names of arguments if wrong assumptions about them may be the cause."""
    for name in lists_of_entries(call) if call is not None else ():
        error = ValueError(
            f"model(...): argument {name!r} is a list with an entry for each sample, but only "
            "tensors can be cut into microbatches. Pass tensors with a row for each sample, or "
            "compute the loss after model(...)."
        )
        error.__cause__ = problem
        return error
    if call is None or len(attempts) == 1 or is_refused:
        return problem
    batched = [
        name for name, axis in zip(call.names, attempts[0], strict=True) if axis is not None
    ]
    error = ValueError(
        f"model(...): it does not run on some of its samples, with {', '.join(batched)} cut "
        f"to them ({type(problem).__name__}: {problem}). If one of these arguments has no "
        f"samples, pass HetFSDP(batch_dim={{'{batched[-1]}': None}}), or name the dimension "
        "that holds them."
    )
    error.__cause__ = problem
    return error
