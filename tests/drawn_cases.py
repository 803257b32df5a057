"""Cases of a seed: a drawn model of legal traits, a plan, and what happens in a run."""

import random
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from shardhet import DeviceSpec, HetFSDP, Plan
from shardhet.records.schedule import StepForm
from tests.fuzzing.model import IGNORED, FuzzModel, call_model, loss_of, weighted_loss
from tests.fuzzing.shapes import ModelShape, UnitShape
from tests.fuzzing.units import Block
from tests.parity import Batch, Course, Problem


def problem_of(shape: ModelShape, length: int, **options: Any) -> Problem:
    """The model of this shape in float64; samples have ``length`` tokens."""

    def make_batch(num_samples: int) -> Batch:
        size = (num_samples, length)
        targets = torch.randint(0, shape.num_words, size)
        targets[torch.rand(size) < 0.3] = IGNORED
        masked = torch.rand(num_samples) < 0.4  # whole samples: on some ranks all of them
        masked[torch.randint(0, num_samples, ())] = False
        targets[masked] = IGNORED
        targets[~masked, 0] = 0
        return {"tokens": torch.randint(0, shape.num_words, size), "targets": targets}

    def loss(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor | int]:
        if shape.head == "loss_fn" and isinstance(model, HetFSDP):
            return model(batch["tokens"], loss_inputs=(batch["targets"],))
        return loss_of(shape, call_model(shape, model, batch), batch)

    if shape.head == "loss_fn":
        options["loss_fn"] = weighted_loss
    return Problem(
        make_module=lambda: FuzzModel(shape).double(),
        make_batch=make_batch,
        loss=loss,
        options=options,
    )


# Cases made of a seed.


@dataclass(frozen=True, kw_only=True)
class Case:
    """One drawn problem with a plan and a course."""

    seed: int
    shape: ModelShape
    length: int  # tokens of a sample
    plan: Plan
    course: Course
    options: dict[str, Any]
    precision: str = "float64"
    refused: str | None = None  # what a refusal says, where there has to be one

    @property
    def problem(self) -> Problem:
        """The model and its data."""
        return problem_of(self.shape, self.length, **self.options)

    def without_dropout(self) -> "Case":
        """The case with a model that draws nothing."""
        units = tuple(replace(unit, dropout=0.0) for unit in self.shape.units)
        return replace(
            self,
            shape=replace(self.shape, units=units),
            course=replace(self.course, has_dropout=False),
        )

    def __str__(self) -> str:
        ranks = [
            f"{rank.microbatch_sizes} share {rank.state_share:.3f} "
            f"recomputes {rank.recomputed_units} on {rank.device}"
            for rank in self.plan.ranks
        ]
        return (
            f"seed {self.seed}, {self.precision}: {StepForm.of(self.plan)}, "
            f"{self.shape}, {self.length} tokens, {self.course}, {self.options}, ranks:\n"
            + "\n".join(ranks)
        )


def draw_case(seed: int, *, world_size: int) -> Case:
    """The case of that seed: the same in every process."""
    draw = random.Random(f"{seed}/{world_size}")
    plan, kinds = draw_plan(draw, world_size)
    shape = draw_shape(draw)
    full = tuple(rank.rank_batch_size for rank in plan.ranks)
    sizes = (full, full, _shorter(draw, full) if draw.random() < 0.4 else full)
    options: dict[str, Any] = {"seed": draw.randrange(100)}
    unit_choices: list[Any] = [
        None,
        None,
        (Block,),
        ("embedding", "blocks.0", "head"),
        ("blocks.1",),
        (nn.Embedding, nn.Linear),
    ]
    has_dropout = any(unit.dropout for unit in shape.units)
    if has_dropout:
        unit_choices = unit_choices[:3]  # the root runs no microbatches: no dropout there
    if shape.head == "loss_fn":
        unit_choices = unit_choices[:5]  # the last linear layer may be one never called
    units = draw.choice(unit_choices)
    if units is not None:
        if shape.head == "loss_fn":
            units = (*units, "head") if "head" not in units else units
        options["units"] = units
    course = Course(
        rank_batch_sizes=sizes,
        optimizer=draw.choice(["sgd", "adamw"]),
        clip_at=draw.choice([None, 0.3, 2.0]),
        kinds=kinds,
        has_dropout=has_dropout,
        calls_empty=draw.random() < 0.5,
        steps_between_zero_grad=draw.choice([1, 1, 1, 3]),
    )
    return Case(
        seed=seed,
        shape=shape,
        length=draw.randint(1, 5),
        plan=plan,
        course=course,
        options=options,
    )


def draw_rounds(seed: int, *, world_size: int) -> Case:
    """The case of that seed in several rounds, or with the flags of several rounds in one.

    Last rounds are ragged; some rounds have no tokens, and on some ranks no samples.
    """
    case = draw_case(seed, world_size=world_size)
    draw = random.Random(f"rounds {seed}/{world_size}")
    gathers = draw.randrange(3)
    round_size = case.plan.round_size
    plan = replace(
        case.plan,
        num_rounds=draw.choice([1, 2, 2, 3, 3, 4, 5]),
        reshard_after_forward=gathers == 0,
        reshard_after_backward=gathers < 2,
        reduce_each_round=draw.random() < 0.5,
        last_round_size=draw.choice([None, draw.randint(1, round_size)]),
    )
    positions, rounds = range(world_size), range(plan.num_rounds)
    dealt = tuple(len(plan.round_samples(i, r)) for r in rounds for i in positions)
    full = [rank.rank_batch_size for rank in plan.ranks]
    shorter = [n for r in rounds for n in _shorter(draw, tuple(full))]
    if plan.num_rounds > 1 and draw.random() < 0.3:  # a round without samples
        shorter[world_size:][:world_size] = [0] * world_size
    sizes = (dealt, dealt, tuple(shorter))
    blank = [
        tuple(r for r in rounds if draw.random() < 0.3)[: plan.num_rounds - 1] for _ in sizes
    ]
    course = replace(
        case.course,
        rank_batch_sizes=sizes,
        blank_rounds=tuple(blank),
        blank_target=IGNORED,
    )
    return replace(case, plan=plan, course=course)


def draw_plan(draw: random.Random, world_size: int) -> tuple[Plan, tuple[str, ...] | None]:
    """A plan with zeros of all sorts, and the kinds of the ranks if their order matters."""
    microbatch_sizes = [draw.choice([0, 1, 1, 2, 3, 4]) for _ in range(world_size)]
    if not any(microbatch_sizes):
        microbatch_sizes[draw.randrange(world_size)] = draw.choice([1, 2, 3])
    batches = [size and size * draw.randint(1, 3) - draw.randrange(size)
               for size in microbatch_sizes]  # fmt: skip
    weights = [draw.choice([0.0, 0.0, 1.0, 1.0, 0.01, draw.random()]) for _ in batches]
    if not any(weights):
        weights[draw.randrange(world_size)] = 1.0
    kinds, devices = None, None
    if world_size > 1 and draw.random() < 0.5:
        kinds = tuple(f"kind {i}" for i in range(world_size))
        devices = [DeviceSpec(kind=k) for k in draw.sample(kinds, world_size)]
    patterns = ("blocks.*", "blocks.[0-1]", "*.0", "embedding", "head")
    recompute = [
        draw.choice([False, True, draw.sample(patterns, 2)]) for _ in range(world_size)
    ]
    plan = Plan.by_hand(
        microbatch_sizes=microbatch_sizes,
        rank_batch_sizes=batches,
        state_shares=[weight / sum(weights) for weight in weights],
        recompute=recompute,
        devices=devices,
        reshard_after_forward=draw.random() < 0.7,
    )
    return plan, kinds


def _shorter(draw: random.Random, full: tuple[int, ...]) -> tuple[int, ...]:
    """Rank batches of a last, smaller global batch; at least one sample in all."""
    sizes = [draw.randint(0, size) for size in full]
    if not any(sizes):
        sizes[full.index(max(full))] = 1
    return tuple(sizes)


def draw_shape(draw: random.Random) -> ModelShape:
    """Legal traits that a run over the whole batch at once has, too."""
    orders = [(0, 1), (0, 1, 2), (0, 1, 0), (0, 0, 1), (1, 0, 1, 2), (0, 1, 2, 0)]
    order = draw.choice(orders)
    frozen_choices: list[tuple[str, ...]] = [
        (), (), (), ("embedding",), ("blocks.0",), ("embedding", "blocks.0", "position"),
        ("blocks.1.norm",), ("head.norm", "position"), ("blocks",),
    ]  # fmt: skip
    dropout = draw.choice([0.0, 0.0, 0.3])
    head = draw.choice(["loss", "loss", "outside", "loss_fn"])
    units = tuple(
        UnitShape(
            core=draw.choice(["mlp", "mlp", "attention"]),
            returns=draw.choice(["tensor", "tensor", "tuple", "dict", "dataclass", "nested"]),
            aux=draw.choice(["", "", "sum", "rows"]),
            dropout=dropout,
            has_unused_param=draw.random() < 0.15,
        )
        for _ in range(max(order) + 1)
    )
    return ModelShape(
        units=units,
        order=order,
        width=draw.choice([3, 5, 6, 8]),
        num_words=draw.choice([7, 11, 16]),
        mask=draw.choice(["causal", "computed"]),
        position=draw.random() < 0.7,
        head=head,
        output="tuple",
        tied="head" if draw.random() < 0.35 else "",
        frozen=draw.choice(frozen_choices),
        side=draw.choice(["", "", "unused", "idle"]),
    )
