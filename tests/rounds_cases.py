"""Drawn steps of several rounds, each held against one process.

In float64 a drawn model trains beside plain PyTorch over the whole batch (``tests.parity``).
In lower precision HetFSDP errs no more than plain PyTorch does that accumulates the same
microbatches, as in tests/test_parity_low_precision.py.  Every case is run twice.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from shardhet import DeviceSpec, Plan
from shardhet.models.decoder import Decoder
from tests.parity import Result, blanked, check_parity
from tests.patchwork import IGNORED, Case, draw_rounds
from tests.test_parity_low_precision import LANGUAGE, compared, make_batch

PRECISIONS = ("float64",) * 5 + ("float32", "bf16", "fp16")
ON_HOST = ("inputs_on_host", "optimizer_on_host")  # of RankPlan


@dataclass(frozen=True, kw_only=True)
class RoundsCase:
    """What is drawn: a plan in rounds with a course, and in which precision it is run."""

    case: Case
    precision: str
    is_tied: bool  # of the model in lower precision

    @property
    def world_size(self) -> int:
        """How many ranks it needs."""
        return self.case.plan.world_size

    def traits(self) -> tuple[str, ...]:
        """What of the bar it covers."""
        plan, course, shape = self.case.plan, self.case.course, self.case.shape
        sizes = course.rank_batch_sizes if self.is_exact else course.rank_batch_sizes[-1:]
        by_round = [
            step[i : i + self.world_size]
            for step in sizes
            for i in range(0, len(step), self.world_size)
        ]
        gathers = {(True, True): "use", (False, True): "round", (False, False): "step"}
        form = gathers[plan.reshard_after_forward, plan.reshard_after_backward]
        reduced = "round" if plan.reduce_each_round else "step"
        found = {
            f"{plan.num_rounds} rounds": True,
            f"gathered per {form}, reduced per {reduced}": True,
            "a ragged last round": plan.last_round_size not in (None, plan.round_size),
            "a rank that computes nothing": any(not r.microbatch_sizes for r in plan.ranks),
            "a rank that stores nothing": any(not r.state_share for r in plan.ranks),
            "a rank without samples in a round": any(0 in row and any(row) for row in by_round),
            "a round without samples": not all(map(any, by_round)),
            "a round without tokens": any(course.blank_rounds),
            "several microbatches": any(r.num_microbatches > 1 for r in plan.ranks),
            "recomputation": any(r.recomputed_units for r in plan.ranks),
            "dropout": self.is_exact and shape.dropout > 0,
            "tied parameters": shape.is_tied if self.is_exact else self.is_tied,
            "frozen parameters": self.is_exact and bool(shape.frozen),
            "clipping": self.is_exact and course.clip_at is not None,
            **{
                name.replace("_", " "): any(getattr(r, name, False) for r in plan.ranks)
                for name in ON_HOST
            },
        }
        return tuple(name for name, is_there in found.items() if is_there)

    @property
    def is_exact(self) -> bool:
        """Whether it has to equal one process to rounding."""
        return self.precision == "float64"


@dataclass(frozen=True, kw_only=True)
class RankReport:
    """What one rank has found."""

    covers: Result | None = None  # the rows it stores, in float64
    ours: Mapping[str, tuple[float, float]] = field(default_factory=dict)  # by unit
    plain: Mapping[str, tuple[float, float]] = field(default_factory=dict)


def draw(seed: int, *, on_host: Sequence[str] = ()) -> RoundsCase:
    """The case of that seed: the same in every process.

    ``on_host``: which of ON_HOST some ranks do.
    """
    draw = random.Random(f"rounds case {seed}")
    case = draw_rounds(seed, world_size=draw.choice([1, 2, 3, 4]))
    if on_host:
        case = replace(case, plan=_on_host(draw, case.plan, on_host))
    return RoundsCase(case=case, precision=draw.choice(PRECISIONS), is_tied=draw.random() < 0.4)


def _on_host(draw: random.Random, plan: Plan, names: Sequence[str]) -> Plan:
    ranks = []
    for rank in plan.ranks:
        changes: dict[str, Any] = {}
        if "inputs_on_host" in names and draw.random() < 0.7:
            changes["inputs_on_host"] = rank.recomputed_units
        if "optimizer_on_host" in names:
            changes["optimizer_on_host"] = draw.random() < 0.5
        ranks.append(replace(rank, **changes))
    return replace(plan, ranks=tuple(ranks))


def check(rank: int, case: RoundsCase) -> RankReport:
    """Run the case twice on this rank; raises ``AssertionError`` at the first difference."""
    torch.manual_seed(0)
    run = _exactly if case.is_exact else _in_low_precision
    bits, report = run(rank, case)
    again, _ = run(rank, case)
    assert len(bits) == len(again), "not repeated"
    assert all(map(torch.equal, bits, again)), "not repeated bit by bit"
    return report


def _exactly(rank: int, case: RoundsCase) -> tuple[list[Tensor], RankReport]:
    drawn = case.case
    result = check_parity(rank, drawn.problem, drawn.plan, drawn.course)
    return result.bits, RankReport(covers=Result(result.rows, result.shapes, bits=[]))


def _in_low_precision(rank: int, case: RoundsCase) -> tuple[list[Tensor], RankReport]:
    plan, course = case.case.plan, case.case.course
    torch.manual_seed(case.case.seed)
    master = Decoder(LANGUAGE)
    if case.is_tied:
        master.head.projection.weight = master.embedding.weight
    sizes = course.rank_batch_sizes[-1]
    batch = make_batch(sum(sizes))
    batch["targets"][torch.rand(batch["targets"].shape) < 0.2] = IGNORED
    batch = blanked(batch, course, -1, case.world_size)
    spec = DeviceSpec(kind=course.kinds[rank]) if course.kinds else None
    bits, ours, plain = compared(master, plan, sizes, batch, case.precision, device_spec=spec)
    return bits, RankReport(ours=ours, plain=plain)


def excess(reports: Sequence[RankReport]) -> float:
    """The largest error of a unit's gradient, as a multiple of plain PyTorch's."""
    largest = 0.0
    for unit in reports[0].ours:
        ours = sum(report.ours[unit][0] for report in reports)
        plain = sum(report.plain[unit][0] for report in reports)
        size = sum(report.ours[unit][1] for report in reports)
        largest = max(largest, (ours / (plain + 1e-14 * size)) ** 0.5 if size else 0.0)
    return largest
