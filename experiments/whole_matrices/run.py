"""Muon on unlike devices: owners by speed, owners dealt evenly, or each matrix gathered?

python -m experiments.whole_matrices.run            some minutes
python -m experiments.whole_matrices.run --quick    few steps, and keeps nothing
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn, optim
from torch.optim._muon import _adjust_lr, _zeropower_via_newtonschulz

from experiments.common.launch import run_ranks
from experiments.common.results import Bar, Page, Spread, parser_of
from experiments.common.systems import (
    Rounds,
    System,
    TimedStep,
    check_same_losses,
    first_losses,
    take_turns,
)
from experiments.decoders import decoder_config, make_decoder, random_batches
from shardhet import HetFSDP, Plan
from shardhet.fsdp.params.optimizer_check import rows_of
from shardhet.models.decoder import DecoderConfig
from shardhet.planner.owners import OwnersProblem, assigned
from shardhet.pricing.matrices import Matrices, operations
from shardhet.records.layout import Owned
from shardhet.records.plan import EVERY_BLOCK, is_matched
from shardhet.training.emulation import EmulatedDevice, Stretch

HERE = Path(__file__).parent
SPEEDS = (0.6, 0.4, 0.15, 0.15)  # of a core
BATCHES = (12, 8, 3, 3)
CONFIG = decoder_config(width=256, num_layers=6, seq_len=48)
RUN = Rounds(num_rounds=3, num_steps=2)
QUICK = Rounds(num_rounds=1, num_steps=2)
BY_SPEED, EVENLY, GATHERED = "owners by speed", "owners dealt evenly", "gathered everywhere"
LEARNING_RATE, MOMENTUM, DECAY = 0.02, 0.95, 0.1
COEFFICIENTS, ITERATIONS, EPS = (3.4445, -4.7750, 2.0315), 5, 1e-7  # as torch's


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One step."""

    system: str
    round: int
    step: int
    step_s: float  # on the slowest rank
    optimizer_s: float  # of Muon, on the slowest rank: its processor's seconds over its speed


def is_matrix(fqn: str, param: Tensor) -> bool:
    """Whether Muon takes it."""
    return param.ndim == 2 and is_matched(fqn, EVERY_BLOCK)


def plan_of(name: str) -> Plan:
    """The same batches under every name, and another way to store the state."""
    even = [1 / len(SPEEDS)] * len(SPEEDS)
    if name == BY_SPEED:
        return plan_of_speeds(CONFIG, SPEEDS, BATCHES)
    return Plan.by_hand(
        microbatch_sizes=BATCHES, state_shares=even, whole_matrices=name == EVENLY
    )


def plan_of_speeds(
    config: DecoderConfig, speeds: Sequence[float], batches: Sequence[int]
) -> Plan:
    """With owners by speed; memory does not bind."""
    with torch.device("meta"):
        model = make_decoder(config, torch.device("meta"))
    named = list(model.named_parameters())
    shapes = Matrices(tuple(p.shape) for fqn, p in named if is_matrix(fqn, p))
    numels = np.array([float(prod(shape)) for shape in shapes])
    work = np.array([operations(shape) for shape in shapes])
    numbers = np.array([float(number) for number in shapes.values()])
    whole = float(sum(p.numel() for _, p in named))
    found = assigned(
        OwnersProblem(
            numels=numels,
            numbers=numbers,
            seconds=work[:, None] / np.array(speeds),
            room=np.full(len(speeds), whole),
            seconds_per_numel=np.zeros(len(speeds)),
            cut_numel=whole - float(numels @ numbers),
        )
    )
    assert found is not None
    stored = numels @ found.numbers + (whole - float(numels @ numbers)) / len(speeds)
    shares = (stored / stored.sum()).tolist()
    plan = Plan.by_hand(microbatch_sizes=batches, state_shares=shares, whole_matrices=True)
    ranks = [
        replace(
            rank,
            owned=tuple(
                Owned(shape=shape, number=int(n))
                for shape, n in zip(shapes, found.numbers[:, i], strict=True)
            ),
        )
        for i, rank in enumerate(plan.ranks)
    ]
    return replace(plan, ranks=tuple(ranks))


class GatheringMuon:
    """Muon on rows: each update is gathered, orthogonalised by every rank, and cut again."""

    def __init__(self, params: Sequence[nn.Parameter], stretch: Stretch) -> None:
        self._params, self._stretch = list(params), stretch
        self._means = [torch.zeros_like(p.detach().as_subclass(Tensor)) for p in params]

    @torch.no_grad()
    def step(self) -> None:
        """As torch's, of whole matrices."""
        for param, mean in zip(self._params, self._means, strict=True):
            rows, of = param.detach().as_subclass(Tensor), rows_of(param)
            assert param.grad is not None
            grad = param.grad.as_subclass(Tensor)
            mean.lerp_(grad, 1 - MOMENTUM)
            whole = of.gather(grad.lerp(mean, MOMENTUM))
            with self._stretch.around():
                update = _zeropower_via_newtonschulz(whole, COEFFICIENTS, ITERATIONS, EPS)
            rows.mul_(1 - LEARNING_RATE * DECAY)
            rows.add_(
                update[of.here.start : of.here.stop],
                alpha=-_adjust_lr(LEARNING_RATE, None, whole.shape),
            )

    def zero_grad(self) -> None:
        """Drop the gradients."""
        for param in self._params:
            param.grad = None


def system_of(name: str, speed: float, taken: list[float]) -> System:
    """The model under its plan; ``taken`` gets the seconds of Muon in each step."""
    model = HetFSDP(make_decoder(CONFIG), plan_of(name))
    named = dict(model.named_parameters())
    matrices = [param for fqn, param in named.items() if is_matrix(fqn, param)]
    rest = [param for fqn, param in named.items() if not is_matrix(fqn, param)]
    adamw = optim.AdamW(rest, lr=1e-3)
    stretch = EmulatedDevice(speed=speed).slow_down(model, adamw)
    assert stretch is not None
    muon: Any = GatheringMuon(matrices, stretch)
    if name != GATHERED:
        muon = optim.Muon(matrices, lr=LEARNING_RATE, momentum=MOMENTUM, weight_decay=DECAY)
        muon.register_step_pre_hook(stretch.begin_optimizer_step)
        muon.register_step_post_hook(stretch.end_optimizer_step)

    def step(*batch: Tensor) -> float | None:
        mean_loss = model.forward_backward(*batch)
        start_s = time.thread_time()
        muon.step()
        taken.append((time.thread_time() - start_s) / speed)
        adamw.step()
        for each in (muon, adamw):
            each.zero_grad()
        return mean_loss

    return System(name, step)


def train(rank: int, rounds: Rounds) -> list[Sample]:
    """Steps of all three in turn; the same list on every rank."""
    own = plan_of(EVENLY).sample_indices(rank)
    [batch] = random_batches(CONFIG, sum(BATCHES), seed=1)
    mine = [part[own] for part in batch]
    taken: dict[str, list[float]] = {name: [] for name in (BY_SPEED, EVENLY, GATHERED)}
    systems = {name: system_of(name, SPEEDS[rank], each) for name, each in taken.items()}
    losses = {name: first_losses(each, [mine], 3) for name, each in systems.items()}
    check_same_losses({name: each[:2] for name, each in losses.items()})
    for each in taken.values():
        each.clear()
    steps = {name: lambda _step, name=name: systems[name].step(*mine) for name in systems}
    timed = take_turns(steps, rounds, in_line=True)
    everyones: list[Any] = [None] * len(SPEEDS)
    dist.all_gather_object(everyones, taken)
    return [
        _sample(each, [of[each.system] for of in everyones], rounds.num_steps) for each in timed
    ]


def _sample(step: TimedStep, taken: Sequence[Sequence[float]], num_steps: int) -> Sample:
    place = (step.round + 1) * (num_steps + 1) + step.step  # after the round that warms up
    return Sample(
        system=step.system,
        round=step.round,
        step=step.step,
        step_s=step.slowest_rank_s,
        optimizer_s=max(of_rank[place] for of_rank in taken),
    )


def main() -> None:
    """Measure, show, and keep."""
    options = parser_of(__doc__).parse_args()
    page = Page(HERE, is_kept=not options.quick)
    rounds = QUICK if options.quick else RUN
    samples = run_ranks(train, len(SPEEDS), rounds)[0]
    medians = {
        key: {
            name: median(getattr(each, key) for each in samples if each.system == name)
            for name in (BY_SPEED, EVENLY, GATHERED)
        }
        for key in ("step_s", "optimizer_s")
    }
    owned = {BY_SPEED: plan_of(BY_SPEED)}
    counts = [sum(each.number for each in rank.owned) for rank in owned[BY_SPEED].ranks]
    page.tell(f"matrices by speed, of devices with {SPEEDS} of a core: {counts}")
    page.table(
        "a step (median, 10th and 90th percentile)",
        ("matrices", "step (s)", "Muon on the slowest device (s)", "of the step"),
        [
            (
                name,
                Spread.of([e.step_s for e in samples if e.system == name]).cell(3),
                Spread.of([e.optimizer_s for e in samples if e.system == name]).cell(3),
                f"{medians['optimizer_s'][name] / medians['step_s'][name]:.2f}",
            )
            for name in (BY_SPEED, EVENLY, GATHERED)
        ],
    )
    muon_s, step_s = medians["optimizer_s"], medians["step_s"]
    page.bars(
        [
            Bar(claim="Muon, of that with owners dealt evenly", at_most=0.6,
                measured=muon_s[BY_SPEED] / muon_s[EVENLY]),
            Bar(claim="Muon, of that with each matrix gathered everywhere", at_most=0.5,
                measured=muon_s[BY_SPEED] / muon_s[GATHERED]),
            Bar(claim="the step, times as fast as with each matrix gathered", at_least=1.1,
                measured=step_s[GATHERED] / step_s[BY_SPEED]),
            Bar(claim="the step, times as fast as with owners dealt evenly",
                measured=step_s[EVENLY] / step_s[BY_SPEED]),
        ]
    )  # fmt: skip
    page.keep({"results.csv": samples})


if __name__ == "__main__":
    main()
