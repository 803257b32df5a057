"""The processes that save or load one model together, and how they agree on failures."""

import os
from collections.abc import Callable
from copy import copy
from typing import Any, Self, TypeVar
from weakref import WeakKeyDictionary

from torch import nn

from shardhet.checkpoint.format.errors import CheckpointError, in_words
from shardhet.comm.channel import SECONDS_FOR_ALL_TO_COME, Channel
from shardhet.fsdp import HetFSDP

T = TypeVar("T")


def step_of(model: nn.Module, step: int | None) -> int:
    """``step``, or the steps that a HetFSDP has taken if it is not given."""
    if step is not None:
        return step
    if not isinstance(model, HetFSDP):
        raise ValueError("step: a plain module does not count steps. Pass step.")
    return model.step


def check_order(call: str, model: object, path: object) -> None:
    """Raise ``TypeError`` where arguments are in the place of others."""
    if not isinstance(model, nn.Module) or not isinstance(path, str | os.PathLike):
        raise TypeError(
            f"{call}: model is a {type(model).__name__} and path a {type(path).__name__}, but "
            f"a module and the path of a folder are needed. Write {call}(model, optimizer, "
            "path)."
        )


class Ranks:
    """The ranks of a HetFSDP in plan order; a plain module is one process by itself."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model if isinstance(model, HetFSDP) else None
        self._channel: Channel | None = None  # in place of the model's own
        self.rank = 0 if self._model is None else self._model.rank
        self.position = 0 if self._model is None else self._model.position
        self.world_size = 1 if self._model is None else self._model.plan.world_size

    @property
    def is_writer(self) -> bool:
        """Whether this is rank zero, which makes, completes and removes folders."""
        return self.rank == 0

    def exchange(self, value: Any, *, call: str, within_s: float | None = None) -> list[Any]:
        """Every rank's ``value`` (picklable), by position.  Collective."""
        if self._channel is not None:
            return self._channel.exchange_objects(value)
        if self._model is None:
            return [value]
        return self._model.exchange_objects(value, call=call, within_s=within_s)

    def meet(self, call: str) -> None:
        """Wait until all ranks have come to ``call``.  Collective.

        Raises ``TimeoutError`` if some do not, as when rank zero alone calls.
        """
        self.exchange(None, call=call, within_s=SECONDS_FOR_ALL_TO_COME)

    def agree(self, work: Callable[[], T], *, call: str) -> list[T]:
        """Do ``work`` on every rank; its results, by position.  Collective.

        Raises one ``CheckpointError`` on every rank if it fails on any.  The ranks have all
        taken part by then, so that they may go on together.
        """
        failure: Exception | None = None
        result: Any = None
        try:
            result = work()
        except Exception as error:
            failure = error
        message = None if failure is None else in_words(failure)
        outcomes = self.exchange((self.rank, message, result), call=call)
        self.raise_if_any([(rank, text) for rank, text, _ in outcomes], cause=failure)
        return [result for _, _, result in outcomes]

    def raise_if_any(
        self, messages: list[tuple[int, str | None]], *, cause: Exception | None = None
    ) -> None:
        """Raise the failure of the lowest rank that has one, given the messages of all."""
        failed = sorted((rank, text) for rank, text in messages if text is not None)
        if not failed:
            return
        rank, text = failed[0]
        is_shared = len({each for _, each in messages}) == 1
        named = text if is_shared else f"rank {rank}: {text}"
        others = [each for each, _ in failed[1:]]
        also = f" (ranks {others} failed too)" if others and not is_shared else ""
        raise CheckpointError(f"{named}{also}") from cause

    def side_channel(self, topic: str) -> Channel | None:
        """The channel among these ranks for threads of one topic; None for a plain module.

        It is made on first use.  Collective.
        """
        if self._model is None:
            return None
        made = _side_channels.setdefault(self._model, {})
        if topic not in made:
            made[topic] = self._model.side_channel()
        return made[topic]

    def over(self, channel: Channel) -> Self:
        """These ranks, for a thread that exchanges over ``channel``."""
        other = copy(self)
        other._channel = channel
        return other


_side_channels: WeakKeyDictionary[HetFSDP, dict[str, Channel]] = WeakKeyDictionary()
