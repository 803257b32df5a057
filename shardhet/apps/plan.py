"""``shardhet plan``: finds the best plan for a cluster and a model, and what limits it."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

from shardhet.apps.cli.outputs import check_folder_output, check_outputs
from shardhet.apps.cli.quantities import of_budget
from shardhet.apps.cli.streamed import Waiting, WideConsole, refusing, say
from shardhet.apps.planning.fewer_devices import ranges, without_idle
from shardhet.apps.planning.inputs import Door, load, read_request
from shardhet.apps.planning.keeping import keep_plan
from shardhet.apps.planning.report import (
    Alternative,
    PlanReport,
    limit_lines,
    pace_line,
    proof_lines,
    show_alternatives,
    show_plan,
)
from shardhet.apps.planning.stages import faster_pipeline, show_pipeline
from shardhet.apps.planning.what_if import (
    Asked,
    forms,
    in_float16,
    show_best,
    show_gains,
    that_fit,
    tried_within,
    without_some,
)
from shardhet.config.checks import number_of
from shardhet.config.planning import LEAST_THROUGHPUT, Inputs, PlannerConf
from shardhet.planner import Demands, PlanError, PlanSolution, solve
from shardhet.planner.advice.explain import (
    MANY_KINDS,
    Gain,
    Objective,
    Situation,
    explained,
    full_kind,
    gain_of,
    more_of_each,
)
from shardhet.planner.advice.fewer import LEAST_GAIN
from shardhet.planner.advice.steady import (
    OFF,
    disturbances,
    loss_of,
)
from shardhet.planner.baselines import compute_only, even, memory_only, one_round
from shardhet.planner.misses import even_shortfall
from shardhet.planner.objectives import largest_batch, largest_batch_size, least_memory
from shardhet.planner.search.search import Effort
from shardhet.pricing.cost import CostModel
from shardhet.pricing.setting import Setting
from shardhet.records.plan import Plan
from shardhet.simulator.simulation import simulate

DOOR = Door(
    command="shardhet plan",
    config_name="planner",
    usage="""\
shardhet plan key=value ...

  shardhet plan cards='4090+A6000 | 3090x2' network=10GbE model=llama_1b
  shardhet plan model=llama_1b         for the cards of this machine
  shardhet plan cluster=my_cluster.yaml model=gpt_1_3b out=plan.json picture=plan.png
  shardhet plan measured=FOLDER        the three files that shardhet measure has written
  shardhet plan limits.0.memory_gib=8 limits.3.batch=0 'equal=[[1,2]]'
  shardhet plan objective=largest_batch        or least_memory, or throughput
  shardhet plan objective=least_memory spared=[0]    on the device with the screen
  shardhet plan leave_out=auto         without the devices that only slow it down
  shardhet plan max_stages=3           a pipeline of groups of devices, where that is faster""",
)
LEAST_LOSS = 5e-4  # that is stated
# Sufficient for comparisons; the plan itself is searched until it is proven optimal.
COMPARED = Effort(relative_gap=1e-4)
COMPARED_IF_UNLIKE = Effort(relative_gap=1e-3, max_exact_additions=1e7)


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
    # Of a ConfigError, or files that do not match.
    with refusing("\nNothing was planned."):
        conf, inputs = load(DOOR, request, PlannerConf)
        demands = conf.to_demands(inputs.setting.cluster.devices)
        check_outputs(out=conf.out, picture=conf.picture)
        check_folder_output("setting_out", conf.setting_out)
        waiting = Waiting(errors)
        try:
            show(conf, inputs, demands, WideConsole(), waiting)
        except PlanError as error:
            say(errors, str(error))
            alone, of_alone = conf.without_stages(inputs)
            asked = Asked(conf=alone, inputs=of_alone, demands=demands, best=None)
            with waiting.for_("trying what would help"):
                for line in that_fit(asked):
                    say(errors, line)
            raise SystemExit(1) from None


def show(
    conf: PlannerConf, inputs: Inputs, demands: Demands, console: Console, waiting: Waiting
) -> None:
    """Plan, show and write the plan at once, then what takes more planning as it comes."""
    asked, whole = conf, inputs
    conf, inputs = conf.without_stages(inputs)
    answer, without = None, None
    if asked.max_stages > 1:
        with waiting.for_("planning"), suppress(PlanError):
            answer = _answer(conf, inputs, demands)
        flat = None if answer is None else answer.solution
        if _show_faster_pipeline(asked, whole, demands, flat, console, waiting):
            return
    with waiting.for_("planning"):
        answer = answer or _answer(conf, inputs, demands)
        if conf.leave_out == "auto":
            best, part = answer.solution, None if conf.measured else conf.part_of(inputs)
            without = without_some(_asked(conf, inputs, demands, best)) or without_idle(
                inputs, best, demands=demands, smaller=part
            )
        if without is not None:
            inputs = replace(inputs, setting=without.fewer.setting)
            demands = without.fewer.demands
            answer = _answer(conf, inputs, demands)
        solution, situation = (
            answer.solution,
            Situation(setting=inputs.setting, demands=demands),
        )
        full = None
        if conf.explain and solution.plan.num_rounds > 1 and answer.objective is not None:
            full = full_kind(
                solution, situation, value=answer.value, objective=answer.objective
            )
        report = PlanReport(
            inputs=inputs,
            demands=demands,
            solution=solution,
            times=simulate(solution.plan, inputs.setting),
            note=answer.note,
            full_kind=full,
            without=without,
        )
    show_plan(report, console)
    _tell_time(conf, inputs, solution.samples_per_s, console)
    _write(conf, report, console)
    if conf.explain:
        say(console, *proof_lines(report))
    if conf.baselines:
        alternatives = _alternatives(inputs, demands, solution.plan, waiting)
        note = _comparison_note(demands, inputs.setting.cluster.world_size)
        show_alternatives(report, alternatives, console, note=note)
    if answer.objective is not None and conf.what_if_s:
        of_all = _asked(conf, inputs, demands, solution)
        _show_what_would_help(answer, of_all, situation, console, waiting)
    if conf.explain and conf.what_if_s and conf.objective == "throughput":
        with waiting.for_("planning for other speeds"):
            line = _steadiness(solution.plan, inputs.setting, demands)
        say(console, line)


def _show_what_would_help(
    answer: _Answer, asked: Asked, situation: Situation, console: Console, waiting: Waiting
) -> None:
    """What limits the plan, and what would help: the best of it, or everything."""
    objective, conf = answer.objective, asked.conf
    assert objective is not None
    unit = "samples" if conf.objective == "largest_batch" else "samples/s"
    more = sorted(more_of_each(situation, objective), key=lambda each: not each.is_advice)
    variants = [*forms(asked), *more]

    def gains() -> Iterator[Gain]:
        for each in variants:
            with waiting.for_(f"trying {each.change}"):
                gain = gain_of(each, answer.value)
            yield gain

    if conf.explain:
        found = show_gains(variants, gains(), console, unit=unit)
    else:
        found = tried_within(gains(), conf.what_if_s)
    explanation = explained(answer.solution, situation, found)
    limits = limit_lines(explanation) if len(found) == len(variants) else ()
    say(console, pace_line(explanation), *limits)
    if not conf.explain:
        show_best(found, len(variants), console, unit=unit)


def _show_faster_pipeline(
    conf: PlannerConf,
    inputs: Inputs,
    demands: Demands,
    flat: PlanSolution | None,
    console: Console,
    waiting: Waiting,
) -> bool:
    """Show and write a pipeline if one is faster than the plan without stages.

    Then, if a part of the devices is faster still, or all are in float16, that.
    """
    effort = _compared(inputs.setting)
    alone, of_alone = conf.without_stages(inputs)
    with waiting.for_("planning stages"):
        better = None if flat is None else without_some(_asked(alone, of_alone, demands, flat))
        fewer = None if better is None else better.fewer
        report = faster_pipeline(conf, inputs, flat, fewer, demands=demands, effort=effort)
    if report is None:
        say(console, f"No faster pipeline of up to {conf.max_stages} stages was found.")
        return False
    show_pipeline(report, console, explains=conf.explain)
    _tell_time(conf, inputs, report.solution.samples_per_s, console)
    reached = report.solution.samples_per_s
    if better is not None and better.fewer.solution.samples_per_s > LEAST_GAIN * reached:
        better = replace(better, samples_per_s_with_all=reached)
        say(console, better.gain_line)
    with waiting.for_("planning stages in float16"):
        half = in_float16(conf, inputs, demands, report.solution.step_time_s)
    say(console, half)
    keep_plan(inputs.setting, report.solution.plan, conf.out, console)
    return True


def _tell_time(conf: PlannerConf, inputs: Inputs, samples_per_s: float, to: Console) -> None:
    """Say how long ``for_tokens`` take, and what they cost where power or prices are known."""
    if conf.for_tokens is None:
        return
    cluster, tokens = inputs.setting.cluster, number_of("for_tokens", conf.for_tokens)
    hours = tokens / samples_per_s / inputs.setting.workload.tokens_per_sample / 3600
    days = f" ({hours / 24:,.1f} days)" * (hours >= 48)
    time = f"{hours:,.1f} hours{days}" if hours >= 2 else f"{60 * hours:,.0f} minutes"
    watts_of = {kind.kind: kind.board_power_w for kind in cluster.kinds}
    watts = [watts_of.get(str(device.kind)) or 0.0 for device in cluster.devices]
    kwh = sum(watts) * hours / 1000 * all(watts)  # 0: not known of every card
    energy = f", and at most {kwh:,.1f} kWh by the limits of the boards" if kwh else ""
    if conf.price_per_kwh and not kwh:
        say(to, "price_per_kwh: left out, because board_power_w is not stated of every kind.")
    cost = (conf.price_per_kwh or 0) * kwh + (conf.price_per_hour or 0) * hours
    said = f"{conf.for_tokens} tokens take {time}{energy}"
    say(to, f"{said}. They cost {cost:,.2f}." if cost else f"{said}.")


def _compared(setting: Setting) -> Effort:
    """The effort of comparisons, each of which takes long where many kinds are unlike."""
    kinds = {device.kind for device in setting.cluster.devices}
    return COMPARED if len(kinds) <= MANY_KINDS else COMPARED_IF_UNLIKE


def _steadiness(plan: Plan, setting: Setting, demands: Demands) -> str:
    """What the plan loses if one kind of device is not as fast as the profile says."""
    disturbed = disturbances(setting)
    if not disturbed:
        kinds = len({device.kind for device in setting.cluster.devices})
        why = "one kind" if kinds == 1 else f"{kinds} kinds are too many to ask"
        return f"What it loses at other speeds was not asked: {why}."
    loss = loss_of(plan, disturbed, demands=demands, effort=_compared(setting))
    if loss.relative < LEAST_LOSS:
        return f"With each kind's speed {OFF:.0%} off, this plan is still the best."
    direction = "slower" if loss.speed < 1 else "faster"
    return (
        f"With each kind's speed {OFF:.0%} off, this plan loses at most {loss.relative:.1%} of "
        f"the best ({loss.device_kind} {direction})."
    )


def _asked(conf: PlannerConf, inputs: Inputs, demands: Demands, best: PlanSolution) -> Asked:
    effort = _compared(inputs.setting)
    return Asked(conf=conf, inputs=inputs, demands=demands, best=best, effort=effort)


def _comparison_note(demands: Demands, world_size: int) -> str:
    """Which demands the simpler plans cannot meet."""
    limits = demands.limits.values()
    if not (limits or demands.equal):
        return ""
    fixed = "even batches are not those that limits fix; " * any(
        each.rank_batch_size is not None for each in limits
    )
    fixed += "even state is not what limits ask for; " * any(
        each.state_share is not None
        or (each.max_state_share is not None and each.max_state_share * world_size < 1)
        for each in limits
    )
    return f" ({fixed.removesuffix('; ')})" if fixed else ""


def _answer(conf: PlannerConf, inputs: Inputs, demands: Demands) -> _Answer:
    """The best plan for the requested objective."""
    setting = inputs.setting
    if conf.objective == "largest_batch":
        solution = largest_batch(setting, demands=demands)
        size = solution.plan.global_batch_size

        def batch_size(situation: Situation) -> float:
            model = CostModel(situation.setting)
            return float(largest_batch_size(model, situation.demands))

        most = largest_batch_size(CostModel(setting), demands, has_rows=False)
        note = f"the largest batch that fits in one round: {size}"
        if most > size:  # shares of whole rows may fit in between
            note = f"a batch of {size} fits in one round, and none of {most + 1}"
        return _Answer(solution, size, batch_size, note)
    batch = conf.global_batch_size
    spared = conf.to_spared(setting.cluster.devices)
    best = solve(setting, global_batch_size=batch, demands=demands, tolerance=conf.tolerance)
    if conf.objective == "throughput":

        def samples_per_s(situation: Situation) -> float:
            """What the plan of a situation reaches; ``PlanError`` if that is no more."""
            asked = _asked(conf, inputs, demands, best)
            return asked.solved(situation.setting, situation.demands).samples_per_s

        return _Answer(best, best.samples_per_s, samples_per_s)
    wanted = conf.min_samples_per_s or LEAST_THROUGHPUT * best.samples_per_s
    least = least_memory(
        setting,
        global_batch_size=batch,
        min_samples_per_s=wanted,
        devices=spared,
        demands=demands,
        effort=_compared(setting),
    )
    which = "no device" if not spared else f"none of devices {ranges(spared)}"
    if len(spared) == 1:
        which = f"device {spared[0]} never"
    note = (
        f"the least memory for {wanted:.4g} samples/s: {which} uses more than "
        f"{least.budget_fraction:.1%} of its budget (no plan can do with less than "
        f"{least.lower_bound:.1%})"
    )
    return _Answer(least.solution, wanted, None, note)


def _alternatives(
    inputs: Inputs, demands: Demands, plan: Plan, waiting: Waiting
) -> Iterator[Alternative]:
    """Simpler plans than this one for the same batch and limits."""
    batch = plan.global_batch_size
    simpler: list[tuple[str, Callable[..., PlanSolution]]] = [
        ("even sharding (stock FSDP)", even),
        ("compute only: even state", compute_only),
        ("memory only: even batches", memory_only),
    ]
    if plan.num_rounds > 1:
        simpler.append(("one round", one_round))
    for name, baseline in simpler:
        seconds, note = None, ""
        with waiting.for_(name):
            try:
                seconds = baseline(
                    inputs.setting,
                    global_batch_size=batch,
                    demands=demands,
                    effort=_compared(inputs.setting),
                    near=plan.form,
                ).predicted.step_time_s
            except PlanError:
                note = _shortfall(inputs, demands, batch) if baseline is even else ""
        yield Alternative(name=name, step_time_s=seconds, reason="does not fit", note=note)


def _shortfall(inputs: Inputs, demands: Demands, batch: int) -> str:
    """Where an even plan does not fit, and what is missing there."""
    found = even_shortfall(inputs.setting, global_batch_size=batch, demands=demands)
    if found is None:
        return ""
    return (
        f"device {found.position}: it needs {of_budget(found.needed_bytes, found.budget_bytes)}"
        ", one sample at a time and with everything recomputed."
    )


def _write(conf: PlannerConf, report: PlanReport, console: Console) -> None:
    """Write the requested files."""
    keep_plan(report.inputs.setting, report.solution.plan, conf.out, console)
    if conf.setting_out is not None:
        report.inputs.setting.save(conf.setting_out)
        path = conf.setting_out
        say(console, f"written to {path}: measured={path} takes these devices")
    if conf.picture is not None:
        from shardhet.apps.planning.pictures import draw_report

        draw_report(report, Path(conf.picture))
        say(console, f"drawn to {conf.picture}")
