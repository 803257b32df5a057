"""What the parts of this experiment say to each other: families, ways of calling, rows."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from torch import Tensor, nn

from experiments.other_peoples_models.tasks import Task
from shardhet import Plan


@dataclass(frozen=True, kw_only=True)
class Family:
    """One model class in small, with random weights."""

    name: str
    source: str  # the package that it comes from
    task: Task
    make: Callable[..., nn.Module]  # keywords change its configuration
    seq_len: int = 11
    batch_dim: int | Mapping[str, int | None] = 0
    logits: Callable[[Any], Tensor] = lambda output: output.logits
    lora_targets: tuple[str, ...] = ()  # modules that peft adapts; none is not tried
    is_moe: bool = False
    has_attentions: bool = False
    has_batch_norm: bool = False
    is_random: bool = True  # whether a training forward draws random numbers
    takes_no_default: bool = False  # its documented loss is no sum over samples
    takes_loss_fn: bool = True  # its last module returns one tensor
    coarse_units: tuple[str, ...] = ()  # for families that HetFSDP's own choice does not suit


class Loss(Enum):
    """Where the loss is computed."""

    OUTSIDE = "logits"  # from logits, in float64
    INNER = "labels="  # by the model: a mean over labels, in float32
    ITEMS = "num_items_in_batch="  # by the model: a sum, in float32
    FUNCTION = "loss_fn="  # in the last unit, microbatch by microbatch


@dataclass(frozen=True, kw_only=True)
class Way:
    """A way of calling a model."""

    name: str
    loss: Loss = Loss.OUTSIDE
    without: tuple[str, ...] = ()  # arguments that are left out
    is_positional: bool = False
    call_options: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)  # changes of the configuration
    has_lora: bool = False
    has_coarse_units: bool = False
    collides: bool = False  # the second step's sequences are as long as a rank's batch
    evaluates: bool = False  # before every step
    drops: bool = True  # as its dropout says
    is_staged: bool = False  # in a module that computes the loss, by ``forward_backward``


@dataclass(frozen=True, kw_only=True)
class Case:
    """One row of the table."""

    family: str
    way: str
    plan: str

    @property
    def key(self) -> tuple[str, str, str]:
        """It once more, as csv has it."""
        return self.family, self.way, self.plan


@dataclass(frozen=True, kw_only=True)
class Named:
    """A plan with the name that tables give it."""

    name: str
    plan: Plan
    eval_sizes: tuple[int, ...]  # samples of each rank in evaluations


class Verdict(Enum):
    """What became of a case."""

    EXACT = "exact"
    REFUSED = "refused"  # on every rank, before a gradient of the calls it is about
    LATE = "late"  # refused on every rank, but in backward
    WRONG = "wrong"
    CRASHED = "crashed"
    ABSENT = "absent"  # the package is not installed, or plain torch cannot run it


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What is written of a case."""

    family: str
    source: str
    way: str
    plan: str
    verdict: str
    loss_error: float  # relative; the largest of all steps
    grad_error: float  # of the unit's largest gradient
    state_error: float  # parameters and buffers, of the unit's largest; the state dict too
    noise: float  # largest gradient difference of two accumulation orders of plain torch
    # Seconds of the processor, which other programs beside this one do not change:
    plain_start_s: float  # making the model and its first step
    start_s: float  # the same with HetFSDP, wrapping included; the slowest rank
    plain_step_s: float  # the shortest later step
    step_s: float
    commit: str
    text: str  # of a refusal or a failure, and in which phase

    @property
    def key(self) -> tuple[str, str, str]:
        """The case."""
        return self.family, self.way, self.plan


@dataclass(frozen=True, kw_only=True)
class RankReport:
    """How a rank ended."""

    phase: str  # what it was at: "forward of step 1"; "end"
    error: str = ""  # kind and text
    is_deliberate: bool = False  # raised on purpose, by our own code
    errors: Mapping[str, float] = field(default_factory=dict)  # by quantity
    worst: Mapping[str, str] = field(default_factory=dict)  # where these are
    start_s: float = 0.0
    step_s: Sequence[float] = ()
