"""State besides model and optimizer that a run needs to resume exactly.

The batch of a step, its dropout and its learning rate are functions of the step, so there is
little: what they are functions *of* is compared, and random states are put back.
"""

import logging
import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from shardhet.comm import devices

logger = logging.getLogger(__name__)

REMEDIES = {  # if it is not what it was
    "global_batch_size": "Give a plan with the same global batch",
    "data_digest": "Train on the data that it was trained on",
    "seed": "Set the same seed",
}
GRANTED = {"seq_len": "tokens of a sample", "schedule": "the learning rate"}


def check_goes_on(
    state: Mapping[str, Any] | None, resume_facts: Mapping[str, Any], *, source: str
) -> None:
    """Raise ``ValueError`` if the next batches would not be those that come next.

    ``resume_facts`` has what they depend on besides the step, by the names of ``REMEDIES`` and
    ``GRANTED``.  Another learning rate schedule, or samples of another length, are wishes that
    are granted, with a warning.
    """
    if state is None or "data_digest" not in state:
        raise ValueError(
            f"resume: {source} does not say which data it has seen, so it was not written by "
            "shardhet train. Load it in a program of your own, or start a new run."
        )
    check_unchanged(state, resume_facts, REMEDIES, source=f"resume: {source}")
    for name, what in GRANTED.items():
        if state.get(name, resume_facts[name]) != resume_facts[name]:
            logger.warning("%s: %s, and %s from now on", what, state[name], resume_facts[name])


def check_unchanged(
    saved: Mapping[str, Any],
    here: Mapping[str, Any],
    remedies: Mapping[str, str],
    *,
    source: str,
) -> None:
    """Raise ``ValueError`` for the first name of ``remedies`` that is another ``here``."""
    for name, remedy in remedies.items():
        if saved.get(name) != here[name]:
            raise ValueError(
                f"{source} was written with {name} {saved.get(name)!r} but here it is "
                f"{here[name]!r}, so the run would not continue as before. {remedy}."
            )


def options_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """The options of each group, but for the learning rate, which a schedule sets."""
    names = [name for name in optimizer.defaults if name != "lr"]
    return [{name: group[name] for name in names} for group in optimizer.param_groups]


def put_options(
    optimizer: torch.optim.Optimizer, options: Sequence[Mapping[str, Any]], *, source: str
) -> None:
    """Give groups the options of this run in place of those that came with ``source``.

    One that has changed is a wish that is granted, with a warning.
    """
    changed: dict[str, str] = {}
    for group, here in zip(optimizer.param_groups, options, strict=True):
        for name, value in here.items():
            if group[name] != value:
                changed[name] = f"{name} was {group[name]} and is {value} from now on"
        group.update(here)
    if changed:
        logger.warning("the optimizer of %s: %s", source, "; ".join(changed.values()))


def random_states(device: torch.device) -> dict[str, Any]:
    """The states of this process's global generators."""
    of_numpy: Any = np.random.get_state(legacy=True)  # noqa: NPY002
    name, keys, *rest = of_numpy
    states: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": (str(name), torch.from_numpy(keys.astype(np.int64)), *rest),
        "torch": torch.get_rng_state(),
    }
    if not devices.is_on_host(device):
        states[device.type] = devices.module_of(device).get_rng_state(device)
    return states


def restore_random_states(states: Mapping[str, Any], device: torch.device) -> None:
    """The inverse of ``random_states``; an accelerator's only where there is one again."""
    random.setstate(states["python"])
    name, keys, *rest = states["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))  # noqa: NPY002
    torch.set_rng_state(states["torch"])
    if not devices.is_on_host(device) and device.type in states:
        devices.module_of(device).set_rng_state(states[device.type], device)
