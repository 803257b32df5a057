"""One rank of a training run.

    python -m shardhet.apps.run.worker RUN_FOLDER

is what ``shardhet train`` starts once per device.  It loads only the configuration that was
written there.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from rich.console import Console

from shardhet import After, HetFSDP, Hook, Hooks, Plan, Rebalancer, StopOnSignal, Trace
from shardhet.apps.checkpoint_export import write_model
from shardhet.apps.cli.display import Display, show_plan
from shardhet.apps.cli.quantities import counted
from shardhet.apps.cli.streamed import say
from shardhet.apps.launch.crash import RankConsole
from shardhet.apps.launch.joining import joined, run_as_rank
from shardhet.apps.launch.leaving import agree_on_end, leave
from shardhet.apps.launch.memory_limits import LowersLimit, OwnMemoryLimit
from shardhet.apps.launch.rank_env import RankEnv
from shardhet.apps.launch.run_folder import RunFolder
from shardhet.apps.launch.sole_writer import (
    PATIENCE_S,
    PATIENCE_WITH_ORPHANS_S,
    sole_writer,
)
from shardhet.apps.run.building import build
from shardhet.apps.run.loggers import open_loggers
from shardhet.apps.run.prediction import Prediction
from shardhet.apps.run.run_log import RunLog
from shardhet.apps.run.task import Task
from shardhet.checkpoint import Resumed
from shardhet.comm import devices
from shardhet.comm.channel import may_take_long
from shardhet.config.checks import fields_of
from shardhet.config.models import HfConf
from shardhet.config.train import OnOom, Precision, TrainConf
from shardhet.training.emulation import HostMemory
from shardhet.training.guard import skipped

logger = logging.getLogger(__name__)


def main() -> None:
    """Train as one of the ranks that were launched for the run folder."""
    run_as_rank(lambda folder, env: run_rank(folder.load_config(), folder, env))


def run_rank(
    conf: TrainConf,
    folder: RunFolder,
    env: RankEnv,
    begin: Callable[[], None] = lambda: None,
) -> None:
    """Run this rank's part, from process group to last metric.  Collective.

    ``begin`` is called on rank zero once the folder is this run's alone.
    """
    joins = joined(
        conf.cluster,
        folder,
        env,
        transport=conf.transport,
        hang_timeout_s=conf.hang_timeout_s,
        needs_bfloat16=conf.precision is Precision.BF16,
        fp16_accumulation=conf.fp16_accumulation,
    )
    timeout_s = PATIENCE_S if env.is_elastic else PATIENCE_WITH_ORPHANS_S
    with joins as device, sole_writer(folder, env.rank, timeout_s=timeout_s):
        if env.rank == 0:
            begin()
        run = Run(conf, folder, env, device)
        run.train()
        logger.info("rank %d has finished %d steps", env.rank, run.model.step)
    if run.goes_on_without_some:
        leave(run.notice.reason)


class Run(Hook):
    """The objects of one rank while it trains; a hook that shows and records its own steps."""

    def __init__(
        self,
        conf: TrainConf,
        folder: RunFolder,
        env: RankEnv,
        device: torch.device,
    ) -> None:
        """Build everything.  Collective."""
        self._conf = conf
        self._folder = folder
        self._env = env
        self._device = device
        self._built = built = build(conf, folder, env, device)
        self.trainer = built.trainer
        self.model = built.trainer.model
        self.is_rank_zero = env.rank == 0  # the one that prints and writes files
        self._checkpoints = built.checkpoints
        self._goes_on = built.resumed is not None  # its next step is the first that does
        self._log = RunLog(built.prediction, self.model.position)
        self.notice = StopOnSignal(folder.stop_path, of_node=conf.stop_on_signal.file)
        self.goes_on_without_some = False  # without the ranks that were told to end
        # The notice is first, so that it ends last: it is heard until all is written.
        hooks = [self.notice, *self._chosen(), self, self._checkpoints]
        self._hooks = Hooks(
            self.model,
            self.trainer.optimizers,
            hooks,
            say=self._say,
            log=self._log.log,
            on_roll_back=self._log.roll_back,
            forget_peak_memory=self.trainer.peak_memory.forget,
        )

    def _chosen(self) -> Iterator[Hook]:
        conf, built = self._conf, self._built
        if conf.on_oom is OnOom.REPLAN:
            spec = built.devices[self.model.position]
            limit = OwnMemoryLimit(self._folder, spec, self._env.local_rank)
            yield LowersLimit(limit, self._env.rank, self.trainer.peak_memory)
        if conf.trace:
            yield Trace(
                self._folder.trace_dir,
                **fields_of(conf.trace_steps, Trace),
                host_memory=HostMemory(self.trainer.peak_memory),
                then=self._write_predicted_trace,
            )
        if built.scenario is not None:
            yield Rebalancer(
                built.scenario,
                replans=conf.rebalance,
                constraints=built.constraints,
                devices=built.devices,
                then=self._follow,
            )

    def train(self) -> None:
        """Run all steps, reports of device use and evaluations."""
        console = RankConsole(quiet=not self.is_rank_zero)
        done = self.model.step
        with self.in_training(console):
            while self.model.step < self._conf.num_steps and not self._hooks.is_over:
                self.take_step()
        is_complete = self.model.step >= self._conf.num_steps
        end = agree_on_end(self.model, self.notice, self._env, is_complete=is_complete)
        self.goes_on_without_some = end.goes_on
        self._checkpoints.free_nodes(
            is_leaving=self.notice.reason is not None, others_go_on=end.goes_on
        )
        if self.is_rank_zero:
            self._folder.save_end(
                step=self.model.step, num_steps=self._conf.num_steps, asked_by=end.asked_by
            )
        if is_complete:
            self._finish(console, is_idle=self.model.step == done)
            return
        text = (
            f"the run ends after step {self.model.step} of {self._conf.num_steps}, as it was "
            f"asked to ({'; '.join(end.asked_by)})"
        )
        logger.info("%s", text)
        if self.is_rank_zero:
            text += f"\ngo on with: {self._folder.how_to_go_on}"
            say(console, text)

    def _finish(self, console: Console, *, is_idle: bool) -> None:
        """What comes after the last step of a run, or instead of one if it ``is_idle``."""
        save_whole(self.model, self._conf, self._folder)
        prediction, outcome = self._log.prediction, self._log.outcome
        if is_idle:
            text = (
                f"nothing to do: {self.model.step} steps are taken, and num_steps is "
                f"{self._conf.num_steps}. Increase num_steps to continue."
            )
            console.print(text, soft_wrap=True)
        elif prediction is not None and outcome.step_times_s:
            console.print(outcome.beside(prediction), soft_wrap=True)
            console.print(outcome.table(self.model.plan, prediction))
        console.print(f"written to {self._folder.path}", soft_wrap=True)

    @contextmanager
    def in_training(self, console: Console) -> Iterator[None]:
        """A context for ``take_step``, in which the plan is shown and all writers are open."""
        logger.info("rank %d has position %d of the plan", self._env.rank, self.model.position)
        if self.is_rank_zero:
            self._folder.accept_start()
            self._folder.forget_metrics_after(self.model.step)
            self.model.plan.save(self._folder.plan_path)
            self._folder.save_devices(self._built.devices)
            self._log.loggers = open_loggers(
                self._conf.logger, self._folder, first_step=self.model.step + 1
            )
        show_start(console, self._conf, self._built.task, self.model, self._built.resumed)
        if self._conf.compile:
            say(console, say_who_compiles(self.model, self._built.why_eager, self._folder))
        show_plan(self.model.plan, self._built.devices, console)
        self._display = Display(
            num_steps=self._conf.num_steps, log_every=self._conf.log_every, console=console
        )
        with self._log.closing(), self._hooks:
            yield

    def take_step(self) -> None:
        """Run one optimizer step with its metrics, reports of device use and evaluations."""
        self._hooks.before_step()
        step = self.model.step + 1
        self._step = metrics = self.trainer.train_step(is_timed=self._is_reported(step))
        self._record()  # the step before, whose norm was read in this one
        self._log.pending = metrics if metrics.why_skipped is None else None
        makes_use = self._is_reported(step) or self._is_evaluated(step)
        if makes_use or self._checkpoints.is_due(step) or devices.is_on_host(self._device):
            self.trainer.check_last_step()
        self._checkpoints.before_record(step)
        if self._goes_on:
            self._goes_on = False
            self._log.log(step, {"went_on": 1.0})
            number = counted(self._env.world_size, "device")
            self._say(f"resumed with step {step} on {number}")
        self._hooks.after_step(metrics.mean_loss)

    def _is_reported(self, step: int) -> bool:
        return step % self._conf.log_every == 0 or step == self._conf.num_steps

    def _is_evaluated(self, step: int) -> bool:
        every = self._conf.eval_every
        return step == self._conf.num_steps or (bool(every) and step % every == 0)

    def check_last_step(self) -> None:
        self.trainer.check_last_step()

    def after_step(self, step: int, loss: float | None) -> After | None:
        """Record the step, unless it was bad, and what is to be known after it."""
        guard, why = self.trainer.guard, self._step.why_skipped
        if why is not None:
            rolls_back = guard.rolls_back and not self._step.has_overflowed
            saves = self._checkpoints if rolls_back else None
            if answer := skipped(self._hooks, step, loss, why, saves):
                return answer
        elif self.trainer.guard.unchecked is None:
            self._record()
        if self._is_reported(step):
            uses = self.trainer.look_at_devices()
            self._log.log_uses(step, uses)
            self._display.show_devices(uses)
        if self._is_evaluated(step):
            self._evaluate(step)
        return None

    def _record(self) -> None:
        """Log and show the step that has not been yet, if there is one."""
        metrics = self._log.log_pending()
        if metrics is not None:
            self._display.show_step(metrics)

    def _write_predicted_trace(self) -> None:
        """Beside that of the steps."""
        if self.is_rank_zero and self._log.prediction is not None:
            self._log.prediction.timeline.save_chrome_trace(self._folder.predicted_trace_path)

    def _follow(self, step: int, plan: Plan, rebalancer: Rebalancer) -> None:
        """Keep and predict the plan that the model follows after this step."""
        if self.is_rank_zero:
            plan.save(self._folder.new_plan_path(step))
        self._record()  # a step of the plan before
        self._log.expect(
            Prediction.in_scenario(rebalancer.in_scenario(plan), rebalancer.scenario)
        )

    def _evaluate(self, step: int) -> None:
        if self._built.task.held_out is None:
            return
        evaluation = self.trainer.evaluate(self._built.task.held_out)
        score, name = evaluation.bits_per_target, self._built.task.score_name
        values = {"held_out_loss": evaluation.mean_loss, f"held_out_{_snake(name)}": score}
        self._log.log(step, values)
        self._display.show_score(step, name, score)

    def _say(self, said: str, level: int = logging.INFO) -> None:
        logger.log(level, "%s", said)
        self._display.show_remark(said)


def show_start(
    console: Console, conf: TrainConf, task: Task, model: HetFSDP, resumed: Resumed | None
) -> None:
    """Print what is trained, on how many devices, where it goes on, and what it may lose."""
    num_params = sum(unit.numel for unit in model.plan.units)
    console.print(
        f"{task.model_name or conf.model.kind.value} with {num_params:,} parameters on "
        f"{counted(model.plan.world_size, 'device')}"
        + (f" in {len(model.plan.stages)} stages" if model.plan.stages else "")
        + "; a step is "
        f"{counted(model.plan.global_batch_size, 'sample')}"
    )
    if resumed is not None:
        source = resumed.came_from or resumed.path
        say(console, f"goes on after step {model.step}, from {source}")
    if (loss := conf.checkpoint.loss) and not conf.replicas.every:
        say(console, loss)


def say_who_compiles(model: HetFSDP, reason: str | None, folder: RunFolder) -> str:
    """On which devices torch.compile works, and why not on others.  Collective."""
    if reason is not None:
        logger.warning("torch.compile does not work here: %s", reason)
    rows = model.exchange([reason is not None])
    eager = [position for position, [is_eager] in enumerate(rows) if is_eager]
    if not eager:
        return "every unit is compiled; the first steps and evaluation take longer"
    why = reason or f"see the logs in {folder.logs_dir}"
    return f"torch.compile does not work on devices {eager}, which run eagerly: {why}"


@may_take_long("writing the model")
def save_whole(model: HetFSDP, conf: TrainConf, folder: RunFolder) -> None:
    """Write the whole model, if the configuration says so.  Collective.

    One of transformers becomes a folder of its kind; of another one, rank zero holds all
    tensors meanwhile, under its own names.
    """
    is_hf = isinstance(conf.model, HfConf)
    if not (is_hf if conf.save_model is None else conf.save_model):
        return
    if isinstance(conf.model, HfConf):
        from shardhet.hf.folders.saving import save_pretrained

        save_pretrained(model, folder.model_dir)
        if model.rank == 0:
            conf.model.copy_tokenizer(conf.data, folder.model_dir)
        return
    # The format holds no objects (get_extra_state).
    whole = {k: v for k, v in model.state_dict().items() if isinstance(v, torch.Tensor)}
    if whole:
        write_model(whole, folder.model_path)


def _snake(name: str) -> str:
    return name.replace(" ", "_")


if __name__ == "__main__":
    main()
