"""Where memory binds, is a plan in rounds and with host memory faster than one round?

python -m experiments.memory_binds.run          some ten minutes
python -m experiments.memory_binds.run --quick  one turn of each plan, and keeps nothing
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from experiments.common.launch import FORKED, run_ranks
from experiments.common.results import Bar, Page, console, parse_cases, parser_of
from experiments.common.systems import Rounds, TimedStep, by_plan, check_same_steps, take_turns
from experiments.memory_binds.model import Model, batch_of
from experiments.pipelines.over_links.run import HEADER, STEPS, Arm, Sample, Turns
from shardhet import DeviceSpec, Plan, find_plan
from shardhet.planner import Constraints
from shardhet.pricing.cost import CostModel
from shardhet.pricing.scenario import Scenario
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
    ONE_ROUND: Constraints(max_rounds=1),
    "rounds": Constraints(),
    "rounds and host memory": Constraints(
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


def measured(rank: int, case: Case) -> Scenario:
    """What the devices can do."""
    return measure(
        TrainedModel(
            module=Model(SPEEDS[rank]), batch=ExampleBatch(args=batch_of(GLOBAL_BATCH_SIZE))
        ),
        device_spec=_spec(rank, case),
        emulated=EmulatedDevice(memory_bytes=case.mib[rank] * MIB),  # for tensors alone
        effort=MeasuringEffort(max_microbatch_size=8, num_repeats=2, time_limit_s=20.0),
    ).scenario


def train(rank: int, case: Case, arms: Sequence[Arm], rounds: Rounds) -> list[TimedStep]:
    """Take steps of all plans in turn."""
    batch, spec = batch_of(GLOBAL_BATCH_SIZE), _spec(rank, case)
    steps = {
        arm.name: by_plan(
            Model(SPEEDS[rank]), arm.plan, batch, spec=spec, learning_rate=LEARNING_RATE
        )
        for arm in arms
    }
    check_same_steps(steps)
    numbered = {name: lambda _step, name=name: steps[name]() for name in steps}
    return take_turns(numbered, rounds, in_line=True)


def _spec(rank: int, case: Case) -> DeviceSpec:
    return DeviceSpec(
        host="here",
        kind=f"{SPEEDS[rank]:g} a second",
        memory_capacity_bytes=case.mib[rank] * MIB,
    )


def _arms(scenario: Scenario) -> list[Arm]:
    """What the planner finds."""
    arms = []
    for name, demands in ARMS.items():
        plan = find_plan(scenario, global_batch_size=GLOBAL_BATCH_SIZE, constraints=demands)
        predicted_s = CostModel(scenario).predict(plan).step_time_s
        arms.append(Arm(name, plan, tuple(range(len(SPEEDS))), predicted_s))
    return arms


def _form(plan: Plan) -> str:
    """Rounds, and on which devices what is recomputed or on the host."""
    parts = [f"{plan.num_rounds} x {plan.round_size}"]
    for what, name in (
        ("recompute", "recomputed_units"),
        ("inputs on the host", "inputs_on_host"),
        ("optimizer on the host", "optimizer_on_host"),
    ):
        which = ",".join(str(i) for i, rank in enumerate(plan.ranks) if getattr(rank, name))
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
        scenario = run_ranks(measured, len(SPEEDS), case, context=FORKED)[0]
        arms = _arms(scenario)
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
        turns = Turns(samples, case.name, GLOBAL_BATCH_SIZE / sum(SPEEDS))
        rows += turns.rows(ONE_ROUND, is_inverse=True)
        others = [plan for plan in turns.plans if plan != ONE_ROUND]
        gains = [turns.ratio(ONE_ROUND, plan).median for plan in others]
        measured = max(gains) if case.at_least > 1 else min(gains)
        claim = f"{case.name}: times as fast as one round"
        bars.append(Bar(claim=claim, measured=measured, at_least=case.at_least))
    page.table(STEPS, [*HEADER, "times as fast as one round"], rows)
    page.bars(bars)


if __name__ == "__main__":
    main()
