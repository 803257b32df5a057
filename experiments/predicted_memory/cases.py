"""Drawn configurations, and the demo's: a model, a plan and a precision.

A seed draws the same in every process.  Everything that a price of memory depends on is drawn:
rounds and forms, microbatches, shares, what is recomputed, what is on the host, precision.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from shardhet import Plan, Stage
from shardhet.models.decoder import DecoderConfig

PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"param_dtype": torch.bfloat16},
    "bf16, reduced in bf16": {"param_dtype": torch.bfloat16, "reduce_dtype": torch.bfloat16},
}
FORMS = [(True, True), (False, True), (False, False)]  # reshard after forward, after backward
DEMO = "demo"
DEMO_SHAPE = DecoderConfig(  # conf/model/small.yaml
    vocab_size=256,
    width=256,
    num_layers=6,
    num_heads=8,
    num_kv_heads=8,
    hidden_width=704,
    seq_len=64,
)


@dataclass(frozen=True, kw_only=True)
class MemoryCase:
    """One configuration."""

    name: str
    shape: DecoderConfig
    plan: Plan
    precision: str

    @property
    def options(self) -> dict[str, Any]:
        """Of HetFSDP and of ``describe``."""
        return PRECISIONS[self.precision]

    @property
    def traits(self) -> tuple[str, ...]:
        """What is special about it."""
        plan = self.plan
        gathers = {FORMS[0]: "use", FORMS[1]: "round", FORMS[2]: "step"}
        form = gathers[plan.reshard_after_forward, plan.reshard_after_backward]
        reduced = "round" if plan.reduce_each_round else "step"
        found = {
            f"{plan.world_size} ranks": True,
            self.precision: True,
            f"gathered per {form}": True,
            "one round": plan.num_rounds == 1,
            f"several rounds, reduced per {reduced}": plan.num_rounds > 1,
            "inputs on the host": any(each.inputs_on_host for each in plan.ranks),
            "optimizer on the host": any(each.optimizer_on_host for each in plan.ranks),
            "stages": plan.stages is not None,
        }
        return tuple(name for name, is_there in found.items() if is_there)


def draw_flat(seed: int) -> MemoryCase:
    """The configuration of that seed."""
    draw = random.Random(f"memory case {seed}")
    world_size = draw.choice([1, 2, 2, 3, 3, 4])
    num_layers = draw.randint(3, 10)
    shape = DecoderConfig(
        vocab_size=draw.choice([64, 256, 1024]),
        width=(width := draw.choice([64, 96, 128])),
        num_layers=num_layers,
        num_heads=4,
        num_kv_heads=draw.choice([1, 2, 4]),
        hidden_width=draw.choice([2, 3]) * width,
        seq_len=draw.choice([8, 16, 32]),
    )
    sizes = [draw.randint(0, 3) for _ in range(world_size)]
    sizes[draw.randrange(world_size)] = draw.randint(1, 3)
    numbers = [draw.randint(1, 3) if size else 0 for size in sizes]
    shares = [draw.choice([0.0, 1.0, 1.0, 2.0, 4.0]) for _ in range(world_size)]
    shares[draw.randrange(world_size)] = 2.0
    some = [f"blocks.{i}" for i in range(draw.randint(1, num_layers - 1))]
    ways: list[bool | list[str]] = [True, True, False, some]
    recompute = [draw.choice(ways) for _ in range(world_size)]
    num_rounds = draw.choice([1, 1, 2, 3])
    after_forward, after_backward = draw.choice(FORMS)
    plan = Plan.by_hand(
        microbatch_sizes=sizes,
        num_microbatches=numbers,
        state_shares=[share / sum(shares) for share in shares],
        recompute=recompute,
        num_rounds=num_rounds,
        reshard_after_forward=after_forward,
        reshard_after_backward=after_backward,
        reduce_each_round=num_rounds == 1 or draw.random() < 0.5,
        inputs_on_host=_inputs_on_host(draw, recompute),
        optimizer_on_host=[draw.random() < 0.25 for _ in range(world_size)],
    )
    precision = draw.choice([*PRECISIONS, "fp32"])
    return MemoryCase(name=str(seed), shape=shape, plan=plan, precision=precision)


def draw_pipeline(seed: int) -> MemoryCase:
    """A configuration with two or three stages."""
    draw = random.Random(f"memory of stages {seed}")
    ranks = draw.choice([(1, 1), (2, 1), (1, 2), (2, 2), (1, 1, 1), (2, 1, 1), (1, 1, 2)])
    other = draw_flat(draw.randrange(10**6))
    names = ["embedding", *(f"blocks.{i}" for i in range(other.shape.num_layers)), "head"]
    cuts = sorted(draw.sample(range(1, len(names)), len(ranks) - 1))
    round_size = draw.randint(2, 4)
    sizes, shares = [], []
    for number in ranks:
        own = [round_size] if number == 1 else [round_size - 1, 1]
        of_stage = [draw.choice([1.0, 2.0, 4.0]) for _ in own]
        sizes += draw.sample(own, number)
        shares += [each / sum(of_stage) for each in of_stage]
    num_rounds = draw.randint(2, 6)
    recompute = [draw.random() < 0.5 for _ in sizes]
    bounds = list(pairwise((0, *cuts, len(names))))
    stages = [
        Stage(units=tuple(names[first:stop]), num_ranks=number, in_flight=len(ranks) - i)
        for i, ((first, stop), number) in enumerate(zip(bounds, ranks, strict=True))
    ]
    after_forward, after_backward = draw.choice(FORMS)
    plan = Plan.by_hand(
        microbatch_sizes=sizes,
        state_shares=shares,
        recompute=recompute,
        num_rounds=num_rounds,
        reshard_after_forward=after_forward,
        reshard_after_backward=after_backward,
        reduce_each_round=draw.random() < 0.5,
        inputs_on_host=_inputs_on_host(draw, recompute),
        optimizer_on_host=[draw.random() < 0.25 for _ in sizes],
        stages=stages,
    )
    return MemoryCase(name=f"p{seed}", shape=other.shape, plan=plan, precision=other.precision)


def _inputs_on_host(draw: random.Random, recompute: Sequence[Any]) -> list[Any]:
    wanted = draw.random() < 0.5
    return [each if wanted and draw.random() < 0.7 else False for each in recompute]


def demo() -> MemoryCase:
    """The demo: its model, and a plan that was found for its devices and its batch of 32."""
    plan = Plan.by_hand(
        microbatch_sizes=[1, 2, 8, 8],
        num_microbatches=[10, 3, 1, 1],
        state_shares=[0.1975, 0.1353, 0.3336, 0.3336],
        recompute=[False, ["blocks.[0-4]", "head"], False, False],
    )
    return MemoryCase(name=DEMO, shape=DEMO_SHAPE, plan=plan, precision="fp32")
