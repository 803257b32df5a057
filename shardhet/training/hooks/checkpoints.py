"""SaveCheckpoints: when the state of a training is written, and what it goes on from."""

import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from shardhet.checkpoint import CheckpointError, Checkpoints, Replicas, Resumed
from shardhet.fsdp import HetFSDP
from shardhet.training.hooks.hooks import Hook, Hooks
from shardhet.training.resuming import (
    options_of,
    put_options,
    random_states,
    restore_random_states,
)


@runtime_checkable
class Stateful(Protocol):
    """A loader, a scheduler, or what else a training goes on with."""

    def state_dict(self) -> Any:
        """What to keep; the same on all ranks."""

    def load_state_dict(self, state: Any, /) -> Any:
        """The inverse of ``state_dict``."""


class Timer:
    """Says that so many seconds have passed, at the same step on all ranks.

    They agree on rank zero's clock at few steps: the next one is half-way to where the time is
    over if steps take as long as before.
    """

    def __init__(self, model: HetFSDP, limit_s: float) -> None:
        self._model = model
        self._limit_s = limit_s
        self._answer = model.step, False  # of the last step that was asked about
        self.restart(model.step)

    def restart(self, step: int) -> None:
        """Count from here."""
        self._began_s, self._began_step, self._next_look = time.monotonic(), step, step + 1

    def is_due(self, step: int) -> bool:
        """Whether the time has passed.  Collective."""
        if self._limit_s and step != self._answer[0]:
            self._answer = step, step >= self._next_look and self._look(step)
        return self._answer[1]

    def _look(self, step: int) -> bool:
        passed_s = self._model.exchange_objects(time.monotonic() - self._began_s)[0]
        steps_left = (self._limit_s / max(passed_s, 1e-9) - 1) * (step - self._began_step)
        self._next_look = step + max(1, int(steps_left / 2))
        return passed_s >= self._limit_s


class SaveCheckpoints(Hook):
    """Writes checkpoints while a model trains, and goes on from the newest whole one.

        SaveCheckpoints("checkpoints", every=100, state={"loader": loader})

    They are loaded when the hooks begin, under any plan with the same global batch.  One is
    written when the run is told to end (``StopOnSignal``), too.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        every: int = 0,
        every_minutes: float = 30.0,
        keep_last: int | None = 2,
        keep_every: int | None = None,
        in_background: bool = False,
        state: Mapping[str, Stateful] | None = None,
        replicas: Replicas | None = None,
        replicate_every: int = 1,
    ) -> None:
        """Of the model, its optimizers, random states, and ``state``.

        Args:
            folder: as for ``shardhet.checkpoint.Checkpoints``; all ranks reach it.
            every: so many steps; 0 goes by ``every_minutes``.
            every_minutes: 0 for none, where there are none by steps.
            keep_last: so many of the newest stay; None: all.
            keep_every: steps whose multiples stay, too.
            in_background: go on while what was copied to host memory is written.
            state: the loader, schedulers and so on, by name, which are loaded as well.
            replicas: copies on the nodes themselves, which are loaded first.
            replicate_every: steps between two of them.
        """
        self.checkpoints = Checkpoints(folder, keep_last=keep_last, keep_every=keep_every)
        self.replicas = replicas
        self.is_rolled_back_to = False  # so there has to be one before the first step
        self._every, self._every_s = every, 60 * every_minutes
        self._in_background = in_background
        self._replicate_every = 0 if replicas is None else replicate_every
        self._state = dict(state or {})
        self.last_step: int | None = None  # if it is known
        self._last_saved: int | None = None
        self._waited_s = 0.0  # for the last replica, in this step

    def begin(self, run: Hooks) -> None:
        self.follow(run)
        found = self.load_own()
        if found is not None:
            run.say(f"goes on after step {found.step}, from {found.came_from or found.path}")
            self.put(found)
        self.forget_replicas()

    def follow(self, run: Hooks) -> None:
        """Save and load the model of ``run``, which has loaded nothing yet."""
        self.run, self.model, self._optimizers = run, run.model, run.optimizers
        self._began_with = run.model.step
        self._options = [options_of(each) for each in run.optimizers]  # of this run
        self._timer = Timer(run.model, self._every_s)

    def load_own(self) -> Resumed | None:
        """What this run has kept itself, on its nodes or in its folder.  Collective."""
        given = self.model, self._optimizers
        found = self.replicas and self.replicas.load_latest(
            *given, checkpoints=self.checkpoints
        )
        return found or self.checkpoints.load_latest(*given)

    def put(self, found: Resumed) -> None:
        """Give what goes on beside model and optimizer the state that it had.  Collective.

        Raises ``CheckpointError`` on every rank if the checkpoint does not have it.
        """
        self._began_with = self.model.step
        extra = found.extra if isinstance(found.extra, Mapping) else {}
        missing = [each for each in ("random_states", *self._state) if each not in extra]
        if missing:
            raise CheckpointError(
                f"{found.path} has no {', '.join(missing)}, so it was not written by these "
                "hooks. Load it with shardhet.checkpoint.load, or name another folder."
            )
        self._put_options(found)
        states, position = extra["random_states"], self.model.position
        if position < len(states):
            restore_random_states(states[position], self.model.device)
        for name, each in {**self._state, **self._kept}.items():
            if extra.get(name) is not None:
                each.load_state_dict(extra[name])

    def _put_options(self, found: Resumed) -> None:
        for optimizer, options in zip(self._optimizers, self._options, strict=True):
            put_options(optimizer, options, source=str(found.path))

    @property
    def _kept(self) -> dict[str, Any]:
        """Those with a state, by name; a checkpoint may be from before they were added."""
        hooks = self.run.hooks
        stateful = [each for each in hooks if isinstance(each, Stateful)]
        return {each.state_name or type(each).__name__.lower(): each for each in stateful}

    def extra(self, step: int) -> dict[str, Any]:
        """What is kept beside model and optimizer.  Collective."""
        states = self.model.exchange_objects(random_states(self.model.device))
        stateful = {**self._state, **self._kept}
        kept = {name: each.state_dict() for name, each in stateful.items()}
        return kept | {"step": step, "random_states": list(states)}

    def before_step(self, step: int) -> None:
        if self.is_rolled_back_to and self._last_saved is None:
            self.save(step - 1)

    def before_record(self, step: int) -> None:
        """Wait for the last replica if it is time for the next one.

        So a step that was recorded is on two nodes, unless it is the last one.
        """
        if self.replicas is not None and self._needs_replica(step):
            started_s = time.perf_counter()
            self.replicas.wait(self.model)
            self._waited_s = time.perf_counter() - started_s

    def is_due(self, step: int) -> bool:
        """Whether ``after_step`` writes something.  Collective."""
        return self._needs_replica(step) or self._needs_checkpoint(step) or self.run.is_over

    def _needs_replica(self, step: int) -> bool:
        return bool(self._replicate_every) and step % self._replicate_every == 0

    def _needs_checkpoint(self, step: int) -> bool:
        is_last = step == self.last_step
        if self._every:
            return step % self._every == 0 or is_last
        return self._timer.is_due(step) or (is_last and self._last_saved is not None)

    def after_step(self, step: int, loss: float | None) -> None:
        """Write what it is time for, and log the seconds that the step waited for it."""
        seconds: dict[str, float] = {}
        if self.replicas is not None and self._needs_replica(step):
            started_s = time.perf_counter()
            self.run.check_last_step()
            is_first = not self.replicas.bytes_by_node
            self.replicas.save(self.model, self._optimizers, extra=self.extra(step))
            seconds["replica_s"] = self._waited_s + time.perf_counter() - started_s
            if is_first:
                self.run.say(f"replicas in {self.replicas.folder}: {self.replicas.told}")
        if self._needs_checkpoint(step) or self.run.is_over:
            started_s = time.perf_counter()
            self.save(step)
            seconds["checkpoint_s"] = time.perf_counter() - started_s
        if seconds:
            self.run.forget_peak_memory()
            self.run.log(step, seconds)

    def save(self, step: int) -> None:
        """Write a checkpoint, unless that of this step is there.  Collective."""
        if step == self._last_saved:
            return
        self.run.check_last_step()
        self._last_saved = step
        save = self.checkpoints.save_async if self._in_background else self.checkpoints.save
        save(self.model, self._optimizers, extra=self.extra(step))
        self._timer.restart(step)

    def roll_back(self) -> int:
        """Load the last checkpoint from before this step, and return its step.  Collective.

        Loaders are left where they are: the next batch is the one after this step's.
        """
        found = self.checkpoints.load_latest(
            self.model, self._optimizers, not_after=self.model.step - 1
        )
        if found is None:
            raise CheckpointError(
                f"{self.checkpoints.folder}: no complete checkpoint to roll back to. Set "
                "guard.on_bad_step=SKIP."
            )
        self._put_options(found)
        for name, each in self._state.items():
            if not isinstance(each, Iterable):  # a loader, or its sampler
                each.load_state_dict(found.extra[name])
        self.forget_replicas()
        self._last_saved = self.model.step
        return self.model.step

    def end(self, error: BaseException | None) -> None:
        """Write the last state where earlier ones were, and wait until all is complete."""
        if error is None:
            has_news = self.model.is_between_steps and self.model.step != self._began_with
            if has_news and (self._every or self._last_saved is not None):
                self.save(self.model.step)
            self.close()

    def close(self) -> None:
        """Until the last checkpoint and the last replica are complete.  Collective."""
        self.checkpoints.wait(self.model)
        if self.replicas is not None:
            self.replicas.wait(self.model)

    def forget_replicas(self) -> None:
        """Remove those of later steps, which are of another history.  Collective."""
        if self.replicas is not None:
            self.replicas.forget_after(self.model, self.model.step)
