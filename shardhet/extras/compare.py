"""``shardhet compare RUN``: a traced step and its prediction, by device, unit and phase."""

import argparse
import json
import math
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Self

from rich.table import Table

from shardhet.apps.cli.display import device_name
from shardhet.apps.cli.plots import TimelineTrack, draw_timeline
from shardhet.apps.cli.quantities import duration
from shardhet.apps.cli.streamed import WideConsole, figures_table
from shardhet.apps.launch.run_folder import RunFolder
from shardhet.config.checks import ConfigError, check_outputs
from shardhet.training.hooks.hooks import NUM_STEPS, POSITION

COMPUTING = {"forward": "forward", "backward": "backward", "optimizer": "optimizer step"}
WAITING = {
    "wait_gather": "waiting for parameters",
    "wait_reduce": "waiting for gradients",
    "wait_stage": "waiting for other stages",
    "agree": "waiting for the slowest rank",
}
PHASES = COMPUTING | WAITING
NUM_SHOWN = 8
NOTABLE = 0.05  # difference of a device's compute, of what was predicted
BUSY = (
    "All devices compute at least {:.0%} longer than predicted, so the machine was busier or "
    "slower than when it was measured. Measure and train while nothing else runs."
)
# Categories of torch.profiler.  On a GPU the time of a label is that of its kernels.
ON_HOST, ON_DEVICE = "user_annotation", "gpu_user_annotation"
OPTIMIZER_LABEL = "Optimizer.step"


@dataclass(frozen=True, slots=True)
class StepParts:
    """Seconds of one step on one device, by phase and unit."""

    seconds: Counter[tuple[str, str]]

    @classmethod
    def of(cls, events: Sequence[dict[str, Any]], *, num_steps: int = 1) -> Self:
        """The average of ``num_steps`` steps that ``events`` of a trace show."""
        seconds: Counter[tuple[str, str]] = Counter()
        for event in events:
            phase, rest = _phase_of(event)
            if phase in PHASES:
                unit = rest.split(" [")[0]  # without the microbatch
                unit = "" if unit == "root" else unit
                seconds[phase, unit] += event["dur"] / 1e6 / num_steps
        return cls(seconds)

    def of_phase(self, phase: str) -> float:
        """Seconds of a phase, of all units."""
        return self.of_phases((phase,))

    def of_phases(self, phases: Collection[str]) -> float:
        """Seconds of several phases, of all units."""
        return sum(value for (each, _), value in self.seconds.items() if each in phases)


@dataclass(frozen=True, slots=True)
class Difference:
    """One unit and phase on one device that took longer, or shorter, than predicted."""

    device: str
    phase: str
    unit: str
    predicted_s: float
    measured_s: float

    @property
    def seconds(self) -> float:
        """What it took longer than predicted."""
        return self.measured_s - self.predicted_s


def main(arguments: Sequence[str] | None = None) -> None:
    """Show the comparison; SystemExit with a remedy if the run has no traced step."""
    parser = argparse.ArgumentParser(
        prog="shardhet compare",
        description="Compare a traced step of a run with its prediction: by device and phase, "
        "then the units that differ most. Trace a step with `shardhet train trace=true`.",
    )
    parser.add_argument("run", type=Path, help="the run folder")
    parser.add_argument("--all", action="store_true", help="list every unit and phase")
    parser.add_argument(
        "--picture", type=Path, help="draw each device's step, predicted above measured"
    )
    given = parser.parse_args(arguments)
    try:
        check_outputs(picture=None if given.picture is None else str(given.picture))
    except ConfigError as error:
        parser.error(str(error))
    folder = RunFolder(given.run)
    for path, remedy in (
        (folder.devices_path, "Pass the folder of a run: runs/..."),
        (folder.trace_dir / "rank0.json", "Train with trace=true."),
        (
            folder.predicted_trace_path,
            "A prediction needs measurements: plan=measured, or plan.measured=FOLDER.",
        ),
    ):
        if not path.is_file():
            parser.error(f"{path} is missing. {remedy}")
    names = [device_name(i, each) for i, each in enumerate(folder.load_devices())]
    predicted, measured = predicted_parts(folder), measured_parts(folder)
    console = WideConsole(soft_wrap=True)
    for i in sorted(measured):
        console.print(_table_of_phases(names[i], predicted[i], measured[i]))
    pairs = [(names[i], predicted[i], measured[i]) for i in sorted(measured)]
    differences = list(chain.from_iterable(differences_of(*each) for each in pairs))
    differences.sort(key=lambda each: -abs(each.seconds))
    shown = differences if given.all else differences[:NUM_SHOWN]
    console.print("Computations that differ most from what was measured before the run:")
    console.print(_table_of_units(shown))
    console.print(explain_difference(pairs), markup=False)
    if given.picture is not None:
        draw_timeline(f"one step of {given.run}", _lanes(folder, names), given.picture)
        console.print(f"drawn to {given.picture}", markup=False)


def predicted_parts(folder: RunFolder) -> dict[int, StepParts]:
    """The predicted step by position."""
    events = _predicted_events(folder)
    return {position: StepParts.of(of_one) for position, of_one in events.items()}


def _predicted_events(folder: RunFolder) -> dict[int, list[dict[str, Any]]]:
    events = _read(folder.predicted_trace_path)["traceEvents"]
    timed = [each for each in events if each["ph"] == "X" and each["cat"] in PHASES]
    positions = {each["pid"] for each in timed}
    return {i: [e for e in timed if e["pid"] == i] for i in positions}


def measured_parts(folder: RunFolder) -> dict[int, StepParts]:
    """The traced steps by position; those of a device that ran kernels by their time."""
    return {
        position: StepParts.of(events, num_steps=num_steps)
        for position, (events, num_steps) in _measured_events(folder).items()
    }


def _measured_events(folder: RunFolder) -> dict[int, tuple[list[dict[str, Any]], int]]:
    """The events of each position, and of how many steps they are."""
    found = {}
    for path in folder.trace_dir.glob("rank*.json"):
        trace = _read(path)
        timed = [each for each in trace["traceEvents"] if each.get("ph") == "X"]
        on_device = [each for each in timed if each.get("cat") == ON_DEVICE]
        on_host = [each for each in timed if each.get("cat") == ON_HOST]
        if on_device:  # the host's time says nothing of kernels, but of its waits for peers
            on_host = [each for each in on_host if each["name"].partition(" ")[0] in WAITING]
        found[int(trace[POSITION])] = [*on_device, *on_host], int(trace[NUM_STEPS])
    return found


def _lanes(folder: RunFolder, names: Sequence[str]) -> list[TimelineTrack]:
    """What each device does, as predicted and below it in the first traced step."""
    predicted, measured = _predicted_events(folder), _measured_events(folder)
    tracks = []
    for i, (events, num_steps) in sorted(measured.items()):
        tracks += [
            TimelineTrack(
                label=f"{names[i]}, predicted", spans=_spans(predicted.get(i, []), 1)
            ),
            TimelineTrack(label="measured", spans=_spans(events, num_steps)),
        ]
    return tracks


def _spans(events: Sequence[dict[str, Any]], num_steps: int) -> list[tuple[str, float, float]]:
    """Phase, start and seconds of what is in the first of the steps."""
    timed = [
        (phase, each["ts"] / 1e6, each["dur"] / 1e6)
        for each in events
        if (phase := _phase_of(each)[0]) in PHASES
    ]
    first_s = min((start_s for _, start_s, _ in timed), default=0.0)
    last_s = max((start_s + seconds for _, start_s, seconds in timed), default=0.0)
    end_s = first_s + (last_s - first_s) / num_steps
    return [
        (phase, start_s - first_s, seconds)
        for phase, start_s, seconds in timed
        if start_s < end_s
    ]


def _phase_of(event: dict[str, Any]) -> tuple[str, str]:
    """The phase that an event of a trace is of, and the rest of its name."""
    phase, _, rest = event["name"].partition(" ")
    return ("optimizer", "") if phase.startswith(OPTIMIZER_LABEL) else (phase, rest)


def differences_of(device: str, predicted: StepParts, measured: StepParts) -> list[Difference]:
    """One entry per unit and phase in which the device computes."""
    keys = dict.fromkeys([*predicted.seconds, *measured.seconds])
    return [
        Difference(
            device, phase, unit, *(p.seconds[phase, unit] for p in (predicted, measured))
        )
        for phase, unit in keys
        if phase in COMPUTING
    ]


def explain_difference(pairs: Sequence[tuple[str, StepParts, StepParts]]) -> str:
    """Where most of the difference is: computing on all devices or on one, or waiting on all.

    Where one device is late the others wait, and not itself; for links all of them do.  A
    device is late by what it takes longer than the others do, beside what was predicted.
    """
    names = [name for name, _, _ in pairs]
    computed = [[parts.of_phases(COMPUTING) for parts in each] for _, *each in pairs]
    waited = [[parts.of_phases(WAITING) for parts in each] for _, *each in pairs]
    waits_s = [measured_s - predicted_s for predicted_s, measured_s in waited]
    notable_s = NOTABLE * max(c[0] + w[0] for c, w in zip(computed, waited, strict=True))
    # Of those that are predicted to compute; one without samples and state does not.
    ratios = [m / p for p, m in computed if p]
    shared = min(ratios) if len(ratios) > 1 else 1.0
    is_shared = shared > 1 + NOTABLE
    scale = shared if is_shared else 1.0
    longer = [(m - scale * p, scale * p, i) for i, (p, m) in enumerate(computed) if p]
    found: list[tuple[float, str]] = []
    if is_shared:
        found.append((math.inf, BUSY.format(shared - 1)))
    if late := [each for each in longer if each[0] > NOTABLE * each[1]]:
        longer_s, predicted_s, i = max(late)
        others_s = max((s for j, s in enumerate(waits_s) if j != i), default=0.0)
        waits = f", and others wait up to {duration(others_s)} longer"
        text = (
            f"Device {names[i]} computes {duration(longer_s)} a step longer than "
            f"{'the others do beside their predictions' if is_shared else 'predicted'} "
            f"({longer_s / predicted_s:+.0%}){waits * (others_s > notable_s)}. Measure again, "
            "or train with rebalance=true."
        )
        found.append((longer_s, text))
    if len(pairs) > 1 and min(waits_s) > notable_s and not is_shared:
        text = (
            f"All devices wait at least {duration(min(waits_s))} a step longer than predicted: "
            "links are slower or busier than when they were measured."
        )
        found.append((min(waits_s), text))
    if found:
        return " ".join(text for _, text in sorted(found, reverse=True))
    longer_s, predicted_s, i = min(longer, key=lambda each: each[0] / each[1])
    if -longer_s > NOTABLE * predicted_s:
        return (
            f"No device computes {NOTABLE:.0%} longer than predicted, and not all wait longer. "
            f"Device {names[i]} computes {duration(-longer_s)} a step less "
            f"({longer_s / predicted_s:+.0%}), so measure again: there may be a faster plan."
        )
    return "Every device computes about as long as predicted, and not all wait longer."


def _table_of_phases(name: str, predicted: StepParts, measured: StepParts) -> Table:
    table = figures_table("device " + name, "predicted", "measured", "difference")
    for phase, text in PHASES.items():
        table.add_row(text, *_cells(predicted.of_phase(phase), measured.of_phase(phase)))
    return table


def _table_of_units(differences: Sequence[Difference]) -> Table:
    columns = ("device", "phase", "unit", "predicted", "measured", "difference")
    table = figures_table(*columns, num_left=3)
    for each in differences:
        cells = _cells(each.predicted_s, each.measured_s)
        table.add_row(each.device, each.phase, each.unit or "-", *cells)
    return table


def _cells(predicted_s: float, measured_s: float) -> tuple[str, str, str]:
    more_s = measured_s - predicted_s
    sign = "-" if more_s < 0 else "+"
    return duration(predicted_s), duration(measured_s), sign + duration(abs(more_s))


def _read(path: Path) -> dict[str, Any]:
    document = json.loads(path.read_text(encoding="utf-8"))
    assert isinstance(document, dict)
    return document
