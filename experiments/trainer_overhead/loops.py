"""The same steps twice: as ``shardhet train`` takes them, and as a bare loop."""

import io
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from rich.console import Console
from torch import Tensor

from experiments.common.systems import Rounds, take_turns
from shardhet import HetFSDP
from shardhet.apps.cli.display import Display
from shardhet.apps.launch.joining import announced_device
from shardhet.apps.launch.rank_env import RankEnv
from shardhet.apps.launch.run_folder import RunFolder
from shardhet.apps.run.task import make_task
from shardhet.apps.run.worker import Run
from shardhet.config.compose import (
    CONFIG_NAME,
    VERSION_BASE,
    conf_dir,
    register_schemas,
)
from shardhet.config.train import TrainConf
from shardhet.training.data import Batch
from shardhet.training.trainer import own_arrays

TRAIN, BARE = "shardhet train", "bare loop"
CPU = torch.device("cpu")
DEMO, ALONE = "demo, four ranks", "one rank"
OVERRIDES_BY_SETTING = {
    DEMO: (),
    ALONE: ("cluster=local", "cluster.device=CPU", "plan=even", "plan.global_batch_size=40"),
}
OVERRIDES = (  # the demo without its end, and with one learning rate, which the bare loop has
    "experiment=demo",
    "num_steps=1000000",
    "eval_every=0",
    "lr_scheduler=constant",
    "lr_scheduler.warmup_fraction=0",
)
NUM_BATCHES = 8  # of the bare loop, drawn before it starts and used over and over
TERMINAL_WIDTH = 120  # columns


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSample:
    """One timed step."""

    setting: str
    loop: str
    round: int
    step: int  # within the turn; step 0 is left out
    slowest_rank_s: float


def measure(rank: int, folder: str, setting: str, rounds: Rounds) -> list[StepSample]:
    """Steps of both loops; the same list on every rank."""
    conf = RunFolder(Path(folder)).load_config()
    env = RankEnv(
        rank=rank,
        world_size=dist.get_world_size(),
        local_rank=rank,
        store_host="localhost",
        store_port=0,
    )
    bare = BareLoop(conf, env)
    run = Run(conf, RunFolder(Path(folder)), env, CPU)
    console = Console(
        file=io.StringIO(), force_terminal=True, width=TERMINAL_WIDTH, quiet=rank != 0
    )
    with run.begin(console) as display:
        check_same_start(run, display, bare)
        step_by_loop: dict[str, Callable[[int], object]] = {
            TRAIN: lambda _: run.take_step(run.model.step + 1, display),
            BARE: lambda _: bare.take_step(),
        }
        return [
            StepSample(
                setting=setting,
                loop=timed.system,
                round=timed.round,
                step=timed.step,
                slowest_rank_s=timed.slowest_rank_s,
            )
            for timed in take_turns(step_by_loop, rounds)
        ]


def write_config(folder: Path, setting: str) -> int:
    """Compose the configuration of ``setting`` into ``folder``; returns the number of ranks."""
    register_schemas()
    OmegaConf.register_new_resolver("run_stamp", lambda: "none", replace=True)
    overrides = [*OVERRIDES, *OVERRIDES_BY_SETTING[setting], f"run_dir={folder}"]
    with initialize_config_dir(str(conf_dir()), version_base=VERSION_BASE):
        cfg = compose(CONFIG_NAME, overrides)
    run = RunFolder(folder)
    run.begin(cfg)
    return run.load_config().world_size(None)  # one on a CPU


class BareLoop:
    """Model, optimizer and batches of ``conf``, and nothing that watches."""

    def __init__(self, conf: TrainConf, env: RankEnv) -> None:
        plan = conf.to_plan(env.world_size)
        with TemporaryDirectory() as token_dir:
            task = make_task(
                conf, global_batch_size=plan.global_batch_size, token_dir=Path(token_dir)
            )
        self.model = HetFSDP(
            task.module,
            plan,
            device=CPU,
            seed=conf.seed,
            device_spec=announced_device(conf.cluster, env, CPU),
        )
        self._optimizer = conf.optim.to_record().build(list(self.model.parameters()))
        self._max_grad_norm = conf.max_grad_norm
        self._batches = [self._mine(task.batches[step]) for step in range(NUM_BATCHES)]

    def _mine(self, batch: Batch) -> list[Tensor]:
        return [torch.from_numpy(array) for array in own_arrays(batch, self.model)]

    def take_step(self) -> float | None:
        """The mean loss of one optimizer step."""
        loss_sum, num_tokens = self.model(*self._batches[self.model.step % NUM_BATCHES])
        mean_loss = self.model.backward(loss_sum, num_tokens)
        self.model.clip_grad_norm_(self._max_grad_norm)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return mean_loss


def check_same_start(run: Run, display: Display, bare: BareLoop) -> None:
    """Raise unless both loops do the same to the same weights while batches are the same."""
    for _ in range(NUM_BATCHES):
        bare.take_step()
        run.take_step(run.model.step + 1, display)
    pairs = zip(bare.model.parameters(), run.model.parameters(), strict=True)
    if not all(torch.equal(one, other) for one, other in pairs):
        raise RuntimeError(
            f"After {NUM_BATCHES} steps the two loops have other weights. Compare what "
            "Trainer.train_step and BareLoop.take_step do."
        )
