"""Cephalo's published profiles: our search against their dynamic programme, same objective.

    SHARDHET_SHARED_DATA=... python experiments/04_planner/published.py

Eight GPUs (2x L4, A6000, 3x P40, 2x P100), float32, global batch 128, every model with
latencies on all four kinds and a memory curve.  Objective, as in their released planner:
milliseconds per layer, max over GPUs of F + (F + B), 10 ms per extra microbatch, no links.
Memory, as there: three quarters of each GPU, 2 GiB of it for communication, 16 bytes per
parameter shared out at will.  Seconds are CPU
seconds of one thread: the median of REPEATS runs for ours, one run for theirs.
"""

import csv
import json
import os
import time
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from shardhet.planner.cephalo import cephalo_choice
from shardhet.planner.problem import Group, Problem
from shardhet.planner.search import NothingFitsError, search

HERE = Path(__file__).parent
DATA = Path(os.environ.get("SHARDHET_SHARED_DATA", HERE.parents[2] / "shared" / "data"))
GPUS = ["l4", "l4", "a6000", "p40", "p40", "p40", "p100", "p100"]
GIB_BY_GPU = {"l4": 22.5, "a6000": 47.99, "p40": 22.5, "p100": 12.0}  # theirs, usable
USABLE, COMMUNICATION_GIB, EXTRA_MS = 0.75, 2.0, 10.0
BATCH = 128
REPEATS = 15

Floats = NDArray[np.float64]


def milliseconds(entry: list[list[float]]) -> tuple[Floats, Floats]:
    """Forward and backward by microbatch size 0 ... BATCH: looked up, their line beyond."""
    tables = []
    for phase in (0, 1):
        slope, start = entry[phase]
        table = start + slope * np.arange(BATCH + 1.0)
        if len(entry) == 4:
            measured = entry[2 + phase][:BATCH]
            table[1 : len(measured) + 1] = measured
        table[0] = 0.0
        tables.append(table)
    return tables[0], tables[1]


def compute_gib(curve: list[float]) -> Floats:
    """Memory by microbatch size; beyond the measured ones by the mean growth of the last."""
    last = min(5, len(curve))
    growth = (curve[-1] - curve[-last]) / (last - 1)
    beyond = curve[-1] + growth * np.arange(1, BATCH + 1 - len(curve))
    return np.array([0.0, *curve, *beyond]) + COMMUNICATION_GIB


def group(gpu: str, count: int, entry: list[list[float]], gib: Floats) -> Group:
    """Candidates of one kind of GPU: every batch in microbatches, the last may be smaller."""
    forward, backward = milliseconds(entry)
    room = USABLE * GIB_BY_GPU[gpu] - gib
    largest = int(np.flatnonzero(room >= 0)[-1])
    cost = 2 * forward + backward
    batch, size = np.arange(BATCH + 1)[:, None], np.arange(1, largest + 1)[None]
    extra = np.maximum(0, -(-batch // size) - 1) * EXTRA_MS
    total = batch // size * cost[size] + cost[batch % size] + extra
    left = np.where(batch > 0, room[size], USABLE * GIB_BY_GPU[gpu])
    # Beaten: a smaller microbatch, so with more room, that is no slower.
    fastest = np.minimum.accumulate(total, axis=1)
    kept = (size <= np.maximum(batch, 1)) & (total == fastest)
    kept[:, 1:] &= total[:, 1:] < fastest[:, :-1]
    b, m = np.nonzero(kept)
    return Group(count, b, total[b, m][None], left[b, m], 0.0).sorted()[0]


def ours(entries: dict[str, list[list[float]]], gib: Floats, state_gib: float) -> float:
    """Milliseconds of the plan that the search finds."""
    kinds = dict.fromkeys(GPUS)
    groups = tuple(group(gpu, GPUS.count(gpu), entries[gpu], gib) for gpu in kinds)
    found = search(Problem(groups, BATCH, state_gib))
    assert found.relative_gap <= 1e-9
    return found.value.objective_s


def theirs(entries: dict[str, list[list[float]]], gib: Floats, state_gib: float) -> float:
    """Milliseconds of the plan that the dynamic programme finds; inf for none."""
    number = np.arange(BATCH + 1)
    tables, memory = [], []
    for gpu in GPUS:
        forward, backward = milliseconds(entries[gpu])
        largest = int(np.flatnonzero(USABLE * GIB_BY_GPU[gpu] - gib >= 0)[-1])
        cost = (2 * forward + backward)[: largest + 1, None]
        tables.append(cost * number + np.maximum(0, number - 1) * EXTRA_MS)
        memory.append(gib)
    total = USABLE * sum(GIB_BY_GPU[gpu] for gpu in GPUS) - state_gib
    choice = cephalo_choice(tables, memory, global_batch_size=BATCH, total_bytes=total)
    if choice is None:
        return np.inf
    return max(float(t[c.size, c.number]) for t, c in zip(tables, choice, strict=True))


def main() -> None:
    """One row per model."""
    latencies = json.loads((DATA / "cephalo" / "model_latencies.json").read_text())
    memories = json.loads((DATA / "cephalo" / "model_memory.json").read_text())
    rows = []
    for model, by_gpu in sorted(latencies.items()):
        entries = {gpu: by_gpu.get(gpu, {}).get("512", {}).get("float32") for gpu in GIB_BY_GPU}
        sources = [
            memories[cluster][model]
            for cluster in ("paper", "paper_4gpu", "aws-16gpu", "aws-8gpu")
            if "float32" in memories[cluster].get(model, {}).get("profiled_compute_memory", {})
        ]
        if not all(entries.values()) or not sources:
            continue
        gib = compute_gib(sources[0]["profiled_compute_memory"]["float32"])
        state_gib = sources[0]["parameters"] * 16 / 2**30
        start = time.process_time()
        their_ms = theirs(entries, gib, state_gib)
        their_s = time.process_time() - start
        seconds = []
        try:
            for _ in range(REPEATS):
                start = time.process_time()
                our_ms = ours(entries, gib, state_gib)
                seconds.append(time.process_time() - start)
        except NothingFitsError:
            our_ms, seconds = np.inf, [np.nan]
        our_s = float(np.median(seconds))
        rows.append([model, our_ms, their_ms, our_s, their_s, their_s / our_s])
        print(
            f"{model:24} {our_ms:10.4f} {their_ms:10.4f} ms   {our_s:.4f} {their_s:.4f} s "
            f"{their_s / our_s:7.1f} times"
        )
    with (HERE / "published.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["model", "our_ms", "dp_ms", "our_s", "dp_s", "times_faster"])
        writer.writerows(rows)


if __name__ == "__main__":
    main()
