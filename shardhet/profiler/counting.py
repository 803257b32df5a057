"""FLOPs and bytes of one unit, counted on tensors that hold no memory."""

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from shardhet.fsdp.microbatch.modes import OperationMode, tensors_among
from shardhet.fsdp.microbatch.surroundings import CacheSwitch
from shardhet.fsdp.sharding.build import cast_arguments
from shardhet.fsdp.sharding.unit import UnitModule
from shardhet.fsdp.tokens.attention import attending_by, attention
from shardhet.fsdp.tokens.tiles import Tiles
from shardhet.profiler.batch import ExampleBatch, LossFn
from shardhet.profiler.model_spec import ModelSpec, TensorInput, UnitCall, UnitSpec

Shape = tuple[int, ...]
aten = torch.ops.aten
T = TypeVar("T")
MAX_COUNTS = 6


def _attention_flops(query: Shape, key: Shape, value: Shape, *_: Any, **__: Any) -> int:
    """FLOPs of queries times keys and weights times values, over the full square."""
    batch, num_heads, num_queries, width = query
    num_keys, value_width = key[-2], value[-1]
    return 2 * batch * num_heads * num_queries * num_keys * (width + value_width)


def _attention_backward_flops(
    _grad: Shape, query: Shape, key: Shape, value: Shape, *_: Any, **__: Any
) -> int:
    """FLOPs of two products for each one of forward, without what fused kernels recompute."""
    return 2 * _attention_flops(query, key, value)


def _grouped_flops(left: Shape, right: Shape, *_: Any, **__: Any) -> int:
    """FLOPs of products of groups, of which each has a part of the rows, columns or sums."""
    num_whole = left[0] if len(left) == len(right) == 3 else 1
    return 2 * num_whole * left[-2] * left[-1] * right[-1]


# torch 2.15 does not count attention on CPU nor grouped products, of which transformers makes
# experts; and it counts what the CUDA kernels recompute.
FLOPS_BY_OPERATION = {
    aten._grouped_mm: _grouped_flops,
    aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward_flops,
    aten._scaled_dot_product_flash_attention_backward: _attention_backward_flops,
    aten._scaled_dot_product_efficient_attention_backward: _attention_backward_flops,
    aten._scaled_dot_product_cudnn_attention_backward: _attention_backward_flops,
}


def steady(count: Callable[[], T]) -> T:
    """What ``count()`` has returned twice in a row; what it returned last if it never does.

    Another thread that looks at the frames of this one, as the watch over ranks does, keeps the
    tensors in them alive for a moment.  A count of live bytes is too high then.
    """
    last = count()
    for _ in range(MAX_COUNTS - 1):
        before, last = last, count()
        if last == before:
            break
    return last


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """The cost of one unit for some number of samples."""

    forward_flops: int = 0
    backward_flops: int = 0
    input_bytes: int = 0
    input_grad_bytes: int = 0  # of inputs that have a gradient
    graph_bytes: int = 0  # what the unit's graph holds besides inputs and parameters
    peak_bytes: int = 0  # the most that is alive in forward and backward, the graph included
    kv_bytes: int = 0  # of keys and values, as attention gets them

    def __add__(self, other: "Counts") -> "Counts":
        """The counts of two calls of one unit, which run in turn and keep both graphs."""
        return Counts(
            forward_flops=self.forward_flops + other.forward_flops,
            backward_flops=self.backward_flops + other.backward_flops,
            input_bytes=self.input_bytes + other.input_bytes,
            input_grad_bytes=self.input_grad_bytes + other.input_grad_bytes,
            graph_bytes=self.graph_bytes + other.graph_bytes,
            peak_bytes=max(
                self.peak_bytes + other.graph_bytes, self.graph_bytes + other.peak_bytes
            ),
            kv_bytes=self.kv_bytes + other.kv_bytes,
        )


def count_unit(
    model_spec: ModelSpec,
    unit: UnitSpec,
    num_samples: int,
    *,
    param_dtype: torch.dtype | None,
    loss_fn: LossFn | None,
    device: torch.device,
    tiles: Tiles | None = None,
) -> Counts:
    """Count what the unit costs for ``num_samples`` samples, in ``tiles`` if they are given."""
    total = Counts()
    for call in unit.calls:
        function = call.function(model_spec.model, param_dtype=param_dtype, loss_fn=loss_fn)
        if tiles is not None:
            module = model_spec.model.get_submodule(call.module_fqn)
            unit_module = UnitModule(call.module_fqn, module, function, is_trainable=True)
            function = tiles.function_of(unit_module)
        params = [slot.current for slot in unit.draft.slots]
        with model_spec.fake_mode:
            total += _count_call(function, call, params, num_samples, device)
    return total


class _NoModules(nullcontext[None]):
    """In place of torch's tracker of modules, whose hooks on tensors forbid to ask for their
    gradients, as tries of what is computed in tiles do.
    """

    parents = frozenset(("Global",))


def _count_call(
    function: Callable[..., Any],
    call: UnitCall,
    params: Sequence[nn.Parameter],
    num_samples: int,
    device: torch.device,
) -> Counts:
    def make(given: TensorInput) -> Tensor:
        tensor = torch.empty(given.shape(num_samples), dtype=given.dtype, device=device)
        return tensor.requires_grad_(given.requires_grad)

    args, kwargs = call.arguments(make)
    live = LiveBytes()
    forward, backward = [
        FlopCounterMode(display=False, custom_mapping=FLOPS_BY_OPERATION) for _ in range(2)
    ]
    for each in (forward, backward):
        each.mod_tracker = _NoModules()  # type: ignore[assignment]
    kv_bytes = 0

    def attend(query: Tensor, key: Tensor, value: Tensor, *rest: Any, **options: Any) -> Any:
        nonlocal kv_bytes
        kv_bytes += key.nbytes + value.nbytes
        return attention(query, key, value, *rest, **options)

    with torch.enable_grad():
        with live, forward, attending_by(attend):
            outputs = [
                leaf
                for leaf in tree_leaves(function(*args, **kwargs))
                if isinstance(leaf, Tensor) and leaf.requires_grad
            ]
        edges = [get_gradient_edge(output) for output in outputs]
        grads = [torch.empty_like(output) for output in outputs]
    del outputs
    graph_bytes = live.live_bytes
    if edges:
        trained = [p for p in params if p.requires_grad]
        hooks = [p.register_post_accumulate_grad_hook(_drop_grad) for p in trained]
        with live, backward:
            torch.autograd.backward(edges, grads)
        for hook in hooks:
            hook.remove()
    return Counts(
        forward_flops=forward.get_total_flops(),
        backward_flops=backward.get_total_flops() if edges else 0,
        input_bytes=sum(each.nbytes(num_samples) for each in call.tensor_inputs),
        input_grad_bytes=sum(
            each.nbytes(num_samples) for each in call.tensor_inputs if each.requires_grad
        ),
        graph_bytes=graph_bytes,
        peak_bytes=live.peak_bytes,
        kv_bytes=kv_bytes,
    )


def count_loss_outside(
    model_spec: ModelSpec,
    batch: ExampleBatch,
    *,
    param_dtype: torch.dtype | None,
    loss_fn: LossFn,
    device: torch.device,
) -> int:
    """Bytes kept for backward after the head: its output and everything computed from it.

    This is for a model that goes on computing with the output of its last unit; ``loss_fn``
    gets the model's logits.
    """
    live = LiveBytes()
    modes = ExitStack()
    head_bytes = 0

    def fake(tensor: Tensor) -> Tensor:
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=device)

    def begin(_module: nn.Module, _args: Any, output: Tensor) -> Tensor:
        nonlocal head_bytes
        head_bytes = output.numel() * output.element_size()
        modes.enter_context(live)
        return output.detach().requires_grad_()

    assert model_spec.head_fqn is not None
    head = model_spec.model.get_submodule(model_spec.head_fqn)
    with (
        model_spec.fake_mode,
        torch.enable_grad(),
        casting_units(model_spec, param_dtype),
        modes,
    ):
        modes.callback(head.register_forward_hook(begin).remove)
        given = batch.map(fake).cast(param_dtype)
        with CacheSwitch(model_spec.model).off():
            logits = logits_of(model_spec.model(*given.args, **given.kwargs))
        loss = loss_fn(logits, *given.loss_inputs)
        del logits
        kept_bytes = live.live_bytes
    del loss
    return head_bytes + kept_bytes


@contextmanager
def casting_units(model_spec: ModelSpec, param_dtype: torch.dtype | None) -> Iterator[None]:
    """Context in which units get their inputs cast to ``param_dtype``."""

    def before(_module: nn.Module, args: Any, kwargs: Any) -> Any:
        return cast_arguments(args, kwargs, param_dtype)

    with ExitStack() as handles:
        for call in (call for unit in model_spec.units for call in unit.calls):
            module = model_spec.model.get_submodule(call.module_fqn)
            handle = module.register_forward_pre_hook(before, with_kwargs=True)
            handles.callback(handle.remove)
        yield


def logits_of(output: Any) -> Any:
    """The logits in a model's output: the output itself, or its field ``logits``."""
    return getattr(output, "logits", output)


def _drop_grad(param: Tensor) -> None:
    param.grad = None  # the runtime adds it to the unit's gradients and drops it too


class LiveBytes(OperationMode):
    """A mode that tracks the memory of everything that operations return, until it is freed."""

    def __init__(self) -> None:
        super().__init__()
        self.live_bytes = 0
        self.peak_bytes = 0
        self._known: dict[int, weakref.ref[Any]] = {}

    def run(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run the operation and count new storages."""
        before = {id(_storage(each)) for each in tensors_among((args, kwargs))}
        result = func(*args, **kwargs)
        for tensor in tensors_among(result):
            storage = _storage(tensor)
            if id(storage) not in before and id(storage) not in self._known:
                self._follow(storage)
        return result

    def _follow(self, storage: Any) -> None:
        key, nbytes = id(storage), storage.nbytes()

        def forget(_: Any) -> None:
            del self._known[key]
            self.live_bytes -= nbytes

        self._known[key] = weakref.ref(storage, forget)
        self.live_bytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)


def _storage(tensor: Tensor) -> Any:
    return tensor.untyped_storage()
