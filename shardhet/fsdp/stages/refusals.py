"""What a model in stages cannot do yet, by name."""

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from shardhet.fsdp.sharding.unit import UnitModules, find_units
from shardhet.records.plan import Plan
from shardhet.records.stages import Stage


def find_units_by(
    plan: Plan,
    module: nn.Module,
    wanted: Sequence[type[nn.Module] | str] | None,
    loss_fn: Any,
) -> list[UnitModules]:
    """As ``find_units``; raises ``ValueError`` naming what stages cannot have."""
    is_merged = plan.stages is None
    units = find_units(module, wanted, keeps_last=loss_fn is not None, merges_tied=is_merged)
    _check_not_compiled(module, units)
    if plan.stages is None:
        return units
    check_names(plan.stages, module)
    for what in beyond_stages(module, units):
        refuse(what, is_there=True)
    return units


def _check_not_compiled(module: nn.Module, units: Sequence[UnitModules]) -> None:
    """Raise ``ValueError`` if a module around units is compiled, and so what units wait for."""
    of_units = {each for unit in units for each in unit.modules}
    for fqn, each in module.named_modules():
        is_compiled = each._compiled_call_impl is not None or hasattr(each, "_orig_mod")
        if is_compiled and any(inner in of_units for inner in each.modules() if inner != each):
            raise ValueError(
                f"HetFSDP: {repr(fqn) if fqn else 'the model'} is compiled around its units, "
                "whose gathers and microbatches torch cannot compile. Compile what is inside: "
                "shardhet.training.compiling.compile_units(module, device) before wrapping it."
            )


def beyond_stages(module: nn.Module, units: Sequence[UnitModules]) -> list[str]:
    """What a module has that stages cannot have, before its units are intercepted.

    What surrounds units runs in stages that have only a part of its values.
    """
    modules = list(module.modules())
    of_units = {each for unit in units for each in unit.modules}
    inside = {inner for each in of_units for inner in each.modules()}
    found = {
        "batch norm outside of units": any(
            isinstance(each, _BatchNorm) for each in modules if each not in inside
        ),
        "a forward that was replaced outside of units": any(
            "forward" in vars(each) for each in modules if each not in inside
        ),
        "a module around a unit's forward that is compiled": any(
            each._compiled_call_impl is not None
            for each in modules
            if each not in inside or each in of_units
        ),
    }
    return [what for what, is_there in found.items() if is_there]


def check_names(stages: Sequence[Stage], module: nn.Module) -> None:
    """Raise ``ValueError`` if a stage names what the model does not have."""
    known = [fqn for fqn, _ in module.named_modules(remove_duplicate=False)]
    for i, stage in enumerate(stages):
        missing = [each for each in stage.units if not any(fnmatchcase(f, each) for f in known)]
        if missing:
            raise ValueError(
                f"plan: stages[{i}] names {', '.join(map(repr, missing))}, which the model "
                "does not have. Name units of this model, or give it a plan that was made for "
                "it."
            )


def check_hooks(module: nn.Module) -> None:
    """Raise ``ValueError`` if a module has a backward hook, which would run in one stage, or in
    two, on gradients that are divided by the number of tokens later.
    """
    for fqn, each in module.named_modules():
        is_there = bool(each._backward_hooks or each._backward_pre_hooks)
        refuse(f"a backward hook of module {fqn!r}", is_there=is_there)


def refuse(what: str, *, is_there: bool, where: str = "HetFSDP") -> None:
    """Raise ``ValueError`` if it is there."""
    if is_there:
        raise ValueError(
            f"{where}: {what}, which a plan with stages cannot have yet. Leave it out, or give "
            "a plan without stages."
        )
