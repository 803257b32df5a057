"""``describe``: count a model's FLOPs and bytes without allocating it; takes seconds.

``plan_for`` goes on from there to a plan for hardware that need not be at hand.
"""

import logging
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shardhet.comm.members import rehearsed
from shardhet.comm.store import from_first_rank
from shardhet.fsdp.microbatch.loss import loss_pair
from shardhet.fsdp.microbatch.signature import tokens_of
from shardhet.fsdp.options import check_dtype
from shardhet.fsdp.tokens.tiles import Tiles
from shardhet.pricing.derive import derive_profile
from shardhet.pricing.scenario import Scenario
from shardhet.profiler.batch import ExampleBatch, LossFn, TrainedModel
from shardhet.profiler.counting import Counts, count_loss_outside, count_unit, steady
from shardhet.profiler.here import cluster_here, said_of
from shardhet.profiler.model_spec import CPU, ModelSpec, UnitSpec, pass_on, trace_model
from shardhet.records.cluster import Cluster
from shardhet.records.kinds import described_cluster
from shardhet.records.plan import EVERY_UNIT, Plan, RankPlan
from shardhet.records.profiles import Profile
from shardhet.records.units import MOST_UNTILED, TokenWise
from shardhet.records.workload import Unit, UnitKind, Workload

Example = ExampleBatch | Mapping[str, Any] | Sequence[Any] | Tensor
ADAM_MOMENTS = 2
logger = logging.getLogger(__name__)

# The cost of a sample is the difference between these two batch sizes.  They are so large that
# gradients of parameters, which do not grow with the batch, never set the peak memory.
SIZES = (1024, 1025)
NUM_TILES = 4  # in which long samples are counted, too


def describe(
    model: nn.Module,
    batch: Example,
    *,
    units: Sequence[type[nn.Module] | str] | None = None,
    loss_fn: LossFn | None = None,
    param_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    tokens_per_sample: int | None = None,
    num_moments: int = ADAM_MOMENTS,
    device: torch.device = CPU,
) -> Workload:
    """The workload of training ``model``, with the units that HetFSDP would make of it.

    ``model`` may be on the meta device; nothing is allocated or computed.  ``units``,
    ``loss_fn``, ``param_dtype`` and ``reduce_dtype`` are those of HetFSDP.

    Where the model goes on computing with the output of its last unit, the loss follows the
    model, and all logits are counted.

    ``batch`` is an example of the model's inputs, as ``plan_for`` takes it.
    ``tokens_per_sample`` is for throughput;
    None means the length of the first tensor's rows if it holds indices, else 1.
    ``num_moments`` is the number of tensors that the optimizer keeps per parameter.
    ``device`` says whose kernels are counted; fused attention keeps less than plain attention.

    FLOPs are those of matrix products, convolutions and attention (two per multiplication
    and addition).  Bytes are per sample: only what grows with the batch is counted, so a
    table that all microbatches share is not included.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: {model!r} is no module. Give an nn.Module.")
    check_dtype("param_dtype", param_dtype)
    check_dtype("reduce_dtype", reduce_dtype)
    trained = TrainedModel(
        module=model,
        batch=as_example(batch),
        units=units,
        loss_fn=loss_fn,
        param_dtype=param_dtype,
        reduce_dtype=reduce_dtype,
    )
    model_spec = trace_model(trained, device)
    if loss_fn is None and not isinstance(model_spec.output, Mapping):  # as HetTrainer's models
        try:
            loss_pair(model_spec.output)
        except TypeError as error:
            warnings.warn(f"describe: {error}", stacklevel=2)
    return describe_spec(
        model_spec,
        trained,
        tokens_per_sample=tokens_per_sample,
        num_moments=num_moments,
        device=device,
    )


def plan_for(
    model: nn.Module,
    batch: Example,
    cluster: Cluster | str | Path | None = None,
    *,
    global_batch_size: int,
    units: Sequence[type[nn.Module] | str] | None = None,
    loss_fn: LossFn | None = None,
    param_dtype: torch.dtype | None = None,
    num_moments: int = ADAM_MOMENTS,
    profile: Profile | None = None,
) -> Plan:
    """The plan to prefer for training ``model`` on ``cluster``, which need not be at hand.

    ``cluster`` is a ``Cluster``, the path of a description, or the cards of each host, as
    ``4090+A6000 | 3090x2``.  None: this host's cards or, where ranks were started, theirs;
    those of ``shardhet rehearse``, or its plan.

        with torch.device("meta"):
            model = MyModel()
        plan = plan_for(model, (images, labels), "my_cluster.yaml", global_batch_size=64)

    ``batch`` is an example of the model's inputs: a tuple of positional arguments, a mapping of
    keyword arguments, or an ``ExampleBatch``, which also holds what ``loss_fn`` needs.
    ``units``, ``loss_fn`` and ``param_dtype`` are those of HetFSDP.  The optimizer keeps
    ``num_moments`` tensors per parameter, as for ``describe``.  Times follow from the
    devices' specifications unless a measured ``profile`` is given.  The plan is that of
    ``find_plan``: of those within 0.5 % of the fastest, the one that a person would choose.
    Raises ``PlanError`` with the nearest miss if nothing fits.

    Rank 0 alone plans, and logs its plan; the others wait for it.  A process plans once for the
    same inputs.
    """
    from shardhet.planner import find_plan  # imports numpy

    if cluster is None and (cluster := rehearsed()) and Path(cluster).suffix == ".json":
        return _rehearsed_plan(cluster, global_batch_size)
    is_here = cluster is None
    if cluster is None:
        cluster = cluster_here()
    elif not isinstance(cluster, Cluster):
        cluster = Cluster.named(described_cluster(cluster))
    if profile is None:
        cluster.check_described()
    workload = describe(
        model,
        batch,
        units=units,
        loss_fn=loss_fn,
        param_dtype=param_dtype,
        num_moments=num_moments,
    )
    _check_can_be_planned(model, workload)
    scenario = Scenario(cluster, workload, profile or derive_profile(cluster, workload))

    def make() -> str:
        for line in ([said_of(cluster)] if is_here else []) + [cluster.assumed]:
            if line:
                logger.warning("plan_for: %s", line)
        logger.info("planning for %d devices", cluster.world_size)
        plan = scenario.named(find_plan(scenario, global_batch_size=global_batch_size))
        logger.info("%s", plan)
        return plan.to_json()

    parts = [each.to_json() for each in (cluster, workload, scenario.profile)]
    key = sha256("".join([*parts, str(global_batch_size)]).encode()).hexdigest()
    if key not in _plans:
        _plans[key] = Plan.from_json(from_first_rank(key, make, what="the plan"))
    return _plans[key]


def _rehearsed_plan(path: str, global_batch_size: int) -> Plan:
    plan = Plan.load(path)
    if plan.global_batch_size != global_batch_size:
        raise ValueError(
            f"{path}: a step has {plan.global_batch_size} samples, but {global_batch_size} are "
            "asked for. Rehearse with a plan for as many, or with --cards."
        )
    return plan


_plans: dict[str, Plan] = {}  # by a digest of what they were made for


def _check_can_be_planned(model: nn.Module, workload: Workload) -> None:
    if not any(param.requires_grad for param in model.parameters()):
        raise ValueError("model: all its parameters are frozen. There is nothing to train.")
    if not any(unit.fqn for unit in workload.units):
        raise ValueError(
            "units: the model has none, so that nothing of it is priced by itself. Name parts "
            "of it, or put it into an nn.Sequential."
        )


def as_example(batch: Example) -> ExampleBatch:
    """The inputs of a model as an example batch."""
    if batch is None or isinstance(batch, str):
        raise TypeError(
            f"batch: {batch!r} is no example of the model's inputs. Give a tuple of positional "
            "arguments, or a dict of keyword arguments."
        )
    if isinstance(batch, ExampleBatch):
        return batch
    if isinstance(batch, Mapping):
        return ExampleBatch(kwargs=batch)
    return ExampleBatch(args=(batch,) if isinstance(batch, Tensor) else tuple(batch))


def describe_spec(
    model_spec: ModelSpec,
    model: TrainedModel,
    *,
    tokens_per_sample: int | None = None,
    num_moments: int = ADAM_MOMENTS,
    device: torch.device = CPU,
) -> Workload:
    """The workload of a model whose units are known."""
    kinds = []
    stored = orig_dtype(model.module)
    in_flight = model.param_dtype or stored
    in_head = pass_on if model_spec.goes_on else model.loss_fn
    num_tokens = tokens_per_sample or tokens_of(model.batch.tensors)
    tiles = _tiles_of(num_tokens, device)
    for name, unit in model_spec.unit_by_kind.items():
        counted = partial(
            count_unit,
            model_spec,
            unit,
            param_dtype=model.param_dtype,
            loss_fn=in_head,
            device=device,
        )
        smaller, larger = [steady(partial(counted, num_samples=size)) for size in SIZES]
        kind = _kind(name, unit, smaller, larger)
        if tiles is not None:
            in_tiles = [
                steady(partial(counted, num_samples=size, tiles=tiles)) for size in SIZES
            ]
            kind = replace(kind, token_wise=_token_wise(kind, _kind(name, unit, *in_tiles)))
        if model_spec.goes_on and any(call.is_head for call in unit.calls):
            assert model.loss_fn is not None
            outside = partial(
                count_loss_outside,
                model_spec,
                param_dtype=model.param_dtype,
                loss_fn=model.loss_fn,
                device=device,
            )
            few, more = [steady(partial(outside, model.batch.of_size(size))) for size in SIZES]
            # Like a unit's inputs, it is kept for the whole rank batch even with recomputation.
            with_grad = kind.input_grad_bytes
            kind = replace(
                kind,
                input_bytes=kind.input_bytes + more - few,
                input_grad_bytes=kind.input_bytes if with_grad is None else with_grad,
            )
        kinds.append(
            replace(
                kind,
                gathered_bytes=_gathered_bytes(unit, in_flight),
                frozen_as_stored=_is_frozen_as_stored(unit, model.module),
            )
        )
    order = [unit.kind for unit in model_spec.units]
    return Workload(
        kinds=tuple(sorted(kinds, key=lambda kind: order.index(kind.name))),
        units=tuple(Unit(fqn=unit.fqn, kind=unit.kind) for unit in model_spec.units),
        tokens_per_sample=num_tokens,
        param_dtype=_name(in_flight),
        reduce_dtype=_name(model.reduce_dtype or trained_dtype(model.module)),
        state_bytes_per_element=_state_bytes_per_element(model_spec, num_moments),
        num_moments=num_moments,
    )


def _tiles_of(num_tokens: int, device: torch.device) -> Tiles | None:
    """All units in ``NUM_TILES``, if samples are so long that plans may have tiles."""
    if num_tokens < MOST_UNTILED:
        return None
    plan = RankPlan(
        microbatch_sizes=(),
        state_share=0.0,
        tiled_units=EVERY_UNIT,
        tokens_per_tile=-(-num_tokens // NUM_TILES),
    )
    return Tiles(plan, device)


def _token_wise(whole: UnitKind, tiled: UnitKind) -> TokenWise | None:
    """What of a kind is computed token by token, given its figures in ``NUM_TILES`` too."""
    activation_bytes = whole.activation_bytes - tiled.activation_bytes
    if activation_bytes <= 0:
        return None
    of_tile = (activation_bytes + whole.transient_bytes) // NUM_TILES
    return TokenWise(
        forward_flops=max(0, tiled.backward_flops - whole.backward_flops),
        activation_bytes=activation_bytes,
        rest_bytes=max(0, tiled.transient_bytes - of_tile),
    )


def _state_bytes_per_element(model_spec: ModelSpec, num_moments: int) -> float:
    """Mean bytes of parameter, gradient and moments; a frozen parameter has only itself."""
    slots = [slot for unit in model_spec.units for slot in unit.draft.slots]
    numel = sum(slot.shape.numel() for slot in slots)
    nbytes = sum(
        slot.shape.numel()
        * model_spec.stored_itemsizes[slot.fqn]
        * (1 + (1 + num_moments) * slot.is_trainable)
        for slot in slots
    )
    return nbytes / max(1, numel)


def _gathered_bytes(unit: UnitSpec, in_flight: torch.dtype) -> int | None:
    """Bytes of the gathered parameters, if not all of them are in the dtype ``in_flight``."""
    dtypes = [
        in_flight if slot.current.is_floating_point() else slot.current.dtype
        for slot in unit.draft.slots
    ]
    if all(dtype is in_flight for dtype in dtypes):
        return None
    return sum(
        slot.shape.numel() * dtype.itemsize
        for slot, dtype in zip(unit.draft.slots, dtypes, strict=True)
    )


def _is_frozen_as_stored(unit: UnitSpec, module: nn.Module) -> bool:
    """Whether frozen parameters, of which there are some, are gathered in their own dtype."""
    stored = dict(module.named_parameters(remove_duplicate=False))
    frozen = [slot for slot in unit.draft.slots if not slot.is_trainable]
    return bool(frozen) and all(stored[slot.fqn].dtype is slot.current.dtype for slot in frozen)


def orig_dtype(model: nn.Module) -> torch.dtype:
    """The dtype in which most of the model's parameters are stored."""
    return _most_common_dtype(model.parameters())


def trained_dtype(model: nn.Module) -> torch.dtype:
    """The dtype in which most of what is trained is stored, or of all if nothing is."""
    trained = [each for each in model.parameters() if each.requires_grad]
    return _most_common_dtype(trained or model.parameters())


def _most_common_dtype(params: Iterable[nn.Parameter]) -> torch.dtype:
    numels: dict[torch.dtype, int] = {}
    for param in params:
        if param.is_floating_point():
            numels[param.dtype] = numels.get(param.dtype, 0) + param.numel()
    if not numels:
        raise ValueError(
            "model: it has no floating-point parameters. There is nothing to train."
        )
    return max(numels, key=numels.__getitem__)


def _kind(name: str, unit: UnitSpec, smaller: Counts, larger: Counts) -> UnitKind:
    def per_sample(figure: str) -> int:
        grown: int = getattr(larger, figure) - getattr(smaller, figure)
        return max(0, grown)

    graph_bytes = per_sample("graph_bytes")
    input_bytes, with_grad = per_sample("input_bytes"), per_sample("input_grad_bytes")
    return UnitKind(
        name=name,
        param_shapes=tuple(tuple(slot.shape) for slot in unit.draft.slots),
        forward_flops=per_sample("forward_flops"),
        backward_flops=per_sample("backward_flops"),
        input_bytes=input_bytes,
        input_grad_bytes=None if with_grad == input_bytes else with_grad,
        activation_bytes=graph_bytes,
        transient_bytes=max(0, per_sample("peak_bytes") - graph_bytes),
        frozen_params=tuple(
            i for i, slot in enumerate(unit.draft.slots) if not slot.is_trainable
        ),
        kv_bytes=per_sample("kv_bytes"),
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
