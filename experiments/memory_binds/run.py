"""Where memory binds, is a plan in rounds and with host memory faster than one round?

python -m experiments.memory_binds.run          some ten minutes
python -m experiments.memory_binds.run --quick  one turn of each plan, and keeps nothing
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import torch

from experiments.common.launch import FORKED, run_ranks
from experiments.common.results import Bar, Page, Spread, console, parse_cases, parser_of
from experiments.common.systems import (
    LOSS_TOLERANCE,
    Rounds,
    TimedStep,
    fused_adamw,
    take_turns,
)
from experiments.memory_binds.model import Model, batch_of
from shardhet import DeviceSpec, HetFSDP, Plan, find_plan
from shardhet.planner import Demands
from shardhet.pricing.cost import CostModel
from shardhet.pricing.setting import Setting
from shardhet.profiler.batch import ExampleBatch, TrainedModel
from shardhet.profiler.measure import MeasuringEffort, measure
from shardhet.training.emulation import EmulatedDevice

HERE = Path(__file__).parent
SPEEDS = (24.0, 12.0, 6.0, 6.0)  # samples a second
GLOBAL_BATCH_SIZE = 96
LEARNING_RATE = 1e-3
MIB = 2**20
ROUNDS = Rounds(num_rounds=5, num_steps=2)
ONE_ROUND = "one round"
ARMS = {  # what the planner may choose
    ONE_ROUND: Demands(max_rounds=1),
    "rounds": Demands(),
    "rounds and host memory": Demands(
        may_keep_inputs_on_host=True, may_keep_optimizer_on_host=True
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """The memory of the four devices."""

    name: str
    mib: tuple[int, int, int, int]
    at_least: float  # of one round's time, that of the best


CASES = (
    Case(name="memory binds", mib=(16, 12, 6, 24), at_least=1.15),
    Case(name="nothing binds", mib=(4096, 4096, 4096, 4096), at_least=0.99),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """A plan of the planner."""

    name: str
    plan: Plan
    predicted_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One step of one plan."""

    case: str
    plan: str
    form: str  # rounds, and on which devices what is recomputed or on the host
    predicted_s: float
    turn: int
    seconds: float  # of the slowest rank


def measured(rank: int, case: Case) -> Setting:
    """What the devices can do."""
    return measure(
        TrainedModel(
            module=Model(SPEEDS[rank]), batch=ExampleBatch(args=batch_of(GLOBAL_BATCH_SIZE))
        ),
        device_spec=_spec(rank, case),
        emulated=EmulatedDevice(memory_bytes=case.mib[rank] * MIB),  # for tensors alone
        effort=MeasuringEffort(max_microbatch_size=8, num_repeats=2, time_limit_s=20.0),
    ).setting


def train(rank: int, case: Case, arms: Sequence[Arm], rounds: Rounds) -> list[TimedStep]:
    """Take steps of all plans in turn."""
    steps = {arm.name: _step_of(rank, arm.plan, _spec(rank, case)) for arm in arms}
    _check_losses(steps)
    return take_turns(
        {name: _numbered(step) for name, step in steps.items()}, rounds, in_line=True
    )


def _spec(rank: int, case: Case) -> DeviceSpec:
    return DeviceSpec(
        host="here",
        kind=f"{SPEEDS[rank]:g} a second",
        memory_capacity_bytes=case.mib[rank] * MIB,
    )


def _arms(setting: Setting) -> list[Arm]:
    """What the planner finds."""
    arms = []
    for name, demands in ARMS.items():
        plan = find_plan(setting, global_batch_size=GLOBAL_BATCH_SIZE, demands=demands)
        predicted_s = CostModel(setting).predict(plan).step_time_s
        arms.append(Arm(name=name, plan=plan, predicted_s=predicted_s))
    return arms


def _step_of(rank: int, plan: Plan, spec: DeviceSpec) -> Callable[[], float]:
    model = HetFSDP(Model(SPEEDS[rank]), plan, device_spec=spec)
    optimizer = fused_adamw(model.parameters(), LEARNING_RATE)
    mine = plan.sample_indices(model.position)
    own = tuple(each[mine] for each in batch_of(GLOBAL_BATCH_SIZE))

    def step() -> float:
        mean_loss = model.forward_backward(*own)
        optimizer.step()
        optimizer.zero_grad()
        assert mean_loss is not None
        return mean_loss

    return step


def _numbered(step: Callable[[], float]) -> Callable[[int], object]:
    return lambda _number: step()


def _check_losses(steps: Mapping[str, Callable[[], float]]) -> None:
    """Take two steps of each; all have the same losses.  Collective."""
    losses = torch.tensor([[step() for step in (each, each)] for each in steps.values()])
    if not torch.allclose(losses, losses[:1], rtol=LOSS_TOLERANCE, atol=0):
        raise RuntimeError(f"plans differ in their losses: {losses.tolist()} of {list(steps)}")


def _form(plan: Plan) -> str:
    def those(holds: Sequence[object]) -> str:
        return ",".join(str(i) for i, each in enumerate(holds) if each)

    parts = [f"{plan.num_rounds} x {plan.round_size}"]
    recomputes = those([rank.recomputed_units for rank in plan.ranks])
    inputs = those([rank.inputs_on_host for rank in plan.ranks])
    optimizer = those([rank.optimizer_on_host for rank in plan.ranks])
    for what, which in (
        ("recompute", recomputes),
        ("inputs on the host", inputs),
        ("optimizer on the host", optimizer),
    ):
        parts += [f"{which} {what}"] * bool(which)
    return "; ".join(parts)


def main() -> None:
    """Run the cases and keep what they took."""
    parser = parser_of(__doc__, quick="one turn of each plan, and keeps nothing")
    options = parse_cases(parser, CASES)
    page = Page(HERE, is_kept=not options.quick and len(options.cases) == len(CASES))
    rounds = replace(ROUNDS, num_rounds=1, num_steps=1) if options.quick else ROUNDS
    samples: list[Sample] = []
    for case in options.cases:
        console.print(case.name, markup=False)
        setting = run_ranks(measured, len(SPEEDS), case, context=FORKED)[0]
        arms = _arms(setting)
        for arm in arms:
            console.print(f"{arm.name}: {_form(arm.plan)}, {arm.predicted_s:.2f} s")
        steps = run_ranks(train, len(SPEEDS), case, arms, rounds, context=FORKED)[0]
        arm_of = {arm.name: arm for arm in arms}
        samples += [
            Sample(
                case=case.name,
                plan=each.system,
                form=_form(arm_of[each.system].plan),
                predicted_s=arm_of[each.system].predicted_s,
                turn=each.round,
                seconds=each.slowest_rank_s,
            )
            for each in steps
        ]
    report(options.cases, samples, page)
    page.keep({"results.csv": samples})


def report(cases: Sequence[Case], samples: Sequence[Sample], page: Page) -> None:
    """A row for each plan, and the bars."""
    rows, bars = [], []
    for case in cases:
        of_case = [each for each in samples if each.case == case.name]
        by_plan = {each.plan: each for each in of_case}
        turns = {plan: _by_turn(of_case, plan) for plan in by_plan}
        least_s = GLOBAL_BATCH_SIZE / sum(SPEEDS)
        gains = {
            plan: Spread.of([turns[ONE_ROUND][t] / each[t] for t in each])
            for plan, each in turns.items()
        }
        for plan, one in by_plan.items():
            middle = median(turns[plan].values())
            rows.append(
                [
                    f"{case.name}: {plan}",
                    one.form,
                    f"{one.predicted_s:.2f}",
                    Spread.of(list(turns[plan].values())).cell(2),
                    f"{one.predicted_s / middle - 1:+.1%}",
                    f"{least_s / middle:.2f}",
                    gains[plan].cell(2),
                ]
            )
        least = min(gain.median for plan, gain in gains.items() if plan != ONE_ROUND)
        most = max(gain.median for plan, gain in gains.items() if plan != ONE_ROUND)
        bars.append(
            Bar(
                claim=f"{case.name}: times as fast as one round",
                measured=most if case.at_least > 1 else least,
                at_least=case.at_least,
            )
        )
    header = [
        *("plan", "form", "predicted (s)", "step (s)", "off", "of the sum of speeds"),
        "times as fast as one round",
    ]
    page.table("Steps (median of turns, 10th and 90th percentile)", header, rows)
    page.bars(bars)


def _by_turn(samples: Sequence[Sample], plan: str) -> dict[int, float]:
    mine = [each for each in samples if each.plan == plan]
    turns = dict.fromkeys(each.turn for each in mine)
    return {t: median(each.seconds for each in mine if each.turn == t) for t in turns}


if __name__ == "__main__":
    main()
