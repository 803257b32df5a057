"""One rank of one version: takes a command a line, answers with a line.

Started by run.py with the version's tree first on PYTHONPATH.
"""

import argparse
import json
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from cases import CASES, Case  # beside this file: the version's tree may lack it

from experiments.decoders import make_decoder, random_batches
from shardhet import HetFSDP

WAITS = timedelta(minutes=30)  # while the other version has its turn, too


class Trainer:
    """A case being trained."""

    def __init__(self, case: Case, rank: int) -> None:
        self._case = case
        torch.manual_seed(0)
        module = make_decoder(case.config)
        dist.barrier()
        started_at_s = time.perf_counter()
        self._model = HetFSDP(module, case.plan)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-3, fused=True)
        size = case.plan.ranks[self._model.position].rank_batch_size
        self._batches = random_batches(case.config, size, seed=rank, num_batches=4)
        self.loss = self._step(0)
        self.start_s = time.perf_counter() - started_at_s

    def turn(self) -> list[float]:
        """Seconds of each step but the first."""
        seconds = []
        dist.barrier()
        for step in range(self._case.steps_per_turn + 1):
            started_at_s = time.perf_counter()
            self._step(step)
            seconds.append(time.perf_counter() - started_at_s)
        return seconds[1:]

    def _step(self, step: int) -> float:
        mean = self._model.backward(*self._model(*self._batches[step % len(self._batches)]))
        self._optimizer.step()
        self._optimizer.zero_grad()
        assert mean is not None
        return mean


def main() -> None:
    """Until standard input ends."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--case", choices=CASES, required=True)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--store", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    case = CASES[options.case]
    world_size = case.plan.world_size
    store = dist.FileStore(str(options.store), world_size)
    dist.init_process_group(
        "gloo", store=store, rank=options.rank, world_size=world_size, timeout=WAITS
    )
    trainer: Trainer | None = None
    for line in sys.stdin:
        command = line.strip()
        answer: dict[str, Any]
        if command == "start":
            trainer = Trainer(case, options.rank)
            answer = {"start_s": trainer.start_s, "loss": trainer.loss}
        else:
            assert trainer is not None
            answer = {"steps_s": trainer.turn()}
        print(json.dumps(answer), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
