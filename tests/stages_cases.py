"""Drawn steps of pipelines, each held against one process, or refused by name.

The model is a ``Patchwork`` in float64, whose units are cut into stages at any place.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from shardhet import DeviceSpec, HetFSDP, Plan, Stage
from tests.emulated.accelerator import Accelerator
from tests.parity import LOSS_BAR, Batch, Course, OnHost, Problem, Result, check_parity
from tests.patchwork import IGNORED, Case, draw_shape

MAX_RANKS = 5
READ = "comm/host_copy.py read: event"
OF_ROWS = "comm/on_host/lanes.py wait: event"  # the optimizer's, on the host
OF_KEPT_GRADIENTS = (  # to which a step adds for the first time
    "fsdp/sharding/placement.py make: copy_",
    "fsdp/sharding/placement.py make: aten._to_copy.default",
)


@dataclass(frozen=True, kw_only=True)
class StagesCase:
    """A drawn plan with stages, its model and its course."""

    case: Case
    num_samples: tuple[int, ...]  # of each step
    refused: str | None  # what a refusal says, where there has to be one

    @property
    def world_size(self) -> int:
        """How many ranks it needs."""
        return self.case.plan.world_size

    def traits(self) -> list[str]:
        """What of the bar it covers."""
        plan, course, shape = self.case.plan, self.case.course, self.case.shape
        stages = plan.stages or ()
        found = {
            f"{len(stages)} stages": True,
            f"{'+'.join(str(stage.num_ranks) for stage in stages)} ranks": True,
            "a ragged last round": any(n % plan.round_size for n in self.num_samples),
            "a step with fewer rounds": any(
                n <= (plan.num_rounds - 1) * plan.round_size for n in self.num_samples
            ),
            "a rank that computes nothing": any(not r.microbatch_sizes for r in plan.ranks),
            "a rank that stores nothing": any(not r.state_share for r in plan.ranks),
            "a round without tokens": any(course.blank_rounds),
            "several microbatches": any(r.num_microbatches > 1 for r in plan.ranks),
            "recomputation": any(r.recomputed_units for r in plan.ranks),
            "recomputation in some ranks": len({r.recomputed_units for r in plan.ranks}) > 1,
            "dropout": shape.dropout > 0,
            "tied parameters": shape.is_tied,
            "frozen parameters": bool(shape.frozen),
            "clipping": course.clip_at is not None,
            "several values are handed over": any(shape.mixes),
            "other ranks than positions": course.kinds is not None,
            "refused": self.refused is not None,
        }
        return [name for name, is_there in found.items() if is_there]


def draw(seed: int) -> StagesCase:
    """The case of that seed: the same in every process."""
    draw = random.Random(f"stages case {seed}")
    shape = draw_shape(draw)
    shape = replace(shape, head=draw.choice(["loss", "loss_fn"]))
    if draw.random() < 0.5:  # else most are refused
        shape = replace(shape, order=tuple(sorted(set(shape.order))))
    if draw.random() < 0.6:
        shape = replace(shape, mixes=tuple(False for _ in shape.mixes))
    options: dict[str, Any] = {"seed": draw.randrange(100)}
    called = ["embedding", *dict.fromkeys(f"blocks.{i}" for i in shape.order)]
    called += ["side"] * shape.has_side + ["head"]
    options["units"] = (*called, *(["idle"] if shape.has_idle and draw.random() < 0.5 else []))
    case = Case(seed=seed, shape=shape, plan=_NO_PLAN, course=Course(rank_batch_sizes=()),
                options=options)  # fmt: skip
    num_stages = draw.choice([1, 2, 2, 2, 3, 3])
    borders = [0, *sorted(draw.sample(range(1, len(called)), num_stages - 1)), len(called)]
    groups = [called[a:b] for a, b in pairwise(borders)]
    refused = _refusal(case, groups)
    if "idle" in options["units"]:
        draw.choice(groups).append("idle")
    plan, kinds = _draw_plan(draw, groups, has_dropout=shape.dropout > 0)
    last = plan.global_batch_size
    num_samples = (last, last, draw.randint(1, last))
    blank = tuple(
        tuple(r for r in range(plan.num_rounds) if draw.random() < 0.2) for _ in num_samples
    )
    course = Course(
        rank_batch_sizes=(),
        optimizer=draw.choice(["sgd", "adamw"]),
        clip_at=draw.choice([None, 0.3, 2.0]),
        kinds=kinds,
        has_dropout=shape.dropout > 0,
        steps_between_zero_grad=draw.choice([1, 1, 1, 3]),
        blank_rounds=blank,
        blank_target=IGNORED,
    )
    case = replace(case, plan=plan, course=course)
    return StagesCase(case=case, num_samples=num_samples, refused=refused)


_NO_PLAN = Plan.by_hand(microbatch_sizes=[1])


def _refusal(case: Case, groups: Sequence[Sequence[str]]) -> str | None:
    """What the plan must be refused with, if stages cannot have these units."""
    shape = case.shape
    stage_by_fqn = {fqn: i for i, group in enumerate(groups) for fqn in group}
    stages = [stage_by_fqn[f"blocks.{i}"] for i in shape.order]
    if stages != sorted(stages):
        return "is called after unit"
    mixed = [stage_by_fqn[f"blocks.{i}"] for i in shape.order if shape.mixes[i]]
    if shape.head == "loss" and mixed and min(mixed) < len(groups) - 1:
        return "without a row for each sample"  # energies
    return None


def _draw_plan(
    draw: random.Random, groups: Sequence[Sequence[str]], *, has_dropout: bool
) -> tuple[Plan, tuple[str, ...] | None]:
    numbers = [1] * len(groups)
    for _ in range(draw.randint(0, MAX_RANKS - len(groups))):
        numbers[draw.randrange(len(groups))] += 1
    numbers = [min(n, 3) for n in numbers]
    # Dropout draws for each microbatch, so the reference needs the same ones in all stages.
    grain = draw.choice([1, 2]) if has_dropout else 1
    together = draw.randint(1, 6)
    batches, sizes, shares = [], [], []
    for number in numbers:
        cuts = sorted(draw.randint(0, together) for _ in range(number - 1))
        counts = [b - a for a, b in zip([0, *cuts], [*cuts, together], strict=True)]
        batches += [count * grain for count in counts]
        sizes += [
            count and (grain if has_dropout else draw.randint(1, count)) for count in counts
        ]
        weights = [draw.choice([0.0, 1.0, 1.0, 0.01, draw.random()]) for _ in counts]
        weights = weights if any(weights) else [1.0 for _ in weights]
        shares += [weight / sum(weights) for weight in weights]
    patterns = ("blocks.*", "blocks.[0-1]", "*.0", "embedding", "head")
    number = sum(numbers)
    kinds, devices = None, None
    if number > 1 and draw.random() < 0.4:
        kinds = tuple(f"kind {i}" for i in range(number))
        devices = [DeviceSpec(kind=k) for k in draw.sample(kinds, number)]
    gathers, rounds = draw.randrange(3), draw.choice([1, 2, 3, 3, 4, 5])
    in_flight = [draw.choice([None, None, 1, 2, 3]) for _ in numbers]
    given = [len(numbers) - i if n is None else n for i, n in enumerate(in_flight)]
    if given != sorted(given, reverse=True):
        in_flight = [None for _ in numbers]
    plan = Plan.by_hand(
        microbatch_sizes=sizes,
        rank_batch_sizes=batches,
        state_shares=shares,
        recompute=[draw.choice([False, True, draw.sample(patterns, 2)]) for _ in batches],
        devices=devices,
        num_rounds=rounds,
        reshard_after_forward=gathers == 0,
        reshard_after_backward=gathers < 2,
        reduce_each_round=draw.random() < 0.6,
        stages=[
            Stage(units=tuple(group), num_ranks=n, in_flight=k)
            for group, n, k in zip(groups, numbers, in_flight, strict=True)
        ],
    )
    ragged = draw.choice([None, draw.randint(1, plan.round_size)])
    return replace(plan, last_round_size=ragged), kinds


def check(rank: int, case: StagesCase, on_accelerators: bool = False) -> Result | str:
    """Run the case twice on this rank; raises ``AssertionError`` at the first difference.

    Returns what a refusal says, if it is refused.
    """
    torch.manual_seed(0)
    make = Accelerator if on_accelerators else OnHost
    try:
        result = _train(rank, case, make())
    except ValueError as error:
        return str(error)
    again = _train(rank, case, make())
    assert len(result.bits) == len(again.bits), "not repeated"
    assert all(map(torch.equal, result.bits, again.bits)), "not repeated bit by bit"
    return Result(result.rows, result.shapes, bits=[])


def _train(rank: int, drawn: StagesCase, place: Accelerator | OnHost) -> Result:
    case = drawn.case
    problem = replace(case.problem, options={**case.problem.options, "device": place.device})

    def given(batch: Batch, mine: list[int]) -> list[Tensor]:
        return [batch[name][mine].to(place.device) for name in ("tokens", "targets")]

    def call(how: Any, tokens: Tensor, targets: Tensor) -> Any:
        if case.shape.head == "loss":
            return how(tokens, targets)
        return how(tokens, loss_inputs=targets)

    def take(
        model: HetFSDP, _: Any, plan: Plan, batch: Batch, course: Course, step: int
    ) -> float | None:
        mine = plan.sample_indices(model.position, drawn.num_samples[step])
        own = given(batch, mine)
        before, num_probes = len(place.syncs), len(model._runtime.known._findings)
        mean: float | None = call(model.forward_backward, *own)
        if len(model._runtime.known._findings) == num_probes:
            found = list(place.syncs[before:])
            if plan.ranks[model.position].optimizer_on_host:  # it reads the gradients
                is_second = step == 1 < course.steps_between_zero_grad
                allowed = (OF_ROWS, *(OF_KEPT_GRADIENTS if is_second else ()))
                found = [each for each in found if each not in allowed]
            assert found in ([], [READ]), found
        return mean

    def evaluate(
        model: HetFSDP, reference: Any, problem: Problem, batch: Batch
    ) -> list[Tensor]:
        """The last stage has the loss of its samples, other ranks that of none."""
        mine = case.plan.sample_indices(model.position, len(batch["tokens"]))
        with torch.no_grad():
            expected, number = problem.loss(reference.eval(), batch)
        model.eval()
        with torch.no_grad(), place.installed():
            loss_sum, count = (each.cpu() for each in call(model, *given(batch, mine)))
        reference.train()
        model.train()
        if model.position not in model.plan.groups[-1]:
            assert [float(loss_sum), int(count)] == [0, 0]
        rows = model.exchange([float(loss_sum), float(count)])
        loss, tokens_of_all = map(sum, zip(*rows, strict=True))
        assert tokens_of_all == number
        assert abs(loss - expected) <= LOSS_BAR * abs(expected), f"loss {loss} for {expected}"
        return [loss_sum]

    sizes = tuple(_sizes(case.plan, number) for number in drawn.num_samples)
    course = replace(case.course, rank_batch_sizes=sizes)
    return check_parity(
        rank, problem, case.plan, course, place=place, take=take, after=evaluate
    )


def _sizes(plan: Plan, num_samples: int) -> tuple[int, ...]:
    """How many samples each rank of the first stage has, round after round."""
    positions = plan.groups[0]
    return tuple(
        len(plan.round_samples(i, r, num_samples))
        for r in range(plan.num_rounds)
        for i in positions
    )
