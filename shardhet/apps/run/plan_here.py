"""The plan of a run, and the measurements of its devices."""

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import torch

from shardhet import DeviceSpec, Scenario
from shardhet.apps.cli.streamed import say
from shardhet.apps.launch.crash import RankConsole
from shardhet.apps.launch.memory_limits import MemoryLimit, OwnMemoryLimit
from shardhet.apps.launch.rank_env import RankEnv
from shardhet.apps.launch.run_folder import RunFolder
from shardhet.apps.run.model_to_measure import measured_here
from shardhet.apps.run.prediction import Prediction
from shardhet.comm.channel import Channel, may_take_long
from shardhet.config.train import OnOom, TrainConf
from shardhet.config.training import FilePlanConf, MeasuredPlanConf
from shardhet.planner.present import part_for, plan_for
from shardhet.planner.problem.constraints import Constraints
from shardhet.planner.problem.solution import PlanError
from shardhet.profiler.measure import MeasuringEffort
from shardhet.records.plan import EVERY_BLOCK, Plan
from shardhet.training.slow_devices import of_any_device

logger = logging.getLogger(__name__)
T = TypeVar("T")
MEASURED_WITH = re.compile(r"torch (\d[^\s,;]*)")  # in the notes of a profile


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanHere:
    """A plan, and the scenario that it was made in; None if nothing was measured."""

    plan: Plan
    scenario: Scenario | None
    is_made_here: bool = False  # for the devices that are there
    own_limit: MemoryLimit | None = None  # of this rank's device, if it is less than usual

    def prediction(self) -> Prediction | None:
        """One step of the plan, if anything was measured.

        Raises ``ValueError`` if that is of another model or of other devices.
        """
        if self.scenario is None:
            return None
        if self.is_made_here:  # hosts may have other names now than when they were measured
            return Prediction.in_scenario(of_any_device(self.plan), self.scenario)
        self.scenario.check_plan(self.plan, name="plan.measured")
        return Prediction.in_scenario(self.plan, self.scenario)


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

    Collective.  Devices that were out of memory before have lower budgets, if the run plans
    again for that.  Raises ``ValueError`` or ``PlanError`` on every rank if there is no plan.
    """
    limit = None
    if conf.on_oom is OnOom.REPLAN:
        limit = OwnMemoryLimit(folder, mine, env.local_rank).read()
    present, found = zip(*everyone.exchange_objects((mine, limit)), strict=True)
    limits = {rank: each for rank, each in enumerate(found) if each is not None}
    console = RankConsole(quiet=env.rank != 0)
    for each in limits.values():
        say(console, each.why)
    if isinstance(conf.plan, MeasuredPlanConf):
        whole = EVERY_BLOCK * conf.optim.to_record().takes_matrices
        shares = conf.plan.context_groups
        constraints = Constraints(whole_matrices=whole, may_share_samples=shares)
        asked = _Asked(conf.plan.global_batch_size, conf.plan.max_stages, constraints)
        stored = _of_rank_zero(partial(_stored, conf, conf.plan, folder, present), everyone)
        if not isinstance(stored, Scenario):
            stored = _measure(conf, stored, folder=folder, env=env, device=device)
        _tell_unlike(conf, stored, console)
        made = _planned(present, stored, asked, limits, everyone)
        return replace(made, own_limit=limit)
    measured = conf.plan.measured if isinstance(conf.plan, FilePlanConf) else None
    scenario = Scenario.load(measured) if measured else None
    plan = conf.to_plan(everyone.world_size)
    if scenario is not None:
        _tell_unlike(conf, scenario, console)
    if scenario is not None and limits:
        made = _planned(present, scenario, _Asked.like(plan), limits, everyone)
        return replace(made, own_limit=limit)
    return PlanHere(plan=plan, scenario=scenario)


def unlike_measured(conf: TrainConf, scenario: Scenario) -> list[str]:
    """What of this run is not as it was measured, in words."""
    workload = scenario.workload
    notes = [each.note for each in scenario.profile.devices]
    versions = {found[1] for note in notes if (found := MEASURED_WITH.search(note)) is not None}
    pairs: dict[str, tuple[Any, Any]] = {
        "data.seq_len": (workload.tokens_per_sample, conf.data.seq_len),
        "precision": (workload.param_dtype, conf.precision.value),
        "tensors that the optimizer keeps for each parameter": (
            workload.num_moments,
            conf.optim.to_record().count_moments(),
        ),
        "torch": (", ".join(sorted(versions)) or torch.__version__, torch.__version__),
    }
    return [
        f"{name} {measured}, here {here}"
        for name, (measured, here) in pairs.items()
        if measured != here
    ]


def _tell_unlike(conf: TrainConf, scenario: Scenario, console: RankConsole) -> None:
    unlike = unlike_measured(conf, scenario)
    if unlike:
        text = (
            f"plan.measured: it is of {'; '.join(unlike)}. Times and memory are predicted as "
            "if that were so here. Run shardhet measure with the keys of this run."
        )
        logger.warning("%s", text)
        say(console, f"Note: {text}")


def _stored(
    conf: TrainConf, plan: MeasuredPlanConf, folder: RunFolder, present: Sequence[DeviceSpec]
) -> Scenario | str:
    """What was measured of these devices, before the run or at a start of it; or why none."""
    given = plan.scenario()
    scenarios = [] if given is None else [given]
    mine = folder.measured_dirs(_what_is_measured(conf, plan))
    scenarios += [Scenario.load(each) for each in mine]
    why = "nothing was measured yet"
    for scenario in scenarios:
        try:
            part_for(present, scenario)
        except ValueError as error:
            why = str(error)
            continue
        return scenario
    return why


def _measure(
    conf: TrainConf,
    why: str,
    *,
    folder: RunFolder,
    env: RankEnv,
    device: torch.device,
) -> Scenario:
    """Measure all devices that are there, for this start and later ones.  Collective."""
    assert isinstance(conf.plan, MeasuredPlanConf)
    console = RankConsole(quiet=env.rank != 0)
    say(console, f"measuring all devices: {why}")
    effort = MeasuringEffort(
        max_microbatch_size=conf.plan.max_microbatch_size, time_limit_s=conf.plan.time_limit_s
    )
    with may_take_long("measuring"):
        measured = measured_here(conf, effort, env, device, console)
    if env.rank == 0:
        measured.save(folder.new_measured_dir(_what_is_measured(conf, conf.plan)))
    return measured.scenario


def _what_is_measured(conf: TrainConf, plan: MeasuredPlanConf) -> str:
    """What a profile depends on, besides devices."""
    num_moments = conf.optim.to_record().count_moments()
    return (
        f"{conf.model} {conf.data} {conf.precision.name} {conf.optim.kind} "
        f"num_moments={num_moments} max_microbatch_size={plan.max_microbatch_size} "
        f"torch={torch.__version__}"
    )


@dataclass(frozen=True, slots=True)
class _Asked:
    """What a plan is asked for."""

    global_batch_size: int
    max_stages: int = 1
    constraints: Constraints = field(default_factory=Constraints)

    @classmethod
    def like(cls, plan: Plan) -> "_Asked":
        """A plan of the same batch that may use what this one uses."""
        constraints = Constraints(
            may_keep_inputs_on_host=any(rank.inputs_on_host for rank in plan.ranks),
            may_keep_optimizer_on_host=any(rank.optimizer_on_host for rank in plan.ranks),
            whole_matrices=plan.whole_matrices or (),
            may_share_samples=plan.context_groups is not None,
        )
        return cls(plan.global_batch_size, len(plan.stages or (None,)), constraints)


def _planned(
    present: Sequence[DeviceSpec],
    measured: Scenario,
    asked: _Asked,
    limits: Mapping[int, MemoryLimit],
    everyone: Channel,
) -> PlanHere:
    scenario = part_for(present, measured)

    def plan() -> Plan:
        with may_take_long("planning"):
            try:
                return plan_for(
                    present,
                    measured,
                    global_batch_size=asked.global_batch_size,
                    constraints=asked.constraints,
                    budgets={i: each.nbytes for i, each in limits.items()},
                    max_stages=asked.max_stages,
                )
            except PlanError as error:
                if not limits:
                    raise
                before = "; ".join(each.why for each in limits.values())
                raise PlanError(f"{error} Budgets were lowered before: {before}.") from None

    # Rank zero alone plans: sums of floats might differ between kinds of processors.
    found = _of_rank_zero(plan, everyone)
    return PlanHere(plan=found, scenario=scenario, is_made_here=True)


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
