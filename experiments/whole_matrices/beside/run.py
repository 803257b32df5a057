"""Muon beside the last reduction, or after it, over a slow link.

python -m experiments.whole_matrices.beside.run          some minutes, as an administrator
python -m experiments.whole_matrices.beside.run --quick  few steps, and keeps nothing
"""

import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch.distributed as dist
from torch import Tensor, optim

from experiments.common.cable import run_over_cable
from experiments.common.results import Bar, Page, Spread, parser_of
from experiments.common.systems import (
    Rounds,
    System,
    check_same_losses,
    first_losses,
    take_turns,
)
from experiments.decoders import decoder_config, make_decoder, random_batches
from experiments.whole_matrices.run import is_matrix, plan_of_speeds
from shardhet import HetFSDP
from shardhet.training.emulation import EmulatedDevice

HERE = Path(__file__).parent
CONFIG = decoder_config(width=256, num_layers=2, seq_len=48, vocab_size=2048)
SPEEDS = (0.2, 0.13, 0.05, 0.05)  # of a core
BATCHES = (4, 3, 1, 1)
NUMBERS = (2, 2)  # of ranks at each end of the cable
MBIT_PER_S = 50.0
QUEUES = ("20ms", "400ms")  # before the cable
RUN = Rounds(num_rounds=3, num_steps=2)
QUICK = Rounds(num_rounds=2, num_steps=2)
BESIDE, AFTER = "beside the last reduction", "after it"
LEARNING_RATE, MOMENTUM, DECAY = 0.02, 0.95, 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One step."""

    queue: str
    system: str
    round: int
    step: int
    step_s: float  # on the slowest rank
    muon_s: float  # by the clock, on the rank where it takes longest
    wait_s: float  # for gradients once Muon is done, or before it; the longest of a rank


def system_of(name: str, speed: float, taken: list[tuple[float, float]]) -> System:
    """The model; ``taken`` gets the seconds of Muon and of the wait in each step."""
    model = HetFSDP(make_decoder(CONFIG), plan_of_speeds(CONFIG, SPEEDS, BATCHES))
    named = dict(model.named_parameters())
    rest = [param for fqn, param in named.items() if not is_matrix(fqn, param)]
    muon = optim.Muon(
        [param for fqn, param in named.items() if is_matrix(fqn, param)],
        lr=LEARNING_RATE,
        momentum=MOMENTUM,
        weight_decay=DECAY,
    )
    adamw = optim.AdamW(rest, lr=1e-3)
    EmulatedDevice(speed=speed).slow_down(model, muon, adamw)

    def read() -> float:
        """Seconds until all gradients are there."""
        start_s = time.perf_counter()
        assert all(param.grad is not None for param in rest)
        return time.perf_counter() - start_s

    def step(*batch: Tensor) -> float | None:
        mean_loss = model.forward_backward(*batch)
        waited_s = read() if name == AFTER else 0.0
        start_s = time.perf_counter()
        muon.step()
        muon_s = time.perf_counter() - start_s
        taken.append((muon_s, waited_s + read()))
        for each in (adamw, muon):
            if each is adamw:
                each.step()
            each.zero_grad()
        return mean_loss

    return System(name, step)


def train(rank: int, rounds: Rounds, queue: str) -> list[Sample]:
    """Steps of both in turn; the same list on every rank."""
    own = plan_of_speeds(CONFIG, SPEEDS, BATCHES).sample_indices(rank)
    [batch] = random_batches(CONFIG, sum(BATCHES), seed=1)
    mine = [part[own] for part in batch]
    taken: dict[str, list[tuple[float, float]]] = {BESIDE: [], AFTER: []}
    systems = {name: system_of(name, SPEEDS[rank], each) for name, each in taken.items()}
    check_same_losses({name: first_losses(each, [mine], 2) for name, each in systems.items()})
    for each in taken.values():
        each.clear()
    steps = {name: partial(_step, system, mine) for name, system in systems.items()}
    timed = take_turns(steps, rounds, in_line=True)
    everyones: list[Any] = [None] * len(SPEEDS)
    dist.all_gather_object(everyones, taken)
    samples = []
    for each in timed:
        place = (each.round + 1) * (rounds.num_steps + 1) + each.step  # after the warm-up
        of_ranks = [of[each.system][place] for of in everyones]
        samples.append(
            Sample(
                queue=queue,
                system=each.system,
                round=each.round,
                step=each.step,
                step_s=each.slowest_rank_s,
                muon_s=max(muon_s for muon_s, _ in of_ranks),
                wait_s=max(wait_s for _, wait_s in of_ranks),
            )
        )
    return samples


def _step(system: System, batch: list[Tensor], step: int) -> Any:
    return system.step(*batch)


def main() -> None:
    """Measure, show, and keep."""
    options = parser_of(__doc__).parse_args()
    page = Page(HERE, is_kept=not options.quick)
    rounds = QUICK if options.quick else RUN
    samples: list[Sample] = []
    for queue in QUEUES[:1] if options.quick else QUEUES:
        samples += run_over_cable(train, NUMBERS, MBIT_PER_S, rounds, queue, latency=queue)[0]
    rows, bars = [], []
    for queue in dict.fromkeys(each.queue for each in samples):
        of = {
            name: [e for e in samples if (e.system, e.queue) == (name, queue)]
            for name in (AFTER, BESIDE)
        }
        steps = {name: [e.step_s for e in each] for name, each in of.items()}
        rows += [
            (
                queue,
                name,
                Spread.of(steps[name]).cell(3),
                Spread.of([e.muon_s for e in each]).cell(3),
                Spread.of([e.wait_s for e in each]).cell(3),
            )
            for name, each in of.items()
        ]
        bars.append(
            Bar(claim=f"the step, times as fast beside the reduction, a queue of {queue}",
                measured=median(steps[AFTER]) / median(steps[BESIDE]))
        )  # fmt: skip
    page.table(
        "a step (median, 10th and 90th percentile)",
        ("queue", "Muon", "step (s)", "Muon on the slowest (s)", "longest wait (s)"),
        rows,
    )
    page.bars(bars)
    page.keep({"results.csv": samples})


if __name__ == "__main__":
    main()
