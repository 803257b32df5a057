"""What would help: the changes to a plan that ``shardhet plan`` tries, and their table."""

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from math import inf

from rich.console import Console

from shardhet.apps.cli.quantities import GIB, counted
from shardhet.apps.cli.streamed import StreamedTable, say
from shardhet.apps.planning.fewer_devices import BetterWithout, better_without, named
from shardhet.apps.planning.report import speed_part
from shardhet.apps.planning.stages import pipeline_below, unused_in
from shardhet.config.planning import Inputs, PlannedPrecision, PlannerConf
from shardhet.config.pretrained import HfConf, LoraConf
from shardhet.planner import Demands, PlanError, PlanSolution, solve
from shardhet.planner.advice.explain import NEGLIGIBLE, Gain, Reach, Resource, Variant
from shardhet.planner.search.search import DEFAULT_EFFORT, Effort
from shardhet.planner.task import TOO_SLOW
from shardhet.pricing.derive import meets_over_gloo
from shardhet.pricing.setting import Setting

MUCH_OF_SPEEDS = 0.8  # of what devices compute together: with more, stages have little to gain
MAX_STAGES = 4  # that are tried
MAX_SHOWN = 3  # of the changes that help, unless all are asked for
LORA_RANK, LORA_TARGETS = 8, ("q_proj", "v_proj")


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What was planned for, in plans without stages, and the plan."""

    conf: PlannerConf
    inputs: Inputs
    demands: Demands
    best: PlanSolution | None  # None: no plan fits
    effort: Effort = DEFAULT_EFFORT

    @property
    def at_most_s(self) -> float:
        """Seconds of a step that would be a gain."""
        return inf if self.best is None else self.best.predicted.step_time_s / (1 + NEGLIGIBLE)

    def solved(self, setting: Setting, demands: Demands) -> PlanSolution:
        """The plan for another setting; ``PlanError`` if it is seen that no step is shorter.

        Where some compute nothing, a plan that leaves them idle may follow from a slower one.
        """
        all_compute = self.best and all(r.rank_batch_size for r in self.best.plan.ranks)
        return solve(
            setting,
            global_batch_size=self.conf.global_batch_size,
            demands=demands,
            effort=self.effort,
            tolerance=self.conf.tolerance,
            is_bounded=False,
            near=None if self.best is None else self.best.plan.form,
            at_most_s=self.at_most_s if all_compute else inf,
        )


def without_some(asked: Asked) -> BetterWithout | None:
    """The devices that are better left out; None if there are none, or it is not asked for."""
    conf = asked.conf
    assert asked.best is not None
    if conf.objective != "throughput" or conf.leave_out == "never":
        return None
    return better_without(
        asked.inputs,
        asked.best,
        demands=asked.demands,
        derived=conf.in_other_precision(asked.inputs),
        effort=asked.effort,
        tolerance=conf.tolerance,
    )


def forms(asked: Asked) -> Iterator[Variant]:
    """Plans that were not allowed; of throughput only."""
    conf, demands, setting = asked.conf, asked.demands, asked.inputs.setting
    if conf.objective != "throughput":
        return
    if asked.best is not None and conf.leave_out == "ask":
        yield _form("fewer devices", "leave_out=auto", lambda: _without(asked))
    if could_be_float16(conf, setting):
        yield _form("float16", "precision=FP16", lambda: _in_float16(asked))
    num_units = sum(bool(unit.fqn) for unit in setting.workload.units)
    is_one = setting.cluster.world_size == 1 or meets_over_gloo(setting.cluster)
    can_have_stages = not is_one and num_units > 1
    is_slow = asked.best is None or speed_part(setting, asked.best) < MUCH_OF_SPEEDS
    if can_have_stages and is_slow and not conf.refused_beside_stages():
        yield _form("stages", f"max_stages={MAX_STAGES}", lambda: _in_stages(asked))
    inputs, optimizer = demands.may_keep_inputs_on_host, demands.may_keep_optimizer_on_host
    for more in ((True, False), (False, True), (True, True)):
        if not ((more[0] and inputs) or (more[1] and optimizer)):
            keys = zip(more, ("inputs_on_host=true", "optimizer_on_host=true"), strict=True)
            key = " ".join(key for is_on, key in keys if is_on)
            yield _form(
                "host memory", key, _host(asked, more[0] or inputs, more[1] or optimizer)
            )
    states_memory = any(node.host_memory_bytes is not None for node in setting.cluster.nodes)
    if asked.best is None and states_memory:
        key = "more memory of hosts, with inputs_on_host=true optimizer_on_host=true,"
        yield _form("host memory", key, lambda: _in_larger_hosts(asked))
    model = conf.model
    if asked.best is None and isinstance(model, HfConf) and not model.lora.rank:
        lora = LoraConf(rank=LORA_RANK, targets=list(LORA_TARGETS))
        key = f"model.lora.rank={LORA_RANK} model.lora.targets=[{','.join(LORA_TARGETS)}]"
        with_lora = replace(conf, model=replace(model, lora=lora))
        yield _form("LoRA", key, lambda: _described(asked, with_lora))


def _form(of: str, key: str, reach: Reach) -> Variant:
    return Variant(resource=Resource.FORM, device_kind=None, of=of, change=key, reach=reach)


def _host(asked: Asked, keeps_inputs: bool, keeps_optimizer: bool) -> Reach:
    demands = replace(
        asked.demands,
        may_keep_inputs_on_host=keeps_inputs,
        may_keep_optimizer_on_host=keeps_optimizer,
    )
    return lambda: (asked.solved(asked.inputs.setting, demands).samples_per_s, "")


def _in_larger_hosts(asked: Asked) -> tuple[float, str]:
    """What plans reach if hosts have as much memory as they take, and what that is."""
    setting = asked.inputs.setting
    cluster = setting.cluster
    nodes = tuple(replace(node, host_memory_bytes=None) for node in cluster.nodes)
    demands = replace(
        asked.demands, may_keep_inputs_on_host=True, may_keep_optimizer_on_host=True
    )
    larger = replace(setting, cluster=replace(cluster, nodes=nodes))
    found = asked.solved(larger, demands)
    told = []
    for node, here in zip(cluster.nodes, cluster.positions_by_node, strict=True):
        taken = sum(found.predicted.ranks[i].memory.host_bytes for i in here)
        if taken and node.host_memory_bytes is not None:
            stated = f"{node.host_memory_bytes / GIB:.1f} stated"
            told.append(f"{taken / GIB:.1f} GiB on {node.host} ({stated})")
    return found.samples_per_s, f"which keeps {' and '.join(told)}."


def _described(asked: Asked, conf: PlannerConf) -> tuple[float, str]:
    """What plans reach under another configuration of the same devices."""
    setting = conf.derived(asked.inputs.setting.cluster, asked.inputs.name).setting
    return asked.solved(setting, asked.demands).samples_per_s, ""


def _in_float16(asked: Asked) -> tuple[float, str]:
    rate, _ = _described(asked, replace(asked.conf, precision=PlannedPrecision.FP16))
    return rate, "it trains with a scaled loss."


def _in_stages(asked: Asked) -> tuple[float, str]:
    conf, inputs = replace(asked.conf, max_stages=MAX_STAGES), asked.inputs
    if conf.measured is None:
        inputs = conf.derived(inputs.setting.cluster, inputs.name)
    found = pipeline_below(conf, inputs, asked.demands, asked.at_most_s)
    if found is None:
        raise PlanError(TOO_SLOW)
    groups = (named(inputs.setting.cluster, group) for group in found.groups)
    stages = counted(len(found.stages), "stage")
    return found.samples_per_s, f"a pipeline of {stages}: {'; then '.join(groups)}."


def _without(asked: Asked) -> tuple[float, str]:
    found = without_some(asked)
    if found is None:
        raise PlanError(TOO_SLOW)
    return found.fewer.solution.samples_per_s, found.note


def could_be_float16(conf: PlannerConf, setting: Setting) -> bool:
    """Whether float32 is planned for because some lack bfloat16, but all have float16."""
    rates = [dict(kind.peak_flops_per_s) for kind in setting.cluster.kinds]
    return (
        conf.measured is None
        and setting.workload.param_dtype == "float32"
        and bool(rates)
        and all(each.get("float16", 0) > each.get("float32", 0) for each in rates)
    )


def in_float16(
    conf: PlannerConf, inputs: Inputs, demands: Demands, at_most_s: float
) -> str | None:
    """What plans reach in float16 with stages or without; None if no step is as short, or it is
    not known.
    """
    if not could_be_float16(conf, inputs.setting):
        return None
    half = replace(conf, precision=PlannedPrecision.FP16)
    in_half = half.derived(inputs.setting.cluster, inputs.name)
    alone, of_alone = half.without_stages(in_half)
    flat = Asked(conf=alone, inputs=of_alone, demands=demands, best=None)
    rate, how = 0.0, "without stages"
    with suppress(PlanError):
        best = flat.solved(of_alone.setting, demands)
        if best.predicted.step_time_s < at_most_s:
            rate, at_most_s = best.samples_per_s, best.predicted.step_time_s
    found = pipeline_below(half, in_half, demands, at_most_s)
    if found is not None:
        unused = unused_in(found, inputs)
        without = f" without {named(inputs.setting.cluster, unused)}" if unused else ""
        rate, how = found.samples_per_s, f"in {counted(len(found.stages), 'stage')}{without}"
    said = f"precision=FP16: {rate:,.4g} samples/s {how}; it trains with a scaled loss."
    return said if rate else None


def that_fit(asked: Asked) -> Iterator[str]:
    """With which changes a plan fits, where none does."""
    for each in forms(asked):
        try:
            rate, note = each.reach()
        except ValueError:
            continue
        yield f"{each.change} has a plan: {rate:,.4g} samples/s{f', {note}' * bool(note)}"


def show_gains(
    variants: Sequence[Variant], gains: Iterable[Gain], console: Console, *, unit: str
) -> list[Gain]:
    """Print every change as it is tried; returns what they give."""
    table = _table(variants, console, unit, "What would help")
    shown = []
    for gain in gains:
        _add(table, gain)
        shown.append(gain)
    table.end()
    _show_notes(shown, console)
    return shown


def tried_within(gains: Iterable[Gain], seconds: float) -> list[Gain]:
    """What changes give, tried one after the other for so many seconds."""
    begin_s, tried = time.monotonic(), []
    for gain in gains:
        tried.append(gain)
        if time.monotonic() - begin_s > seconds:
            break
    return tried


def show_best(tried: Sequence[Gain], num_variants: int, console: Console, *, unit: str) -> None:
    """Print the changes that help most of those that were tried."""
    helping = [gain for gain in tried if gain.variant.is_advice and not gain.is_none]
    best = sorted(helping, key=lambda gain: -gain.relative)[:MAX_SHOWN]
    of = f"of {counted(num_variants, 'change')}"
    if len(tried) < num_variants:
        of = f"of the first {len(tried)} {of}, as what_if_s allows,"
    if not best:
        say(console, f"Nothing {of} would help (explain=true shows all).")
        return
    title = f"What would help most {of} (explain=true shows all)"
    table = _table([gain.variant for gain in best], console, unit, title)
    for gain in best:
        _add(table, gain)
    table.end()
    _show_notes(best, console)


def _table(
    variants: Sequence[Variant], console: Console, unit: str, title: str
) -> StreamedTable:
    columns = (
        ("of", max(len(each.of) for each in variants)),
        ("change", max(len(each.change) for each in variants)),
        (unit, 9),
        ("gain", 7),
    )
    return StreamedTable(console, columns, title=title, num_left=2)


def _add(table: StreamedTable, gain: Gain) -> None:
    cells = ("-", "-") if gain.is_none else (f"{gain.value:,.4g}", f"{gain.relative:+.1%}")
    table.add_row(gain.variant.of, gain.variant.change, *cells)


def _show_notes(gains: Iterable[Gain], console: Console) -> None:
    for gain in gains:
        if gain.note and not gain.is_none:
            say(console, f"{gain.variant.change}: {gain.note}")
