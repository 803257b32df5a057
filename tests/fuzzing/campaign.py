"""Cases one after the other over worlds of ranks that stay alive between them."""

import time
from collections.abc import Callable, Iterator
from dataclasses import MISSING, dataclass, field, fields, replace
from typing import Any

from shardhet import Plan
from tests.fuzzing.judge import Judgement, Report, Verdict, judge, run_on_rank
from tests.fuzzing.shapes import FuzzCase, ModelShape, StepShape, UnitShape
from tests.worlds import World

CASE_TIMEOUT_S = 20.0  # a case takes about half a second
MOST_GENERATIONS = 40  # of process groups in one world: each keeps some threads
GRACE_S = 8.0  # for the others, once a process is gone


@dataclass
class Court:
    """Judges cases; a world in which every rank answered is kept for the next of its size."""

    timeout_s: float = CASE_TIMEOUT_S
    run_on_rank: Callable[..., Report] = run_on_rank
    _world_by_size: dict[int, tuple[World, int]] = field(default_factory=dict)

    def judge(self, case: Any) -> tuple[Judgement, float]:
        """The verdict, and how many seconds the case took."""
        kept = self._world_by_size.pop(case.world_size, None)
        world, generation = kept or (World(case.world_size), 0)
        started_at_s = time.monotonic()
        is_reusable = False
        try:
            outcomes = world.run(
                self.run_on_rank, (case, generation), timeout_s=self.timeout_s, grace_s=GRACE_S
            )
            judgement = judge(outcomes)
            if judgement.verdict is not Verdict.EXACT:
                generation += 1
            has_answered = all(outcome.has_returned for outcome in outcomes)
            is_reusable = has_answered and generation < MOST_GENERATIONS
        finally:
            if is_reusable:
                self._world_by_size[case.world_size] = world, generation
            else:
                world.kill()
        return judgement, time.monotonic() - started_at_s

    def close(self) -> None:
        """Let all ranks go."""
        while self._world_by_size:
            _, (world, _) = self._world_by_size.popitem()
            world.close()


# Making a case smaller


def shrink(case: FuzzCase, is_same: Callable[[FuzzCase], bool]) -> FuzzCase:
    """The smallest case found, by leaving one thing out at a time, of which ``is_same``."""
    is_smaller = True
    while is_smaller:
        is_smaller = False
        for candidate in _smaller(case):
            if is_same(candidate):
                case, is_smaller = candidate, True
                break
    return case


# The simplest first.
PLANS = [
    Plan.by_hand(microbatch_sizes=sizes, rank_batch_sizes=batches, recompute=recompute)
    for sizes, batches in (
        ([2], [2]),
        ([1], [2]),
        ([1, 1], [1, 1]),
        ([1, 2], [2, 2]),
        ([1, 0], [2, 0]),
    )
    for recompute in (False, True)
]
LENGTH = 5  # no batch is as long


def _smaller(case: FuzzCase) -> Iterator[FuzzCase]:
    known = PLANS.index(case.plan) if case.plan in PLANS else len(PLANS)
    for plan in PLANS[:known]:
        if plan.world_size <= case.world_size:
            yield _under(case, plan)
    if len(case.steps) > 1:
        yield replace(case, steps=case.steps[:-1])
        yield replace(case, steps=case.steps[1:])
    plain = _under(case, case.plan)
    of_one_length = replace(
        case, steps=tuple(replace(step, length=LENGTH) for step in case.steps)
    )
    yield from (each for each in (plain, of_one_length) if each.steps != case.steps)
    yield from _with_defaults(case)
    for name in case.options.keys() - {"loss_fn"}:
        options = {key: value for key, value in case.options.items() if key != name}
        yield replace(case, options=options)
    model = case.model
    for i in range(len(model.units)):
        if len(model.units) > 1:
            yield replace(case, model=_without_unit(model, i))
    for simpler in _with_defaults(model):
        yield replace(case, model=simpler.made_consistent())
    for i, unit in enumerate(model.units):
        for simple in _with_defaults(unit):
            units = (*model.units[:i], simple, *model.units[i + 1 :])
            yield replace(case, model=replace(model, units=units))


def _under(case: FuzzCase, plan: Plan) -> FuzzCase:
    """With whole batches of a plan."""
    sizes = tuple(rank.rank_batch_size for rank in plan.ranks)
    steps = tuple(StepShape(sizes=sizes, length=step.length) for step in case.steps)
    kinds = case.kinds if plan is case.plan else None
    return replace(case, plan=plan, world_size=len(sizes), steps=steps, kinds=kinds)


def _without_unit(model: ModelShape, i: int) -> ModelShape:
    units = (*model.units[:i], *model.units[i + 1 :])
    order = tuple(each - (each > i) for each in model.order if each != i)
    return replace(model, units=units, order=order or (0,))


def _with_defaults(record: Any) -> Iterator[Any]:
    """The record with one field more as it is by default."""
    for each in fields(record):
        if each.default is MISSING or getattr(record, each.name) == each.default:
            continue
        yield replace(record, **{each.name: each.default})
    if isinstance(record, ModelShape) and len(record.order) > len(record.units):
        yield replace(record, order=tuple(range(len(record.units))))
    if isinstance(record, UnitShape) and record.core == "batchnorm":
        yield replace(record, core="attention")
