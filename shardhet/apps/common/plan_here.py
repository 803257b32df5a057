"""The plan of a run, and what was measured of its devices."""

from dataclasses import dataclass

from shardhet import DeviceSpec, Setting
from shardhet.apps.prediction import Prediction
from shardhet.comm.channel import Channel
from shardhet.comm.progress import phase
from shardhet.config.train import TrainConf
from shardhet.config.training import FilePlanConf, MeasuredPlanConf
from shardhet.planner.present import part_for, plan_for
from shardhet.records.plan import Plan
from shardhet.training.slow_devices import of_any_device


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


def plan_here(conf: TrainConf, mine: DeviceSpec, everyone: Channel) -> PlanHere:
    """The plan that the configuration states, or one for the devices that are there.

    Collective.  Raises ``ValueError`` or ``PlanError`` on every rank if there is none.
    """
    if isinstance(conf.plan, MeasuredPlanConf):
        return _planned(conf.plan, mine, everyone)
    setting = None
    if isinstance(conf.plan, FilePlanConf) and conf.plan.measured:
        setting = Setting.load(conf.plan.measured)
    return PlanHere(plan=conf.to_plan(everyone.world_size), setting=setting)


def _planned(conf: MeasuredPlanConf, mine: DeviceSpec, everyone: Channel) -> PlanHere:
    measured = conf.setting()
    present = everyone.exchange_objects(mine)
    setting = part_for(present, measured)
    plan: Plan | ValueError | None = None
    # Rank zero alone plans: sums of floats might differ between kinds of processors.
    if everyone.position == 0:
        with phase("planning"):
            try:
                plan = plan_for(present, measured, global_batch_size=conf.global_batch_size)
            except ValueError as error:
                plan = error
    found = everyone.exchange_objects(plan)[0]
    if isinstance(found, ValueError):
        raise found
    return PlanHere(plan=found, setting=setting, is_made_here=True)
