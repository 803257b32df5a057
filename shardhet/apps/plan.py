"""``shardhet plan``: finds the best plan for a cluster and a model, and what limits it."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

from shardhet.apps.common.outputs import check_outputs
from shardhet.apps.common.planning_input import Door, load, read_request
from shardhet.apps.fewer_devices import BetterWithout, better_without
from shardhet.apps.plan_report import Alternative, PlanReport, show_report, wide_console
from shardhet.config.checks import ConfigError
from shardhet.config.planning import LEAST_THROUGHPUT, Inputs, PlannerConf
from shardhet.planner import Demands, PlanError, PlanSolution, solve
from shardhet.planner.baselines import compute_only, even, memory_only
from shardhet.planner.cephalo import cephalo
from shardhet.planner.certificate import MAX_VARIABLES, Certificate
from shardhet.planner.explain import Explanation, Objective, Situation, explain
from shardhet.planner.find import certify_search
from shardhet.planner.objectives import largest_batch, largest_batch_size, least_memory
from shardhet.planner.search import Effort, Found
from shardhet.pricing.cost import CostModel
from shardhet.simulator.simulation import simulate

DOOR = Door(
    command="shardhet plan",
    config_name="planner",
    usage="""\
shardhet plan key=value ...

  shardhet plan cluster=two_regions_128 model=llama_7b global_batch_size=512
  shardhet plan cluster=my_cluster.yaml model=gpt_1_3b out=plan.json picture=plan.png
  shardhet plan measured=FOLDER        the three files that shardhet measure has written
  shardhet plan limits.0.memory_gib=8 limits.3.batch=0 'equal=[[1,2]]'
  shardhet plan objective=largest_batch        or least_memory, or throughput
  shardhet plan objective=least_memory spared=[0]    on the device with the screen
  shardhet plan leave_out=auto         without the devices that only slow it down
  shardhet plan certify=true           small problems a second time, by HiGHS alone""",
)
# Sufficient for comparisons; the plan itself is searched until it is proven optimal.
COMPARED = Effort(relative_gap=1e-4)


@dataclass(frozen=True, slots=True)
class _Answer:
    """A plan, and its objective for the explanation."""

    solution: PlanSolution
    value: float
    objective: Objective | None  # None: too slow to evaluate often
    note: str = ""


def main(arguments: Sequence[str] | None = None) -> None:
    """Plan and show; the exit status is 2 if the input is wrong, and 1 if no plan exists."""
    request = read_request(DOOR, arguments or [])
    if request is None:
        return
    errors = Console(stderr=True, highlight=False, soft_wrap=True)
    try:
        conf, inputs = load(DOOR, request, PlannerConf)
        demands = conf.to_demands(inputs.setting.cluster.devices)
        check_outputs(out=conf.out, picture=conf.picture)
        report = make_report(conf, inputs, demands)
    except PlanError as error:
        errors.print(str(error), markup=False)
        raise SystemExit(1) from None
    except ValueError as error:  # a ConfigError, or files that do not match
        errors.print(f"{error}\nNothing was planned.", markup=False)
        raise SystemExit(2) from None
    console = wide_console()
    show_report(report, console)
    _write(conf, report, console)


def make_report(conf: PlannerConf, inputs: Inputs, demands: Demands) -> PlanReport:
    """The plan with everything that is reported about it."""
    answer = _answer(conf, inputs, demands)
    without = _without(conf, inputs, demands, answer)
    if without is not None and conf.leave_out == "auto":
        fewer = without.fewer
        inputs, demands = replace(inputs, setting=fewer.setting), fewer.demands
        answer = _answer(conf, inputs, demands)
    plan = answer.solution.plan
    explanation: Explanation | None = None
    if conf.explain and answer.objective is not None:
        explanation = explain(
            answer.solution,
            Situation(setting=inputs.setting, demands=demands),
            value=answer.value,
            objective=answer.objective,
        )
    return PlanReport(
        inputs=inputs,
        solution=answer.solution,
        timeline=simulate(plan, inputs.setting),
        alternatives=_alternatives(conf, inputs, demands, plan.global_batch_size)
        if conf.baselines
        else (),
        explanation=explanation,
        gain_unit="samples" if conf.objective == "largest_batch" else "samples/s",
        note=answer.note,
        certificate=_certificate(conf, inputs, demands, plan.global_batch_size)
        if conf.certify
        else "",
        comparison_note=_comparison_note(demands),
        without=without,
        is_without=conf.leave_out == "auto",
    )


def _without(
    conf: PlannerConf, inputs: Inputs, demands: Demands, answer: _Answer
) -> BetterWithout | None:
    """The devices that are better left out, if that is asked for."""
    if conf.objective != "throughput" or conf.leave_out == "never":
        return None
    return better_without(
        inputs,
        answer.solution,
        demands=demands,
        derived=conf.derived if conf.measured is None else None,
        effort=COMPARED,
    )


def _certificate(conf: PlannerConf, inputs: Inputs, demands: Demands, batch: int) -> str:
    """What HiGHS alone says about the same problem.

    Raises ``RuntimeError`` if it contradicts the search, because one of them is then wrong.
    """
    if conf.objective == "least_memory":
        raise ConfigError(
            "certify: objective=least_memory solves many problems. Leave certify out, or take "
            "objective=throughput."
        )
    started_at_s = time.perf_counter()
    certificate, found = certify_search(
        inputs.setting,
        global_batch_size=batch,
        demands=demands,
    )
    took = f"{certificate.num_variables:,} choices, {time.perf_counter() - started_at_s:.2g} s"
    return _what_is_certified(certificate, found, took)


def _what_is_certified(certificate: Certificate, found: Found, took: str) -> str:
    objective_s = found.value.objective_s
    if certificate.num_variables > MAX_VARIABLES:
        return (
            f"Not certified: HiGHS alone is given up to {MAX_VARIABLES:,} choices, here are "
            f"{certificate.num_variables:,}."
        )
    if not certificate.is_solved or certificate.objective_s is None:
        bound = "without a bound"
        if certificate.bound_s is not None:
            bound = f"with a bound of {certificate.bound_s:.6g} s"
        return (
            f"Not certified: HiGHS alone was stopped {bound}, the search has "
            f"{objective_s:.6g} s ({took})."
        )
    if certificate.agrees_with(objective_s):
        return f"Certified: HiGHS alone finds {objective_s:.9g} s as well ({took})."
    if found.lower_bound_s < certificate.objective_s < objective_s:
        return (
            f"Not certified: HiGHS alone finds {certificate.objective_s:.6g} s. The search has "
            f"{objective_s:.6g} s and was stopped before it had proven that to be the least "
            f"({took})."
        )
    raise RuntimeError(
        f"plan: HiGHS alone finds {certificate.objective_s} s and the search {objective_s} "
        "s for the same problem. This is a fault of ours: please report it with the input."
    )


def _comparison_note(demands: Demands) -> str:
    """Which demands the simpler plans cannot meet."""
    limits = demands.limits.values()
    if not (limits or demands.equal):
        return ""
    fixed = "even batches are not those that limits fix; " * any(
        each.rank_batch_size is not None for each in limits
    )
    fixed += "even state is not what limits fix; " * any(
        each.state_share is not None for each in limits
    )
    return f" ({fixed}Cephalo's knows no limits)"


def _answer(conf: PlannerConf, inputs: Inputs, demands: Demands) -> _Answer:
    """The best plan for the requested objective."""
    setting = inputs.setting
    if conf.objective == "largest_batch":
        solution = largest_batch(setting, demands=demands)
        size = solution.plan.global_batch_size

        def batch_size(situation: Situation) -> float:
            model = CostModel(situation.setting)
            return float(largest_batch_size(model, situation.demands))

        return _Answer(solution, size, batch_size, f"the largest batch that fits: {size}")
    batch = conf.global_batch_size
    spared = conf.to_spared(setting.cluster.devices)
    best = solve(setting, global_batch_size=batch, demands=demands)
    if conf.objective == "throughput":

        def samples_per_s(situation: Situation) -> float:
            return solve(
                situation.setting,
                global_batch_size=batch,
                demands=situation.demands,
                effort=COMPARED,
                num_rescored=1,
            ).samples_per_s

        return _Answer(best, best.samples_per_s, samples_per_s)
    wanted = conf.min_samples_per_s or LEAST_THROUGHPUT * best.samples_per_s
    least = least_memory(
        setting,
        global_batch_size=batch,
        min_samples_per_s=wanted,
        devices=spared,
        demands=demands,
        effort=COMPARED,
    )
    which = "no device" if not spared else f"none of devices {', '.join(map(str, spared))}"
    if len(spared) == 1:
        which = f"device {spared[0]} never"
    note = (
        f"the least memory for {wanted:.4g} samples/s: {which} uses more than "
        f"{least.budget_fraction:.1%} of its budget (no plan can do with less than "
        f"{least.lower_bound:.1%})"
    )
    return _Answer(least.solution, wanted, None, note)


def _alternatives(
    conf: PlannerConf, inputs: Inputs, demands: Demands, batch: int
) -> tuple[Alternative, ...]:
    """Simpler plans for the same batch and limits."""
    found = []
    for name, baseline in (
        ("even sharding (stock FSDP)", even),
        ("compute only: even state", compute_only),
        ("memory only: even batches", memory_only),
    ):
        try:
            simpler = baseline(
                inputs.setting, global_batch_size=batch, demands=demands, effort=COMPARED
            )
        except PlanError:
            found.append(Alternative(name=name, step_time_s=None, reason="does not fit"))
        else:
            seconds = simpler.predicted.step_time_s
            found.append(Alternative(name=name, step_time_s=seconds))
    name = "Cephalo's formulation"
    try:
        plan = cephalo(inputs.setting, global_batch_size=batch)
    except PlanError as error:
        reason = "too slow to search" if "too slow" in str(error) else "finds none that fits"
        found.append(Alternative(name=name, step_time_s=None, reason=reason))
    else:
        seconds = CostModel(inputs.setting).predict(plan).step_time_s
        found.append(Alternative(name=name, step_time_s=seconds))
    return tuple(found)


def _write(conf: PlannerConf, report: PlanReport, console: Console) -> None:
    """Write the requested files."""
    if conf.out is not None:
        report.solution.plan.save(conf.out)
        console.print(f"written to {conf.out}", markup=False, soft_wrap=True)
    else:
        console.print("out=plan.json keeps the plan for shardhet train and simulate.")
    if conf.setting_out is not None:
        report.inputs.setting.save(conf.setting_out)
        console.print(
            f"written to {conf.setting_out}: measured={conf.setting_out} takes these devices",
            markup=False,
            soft_wrap=True,
        )
    if conf.picture is not None:
        from shardhet.apps.plan_pictures import draw_report

        draw_report(report, Path(conf.picture))
        console.print(f"drawn to {conf.picture}", markup=False, soft_wrap=True)
