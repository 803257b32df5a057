"""What is shown of a run, and of a measurement."""

import io

import pytest
from rich.console import Console

from shardhet.apps.cli.display import Display, show_plan
from shardhet.apps.cli.streamed import WideConsole, figures_table
from shardhet.apps.launch.crash import RankConsole
from shardhet.apps.run.measure_report import BUSY, disturbances, warnings_of
from shardhet.records.cluster import DeviceSpec
from shardhet.records.plan import Plan
from shardhet.training.peak_memory import DeviceUse
from shardhet.training.trainer import StepMetrics
from tests.made_up import device_profile

PLAN = Plan.by_hand(
    microbatch_sizes=[8, 2, 0], rank_batch_sizes=[24, 5, 0], state_shares=[0.5, 0.2, 0.3]
)
USES = tuple(
    DeviceUse(busy_share=0.1 * i, waiting_share=0.5, peak_memory_bytes=2**29) for i in range(3)
)
DEVICES = [DeviceSpec(kind="Tesla T4", memory_capacity_bytes=2**30)] * 3


def test_lines_say_everything_once() -> None:
    console = Console(file=io.StringIO(), width=120, record=True)
    show_plan(PLAN, DEVICES, console)
    display = Display(num_steps=4, log_every=2, console=console)
    for step in range(1, 5):
        display.show_step(
            StepMetrics(
                step=step,
                mean_loss=None if step == 4 else 5.0 - step,
                norm=0.5,
                learning_rate=1e-3,
                num_targets=300,
                step_time_s=30.0,
            )
        )
    display.show_devices(USES)
    display.show_score(4, "bits per byte", 3.5)
    lines = console.export_text().splitlines()
    assert lines[0] == "3 devices; a step is 29 samples"
    assert "| 1 Tesla T4 |       5 | 2 x 2 + 1 x 1 |          - | 20.00% |" in lines
    assert lines[-4:] == [
        "step     2 of 4   loss 3.0000   grad norm 0.50   lr 1.00e-03   10 tokens/s   "
        "30000 ms/step   1:00 left",
        "step     4 of 4   loss none   grad norm 0.50   lr 1.00e-03   10 tokens/s   "
        "30000 ms/step   0:00 left",
        "  devices   0: 0% busy 50% waiting   "
        "1: 10% busy 50% waiting   2: 20% busy 50% waiting",
        "step     4   held-out 3.500 bits per byte",
    ]


def test_a_disturbed_measurement_is_named() -> None:
    took_s = {1: 0.005, 2: 0.108, 4: 0.016, 8: 0.032}
    device = device_profile("x", lambda m: (took_s[m], 0.0), sizes=[1, 2, 4, 8])
    [first, *_] = disturbances(device)
    assert "a microbatch of 2 took 108.00 ms, one of 4 16.00 ms" in first
    calm = device_profile("x", lambda m: (m * 1e-3, 0.0), sizes=[1, 2, 4])
    assert not disturbances(calm)
    assert f"x: {first}" in warnings_of([device, calm])
    assert warnings_of([device, device]) == [BUSY]  # of which no device is the cause


@pytest.mark.parametrize("kind", [WideConsole, RankConsole])
def test_tables_in_a_pipe_keep_their_columns_whole(
    kind: type[WideConsole], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    table = figures_table("device", *(f"{name}, forward + backward ms" for name in "abc"))
    table.add_row("0 NVIDIA GeForce RTX 4090 Laptop GPU", "1", "2", "3")
    console = kind(file=io.StringIO())
    console.print(table)
    printed = console.file.getvalue()  # type: ignore[attr-defined]
    assert printed.count("forward + backward ms") == 3
    assert "4090 Laptop GPU" in printed
