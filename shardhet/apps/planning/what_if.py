"""What would help: the changes to a plan that ``shardhet plan`` tries, and their table."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from math import inf

from rich.console import Console

from shardhet.apps.cli.quantities import GIB, counted, duration
from shardhet.apps.cli.streamed import Spinner, StreamedTable, say
from shardhet.apps.planning.fewer_devices import LEAST_GAIN, BetterWithout, named
from shardhet.apps.planning.report import speed_part
from shardhet.config.models import HfConf, LoraConf
from shardhet.config.planning import Inputs, PlannedPrecision, PlannerConf
from shardhet.planner import Constraints, PlanError, PlanSolution, solve
from shardhet.planner.advice.explain import Gain, Situation, Variant
from shardhet.planner.baselines import compute_only, even, memory_only, one_round
from shardhet.planner.candidates.groupings import FEW
from shardhet.planner.idle import Positions, SubsetPlan, active_positions
from shardhet.planner.search.search import DEFAULT_EFFORT, Effort
from shardhet.planner.stages.find import find_pipeline
from shardhet.planner.stages.solution import PipelineSolution
from shardhet.planner.task import TOO_SLOW
from shardhet.pricing.derive import meets_over_gloo, slowest_of
from shardhet.pricing.scenario import Scenario
from shardhet.records.schedule import StepForm
from shardhet.records.units import MOST_UNTILED

MUCH_OF_SPEEDS = 0.8  # of what devices compute together: with more, stages have little to gain
MAX_STAGES = 4  # that are tried
MAX_SHOWN = 3  # of the changes that help, unless all are asked for
LORA_RANK, LORA_TARGETS = 8, ("q_proj", "v_proj")


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIfQuery:
    """What was planned for, in plans without stages, and the plan."""

    conf: PlannerConf
    inputs: Inputs
    constraints: Constraints
    best: PlanSolution | None  # None: no plan fits
    effort: Effort = DEFAULT_EFFORT

    @property
    def most(self) -> float:
        """No plan is faster on these devices, however much memory there is.

        Fewer devices wait less for the slowest of them.
        """
        if self.best is None:
            return inf
        scenario = self.inputs.scenario
        whole = self.best.samples_per_s / speed_part(scenario, self.best)
        return whole * slowest_of(scenario.cluster.world_size)

    def step_s(self, samples_per_s: float) -> float:
        """Seconds of a step at this speed."""
        return self.conf.global_batch_size / samples_per_s if samples_per_s else inf

    def solved(self, there: Situation, least: float) -> PlanSolution:
        """The plan for another situation; ``PlanError`` if none is seen to be as fast."""
        return solve(
            there.scenario,
            global_batch_size=self.conf.global_batch_size,
            constraints=there.constraints,
            effort=self.effort,
            tolerance=self.conf.tolerance or None,  # equally fast plans are equally good here
            is_bounded=False,
            near=None if self.best is None else StepForm.of(self.best.plan),
            cutoff_s=self.step_s(least),
        )

    def near(self, there: Situation, least: float) -> PlanSolution:
        """The fastest plan of the devices that take part in this one, and of sets near them.

        ``PlanError`` if none is seen to gain enough to be as fast as ``least``.
        """
        best = self.best
        if best is None:
            return self.solved(there, least)
        return solve(
            there.scenario,
            global_batch_size=self.conf.global_batch_size,
            constraints=there.constraints,
            effort=self.effort,
            is_bounded=False,
            near=StepForm.of(best.plan),
            subset_hint=subset_like(best, there),
            cutoff_s=_fastest_s(best) * best.samples_per_s / least if least else inf,
            with_kind=there.changed_kind,
        )

    def value_of(self, found: PlanSolution) -> float:
        """The samples per second of a plan that gains as much as the fastest one does."""
        if self.best is None:
            return found.samples_per_s
        gain = _fastest_s(self.best) / found.predicted.step_time_s
        return self.best.samples_per_s * gain

    def reached(self, there: Situation, least: float) -> float:
        """``value_of`` the plan ``near``."""
        return self.value_of(self.near(there, least))

    def here(self, constraints: Constraints) -> Situation:
        """The same devices with other constraints."""
        return Situation(scenario=self.inputs.scenario, constraints=constraints)


def _fastest_s(best: PlanSolution) -> float:
    return best.fastest_s or best.predicted.step_time_s


def subset_like(best: PlanSolution, there: Situation) -> Positions:
    """The devices that take part in a plan, in a situation with as many or one more.

    It stands beside the last one that is like it, and takes part if that does.
    """
    taken, added = set(active_positions(best)), there.added
    if there.cluster.world_size < best.plan.world_size:
        return ()
    if added is not None:
        is_taken = added - 1 in taken
        taken = {i + (i >= added) for i in taken} | {added for _ in range(is_taken)}
    return tuple(sorted(taken))


def without_some(query: WhatIfQuery) -> BetterWithout | None:
    """The devices whose number formats hold up the others, and what is gained without them.

    One kind without bfloat16 forces all to float32, whatever a plan gives it to do.  None if
    all compute in one format, if not enough is gained, or if it is not asked for.
    """
    conf, inputs, best = query.conf, query.inputs, query.best
    assert best is not None
    if conf.leave_out == "never":
        return None
    least, part = LEAST_GAIN * best.samples_per_s, None
    kept, part_of = conf.in_bfloat16(inputs)
    while kept and (part is None or len(kept) < len(part.positions)):
        try:
            there = Situation(scenario=part_of(kept), constraints=query.constraints.only(kept))
            part = SubsetPlan(kept, there.scenario, query.solved(there, least))
        except ValueError:  # nothing fits or is as fast, or constraints need the others
            return None
        kept = tuple(kept[i] for i in active_positions(part.solution))
    if part is None or part.solution.samples_per_s <= least:
        return None
    return BetterWithout(
        whole=inputs.scenario.cluster,
        part=part,
        param_dtype=inputs.scenario.workload.param_dtype,
        samples_per_s_with_all=best.samples_per_s,
        is_described=True,
        estimate="",
    )


def forms(query: WhatIfQuery) -> Iterator[Variant]:
    """Plans that were not allowed."""
    conf, constraints, scenario = query.conf, query.constraints, query.inputs.scenario
    if query.best is not None and conf.leave_out == "ask":
        yield Variant("fewer devices", "leave_out=auto", partial(_without, query))
    if could_be_float16(conf, scenario):
        yield Variant("float16", "precision=FP16", partial(_in_float16, query))
    num_units = sum(bool(unit.fqn) for unit in scenario.workload.units)
    is_one = scenario.cluster.world_size == 1 or meets_over_gloo(scenario.cluster)
    can_have_stages = not is_one and num_units > 1
    is_slow = query.best is None or speed_part(scenario, query.best) < MUCH_OF_SPEEDS
    if can_have_stages and is_slow and not conf.refused_beside_stages():
        yield Variant("stages", f"max_stages={MAX_STAGES}", partial(_in_stages, query))
    inputs, optimizer = (
        constraints.may_keep_inputs_on_host,
        constraints.may_keep_optimizer_on_host,
    )
    both, on_hosts = "inputs_on_host=true optimizer_on_host=true", list[PlanSolution]()
    for more in ((True, True), (True, False), (False, True)):
        if not ((more[0] and inputs) or (more[1] and optimizer)):
            key = " ".join(key for is_on, key in zip(more, both.split(), strict=True) if is_on)
            kept = replace(
                constraints,
                may_keep_inputs_on_host=more[0] or inputs,
                may_keep_optimizer_on_host=more[1] or optimizer,
            )
            reach = partial(_with, query, kept, on_hosts)
            yield Variant("host memory", key, reach, most=query.most, within=both)
    is_few = query.best is None or conf.global_batch_size <= FEW * scenario.cluster.world_size
    is_long = scenario.workload.tokens_per_sample >= MOST_UNTILED
    beside = constraints.may_share_samples or constraints.limits or constraints.equal
    if is_few and is_long and not (is_one or beside or constraints.whole_matrices):
        shared = replace(constraints, may_share_samples=True)
        reach = partial(_with, query, shared, [])
        yield Variant("samples shared by tokens", "context_groups=true", reach)
    states_memory = any(node.host_memory_bytes is not None for node in scenario.cluster.nodes)
    if query.best is None and states_memory:
        key = "more memory of hosts, with inputs_on_host=true optimizer_on_host=true,"
        yield Variant("host memory", key, partial(_in_larger_hosts, query))
    model = conf.model
    if query.best is None and isinstance(model, HfConf) and not model.lora.rank:
        lora = LoraConf(rank=LORA_RANK, targets=list(LORA_TARGETS))
        key = f"model.lora.rank={LORA_RANK} model.lora.targets=[{','.join(LORA_TARGETS)}]"
        with_lora = replace(conf, model=replace(model, lora=lora))
        yield Variant("LoRA", key, partial(_described, query, with_lora))


def _with(
    query: WhatIfQuery, constraints: Constraints, found: list[PlanSolution], least: float
) -> tuple[float, str]:
    """What plans reach; the best of those ``found`` with more allowed is it, if it is one."""
    inputs, optimizer = (
        constraints.may_keep_inputs_on_host,
        constraints.may_keep_optimizer_on_host,
    )
    for each in found:
        ranks = each.plan.ranks
        if all(
            (inputs or not rank.inputs_on_host) and (optimizer or not rank.optimizer_on_host)
            for rank in ranks
        ):
            return query.value_of(each), ""
    found.append(query.near(query.here(constraints), least))
    return query.value_of(found[-1]), ""


def _in_larger_hosts(query: WhatIfQuery, _: float) -> tuple[float, str]:
    """What plans reach if hosts have as much memory as they take, and what that is."""
    scenario = query.inputs.scenario
    cluster = scenario.cluster
    nodes = tuple(replace(node, host_memory_bytes=None) for node in cluster.nodes)
    constraints = replace(
        query.constraints, may_keep_inputs_on_host=True, may_keep_optimizer_on_host=True
    )
    larger = replace(scenario, cluster=replace(cluster, nodes=nodes))
    found = query.solved(Situation(scenario=larger, constraints=constraints), 0.0)
    told = []
    for node, here in zip(cluster.nodes, cluster.positions_by_node, strict=True):
        taken = sum(found.predicted.ranks[i].memory.host_bytes for i in here)
        if taken and node.host_memory_bytes is not None:
            stated = f"{node.host_memory_bytes / GIB:.1f} stated"
            told.append(f"{taken / GIB:.1f} GiB on {node.host} ({stated})")
    return found.samples_per_s, f"which keeps {' and '.join(told)}."


def _described(query: WhatIfQuery, conf: PlannerConf, least: float) -> tuple[float, str]:
    """What plans reach under another configuration of the same devices."""
    scenario = conf.derived(query.inputs.scenario.cluster, query.inputs.name).scenario
    there = replace(query.here(query.constraints), scenario=scenario)
    return query.solved(there, least).samples_per_s, ""


def _in_float16(query: WhatIfQuery, least: float) -> tuple[float, str]:
    half = replace(query.conf, precision=PlannedPrecision.FP16)
    return _described(query, half, least)[0], "it trains with a scaled loss."


def pipeline_below(
    conf: PlannerConf, inputs: Inputs, constraints: Constraints, cutoff_s: float
) -> PipelineSolution | None:
    """A pipeline whose step is shorter than this; None if none was found."""
    found = find_pipeline(
        inputs.scenario,
        global_batch_size=conf.global_batch_size,
        smaller=conf.part_of(inputs),
        max_stages=conf.max_stages,
        constraints=constraints,
        tolerance=conf.tolerance,
        cutoff_s=cutoff_s,
    )
    return None if found is None or found.step_time_s >= cutoff_s else found


def _in_stages(query: WhatIfQuery, least: float) -> tuple[float, str]:
    conf, inputs = replace(query.conf, max_stages=MAX_STAGES), query.inputs
    if conf.measured is None:
        inputs = conf.derived(inputs.scenario.cluster, inputs.name)
    found = pipeline_below(conf, inputs, query.constraints, query.step_s(least))
    if found is None:
        raise PlanError(TOO_SLOW)
    groups = (named(inputs.scenario.cluster, group) for group in found.groups)
    stages = counted(len(found.groups), "stage")
    return found.samples_per_s, f"a pipeline of {stages}: {'; then '.join(groups)}."


def _without(query: WhatIfQuery, _: float) -> tuple[float, str]:
    found = without_some(query)
    if found is None:
        raise PlanError(TOO_SLOW)
    return found.part.solution.samples_per_s, found.note


def could_be_float16(conf: PlannerConf, scenario: Scenario) -> bool:
    """Whether float32 is planned for because some lack bfloat16, but all have float16."""
    rates = [dict(kind.peak_flops_per_s) for kind in scenario.cluster.kinds]
    return (
        conf.measured is None
        and scenario.workload.param_dtype == "float32"
        and bool(rates)
        and all(each.get("float16", 0) > each.get("float32", 0) for each in rates)
    )


def that_fit(query: WhatIfQuery) -> Iterator[str]:
    """With which changes a plan fits, where none does, as far as ``what_if_s`` allows."""
    begin_s = time.monotonic()
    for each in forms(query):
        with suppress(ValueError):
            rate, note = each.reach(0.0)
            yield f"{each.change} has a plan: {rate:,.4g} samples/s{f', {note}' * bool(note)}"
        if time.monotonic() - begin_s > query.conf.what_if_s > 0:
            return


def show_simpler(query: WhatIfQuery, console: Console, waiting: Spinner, *, note: str) -> None:
    """Print what simpler plans reach; ``note`` says which constraints they cannot meet."""
    assert query.best is not None
    plan, ours_s = query.best.plan, query.best.predicted.step_time_s
    simpler: dict[str, Callable[..., PlanSolution]] = {
        "even sharding (stock FSDP)": even,
        "compute only: even state": compute_only,
        "memory only: even batches": memory_only,
    }
    if plan.num_rounds > 1:
        simpler["one round"] = one_round
    columns = (("plan", 26), ("step", 20), ("samples/s", 9), ("this plan is", 15))
    table = StreamedTable(console, columns, title=f"Compared with{note}")
    for name, baseline in simpler.items():
        cells = ("does not fit", "-", "-")
        with waiting.for_(name), suppress(PlanError):
            found = baseline(
                query.inputs.scenario,
                global_batch_size=plan.global_batch_size,
                constraints=query.constraints,
                effort=query.effort,
                near=StepForm.of(plan),
            )
            step_s = found.predicted.step_time_s
            faster = f"{step_s / ours_s:.2f} x as fast"
            cells = (duration(step_s), f"{found.samples_per_s:.4g}", faster)
        table.add_row(name, *cells)
    table.end()


def show_best(gains: Sequence[Gain], num_variants: int, console: Console) -> None:
    """Print the changes that help most of those that were tried."""
    helping = [gain for gain in gains if not gain.is_none]
    best = sorted(helping, key=lambda gain: -gain.relative)[:MAX_SHOWN]
    of = f"of {counted(num_variants, 'change')}"
    if len(gains) < num_variants:
        of = f"of the first {len(gains)} {of}, as what_if_s allows,"
    if not best:
        say(console, f"Nothing {of} would help (explain=true shows all).")
        return
    title = f"What would help most {of} (explain=true shows all)"
    show_gains([gain.variant for gain in best], best, console, title=title)


def show_gains(
    variants: Sequence[Variant],
    gains: Iterable[Gain],
    console: Console,
    *,
    title: str = "What would help",
) -> list[Gain]:
    """Print changes in a table as they are tried, then what is said of them; returns gains."""
    columns = (
        ("of", max(len(each.of) for each in variants)),
        ("change", max(len(each.change) for each in variants)),
        ("samples/s", 9),
        ("gain", 7),
    )
    table, shown = StreamedTable(console, columns, title=title, num_left=2), list[Gain]()
    for gain in gains:
        cells = ("-", "-") if gain.is_none else (f"{gain.value:,.4g}", f"{gain.relative:+.1%}")
        table.add_row(gain.variant.of, gain.variant.change, *cells)
        shown.append(gain)
    table.end()
    for gain in shown:
        if gain.note and not gain.is_none:
            say(console, f"{gain.variant.change}: {gain.note}")
    return shown
