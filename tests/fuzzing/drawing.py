"""Cases of a seed: mostly legal traits, sometimes one that may have to be refused."""

import random
from dataclasses import MISSING, fields, replace
from typing import Any

from shardhet import Plan
from tests.drawn_cases import draw_plan
from tests.fuzzing.model import NUM_POSITIONS, weighted_loss
from tests.fuzzing.shapes import FuzzCase, ModelShape, StepShape, UnitShape
from tests.fuzzing.units import Block

ODD_OF_UNIT = (
    "sets scalar", "sets rows", "sets of input", "hook of input", "read by unit",
    "hidden rows", "hidden table", "hook", "hook scalar", "appends", "fills", "cache",
    "counter buffer", "counts", "counter scales", "writes on input", "writes on shared",
    "reads other", "closure of rows", "closure of parameter", "calls unit", "inner called",
    "knows batch size", "mixes samples",
)  # fmt: skip
ODD_OF_ROOT = (
    "mixes samples", "flips samples", "batchnorm", "functional dropout",
    "reads parameter of unit", "counter buffer", "adds a mean", "skips a unit by length",
    "skips a unit by values",
)  # fmt: skip
# On a single rank root code gives what it gives for the whole batch, and that is right too.
OF_SEVERAL_RANKS = ("adds a mean", "mixes samples", "skips a unit by values")
ODD_OTHERWISE = (
    "fold tile", "aux product", "aux max", "aux selected", "aux mean of valid", "aux rare sum",
    "returns object", "head mean", "tied root",
)  # fmt: skip
PART_CALM = 0.5  # of the cases have few traits, so that a refusal of one hides no other
PART_ODD = 0.4  # of the cases have a trait that may be refused


def draw_case(seed: int) -> FuzzCase:
    """The case of that seed: the same in every process."""
    draw = random.Random(f"module shapes {seed}")
    world_size = draw.choice([1, 2, 2, 3])
    plan, kinds = draw_plan(draw, world_size)
    model = _draw_model(draw, plan)
    if draw.random() < PART_CALM:
        units = tuple(_calmed(draw, unit) for unit in model.units)
        model = _calmed(draw, replace(model, units=units))
    if draw.random() < PART_ODD:
        model = _made_odd(draw, model)
    model = model.made_consistent()
    full = tuple(rank.rank_batch_size for rank in plan.ranks)
    steps = tuple(_draw_step(draw, plan, model, full) for _ in range(draw.choice([2, 3, 3])))
    case = FuzzCase(
        seed=seed,
        world_size=world_size,
        model=model,
        plan=plan,
        steps=_of_few_lengths(draw, steps),
        kinds=kinds,
        options=_draw_options(draw, model),
        optimizer=draw.choice(["sgd", "adamw"]),
        calls_empty=draw.random() < 0.5,
        steps_between_zero_grad=draw.choice([1, 1, 2]),
        evaluates=draw.random() < 0.35,
    )
    if case.num_computing < 2 and model.root in OF_SEVERAL_RANKS:
        return replace(case, model=replace(model, root=""))
    return case


def _calmed(draw: random.Random, record: Any) -> Any:
    """The record with most of its fields as they are by default."""
    kept = ("batch_at",) if isinstance(record, ModelShape) else ()
    defaults = {
        each.name: each.default
        for each in fields(record)
        if each.default is not MISSING and each.name not in kept and draw.random() < 0.7
    }
    return replace(record, **defaults)


def _draw_unit(draw: random.Random) -> UnitShape:
    core = draw.choice(
        ["mlp", "mlp", "attention", "attention", "recurrent", "experts", "batchnorm"]
    )
    aux = ["", "", "", "sum", "mean", "parameter", "vector", "rows"]
    return UnitShape(
        core=core,
        batch_at=int(draw.random() < 0.2),
        fold="interleave" if core != "recurrent" and draw.random() < 0.15 else "",
        returns=draw.choice(["tensor", "tensor", "tuple", "dict", "dataclass", "nested"]),
        aux=draw.choice(aux),
        dropout=draw.choice([0.0, 0.0, 0.0, 0.3]),
        is_wrapped=draw.random() < 0.1,
        is_random=draw.random() < 0.08,
        has_unused_param=draw.random() < 0.1,
    )


def _draw_model(draw: random.Random, plan: Plan) -> ModelShape:
    """Legal traits only."""
    num_units = draw.choice([2, 2, 3, 4])
    order = list(range(num_units))
    if draw.random() < 0.3:
        order.insert(draw.randint(1, num_units), draw.randrange(num_units))
    masks = ["", "causal", "computed", "padding", "padding by value", "padding given sometimes"]
    head = draw.choice(["loss", "loss", "root", "outside", "outside", "loss_fn"])
    tied = draw.choice(["", "", "", "head", "blocks"])
    if head in ("outside", "root"):
        tied = draw.choice(["", "", "head", "blocks", "root head"])
    batches = [rank.rank_batch_size for rank in plan.ranks if rank.rank_batch_size > 2]
    words = [7, 11] + batches[:1]
    frozen: list[tuple[str, ...]] = [
        (), (), (), (), ("embedding",), ("blocks.0",), ("head.norm",), ("blocks",),
    ]  # fmt: skip
    shape = ModelShape(
        units=tuple(_draw_unit(draw) for _ in range(num_units)),
        order=tuple(order),
        width=draw.choice([4, 6]),
        num_words=draw.choice(words),
        num_heads=draw.choice([2, 3]),
        batch_at=int(draw.random() < 0.2),
        mask=draw.choice(masks),
        table=draw.choice(["", "", "bias", "position"]),
        position=draw.random() < 0.3,
        head=head,
        output=draw.choice(["tensor", "tuple", "dict", "dataclass"]),
        tied=tied,
        frozen=draw.choice(frozen),
        weights=draw.choice(["", "", "", "named", "unnamed"])
        if head in ("loss", "root")
        else "",
        given_table=draw.choice(["", "", "", "", "", "named", "unnamed"]),
        root_dropout=0.25 if draw.random() < 0.15 else 0.0,
        root="counts forwards" if draw.random() < 0.06 else "",
        side=draw.choice(["", "", "", "", "unused", "idle", "no grad"]),
        norm_in_root=draw.random() < 0.2,
    )
    shared_norm = any(
        unit.core == "batchnorm" and order.count(i) > 1 for i, unit in enumerate(shape.units)
    )
    if shared_norm and draw.random() < 0.8:
        shape = replace(shape, order=tuple(range(num_units)))
    return shape


def _made_odd(draw: random.Random, shape: ModelShape) -> ModelShape:
    """With one trait, seldom two, that may be refused; and seen in the loss."""
    for _ in range(draw.choice([1, 1, 1, 2])):
        choices = [f"odd {odd}" for odd in ODD_OF_UNIT]
        choices += [f"root {odd}" for odd in ODD_OF_ROOT]
        chosen = draw.choice([*choices, *ODD_OTHERWISE])
        if chosen == "head mean":
            shape = replace(shape, head="mean", tied=shape.tied.removeprefix("root head"))
        elif chosen == "tied root":
            shape = replace(shape, head="root", tied="root")
        elif chosen.startswith("root "):
            shape = replace(shape, root=chosen.removeprefix("root "))
        else:
            shape = _with_odd_unit(draw, shape, chosen)
    if shape.head == "loss_fn" or shape.output == "tensor":  # which know no energies
        shape = replace(shape, output="tuple")
        if shape.head == "loss_fn":
            shape = replace(shape, head="outside")
    return shape


def _with_odd_unit(draw: random.Random, shape: ModelShape, chosen: str) -> ModelShape:
    units = list(shape.units)
    i = draw.randrange(len(units))
    kind, _, value = chosen.partition(" ")
    if kind == "odd":
        units[i] = replace(units[i], odd=value)
        if value in ("calls unit", "read by unit"):  # what the other can understand
            plain = UnitShape(dropout=units[i].dropout)
            units[i] = replace(units[i], fold="", core="mlp", batch_at=0)
            units[(i + 1) % len(units)] = plain
        elif value == "inner called":
            units[i] = replace(units[i], core="mlp")
        elif value == "cache":
            units = [replace(unit, fold="") for unit in units]
            units[-1] = replace(units[-1], odd="cache")
        if value == "read by unit" and i + 1 == len(units):
            units = [*units[1:], units[0]]
            units = [units[-2], *units[:-2], units[-1]] if len(units) > 2 else units
    elif kind == "fold":
        units[i] = replace(units[i], fold=value)
        if units[i].core == "recurrent":
            units[i] = replace(units[i], core="mlp")
    elif kind == "aux":
        units[i] = replace(units[i], aux=value)
    else:
        units[i] = replace(units[i], returns=value)
        if units[i].core == "recurrent":
            units[i] = replace(units[i], core="mlp")
    return replace(shape, units=tuple(units))


def _draw_step(
    draw: random.Random, plan: Plan, model: ModelShape, full: tuple[int, ...]
) -> StepShape:
    sizes = full if draw.random() < 0.7 else tuple(draw.randint(0, size) for size in full)
    sizes = sizes if any(sizes) else full
    collisions = {*sizes, *(model.num_heads * size for size in sizes)}
    collisions |= {size for rank in plan.ranks for size in rank.microbatch_sizes}
    low = 2 if any(unit.core == "batchnorm" for unit in model.units) else 1
    low = 2 if model.root == "batchnorm" else low
    lengths = [each for each in sorted(collisions) if low <= each <= NUM_POSITIONS]
    use_collision = lengths and draw.random() < 0.5
    length = draw.choice(lengths) if use_collision else draw.randint(low, 5)
    return StepShape(sizes=sizes, length=length, has_mask=draw.random() < 0.6)


def _of_few_lengths(draw: random.Random, steps: tuple[StepShape, ...]) -> tuple[StepShape, ...]:
    """Half of the courses have one length only."""
    if draw.random() < 0.5:
        return steps
    return tuple(replace(step, length=steps[0].length) for step in steps)


def _draw_options(draw: random.Random, model: ModelShape) -> dict[str, Any]:
    options: dict[str, Any] = {"seed": draw.randrange(100)}
    if model.head == "loss_fn":
        options["loss_fn"] = weighted_loss
    is_plain = not any(
        unit.odd or unit.dropout or unit.is_random or unit.core == "batchnorm"
        for unit in model.units
    )
    last = () if model.tied == "root head" else ("head",)
    name_of_first = "blocks.0.inner" if model.units[0].is_wrapped else "blocks.0"
    choices: list[Any] = [None, None, (Block, "embedding", *last)]
    if is_plain:
        choices += [("embedding", name_of_first, *last), (name_of_first, *last)]
    units = draw.choice(choices)
    if model.tied == "root head" and draw.random() < 0.7:
        units = (Block, "embedding")
    if units is not None:
        options["units"] = units
    return options
