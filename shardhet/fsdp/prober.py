"""The walk of a probe over all ranks: who runs what, and what follows for all of them.

Every rank joins every visit's gather; a rank without samples follows the others.  Where one
rank cannot go on, all leave the forward at the next visit and say so to each other.
"""

import math
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import torch
from torch import Tensor, nn

from shardhet.distributed import Channel
from shardhet.fsdp.batch_norm import BatchNorms
from shardhet.fsdp.batching import (
    BatchAxis,
    Layout,
    VisitRules,
    find_axis,
    flatten,
    known_rules,
    unflatten,
)
from shardhet.fsdp.layered import tensors_in
from shardhet.fsdp.loss import LossUsedError
from shardhet.fsdp.module_state import Number
from shardhet.fsdp.order import OrderFinder, PeerFailed
from shardhet.fsdp.probe import CallKey, Probe
from shardhet.fsdp.root_dropout import DROPOUT_CALLS
from shardhet.fsdp.rules import LARGE, SIZES, SMALL
from shardhet.fsdp.seeds import restored_random_state
from shardhet.fsdp.signature import ModelCall, is_plain
from shardhet.fsdp.unit import FSDPUnit, UnitModule, UnitState
from shardhet.fsdp.watch import Refusal
from shardhet.neighbours import LostPeerError
from shardhet.schedule import Schedule, make_schedule

MAX_ATTEMPTS = 8

Axes = tuple[BatchAxis | None, ...]
RunModule = Callable[[tuple[Any, ...], dict[str, Any], tuple[Any, ...]], Any]


@dataclass(frozen=True, slots=True)
class Zeros:
    """Stands for a tensor where a model's output for no samples is told to another rank."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Findings:
    """What holds for all calls of one kind."""

    rules: dict[CallKey, list[VisitRules]]  # one for each kind of arguments that was seen
    schedule: Schedule
    splits: bool  # whether any rank has several microbatches
    is_certain: bool  # else they serve for one step
    has_root_dropout: bool  # called as a function, outside of units
    counted: tuple[Number, ...]  # attributes that code outside of units changes
    empty_output: Any  # the model's output for no samples, with ``Zeros``; None: not known

    def make_empty_output(self, device: torch.device) -> Any:
        """What the model returns for no samples: zeros on ``device``."""
        leaves, spec = flatten(self.empty_output)
        made = [
            torch.zeros(leaf.shape, dtype=leaf.dtype, device=device)
            if isinstance(leaf, Zeros)
            else leaf
            for leaf in leaves
        ]
        return unflatten(made, spec)


class Prober:
    """Runs probes of one model; the same on every rank."""

    def __init__(
        self,
        module: nn.Module,
        units: Sequence[FSDPUnit],
        norms: BatchNorms,
        *,
        control: Channel,
        device: torch.device,
        reshard_after_forward: bool,
    ) -> None:
        self.is_running = False
        self._module = module
        self._units = tuple(units)
        self._norms = norms
        self._control = control
        self._device = device
        self._reshard_after_forward = reshard_after_forward
        self._anchor = torch.zeros((), device=device, requires_grad=True)
        self._probe: Probe | None = None
        self._finder = OrderFinder([], control)
        self.rows = {
            id(param): slot.fqn
            for unit in units
            for flat in unit.flats
            for slot, param in zip(flat.slots, flat.sharded_params, strict=True)
        }

    def find(
        self,
        call: ModelCall | None,
        run_module: RunModule,
        *,
        has_gradients: bool,
        splits: bool,
    ) -> Findings:
        """Probe the model; ``call`` is None on a rank without samples.  Collective.

        Raises on every rank what is wrong with the model on any of them.
        """
        attempts = self._attempts(call)
        problem: Exception | None = None
        is_refused = False
        for i, axes in enumerate(attempts):
            attempt = _Attempt(self, call, axes, run_module, has_gradients, splits)
            found = attempt.run()
            has_failed = self._control.exchange([float(found is not None)])
            if not any(row[0] for row in has_failed):
                return self._settle(attempt, has_gradients)
            if i == 0:
                problem, is_refused = found, attempt.is_refused
        if problem is not None:
            raise _explained(problem, call, attempts, is_refused=is_refused)
        while True:  # until the rank that has failed says why
            self._control.exchange([0.0])

    def _attempts(self, call: ModelCall | None) -> list[Axes]:
        """What the arguments may be: first what their lengths say, then one of them "
        "otherwise.
        """
        mine = None if call is None else (call.candidates(), call.batch_dims, call.are_named)
        known = [each for each in self._control.exchange_objects(mine) if each is not None]
        dims, named = known[0][1], known[0][2]
        if len({len(each[0]) for each in known}) > 1:
            raise ValueError(
                f"model(...): ranks pass {[len(each[0]) for each in known]} arguments. Call "
                "the model in the same way on every rank."
            )
        factors = [set(column) for column in zip(*(each[0] for each in known), strict=True)]
        likely = [
            BatchAxis(dim) if factor == {1} and dim is not None else None
            for factor, dim in zip(factors, dims, strict=True)
        ]
        first = next((i for i, axis in enumerate(likely) if axis is not None), 0)
        others: list[tuple[int, BatchAxis | None]] = []
        for i, (axis, dim, factor) in enumerate(zip(likely, dims, factors, strict=True)):
            if i == first or named[i] or dim is None:
                continue
            if axis is not None:
                others.append((i, None))
            elif len(factor) == 1 and min(factor) > 1:
                others.append((i, BatchAxis(dim, 1, min(factor))))
        changes = [*combinations(others, 1), *combinations(others, 2)][: MAX_ATTEMPTS - 1]
        return [
            tuple(dict(change).get(i, axis) for i, axis in enumerate(likely))
            for change in ((), *changes)
        ]

    def _settle(self, attempt: "_Attempt", has_gradients: bool) -> Findings:
        trainable = frozenset(i for i, unit in enumerate(self._units) if unit.is_trainable)
        schedule = make_schedule(
            attempt.segments,
            trainable_units=trainable,
            # An evaluation saves the memory.
            reshard_after_forward=self._reshard_after_forward or not has_gradients,
        )
        probe = attempt.probe
        rules = {} if probe is None else probe.rules
        self._check_agreement(rules)
        is_certain = probe is None or probe.is_certain
        rows = self._control.exchange([float(is_certain)])
        told = self._control.exchange_objects(
            (attempt.empty_output(), () if probe is None else probe.counted)
        )
        forms = [form for form, _ in told]
        form = next((each for each in forms if each is not None), None)
        return Findings(
            rules={key: [found] for key, found in rules.items()},
            schedule=schedule,
            splits=attempt.splits,
            is_certain=all(row[0] for row in rows),
            counted=tuple(sorted({number for _, counted in told for number in counted})),
            has_root_dropout=any(key.fqn == DROPOUT_CALLS for key in rules),
            empty_output=None if form is None else pickle.loads(form),
        )

    def _check_agreement(self, rules: dict[CallKey, VisitRules]) -> None:
        mine = {
            (*key, str(each.arguments)): (each.inputs, each.outputs)
            for key, each in rules.items()
        }
        agreed: dict[Any, Any] = {}
        for theirs in self._control.exchange_objects(mine):
            for key, found in theirs.items():
                if agreed.setdefault(key, found) != found:
                    raise ValueError(
                        f"unit {key[0]!r}: ranks find its inputs and outputs to depend on the "
                        f"batch as {agreed[key]} and as {found}. Pass the same kinds of "
                        "arguments on every rank, with the batch in the same dimension."
                    )

    def infer(
        self,
        module: UnitModule,
        leaves: list[Any],
        arguments: Layout,
        num_samples: int,
        known: VisitRules,
        *,
        splits: bool,
    ) -> VisitRules:
        """Rules of a call that is unlike the one that was probed; no other rank takes part.

        Raises ``ValueError`` where it cannot be told.
        """
        probe = Probe(
            self._module,
            self._norms,
            has_gradients=torch.is_grad_enabled(),
            splits=splits,
            anchor=self._anchor,
        )
        try:
            with restored_random_state(self._device):
                return probe.infer(
                    module.fqn,
                    module.forward,
                    leaves,
                    arguments,
                    num_samples,
                    known_rules(known),
                )
        except Refusal as refusal:
            raise refusal.error from None

    # While a probe runs

    def enter(self, unit_index: int, needs_backward: bool) -> None:
        """Agree that the unit is called next, and have it unsharded.  Collective."""
        self._take(self._finder.visit(unit_index, needs_backward).unit)

    def call(
        self, fqn: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Any
    ) -> Any:
        """What the call of one of a unit's modules gives."""
        assert self._probe is not None
        return self._probe.call(fqn, function, args, kwargs)

    def _take(self, unit_index: int) -> None:
        for i, unit in enumerate(self._units):
            if i != unit_index and unit.state is not UnitState.SHARDED:
                unit.reshard()
        self._units[unit_index].unshard()
        self._units[unit_index].wait_for_unshard()

    def run_once(self, probe: Probe | None, run: Callable[[], Any]) -> tuple[Any, Any]:
        """One forward on all ranks: what ``run`` returns, and the segments.  Collective.

        Raises what went wrong here, ``PeerFailed`` if it did elsewhere.
        """
        self._finder = OrderFinder([unit.fqn for unit in self._units], self._control)
        self._probe, self.is_running = probe, True
        try:
            if probe is not None:
                output = run()
                self._finder.end()
                return output, self._finder.found
            while (segment := self._finder.follow()) is not None:
                self._take(segment.unit)
            return None, self._finder.found
        except (LostPeerError, PeerFailed):
            raise
        except (Exception, Refusal):
            self._finder.fail()
            raise
        finally:
            self._probe, self.is_running = None, False
            for unit in self._units:
                if unit.state is not UnitState.SHARDED:
                    unit.reshard()


def _explained(
    problem: Exception, call: ModelCall | None, attempts: Sequence[Axes], *, is_refused: bool
) -> Exception:
    """The problem; with the arguments' names where it may come from what they were taken "
    "for.
    """
    if call is None or len(attempts) == 1 or is_refused:
        return problem
    batched = [
        name for name, axis in zip(call.names, attempts[0], strict=True) if axis is not None
    ]
    error = ValueError(
        f"model(...): it does not run on some of its samples, with {', '.join(batched)} cut "
        f"to them ({type(problem).__name__}: {problem}). If one of these arguments has no "
        f"samples, say so: HetFSDP(batch_dim='{batched[-1]}': None}}), or in which dimension "
        "it has."
    )
    error.__cause__ = problem
    return error


def _for_no_samples(plain: Any) -> Any:
    """What a plain output of a model is for no samples; a number counts something, so zero.

    Even one that two runs agree on: their samples may happen to have equally many tokens.
    """
    if type(plain) in (int, float):
        return type(plain)(0)
    return plain if is_plain(plain) else None


class _Attempt:
    """All runs of one probe, with one reading of the model's arguments."""

    def __init__(
        self,
        prober: Prober,
        call: ModelCall | None,
        axes: Axes,
        run_module: RunModule,
        has_gradients: bool,
        splits: bool,
    ) -> None:
        self.segments: Any = ()
        self.is_refused = False  # by us: no error of the model's
        self.probe: Probe | None = None
        self._prober = prober
        self._call = call
        self._axes = axes
        self._run_module = run_module
        self.splits = splits
        self._outputs: dict[str, Any] = {}
        if call is not None:
            self.probe = Probe(
                prober._module,
                prober._norms,
                has_gradients=has_gradients,
                splits=splits,
                anchor=prober._anchor,
                rows=prober.rows,
            )

    def run(self) -> Exception | None:
        """What is wrong here; None if nothing is, or only on another rank.  Collective."""
        try:
            with restored_random_state(self._prober._device):
                _, self.segments = self._forward("small", range(SMALL))
                self._forward("large", range(LARGE))
                if self._any_rank(self.splits and bool(self._losses("large"))):
                    self._check_losses()
        except PeerFailed:
            return None
        except Refusal as refusal:
            self.is_refused = True
            return refusal.error
        except LostPeerError:
            raise
        except Exception as error:
            self.is_refused = isinstance(error, LossUsedError)
            return error
        return None

    def _forward(
        self, name: str, samples: Sequence[int], main: Sequence[int] | None = None
    ) -> tuple[Any, Any]:
        """One forward on these samples; ``main`` are those of the first argument, if others."""
        kind = name if name in ("small", "large") else "rest"

        def run() -> Any:
            assert self._call is not None
            assert self.probe is not None
            first = next((i for i, axis in enumerate(self._axes) if axis is not None), -1)
            chosen = [
                main if main is not None and i == first else samples
                for i in range(len(self._axes))
            ]
            args, kwargs, loss_inputs = self._call.with_samples(self._axes, chosen)
            with self.probe.running(kind, tensors_in((args, kwargs, loss_inputs))):
                output = self._run_module(args, kwargs, loss_inputs)
                self.probe.check_output(output)
            return output

        self._outputs[name], segments = self._prober.run_once(self.probe, run)
        return self._outputs[name], segments

    def _any_rank(self, flag: bool) -> bool:
        return any(row[0] for row in self._prober._control.exchange([float(flag)]))

    def _losses(self, name: str) -> list[Tensor]:
        """The single numbers among the model's outputs, in float64."""
        if self._call is None:
            return []
        tensors = tensors_in(self._outputs[name])
        return [t.detach().double() for t in tensors if t.dim() == 0]

    def _check_losses(self) -> None:
        """Raise where a loss of the rank's batch is not made of its samples' one by one."""
        self._forward("rest", range(SMALL, LARGE))
        small, large, rest = map(self._losses, ("small", "large", "rest"))
        unclear = [
            i
            for i, (ab, abc, c) in enumerate(zip(small, large, rest, strict=True))
            if not (self._are_equal(ab + c, abc) or self._are_equal((2 * ab + c) / 3, abc))
        ]
        if not self._any_rank(bool(unclear)):
            return
        # A mean over valid tokens is no mean over samples.  But with the labels as they are,
        # what one sample adds depends on the others by one factor only, the number of tokens:
        # with S the sum and N the tokens, S/N of both parts together make that of all.
        values = []
        for name, main in (("", (0, 1)), ("0", (2, 1)), ("1", (0, 3)), ("01", (2, 3))):
            self._forward(f"changed {name}", range(SMALL), main)
            values.append(self._losses(f"changed {name}"))
        self._forward("changed large", range(LARGE), (2, 1, 2))
        changed = self._losses("changed large")
        for i in unclear:
            neither, first, second, both = (each[i] for each in values)
            change = changed[i] - large[i]
            factor = (first - neither) / change  # of N, large over small
            parts = small[i] + rest[i] * (factor - 1)
            scale = max(float(each[i].abs()) for each in values)
            amplified = 1 + scale / max(float(change.abs()), 1e-30)  # rounding in the factor
            if not (
                self._are_equal(neither + both, first + second)
                and self._are_equal(parts, large[i] * factor, amplified)
            ):
                raise Refusal(
                    ValueError(
                        f"model(...): output {i} of its single numbers, computed outside of "
                        "units, is no sum or mean over samples (a load-balancing or "
                        "contrastive loss, perhaps), so it would depend on the plan. Leave it "
                        "out of the loss (output_router_logits=False), compute it inside of a "
                        "unit from each sample, or give every rank one microbatch."
                    )
                )

    def _are_equal(self, one: Tensor, other: Tensor, amplified: float = 1.0) -> bool:
        """But for rounding; a loss of a thousandth is to be told from it."""
        dtypes = [t.dtype for t in tensors_in(self._outputs["large"]) if t.is_floating_point()]
        eps = max((torch.finfo(dtype).eps for dtype in dtypes), default=0.0)
        scale = max(abs(float(one)), abs(float(other)))
        bar = min(64 * eps * amplified, 1e-2)
        return abs(float(one - other)) <= bar * scale or not math.isfinite(scale)

    def empty_output(self) -> bytes | None:
        """The output for no samples, pickled; None where it cannot be said."""
        if self.probe is None:
            return None
        small, spec = flatten(self._outputs["small"])
        large, _ = flatten(self._outputs["large"])
        leaves: list[Any] = []
        for one, other in zip(small, large, strict=False):
            if not isinstance(one, Tensor) or not isinstance(other, Tensor):
                leaves.append(_for_no_samples(one))
                continue
            try:
                axes = find_axis(one, other, SIZES)
            except ValueError:  # several dimensions
                axes = [BatchAxis(0)]
            shape = axes[0].shape(one.shape, 0) if axes else tuple(one.shape)
            leaves.append(Zeros(tuple(shape), one.dtype))
        try:
            return pickle.dumps(unflatten(leaves, spec))
        except (pickle.PicklingError, AttributeError, TypeError):
            return None
