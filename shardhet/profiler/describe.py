"""``describe``: a model as counts and bytes, in seconds and without its memory."""

from collections.abc import Sequence

import torch
from torch import nn

from shardhet.profiler.batch import ExampleBatch
from shardhet.profiler.counting import Counts, count_unit
from shardhet.profiler.sketch import LossFn, ModelSketch, UnitSketch, sketch_model
from shardhet.workload import Unit, UnitKind, Workload

CPU = torch.device("cpu")
ADAM_MOMENTS = 2

# What a sample costs is the difference of these.  So large that gradients of parameters,
# which do not grow with the batch, are at no size the most that is alive.
SIZES = (1024, 1025)


def describe(
    model: nn.Module,
    batch: ExampleBatch,
    *,
    units: Sequence[type[nn.Module] | str] | None = None,
    loss_fn: LossFn | None = None,
    param_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    tokens_per_sample: int | None = None,
    num_moments: int = ADAM_MOMENTS,
    device: torch.device = CPU,
) -> Workload:
    """The workload of training ``model``, with the units that HetFSDP makes of it.

    ``model`` may be on the meta device; nothing is allocated or computed.  ``units``,
    ``loss_fn``, ``param_dtype`` and ``reduce_dtype`` are those of HetFSDP.

    ``batch`` is an example of what the model is called with.  ``tokens_per_sample`` is for
    throughput; None is the length of the first tensor's rows if it holds indices, else 1.
    ``num_moments`` is how many tensors the optimizer keeps per parameter.  ``device`` says
    whose kernels are counted; fused attention keeps less than a plain one.

    FLOPs are those of matrix products, convolutions and attention (two per multiplication
    and addition).  Bytes are of one sample: what grows with the batch, so a table that
    every microbatch shares is not in them.
    """
    sketch = sketch_model(
        model, batch, units=units, loss_fn=loss_fn, param_dtype=param_dtype, device=device
    )
    return describe_sketch(
        sketch,
        batch,
        loss_fn=loss_fn,
        orig_dtype=orig_dtype(model),
        param_dtype=param_dtype,
        reduce_dtype=reduce_dtype,
        tokens_per_sample=tokens_per_sample,
        num_moments=num_moments,
        device=device,
    )


def describe_sketch(
    sketch: ModelSketch,
    batch: ExampleBatch,
    *,
    loss_fn: LossFn | None,
    orig_dtype: torch.dtype,
    param_dtype: torch.dtype | None,
    reduce_dtype: torch.dtype | None,
    tokens_per_sample: int | None,
    num_moments: int,
    device: torch.device,
) -> Workload:
    """The workload of a model whose units are known."""
    kinds = []
    for name, unit in sketch.unit_by_kind.items():
        smaller, larger = [
            count_unit(
                sketch, unit, size, param_dtype=param_dtype, loss_fn=loss_fn, device=device
            )
            for size in SIZES
        ]
        kinds.append(_kind(name, unit, smaller, larger))
    in_flight = param_dtype or orig_dtype
    order = [unit.kind for unit in sketch.units]
    return Workload(
        kinds=tuple(sorted(kinds, key=lambda kind: order.index(kind.name))),
        units=tuple(Unit(fqn=unit.fqn, kind=unit.kind) for unit in sketch.units),
        tokens_per_sample=tokens_per_sample or _tokens_per_sample(batch),
        param_dtype=_name(in_flight),
        reduce_dtype=_name(reduce_dtype or in_flight),
        state_bytes_per_element=(2 + num_moments) * orig_dtype.itemsize,
    )


def orig_dtype(model: nn.Module) -> torch.dtype:
    """The dtype in which most of the model's parameters are stored."""
    numels: dict[torch.dtype, int] = {}
    for param in model.parameters():
        if param.is_floating_point():
            numels[param.dtype] = numels.get(param.dtype, 0) + param.numel()
    if not numels:
        raise ValueError(
            "model: it has no floating-point parameters. There is nothing to train."
        )
    return max(numels, key=numels.__getitem__)


def _kind(name: str, unit: UnitSketch, smaller: Counts, larger: Counts) -> UnitKind:
    def per_sample(figure: str) -> int:
        grown: int = getattr(larger, figure) - getattr(smaller, figure)
        return max(0, grown)

    graph_bytes = per_sample("graph_bytes")
    return UnitKind(
        name=name,
        param_shapes=tuple(tuple(slot.shape) for slot in unit.draft.slots),
        forward_flops=per_sample("forward_flops"),
        backward_flops=per_sample("backward_flops"),
        input_bytes=per_sample("input_bytes"),
        activation_bytes=graph_bytes,
        transient_bytes=max(0, per_sample("peak_bytes") - graph_bytes),
    )


def _tokens_per_sample(batch: ExampleBatch) -> int:
    first = batch.tensors[0]
    is_text = not first.is_floating_point() and first.dim() > 1
    return first.shape[1] if is_text else 1


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
