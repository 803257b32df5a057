"""Small checks that are right or wrong: first steps, reads, pins, bad losses, compile.

``controls`` are checks of the checks: each makes a fault, which has to be noticed.
"""

import math
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import product
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from experiments.common.systems import het_fsdp
from experiments.decoders import CPU, decoder_config, make_decoder
from experiments.gpu import systems
from experiments.gpu.clock import free_everything, seconds_per_call, synchronize
from experiments.gpu.results import Metric, Recorder, largest_difference, noting_failure
from experiments.gpu.scale import REDUCE_DTYPE, Job
from experiments.gpu.streams import (
    FLOAT32,
    LATENESS,
    TOLERANCES,
    Case,
    config_of,
    reference_losses,
    train_cases,
)
from shardhet import HetFSDP
from shardhet.apps.launch.joining import choose_allocator
from shardhet.comm import devices
from shardhet.comm.groups import GROUPS_FOR_ONE
from shardhet.training.compiling import compile_units
from shardhet.training.data import TokenBatch
from shardhet.training.guard import BadStepGuard
from shardhet.training.hooks.bad_steps import OnBadStep
from shardhet.training.loss_scaling import LossScaler
from shardhet.training.optim import OptimizerSpec, WarmupDecay
from shardhet.training.trainer import Trainer, run_plainly

# First steps in two bytes.  Widths and lengths at which libraries choose other kernels for
# two samples than for three: even and odd, small and large.

FIRST_STEPS = "first steps"
SHAPES = tuple(product((64, 320, 1024), (17, 128), (1, 6)))  # width, tokens, samples
SHORT_SHAPES = tuple(product((64,), (17,), (1, 2)))
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
DIFFERENCE = "loss difference"
# Relative, of a loss in two bytes.
FIRST_METRICS = (Metric(name=DIFFERENCE, at_most=3e-2),)


def first_steps(job: Job, record: Recorder) -> None:
    """Is the first step, in which the model's call is examined, taken at every shape?"""
    for name, (width, seq_len, num_samples) in product(
        DTYPES, SHORT_SHAPES if job.is_rehearsal else SHAPES
    ):
        case = f"{name}, width {width}, {num_samples} x {seq_len} tokens"
        with noting_failure(case, record):
            config = decoder_config(width=width, num_layers=2, seq_len=seq_len, head_width=32)
            module = make_decoder(config).to(job.device)
            batch = systems.random_batch(config, 2 * num_samples, job.device)
            with torch.no_grad():
                loss_sum, num_tokens = module(*batch)
                expected = float(loss_sum / num_tokens)
            plan = systems.one_rank_plan(num_samples, 2)
            model = HetFSDP(module, plan, param_dtype=DTYPES[name], reduce_dtype=REDUCE_DTYPE)
            scaler = LossScaler(job.device) if name == "float16" else None
            loss_sum, num_tokens = model(*batch)
            scaled = loss_sum if scaler is None else scaler.scaled(loss_sum)
            found = model.backward(scaled, num_tokens)
            assert found is not None
            mean = found if scaler is None else found / scaler.step_scale
            record(case, DIFFERENCE, largest_difference([mean], [expected]))


# Reads

READS = "reads"
SYNCS = "synchronisations"
AS_IT_IS, WITH_READ = "as it is", "control: loss.item(), too"
READ_METRICS = (
    Metric(name=SYNCS, of=AS_IT_IS, at_most=0),
    Metric(name=SYNCS, of=WITH_READ, at_least=1),
)


def reads(job: Job, record: Recorder) -> None:
    """Does anything of a step make the host wait for the device, but the read of the loss?

    That is an event's, which the driver's check leaves out.
    """
    config = config_of(job)
    model = HetFSDP(make_decoder(config, job.device), systems.one_rank_plan(4))
    optimizer = systems.ours(model.parameters())
    batch = systems.random_batch(config, 4, job.device)

    def step() -> None:
        model.backward(*model(*batch))
        model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(3):
        step()
    for case in (AS_IT_IS, WITH_READ):
        with noting_failure(case, record):
            synchronize(job.device)
            with _counting_syncs(job) as found:
                step()
                if case == WITH_READ:
                    next(iter(model.parameters())).detach().sum().item()
            for each in found:
                record(f"{case}: {each}"[:200], "said", 1)
            record(case, SYNCS, len(found))


@contextmanager
def _counting_syncs(job: Job) -> Iterator[list[str]]:
    found: list[str] = []
    if not job.is_cuda:
        yield found
        return
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode("default")
    said = [f"{each.filename}:{each.lineno} {each.message}" for each in caught]
    found += [each for each in said if "synchronizing CUDA operation" in each]


# What the driver is asked for

PINS = "pins and segments"
REFUSED_PIN, GROWING = "a pin that the driver refuses", "segments that grow"
UNRECORDED = "memory of messages is given out again at once"
HOST_BYTES = 2**22
SLEEP_CYCLES = 2 * 10**8  # a tenth of a second


def pins(job: Job, record: Recorder) -> None:
    """A refused pin is told and spoils no later kernel; segments of the allocator can grow, and
    it keeps nothing of messages.
    """
    if not job.is_cuda:
        return
    for case, check in (
        (REFUSED_PIN, _is_refused_pin_told),
        (GROWING, _do_segments_grow),
        (UNRECORDED, _is_given_out_again),
    ):
        with noting_failure(case, record):
            record(case, AS_EXPECTED, check(job.device))


def _is_refused_pin_told(device: torch.device) -> bool:
    memory = torch.zeros(HOST_BYTES, dtype=torch.uint8)
    unpin = devices.pin(memory, HOST_BYTES, device)
    again = devices.pin(memory, HOST_BYTES, device)  # what is pinned cannot be pinned again
    total = int(torch.ones(8, device=device).sum())  # raises if the runtime kept the error
    if unpin is not None:
        unpin()
    return unpin is not None and again is None and total == 8


def _do_segments_grow(device: torch.device) -> bool:
    choose_allocator()
    room = torch.empty(HOST_BYTES * 16, dtype=torch.uint8, device=device)
    here = room.data_ptr()
    return any(
        each["address"] <= here < each["address"] + each["total_size"] and each["is_expandable"]
        for each in torch.cuda.memory_snapshot()
    )


def _is_given_out_again(device: torch.device) -> bool:
    """The control: of a tensor that the allocator knows, torch records the stream."""
    return _kept_bytes(device, devices.unrecorded) == 0 < _kept_bytes(device, torch.detach)


def _kept_bytes(device: torch.device, known_as: Callable[[Tensor], Tensor]) -> int:
    """What is freed and not given out again, while a stream that uses it is busy."""

    def active() -> int:
        return int(torch.cuda.memory_stats(device)["active_bytes.all.current"])

    torch.cuda.synchronize(device)
    before, stream = active(), torch.cuda.Stream(device)
    memory = torch.empty(HOST_BYTES, dtype=torch.uint8, device=device)
    used = known_as(memory)
    with torch.cuda.stream(stream):
        torch.cuda._sleep(SLEEP_CYCLES)  # type: ignore[no-untyped-call]
        used.record_stream(stream)
    del memory, used
    return active() - before


# Losses that are not finite

GUARDS = "bad losses"
BAD_STEP, NUM_STEPS = 2, 4  # counted from 0
AS_EXPECTED = "as expected"
GUARD_METRICS = (Metric(name=AS_EXPECTED, at_least=1),)


@dataclass(frozen=True, slots=True)
class _SameBatches:
    tokens: np.ndarray
    targets: np.ndarray

    @property
    def global_batch_size(self) -> int:
        return len(self.tokens)

    def __getitem__(self, step: int) -> TokenBatch:
        return TokenBatch(tokens=self.tokens, targets=self.targets)


def guards(job: Job, record: Recorder) -> None:
    """A step whose loss is no number: it stops the run, or it changes nothing."""
    for on_bad_step in OnBadStep:
        with noting_failure(on_bad_step.name, record):
            record(on_bad_step.name, AS_EXPECTED, _is_guarded(job, on_bad_step))


def _is_guarded(job: Job, on_bad_step: OnBadStep) -> bool:
    config = config_of(job)
    tokens, targets = (each.numpy() for each in systems.random_batch(config, 4, CPU))
    model = HetFSDP(make_decoder(config, job.device), systems.one_rank_plan(4))

    backward = model.backward

    def run(call: Any, tensors: Sequence[Tensor]) -> Any:
        factor = math.nan if model.step == BAD_STEP else 1
        with mock.patch.object(model, "backward", lambda loss, n: backward(factor * loss, n)):
            return run_plainly(call, tensors)

    trainer = Trainer(
        model,
        OptimizerSpec(learning_rate=1e-3).build(list(model.parameters())),
        _SameBatches(tokens, targets),
        schedule=WarmupDecay(num_steps=NUM_STEPS),
        device=job.device,
        guard=BadStepGuard(on_bad_step),
        run=run,
    )
    losses: list[float | None] = []
    for step in range(NUM_STEPS):
        before = [each.detach().clone() for each in model.parameters()]
        try:
            metrics = trainer.train_step()
        except FloatingPointError:
            return on_bad_step is OnBadStep.STOP and step == BAD_STEP
        losses.append(metrics.mean_loss)
        after = [each.detach() for each in model.parameters()]
        is_same = all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        if is_same != (step == BAD_STEP) or (metrics.why_skipped is None) == is_same:
            return False
    good = [each for i, each in enumerate(losses) if i != BAD_STEP]
    return on_bad_step is not OnBadStep.STOP and all(
        each is not None and math.isfinite(each) for each in good
    )


# Compiled units

COMPILE = "compile"
EAGER, COMPILED = "eager", "compiled"
RATE = "tokens/s"
COMPILE_METRICS = (Metric(name=RATE), *FIRST_METRICS)


def compiled(job: Job, record: Recorder) -> None:
    """Do compiled units train as eager ones do, and how fast?"""
    size, config = max(1, job.scale.microbatch_size // 2), job.scale.config
    batch = systems.random_batch(config, size, job.device)
    losses = {}
    for case in (EAGER, COMPILED):
        with noting_failure(case, record):
            module = make_decoder(config, job.device)
            if case == COMPILED:
                backend = "eager" if job.is_rehearsal else "inductor"
                why = compile_units(module, job.device, backend=backend)
                if why is not None:
                    raise RuntimeError(why)
            model = HetFSDP(module, systems.one_rank_plan(size), **systems.PRECISION)
            system = het_fsdp(model, systems.ours(model.parameters()))
            losses[case] = [float(system.step(*batch)) for _ in range(3)]
            seconds = seconds_per_call(
                lambda step=system.step: step(*batch), job.pick(full=10, short=2), job.device
            )
            record(case, RATE, size * config.seq_len / seconds, "tokens/s")
            del model, system, module
            free_everything(job.device)
    if len(losses) == len((EAGER, COMPILED)):
        record(COMPILED, DIFFERENCE, largest_difference(losses[COMPILED], losses[EAGER]))


# Controls

CONTROL = "controls"
OTHER_RATE = "control: another learning rate"
NO_WAITS = "control: compute waits for no stream"
CONTROL_METRICS = (Metric(name=DIFFERENCE, at_least=TOLERANCES[FLOAT32]),)


def controls(job: Job, record: Recorder) -> None:
    """Faults that ``streams`` has to notice: a wrong optimizer, and missing waits."""
    expected = reference_losses(config_of(job))
    with systems.one_rank_group(job.device):
        for case in (OTHER_RATE, NO_WAITS) if job.is_cuda else (OTHER_RATE,):
            with noting_failure(case, record):
                try:
                    losses = _faulty(job, is_rate=case == OTHER_RATE)
                except FloatingPointError:  # noticed by the runtime itself
                    losses = [math.inf] * len(expected)
                record(case, DIFFERENCE, largest_difference(losses, expected))


def _faulty(job: Job, *, is_rate: bool) -> list[float]:
    late = LATENESS[0 if is_rate else 2]
    case = Case(world_size=1, is_split=True, recompute=True, precision=FLOAT32, lateness=late)
    fault: Any = nullcontext()
    if is_rate:
        fault = mock.patch("experiments.gpu.streams.LEARNING_RATE", 3e-3)
    elif job.is_cuda:
        fault = mock.patch.object(torch.cuda.Stream, "wait_event")
    with mock.patch.dict(os.environ, {GROUPS_FOR_ONE: "1"}), fault:
        return train_cases(0, job, config_of(job), [case])[0]
