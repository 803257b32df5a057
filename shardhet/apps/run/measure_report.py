"""Output of rank zero after a measurement."""

from collections.abc import Sequence
from itertools import combinations
from pathlib import Path

from rich.console import Console
from rich.table import Table

from shardhet.apps.cli.streamed import figures_table, say
from shardhet.profiler.measure import Measurement
from shardhet.records.profiles import Collectives, DeviceProfile

DISTURBED = 1.3  # times the seconds of more samples; kernels alone differ by less
POOR = "Plans and predictions will be poor; measure again, longer (time_limit_s) or alone."
BUSY = (
    f"On all devices some microbatches took longer than larger ones: the host was busy. {POOR}"
)
MAX_ROWS = 8  # sizes in a table; the file has all of them


def show_measurement(console: Console, measured: Measurement, folder: Path) -> None:
    """Show the measurement as tables, its folder, and what to type next."""
    scenario = measured.scenario
    profile, nodes = scenario.profile, scenario.cluster.nodes
    for device in profile.devices:
        console.print(f"\n{device.device_kind}: {device.note}", style="bold", soft_wrap=True)
        console.print(compute_table(device))
        optimizer_ns = device.optimizer_seconds_per_element * 1e9
        say(console, f"optimizer: {optimizer_ns:.2f} ns per stored element")
    for node in nodes:
        if node.host_bytes_per_s is not None:
            free, pace = node.host_memory_bytes, node.host_bytes_per_s / 1e9
            room = "" if free is None else f", in {free / 2**30:.1f} GiB of its memory"
            say(console, f"host {node.host}: optimizers there move {pace:.1f} GB/s{room}")
    if profile.unit_overhead_s:
        overhead_us = profile.unit_overhead_s * 1e6
        say(console, f"overhead of the runtime: {overhead_us:.0f} us per unit and phase")
    if profile.collectives.points:
        console.print(f"\ncollectives over {scenario.cluster.world_size} devices", style="bold")
        console.print(collectives_table(profile.collectives))
        slowdowns = (f"{e.overlap_slowdown:.0%} on {e.device_kind}" for e in profile.devices)
        slowed = "collectives slow down overlapping compute by this part of their time"
        say(console, f"{slowed}: {', '.join(slowdowns)}")
    for node in nodes:
        if (link := node.link) is not None:
            speed = f"{link.bandwidth_bytes_per_s / 1e9:.2f} GB/s ({link.source})"
            latency = f"latency {link.latency_s * 1e6:.0f} us"
            say(console, f"links on {node.host}: {latency}, {speed}")
    for warning in warnings_of(profile.devices):
        console.print(warning, style="yellow", soft_wrap=True)
    say(console, f"\nwritten to {folder}; next:")
    say(console, f"  shardhet plan measured={folder} global_batch_size=64")


def warnings_of(devices: Sequence[DeviceProfile]) -> list[str]:
    """What was disturbed, by device; one sentence that blames none if all of them were."""
    found = [(each.device_kind, disturbances(each)) for each in devices]
    if len(found) > 1 and all(texts for _, texts in found):
        return [BUSY]
    return [f"{kind}: {text}" for kind, texts in found for text in texts]


def disturbances(device: DeviceProfile) -> list[str]:
    """A sentence for each kind of unit of which some samples took longer than more of them."""
    found = []
    for unit in device.units:
        sizes = [point.microbatch_size for point in unit.points]
        seconds = [unit.forward_s.at(size) + unit.backward_s.at(size) for size in sizes]
        for (i, less_s), (j, more_s) in combinations(enumerate(seconds), 2):
            if less_s > DISTURBED * more_s:
                found.append(
                    f"{unit.unit_kind}: a microbatch of {sizes[i]} took {less_s * 1e3:.2f} ms, "
                    f"one of {sizes[j]} {more_s * 1e3:.2f} ms: something else used the device "
                    f"meanwhile. {POOR}"
                )
                break
    return found


def compute_table(device: DeviceProfile) -> Table:
    """Milliseconds of each kind of unit, forward + backward, by microbatch size."""
    columns = [f"{unit.unit_kind}, forward + backward ms" for unit in device.units]
    table = figures_table("microbatch", *columns, num_left=0)
    for size in _some([p.microbatch_size for unit in device.units for p in unit.points]):
        cells = [
            f"{unit.forward_s.at(size) * 1e3:.2f} + {unit.backward_s.at(size) * 1e3:.2f}"
            if size in {point.microbatch_size for point in unit.points}
            else ""
            for unit in device.units
        ]
        table.add_row(str(size), *cells)
    return table


def collectives_table(collectives: Collectives) -> Table:
    """Milliseconds of gathers and reductions by size."""
    table = figures_table("", "gather, ms", "GB/s", "reduction, ms", "GB/s")
    for point in collectives.points:
        cells = [_binary(point.nbytes)]
        for timing in (point.gather, point.reduce):
            cells.append(f"{timing.mean_s * 1e3:.2f}")
            cells.append(f"{point.nbytes / max(1e-9, timing.mean_s) / 1e9:.2f}")
        table.add_row(*cells)
    weights = (collectives.gather_unevenness_weight, collectives.reduce_unevenness_weight)
    table.add_row("unevenness", f"{weights[0]:.2f}", "", f"{weights[1]:.2f}", "")
    return table


def _binary(nbytes: int) -> str:
    return f"{nbytes / 2**10:.1f} KiB" if nbytes < 2**20 else f"{nbytes / 2**20:.1f} MiB"


def _some(sizes: list[int]) -> list[int]:
    """At most ``MAX_ROWS`` of the sizes, including the smallest and the largest."""
    every = sorted(set(sizes))
    if len(every) <= MAX_ROWS:
        return every
    last = len(every) - 1
    return [every[round(i * last / (MAX_ROWS - 1))] for i in range(MAX_ROWS)]
