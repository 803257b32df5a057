"""What ``shardhet plan`` answers: the best plan, what limits it, and what would help."""

import os
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from math import inf
from pathlib import Path

from rich.console import Console

from shardhet.apps.cli.quantities import counted
from shardhet.apps.cli.streamed import Spinner, say
from shardhet.apps.planning.fewer_devices import LEAST_GAIN, without_idle
from shardhet.apps.planning.report import (
    MOST_SIMULATED,
    PlanReport,
    limit_lines,
    owners_note,
    pace_line,
    proof_lines,
    show_plan,
)
from shardhet.apps.planning.sentences import beside_line
from shardhet.apps.planning.what_if import (
    MAX_SHOWN,
    WhatIfQuery,
    could_be_float16,
    forms,
    pipeline_below,
    show_best,
    show_gains,
    show_simpler,
    that_fit,
    without_some,
)
from shardhet.config.checks import number_of
from shardhet.config.planning import Inputs, PlannerConf
from shardhet.planner import Constraints, PlanError, PlanSolution, solve
from shardhet.planner.advice.explain import (
    MANY_KINDS,
    NEGLIGIBLE,
    OFF,
    Gain,
    Resource,
    Variant,
    lost_at_other_speeds,
    more_of_each,
    tried,
)
from shardhet.planner.search.search import Effort
from shardhet.pricing.scenario import Scenario
from shardhet.records.plan import Plan
from shardhet.simulator.simulation import simulate, timeline_of

LAST_PLAN = Path(".shardhet", "last_plan.json")  # where no other place was asked for
# Sufficient for comparisons; the plan itself is searched until it is proven optimal.
COMPARED = Effort(relative_gap=1e-4)
COMPARED_IF_UNLIKE = Effort(relative_gap=1e-3, max_exact_additions=1e7)


def answer(
    conf: PlannerConf, inputs: Inputs, constraints: Constraints, console: Console
) -> None:
    """Plan, show, and write; where no plan exists, say what would help, and exit with 1."""
    errors = Console(stderr=True, highlight=False, soft_wrap=True)
    waiting = Spinner(errors)
    try:
        show(conf, inputs, constraints, console, waiting)
    except PlanError as error:
        say(errors, str(error))
        alone, of_alone = conf.without_stages(inputs)
        query = WhatIfQuery(conf=alone, inputs=of_alone, constraints=constraints, best=None)
        with waiting.for_("trying what would help"):
            for line in that_fit(query):
                say(errors, line)
        raise SystemExit(1) from None


def show(
    conf: PlannerConf,
    inputs: Inputs,
    constraints: Constraints,
    console: Console,
    waiting: Spinner,
) -> None:
    """Plan, show and write the plan at once, then what takes more planning as it comes."""
    whole = conf, inputs
    conf, inputs = conf.without_stages(inputs)
    flat, without = None, None
    if whole[0].max_stages > 1:
        with waiting.for_("planning"), suppress(PlanError):
            flat = _best(conf, inputs, constraints)
        if _show_faster_pipeline(*whole, constraints, flat, console, waiting):
            return
    with waiting.for_("planning"):
        solution = flat or _best(conf, inputs, constraints)
        if conf.leave_out == "auto":
            part = None if conf.measured else conf.part_of(inputs)
            without = without_some(_asked(conf, inputs, constraints, solution)) or without_idle(
                inputs, solution, smaller=part
            )
        if without is not None:
            inputs = replace(inputs, scenario=without.part.scenario)
            constraints = constraints.only(without.part.positions)
            solution = _best(conf, inputs, constraints)
        query = _asked(conf, inputs, constraints, solution)
        report = PlanReport(
            inputs=inputs,
            constraints=constraints,
            solution=solution,
            times=simulate(_of_few_rounds(solution.plan), inputs.scenario),
            note=owners_note(solution) if conf.whole_matrices else "",
            without=without,
        )
    show_plan(report, console)
    _tell_time(conf, inputs, solution.samples_per_s, console)
    _write(conf, report, console)
    if conf.explain:
        say(console, *proof_lines(report))
    if conf.baselines:
        note = _comparison_note(constraints, inputs.scenario.cluster.world_size)
        show_simpler(query, console, waiting, note=note)
    if not conf.what_if_s:
        return
    _show_what_would_help(query, solution, console, waiting)
    if conf.explain:
        with waiting.for_("planning for other speeds"):
            line = _steadiness(query)
        say(console, line)


def _show_what_would_help(
    query: WhatIfQuery, solution: PlanSolution, console: Console, waiting: Spinner
) -> None:
    """What limits the plan, and what would help: the best of it, or everything."""
    conf, begin_s = query.conf, time.monotonic()
    more = more_of_each(query.here(query.constraints), query.reached)
    more.sort(key=lambda each: each.is_advice)  # after what it is within
    variants = [*forms(query), *more]

    def gains(some: Sequence[Variant], num_best: int | None = None) -> Iterator[Gain]:
        left_s = inf if conf.explain else conf.what_if_s - (time.monotonic() - begin_s)
        return tried(
            some,
            solution.samples_per_s,
            num_best=num_best,
            within_s=left_s,
            beside=lambda each: waiting.for_(f"trying {each.change}"),
        )

    if conf.explain:
        found = show_gains(variants, gains(variants), console)
        say(console, pace_line(solution), *limit_lines(solution, found))
        return
    tenths = [each for each in variants if each.is_limit]
    endless = [each for each in variants if each.is_endless]
    found = [*gains(tenths, 1), *gains(endless)]
    is_known = len(found) == len(tenths) + len(endless)
    limits = limit_lines(solution, found) if is_known else ()
    say(console, pace_line(solution), *limits)
    # No memory of one kind gives more than eight times as much of all.  Other plans and cards
    # help most, as a rule: of what follows, what is seen to help less is not searched.
    most = max((gain.value for gain in found if gain.variant.is_endless), default=inf)
    bounds = {None: inf, Resource.DEVICES: inf, Resource.MEMORY: most}
    advice = [
        replace(each, most=min(each.most, bound))
        for resource, bound in bounds.items()
        for each in variants
        if each.is_advice and each.resource is resource
    ]
    show_best([*gains(advice, MAX_SHOWN)], len(advice), console)


def _show_faster_pipeline(
    conf: PlannerConf,
    inputs: Inputs,
    constraints: Constraints,
    flat: PlanSolution | None,
    console: Console,
    waiting: Spinner,
) -> bool:
    """Show and write a pipeline if one is faster than the plan without stages.

    Then, if a part of the devices is faster still, that.
    """
    alone, of_alone = conf.without_stages(inputs)
    with waiting.for_("planning stages"):
        better = (
            None if flat is None else without_some(_asked(alone, of_alone, constraints, flat))
        )
        flat_s = inf if flat is None else flat.predicted.step_time_s
        found = pipeline_below(conf, inputs, constraints, flat_s)
    if found is None:
        say(console, f"No faster pipeline of up to {conf.max_stages} stages was found.")
        return False
    with waiting.for_("planning parts of the devices"):
        report = PlanReport(
            inputs=inputs,
            constraints=constraints,
            solution=found,
            times=timeline_of(found.predicted),
            note=f"A pipeline of {counted(len(found.groups), 'stage')}:",
        )
    show_plan(report, console)
    say(console, beside_line(found, flat), *conf.explain * [*proof_lines(report)])
    _tell_time(conf, inputs, reached := found.samples_per_s, console)
    if better is not None and better.part.solution.samples_per_s > LEAST_GAIN * reached:
        better = replace(better, samples_per_s_with_all=reached)
        say(console, better.gain_line)
    if could_be_float16(conf, inputs.scenario):
        say(console, "A device has no bfloat16, so this is float32: try precision=FP16.")
    keep_plan(inputs.scenario, found.plan, conf.out, console)
    return True


def _of_few_rounds(plan: Plan) -> Plan:
    """The plan, or of very many rounds the first ones: the others are like them."""
    if plan.num_rounds <= MOST_SIMULATED:
        return plan
    return replace(plan, num_rounds=MOST_SIMULATED, last_round_size=None)


def _tell_time(conf: PlannerConf, inputs: Inputs, samples_per_s: float, to: Console) -> None:
    """Say how long ``for_tokens`` take, and how much energy if the power of all is known."""
    if conf.for_tokens is None:
        return
    cluster, tokens = inputs.scenario.cluster, number_of("for_tokens", conf.for_tokens)
    hours = tokens / samples_per_s / inputs.scenario.workload.tokens_per_sample / 3600
    days = f" ({hours / 24:,.1f} days)" * (hours >= 48)
    time = f"{hours:,.1f} hours{days}" if hours >= 2 else f"{60 * hours:,.0f} minutes"
    watts_of = {kind.kind: kind.board_power_w for kind in cluster.kinds}
    watts = [watts_of.get(str(device.kind)) or 0.0 for device in cluster.devices]
    kwh = sum(watts) * hours / 1000 * all(watts)  # 0: not known of every card
    energy = f", and at most {kwh:,.1f} kWh by the limits of the boards" if kwh else ""
    say(to, f"{conf.for_tokens} tokens take {time}{energy}.")


def _compared(scenario: Scenario) -> Effort:
    """The effort of comparisons, each of which takes long where many kinds are unlike."""
    kinds = {device.kind for device in scenario.cluster.devices}
    return COMPARED if len(kinds) <= MANY_KINDS else COMPARED_IF_UNLIKE


def _steadiness(query: WhatIfQuery) -> str:
    """What the plan loses if one kind of device is not as fast as the profile says."""
    assert query.best is not None
    here = query.here(query.constraints)
    fastest = replace(query, conf=replace(query.conf, tolerance=0.0))
    loss = lost_at_other_speeds(query.best, here, fastest.reached)
    if loss is None:
        why = (
            "one kind"
            if len(here.kinds) == 1
            else f"{len(here.kinds)} kinds are too many to ask"
        )
        return f"What it loses at other speeds was not asked: {why}."
    said = f"With each kind's speed {OFF:.0%} off, this plan"
    if loss.is_none:
        return f"{said} is still the best, to within {NEGLIGIBLE:.1%}."
    return (
        f"{said} loses at most {loss.relative:.1%} of the best ({loss.variant.of} "
        f"{loss.variant.change})."
    )


def _asked(
    conf: PlannerConf, inputs: Inputs, constraints: Constraints, best: PlanSolution
) -> WhatIfQuery:
    effort = _compared(inputs.scenario)
    return WhatIfQuery(
        conf=conf, inputs=inputs, constraints=constraints, best=best, effort=effort
    )


def _comparison_note(constraints: Constraints, world_size: int) -> str:
    """Which constraints the simpler plans cannot meet."""
    limits = constraints.limits.values()
    if not (limits or constraints.equal):
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


def _best(conf: PlannerConf, inputs: Inputs, constraints: Constraints) -> PlanSolution:
    return solve(
        inputs.scenario,
        global_batch_size=conf.global_batch_size,
        constraints=constraints,
        tolerance=conf.tolerance,
    )


def _write(conf: PlannerConf, report: PlanReport, console: Console) -> None:
    """Write the requested files."""
    keep_plan(report.inputs.scenario, report.solution.plan, conf.out, console)
    if conf.scenario_out is not None:
        report.inputs.scenario.save(conf.scenario_out)
        path = conf.scenario_out
        say(console, f"written to {path}: measured={path} takes these devices")
    if conf.picture is not None:
        from shardhet.apps.planning.pictures import draw_report

        draw_report(report, Path(conf.picture))
        say(console, f"drawn to {conf.picture}")


def keep_plan(scenario: Scenario, plan: Plan, path: str | None, console: Console) -> None:
    """Write the plan, with what it holds for, and say what to start."""
    if path is None:
        with suppress(OSError):
            LAST_PLAN.parent.mkdir(exist_ok=True)
        if not os.access(LAST_PLAN.parent, os.W_OK):
            return
        said = [f"The plan is in {LAST_PLAN} until the next one; out=plan.json keeps it."]
    else:
        said = [f"written to {path}", *launch_lines(plan, path)]
    scenario.named(plan).save(path or LAST_PLAN)
    say(console, *said)


def launch_lines(plan: Plan, path: str) -> Iterator[str]:
    """What to start on each host, if there are several."""
    num_by_host = Counter(rank.device.host for rank in plan.ranks if rank.device.host)
    if len(num_by_host) < 2:
        return
    hosts_by_num: dict[int, list[str]] = {}
    for host, num in num_by_host.items():
        hosts_by_num.setdefault(num, []).append(host)
    first = next(iter(num_by_host))
    yield f"To train, put {path} on every host and start, with the same other keys:"
    for num, hosts in hosts_by_num.items():
        yield (
            f"  on {', '.join(hosts)}: torchrun --nnodes={len(num_by_host)} "
            f"--nproc-per-node={num} --rdzv-backend=c10d --rdzv-endpoint={first}:29500 "
            f"-m shardhet.apps.train plan=file plan.path={path} ..."
        )
