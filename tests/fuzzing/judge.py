"""A case on all ranks, and the verdict: exact, refused, wrong, crash, hang, or invalid."""

import linecache
import re
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_flatten

import shardhet
from shardhet import DeviceSpec, HetFSDP
from tests.fuzzing.model import Batch, FuzzModel, call_model, loss_of, make_batch, part_of
from tests.fuzzing.reference import Reference
from tests.fuzzing.shapes import FuzzCase, StepShape
from tests.parity import (
    LOSS_BAR,
    PARAM_BAR,
    compare_grads,
    compare_params,
    compare_state_dicts,
)
from tests.worlds import Outcome, rank_cache

LIBRARY = Path(shardhet.__file__).parent
MOST_MISMATCHES = 4  # told of one rank
OUTPUT_BAR = 1e-11  # of the largest element of an output or a buffer


class Verdict(Enum):
    """What became of a case."""

    EXACT = "exact"
    REFUSED = "refused"  # by an error of shardhet's own, on every rank, before gradients
    WRONG = "wrong"
    CRASH = "crash"  # by a foreign error, or not on every rank
    HANG = "hang"
    INVALID = "invalid"  # plain PyTorch cannot do it either


@dataclass(kw_only=True)
class Report:
    """What one rank saw."""

    phase: str = "start"
    mismatches: list[str] = field(default_factory=list)
    error: str = ""  # type and text
    where: str = ""  # the innermost line of Python
    is_own: bool = False  # raised by a statement of shardhet's own
    invalid: str = ""


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """The verdict with its reason in one line."""

    verdict: Verdict
    phase: str = ""
    reason: str = ""

    @property
    def is_fault(self) -> bool:
        """Whether shardhet is to be mended."""
        return self.verdict in (Verdict.WRONG, Verdict.CRASH, Verdict.HANG)


# On a rank


def run_on_rank(rank: int, case: FuzzCase, generation: int) -> Report:
    """Train beside the reference; differences and errors are told and not raised.

    After a difference the course goes on, so that ranks stay together.  A failure breaks
    HetFSDP's connections: the cases after it are of another ``generation``.
    """
    report = Report()
    try:
        course = _Course(rank, case, report, _group_of(generation))
        # A script that fails on its own ends, and its peers see that; this process lives on.
        with course.model._peers.fail_together("the case"):
            course.run()
    except _InvalidError as error:
        report.invalid = str(error)
    except Exception as error:
        report.error = f"{type(error).__name__}: {error}"
        report.is_own, report.where = _origin(error)
    return report


def _group_of(generation: int) -> dist.ProcessGroup:
    """A process group of all ranks that no case of an earlier generation has used."""
    cache = rank_cache()
    if cache.get("generation") != generation:
        cache["generation"] = generation
        cache["group"] = dist.new_group()
    return cache["group"]


class _InvalidError(Exception):
    """The reference failed."""


class _Course:
    """The steps of a case on one rank."""

    def __init__(
        self, rank: int, case: FuzzCase, report: Report, group: dist.ProcessGroup
    ) -> None:
        self.case = case
        self.report = report
        self.reference: Reference = self._of_reference(self._make_reference)
        with self._phase("wrapping"):
            spec = DeviceSpec(kind=case.kinds[rank]) if case.kinds else None
            self.model = HetFSDP(
                self._make_model(),
                case.plan,
                group=group,
                device_spec=spec,
                batch_dim=case.batch_dim,
                **case.options,
            )
        self.rank = rank
        self.optimizers = [
            _make_optimizer(each, case.optimizer) for each in (self.reference.model, self.model)
        ]

    def _make_model(self) -> FuzzModel:
        torch.manual_seed(self.case.seed)
        return FuzzModel(self.case.model).double()

    def _make_reference(self) -> Reference:
        return Reference(self._make_model(), self.case)

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        self.report.phase = name
        yield

    def run(self) -> None:
        """All steps, then the state dict."""
        for index, step in enumerate(self.case.steps):
            torch.manual_seed(self.case.seed + index)
            batch = make_batch(self.case.model, step)
            if index % self.case.steps_between_zero_grad == 0:
                for optimizer in self.optimizers:
                    optimizer.zero_grad()
            self._train_step(index, step, batch)
            if (index + 1) % self.case.steps_between_zero_grad == 0:
                for optimizer in self.optimizers:
                    optimizer.step()
                self._compare_params(f"step {index}")
            if self.case.evaluates:
                self._evaluate(index, step, batch)
            self._compare_buffers(f"step {index}")
        with self._phase("state dict"):
            bar = PARAM_BAR[self.case.optimizer]
            with self._told("state dict"):
                compare_state_dicts(self.model, self.reference.model, bar=bar, rank=self.rank)

    def _train_step(self, index: int, step: StepShape, batch: Batch) -> None:
        expected = self._of_reference(self.reference.train_step, batch, step, index)
        before = self._grads()
        try:
            with self._phase(f"forward {index}"):
                part = self._part(step, batch)
                loss_sum, num_tokens = self._loss(part, step)
            with self._phase(f"backward {index}"):
                mean = self.model.backward(loss_sum, num_tokens)
        except Exception:
            if not _same_grads(before, self._grads()):
                self.report.mismatches.append(f"step {index}: gradients before the error")
            raise
        with self._told(f"loss of step {index}"):
            assert mean is not None, "no loss"
            assert abs(mean - expected) <= LOSS_BAR * abs(expected), f"{mean} for {expected}"
        with self._told(f"gradients of step {index}"):
            compare_grads(
                self.model,
                self.reference.model,
                self.reference.unit_by_param(),
                where=f"step {index}",
            )

    def _of_reference(self, fn: Any, *args: Any) -> Any:
        self.report.phase = "reference"
        try:
            return fn(*args)
        except Exception as error:
            text = traceback.format_exception_only(error)[-1].strip()
            raise _InvalidError(f"{text} ({_origin(error)[1]})") from error

    def _part(self, step: StepShape, batch: Batch) -> Batch:
        position = self.model.position
        first = sum(step.sizes[:position])
        return part_of(self.case.model, batch, first, step.sizes[position])

    def _output(self, part: Batch, step: StepShape) -> Any:
        if not step.sizes[self.model.position] and not self.case.calls_empty:
            return self.model()
        if self.case.model.head != "loss_fn":
            return call_model(self.case.model, self.model, part)
        others = {name: part[name] for name in ("mask", "table") if name in part}
        return self.model(part["tokens"], loss_inputs=(part["targets"],), **others)

    def _loss(self, part: Batch, step: StepShape) -> tuple[Tensor, Tensor]:
        return loss_of(self.case.model, self._output(part, step), part)

    def _evaluate(self, index: int, step: StepShape, batch: Batch) -> None:
        position = self.model.position
        expected = self._of_reference(self.reference.evaluate, batch, step, position)
        with self._phase(f"evaluation {index}"):
            self.model.eval()
            with torch.no_grad():
                output = self._output(self._part(step, batch), step)
            self.model.train()
        with self._told(f"outputs in evaluation {index}"):
            found = tree_flatten(output)[0]
            if step.sizes[position]:
                _compare_leaves(found, expected)
            else:
                self._check_empty(found)

    def _check_empty(self, leaves: Sequence[Any]) -> None:
        for leaf in leaves:
            if isinstance(leaf, Tensor) and leaf.dim():
                assert leaf.shape[self.case.model.batch_at] == 0, f"{leaf.shape} of no samples"
            elif isinstance(leaf, Tensor):
                assert not leaf, f"{leaf} of no samples"

    def _compare_params(self, where: str) -> None:
        bar = PARAM_BAR[self.case.optimizer]
        with self._told(f"parameters after {where}"):
            compare_params(self.model, self.reference.model, bar=bar, where=where)

    def _compare_buffers(self, where: str) -> None:
        expected = dict(self.reference.model.named_buffers())
        with self._told(f"buffers after {where}"):
            for fqn, buffer in self.model.named_buffers():
                _compare_leaves([buffer], [expected[fqn]], name=fqn)

    @contextmanager
    def _told(self, what: str) -> Iterator[None]:
        """A difference is written down."""
        try:
            yield
        except AssertionError as error:
            if len(self.report.mismatches) < MOST_MISMATCHES:
                lines = " ".join(str(error).split())
                self.report.mismatches.append(f"{what}: {lines}"[:300])

    def _grads(self) -> list[Tensor | None]:
        return [None if p.grad is None else p.grad.clone() for p in self.model.parameters()]


def _same_grads(before: Sequence[Tensor | None], after: Sequence[Tensor | None]) -> bool:
    return all(
        (a is None) == (b is None) and (a is None or b is None or torch.equal(a, b))
        for a, b in zip(before, after, strict=True)
    )


def _compare_leaves(found: list[Any], expected: list[Any], *, name: str = "") -> None:
    assert len(found) == len(expected), f"{len(found)} leaves for {len(expected)}"
    for i, (one, other) in enumerate(zip(found, expected, strict=True)):
        if not isinstance(other, Tensor):
            assert one == other, f"{one} for {other}"
            continue
        assert one.shape == other.shape, f"{name or i}: {one.shape} for {other.shape}"
        if not one.numel():
            continue
        error = float((one.double() - other.double()).abs().max())
        bar = OUTPUT_BAR * max(float(other.double().abs().max()), 1e-3)
        assert error <= bar, f"{name or i}: differs by {error}, bar {bar}"


def _make_optimizer(model: torch.nn.Module, kind: str) -> torch.optim.Optimizer:
    """AdamW with an eps far above rounding errors, which it would blow up to steps."""
    if kind == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    return torch.optim.AdamW(model.parameters(), lr=3e-3, eps=1e-4)


def _origin(error: BaseException) -> tuple[bool, str]:
    """Whether a raise statement of shardhet's made this error, and where it was made."""
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return False, ""
    last = frames[-1]
    line = linecache.getline(last.filename, last.lineno or 0).strip()
    is_inside = Path(last.filename).is_relative_to(LIBRARY)
    path = Path(last.filename)
    return is_inside and line.startswith(
        "raise"
    ), f"{path.parent.name}/{path.name}:{last.lineno}"


# In the process that asked


def judge(outcomes: Sequence[Outcome]) -> Judgement:
    """One verdict of what became of every rank."""
    hung = [outcome for outcome in outcomes if outcome.hung_at is not None]
    if hung:
        threads = str(hung[0].hung_at).split("\n\n")
        main = next((each for each in threads if "run_on_rank" in each), threads[-1])
        stack = re.findall(r'/(\w+\.py)", line (\d+)', main)
        places = " < ".join(f"{name}:{line}" for name, line in stack[:8])
        ranks = [outcome.rank for outcome in hung]
        return Judgement(verdict=Verdict.HANG, reason=f"ranks {ranks} {places}")
    lost = [outcome for outcome in outcomes if not outcome.has_returned]
    if lost:
        reason = f"rank {lost[0].rank}: {lost[0].exception_name} {lost[0].message}"
        return Judgement(verdict=Verdict.CRASH, reason=f"{reason} {lost[0].exit_code or ''}")
    reports: list[Report] = [outcome.value for outcome in outcomes]
    for report in reports:
        if report.invalid:
            return Judgement(verdict=Verdict.INVALID, reason=report.invalid)
    for rank, report in enumerate(reports):
        if report.mismatches:
            reason = f"rank {rank}: {'; '.join(report.mismatches)}"
            return Judgement(verdict=Verdict.WRONG, phase=report.phase, reason=reason)
    return _judge_errors(reports)


def _judge_errors(reports: Sequence[Report]) -> Judgement:
    failed = [report for report in reports if report.error]
    if not failed:
        return Judgement(verdict=Verdict.EXACT)
    foreign = [report for report in failed if not _is_refusal(report)]
    first = (foreign or [r for r in failed if not _is_relayed(r)] or failed)[0]
    reason = f"{first.error} ({first.where})"
    verdict = Verdict.CRASH if foreign else Verdict.REFUSED
    if len(failed) < len(reports):
        verdict, reason = Verdict.CRASH, f"not on every rank: {reason}"
    return Judgement(verdict=verdict, phase=first.phase, reason=reason)


def _is_refusal(report: Report) -> bool:
    """An own error of two sentences: what was found, and what to do."""
    return report.is_own and re.search(r"\.\s+[A-Z]", report.error) is not None


def _is_relayed(report: Report) -> bool:
    """A peer's error, as the ranks hear it that wait for that peer."""
    return "All ranks stop. Fix the cause on that rank" in report.error
