"""Several ranks on one GPU, over gloo: are streams, events and reused memory in order?

Training on the device must give the losses that plain PyTorch gives on a CPU.  A missing wait
between streams shows only where one of them is late, so some cases are run several times:

    on time        as it is
    late compute   after each microbatch the compute stream gets a product of large matrices:
                   gathers and reductions run far ahead of it, and what the host has freed is
                   given away while kernels that read it are still to come
    late transfer  the same on the streams of gathers and reductions: compute would run ahead
                   of parameters that have not come and of gradients that are still read
    late copies    the same before each copy from or to the host, where a plan has such

gloo is slow here and that does not matter: nothing is timed.
"""

import itertools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from multiprocessing.queues import SimpleQueue
from threading import Thread
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from experiments.common.launch import SPAWNED, run_ranks
from experiments.common.systems import PLAIN, stock
from experiments.decoders import CPU, decoder_config, make_decoder
from experiments.gpu import systems
from experiments.gpu.results import Metric, Recorder, largest_difference, noting_failure
from experiments.gpu.scale import MLP_RATIO, PARAM_DTYPE, REDUCE_DTYPE, Job
from shardhet import HetFSDP, Plan
from shardhet.apps.cli.quantities import counted
from shardhet.comm.copy_streams import Copy, CopyStream
from shardhet.fsdp.step.around import Activity, Observed
from shardhet.models.decoder import DecoderConfig

NAME = "streams"
NUM_STEPS = 5
LEARNING_RATE = 1e-3
DIFFERENCE = "loss difference"
FLOAT32, BFLOAT16 = "float32", "bfloat16 in flight"
TOLERANCES = {FLOAT32: 1e-4, BFLOAT16: 3e-2}  # relative; a race gives anything at all
METRICS = tuple(
    Metric(name=DIFFERENCE, of=precision, at_most=tolerance)
    for precision, tolerance in TOLERANCES.items()
)
GLOBAL_BATCH_SIZE = 8
# Per world: samples of each rank, shares of the state, and microbatch sizes.
WORLDS = {
    1: ((8,), (1.0,), (3,)),  # over NCCL, see nccl.py
    2: ((5, 3), (0.7, 0.3), (2, 1)),
    3: ((4, 3, 1), (0.5, 0.1, 0.4), (2, 1, 1)),
    # One stores nothing, one computes nothing.
    4: ((4, 3, 0, 1), (0.4, 0.0, 0.35, 0.25), (1, 2, 0, 1)),
}
LATENESS = ("on time", "late compute", "late transfer", "late copies")
ONE_ROUND, ROUNDS, ON_HOSTS = "one round", "two rounds", "two rounds, state and inputs on hosts"
LATE_WIDTH = 4096  # of the matrices: milliseconds on a large GPU


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One plan, run in one way."""

    world_size: int
    is_split: bool  # into several microbatches
    recompute: bool
    precision: str
    lateness: str
    form: str = ONE_ROUND

    @property
    def num_rounds(self) -> int:
        """Of a step; each has ``GLOBAL_BATCH_SIZE`` samples."""
        return 1 if self.form == ONE_ROUND else 2

    @property
    def name(self) -> str:
        """For tables; the world is at its beginning."""
        return ", ".join(
            (
                counted(self.world_size, "rank"),
                self.precision,
                "several microbatches" if self.is_split else "one microbatch",
                "recomputed" if self.recompute else "kept",
                *([] if self.form == ONE_ROUND else [self.form]),
                self.lateness,
            )
        )

    @property
    def plan(self) -> Plan:
        """Uneven in all respects."""
        batches, shares, sizes = WORLDS[self.world_size]
        return Plan.by_hand(
            microbatch_sizes=sizes if self.is_split else batches,
            rank_batch_sizes=batches,
            state_shares=shares,
            recompute=self.recompute,
            num_rounds=self.num_rounds,
            reduce_each_round=self.num_rounds == 1,
            inputs_on_host=self.form == ON_HOSTS and self.recompute,
            optimizer_on_host=self.form == ON_HOSTS,
        )


def cases_for(world_size: int) -> list[Case]:
    """All four ways in float32 on time; two of them, and one in bfloat16, late as well.

    Then rounds, and what a plan keeps in the memory of hosts.
    """
    flags = [
        (is_split, recompute, FLOAT32, LATENESS[0])
        for is_split, recompute in itertools.product((False, True), repeat=2)
    ]
    for lateness in LATENESS[1:3]:
        flags += [(both, both, FLOAT32, lateness) for both in (False, True)]
    flags += [(True, True, BFLOAT16, lateness) for lateness in LATENESS[:3]]
    forms = [(ROUNDS, lateness) for lateness in LATENESS[:3]]
    forms += [(ON_HOSTS, lateness) for lateness in LATENESS]
    return [
        Case(
            world_size=world_size,
            is_split=is_split,
            recompute=recompute,
            precision=precision,
            lateness=lateness,
        )
        for is_split, recompute, precision, lateness in flags
    ] + [
        Case(
            world_size=world_size,
            is_split=True,
            recompute=True,
            precision=FLOAT32,
            lateness=lateness,
            form=form,
        )
        for form, lateness in forms
    ]


def config_of(job: Job) -> DecoderConfig:
    """A small model, for a CPU is to train it too."""
    if job.is_rehearsal:
        return job.scale.config
    return decoder_config(width=256, num_layers=4, seq_len=128, mlp_ratio=MLP_RATIO)


def run(job: Job, record: Recorder) -> None:
    """One launch of ranks per world, all cases in it."""
    config = config_of(job)
    expected = {number: reference_losses(config, number) for number in (1, 2)}
    worlds = [2] if job.is_short else [2, 3, 4]
    for world_size in worlds:
        cases = cases_for(world_size)
        cases = cases[::3] if job.is_rehearsal else cases
        ended: SimpleQueue[tuple[Case, list[float]] | None] = SPAWNED.SimpleQueue()

        def note(ended: Any = ended) -> None:
            """Each case as it ends: a later one may not, and would take it along."""
            while (answer := ended.get()) is not None:
                case, losses = answer
                of_case = expected[case.num_rounds]
                record(case.name, DIFFERENCE, largest_difference(losses, of_case))

        noting = Thread(target=note)
        noting.start()
        with noting_failure(f"{world_size} ranks", record):
            run_ranks(train_cases, world_size, job, config, cases, ended)
        ended.put(None)
        noting.join()


def reference_losses(config: DecoderConfig, num_rounds: int = 1) -> list[float]:
    """Of plain PyTorch, on this machine's CPU, in float32."""
    model = make_decoder(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    batch = systems.random_batch(config, num_rounds * GLOBAL_BATCH_SIZE, CPU)
    plain = stock(model, optimizer, name=PLAIN)
    return [float(plain.step(*batch)) for _ in range(NUM_STEPS)]


def train_cases(
    rank: int, job: Job, config: DecoderConfig, cases: Sequence[Case], ended: Any = None
) -> list[list[float]]:
    """Losses of every case, on a rank of a gloo world; the first rank tells ``ended`` each."""
    if job.is_cuda:
        torch.cuda.set_device(job.device)
        # The one kernel for attention that sums as the CPU does, in float32 throughout.
        torch.backends.cuda.enable_flash_sdp(False)
        torch.backends.cuda.enable_mem_efficient_sdp(False)
        torch.backends.cuda.enable_cudnn_sdp(False)
        torch.backends.cuda.matmul.allow_tf32 = False
    found = []
    for case in cases:
        found.append(train(job.device, config, case))
        if ended is not None and rank == 0:
            ended.put((case, found[-1]))
    return found


def train(
    device: torch.device,
    config: DecoderConfig,
    case: Case,
    group: dist.ProcessGroup | None = None,
) -> list[float]:
    """Mean losses of a few steps under the case's plan.  Collective."""
    # Made on the CPU, so that the weights are the reference's.
    module = make_decoder(config).to(device)
    in_bfloat16 = case.precision == BFLOAT16
    model = HetFSDP(
        module,
        case.plan,
        group=group,
        param_dtype=PARAM_DTYPE if in_bfloat16 else None,
        reduce_dtype=REDUCE_DTYPE if in_bfloat16 else None,
    )
    if case.lateness in LATENESS[1:3]:
        model.add_observer(make_late(model, device, is_compute=case.lateness == LATENESS[1]))
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    batch = systems.random_batch(config, case.num_rounds * GLOBAL_BATCH_SIZE, device)
    own = [each[case.plan.sample_indices(model.position)] for each in batch]

    def step() -> float | None:
        mean_loss = model.forward_backward(*own)
        optimizer.step()
        optimizer.zero_grad()
        return mean_loss

    with late_copies(device) if case.lateness == LATENESS[3] else nullcontext():
        losses = [step() for _ in range(NUM_STEPS)]
    return [float("nan") if loss is None else float(loss) for loss in losses]


def late_copies(device: torch.device) -> AbstractContextManager[Any]:
    """Keep the streams of copies from and to the host busy before each copy."""
    multiply, launch = _multiply(device), CopyStream.launch

    def late(lane: CopyStream, make: Callable[[], None], **others: Any) -> Copy:
        def make_late() -> None:
            multiply()
            make()

        return launch(lane, make_late, **others)

    return mock.patch.object(CopyStream, "launch", late)


def _multiply(device: torch.device) -> Callable[[], None]:
    """A product of large matrices on the current stream."""
    width = LATE_WIDTH if device.type == "cuda" else 8
    filler, filled = [torch.zeros(width, width, device=device) for _ in range(2)]

    @torch.no_grad()
    def multiply() -> None:
        torch.mm(filler, filler, out=filled)  # nobody reads it, so streams may overwrite it

    return multiply


def make_late(
    model: HetFSDP, device: torch.device, *, is_compute: bool
) -> Callable[[Observed], None]:
    """An observer that keeps streams busy after each microbatch of each unit."""
    multiply = _multiply(device)
    comm = model._comm  # there is no public way to its streams, and no other need for one

    def observe(event: Observed) -> None:
        if event.activity not in (Activity.FORWARD, Activity.BACKWARD):
            return
        if is_compute:
            multiply()
            return
        for stream in (comm.all_gather_stream, comm.reduce_scatter_stream):
            with comm.on_stream(stream):
                multiply()

    return observe
