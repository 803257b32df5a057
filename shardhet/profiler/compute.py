"""Forward and backward seconds of every kind of unit at many microbatch sizes, on one rank.

All cases run once per round, so that a disturbance of the machine affects all of them.  Other
cases run between the forward of a case and its backward, as in a real step, so that what a
unit saved is no longer in a cache.
"""

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from shardhet.comm import devices
from shardhet.profiler.batch import TrainedModel
from shardhet.profiler.describe import trained_dtype
from shardhet.profiler.model_spec import ModelSpec, pass_on
from shardhet.profiler.stopwatch import Stopwatch, timing_of
from shardhet.profiler.unit_runner import Started, UnitRunner
from shardhet.records.profiles import ComputePoint, UnitProfile
from shardhet.records.workload import UnitKind, Workload
from shardhet.training.emulation import EmulatedDevice
from shardhet.training.optim import OptimizerSpec

NUM_WARM_UP_RUNS = 3  # the first take several times as long as later ones
MIN_ROUNDS = 3  # fewer give no deciles
USED_PART_OF_MEMORY = 0.8  # of what is free; the rest is for kernels' own buffers
# This many bytes of graphs wait for their backward, but no more than a step of
# ``STEP_MICROBATCHES`` of the largest microbatches keeps.  Server processors have shared caches
# of up to 2**28 bytes.
CACHE_BYTES = 2**28
STEP_MICROBATCHES = 2
WAITING_PART_OF_MEMORY = 0.25
FILLING_PART = 0.25  # at most this part of the time is spent until so many bytes wait
# Larger shards take proportionally longer.  On an accelerator they must be large enough that
# its kernels take longer than launching them.
MAX_OPTIMIZED_NUMEL = 2**24
MAX_OPTIMIZED_NUMEL_OF_ACCELERATOR = 2**28
OPTIMIZED_PART_OF_MEMORY = 0.1  # of all memory; the rest is for units that run in between
OPTIMIZED_TENSORS = 4  # parameter, gradient and two moments


@dataclass(slots=True)
class UnitSamples:
    """All measurements of one kind of unit: (forward, backward) seconds by size."""

    seconds: dict[int, list[tuple[float, float]]] = field(default_factory=dict)
    peak_bytes: dict[int, int | None] = field(default_factory=dict)

    def to_record(self, unit_kind: str) -> UnitProfile:
        """The samples as a ``UnitProfile``."""
        points = tuple(
            ComputePoint(
                microbatch_size=size,
                forward=timing_of([forward_s for forward_s, _ in samples]),
                backward=timing_of([backward_s for _, backward_s in samples]),
                peak_bytes=self.peak_bytes.get(size),
            )
            for size, samples in sorted(self.seconds.items())
        )
        return UnitProfile(unit_kind=unit_kind, points=points)


Samples = dict[str, UnitSamples]  # by kind of unit


def candidate_sizes(max_microbatch_size: int) -> list[int]:
    """The powers of two up to ``max_microbatch_size``, and that size itself."""
    powers = [2**i for i in range(max_microbatch_size.bit_length())]
    return sorted({*powers, max_microbatch_size})


class _Waiting:
    """A queue of cases that wait for their backward; the oldest is next."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._nbytes = 0
        self._cases: deque[tuple[int, Callable[[], None]]] = deque()  # bytes, and the backward
        self.has_room = True  # until a case has to be finished to make room

    def add(self, nbytes: int, finish: Callable[[], None]) -> None:
        self._cases.append((nbytes, finish))
        self._nbytes += nbytes

    def make_room(self, nbytes: int) -> None:
        while self._cases and self._nbytes + nbytes > self._most_bytes:
            self.has_room = False
            self._finish_oldest()

    def stay_as_full(self) -> None:
        """Let no more bytes wait than now: allocating memory takes longer than computing."""
        if self._cases:
            self._most_bytes = self._nbytes

    def finish_all(self) -> None:
        while self._cases:
            self._finish_oldest()

    def _finish_oldest(self) -> None:
        nbytes, finish = self._cases.popleft()
        finish()
        self._nbytes -= nbytes


def _finish(runner: UnitRunner, case: Started, taken: list[tuple[float, float]]) -> None:
    taken.append(runner.backward(case))


class ComputeMeasurement:
    """The units of a model on this rank's device, and how long they take."""

    def __init__(
        self,
        model: TrainedModel,
        model_spec: ModelSpec,
        workload: Workload,
        *,
        device: torch.device,
        memory_bytes: int,
        max_microbatch_size: int,
        emulated: EmulatedDevice | None,
    ) -> None:
        """``memory_bytes`` is what this rank may use."""
        self._model = model if model_spec.times_loss else replace(model, loss_fn=pass_on)
        self._device = device
        self._workload = workload
        self._memory_bytes = memory_bytes
        self._stopwatch = Stopwatch(device, emulated)
        self._sizes: dict[str, list[int]] = {}
        self._runners: dict[str, UnitRunner] = {}
        free_bytes = USED_PART_OF_MEMORY * memory_bytes
        self._most_waiting_bytes = min(CACHE_BYTES, int(WAITING_PART_OF_MEMORY * memory_bytes))
        free_bytes -= self._most_waiting_bytes
        for kind in self._computing_kinds():
            free_bytes -= 2 * kind.numel * max(workload.param_itemsize, 4)
        for kind in self._computing_kinds():
            per_sample = kind.activation_bytes + kind.transient_bytes + 3 * kind.input_bytes
            fitting = max(1, int(free_bytes / max(1, per_sample)))
            sizes = candidate_sizes(min(max_microbatch_size, fitting))
            self._sizes[kind.name] = sizes
            self._runners[kind.name] = UnitRunner(
                model,
                model_spec.unit_by_kind[kind.name],
                device=device,
                max_samples=sizes[-1],
                stopwatch=self._stopwatch,
            )

    def _computing_kinds(self) -> list[UnitKind]:
        counts = self._workload.num_units_by_kind
        return [kind for kind in self._workload.kinds if counts[kind.name]]

    def runner(self, kind: str) -> UnitRunner:
        """The runner of this kind of unit, for other measurements."""
        return self._runners[kind]

    def sizes(self, kind: str) -> list[int]:
        """The microbatch sizes that are measured for this kind."""
        return self._sizes[kind]

    def warm_up(
        self, seconds_per_round: float
    ) -> tuple[float, dict[str, dict[int, int | None]]]:
        """Seconds of a round, and the peak bytes of each case.

        Runs every case, the small ones first, and leaves out those that would make a round
        longer than ``seconds_per_round``; at least two sizes of each kind remain.
        """
        round_s = 0.0
        peaks: dict[str, dict[int, int | None]] = {kind: {} for kind in self._runners}
        for i, size in enumerate(sorted(set().union(*self._sizes.values()))):
            larger_s = 0.0  # of the next sizes, if their samples take as long
            for kind, runner in self._runners.items():
                if size not in self._sizes[kind]:
                    continue
                peaks[kind][size] = runner.peak_bytes(size)
                run_s = min(sum(runner.run(size)) for _ in range(NUM_WARM_UP_RUNS))
                round_s += runner.num_microbatches(size) * run_s
                for larger in [each for each in self._sizes[kind] if each > size][:1]:
                    larger_s += runner.num_microbatches(larger) * larger / size * run_s
            if i >= 1 and round_s + larger_s > seconds_per_round:
                for kind, sizes in self._sizes.items():
                    self._sizes[kind] = sizes[: max(2, sum(each <= size for each in sizes))]
                break
        return round_s, peaks

    def run_rounds(self, seconds: float, min_rounds: int = MIN_ROUNDS) -> Samples:
        """Run rounds until ``seconds`` are over, and at least ``min_rounds``.

        The end is a time, not a number of rounds, so that ranks that run together disturb
        each other until the end.
        """
        samples = {kind: UnitSamples() for kind in self._runners}
        waiting = _Waiting(self._waiting_bytes)
        start_s = time.perf_counter()
        while waiting.has_room and time.perf_counter() < start_s + FILLING_PART * seconds:
            self._run_round(waiting, {})
        waiting.stay_as_full()
        done = 0
        while done < min_rounds or time.perf_counter() < start_s + seconds:
            self._run_round(waiting, samples)
            done += 1
        waiting.finish_all()
        return samples

    def _run_round(self, waiting: _Waiting, samples: Samples) -> None:
        """Run every case once; times are dropped if ``samples`` is empty."""
        for kind, runner in self._runners.items():
            for size in self._sizes[kind]:
                num_microbatches = runner.num_microbatches(size)
                nbytes = num_microbatches * size * self._activation_bytes(kind)
                waiting.make_room(nbytes)  # first: memory suffices for just so many bytes
                case = runner.forward(size, num_microbatches)
                taken = samples[kind].seconds.setdefault(size, []) if samples else []
                waiting.add(nbytes, partial(_finish, runner, case, taken))

    def _activation_bytes(self, kind: str) -> int:
        return self._workload.kind_by_name[kind].activation_bytes

    @property
    def _waiting_bytes(self) -> int:
        """The most bytes that may wait: at most those of a step of the largest microbatches."""
        counts = self._workload.num_units_by_kind
        kept = sum(
            counts[kind] * STEP_MICROBATCHES * sizes[-1] * self._activation_bytes(kind)
            for kind, sizes in self._sizes.items()
        )
        return min(self._most_waiting_bytes, kept)

    def optimizer_seconds(
        self, optimizer: OptimizerSpec, share: float, num_repeats: int
    ) -> list[float]:
        """Seconds per element of an optimizer step on rows; each entry is a separate step.

        The parameters are those of a rank that stores ``share`` of every unit.
        """
        dtype = trained_dtype(self._model.module)
        max_numel = MAX_OPTIMIZED_NUMEL
        if not devices.is_on_host(self._device):
            usable_bytes = OPTIMIZED_PART_OF_MEMORY * self._memory_bytes
            fitting = int(usable_bytes / (OPTIMIZED_TENSORS * dtype.itemsize))
            max_numel = min(MAX_OPTIMIZED_NUMEL_OF_ACCELERATOR, fitting)
        params = [
            torch.nn.Parameter(torch.zeros(shape, device=self._device, dtype=dtype))
            for shape in _shard_shapes(self._workload, share, max_numel)
        ]
        stepper = optimizer.of_rows.build(params)
        for param in params:
            param.grad = torch.full_like(param, 1e-3)
        numel = sum(param.numel() for param in params)
        seconds = []
        for _ in range(num_repeats + 2):
            for kind, runner in self._runners.items():  # so that the state is not cached
                runner.run(self._sizes[kind][-1])
            with self._stopwatch.running():
                stepper.step()
            seconds.append(self._stopwatch.seconds / numel)
        trained_part = self._workload.trained_numel / self._workload.numel
        return [trained_part * each for each in seconds[2:]]  # the first steps create the state


def _shard_shapes(workload: Workload, share: float, max_numel: int) -> list[tuple[int, ...]]:
    """Shapes of what is stored of the parameters that are trained."""
    shapes: list[tuple[int, ...]] = []
    numel = 0
    for unit in workload.units:
        kind = workload.kind_of(unit)
        for i, shape in enumerate(kind.param_shapes):
            if i in kind.frozen_params:
                continue
            rows = max(1, round(shape[0] * share)) if shape else 1
            box = (rows, *shape[1:])
            if numel and numel + torch.Size(box).numel() > max_numel:
                return shapes
            shapes.append(box)
            numel += torch.Size(box).numel()
    return shapes


def peaks_into(samples: Samples, peaks: Mapping[str, Mapping[int, int | None]]) -> Samples:
    """The samples, with the peak bytes of each case added."""
    for kind, unit in samples.items():
        unit.peak_bytes = {size: peaks[kind].get(size) for size in unit.seconds}
    return samples
