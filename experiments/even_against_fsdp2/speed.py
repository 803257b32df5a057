"""Tokens per second of several systems that take turns in the same processes."""

from dataclasses import asdict, dataclass
from functools import partial

import torch.distributed as dist

from experiments.common import systems
from experiments.common.systems import FSDP2, HET, PLAIN, Rounds, System
from experiments.decoders import decoder_config, make_decoder, random_batches, units_of
from shardhet import HetFSDP, Plan
from shardhet.models.decoder import DecoderConfig

NUM_BATCHES = 4  # all systems see the same ones over and over
NUM_STEPS_COMPARED = 4  # losses of all systems are equal in these
LEARNING_RATE = 1e-3

CONFIG = decoder_config(width=256, num_layers=6, seq_len=128)


@dataclass(frozen=True, slots=True, kw_only=True)
class Contest:
    """What is trained, by how many ranks, and for how long."""

    num_ranks: int
    rank_batch_size: int
    microbatch_sizes: tuple[int, ...]  # of HetFSDP, one system each
    rounds: Rounds

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
    """One timed step of a contest."""

    num_ranks: int
    rank_batch_size: int
    system: str
    round: int
    step: int
    slowest_rank_s: float


def measure_speed(rank: int, contest: Contest) -> list[StepSample]:
    """Steps of all systems of ``contest``; the same list on every rank."""
    # Every rank has others, and the same ones for all systems.
    batches = random_batches(
        CONFIG, contest.rank_batch_size, seed=rank, num_batches=NUM_BATCHES
    )
    contestants = make_systems(contest)
    systems.check_same_losses(
        {
            each.name: systems.first_losses(each, batches, NUM_STEPS_COMPARED)
            for each in contestants
        }
    )
    step_by_system = {
        each.name: partial(lambda system, step: system.step(*batches[step % NUM_BATCHES]), each)
        for each in contestants
    }
    return [
        StepSample(
            num_ranks=contest.num_ranks,
            rank_batch_size=contest.rank_batch_size,
            **asdict(timed),
        )
        for timed in systems.take_turns(step_by_system, contest.rounds)
    ]


def make_systems(contest: Contest) -> list[System]:
    """HetFSDP once per microbatch size, and its opponent."""
    num_ranks, batch_size = contest.num_ranks, contest.rank_batch_size
    made = [
        het_fsdp(
            CONFIG,
            Plan.even(num_ranks, microbatch_size=size, num_microbatches=batch_size // size),
            name=contest.system_name(size),
        )
        for size in contest.microbatch_sizes
    ]
    if num_ranks == 1:
        return [*made, plain_pytorch()]
    whole = Plan.even(num_ranks, microbatch_size=batch_size)
    with systems.over_gloo() as group:
        made.append(het_fsdp(CONFIG, whole, name=contest.over_gloo, group=group))
    return [*made, fsdp2(CONFIG)]


def het_fsdp(
    config: DecoderConfig,
    plan: Plan,
    *,
    name: str = HET,
    group: dist.ProcessGroup | None = None,
) -> System:
    """``plan`` on all ranks of the group, or on one process without a group."""
    model = HetFSDP(make_decoder(config), plan, group=group)
    optimizer = systems.fused_adamw(model.parameters(), LEARNING_RATE)
    return systems.het_fsdp(model, optimizer, name=name)


def fsdp2(config: DecoderConfig) -> System:
    """Every rank has as many tokens, so its mean of the ranks' means is the global mean."""
    model = make_decoder(config)
    return systems.fsdp2(model, units_of(model), LEARNING_RATE)


def plain_pytorch() -> System:
    """One process."""
    model = make_decoder(CONFIG)
    optimizer = systems.fused_adamw(model.parameters(), LEARNING_RATE)
    return systems.stock(model, optimizer, name=PLAIN)
