"""Hooks: what goes on beside the steps of a training loop, whoever wrote the loop.

    with Hooks(model, optimizer, [StopOnSignal(), Trace("traces")]) as hooks:
        for x, y in hooks.steps(loader):
            loss = model.forward_backward(x, loss_inputs=y)
            optimizer.step()
            optimizer.zero_grad()

``HetTrainer(hooks=[...])`` and ``shardhet train`` call the same ones.  Every rank has the same
hooks in the same order, and each hook answers alike on all of them: it judges what is the same
everywhere, or has the ranks agree.
"""

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from enum import Enum
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, Self, TypeVar

import torch
from torch.optim import Optimizer
from torch.profiler import ProfilerActivity, profile

from shardhet.checkpoint.state.optimizer_state import listed
from shardhet.fsdp import HetFSDP
from shardhet.training.emulation import HostMemory

Values = Mapping[str, float | None]
logger = logging.getLogger("shardhet.hooks")


class After(Enum):
    """What follows a step."""

    STOP = "stop"  # the end, on all ranks, after the step in which they learn of it: the next
    ROLLED_BACK = "rolled back"  # the model is that of an earlier step; the other hooks wait


class Hook:
    """A base of hooks, which does nothing.  Every method is collective."""

    # In checkpoints, of one that has ``state_dict`` and ``load_state_dict``; "": its class.
    state_name = ""

    def begin(self, run: "Hooks") -> None:
        """Before the first step of ``run``."""

    def before_step(self, step: int) -> None:
        """Before a step; they count from 1, as in ``model.step``."""

    def check_last_step(self) -> None:
        """Before anything is kept of the last step.  Raises if the step was bad."""

    def after_step(self, step: int, loss: float | None) -> After | None:
        """After a step and its update; ``loss`` is the mean of all ranks' samples.

        None goes on.  In float16 the loss is what ``model.backward`` was given, scaled.
        """

    def end(self, error: BaseException | None) -> None:
        """After the last step, or on an ``error``, when other ranks may not be there."""


SomeHook = TypeVar("SomeHook", bound=Hook)


class Hooks:
    """The hooks of a training, as a context in which it runs.

    Signals are only listened for on the main thread.  Entering is collective.
    """

    def __init__(
        self,
        model: HetFSDP,
        optimizer: Optimizer | Sequence[Optimizer],
        hooks: Iterable[Hook] = (),
        *,
        say: Callable[..., None] | None = None,
        log: Callable[[int, Values], None] | None = None,
        on_roll_back: Callable[[int, int], None] = lambda step, to_step: None,
        forget_peak_memory: Callable[[], None] = lambda: None,
        has_scaler: bool = False,
    ) -> None:
        """Of one model, and the optimizers of its parameters.

        Args:
            model: as it is trained.
            optimizer: or several.
            hooks: are called in this order.
            say: what to do with a remark and its level; None: rank zero logs it as a warning.
            log: takes a step and figures of it by name, on all ranks; None: they are not kept.
            on_roll_back: takes a bad step and the earlier one that the model is back at.
            forget_peak_memory: what hooks allocate beside a step does not count.
            has_scaler: losses are scaled, as a model in float16 has them.
        """
        self.model = model
        self.optimizers = listed(optimizer)
        self.hooks = tuple(hooks)
        self.say = say or self._say
        self.log = log or (lambda step, values: None)
        self.on_roll_back, self.forget_peak_memory = on_roll_back, forget_peak_memory
        self.has_float16 = has_scaler or model._mean.is_float16
        self._ends = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as ends:
            for hook in self.hooks:
                hook.begin(self)
                ends.push(partial(_end, hook))
            self._ends = ends.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        self._ends.__exit__(*error)

    @property
    def is_over(self) -> bool:
        """Whether any rank was told to end by the last step; the same on all."""
        return self.model.is_asked_to_end

    def find(self, kind: type[SomeHook]) -> SomeHook | None:
        """The first of the hooks of a kind."""
        return next((each for each in self.hooks if isinstance(each, kind)), None)

    def steps(self, loader: Iterable[Any], *, num_epochs: int | None = None) -> Iterator[Any]:
        """The batches of ``loader``: a step each, or with ``model.batches_per_step`` a part.

        ``num_epochs`` None is one pass; else there are so many in all, with those that
        ``loader.epoch`` has counted.  It ends early, after a whole step, once the run is told
        to.  Hooks do not hear of a step that the loop leaves by ``break``.
        """
        epochs = range(getattr(loader, "epoch", 0), num_epochs or 0)
        for _ in epochs if num_epochs is not None else range(1):
            if self.is_over:
                return
            for batch in loader:
                began_with = self.model.step
                if self.model.is_between_steps:
                    self.before_step()
                yield batch
                if self.model.is_between_steps and self.model.step != began_with:
                    self.after_step(self.model.mean_so_far)
                if self.is_over:
                    step = self.model.step
                    self.say(f"the loop ends after step {step}: a rank was told to end")
                    return

    def before_step(self) -> None:
        """Call it before the first ``model(...)`` of a step.  Collective."""
        for hook in self.hooks:
            hook.before_step(self.model.step + 1)

    def check_last_step(self) -> None:
        """Raise if the last step was bad, before anything is kept of it.  Collective."""
        for hook in self.hooks:
            hook.check_last_step()

    def after_step(self, loss: float | None) -> None:
        """Call it after the update of a step.  Collective."""
        step = self.model.step
        for hook in self.hooks:
            answer = hook.after_step(step, loss)
            if answer is After.STOP:
                self.model.ask_to_end()
            if answer is After.ROLLED_BACK:
                return

    def _say(self, text: str, level: int = logging.WARNING) -> None:
        if self.model.rank == 0:
            logger.warning("%s", text)  # lower levels are not shown unless a program asks


def _end(hook: Hook, kind: Any, error: BaseException | None, at: Any) -> None:
    hook.end(error)


POSITION, NUM_STEPS = "shardhet_position", "shardhet_num_steps"  # keys of a trace file


class Trace(Hook):
    """Records steps with torch.profiler into ``folder``/rank0.json, ..., for Perfetto.

    The trace shows the runtime's computations and waits by name, as "forward blocks.2 [1]"
    (unit, microbatch) or "wait_gather blocks.3".
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        first_step: int = 10,
        num_steps: int = 3,
        host_memory: HostMemory | None = None,
        then: Callable[[], None] = lambda: None,
    ) -> None:
        """``then`` is called once the file is there.

        ``host_memory`` is that of an emulated device, which is not charged for the events.

        Steps count from 1 over the whole training, as ``model.step`` does.
        """
        self._folder = Path(folder)
        self._first_step = first_step
        self._last_step = first_step + num_steps - 1
        self._memory, self._then = host_memory, then
        self._profile: Any = None

    def begin(self, run: Hooks) -> None:
        self._run = run

    def before_step(self, step: int) -> None:
        if step != self._first_step or self._profile is not None:
            return
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        if self._memory is not None:
            self._memory.begin()
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # or it says where it starts and stops
        self._profile = profile(activities=activities)
        self._profile.start()
        num_steps = self._last_step - self._first_step + 1
        self._profile.add_metadata_json(POSITION, str(self._run.model.position))
        self._profile.add_metadata_json(NUM_STEPS, str(num_steps))
        self._run.model.name_in_trace(is_traced=True)

    def after_step(self, step: int, loss: float | None) -> None:
        if step >= self._last_step and self._profile is not None:
            self._write()

    def end(self, error: BaseException | None) -> None:
        if error is None and self._profile is not None:  # fewer steps than were asked for
            self._write()

    def _write(self) -> None:
        self._run.model.name_in_trace(is_traced=False)
        self._profile.stop()
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"rank{self._run.model.rank}.json"
        self._profile.export_chrome_trace(str(path))
        self._profile = None
        if self._memory is not None:
            self._memory.end()
        self._then()
        self._run.forget_peak_memory()


SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
SECONDS_BETWEEN_LOOKS = 1.0


class StopOnSignal(Hook):
    """Ends the run on all ranks, after a whole step, if any one rank is given notice.

    That is SIGTERM, SIGUSR1 or Ctrl-C, of which a second one ends the program at once, or a
    file.  ``SaveCheckpoints`` then writes a checkpoint.
    """

    def __init__(
        self, of_run: str | Path | None = None, *, of_node: str | Path | None = None
    ) -> None:
        """The file ``of_run`` tells the whole run to end, and may say why.

        Signals and the file ``of_node`` tell this node, without which others may go on.
        """
        self.reason: str | None = None
        self._of_run = None if of_run is None else Path(of_run)
        self._of_node = None if of_node is None else Path(of_node)
        self._looked_at_s = 0.0
        self._handlers_before: dict[signal.Signals, Any] = {}

    def begin(self, run: Hooks) -> None:
        self._model = run.model
        if threading.current_thread() is threading.main_thread():
            for each in SIGNALS:
                self._handlers_before[each] = signal.signal(each, self._on_signal)

    def end(self, error: BaseException | None) -> None:
        for each, handler in self._handlers_before.items():
            signal.signal(each, handler)

    def before_step(self, step: int) -> None:
        """Look for the files, at most once a second."""
        now_s = time.monotonic()
        if self.reason is not None or now_s < self._looked_at_s + SECONDS_BETWEEN_LOOKS:
            return
        self._looked_at_s = now_s
        for path in (self._of_run, self._of_node):
            if path is not None and path.exists():
                told = path.read_text(encoding="utf-8") if path == self._of_run else ""
                self._receive(told or f"{path} exists")

    def ends_run(self) -> bool:
        """Whether the whole run is told to end, as this rank sees it now."""
        return self._of_run is not None and self._of_run.exists()

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        if number == signal.SIGINT:  # the next one, or what an agent makes of it, ends at once
            for each in (signal.SIGINT, signal.SIGTERM):
                signal.signal(each, signal.SIG_DFL)
        self._receive(signal.Signals(number).name)

    def _receive(self, reason: str) -> None:
        if self.reason is None:
            self.reason = reason
            logger.info("notice that the run has to end: %s", reason)
            self._model.ask_to_end()
