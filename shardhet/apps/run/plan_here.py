"""The plan of a run, and the measurements of its devices."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch

from shardhet import DeviceSpec, Setting
from shardhet.apps.launch.crash import RankConsole
from shardhet.apps.launch.rank_env import RankEnv
from shardhet.apps.launch.run_folder import RunFolder
from shardhet.apps.run.measure_report import Progress
from shardhet.apps.run.model_to_measure import model_to_measure
from shardhet.apps.run.prediction import Prediction
from shardhet.comm.channel import Channel
from shardhet.comm.progress import phase
from shardhet.config.train import TrainConf
from shardhet.config.training import FilePlanConf, MeasuredPlanConf
from shardhet.planner.present import part_for, plan_for
from shardhet.profiler.measure import MeasuringEffort, measure
from shardhet.records.plan import Plan
from shardhet.training.slow_devices import of_any_device

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanHere:
    """A plan, and the setting that it was made in; None if nothing was measured."""

    plan: Plan
    setting: Setting | None
    is_made_here: bool = False  # for the devices that are there

    def prediction(self) -> Prediction | None:
        """One step of the plan, if anything was measured.

        Raises ``ValueError`` if that is of another model or of other devices.
        """
        if self.setting is None:
            return None
        if self.is_made_here:  # hosts may have other names now than when they were measured
            return Prediction.in_setting(of_any_device(self.plan), self.setting)
        return Prediction.of(self.plan, self.setting)


def plan_here(
    conf: TrainConf,
    mine: DeviceSpec,
    everyone: Channel,
    *,
    folder: RunFolder,
    env: RankEnv,
    device: torch.device,
) -> PlanHere:
    """The plan that the configuration states, or one for the devices that are there.

    Collective.  Raises ``ValueError`` or ``PlanError`` on every rank if there is none.
    """
    if isinstance(conf.plan, MeasuredPlanConf):
        present = everyone.exchange_objects(mine)
        stored = _of_rank_zero(partial(_stored, conf, conf.plan, folder, present), everyone)
        if isinstance(stored, Setting):
            return _planned(present, stored, conf.plan, everyone)
        setting = _measure(conf, mine, stored, folder=folder, env=env, device=device)
        return _planned(present, setting, conf.plan, everyone)
    measured = conf.plan.measured if isinstance(conf.plan, FilePlanConf) else None
    return PlanHere(
        plan=conf.to_plan(everyone.world_size),
        setting=Setting.load(measured) if measured else None,
    )


def _stored(
    conf: TrainConf, plan: MeasuredPlanConf, folder: RunFolder, present: Sequence[DeviceSpec]
) -> Setting | str:
    """What was measured of these devices, before the run or at a start of it; or why none."""
    given = plan.setting()
    settings = [] if given is None else [given]
    mine = folder.measured_dirs(_what_is_measured(conf, plan))
    settings += [Setting.load(each) for each in mine]
    why = "nothing was measured yet"
    for setting in settings:
        try:
            part_for(present, setting)
        except ValueError as error:
            why = str(error)
            continue
        return setting
    return why


def _measure(
    conf: TrainConf,
    mine: DeviceSpec,
    why: str,
    *,
    folder: RunFolder,
    env: RankEnv,
    device: torch.device,
) -> Setting:
    """Measure all devices that are there, for this start and later ones.  Collective."""
    assert isinstance(conf.plan, MeasuredPlanConf)
    console = RankConsole(quiet=env.rank != 0, highlight=False)
    console.print(f"measuring all devices: {why}", markup=False, soft_wrap=True)
    with Progress(console) as progress, phase("measuring"):
        measured = measure(
            model_to_measure(conf),
            device=device,
            device_spec=mine,
            emulated=conf.cluster.emulated_device(env.rank),
            optimizer=conf.optim.to_record(),
            effort=MeasuringEffort(
                max_microbatch_size=conf.plan.max_microbatch_size,
                time_limit_s=conf.plan.time_limit_s,
            ),
            on_progress=progress.show,
        )
    if env.rank == 0:
        measured.save(folder.new_measured_dir(_what_is_measured(conf, conf.plan)))
    return measured.setting


def _what_is_measured(conf: TrainConf, plan: MeasuredPlanConf) -> str:
    """What a profile depends on, besides devices."""
    num_moments = conf.optim.to_record().count_moments()
    return (
        f"{conf.model} {conf.data} {conf.precision.name} {conf.optim.kind} "
        f"num_moments={num_moments} max_microbatch_size={plan.max_microbatch_size} "
        f"torch={torch.__version__}"
    )


def _planned(
    present: Sequence[DeviceSpec],
    measured: Setting,
    conf: MeasuredPlanConf,
    everyone: Channel,
) -> PlanHere:
    setting = part_for(present, measured)

    def plan() -> Plan:
        with phase("planning"):
            return plan_for(
                present,
                measured,
                global_batch_size=conf.global_batch_size,
                max_stages=conf.max_stages,
            )

    # Rank zero alone plans: sums of floats might differ between kinds of processors.
    found = _of_rank_zero(plan, everyone)
    return PlanHere(plan=found, setting=setting, is_made_here=True)


def _of_rank_zero(work: Callable[[], T], everyone: Channel) -> T:
    """What ``work`` returns on rank zero, or raises there, on every rank.  Collective."""
    outcome: Any = None
    if everyone.position == 0:
        try:
            outcome = work()
        except Exception as error:
            outcome = error
    found = everyone.exchange_objects(outcome)[0]
    if isinstance(found, Exception):
        raise found
    return found
