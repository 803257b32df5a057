"""A model to be counted or measured, and an example of its batches."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from shardhet.fsdp.sharding.build import cast_arguments

LossFn = Callable[..., tuple[Tensor, Tensor]]


def first_length(tree: Any) -> int:
    """The length of dim 0 of the first tensor that has one; 0 if there is none."""
    lengths = (t.shape[0] for t in tree_leaves(tree) if isinstance(t, Tensor) and t.dim())
    return next(lengths, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExampleBatch:
    """An example of a model's inputs; dim 0 of the first tensor is the batch.

    Only shapes and dtypes matter, but indices must be in range: random tokens will do.
    """

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    loss_inputs: tuple[Any, ...] = ()  # for ``loss_fn``, if the model returns logits

    def __post_init__(self) -> None:
        if not self.num_samples:
            raise ValueError(
                "batch: it holds no sample. Give at least one, with the batch in dim 0 of the "
                "first tensor."
            )

    @property
    def num_samples(self) -> int:
        """The length of dim 0 of the first tensor."""
        return first_length((self.args, dict(self.kwargs), self.loss_inputs))

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors in the batch."""
        leaves = tree_leaves((self.args, dict(self.kwargs), self.loss_inputs))
        return [leaf for leaf in leaves if isinstance(leaf, Tensor)]

    def of_size(self, num_samples: int) -> Self:
        """A batch of ``num_samples`` samples, made by repeating this one's."""
        own = self.num_samples

        def stretch(tensor: Tensor) -> Tensor:
            if tensor.dim() == 0 or tensor.shape[0] != own:
                return tensor
            rows = torch.arange(num_samples, device=tensor.device) % own
            return tensor.index_select(0, rows)

        return self.map(stretch)

    def cast(self, dtype: torch.dtype | None) -> Self:
        """The same batch with arguments in floating point cast as HetFSDP casts them."""
        args, kwargs = cast_arguments(self.args, self.kwargs, dtype)
        return replace(self, args=args, kwargs=kwargs)

    def map(self, function: Callable[[Tensor], Tensor]) -> Self:
        """The same batch with ``function`` applied to every tensor."""
        args, kwargs, loss_inputs = tree_map_only(
            Tensor, function, (self.args, dict(self.kwargs), self.loss_inputs)
        )
        return type(self)(args=args, kwargs=kwargs, loss_inputs=loss_inputs)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedModel:
    """A model and how it is trained, as it would be passed to HetFSDP."""

    module: nn.Module  # may be on the meta device
    batch: ExampleBatch
    units: Sequence[type[nn.Module] | str] | None = None
    loss_fn: LossFn | None = None
    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    init_fn: Callable[[nn.Module], None] | None = None
    seed: int = 0
