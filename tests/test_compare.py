"""A traced step beside its prediction."""

import json
from collections import Counter
from pathlib import Path

import pytest

from shardhet.apps.launch.run_folder import RunFolder
from shardhet.extras.compare import StepParts, explain_difference, main
from shardhet.pricing.scenario import Scenario
from shardhet.records.cluster import DeviceSpec
from shardhet.simulator.simulation import simulate
from shardhet.simulator.timeline import Timeline
from shardhet.training.hooks.hooks import NUM_STEPS, POSITION
from tests.test_cost import CLUSTER, WORKLOAD, plan, profile

SLOWER = ("backward", "blocks.2")  # on the second device, twice as slow as predicted


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    """A run of two devices whose ranks have each other's positions."""
    run = RunFolder(tmp_path)
    run.save_devices([DeviceSpec(kind="fast"), DeviceSpec(kind="slow")])
    timeline = simulate(plan(), Scenario(CLUSTER, WORKLOAD, profile(gather_s=1.0)))
    run.trace_dir.mkdir()
    timeline.save_chrome_trace(run.predicted_trace_path)
    for rank in range(2):
        write_trace(run.trace_dir / f"rank{rank}.json", timeline, position=1 - rank)
    return run


def write_trace(path: Path, timeline: Timeline, *, position: int) -> None:
    """The same step twice as torch.profiler writes it, each visit in two microbatches."""
    events = []
    for event in timeline.ranks[position].events:
        work = event.work.value
        name = "Optimizer.step#AdamW.step" if work == "optimizer" else f"{work} {event.unit}"
        factor = 2 if position == 1 and (work, event.unit) == SLOWER else 1
        for microbatch in range(2 * 2):
            label = f"{name} [{microbatch % 2}]" if work in ("forward", "backward") else name
            microseconds = event.seconds * factor * 1e6 / 2
            moment = {"ts": event.start_s * 1e6, "dur": microseconds}
            events.append({"ph": "X", "cat": "user_annotation", "name": label, **moment})
    path.write_text(json.dumps({"traceEvents": events, POSITION: position, NUM_STEPS: 2}))


def test_the_unit_that_is_slower_than_predicted_comes_first(
    folder: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = folder.path / "step.png"
    main([str(folder.path), "--picture", str(picture)])
    text = capsys.readouterr().out
    assert picture.stat().st_size
    first = text.split("Computations that differ most")[1].split("\n|")[3]
    assert [each.strip() for each in first.split("|")][:3] == ["1 slow", *SLOWER]
    assert "Device 1 slow computes" in text
    assert text.index("device 0 fast") < text.index("device 1 slow")
    assert sum("+20 s" in line for line in text.splitlines()) == 2  # of its phase and its unit


def test_as_predicted_nobody_is_blamed(
    folder: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (folder.trace_dir / "rank1.json").read_text()  # the fast device's
    (folder.trace_dir / "rank0.json").write_text(text)
    main([str(folder.path)])
    assert "Every device computes about as long as predicted" in capsys.readouterr().out


def test_a_run_without_a_traced_step_is_told_how_to_trace(
    folder: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    folder.predicted_trace_path.unlink()
    with pytest.raises(SystemExit):
        main([str(folder.path)])
    assert "plan.measured=FOLDER" in capsys.readouterr().err
    (folder.trace_dir / "rank0.json").unlink()
    with pytest.raises(SystemExit):
        main([str(folder.path)])
    assert "Train with trace=true." in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([str(folder.path / "nowhere")])
    assert "Pass the folder of a run" in capsys.readouterr().err


def test_a_device_that_has_nothing_to_compute_is_not_blamed() -> None:
    works = StepParts(Counter({("forward", "head"): 2.0}))
    quicker = StepParts(Counter({("forward", "head"): 1.92}))
    idle, updates = StepParts(Counter()), StepParts(Counter({("optimizer", ""): 1e-6}))
    text = explain_difference([("0 fast", works, quicker), ("1 idle", idle, updates)])
    assert "Every device computes about as long" in text
    half = StepParts(Counter({("forward", "head"): 1.0}))
    text = explain_difference([("0 fast", works, half), ("1 same", works, works)])
    assert text.startswith("No device computes 5% longer than predicted, and not all wait")
    assert "1 s a step less (-50%)" in text


def parts(computes_s: float, waits_s: float = 0.0) -> StepParts:
    return StepParts(
        Counter({("forward", "head"): computes_s, ("wait_gather", "head"): waits_s})
    )


def test_who_is_late_is_told_by_what_it_computes_and_links_by_the_waits_of_all() -> None:
    """Shares of the device's own time: a second of ten is late, four of a hundred are not."""
    text = explain_difference(
        [("0 slow", parts(100), parts(104)), ("1 fast", parts(10, 90), parts(11, 90))]
    )
    assert text.startswith("Device 1 fast computes 1 s a step longer than predicted (+10%). ")
    assert "wait" not in text  # nobody waits for it
    late = explain_difference(
        [("0 slow", parts(100), parts(150)), ("1 fast", parts(10, 90), parts(10, 140))]
    )
    assert "+50%), and others wait up to 50 s longer." in late
    assert "links" not in late
    text = explain_difference(
        [("0 slow", parts(100), parts(100, 30)), ("1", parts(10, 90), parts(11, 119))]
    )
    assert text.startswith("All devices wait at least 29 s a step longer than predicted: links")
    assert "Device 1 computes 1 s a step longer" in text
    # The one that the others wait for computes as long as predicted, and they less.
    text = explain_difference(
        [("0 slow", parts(10), parts(10)), ("1 fast", parts(8, 2), parts(2, 8))]
    )
    assert "links" not in text
    assert "there may be a faster plan" in text
    assert "wait" not in explain_difference([("0 alone", parts(10), parts(20, 5))])


def test_where_all_devices_are_late_alike_the_machine_is_blamed_and_none_of_them() -> None:
    alike = [("0", parts(10), parts(13, 5)), ("1", parts(8, 2), parts(10.4, 7))]
    text = explain_difference(alike)
    assert text.startswith("All devices compute at least 30% longer than predicted")
    assert "Device " not in text
    assert "links" not in text
    text = explain_difference([alike[0], ("1", parts(8), parts(20.8))])
    assert "Device 1 computes 10.4 s a step longer than the others do" in text
    assert "(+100%)" in text
