"""One small model, trained for long: under plans of each kind, and by plain PyTorch."""

import gc
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from shardhet import HetFSDP, Plan, Stage
from shardhet.comm.transport import SWITCH

NUM_RANKS, WIDTH, NUM_BLOCKS, NUM_SAMPLES = 2, 16, 3, 4
PLAIN, THROUGH_SOCKETS = "plain PyTorch", "rounds through sockets"
ROUNDS = Plan.by_hand(microbatch_sizes=[1, 1], num_rounds=2)
STAGES = (
    Stage(units=("0", "1"), num_ranks=1),
    Stage(units=("2", "3"), num_ranks=1),
)
PLAN_BY_CASE = {
    PLAIN: None,
    "one round": Plan.by_hand(microbatch_sizes=[2, 1], num_microbatches=[1, 2]),
    "rounds": ROUNDS,
    THROUGH_SOCKETS: ROUNDS,
    "stages": Plan.by_hand(microbatch_sizes=[2, 2], num_rounds=2, stages=STAGES),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """What a process holds after a step."""

    case: str
    rank: int
    step: int
    resident_bytes: int  # of the process, as the system counts
    num_objects: int  # that the garbage collector follows
    num_files: int  # open


def train(rank: int, case: str, num_steps: int, every: int) -> list[Sample]:
    """What each rank holds after each ``every`` steps of AdamW."""
    os.environ[SWITCH] = "gloo" if case == THROUGH_SOCKETS else "auto"
    step = _step_of(case, rank)
    found = []
    for number in range(1, num_steps + 1):
        step()
        if number % every == 0:
            found.append(_look(case, rank, number))
    by_rank: list[list[Sample]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(by_rank, found)
    return [sample for samples in by_rank for sample in samples]


def _step_of(case: str, rank: int) -> Callable[[], None]:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(NUM_BLOCKS)]
    net = nn.Sequential(*blocks, nn.Linear(WIDTH, 1))
    plan = PLAN_BY_CASE[case]
    model = net
    if plan is not None:
        units = [str(i) for i in range(NUM_BLOCKS + 1)]
        model = HetFSDP(net, plan, units=units, loss_fn=_loss)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x, y = torch.randn(NUM_SAMPLES, WIDTH), torch.randn(NUM_SAMPLES, 1)

    def step() -> None:
        if isinstance(model, HetFSDP):
            samples = model.plan.sample_indices(rank)
            model.forward_backward(x[samples], loss_inputs=y[samples])
        else:
            _loss(model(x), y)[0].backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _loss(output: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return F.mse_loss(output, y, reduction="sum"), torch.tensor(len(y))


def _look(case: str, rank: int, step: int) -> Sample:
    gc.collect()
    num_objects = len(gc.get_objects())  # before memory: this takes 2 MiB, at the first look
    num_pages = int(Path("/proc/self/statm").read_text().split()[1])
    return Sample(
        case=case,
        rank=rank,
        step=step,
        resident_bytes=num_pages * os.sysconf("SC_PAGE_SIZE"),
        num_objects=num_objects,
        num_files=len(list(Path("/proc/self/fd").iterdir())),
    )
