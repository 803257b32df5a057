"""Cephalo's published profiles: our search against their dynamic programme, same objective.

    SHARDHET_SHARED_DATA=... python -m experiments.planner.published

Eight GPUs (2x L4, A6000, 3x P40, 2x P100), float32, global batch 128, every model with
latencies on all four kinds and a memory curve.  Objective, as in their released planner:
milliseconds per layer, max over GPUs of F + (F + B), 10 ms per extra microbatch, no links.
Memory, as there: three quarters of each GPU, 2 GiB of it for communication, 16 bytes per
parameter shared out at will.  Seconds are CPU
seconds of one thread, medians of runs of both in turn.
"""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from experiments.common.machine import SHARED_DATA
from experiments.common.results import write_csv
from experiments.planner.cephalo import cephalo_choice
from shardhet.planner.problem.problem import Group, Problem
from shardhet.planner.search.search import NothingFitsError, search

HERE = Path(__file__).parent
GPUS = ["l4", "l4", "a6000", "p40", "p40", "p40", "p100", "p100"]
GIB_BY_GPU = {"l4": 22.5, "a6000": 47.99, "p40": 22.5, "p100": 12.0}  # theirs, usable
USABLE, COMMUNICATION_GIB, EXTRA_MS = 0.75, 2.0, 10.0
BATCH = 128
FIRST_CUT, CUT_GROWTH = 2.0, 4.0  # of the time with batches that fit speeds exactly
ROUNDS, OURS_PER_ROUND = 7, 5  # of measuring one programme after the other

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


@dataclass(frozen=True)
class Kind:
    """One kind of GPU: what a microbatch of each size that fits costs and leaves."""

    count: int
    cost_ms: Floats  # [1 + sizes]
    room_gib: Floats  # [1 + sizes]

    @classmethod
    def of(cls, gpu: str, entry: list[list[float]], gib: Floats) -> "Kind":
        """What the profiles say of it."""
        forward, backward = milliseconds(entry)
        room = USABLE * GIB_BY_GPU[gpu] - gib
        room[0] = USABLE * GIB_BY_GPU[gpu]
        stop = int(np.flatnonzero(room >= 0)[-1]) + 1
        return cls(GPUS.count(gpu), (2 * forward + backward)[:stop], room[:stop])

    @property
    def least_ms_per_sample(self) -> float:
        """Of the best microbatch size, without what further microbatches cost."""
        return float((self.cost_ms[1:] / np.arange(1, len(self.cost_ms))).min())

    def group(self, cut_ms: float) -> Group:
        """Every batch in microbatches, the last may be smaller, but for what takes longer."""
        most = min(BATCH, int(cut_ms / self.least_ms_per_sample))
        batch = np.arange(most + 1)[:, None]
        size = np.arange(1, min(max(most, 1), len(self.cost_ms) - 1) + 1)[None]
        number, rest = np.divmod(batch, size)
        extra = np.maximum(0, number + (rest > 0) - 1) * EXTRA_MS
        total = number * self.cost_ms[size] + self.cost_ms[rest] + extra
        left = np.where(batch > 0, self.room_gib[size], self.room_gib[0])
        # Beaten: a smaller microbatch, so with more room, that is no slower.
        fastest = np.minimum.accumulate(total, axis=1)
        kept = (size <= np.maximum(batch, 1)) & (total == fastest)
        kept[:, 1:] &= total[:, 1:] < fastest[:, :-1]
        b, m = np.nonzero(kept)
        return Group(self.count, b, total[b, m][None], left[b, m], 0.0).sorted()[0]


def ours(entries: dict[str, list[list[float]]], gib: Floats, state_gib: float) -> float:
    """Milliseconds of the plan that the search finds; inf for none.

    Candidates that take longer than a cut are left out, and the cut is raised until what was
    found is faster than it.
    """
    kinds = [Kind.of(gpu, entries[gpu], gib) for gpu in dict.fromkeys(GPUS)]
    slowest_ms = BATCH * max(kind.least_ms_per_sample for kind in kinds)
    cut_ms = FIRST_CUT * BATCH / sum(kind.count / kind.least_ms_per_sample for kind in kinds)
    while True:
        try:
            found = search(Problem(tuple(k.group(cut_ms) for k in kinds), BATCH, state_gib))
            assert found.relative_gap <= 1e-9
            our_ms = found.value.objective_s
        except NothingFitsError:
            our_ms = np.inf
        if our_ms <= cut_ms or cut_ms >= slowest_ms:
            return our_ms
        cut_ms *= CUT_GROWTH


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


def cpu_seconds(run: Callable[[], float], repeats: int) -> list[float]:
    """Of every repeat."""
    seconds = []
    for _ in range(repeats):
        start = time.process_time()
        run()
        seconds.append(time.process_time() - start)
    return seconds


@dataclass(frozen=True, slots=True)
class Row:
    """One model."""

    model: str
    our_ms: float
    dp_ms: float
    our_s: float
    dp_s: float
    times_faster: float


def main() -> None:
    """One row per model."""
    latencies = json.loads((SHARED_DATA / "cephalo" / "model_latencies.json").read_text())
    memories = json.loads((SHARED_DATA / "cephalo" / "model_memory.json").read_text())
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
        case = (entries, gib, sources[0]["parameters"] * 16 / 2**30)
        our_ms, their_ms = ours(*case), theirs(*case)
        our_seconds, their_seconds = [], []
        for _ in range(ROUNDS):
            their_seconds += cpu_seconds(lambda c=case: theirs(*c), 1)
            our_seconds += cpu_seconds(lambda c=case: ours(*c), OURS_PER_ROUND)
        our_s, their_s = float(np.median(our_seconds)), float(np.median(their_seconds))
        rows.append(Row(model, our_ms, their_ms, our_s, their_s, their_s / our_s))
        print(
            f"{model:24} {our_ms:10.4f} {their_ms:10.4f} ms   {our_s:.4f} {their_s:.4f} s "
            f"{their_s / our_s:7.1f} times"
        )
    print(f"median {np.median([row.times_faster for row in rows]):.1f} times")
    write_csv(HERE / "published.csv", rows)


if __name__ == "__main__":
    main()
