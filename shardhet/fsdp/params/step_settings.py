"""Notices that ranks step with other settings than each other, at the next ``backward``.

A learning rate that follows the loss of one rank's samples (``ReduceLROnPlateau``) differs
between ranks, so that what a parameter's rows are trained with depends on who stores them.
The same holds for groups that are made by a rank's rows (``p.numel() > 1000``): parameters with
rows on all ranks are compared with the settings of their group.  Torch calls ``note`` before
every step of every optimizer.
"""

from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary
from zlib import crc32

from torch import Tensor, optim
from torch.optim.optimizer import register_optimizer_step_pre_hook

from shardhet.comm import devices
from shardhet.comm.peers import Peers
from shardhet.fsdp.params.optimizer_gate import rows_among

NO_STEP = 0  # a rank without rows need not step
SETTINGS, FINGERPRINTS = 2**31, 2**22  # how many are told apart
# Of the steps since ``backward``: a number for all, and the text of the last.
_steps: "WeakKeyDictionary[Peers, tuple[int, str]]" = WeakKeyDictionary()
_last_text: "WeakKeyDictionary[Peers, str]" = WeakKeyDictionary()


def note(optimizer: optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Keep the settings of a step until the next ``backward``."""
    rows_by_group = [rows_among(group["params"]) for group in optimizer.param_groups]
    owners = dict.fromkeys(each.group.peers for rows in rows_by_group for each in rows)
    texts = [
        ", ".join(
            f"{name}={number}"
            for name in optimizer.defaults
            if (number := _numbers_in(group.get(name)))
        )
        for group in (optimizer.param_groups if owners else ())
    ]
    text = "; ".join(dict.fromkeys(texts))
    for peers in owners:
        before, _ = _steps.get(peers, (0, ""))
        found = [
            (settings, sorted(each.fqn for each in rows if each.is_everywhere(peers)))
            for settings, rows in zip(texts, rows_by_group, strict=True)
        ]
        _steps[peers] = (crc32(repr(found).encode(), before), text)


register_optimizer_step_pre_hook(note)


def with_settings(fingerprint: int, peers: Peers) -> float:
    """A fingerprint, and the settings of the steps since this was called last, in one number.

    A float64 has 53 bits.
    """
    steps, _last_text[peers] = _steps.pop(peers, (None, "none"))
    settings = NO_STEP if steps is None else 1 + steps % (SETTINGS - 1)
    return float(fingerprint % FINGERPRINTS * SETTINGS + settings)


def check_settings_agree(rows: Sequence[Sequence[float]], peers: Peers) -> list[list[float]]:
    """The rows with the fingerprint alone; raises ``ValueError`` if settings differ."""
    parts = [divmod(int(row[0]), SETTINGS) for row in rows]
    if len({settings for _, settings in parts} - {NO_STEP}) > 1:
        raise ValueError(
            "optimizer.step: ranks have stepped with different settings or groups, or not "
            f"equally often; this one's last step had {_last_text[peers]}. Does the learning "
            "rate, or the group of a parameter, follow the loss of a rank's own samples "
            "(ReduceLROnPlateau), or how many rows it has (p.numel(), p.shape)? Let it follow "
            "a number of all ranks: what model.backward returns, p.norm(), p.square().mean(), "
            "sums by model.exchange, or sizes from before wrapping."
        )
    return [[float(found), *row[1:]] for (found, _), row in zip(parts, rows, strict=True)]


def _numbers_in(value: Any) -> str:
    """The numbers of a setting; none of one that may differ, such as ``fused``."""
    values = value if isinstance(value, list | tuple) else [value]
    numbers = [
        each.item()
        if isinstance(each, Tensor) and each.numel() == 1 and devices.is_on_host(each)
        else each
        for each in values
    ]
    are_numbers = all(
        isinstance(each, int | float) and not isinstance(each, bool) for each in numbers
    )
    return " ".join(f"{each:.6g}" for each in numbers) if are_numbers else ""
