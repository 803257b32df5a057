"""Builds units from a plain module and a plan: which unit owns which parameter, which rank
stores which rows.
"""

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.utils._pytree import tree_flatten, tree_unflatten

from shardhet.comm.channel import Channel, check_same_on_all_ranks
from shardhet.fsdp.microbatch.signature import hash_of
from shardhet.fsdp.sharding.comm import CommContext, FlatKind, meet_room
from shardhet.fsdp.sharding.flat import FlatTensor, ParamSlot
from shardhet.fsdp.sharding.materialize import RowSource, is_on_meta, materialize, move_buffers
from shardhet.fsdp.sharding.persistence import check_resident_units
from shardhet.fsdp.sharding.unit import Casts, FSDPUnit, UnitModule, UnitModules
from shardhet.records.layout import FlatLayout, cut_by_shares
from shardhet.records.plan import EVERY_UNIT, Plan, PlannedUnit, is_matched
from shardhet.records.stages import stage_by_unit

ROOT_FQN = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedPrecision:
    """Dtypes of gathered floating-point parameters and of gradients while they are summed."""

    param_dtype: torch.dtype | None = None  # None: as stored
    reduce_dtype: torch.dtype | None = None  # None: as stored

    def __post_init__(self) -> None:
        if self.reduce_dtype is torch.float16:
            raise ValueError(
                "reduce_dtype: torch.float16 but sums of gradients would overflow in it. Use "
                "torch.float32."
            )


@dataclass(frozen=True, slots=True)
class UnitDraft:
    """A unit that is not built yet: its modules and the parameters that it owns."""

    fqn: str
    modules: UnitModules
    slots: tuple[ParamSlot, ...]
    inner: tuple[nn.Module, ...]  # all its modules, including nested ones

    def groups(self) -> list[list[ParamSlot]]:
        """The parameters grouped by trainability and dtype, one group per flat tensor."""

        def key(slot: ParamSlot) -> tuple[bool, str]:
            return (not slot.is_trainable, str(slot.current.dtype))

        return [list(group) for _, group in groupby(sorted(self.slots, key=key), key=key)]


def build_units(
    module: nn.Module,
    modules_of_units: Sequence[UnitModules],
    plan: Plan,
    *,
    comm: CommContext,
    root_comm: CommContext,
    control: Channel,
    precision: MixedPrecision,
    seed: int,
    init_fn: Callable[[nn.Module], None] | None,
    row_source: RowSource | None = None,
) -> list[FSDPUnit]:
    """The units, the root last; every rank keeps its rows and frees the rest.  Collective.

    ``root_comm`` is that of the root, which ranks of all stages gather together.
    """
    drafts = draft_units(module, modules_of_units)
    check_same_on_all_ranks(_describe(drafts), what="model", channel=control)
    _check_plan_is_for(plan, drafts, is_told=control.position == 0)
    groups = {draft.fqn: draft.groups() for draft in drafts}
    every = [group for of_unit in groups.values() for group in of_unit]
    whole = [FlatLayout.of_shapes([slot.shape for slot in group]) for group in every]
    layouts = cut_by_plan(whole, {fqn: len(each) for fqn, each in groups.items()}, plan)
    cut = iter(layouts)
    kinds = [FlatKind(group[0].current.dtype, group[0].is_trainable) for group in every]
    root_comm.host_room = meet_room(plan, layouts, kinds, nodes=comm.nodes, control=control)
    units, hashes, was_on_meta = [], {}, is_on_meta(module)
    if not was_on_meta:
        hashes = _hashes((*module.named_parameters(), *module.named_buffers()))
        _check_same_values(hashes, control)
    for draft in drafts:
        of_unit = root_comm if draft.fqn == ROOT_FQN else comm
        materialize(
            draft.slots,
            draft.inner,
            draft.fqn,
            seed=seed,
            init_fn=init_fn,
            row_source=row_source,
        )
        if was_on_meta:
            held = [(slot.fqn, slot.current) for slot in draft.slots]
            hashes |= _hashes((fqn, param) for fqn, param in held if not param.is_meta)
        flats = []
        for group in groups[draft.fqn]:
            flat = FlatTensor(
                group,
                next(cut),
                comm=of_unit,
                orig_dtype=group[0].current.dtype,
                param_dtype=precision.param_dtype,
                reduce_dtype=precision.reduce_dtype,
                on_host=plan.ranks[control.position].optimizer_on_host,
                unit_fqn=draft.fqn,
            )
            for i, slot in enumerate(group):
                if slot.current.is_meta and row_source is not None:
                    rows = row_source.read_rows(slot.fqn, flat.rows[i])
                    flat.local_shards(flat.flat_shard)[i].copy_(rows)
                else:
                    flat.store_rows(i, slot.current)
                flat.sharded_params[i].__dict__.update(slot.current.__dict__)
            flats.append(flat)
            flat.show_shards()  # frees the whole parameters
        unit_modules = [
            unit_module(fqn, each, precision.param_dtype)
            for fqn, each in zip(draft.modules.fqns, draft.modules.modules, strict=True)
        ]
        units.append(FSDPUnit(draft.fqn, unit_modules, flats, comm=of_unit))
    if was_on_meta:
        _check_same_values(hashes | _hashes(module.named_buffers()), control)
    move_buffers(list(module.modules()), comm.device)
    return units


def cut_by_plan(
    layouts: Sequence[FlatLayout], number_by_fqn: Mapping[str, int], plan: Plan
) -> list[FlatLayout]:
    """Every unit's layouts cut over the devices of its stage, or over all, as the root's are.

    ``number_by_fqn`` says how many a unit has, in their order; the root is the last.
    """
    whole = [
        is_matched(fqn, plan.whole_matrices or ())
        for fqn, n in number_by_fqn.items()
        for _ in range(n)
    ]
    if plan.stages is None:
        owned = [rank.owned or () for rank in plan.ranks]
        return list(cut_by_shares(layouts, plan.state_shares, whole, owned))
    group_by_fqn = stage_by_unit(plan.stages, [*number_by_fqn][:-1])
    group_by_fqn[ROOT_FQN] = len(plan.groups)
    of_layouts = [group_by_fqn[fqn] for fqn, n in number_by_fqn.items() for _ in range(n)]
    positions: list[Sequence[int]] = [*plan.groups, range(plan.world_size)]
    cut: dict[int, FlatLayout] = {}
    for group, devices in enumerate(positions):
        shares = [x if i in devices else 0.0 for i, x in enumerate(plan.state_shares)]
        mine = [i for i, its in enumerate(of_layouts) if its == group]
        parts = [share / sum(shares) for share in shares]
        cut_of_group = cut_by_shares(
            [layouts[i] for i in mine],
            parts,
            [whole[i] for i in mine],
            [(rank.owned or ()) if i in devices else () for i, rank in enumerate(plan.ranks)]
            if group < len(plan.groups)
            else (),
        )
        cut |= zip(mine, cut_of_group, strict=True)
    return [cut[i] for i in range(len(layouts))]


def unit_module(fqn: str, module: nn.Module, param_dtype: torch.dtype | None) -> UnitModule:
    """The record of a module whose calls the runtime intercepts."""
    is_trainable = any(param.requires_grad for param in module.parameters())
    return UnitModule(fqn, module, casting(module.forward, param_dtype, fqn=fqn), is_trainable)


def find_pieces(
    module: nn.Module, units: Sequence[UnitModules], param_dtype: torch.dtype | None
) -> list[UnitModule]:
    """Modules outside of units that nevertheless have to run microbatch by microbatch.

    These are dropout, which is seeded per microbatch, and batch norm, whose statistics are
    those of a microbatch.
    """
    inside = {inner for unit in units for each in unit.modules for inner in each.modules()}
    return [
        unit_module(fqn, each, param_dtype)
        for fqn, each in module.named_modules()
        if isinstance(each, _DropoutNd | _BatchNorm) and each not in inside
    ]


def planned_units(units: Sequence[FSDPUnit]) -> tuple[PlannedUnit, ...]:
    """The description of the model that a plan contains."""
    return tuple(PlannedUnit(fqn=unit.fqn, numel=unit.numel) for unit in units)


def draft_units(module: nn.Module, modules_of_units: Sequence[UnitModules]) -> list[UnitDraft]:
    """The units with their parameters, the root last."""
    unit_by_module = {
        inner: i
        for i, unit in enumerate(modules_of_units)
        for each in unit.modules
        for inner in each.modules()
    }
    places: dict[nn.Parameter, list[tuple[str, nn.Module, str]]] = {}
    for prefix, inner in module.named_modules(remove_duplicate=False):
        for name, param in inner._parameters.items():
            if param is not None:
                fqn = f"{prefix}.{name}" if prefix else name
                places.setdefault(param, []).append((fqn, inner, name))
    root = len(modules_of_units)
    slots: list[list[ParamSlot]] = [[] for _ in range(root + 1)]
    for param, found in places.items():
        if param.is_complex():
            raise ValueError(
                f"{found[0][0]}: it is {param.dtype}, but rows, reductions and clipping are of "
                "real numbers. Store torch.view_as_real(value) as the parameter, and use "
                "torch.view_as_complex(param) in forward."
            )
        owners = {unit_by_module.get(inner, root) for _, inner, _ in found}
        slot = ParamSlot(
            fqns=tuple(fqn for fqn, _, _ in found),
            owners=tuple(dict.fromkeys((inner, name) for _, inner, name in found)),
            shape=param.shape,
            is_trainable=param.requires_grad,
        )
        # Units that share it are one unit, or of several stages, which all see the root's.
        slots[root if root in owners or len(owners) > 1 else owners.pop()].append(slot)
    drafts = []
    for i, unit in enumerate(modules_of_units):
        inner = tuple(m for m, owner in unit_by_module.items() if owner == i)
        drafts.append(UnitDraft(unit.fqns[0], unit, tuple(slots[i]), inner))
    of_root = tuple(m for m in module.modules() if m not in unit_by_module)
    return [*drafts, UnitDraft(ROOT_FQN, UnitModules((), ()), tuple(slots[root]), of_root)]


def _describe(drafts: Sequence[UnitDraft]) -> list[Any]:
    return [
        [slot.fqn, list(slot.shape), str(slot.current.dtype), slot.is_trainable, draft.fqn]
        for draft in drafts
        for slot in draft.slots
    ]


def casting(
    forward: Callable[..., Any], param_dtype: torch.dtype | None, *, fqn: str = ""
) -> Callable[..., Any]:
    """``forward`` with its floating-point inputs cast to the dtype of gathered parameters.

    Raises ``ValueError`` if it changes a list or dict of arguments, of which it gets a copy.
    """
    if param_dtype is None:
        return forward

    def cast(tensor: Tensor) -> Tensor:
        casts = tensor.is_floating_point() and not Casts.are_off
        return tensor.to(param_dtype) if casts else tensor

    @wraps(forward)
    def cast_and_forward(*args: Any, **kwargs: Any) -> Any:
        leaves, spec = tree_flatten((args, kwargs))
        leaves = [cast(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        args, kwargs = tree_unflatten(leaves, spec)
        output = forward(*args, **kwargs)
        after, spec_after = tree_flatten((args, kwargs))
        if spec_after != spec or any(a is not b for a, b in zip(after, leaves, strict=True)):
            raise ValueError(changes_arguments(fqn, "a list or dict"))
        return output

    return cast_and_forward


def cast_arguments(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], param_dtype: torch.dtype | None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with those in floating point cast to the dtype of gathered parameters."""
    return casting(lambda *args, **kwargs: (args, kwargs), param_dtype)(*args, **kwargs)


def changes_arguments(unit_fqn: str, what: str) -> str:
    return (
        f"unit {unit_fqn!r} changes {what} that it is passed, which every microbatch and every "
        "recomputation would change again. Switch that off (use_cache=False for a KV cache), "
        "or return the new values instead."
    )


def _hashes(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Any]:
    return {fqn: hash_of(tensor) for fqn, tensor in tensors}


def _check_same_values(hashes: dict[str, Any], control: Channel) -> None:
    """Raise ``ValueError`` on every rank, naming a parameter or buffer, if any differ."""
    check_same_on_all_ranks(
        hashes,
        what="initial values of the model",
        channel=control,
        advice="(They are hashes.) Seed all ranks alike before the model is made "
        "(torch.manual_seed(0)), or load the same weights on all.",
    )


def _warn_of_patterns(plan: Plan, fqns: Sequence[str], inside: Sequence[str]) -> None:
    """Warn of patterns of units that name none: a step takes more memory or time than meant."""
    patterns = {
        "recomputed_units": {each for rank in plan.ranks for each in rank.recomputed_units},
        "inputs_on_host": {each for rank in plan.ranks for each in rank.inputs_on_host},
        "two_level_units": set(plan.two_level_units),
        "whole_matrices": set(plan.whole_matrices or ()),
        "tiled_units": {each for rank in plan.ranks for each in rank.tiled_units},
    }
    for key, of_key in patterns.items():
        may_be = (*fqns, ROOT_FQN, *(inside if key == "tiled_units" else ()))
        unknown = [
            each
            for each in sorted(of_key.difference(EVERY_UNIT))
            if not any(is_matched(fqn, (each,)) for fqn in may_be)
        ]
        if unknown:
            named = ", ".join(filter(None, fqns[:3]))
            warnings.warn(
                f"plan: {key} has {unknown} but no unit is named so. The model has {len(fqns)} "
                f"units: {named}, ...",
                stacklevel=6,
            )


def _check_plan_is_for(plan: Plan, drafts: Sequence[UnitDraft], *, is_told: bool) -> None:
    fqns = [fqn for draft in drafts for fqn in draft.modules.fqns]
    if is_told:
        inside = [
            f"{fqn}.{name}"
            for draft in drafts
            for fqn, module in zip(draft.modules.fqns, draft.modules.modules, strict=True)
            for name, _ in module.named_modules()
        ]
        _warn_of_patterns(plan, fqns, inside)
    for i, rank in enumerate(plan.ranks):
        rank.check_inputs_on_host(i, fqns)
    if plan.resident_units:
        frozen = [e.fqn for e in drafts if any(not slot.is_trainable for slot in e.slots)]
        check_resident_units(plan, frozen, [each.fqn for each in drafts])
    if not plan.units:
        return  # written by hand, for any model
    planned = {unit.fqn: unit.numel for unit in plan.units if unit.numel}
    numels = {draft.fqn: sum(slot.shape.numel() for slot in draft.slots) for draft in drafts}
    found = {fqn: numel for fqn, numel in numels.items() if numel}  # the root may be empty
    if planned == found:
        return
    differing = [
        f"{fqn or '(root)'}: planned {planned.get(fqn, 'absent')}, found "
        f"{found.get(fqn, 'absent')}"
        for fqn in {**planned, **found}
        if planned.get(fqn) != found.get(fqn)
    ]
    raise ValueError(
        f"The plan was made for another model: elements per unit differ in "
        f"{'; '.join(differing[:8])}. Give HetFSDP the model, units and loss_fn that it was "
        "made with, or run the planner on this model."
    )
