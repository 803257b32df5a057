"""What one rank of a training run needs before its first step."""

from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from shardhet import DeviceSpec, HetFSDP, Scenario
from shardhet.apps.launch.joining import announced_device
from shardhet.apps.launch.rank_env import RankEnv
from shardhet.apps.launch.run_folder import RunFolder
from shardhet.apps.run.checkpointing import RunCheckpoints
from shardhet.apps.run.plan_here import plan_here
from shardhet.apps.run.prediction import Prediction
from shardhet.apps.run.task import PARAM_DTYPE_BY_PRECISION, Task, make_files, make_task
from shardhet.checkpoint import Resumed
from shardhet.comm.channel import Channel, check_same_on_all_ranks
from shardhet.comm.groups import Communicators
from shardhet.config.checks import fields_of
from shardhet.config.compose import portable_values
from shardhet.config.train import Precision, TrainConf
from shardhet.fsdp.params.host_step import check_room
from shardhet.planner.problem.constraints import Constraints
from shardhet.records.plan import Plan
from shardhet.training.compiling import compile_units
from shardhet.training.guard import BadStepGuard
from shardhet.training.loss_scaling import LossScaler
from shardhet.training.trainer import Trainer


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """The parts of a run on one rank."""

    task: Task
    trainer: Trainer
    checkpoints: RunCheckpoints
    resumed: Resumed | None  # what was loaded
    devices: list[DeviceSpec]  # by position of the plan
    prediction: Prediction | None
    scenario: Scenario | None  # that the plan was made from, if it was
    constraints: Constraints  # of plans to come
    why_eager: str | None  # why this rank's units are not compiled, if they were to be


def build(conf: TrainConf, folder: RunFolder, env: RankEnv, device: torch.device) -> Built:
    """Plan, model, optimizer, trainer, and the state of the checkpoint to go on from.

    Collective.  Raises on every rank if the ranks
    were given different configurations or data, if there is no plan, or if plan, model and
    checkpoint do not belong together.
    """
    everyone = Channel.of_world()
    check_same_on_all_ranks(portable_values(conf), what="configuration", channel=everyone)
    spec = announced_device(conf.cluster, env, device)
    here = plan_here(conf, spec, everyone, folder=folder, env=env, device=device)
    task = _task(conf, here.plan, folder, env, everyone)
    why_eager = compile_units(task.module, device) if conf.compile else None
    trainer = _trainer(conf, here.plan, task, env, spec, device)
    checkpoints = RunCheckpoints(
        conf,
        folder,
        trainer,
        data_digest=task.data_digest,
        may_go_on=env.may_go_on or folder.memory_limits_dir.exists(),
    )
    resumed = checkpoints.resume()
    trainer.peak_memory.forget()
    limits = enumerate(trainer.model.exchange_objects(here.own_limit))
    budgets = {position: each.nbytes for position, each in limits if each is not None}
    return Built(
        task=task,
        trainer=trainer,
        checkpoints=checkpoints,
        resumed=resumed,
        devices=found_devices(trainer.model, spec),
        prediction=here.prediction(),
        scenario=here.scenario,
        constraints=Constraints().with_budgets(budgets),
        why_eager=why_eager,
    )


def _task(
    conf: TrainConf, plan: Plan, folder: RunFolder, env: RankEnv, everyone: Channel
) -> Task:
    token_dir = folder.path / "tokens"
    if env.local_rank == 0:
        make_files(conf, token_dir=token_dir)
    everyone.exchange([env.local_rank])  # the others wait for the files
    task = make_task(conf, global_batch_size=plan.global_batch_size, token_dir=token_dir)
    check_same_on_all_ranks(task.data_digest, what="data", channel=everyone)
    return task


def _trainer(
    conf: TrainConf,
    plan: Plan,
    task: Task,
    env: RankEnv,
    spec: DeviceSpec,
    device: torch.device,
) -> Trainer:
    emulated, peak_memory = conf.cluster.emulated_device(env.rank), None
    if emulated is not None:
        Communicators.over(dist.group.WORLD, device)  # their threads are not capped
        peak_memory = emulated.cap_memory()
    model = HetFSDP(
        task.module,
        plan,
        device=device,
        param_dtype=PARAM_DTYPE_BY_PRECISION.get(conf.precision),
        loss_fn=task.loss_fn,
        seed=conf.seed,
        device_spec=spec,
    )
    optimizers = conf.optim.to_record().build_each(model.named_parameters())
    for optimizer in optimizers:
        check_room(optimizer)
    if emulated is not None:
        emulated.slow_down(model, *optimizers)
    return Trainer(
        model,
        optimizers,
        task.batches,
        schedule=conf.lr_scheduler.to_record(conf.num_steps),
        max_grad_norm=conf.max_grad_norm,
        device=device,
        peak_memory=peak_memory,
        run=task.run,
        guard=BadStepGuard(**fields_of(conf.guard, BadStepGuard)),
        loss_scaler=LossScaler(device) if conf.precision is Precision.FP16 else None,
    )


def found_devices(model: HetFSDP, spec: DeviceSpec) -> list[DeviceSpec]:
    """What ranks announce, by position, with the memory that the plan allows.  Collective."""
    return [
        replace(
            announced,
            memory_capacity_bytes=planned.device.memory_capacity_bytes
            or announced.memory_capacity_bytes,
        )
        for announced, planned in zip(
            model.exchange_objects(spec), model.plan.ranks, strict=True
        )
    ]
