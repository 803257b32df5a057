"""Tokens per second and peak memory of three systems that take turns on one device."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from experiments.common.systems import FSDP2, HET, PLAIN, System
from experiments.gpu import systems
from experiments.gpu.clock import allocated_bytes, free_everything, take_turns
from experiments.gpu.results import GIB, Metric, Recorder, largest_difference, noting_failure
from experiments.gpu.scale import RECOMPUTED, Job

NAME = "speed"
NUM_STEPS_COMPARED = 4  # losses of all systems agree in these
LOSS_TOLERANCE = 1e-2  # relative; bfloat16, and sums in another order
MAX_STEPS_OF_A_TURN = 10
RATE, LOSS, PEAK = "tokens/s", "loss difference", "peak GiB"
RATIO = f"{HET}'s tokens/s / its"
METRICS = (
    Metric(name=RATE),
    Metric(name=RATIO, of=PLAIN, at_least=0.98),
    Metric(name=RATIO, of=FSDP2, at_least=1.0),
    Metric(name=PEAK),
    Metric(name=LOSS, at_most=LOSS_TOLERANCE),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Contest:
    """What is trained."""

    batch_size: int
    recompute: bool

    @property
    def title(self) -> str:
        """For tables."""
        kept = "blocks recomputed" if self.recompute else "everything kept"
        return f"{self.batch_size} samples, {kept}"


@dataclass(slots=True)
class Contestant:
    """A system and what it holds between steps."""

    system: System
    held_bytes: int
    losses: list[float] = field(default_factory=list)


def run(job: Job, record: Recorder) -> None:
    """Both contests, one after the other."""
    scale = job.scale
    contests = (
        Contest(batch_size=scale.microbatch_size, recompute=False),
        Contest(batch_size=scale.recomputed_batch_size, recompute=True),
    )
    with systems.one_rank_group(job.device):
        for contest in contests:
            with noting_failure(contest.title, record):
                hold(job, contest, record)
            free_everything(job.device)


def hold(job: Job, contest: Contest, record: Recorder) -> None:
    """One contest, from the first weights to the last turn."""
    batch = systems.random_batch(job.scale.config, contest.batch_size, job.device)
    contestants = [enter(job, make, batch) for make in makers(job, contest)]
    for each in contestants:
        record(f"{contest.title}: {each.system.name}", LOSS, loss_difference(each, contestants))
    cases = [f"{contest.title}: {each.system.name}" for each in contestants]
    steps = [partial(each.system.step, *batch) for each in contestants]
    held_bytes = [each.held_bytes for each in contestants]
    turns = take_turns(
        dict(zip(cases, steps, strict=True)),
        job.device,
        num_rounds=job.pick(full=8, short=2),
        budget_s=job.budget_s / 2,  # there are two contests
        at_most=MAX_STEPS_OF_A_TURN,
    )
    tokens = contest.batch_size * job.scale.config.seq_len
    seconds: dict[int, dict[str, float]] = {}
    for turn in turns:
        seconds.setdefault(turn.number, {})[turn.case] = turn.seconds
        record(turn.case, RATE, tokens / turn.seconds, "tokens/s", turn.number)
        if job.is_cuda:
            peak = turn.peak_bytes + held_bytes[cases.index(turn.case)]
            record(turn.case, PEAK, peak / GIB, "GiB", turn.number)
        of_round = seconds[turn.number]
        if len(of_round) == len(cases):
            for case, of_case in of_round.items():
                record(case, RATIO, of_case / of_round[cases[0]], "", turn.number)


def makers(job: Job, contest: Contest) -> list[Callable[[], System]]:
    """How each system is made."""
    config, device, recompute = job.scale.config, job.device, contest.recompute
    plan = systems.one_rank_plan(contest.batch_size, recompute=RECOMPUTED if recompute else ())
    return [
        lambda: systems.het_fsdp(config, plan, device),
        lambda: systems.fsdp2(config, device, recompute=recompute),
        lambda: systems.plain_pytorch(config, device, recompute=recompute),
    ]


def enter(
    job: Job, make: Callable[[], System], batch: tuple[torch.Tensor, torch.Tensor]
) -> Contestant:
    """Make it, take its first steps, and see what it holds after them."""
    before = allocated_bytes(job.device)
    system = make()
    losses = [float(system.step(*batch)) for _ in range(NUM_STEPS_COMPARED)]
    free_everything(job.device)  # the whole model that it was made from
    return Contestant(system, allocated_bytes(job.device) - before, losses)


def loss_difference(one: Contestant, others: Sequence[Contestant]) -> float:
    """The largest of any of the first steps, relative, to any other system."""
    return max(largest_difference(one.losses, other.losses) for other in others)
