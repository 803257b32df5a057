"""What a drawn case is made of, as records, and what its traits are called.

A trait is a short phrase, "aux mean" say; a campaign counts verdicts by trait.  Most traits
are legal and every model that has no others must be exact.  ``REFUSABLE`` lists those that
may be refused instead; a wrong number is a fault with any of them.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from typing import Any

from shardhet import Plan

# What may be refused, because no way of sharing the work gives what one process gives, or
# because only a look into the user's code could tell. Whatever is not here has to be exact.
REFUSABLE = frozenset(
    {
        "fold tile",  # a sample's rows are not side by side: [heads * B]
        "returns object",  # of a class that torch's trees do not know
        "aux product",  # no mean: microbatches do not add up to the batch
        "aux max",
        "aux selected",  # as many rows as the values say
        "aux mean of valid",  # weighs microbatches by something else than samples
        "aux rare sum",  # zero for most samples, so that a few do not tell what it is
        "loss as mean in head",
        "core batchnorm, shared",  # statistics of a visit or of a microbatch first?
        "odd sets scalar",  # attributes do not take part in autograd's graph
        "odd sets rows",
        "odd sets of input",
        "odd read by unit",
        "odd hidden rows",
        "odd hidden table",
        "odd hook",
        "odd hook scalar",
        "odd hook of input",
        "odd appends",
        "odd fills",
        "odd cache",
        "odd counter buffer",
        "odd counts",
        "odd counter scales",
        "odd writes on input",
        "odd writes on shared",
        "odd reads other",
        "odd closure of rows",
        "odd closure of parameter",
        "odd calls unit",
        "odd inner called",
        "odd knows batch size",
        "odd mixes samples",
        "tied root",  # as odd reads other
        "root mixes samples",
        "root flips samples",
        "root batchnorm",
        "root reads parameter of unit",
        "root counter buffer",
        "root adds a mean",
        "root skips a unit by length",  # units are visited in one order
        "root skips a unit by values",
        "weights unnamed, as long as the batch",
        "given table unnamed, as long as the batch",
    }
)


@dataclass(frozen=True, kw_only=True)
class UnitShape:
    """One unit between embedding and head."""

    core: str = "mlp"  # mlp, attention, recurrent, experts, batchnorm
    batch_at: int = 0  # where the unit wants the batch: its input is [T, B, D] for 1
    fold: str = ""  # batch * heads in the batch's place: "interleave" or "tile"
    returns: str = "tensor"  # tensor, tuple, dict, dataclass, nested, object
    aux: str = ""  # what is returned besides: sum, mean, product, max, parameter, vector, ..
    dropout: float = 0.0
    is_wrapped: bool = False  # the unit is inside a plain module
    is_random: bool = False  # draws numbers of its own in training
    has_unused_param: bool = False
    odd: str = ""

    def traits(self) -> Iterator[str]:
        """Everything that is not the plainest choice."""
        yield f"core {self.core}"
        yield f"returns {self.returns}"
        named = {"fold": self.fold, "aux": self.aux, "odd": self.odd}
        yield from (f"{name} {value}" for name, value in named.items() if value)
        claims = {
            "transposed unit": self.batch_at,
            "dropout in unit": self.dropout,
            "wrapped unit": self.is_wrapped,
            "random numbers in unit": self.is_random,
            "unused parameter": self.has_unused_param,
        }
        yield from (name for name, holds in claims.items() if holds)


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Root code around its units."""

    units: tuple[UnitShape, ...]
    order: tuple[int, ...]  # of visits; one that is there twice is shared
    width: int = 4
    num_words: int = 7
    num_heads: int = 2  # of folded units
    batch_at: int = 0  # where the model wants the batch in all that it is given
    mask: str = ""  # causal, computed, padding, padding by value, padding given sometimes
    table: str = ""  # a unit called without a batch: "bias" [T, T], "position" [T, D]
    position: bool = False  # a parameter of the root [1, num_positions, D]
    head: str = "loss"  # loss in the head, "mean" there, in "root", "outside", "loss_fn"
    output: str = "tensor"  # of a model that leaves the loss to others: tensor, tuple, dict, ..
    tied: str = ""  # "head", "blocks", "root" (the root uses the embedding's), "root head"
    frozen: tuple[str, ...] = ()  # prefixes of parameter names
    weights: str = ""  # of words, given to the model: "named" or "unnamed" in batch_dim
    given_table: str = ""  # [T, D], given to the model: the same
    root_dropout: float = 0.0  # as a module
    root: str = ""  # what odd thing the root does
    side: str = ""  # a unit beside the others: "unused" output, "idle", "no grad"
    norm_in_root: bool = False

    def made_consistent(self) -> "ModelShape":
        """Without what the place of the loss leaves no room for."""
        has_root_head = self.head in ("root", "outside")
        return replace(
            self,
            tied="" if self.tied.startswith("root") and not has_root_head else self.tied,
            weights=self.weights if self.head in ("loss", "mean", "root") else "",
        )

    def traits(self) -> Iterator[str]:
        """Of the root and of every unit, some of them several times."""
        for i, unit in enumerate(self.units):
            yield from unit.traits()
            if unit.core == "batchnorm" and self.order.count(i) > 1:
                yield "core batchnorm, shared"
        named = ("mask", "table", "tied", "weights", "root", "side")
        for name in named:
            if getattr(self, name):
                yield f"{name} {getattr(self, name)}"
        if self.given_table:
            yield f"given table {self.given_table}"
        places = {"loss": "loss in head", "mean": "loss as mean in head"}
        yield places.get(self.head, f"loss in {self.head}")
        if self.head == "outside":
            yield f"model returns {self.output}"
        claims = {
            "shared unit": len(set(self.order)) < len(self.order),
            "sequence first": self.batch_at,
            "position in root": self.position,
            "frozen parameters": self.frozen,
            "dropout module in root": self.root_dropout,
            "norm in root": self.norm_in_root,
        }
        yield from (name for name, holds in claims.items() if holds)


@dataclass(frozen=True, kw_only=True)
class StepShape:
    """One step: how many samples each position gets, how long they are."""

    sizes: tuple[int, ...]
    length: int  # T
    has_mask: bool = True  # where it is given only sometimes


@dataclass(frozen=True, kw_only=True)
class FuzzCase:
    """A model with a plan and a course; equal in every process that draws the same seed."""

    seed: int
    world_size: int
    model: ModelShape
    plan: Plan
    steps: tuple[StepShape, ...]
    kinds: tuple[str, ...] | None = None  # what ranks announce themselves as, by rank
    options: dict[str, Any] = field(default_factory=dict)  # for HetFSDP
    optimizer: str = "sgd"
    calls_empty: bool = True  # a rank without samples passes an empty batch, or nothing
    steps_between_zero_grad: int = 1
    evaluates: bool = False  # after each step

    def traits(self) -> frozenset[str]:
        """Of the model and of the course."""
        sizes = {size for step in self.steps for size in step.sizes}
        num_lengths = len({step.length for step in self.steps})
        claims = {
            "lengths change": num_lengths > 1,
            "a length is a rank's batch": any(s.length in s.sizes for s in self.steps),
            "a rank without samples": 0 in sizes,
            "ragged batches": len({step.sizes for step in self.steps}) > 1,
            "accumulation": self.steps_between_zero_grad > 1,
            "evaluation between steps": self.evaluates,
            "units chosen by class": "units" in self.options and self._names_classes,
            "units chosen by name": "units" in self.options and not self._names_classes,
            "recomputes": any(rank.recomputed_units for rank in self.plan.ranks),
            "several microbatches": any(len(r.microbatch_sizes) > 1 for r in self.plan.ranks),
            "weights unnamed, as long as the batch": self.model.weights == "unnamed"
            and self.model.num_words in sizes,
            "given table unnamed, as long as the batch": self.model.given_table == "unnamed"
            and any(step.length in step.sizes for step in self.steps),
        }
        found = {name for name, holds in claims.items() if holds}
        return frozenset(found | set(self.model.traits()))

    @property
    def batch_dim(self) -> int | dict[str, int | None]:
        """Where the model's inputs have the batch, as HetFSDP is told."""
        at = self.model.batch_at
        kinds = {"weights": self.model.weights, "table": self.model.given_table}
        whole = [name for name, kind in kinds.items() if kind == "named"]
        if not whole:
            return at
        batched = ("tokens", "targets", "mask", "loss_inputs")
        return {**dict.fromkeys(batched, at), **dict.fromkeys(whole)}

    @property
    def _names_classes(self) -> bool:
        return not all(isinstance(each, str) for each in self.options["units"])

    @property
    def num_computing(self) -> int:
        """How many ranks compute at least, in any step."""
        return min(sum(size > 0 for size in step.sizes) for step in self.steps)

    @property
    def may_be_refused(self) -> bool:
        """Whether a refusal is right as well."""
        return bool(self.traits() & REFUSABLE)

    def __str__(self) -> str:
        ranks = [
            f"  {rank.microbatch_sizes} share {rank.state_share:.3f} recomputes "
            f"{rank.recomputed_units} on {rank.device.kind}"
            for rank in self.plan.ranks
        ]
        lines = [f"seed {self.seed}, {self.world_size} ranks", describe(self.model)]
        lines += [describe(step) for step in self.steps]
        others = ("options", "optimizer", "calls_empty", "steps_between_zero_grad", "evaluates")
        lines.append(", ".join(f"{name}={getattr(self, name)}" for name in others))
        lines.append(f"reshard_after_forward={self.plan.reshard_after_forward}; by position:")
        return "\n".join([*lines, *ranks])


def describe(record: Any) -> str:
    """The fields of a record that are not as they are by default."""
    parts = []
    for each in fields(record):
        value = getattr(record, each.name)
        if value == each.default:
            continue
        if each.name == "units":
            value = "[" + ", ".join(map(describe, value)) + "]"
        parts.append(f"{each.name}={value}")
    return f"{type(record).__name__}({', '.join(parts)})"
