"""The list of a step: what the runtime launches, waits for and computes, on every rank."""

import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import pytest
import torch

from shardhet import HetFSDP, Plan, Stage
from shardhet.comm.channel import Channel
from shardhet.fsdp.sharding.unit import FSDPUnit
from shardhet.fsdp.stages.exchange import StageExchange
from shardhet.fsdp.step.schedule_executor import RUNS, ScheduleExecutor
from shardhet.models.decoder import Decoder
from shardhet.records.ops import Op, OpKind, StageTransfer, ops_of
from shardhet.records.schedule import LaunchKind, Phase, RoundPhase, Schedule
from tests.emulated.accelerator import Accelerator
from tests.small_models import small_decoder
from tests.test_pipelines import CUTS, SEQ_LEN, WORDS, batch_of
from tests.worlds import run_ranks

NUM_RANKS = 3
SEEDS = (0, 2, 3, 4, 10, 19, 23)  # one stage to three, with and without, in all forms
FORMS = [(True, True), (False, True), (False, False)]
Name = tuple[Any, ...]  # of an op
Step = list[tuple[Name, list[Name]]]  # each op, and what has been waited for before it


def drawn(seed: int, *, is_emulated: bool) -> Plan:
    """A plan of three ranks in one to three stages, some without samples."""
    dice = random.Random(seed)
    numbers = dice.choice([[3], [2, 1], [1, 2], [1, 1, 1]])
    sizes: list[int] = []
    for number in numbers:
        cuts = sorted(dice.randint(0, 4) for _ in range(number - 1))
        sizes += [b - a for a, b in zip([0, *cuts], [*cuts, 4], strict=True)]
    in_flight = sorted((dice.randint(1, 4) for _ in numbers), reverse=True)
    after_forward, after_backward = dice.choice(FORMS)
    plan = Plan.by_hand(
        microbatch_sizes=[min(2, size) for size in sizes],
        rank_batch_sizes=sizes,
        num_rounds=dice.randint(1, 4),
        recompute=[dice.random() < 0.5 for _ in sizes],
        reshard_after_forward=after_forward,
        reshard_after_backward=after_backward,
        reduce_each_round=dice.random() < 0.5,
        stages=None
        if len(numbers) == 1 and dice.random() < 0.7
        else [
            Stage(units=units, num_ranks=number, in_flight=held)
            for units, number, held in zip(CUTS[len(numbers)], numbers, in_flight, strict=True)
        ],
    )
    ranks = [
        replace(
            rank,
            inputs_on_host=("*",) if rank.recomputed_units and dice.random() < 0.5 else (),
            optimizer_on_host=not is_emulated and dice.random() < 0.5,
        )
        for rank in plan.ranks
    ]
    return replace(plan, ranks=tuple(ranks))


@dataclass
class Recording:
    """What a rank does in a step."""

    step: Step = field(default_factory=list)
    waited: list[Name] = field(default_factory=list)
    arriving: list[Name] = field(default_factory=list)  # what the device waits for to compute
    schedule: Schedule | None = None

    def add(self, *name: Any) -> None:
        if isinstance(name[0], Phase):
            self.waited, self.arriving = [*self.arriving, *self.waited], []
        self.step.append((name, self.waited))
        self.waited = []


@contextmanager
def recorded(model: HetFSDP, found: Recording) -> Iterator[None]:
    """Record a step of the model."""
    root = model._runtime.root

    def around(owner: Any, name: str, tell: Callable[..., None], *, after: bool = False) -> Any:
        own = getattr(owner, name)

        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            if after:
                result = own(self, *args, **kwargs)
                tell(self, *args)
                return result
            tell(self, *args)
            return own(self, *args, **kwargs)

        return mock.patch.object(owner, name, call)

    def turn(walk: ScheduleExecutor) -> None:
        found.schedule = walk.schedule
        now = walk.schedule.turns[walk.cursor]
        found.add(now.phase, walk._units[now.unit].fqn)

    def message(exchange: StageExchange, op: Op) -> None:
        found.add(op.kind, op.stage_transfer)

    def take(exchange: StageExchange, of: RoundPhase) -> None:
        cut = StageTransfer.to(exchange._stage, of).stage
        if 0 <= cut < len(model.plan.groups) - 1:
            found.arriving.append((OpKind.RECV, StageTransfer(of, cut)))

    def meet(*_: Any) -> None:
        met = ((OpKind.AGREE, ""), [])
        if model.plan.stages is None and found.schedule and found.step[-1] != met:
            found.add(OpKind.AGREE, "")
            found.waited.append((OpKind.AGREE, ""))

    def of_unit(
        kind: LaunchKind, run: Callable[[FSDPUnit], None], tell: Callable[..., None]
    ) -> Callable[[FSDPUnit], None]:
        def call(unit: FSDPUnit) -> None:
            if unit is not root:
                tell(kind, unit.fqn)
            run(unit)

        return call

    with ExitStack() as stack:
        for patch in (
            around(ScheduleExecutor, "begin_turn", turn, after=True),
            around(StageExchange, "hand_over", message),
            around(StageExchange, "take", take),
            around(Channel, "exchange", meet),
        ):
            stack.enter_context(patch)
        handled = {
            kind: replace(
                run,
                launch=of_unit(kind, run.launch, found.add),
                wait=of_unit(kind, run.wait, lambda *name: found.waited.append(name)),
            )
            for kind, run in RUNS.items()
        }
        stack.enter_context(mock.patch.dict(RUNS, handled))
        yield


def listed(model: HetFSDP, schedule: Schedule, *, in_one_order: bool) -> Step:
    """The same from the list."""
    runtime = model._runtime
    place: tuple[Any, ...] = ()
    if model.plan.stages is not None:
        place = runtime.stage, runtime.in_flight
    ops = ops_of(schedule, *place, in_one_order=in_one_order)

    def name(op: Op) -> Name:
        fqn = "" if op.unit < 0 else runtime.units[op.unit].fqn
        return op.kind, fqn if op.stage_transfer is None else op.stage_transfer

    found: Step = []
    waited: list[Name] = []
    for op in ops[:-2]:
        waited += [name(ops[i]) for i in op.after]
        if op.kind is not OpKind.BEGIN:
            found.append((name(op), waited))
            waited = []
    return found


def compare(rank: int, plans: list[Plan], is_emulated: bool) -> None:
    place = Accelerator() if is_emulated else None
    with nullcontext() if place is None else place.installed():
        device = torch.device("cpu") if place is None else place.device
        for plan in plans:
            torch.manual_seed(0)
            config = small_decoder(vocab_size=WORDS, width=8, num_layers=4, seq_len=SEQ_LEN)
            model = HetFSDP(Decoder(config).double(), plan, device=device)
            mine = plan.sample_indices(model.position)
            inputs, targets = (
                each[mine].to(device) for each in batch_of(plan.global_batch_size)
            )
            model.forward_backward(inputs, targets)  # the kinds of calls are known
            model.zero_grad()
            found = Recording()
            with recorded(model, found):
                model.forward_backward(inputs, targets)
            assert found.schedule is not None
            expected = listed(model, found.schedule, in_one_order=is_emulated)
            step = found.step
            while step[-1][0][0] is OpKind.AGREE:
                step.pop()  # at the end of the step
            for i, pair in enumerate(zip(step, expected, strict=False)):
                assert pair[0] == pair[1], (i, plan)
            assert len(step) == len(expected), plan


@pytest.mark.parametrize("is_emulated", [False, True])
def test_the_runtime_does_what_the_list_says(is_emulated: bool) -> None:
    plans = [drawn(seed, is_emulated=is_emulated) for seed in SEEDS]
    run_ranks(compare, NUM_RANKS, plans, is_emulated)
