"""What all units of one kind hold, and what a sample costs in them."""

from dataclasses import dataclass, replace
from math import prod
from typing import Annotated

from shardhet.records.codec import OMITTABLE, Count

_FIGURES = (
    "forward_flops",
    "backward_flops",
    "input_bytes",
    "activation_bytes",
    "transient_bytes",
)
MAX_PARAM_NUMEL = 2**48  # far beyond any model; larger values are typing errors
MOST_UNTILED = 16_384  # tokens of a sample; shorter ones are not worth tiles


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenWise:
    """What of a kind is computed token by token, and so may be computed in tiles."""

    forward_flops: Count  # per sample: what tiles compute once more in backward
    activation_bytes: Count  # per sample: of the graph, which is then there of one tile
    rest_bytes: Count  # per sample: what needs room beside a running tile


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitKind:
    """What every unit of one kind holds, and what one sample costs in it."""

    name: str
    param_shapes: tuple[tuple[int, ...], ...]  # in module order
    forward_flops: Count  # per sample
    backward_flops: Count  # per sample, recomputation not included
    input_bytes: Count  # per sample: kept from forward to backward even if recomputed
    activation_bytes: Count  # per sample: what the unit's graph holds besides its inputs
    transient_bytes: Count  # per sample: what a running microbatch needs besides its graph
    input_grad_bytes: Count | None = None  # those of inputs that have a gradient; None: all
    frozen_params: Annotated[tuple[Count, ...], OMITTABLE] = ()  # indices into param_shapes
    # Whether frozen parameters are stored in the dtype in which they are gathered.
    frozen_as_stored: Annotated[bool, OMITTABLE] = False
    # Of all parameters when gathered; None: each element in the workload's param_dtype.  Packed
    # weights of 4 bits, for instance, are gathered as they are stored.
    gathered_bytes: Count | None = None
    token_wise: TokenWise | None = None  # None: nothing that is worth tiles
    kv_bytes: Annotated[Count, OMITTABLE] = 0  # per sample: keys and values of its attention

    def __post_init__(self) -> None:
        for shape in self.param_shapes:
            if any(dim < 0 for dim in shape) or prod(shape) > MAX_PARAM_NUMEL:
                raise ValueError(
                    f"workload: kind {self.name!r} has a parameter of shape {shape} but no "
                    f"dimension may be negative, and at most {MAX_PARAM_NUMEL} elements are in "
                    "one parameter. Fix the shape."
                )
        if unknown := [i for i in self.frozen_params if not 0 <= i < len(self.param_shapes)]:
            raise ValueError(
                f"workload: kind {self.name!r} has frozen_params {unknown} but "
                f"{len(self.param_shapes)} parameters. Give indices of param_shapes."
            )
        if (self.input_grad_bytes or 0) > self.input_bytes:
            raise ValueError(
                f"workload: kind {self.name!r} has input_grad_bytes "
                f"{self.input_grad_bytes} but input_bytes {self.input_bytes}. Fix the larger."
            )
        for key in _FIGURES:
            if getattr(self, key) < 0:
                raise ValueError(
                    f"workload: kind {self.name!r} has {key} {getattr(self, key)} but it must "
                    "be at least 0. Fix the figure."
                )

    def in_tiles(self, num_tiles: int) -> "UnitKind":
        """The kind if its sequences are computed in so many tiles."""
        part = self.token_wise
        if part is None or num_tiles < 2:
            return self
        of_tile = (part.activation_bytes + self.transient_bytes) // num_tiles
        return replace(
            self,
            backward_flops=self.backward_flops + part.forward_flops,
            activation_bytes=max(0, self.activation_bytes - part.activation_bytes),
            transient_bytes=part.rest_bytes + of_tile,
        )

    def of_tokens(self, share: float) -> "UnitKind":
        """The kind for a device that computes this part of the tokens of its samples.

        Keys and values of all tokens are in its graph, and while it runs twice more: as they
        arrive and are put in order, or their gradients are.
        """

        def of(figure: int) -> int:
            return round(share * figure)

        beside, part = 2 * self.kv_bytes, self.token_wise
        received = self.kv_bytes - of(self.kv_bytes)
        if part is not None:
            part = TokenWise(
                forward_flops=of(part.forward_flops),
                activation_bytes=of(part.activation_bytes),
                rest_bytes=of(part.rest_bytes) + beside,
            )
        grads = None if self.input_grad_bytes is None else of(self.input_grad_bytes)
        return replace(
            self,
            forward_flops=of(self.forward_flops),
            backward_flops=of(self.backward_flops),
            input_bytes=of(self.input_bytes),
            input_grad_bytes=grads,
            activation_bytes=of(self.activation_bytes) + received,
            transient_bytes=of(self.transient_bytes) + beside,
            token_wise=part,
        )

    @property
    def numel(self) -> int:
        """The number of elements in all parameters of one unit."""
        return sum(prod(shape) for shape in self.param_shapes)

    @property
    def trained_numel(self) -> int:
        """The number of elements in the parameters that have gradients."""
        return self.numel - sum(prod(self.param_shapes[i]) for i in self.frozen_params)

    @property
    def max_trained_numel(self) -> int:
        """The number of elements in the largest parameter that has a gradient."""
        trained = set(range(len(self.param_shapes))) - set(self.frozen_params)
        return max((prod(self.param_shapes[i]) for i in trained), default=0)

    @property
    def max_row_numel(self) -> int:
        """The number of elements in the longest row; rows are never split."""
        return max((max(1, prod(shape[1:])) for shape in self.param_shapes), default=1)
