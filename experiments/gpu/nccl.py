"""shardhet's collectives over NCCL: with one rank, and with two on one card if NCCL lets them.

With one rank HetFSDP needs no collective at all.  They are called by themselves, on a channel
over a group of one, and by a model that is made to have groups for one rank.  Two ranks on one
card are refused by most versions of NCCL; what it says is a result too.
"""

import os
from collections.abc import Mapping, Sequence
from unittest import mock

import torch
import torch.distributed as dist

from experiments.common.launch import run_ranks
from experiments.gpu import systems
from experiments.gpu.clock import seconds_per_call
from experiments.gpu.results import (
    MIB,
    Metric,
    Recorder,
    largest_difference,
    noting_failure,
)
from experiments.gpu.scale import Job
from experiments.gpu.streams import (
    DIFFERENCE,
    FLOAT32,
    LATENESS,
    Case,
    cases_for,
    config_of,
    reference_losses,
    train,
    train_cases,
)
from experiments.gpu.streams import METRICS as OF_LOSSES
from experiments.uneven_collectives.run import our_gather, our_reduce
from shardhet.comm.groups import GROUPS_FOR_ONE

NAME = "NCCL"
NBYTES = 256 * MIB
ONE_RANK, TWO_RANKS = "one rank", "two ranks on one card"
ERROR, SECONDS, REFUSED = "largest error", "seconds", "refused"
METRICS = (
    *OF_LOSSES,
    Metric(name=ERROR, at_most=0.0),
    Metric(name=SECONDS),
    Metric(name=REFUSED),
)
MULTI_RANK = "NCCL_MULTI_RANK_GPU_ENABLE"  # from NCCL 2.30 on


def run(job: Job, record: Recorder) -> None:
    """One rank first: what follows may hang."""
    expected = {number: reference_losses(config_of(job), number) for number in (1, 2)}
    with systems.one_rank_group(job.device):
        with noting_failure(f"{ONE_RANK}: collectives", record):
            collectives_of_one(job, record)
        train_alone(job, record, expected)
    for is_enabled in (False,) if job.is_short else (False, True):
        os.environ[MULTI_RANK] = str(int(is_enabled))  # the ranks inherit it
        case = f"{TWO_RANKS}, {FLOAT32}, {MULTI_RANK}={int(is_enabled)}"
        try:
            found = run_ranks(two_ranks, 2, job)
        except RuntimeError as error:  # a rank that was aborted
            found = [str(error).strip().splitlines()[-1]]
        reasons = [each for each in found if isinstance(each, str)]
        if reasons:
            record(f"{case}: {reasons[0]}", REFUSED, 1)
        else:
            record(case, DIFFERENCE, largest_difference(found[0], expected[1]))


def collectives_of_one(job: Job, record: Recorder) -> None:
    """A gather and a reduction, whose results are known."""
    numel = (MIB if job.is_rehearsal else NBYTES) // 4
    shard = torch.rand(numel, device=job.device)
    output = torch.empty_like(shard)
    calls = {
        "gather": our_gather(output, shard, [numel]),
        "reduce": our_reduce(output, shard, [numel]),
    }
    for name, call in calls.items():
        output.zero_()
        call()
        case = f"{ONE_RANK}: {name} of {4 * numel // MIB} MiB"
        record(case, ERROR, float((output - shard).abs().max()))
        for repeat in range(job.pick(full=5, short=2)):
            record(case, SECONDS, seconds_per_call(call, 3, job.device), "s", repeat)


def train_alone(job: Job, record: Recorder, expected: Mapping[int, Sequence[float]]) -> None:
    """All of HetFSDP's streams and waits, with what NCCL sends from a card to itself."""
    cases = cases_for(1)[:: 3 if job.is_rehearsal else 1]
    with mock.patch.dict(os.environ, {GROUPS_FOR_ONE: "1"}):
        for case in cases:
            with noting_failure(case.name, record):
                [losses] = train_cases(0, job, config_of(job), [case])
                of_case = expected[case.num_rounds]
                record(case.name, DIFFERENCE, largest_difference(losses, of_case))


def two_ranks(_rank: int, job: Job) -> list[float] | str:
    """Losses of training over NCCL, or why there are none."""
    if job.is_cuda:
        torch.cuda.set_device(job.device)
    case = Case(
        world_size=2, is_split=True, recompute=True, precision=FLOAT32, lateness=LATENESS[0]
    )
    try:
        group = dist.new_group([0, 1], backend="nccl" if job.is_cuda else "gloo")
        return train(job.device, config_of(job), case, group)
    except RuntimeError as error:  # NCCL's errors are of this kind
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        telling = [line for line in lines if "uplicate" in line or "nvalid usage" in line]
        reason = " ".join((telling or lines or [type(error).__name__])[:2])[:300]
        print(reason, flush=True)  # should the other rank hang, this is all there will be
        return reason
