"""One rank that keeps a state of a gigabyte, and one that gets it back."""

import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardhet import HetFSDP, Plan
from shardhet.checkpoint import Checkpoints, Replicas
from shardhet.checkpoint.format.reading import Reader

WIDTH = 2048
STORE_BYTES_PER_S = 125e6  # of the store, for all ranks together
PLANS = {
    4: Plan.by_hand(
        microbatch_sizes=[4, 3, 2, 1],
        rank_batch_sizes=[4, 3, 2, 1],
        state_shares=[0.1, 0.2, 0.3, 0.4],
    ),
    3: Plan.by_hand(
        microbatch_sizes=[4, 3, 3], rank_batch_sizes=[4, 3, 3], state_shares=[0.2, 0.3, 0.5]
    ),
}


class Layer(nn.Module):
    """A unit."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x).tanh()


class Net(nn.Module):
    """``num_layers`` units, 16.8 MB of parameters each in float32."""

    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(num_layers))

    def forward(self, x: Tensor) -> tuple[Tensor, int]:
        for layer in self.layers:
            x = layer(x)
        return x.square().sum(), x.shape[0]


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds of one step, and that it waited for each way to keep the state."""

    step_s: float
    replica_s: float
    replica_complete_s: float  # until the copies are there
    checkpoint_s: float
    async_s: float
    async_complete_s: float


@dataclass(frozen=True, slots=True)
class Restored:
    """How long it took to get the state back, and what came back."""

    seconds: float
    digest: str  # of this rank's rows
    came_from: str


class Run:
    """A model with its optimizer, after one step."""

    def __init__(self, num_layers: int, world_size: int) -> None:
        torch.manual_seed(0)
        plan = PLANS[world_size]
        self.model = HetFSDP(Net(num_layers), plan, units=[Layer])
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self._num_samples = plan.ranks[self.model.position].rank_batch_size

    def step(self) -> None:
        """One optimizer step."""
        self.model.backward(*self.model(torch.randn(self._num_samples, WIDTH)))
        self.optimizer.step()
        self.optimizer.zero_grad()

    def digest(self) -> str:
        """Of this rank's rows of parameters and states."""
        found = hashlib.blake2b(digest_size=16)
        for box in self.model.sharded_state_dict().values():
            found.update(box.tensor.contiguous().numpy().data)
        for param in self.model.parameters():
            for value in self.optimizer.state[param].values():
                found.update(value.contiguous().numpy().data)
        return found.hexdigest()


def timed(work: Callable[[], Any]) -> float:
    """Seconds until all ranks have done it."""
    dist.barrier()
    started_s = time.perf_counter()
    work()
    dist.barrier()
    return time.perf_counter() - started_s


def keep(rank: int, num_layers: int, num_rounds: int, memory: Path, disk: Path) -> list[Cost]:
    """What keeping costs; the state of the last step stays, in replicas and on disk."""
    run = Run(num_layers, 4)
    model, optimizer = run.model, run.optimizer
    replicas = Replicas(memory / f"node{rank}")
    checkpoints = Checkpoints(disk, keep_last=1)
    found = []
    for i in range(num_rounds + 1):
        step_s = timed(run.step)
        times = [step_s]
        times.append(timed(lambda: replicas.save(model, optimizer)))
        times.append(times[-1] + timed(lambda: replicas.wait(model)))
        times.append(timed(lambda: checkpoints.save(model, optimizer)))
        times.append(timed(lambda: checkpoints.save_async(model, optimizer)))
        times.append(times[-1] + timed(lambda: checkpoints.wait(model)))
        if i:  # the first one makes states, folders and channels
            found.append(Cost(*(round(each, 4) for each in times)))
    return found


def restore(
    rank: int, num_layers: int, nodes: list[int], way: str, memory: Path, disk: Path, clock: Any
) -> Restored:
    """The state from "replicas", or the "checkpoint"."""
    run = Run(num_layers, len(nodes))
    replicas = Replicas(memory / f"node{nodes[rank]}")
    checkpoints = Checkpoints(disk)
    _slow_down_the_store(clock)
    said = ""

    def load() -> None:
        nonlocal said
        if way == "checkpoint":
            assert checkpoints.load_latest(run.model, run.optimizer) is not None
            return
        found = replicas.load_latest(run.model, run.optimizer)
        assert found is not None
        said = found.came_from or ""

    seconds = timed(load)
    return Restored(seconds, run.digest(), said)


def _slow_down_the_store(clock: Any) -> None:
    """Let every byte that is read from the checkpoint take its time, once.

    ``clock`` is when the store has given what was asked for so far, shared by all ranks.
    Comparing digests reads files a second time, which costs nothing here.
    """
    load = Reader._load

    def wait(num_bytes: int) -> None:
        with clock.get_lock():
            until_s = max(time.monotonic(), clock.value) + num_bytes / STORE_BYTES_PER_S
            clock.value = until_s
        time.sleep(max(0.0, until_s - time.monotonic()))

    def load_slowly(self: Reader, place: Any, name: str) -> Any:
        saved = self._saved
        if place not in saved.content_by_place and "node" not in saved.folder.parent.name:
            wait(place.bytes.numel)
        return load(self, place, name)

    Reader._load = load_slowly  # type: ignore[method-assign]
