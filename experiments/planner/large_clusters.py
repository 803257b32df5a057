"""Descriptions of clusters that are larger than any that is described: made up, but valid.

The kinds of device are those that ``conf`` knows, or differ from them in speed and memory.
"""

from pathlib import Path

import numpy as np

EIGHT_KINDS = (
    "NVIDIA H100 80GB HBM3",
    "NVIDIA A100-SXM4-80GB",
    "NVIDIA A100-SXM4-40GB",
    "NVIDIA A10G",
    "NVIDIA L4",
    "NVIDIA RTX A6000",
    "NVIDIA GeForce RTX 4090",
    "NVIDIA GeForce RTX 3090",
)
PER_HOST = 8
LINK = '{latency_s: 2.0e-5, bandwidth_bytes_per_s: 20.0e+9, source: "made up"}'
BETWEEN = '{latency_s: 2.0e-5, bandwidth_bytes_per_s: 50.0e+9, source: "made up"}'


def write_eight_kinds(path: Path, num_devices: int) -> None:
    """As many devices of each of eight kinds, eight of them on a host."""
    hosts = num_devices // (PER_HOST * len(EIGHT_KINDS))
    lines = ["version: 1", "nodes:"]
    for i, kind in enumerate(EIGHT_KINDS):
        lines += [
            f"  - host: type{i}",
            f"    count: {hosts}",
            f"    link: {LINK}",
            f"    devices: [{{kind: {kind}, count: {PER_HOST}}}]",
        ]
    path.write_text("\n".join([*lines, f"between_nodes: {BETWEEN}"]) + "\n")


def write_all_different(path: Path, num_devices: int, seed: int = 0) -> None:
    """Every device is of a kind of its own: 40 to 400 TFLOP/s, 16 to 80 GiB."""
    rng = np.random.default_rng(seed)
    kinds, lines = [], ["version: 1", f"kinds: {path.stem}_kinds.yaml", "nodes:"]
    for i in range(num_devices):
        peak = float(np.exp(rng.uniform(np.log(40e12), np.log(400e12))))
        kinds += [
            f"- kind: kind {i}",
            f"  memory_capacity_bytes: {int(rng.uniform(16, 80) * 2**30)}",
            f"  memory_bandwidth_bytes_per_s: {peak / 150:.6e}",
            f"  peak_flops_per_s: {{float32: {peak / 4:.6e}, bfloat16: {peak:.6e}}}",
            '  source: "made up"',
        ]
        if i % PER_HOST == 0:
            lines += [f"  - host: h{i // PER_HOST}", f"    link: {LINK}", "    devices:"]
        lines.append(f"      - {{kind: kind {i}}}")
    path.with_name(f"{path.stem}_kinds.yaml").write_text("\n".join(kinds) + "\n")
    path.write_text("\n".join([*lines, f"between_nodes: {BETWEEN}"]) + "\n")
