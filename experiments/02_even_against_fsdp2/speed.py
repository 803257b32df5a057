"""Tokens per second of several systems that take turns in the same processes.

Turns, not launches of their own: on a shared machine the same program differs from launch
to launch (where memory lies, what the neighbours do) by more than the systems differ.  In
one process a slow second meets all of them.  A turn is a few steps, of which the first is
left out because the other system has just had the caches.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import systems
import torch
import torch.distributed as dist
from systems import System
from torch import Tensor

from shardhet import Plan

NUM_BATCHES = 4  # all systems see the same ones over and over
NUM_STEPS_COMPARED = 4  # losses of all systems are equal in these
LOSS_TOLERANCE = 1e-4  # relative; float32 sums in another order
HET, FSDP2, PLAIN = "HetFSDP", "FSDP2", "plain PyTorch"

CONFIG = systems.decoder_config(width=256, num_layers=6, seq_len=128)


@dataclass(frozen=True, slots=True, kw_only=True)
class Contest:
    """What is trained, by how many ranks, and for how long."""

    num_ranks: int
    rank_batch_size: int
    microbatch_sizes: tuple[int, ...]  # of HetFSDP, one system each
    num_rounds: int
    num_steps: int  # of a turn, besides the first

    @property
    def title(self) -> str:
        """For tables."""
        ranks = "1 rank" if self.num_ranks == 1 else f"{self.num_ranks} ranks"
        return f"{ranks}, {self.rank_batch_size} samples each"

    @property
    def tokens_per_step(self) -> int:
        """Of all ranks."""
        return self.num_ranks * self.rank_batch_size * CONFIG.seq_len

    def system_name(self, microbatch_size: int) -> str:
        """Of HetFSDP with this microbatch size."""
        return f"{HET}, {self.rank_batch_size // microbatch_size} x {microbatch_size}"

    @property
    def opponent(self) -> str:
        """Whom HetFSDP is compared with."""
        return PLAIN if self.num_ranks == 1 else FSDP2


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSample:
    """One timed step."""

    num_ranks: int
    rank_batch_size: int
    system: str
    round: int
    step: int  # within the turn; step 0 is left out
    slowest_rank_s: float


def measure_speed(rank: int, contest: Contest) -> list[StepSample]:
    """Steps of all systems of ``contest``; the same list on every rank."""
    batches = make_batches(rank, contest.rank_batch_size)
    contestants = make_systems(contest)
    check_same_losses(contestants, batches)
    samples = []
    for turn in range(-1, contest.num_rounds):  # the first one warms up
        # There and back again: who goes first in one round goes last in the next.
        order = contestants if turn % 2 else contestants[::-1]
        for system in order:
            for step, slowest_rank_s in enumerate(time_turn(system, batches, contest)):
                if turn >= 0 and step > 0:
                    sample = StepSample(
                        num_ranks=contest.num_ranks,
                        rank_batch_size=contest.rank_batch_size,
                        system=system.name,
                        round=turn,
                        step=step,
                        slowest_rank_s=slowest_rank_s,
                    )
                    samples.append(sample)
    return samples


def make_systems(contest: Contest) -> list[System]:
    """HetFSDP once per microbatch size, and its opponent."""
    ours = [
        systems.het_fsdp(
            CONFIG,
            Plan.even(
                contest.num_ranks,
                microbatch_size=size,
                num_microbatches=contest.rank_batch_size // size,
            ),
            name=contest.system_name(size),
        )
        for size in contest.microbatch_sizes
    ]
    is_alone = contest.num_ranks == 1
    return [*ours, systems.plain_pytorch(CONFIG) if is_alone else systems.fsdp2(CONFIG)]


def make_batches(rank: int, rank_batch_size: int) -> list[tuple[Tensor, Tensor]]:
    """Random tokens and their successors, other ones on each rank."""
    generator = torch.Generator().manual_seed(rank)
    shape = (NUM_BATCHES, rank_batch_size, CONFIG.seq_len + 1)
    tokens = torch.randint(0, CONFIG.vocab_size, shape, generator=generator)
    return [(sample[:, :-1].contiguous(), sample[:, 1:].contiguous()) for sample in tokens]


def time_turn(
    system: System, batches: Sequence[tuple[Tensor, Tensor]], contest: Contest
) -> list[float]:
    """Seconds of each step of one turn on the rank where it took longest."""
    durations = torch.empty(contest.num_steps + 1, dtype=torch.float64)
    if contest.num_ranks > 1:
        dist.barrier()
    for step in range(len(durations)):
        start_s = time.perf_counter()
        system.step(*batches[step % len(batches)])
        durations[step] = time.perf_counter() - start_s
    if contest.num_ranks > 1:
        dist.all_reduce(durations, op=dist.ReduceOp.MAX)
    return durations.tolist()


def check_same_losses(
    contestants: Sequence[System], batches: Sequence[tuple[Tensor, Tensor]]
) -> None:
    """Raise unless all systems train the same model in the same way."""
    by_system = []
    for system in contestants:
        losses = [
            system.step(*batches[step % len(batches)]) for step in range(NUM_STEPS_COMPARED)
        ]
        mean = torch.tensor(losses, dtype=torch.float64)
        if dist.get_world_size() > 1:
            dist.all_reduce(mean)
            mean /= dist.get_world_size()
        by_system.append(mean)
    for system, losses_of_system in zip(contestants, by_system, strict=True):
        if not torch.allclose(losses_of_system, by_system[0], rtol=LOSS_TOLERANCE, atol=0):
            raise RuntimeError(
                f"{system.name}: losses {losses_of_system.tolist()} but {contestants[0].name} "
                f"has {by_system[0].tolist()}. They do not train the same; mend that first."
            )
