"""Simulator only: clusters that nobody here has, 64 to 16,384 devices of four kinds.

The simulator walks the events of a step, the cost model adds up classes of turns; the
planner trusts the cost model.  Here both look at the same plans.
"""

import time
from collections.abc import Sequence

from experiments.common.results import Bar, Table
from experiments.scale.records import Effort, Part, Report, Sample, cases_in, median, samples_of
from shardhet import Cluster, Plan, Workload, simulate
from shardhet.pricing.cost import CostModel
from shardhet.pricing.derive import derive_profile
from shardhet.pricing.setting import Setting
from shardhet.records.cluster import DeviceSpec, Link, Node
from shardhet.records.kinds import DeviceKind

NAME = "simulated"
SIZES = (64, 256, 1024, 4096, 16384)
QUICK_SIZES = (64, 256)
SPEEDS = (1.0, 0.6, 0.4, 0.25)  # of the four kinds
SAMPLES_PER_DEVICE = (8, 1)  # compute sets the pace, or the links do
MICROBATCH_SIZE = 4
DEVICES_PER_NODE = 8
LARGEST_DIFFERENCE = 0.05
MOST_S = 60.0  # of simulate, at any size
EXTRAPOLATED_S = 90.0  # larger clusters are left out if the last one suggests more

SYSTEM = "simulate"
SIMULATED, PREDICTED, TOOK = "simulated_s", "cost_model_s", "took_s"

WORKLOAD = Workload.transformer(
    num_layers=32,
    width=4096,
    num_heads=32,
    vocab_size=32000,
    seq_len=2048,
    param_dtype="bfloat16",
)


def cluster_of(num_devices: int) -> Cluster:
    """Nodes of eight alike; the kinds by turns.  Figures are of no real device."""
    kinds = tuple(
        DeviceKind(
            kind=f"made-up {speed:g}",
            memory_capacity_bytes=int(80e9 * speed),
            memory_bandwidth_bytes_per_s=2e12 * speed,
            peak_flops_per_s=(("bfloat16", 300e12 * speed),),
            source="made up for this experiment",
        )
        for speed in SPEEDS
    )
    nodes = []
    for i in range(num_devices // DEVICES_PER_NODE):
        kind = kinds[i % len(kinds)]
        device = DeviceSpec(kind=kind.kind, memory_capacity_bytes=kind.memory_capacity_bytes)
        nodes.append(
            Node(
                host=f"node-{i}",
                devices=(device,) * DEVICES_PER_NODE,
                link=Link(latency_s=5e-6, bandwidth_bytes_per_s=200e9),
            )
        )
    between = Link(latency_s=1e-5, bandwidth_bytes_per_s=50e9)
    return Cluster(nodes=tuple(nodes), kinds=kinds, between_nodes=between)


def plan_of(num_devices: int, samples_per_device: int) -> Plan:
    """Batches and state by speed."""
    speeds = [SPEEDS[i // DEVICES_PER_NODE % len(SPEEDS)] for i in range(num_devices)]
    return Plan.proportional(
        speeds=speeds,
        global_batch_size=samples_per_device * num_devices,
        microbatch_size=MICROBATCH_SIZE,
        state_shares=[speed / sum(speeds) for speed in speeds],
    )


def measure(effort: Effort) -> list[Sample]:
    """From small to large, as long as it stays within minutes."""
    samples: list[Sample] = []
    last_s, growth = 0.0, 1.0
    for size in QUICK_SIZES if effort.is_quick else SIZES:
        if last_s * growth > EXTRAPOLATED_S:
            break
        found = [s for n in SAMPLES_PER_DEVICE for s in _measure_case(size, n)]
        took_s = sum(sample.value for sample in found if sample.quantity == TOOK)
        growth = max(1.0, took_s / last_s) if last_s else 1.0
        last_s = took_s
        samples += found
    return samples


def _measure_case(size: int, samples_per_device: int) -> list[Sample]:
    cluster, plan = cluster_of(size), plan_of(size, samples_per_device)
    profile = derive_profile(cluster, WORKLOAD)
    predicted_s = CostModel(Setting(cluster, WORKLOAD, profile)).predict(plan).step_time_s
    start_s = time.process_time()
    simulated_s = simulate(plan, Setting(cluster, WORKLOAD, profile)).step_time_s
    took_s = time.process_time() - start_s
    case = f"{size:,} devices, batch {samples_per_device} x {size:,}"
    values = {PREDICTED: predicted_s, SIMULATED: simulated_s, TOOK: took_s}
    return [
        sample
        for quantity, value in values.items()
        for sample in samples_of(NAME, case, quantity, {SYSTEM: [value]})
    ]


def report(samples: Sequence[Sample]) -> Report:
    """One row per cluster, and two bars."""
    rows, differences, seconds = [], [], []
    for case in cases_in(samples):
        predicted_s, simulated_s, took_s = (
            median(samples, case, SYSTEM, quantity) for quantity in (PREDICTED, SIMULATED, TOOK)
        )
        differences.append(predicted_s / simulated_s - 1)
        seconds.append(took_s)
        rows.append(
            [
                case,
                f"{simulated_s:.4f}",
                f"{predicted_s:.4f}",
                f"{differences[-1]:+.2%}",
                f"{took_s:.2f}",
            ]
        )
    table = Table(
        title="Simulated: step seconds of made-up clusters of four kinds of device",
        header=["cluster", "simulator", "cost model", "difference", "simulate, CPU s"],
        rows=rows,
    )
    largest, _, _ = cases_in(samples)[-1].partition(" devices")
    bars = [
        Bar(
            claim=f"simulated, up to {largest} devices: cost model / simulator - 1, the worst",
            measured=max(map(abs, differences)),
            at_most=LARGEST_DIFFERENCE,
        ),
        Bar(
            claim=f"simulated, up to {largest} devices: CPU seconds of simulate, the longest",
            measured=max(seconds),
            at_most=MOST_S,
        ),
    ]
    return Report(tables=[table], bars=bars)


PART = Part(name=NAME, measure=measure, report=report)
