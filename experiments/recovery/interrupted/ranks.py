"""One rank of a small training run that is interrupted, and of those that go on."""

import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.optim.lr_scheduler import LambdaLR

from experiments.common.launch import join
from experiments.recovery.ranks import WIDTH, trapped
from shardhet import HetFSDP, Plan, watch_ranks
from shardhet.checkpoint import Checkpoints, Replicas
from shardhet.checkpoint.format import files
from shardhet.checkpoint.format.reading import Reader
from shardhet.fsdp.step.around import Activity, Observed

BATCH = 12
NUM_STEPS = 12
EVERY = 2  # steps between two checkpoints
LAYER_S = 0.004  # that a layer takes, so that there are moments between
HANG_TIMEOUT_S = 30.0
PLANS = (
    Plan.even(2, microbatch_size=6),
    Plan.by_hand(
        microbatch_sizes=[4, 2],
        rank_batch_sizes=[8, 4],
        state_shares=[0.2, 0.8],
        recompute=True,
    ),
    Plan.even(3, microbatch_size=2, num_microbatches=2),
    Plan.by_hand(
        microbatch_sizes=[3, 0, 5], rank_batch_sizes=[7, 0, 5], state_shares=[0.1, 0.9, 0.0]
    ),
    Plan.even(4, microbatch_size=3),
    Plan.by_hand(
        microbatch_sizes=[1, 2, 0, 3],
        rank_batch_sizes=[2, 3, 0, 7],
        state_shares=[0.4, 0.0, 0.5, 0.1],
        recompute=[False, True, False, False],
        reshard_after_forward=False,
    ),
)
ANYTIME = "any time"
PLACES = (
    "forward",
    "gather",
    "backward",
    "reduction",
    "optimizer",
    "saving",
    "loading",
    ANYTIME,
)
KILL, NOTICE = "kill -9", "SIGTERM"
LOST = "kill -9, its node lost"  # replicas after every step, and no checkpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What happens to one rank of a run, and under which plan the run goes on."""

    seed: int
    deed: str
    place: str
    plan: int  # of PLANS
    next_plan: int
    rank: int
    step: int
    occasion: int  # how often the place is passed in that step before
    in_background: bool  # checkpoints are written by a thread

    @property
    def nodes(self) -> tuple[int, ...]:
        """Those of the ranks of the first run, one each; () if no node has replicas."""
        return tuple(range(PLANS[self.plan].world_size)) if self.deed == LOST else ()

    @property
    def nodes_left(self) -> tuple[int, ...]:
        """Those of the ranks of the run that goes on; the lost one has come back empty."""
        if self.deed != LOST:
            return ()
        others = [i for i in range(PLANS[self.next_plan].world_size + 1) if i != self.rank]
        return (*others, self.rank)[: PLANS[self.next_plan].world_size]

    @classmethod
    def of(cls, seed: int, deed: str) -> "Fault":
        """The fault of a seed; places are equally frequent, half the runs keep their plan."""
        rng = random.Random(f"interrupted {deed} {seed}")
        plan = rng.randrange(len(PLANS))
        others = [each for each in range(len(PLANS)) if each != plan]
        place = ANYTIME if deed == NOTICE else PLACES[seed % len(PLACES)]
        if deed == LOST:  # no other node may be out of sight
            least = PLANS[plan].world_size - (place != "loading")
            others = [each for each in others if PLANS[each].world_size >= least] or [plan]
        next_plan = plan if seed // len(PLACES) % 2 else rng.choice(others)
        dying = PLANS[next_plan if place == "loading" else plan]
        step = rng.randint(3, NUM_STEPS - 2)
        rank = rng.randrange(dying.world_size)
        if place == "saving" and not dying.ranks[rank].state_share:
            rank = 0  # which writes more than its rows
        return cls(
            seed=seed,
            deed=deed,
            place=place,
            plan=plan,
            next_plan=next_plan,
            rank=rank,
            step=step + step % EVERY if place == "saving" else step,
            occasion=rng.randrange(2),
            in_background=rng.random() < 0.5,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """One start of the ranks."""

    plan: int
    in_background: bool = False
    place: str = ""  # where ``rank`` kills itself; "" or ANYTIME: nowhere
    rank: int = 0
    step: int = 0
    occasion: int = 0
    nodes: tuple[int, ...] = ()  # that keep replicas, by rank; (): there are checkpoints


@dataclass(slots=True, kw_only=True)
class Course:
    """What a rank has to tell at its end."""

    first_step: int  # 1 if it did not go on from a checkpoint
    losses: dict[int, float] = field(default_factory=dict)
    # Whole on rank zero, at the end; tensors would be shared by a process that is gone.
    state: dict[str, np.ndarray] = field(default_factory=dict)
    was_asked: bool = False


def live(sender: Connection, rank: int, port: int, life: Life, folder: str) -> None:
    """Train as one of the ranks, from the newest checkpoint on."""
    plan = PLANS[life.plan]
    os.environ["SHARDHET_TRANSPORT"] = ("auto", "gloo")[life.plan % 2]
    torch.set_num_threads(1)
    join(port, plan.world_size, rank)
    course: Course | str
    with watch_ranks(hang_timeout_s=HANG_TIMEOUT_S, on_failure=lambda failure: None):
        try:
            course = _Run(rank, life, Path(folder)).train()
            dist.barrier()
        except Exception as error:
            course = str(error)
    sender.send(course)


class _Run:
    """The objects of one rank."""

    def __init__(self, rank: int, life: Life, folder: Path) -> None:
        self._rank, self._life, self._folder = rank, life, folder
        self._step, self._num_passed, self._last_saved = 0, 0, 0
        torch.manual_seed(0)
        self._model = HetFSDP(trapped(self._pass), PLANS[life.plan])
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=0.01)
        self._scheduler = LambdaLR(self._optimizer, lambda step: 1 / (1 + step))
        self._checkpoints: Checkpoints | Replicas
        if life.nodes:
            self._checkpoints = Replicas(folder / f"node{life.nodes[rank]}")
        else:
            self._checkpoints = Checkpoints(folder / "checkpoints", keep_last=2)
        self._set_traps()
        signal.signal(signal.SIGTERM, lambda *_: self._model.ask_to_end())

    def train(self) -> Course:
        """All steps that are left, unless this rank is to die in one."""
        model = self._model
        self._step = self._life.step  # for a trap in loading
        resumed = self._checkpoints.load_latest(model, self._optimizer)
        if resumed is not None:
            self._scheduler.load_state_dict(resumed.extra["scheduler"])
        self._last_saved = model.step
        course = Course(first_step=model.step + 1)
        samples = torch.Generator().manual_seed(1)
        x = torch.randn(NUM_STEPS, BATCH, WIDTH, generator=samples).double()
        first = model.plan.first_sample(model.position)
        stop = first + model.plan.ranks[model.position].rank_batch_size
        for step in range(model.step + 1, NUM_STEPS + 1):
            self._step = step
            if self._rank == self._life.rank:
                (self._folder / "step").write_text(str(step))
            loss = model.backward(*model(x[step - 1, first:stop]))
            assert loss is not None
            course.losses[step] = loss
            self._optimizer.step()
            self._optimizer.zero_grad()
            self._scheduler.step()
            self._pass("end of step")
            course.was_asked = model.is_asked_to_end
            if step % EVERY == 0 or course.was_asked or self._life.nodes:
                self._save()
            if course.was_asked:
                break
        self._checkpoints.wait(model)
        self._commit(self._step)
        course.state = {fqn: each.numpy().copy() for fqn, each in model.state_dict().items()}
        return course

    def _save(self) -> None:
        extra = {"scheduler": self._scheduler.state_dict()}
        if isinstance(self._checkpoints, Replicas):
            self._checkpoints.save(self._model, self._optimizer, extra=extra)
            self._commit(self._last_saved)
        elif self._life.in_background:
            self._checkpoints.save_async(self._model, self._optimizer, extra=extra)
            self._commit(self._last_saved)  # which was waited for
        else:
            self._checkpoints.save(self._model, self._optimizer, extra=extra)
            self._commit(self._step)
        self._last_saved = self._step

    def _commit(self, step: int) -> None:
        """Note on rank zero that the checkpoint of a step is complete."""
        if self._rank == 0:
            (self._folder / "committed").write_text(str(step))

    # Traps #

    def _pass(self, place: str) -> None:
        if place == "forward":
            time.sleep(LAYER_S)
        life = self._life
        if self._rank != life.rank or life.place in ("", ANYTIME) or self._step < life.step:
            return
        self._num_passed += place == life.place
        # A rank without samples passes neither forward nor backward.
        is_late = place == "end of step" and life.place not in ("saving", "loading")
        if self._num_passed > life.occasion or is_late:
            os.kill(os.getpid(), signal.SIGKILL)

    def _set_traps(self) -> None:
        place_by_wait = {Activity.WAIT_GATHER: "gather", Activity.WAIT_REDUCE: "reduction"}

        def wait(event: Observed) -> None:
            self._pass(place_by_wait.get(event.activity, ""))

        self._model.add_observer(wait)
        self._optimizer.register_step_pre_hook(lambda *_: self._pass("optimizer"))
        files.open_new = self._before(files.open_new, "saving")
        files.complete = self._before(files.complete, "saving")
        Reader.read_rows = self._before(Reader.read_rows, "loading")  # type: ignore[method-assign]

    def _before(self, function: Callable[..., Any], place: str) -> Callable[..., Any]:
        def trapped(*args: Any, **kwargs: Any) -> Any:
            self._pass(place)
            return function(*args, **kwargs)

        return trapped
