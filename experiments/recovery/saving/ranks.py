"""One rank that saves while it trains, and one that saves a large state."""

import time
from pathlib import Path

import torch.distributed as dist

from experiments.decoders import decoder_config, make_decoder, random_batches
from experiments.recovery.replicas.ranks import Run, timed
from shardhet import DeviceSpec, HetFSDP, Plan
from shardhet.checkpoint import Checkpoints, Replicas
from shardhet.training.emulation import EmulatedDevice
from shardhet.training.optim import OptimizerSpec

CONFIG = decoder_config(width=64, num_layers=4, seq_len=32)
SPEEDS = (0.3, 0.2, 0.15, 0.1)  # of a core: half of two cores is left, as on hosts of GPUs
PLAN = Plan.by_hand(
    microbatch_sizes=[6, 4, 3, 2],
    rank_batch_sizes=[12, 8, 6, 4],
    state_shares=[0.1, 0.2, 0.3, 0.4],
    devices=[DeviceSpec(kind=f"emulated {speed:g}x") for speed in SPEEDS],
)
EVERY = 10  # steps between two saves, and steps of a block
WAYS = ("nothing", "checkpoint", "checkpoint in the background", "replica")


def train(rank: int, num_rounds: int, memory: Path, disk: Path) -> dict[str, list[float]]:
    """Seconds of blocks of ``EVERY`` steps that end with a save of each kind, by turns."""
    device = DeviceSpec(kind=f"emulated {SPEEDS[rank]:g}x")
    model = HetFSDP(make_decoder(CONFIG), PLAN, device_spec=device)
    optimizer = OptimizerSpec(learning_rate=1e-3).build(list(model.parameters()))
    EmulatedDevice(speed=SPEEDS[rank]).slow_down(model, optimizer)
    first = model.plan.first_sample(model.position)
    stop = first + model.plan.ranks[model.position].rank_batch_size
    [batch] = random_batches(CONFIG, model.plan.global_batch_size, seed=0)[:1]
    tokens, targets = (each[first:stop] for each in batch)
    checkpoints = Checkpoints(disk / "checkpoints", keep_last=1)
    replicas = Replicas(memory / f"node{rank}")
    saves = {
        "checkpoint": lambda: checkpoints.save(model, optimizer),
        "checkpoint in the background": lambda: checkpoints.save_async(model, optimizer),
        "replica": lambda: replicas.save(model, optimizer),
    }
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    for i in range(num_rounds + 1):
        for way in WAYS:
            dist.barrier()
            started_s = time.perf_counter()
            # What was begun is complete before the block after the next: its cost is here.
            for _ in range(2):
                for _ in range(EVERY):
                    model.backward(*model(tokens, targets))
                    optimizer.step()
                    optimizer.zero_grad()
                saves.get(way, lambda: None)()
            checkpoints.wait(model)
            replicas.wait(model)
            dist.barrier()
            if i:  # the first round makes folders, states and channels
                seconds[way].append(time.perf_counter() - started_s)
    return seconds


def save_large(rank: int, num_layers: int, num_rounds: int, disk: Path) -> list[float]:
    """Seconds of saves of a state of ``num_layers`` times 50 MB."""
    run = Run(num_layers, 4)
    run.step()
    checkpoints = Checkpoints(disk / "large", keep_last=1)
    return [
        timed(lambda: checkpoints.save(run.model, run.optimizer)) for _ in range(num_rounds)
    ]
