"""Do planned pipelines take as long as predicted, and are they faster than what they replace?

python -m experiments.pipelines.over_links.run          half an hour, as an administrator
python -m experiments.pipelines.over_links.run --quick  one cluster, and keeps nothing
"""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from math import exp, log
from pathlib import Path
from statistics import mean, median
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist

from experiments.common.machine import REPOSITORY
from experiments.common.results import (
    Bar,
    Page,
    Spread,
    console,
    parse_cases,
    parser_of,
    write_csv,
)
from experiments.common.systems import fused_adamw
from experiments.decoders import Batch, decoder_config, make_decoder, random_batches
from shardhet import DeviceSpec, HetFSDP, Plan, Stage, find_plan
from shardhet.apps.launch.emulated_link import EmulatedLink, emulated_link
from shardhet.comm.progress import phase
from shardhet.planner.stages.find import find_pipeline
from shardhet.pricing.cost import CostModel
from shardhet.pricing.part import part_of
from shardhet.pricing.setting import Setting
from shardhet.profiler.batch import ExampleBatch, TrainedModel
from shardhet.profiler.measure import MeasuringEffort, measure
from shardhet.simulator.stages import price_of
from shardhet.training.emulation import EmulatedDevice

HERE = Path(__file__).parent
CONFIG = decoder_config(width=128, num_layers=6, seq_len=64)
GLOBAL_BATCH_SIZE = 16
PORT = 29547
TIMEOUT_S = 1500.0
LEARNING_RATE = 1e-3
PLANNED, FLAT, ALONE = "planned pipeline", "without stages", "without the slow group"


@dataclass(frozen=True, slots=True, kw_only=True)
class ByHand:
    """A pipeline of both groups, good or bad, with as many samples on each rank."""

    name: str
    first_units: int  # of the first group
    num_rounds: int
    in_flight: int = 2  # of the first group


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Two groups of two emulated devices each, and what joins them."""

    name: str
    speeds: tuple[float, float, float, float]  # parts of a core; the first two are a group
    mbit_per_s: float  # in each direction
    by_hand: tuple[ByHand, ...]


CASES = (
    Case(
        name="office",
        speeds=(0.2, 0.15, 0.15, 0.15),
        mbit_per_s=16.0,
        by_hand=(
            ByHand(name="cut in half", first_units=4, num_rounds=8),
            ByHand(name="one in flight", first_units=4, num_rounds=8, in_flight=1),
        ),
    ),
    Case(
        name="lab",
        speeds=(0.2, 0.2, 0.12, 0.12),
        mbit_per_s=25.0,
        by_hand=(
            ByHand(name="a late cut", first_units=7, num_rounds=8),
            ByHand(name="two rounds", first_units=5, num_rounds=2),
        ),
    ),
    Case(
        name="sites",
        speeds=(0.15, 0.15, 0.12, 0.12),
        mbit_per_s=12.0,
        by_hand=(ByHand(name="an early cut", first_units=3, num_rounds=4),),
    ),
)
NEAR = (0, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """A plan, and the ranks that follow it."""

    name: str
    plan: Plan
    ranks: tuple[int, ...]  # in plan order
    predicted_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One step of one plan."""

    case: str
    plan: str
    form: str  # stages, rounds
    predicted_s: float
    turn: int
    seconds: float  # of the slowest rank


# Plans


def arms_of(case: Case, setting: Setting) -> list[Arm]:
    """The plans of a case, the same on every rank."""
    everyone = tuple(range(setting.cluster.world_size))
    flat = find_plan(setting, global_batch_size=GLOBAL_BATCH_SIZE)
    found = find_pipeline(
        setting,
        global_batch_size=GLOBAL_BATCH_SIZE,
        smaller=partial(part_of, setting),
        max_stages=2,
        needs_all=True,
    )
    assert found is not None
    order = sum(found.groups, ())
    of_fast = part_of(setting, NEAR)
    alone = find_plan(of_fast, global_batch_size=GLOBAL_BATCH_SIZE)
    arms = [
        Arm(name=PLANNED, plan=found.plan, ranks=order, predicted_s=found.step_time_s),
        Arm(
            name=FLAT,
            plan=flat,
            ranks=everyone,
            predicted_s=CostModel(setting).predict(flat).step_time_s,
        ),
        Arm(
            name=ALONE,
            plan=alone,
            ranks=NEAR,
            predicted_s=CostModel(of_fast).predict(alone).step_time_s,
        ),
    ]
    for each in case.by_hand:
        plan = _plan_by_hand(each, setting)
        price = price_of(plan, setting, partial(part_of, setting))
        predicted_s = price.timeline().step_time_s
        arms.append(Arm(name=each.name, plan=plan, ranks=everyone, predicted_s=predicted_s))
    return arms


def _plan_by_hand(each: ByHand, setting: Setting) -> Plan:
    units = [unit.fqn for unit in setting.workload.units if unit.fqn]
    size = GLOBAL_BATCH_SIZE // each.num_rounds // 2
    return Plan.by_hand(
        microbatch_sizes=[size] * 4,
        num_rounds=each.num_rounds,
        devices=setting.cluster.devices,
        stages=[
            Stage(
                units=tuple(units[: each.first_units]), num_ranks=2, in_flight=each.in_flight
            ),
            Stage(units=tuple(units[each.first_units :]), num_ranks=2, in_flight=1),
        ],
    )


# On each rank


def train(case: Case, answer: Path, num_turns: int, num_steps: int) -> None:
    """Measure, plan, and take steps of all plans in turn."""
    torch.set_num_threads(1)
    link = EmulatedLink.of_environment()
    rank = int(os.environ["RANK"])
    assert link is not None
    link.enter(rank)
    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT_S))
    near = dist.new_group(list(NEAR))  # before any rank makes groups that others do not
    side = "near" if rank < link.first_ranks else "far"
    device = EmulatedDevice(speed=case.speeds[rank])
    spec = DeviceSpec(
        host=f"{socket.gethostname()}-{side}",
        kind=f"{device.speed:g} of a core, {side}",
        memory_capacity_bytes=2**32,
    )
    batch = random_batches(CONFIG, GLOBAL_BATCH_SIZE, seed=1)[0]
    setting = measure(
        TrainedModel(module=make_decoder(CONFIG), batch=ExampleBatch(args=batch)),
        device_spec=spec,
        emulated=device,
        effort=MeasuringEffort(max_microbatch_size=8, num_repeats=3, time_limit_s=20.0),
        on_progress=lambda text, _: _say(text),
    ).setting
    with phase("planning"):
        [arms] = _told([arms_of(case, setting)] if rank == 0 else None)
    groups = {arm.name: near if arm.ranks == NEAR else None for arm in arms}
    # That of a part of the ranks last: it makes groups that the others know nothing of.
    in_order = sorted(arms, key=lambda arm: -len(arm.ranks))
    steps = {arm.name: _step_of(arm, groups[arm.name], device, spec, batch) for arm in in_order}
    losses: dict[str, float] = {}
    samples: list[Sample] = []
    for turn in range(-1, num_turns):  # the first one warms up
        for arm in arms:
            _say(f"turn {turn}: {arm.name}, {_form(arm.plan)}")
            for number in range(num_steps + 1):
                dist.barrier()
                start_s = time.perf_counter()
                loss = steps[arm.name]()
                mine = torch.tensor([time.perf_counter() - start_s, loss or 0.0])
                dist.all_reduce(mine, op=dist.ReduceOp.MAX)
                if turn == -1 and not number:
                    losses[arm.name] = float(mine[1])
                if turn >= 0 and number:
                    samples.append(
                        Sample(
                            case=case.name,
                            plan=arm.name,
                            form=_form(arm.plan),
                            predicted_s=arm.predicted_s,
                            turn=turn,
                            seconds=float(mine[0]),
                        )
                    )
    if max(losses.values()) - min(losses.values()) > 1e-4:
        raise RuntimeError(f"plans differ in their first loss: {losses}")
    if rank == 0:
        answer.write_text(json.dumps(list(map(asdict, samples))), encoding="ascii")
    dist.barrier()
    dist.destroy_process_group()


def _say(text: str) -> None:
    """What the first rank does now."""
    if not dist.get_rank():
        console.print(text, markup=False)


def _told(arms: list[list[Arm]] | None) -> list[list[Arm]]:
    """What rank zero has found, on every rank."""
    told = [arms]
    dist.broadcast_object_list(told)
    assert told[0] is not None
    return told[0]


def _step_of(
    arm: Arm, group: Any, device: EmulatedDevice, spec: DeviceSpec, batch: Batch
) -> Callable[[], float | None]:
    """Takes a step of the plan; nothing on ranks that it leaves out."""
    if dist.get_rank() not in arm.ranks:
        return lambda: None
    model = HetFSDP(make_decoder(CONFIG), arm.plan, group=group, device_spec=spec)
    optimizer = fused_adamw(model.parameters(), LEARNING_RATE)
    device.slow_down(model, optimizer)
    mine = arm.plan.sample_indices(model.position)
    own = tuple(each[mine] for each in batch)

    def step() -> float | None:
        mean_loss = model.forward_backward(*own)
        optimizer.step()
        optimizer.zero_grad()
        return mean_loss

    return step


def _form(plan: Plan) -> str:
    rounds = f"{plan.num_rounds} x {plan.round_size} samples"
    if plan.stages is None:
        return rounds
    cut = " + ".join(str(len(each.units)) for each in plan.stages)
    return f"{cut} units, {rounds}"


# From outside


def run(case: Case, num_turns: int, num_steps: int) -> list[Sample]:
    """All ranks of a case, each on its side of the link."""
    with (
        TemporaryDirectory() as name,
        emulated_link(len(NEAR), case.mbit_per_s) as link,
    ):
        link.publish()
        answer = Path(name, "answer.json")
        ranks = [
            subprocess.Popen(
                [
                    *(sys.executable, "-m", "experiments.pipelines.over_links.run"),
                    *("--as-rank", str(answer), "--only", case.name),
                    *("--turns", str(num_turns), "--steps", str(num_steps)),
                ],
                env={
                    **os.environ,
                    "RANK": str(rank),
                    "WORLD_SIZE": str(len(case.speeds)),
                    "LOCAL_RANK": str(rank),
                    "MASTER_ADDR": link.address,
                    "MASTER_PORT": str(PORT),
                    "OMP_NUM_THREADS": "1",
                    "SHARDHET_TRANSPORT": "gloo",
                    "PYTHONPATH": str(REPOSITORY),
                },
                stdout=subprocess.PIPE if rank else None,
                stderr=subprocess.STDOUT if rank else None,
                text=True,
            )
            for rank in range(len(case.speeds))
        ]
        printed = [each.communicate(timeout=TIMEOUT_S)[0] for each in ranks]
        for rank, process in enumerate(ranks):
            if process.returncode:
                raise RuntimeError(f"{case.name}: rank {rank} failed:\n{printed[rank]}")
        return [Sample(**each) for each in json.loads(answer.read_text(encoding="ascii"))]


def main() -> None:
    """Run the cases and keep what they took, or be one of their ranks."""
    parser = parser_of(__doc__, quick="the first cluster, one turn, and keeps nothing")
    parser.add_argument("--as-rank", type=Path, help="be one rank; used by the program itself")
    parser.add_argument("--turns", type=int, default=2, help="of each plan")
    parser.add_argument("--steps", type=int, default=1, help="of a turn, besides the first")
    options = parse_cases(parser, CASES)
    if options.as_rank is not None:
        train(options.cases[0], options.as_rank, options.turns, options.steps)
        return
    cases = options.cases[:1] if options.quick else options.cases
    page = Page(HERE, is_kept=len(cases) == len(CASES))
    samples: list[Sample] = []
    for case in cases:
        console.print(case.name, markup=False)
        samples += run(case, 1 if options.quick else options.turns, options.steps)
        if page.is_kept:  # what comes after it may fail
            write_csv(HERE / "results.csv", samples)
    report(samples, page)
    page.keep({"results.csv": samples})


def report(samples: Sequence[Sample], page: Page) -> None:
    """A row for each plan, and the bars."""
    rows, errors, gains = [], [], []
    for case in dict.fromkeys(each.case for each in samples):
        by_plan = {
            plan: [each for each in samples if each.case == case and each.plan == plan]
            for plan in dict.fromkeys(each.plan for each in samples if each.case == case)
        }
        turns = {plan: _by_turn(taken) for plan, taken in by_plan.items()}
        rivals = [FLAT, ALONE]
        for plan, taken in by_plan.items():
            spread = Spread.of(list(turns[plan].values()))
            predicted_s = taken[0].predicted_s
            error = predicted_s / spread.median - 1
            ratio = Spread.of([turns[plan][t] / turns[PLANNED][t] for t in turns[plan]])
            rows.append(
                [
                    f"{case}: {plan}",
                    taken[0].form,
                    f"{predicted_s:.2f}",
                    spread.cell(2),
                    f"{error:+.1%}",
                    ratio.cell(2),
                ]
            )
            if plan not in rivals:
                errors.append(abs(error))
        best = min(rivals, key=lambda each: median(turns[each].values()))
        gains.append(median(turns[best][t] / turns[PLANNED][t] for t in turns[PLANNED]))
    header = ["plan", "form", "predicted (s)", "step (s)", "off", "of the planned pipeline"]
    page.table("Steps (median of turns, 10th and 90th percentile)", header, rows)
    number = len(errors)
    page.bars(
        [
            Bar(
                claim=f"predicted time of {number} pipelines, off on average",
                measured=mean(errors),
                at_most=0.07,
            ),
            Bar(
                claim="the better of the same planner without stages and without the slow "
                "group, of the planned pipeline; geometric mean of the clusters",
                measured=exp(mean(map(log, gains))),
                at_least=1.3,
            ),
            Bar(
                claim="the same, median of the clusters",
                measured=median(gains),
                at_least=1.3,
            ),
        ]
    )


def _by_turn(samples: Sequence[Sample]) -> dict[int, float]:
    turns = dict.fromkeys(each.turn for each in samples)
    return {t: median(each.seconds for each in samples if each.turn == t) for t in turns}


if __name__ == "__main__":
    main()
