"""One rank of a small training run, into which a fault is put."""

import os
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from experiments.common.launch import join
from shardhet import HetFSDP, Plan, may_take_long, watch_ranks
from shardhet.checkpoint import save
from shardhet.comm.liveness.diagnosis import LONG_FACTOR
from tests.misdeeds import commit
from tests.test_bad_input import Net

WIDTH, NUM_LAYERS = 64, 3
DEEDS = ("stop", "loop", "sleep", "kill", "raise", "slow")
PLACES = ("loader", "forward", "backward", "optimizer", "saving", "evaluation")
TIMEOUT_S = 3.0
STEP_S = 0.25  # a step waits for as long, so that signs of life tell where a rank is
NUM_STEPS = 6
SLOW_FACTOR = 5.0  # how much longer the slow step takes


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What one rank does, and when."""

    seed: int
    deed: str
    place: str
    world_size: int
    rank: int
    step: int
    transport: str

    @classmethod
    def of(cls, seed: int) -> "Fault":
        """The fault of a seed; every deed is equally frequent."""
        rng = random.Random(f"recovery {seed}")
        world_size = rng.randint(2, 4)
        return cls(
            seed=seed,
            deed=DEEDS[seed % len(DEEDS)],
            place=rng.choice(PLACES),
            world_size=world_size,
            rank=rng.randrange(world_size),
            step=rng.randint(2, 4),
            transport=rng.choice(("auto", "gloo")),
        )

    @property
    def limit_s(self) -> float:
        """How long the others may wait: in a declared phase only a stopped rank is suspect."""
        is_declared = self.place == "saving" and self.deed in ("loop", "sleep")
        return TIMEOUT_S * (LONG_FACTOR if is_declared else 1.0)


def trapped(spring: Callable[[str], None]) -> Net:
    """Layers in a row, each with a trap in forward and in backward."""
    net = Net(NUM_LAYERS, WIDTH)
    for i in range(NUM_LAYERS):
        net.layer(i).in_forward = partial(spring, "forward")
        net.layer(i).in_backward = partial(spring, "backward")
    return net


def train(sender: Connection, rank: int, port: int, fault: Fault, folder: str) -> None:
    """Train as one of the ranks; sends how it ended and when."""
    os.environ["SHARDHET_TRANSPORT"] = fault.transport
    torch.set_num_threads(1)
    join(port, fault.world_size, rank)
    watch_ranks(hang_timeout_s=TIMEOUT_S, on_failure=lambda failure: None)
    outcome = "returned"
    try:
        take_steps(rank, fault, Path(folder))
    except Exception as error:
        outcome = str(error)
    sender.send((outcome, time.monotonic()))


def take_steps(rank: int, fault: Fault, folder: Path) -> None:
    """All steps, with the fault in one of them."""
    step, is_evaluating = 0, False

    def spring(place: str) -> None:
        if rank != fault.rank or step != fault.step or (folder / "deed").exists():
            return
        if place == fault.place or (is_evaluating and fault.place == "evaluation"):
            (folder / "deed").write_text(str(time.monotonic()))
            commit(fault.deed, slow_s=(SLOW_FACTOR - 1) * STEP_S)

    torch.manual_seed(0)
    model = HetFSDP(trapped(spring), Plan.even(fault.world_size, microbatch_size=2))
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.register_step_pre_hook(lambda *_: spring("optimizer"))
    x = torch.randn(2, WIDTH, dtype=torch.float64)
    for step in range(NUM_STEPS):
        time.sleep(STEP_S)
        spring("loader")
        model.backward(*model(x))
        optimizer.step()
        optimizer.zero_grad()
        is_evaluating = True
        with torch.no_grad():
            model.eval()(x)
            model.train()
        is_evaluating = False
        if step in (2, 3, 4):
            with may_take_long("saving"):
                spring("saving")
                save(model, optimizer, folder / f"step_{step}")
