"""Tokens per second of several systems that take turns in the same processes.

Turns, not launches of their own: on a shared machine the same program differs from launch
to launch (where memory lies, what the neighbours do) by more than the systems differ.  In
one process a slow second meets all of them.  A turn is a few steps, of which the first is
left out because the other system has just had the caches.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from experiments.contestants import check_same_losses, slowest_rank_seconds
from experiments.decoders import Batch, decoder_config, random_batches
from experiments.even_against_fsdp2 import systems
from experiments.even_against_fsdp2.systems import System
from shardhet import Plan

NUM_BATCHES = 4  # all systems see the same ones over and over
NUM_STEPS_COMPARED = 4  # losses of all systems are equal in these
HET, FSDP2, PLAIN = "HetFSDP", "FSDP2", "plain PyTorch"

CONFIG = decoder_config(width=256, num_layers=6, seq_len=128)


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
    def over_gloo(self) -> str:
        """Of HetFSDP with one microbatch, through sockets."""
        return f"{HET} over gloo, 1 x {self.rank_batch_size}"

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
    # Every rank has others, and the same ones for all systems.
    batches = random_batches(
        CONFIG, contest.rank_batch_size, seed=rank, num_batches=NUM_BATCHES
    )
    contestants = make_systems(contest)
    check_same_losses({each.name: first_losses(each, batches) for each in contestants})
    samples = []
    for turn in range(-1, contest.num_rounds):  # the first one warms up
        # There and back again: who goes first in one round goes last in the next.
        order = contestants if turn % 2 else contestants[::-1]
        for system in order:
            durations_s = time_turn(system, batches, contest.num_steps)
            for step, slowest_rank_s in enumerate(durations_s):
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
    if not is_alone:
        ours.append(
            systems.het_fsdp_over_gloo(
                CONFIG,
                Plan.even(contest.num_ranks, microbatch_size=contest.rank_batch_size),
                name=contest.over_gloo,
            )
        )
    return [*ours, systems.plain_pytorch(CONFIG) if is_alone else systems.fsdp2(CONFIG)]


def time_turn(system: System, batches: Sequence[Batch], num_steps: int) -> list[float]:
    """Seconds of each step of one turn on the rank where it took longest."""
    return slowest_rank_seconds(
        lambda step: system.step(*batches[step % len(batches)]), num_steps + 1
    )


def first_losses(system: System, batches: Sequence[Batch]) -> torch.Tensor:
    """Means over ranks in the first steps."""
    losses = [system.step(*batches[step % len(batches)]) for step in range(NUM_STEPS_COMPARED)]
    mean = torch.tensor(losses, dtype=torch.float64)
    dist.all_reduce(mean)
    return mean / dist.get_world_size()
