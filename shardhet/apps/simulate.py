"""``shardhet simulate``: simulates one step of a plan, event by event."""

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from shardhet.apps.cli.quantities import counted, duration, of_budget
from shardhet.apps.cli.streamed import WideConsole, figures_table, refusing, say
from shardhet.apps.planning.heading import source_line
from shardhet.apps.planning.inputs import CommandSpec, load, read_request
from shardhet.apps.planning.report import DeviceRow, rows_of
from shardhet.config.checks import ConfigError, check_outputs
from shardhet.config.planning import Inputs, SimulateConf
from shardhet.records.plan import Plan
from shardhet.simulator.simulation import timeline_of
from shardhet.simulator.stages import price_of
from shardhet.simulator.timeline import Timeline, Work

SPEC = CommandSpec(
    command="shardhet simulate",
    config_name="simulate",
    usage="""\
shardhet simulate PLAN key=value ...

  shardhet simulate plan.json cluster=two_regions_128 model=llama_7b
  shardhet simulate plan.json measured=FOLDER trace=trace.json picture=step.png

Cluster and model are those that the plan was made for. A trace opens in Perfetto.""",
    num_files=1,
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Simulate and show; the exit status is 2 if the input is wrong."""
    request = read_request(SPEC, arguments or [])
    if request is None:
        return
    with refusing("\nNothing was simulated."):
        conf, inputs = load(SPEC, request, SimulateConf)
        plan = _load_plan(request.files[0])
        check_outputs(trace=conf.trace, picture=conf.picture)
        stage_of = conf.part_of(inputs, has_stages=True)
        price = price_of(plan, inputs.scenario, stage_of)
        timeline = timeline_of(price)
    found = rows_of(plan, price, timeline)
    console = WideConsole()
    _show(inputs, plan, timeline, found, console)
    _write(conf, inputs, timeline, found, console)


def _load_plan(path: str) -> Plan:
    if not Path(path).is_file():
        raise ConfigError(
            f"{path!r} does not exist. Pass the plan.json that shardhet plan wrote."
        )
    return Plan.load(path)


def _show(
    inputs: Inputs, plan: Plan, timeline: Timeline, found: Sequence[DeviceRow], console: Console
) -> None:
    step_s = timeline.step_time_s
    samples_per_s = plan.global_batch_size / step_s
    console.print(
        f"{inputs.name} on {counted(plan.world_size, 'device')}: a step of "
        f"{counted(plan.global_batch_size, 'sample')} takes {duration(step_s)}, "
        f"{samples_per_s:,.4g} samples/s",
        markup=False,
    )
    console.print(source_line(inputs), markup=False)
    # Those of a plan with stages are counted along them, as its ranks are.
    device = "device" + ", in the order of stages" * (plan.stages is not None)
    waits = f"of it for {'links' if plan.stages is None else 'other stages'}"
    table = figures_table(device, "busy", "waits", waits, "memory peak", wraps=True)
    for row in found:
        first = row.positions[0]
        rank = timeline.ranks[first]
        peak_bytes = max(timeline.ranks[i].peak_bytes for i in row.positions)
        table.add_row(
            row.label,
            f"{duration(rank.busy_s)} {rank.busy_s / step_s:.0%}",
            f"{duration(rank.waiting_s)} {rank.waiting_s / step_s:.0%}",
            duration(
                timeline.exposed_comm_s(first)
                if plan.stages is None
                else rank.seconds(frozenset({Work.WAIT_STAGE}))
            ),
            of_budget(peak_bytes, row.cost.memory_budget_bytes),
        )
    console.print(table)
    if plan.stages is not None:
        return
    sent_s = sum(event.seconds for event in timeline.collectives)
    used = f"{duration(sent_s)}, {sent_s / step_s:.0%} of the step"
    console.print(f"Links are in use for {used}.")


def _write(
    conf: SimulateConf,
    inputs: Inputs,
    timeline: Timeline,
    found: Sequence[DeviceRow],
    console: Console,
) -> None:
    if conf.trace is not None:
        timeline.save_chrome_trace(conf.trace)
        say(console, f"written to {conf.trace}")
    if conf.picture is not None:
        from shardhet.apps.cli.plots import draw_timeline
        from shardhet.apps.planning.pictures import tracks

        title = f"one step of {inputs.name}, simulated"
        draw_timeline(title, tracks(timeline, found), Path(conf.picture))
        say(console, f"drawn to {conf.picture}")
