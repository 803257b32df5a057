"""Schemas of the groups optim, lr_scheduler, cluster, plan and logger."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import MISSING

from shardhet.config.checks import (
    Checked,
    ConfigError,
    above,
    at_least,
    check_measured,
    checked,
    config_errors,
    fields_of,
    is_fraction,
)
from shardhet.records.cluster import DeviceSpec
from shardhet.records.plan import Plan
from shardhet.records.stages import Stage

if TYPE_CHECKING:
    from shardhet.pricing.scenario import Scenario
    from shardhet.training.emulation import EmulatedDevice
    from shardhet.training.optim import OptimizerSpec, Schedule


class LrSchedulerKind(Enum):
    """Which learning rate schedule; follows from ``lr_scheduler=...``."""

    CONSTANT = "constant"
    LINEAR = "linear"
    COSINE = "cosine"
    WSD = "wsd"


class PlanKind(Enum):
    """How the plan is made; follows from ``plan=...``."""

    EVEN = "even"
    BY_HAND = "by_hand"
    FILE = "file"
    MEASURED = "measured"


class DeviceType(Enum):
    """What ranks compute on."""

    AUTO = "auto"  # CUDA if available, else the CPU
    CPU = "cpu"
    CUDA = "cuda"


class LoggerKind(Enum):
    """Where metrics go besides metrics.jsonl; follows from ``logger=...``."""

    NONE = "none"
    TENSORBOARD = "tensorboard"
    WANDB = "wandb"


@dataclass(kw_only=True)
class OptimConf(Checked, prefix="optim."):
    """A class of ``torch.optim`` and its arguments; torch's own values where null."""

    kind: str = MISSING  # the name of the class: AdamW, SGD, Adagrad
    lr: float = checked(MISSING, above(0))  # the peak of the schedule
    # On matrices; vectors never decay.
    weight_decay: float = checked(0.0, at_least(0))
    betas: list[float] | None = None
    eps: float | None = None
    momentum: float | None = None
    nesterov: bool | None = None
    arguments: dict[str, Any] = field(default_factory=dict)  # others of the class

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.betas is not None and len(self.betas) != 2:
            raise ConfigError(f"optim.betas: {list(self.betas)} but it must be two numbers.")

    def to_record(self) -> "OptimizerSpec":
        """What builds the optimizer."""
        from shardhet.training.optim import OptimizerSpec

        named = {key: getattr(self, key) for key in ("betas", "eps", "momentum", "nesterov")}
        return OptimizerSpec(
            name=self.kind,
            learning_rate=self.lr,
            weight_decay=self.weight_decay,
            arguments={key: each for key, each in named.items() if each is not None}
            | self.arguments,
        )

    def check(self) -> None:
        """Raise ConfigError if torch has no such optimizer, or it needs more than gradients."""
        try:
            self.to_record().count_moments()
        except (RuntimeError, TypeError, ValueError) as error:
            raise ConfigError(f"optim: {self.kind}: {error}. Change optim.") from None


@dataclass(kw_only=True)
class LrSchedulerConf(Checked, prefix="lr_scheduler."):
    """The learning rate schedule; lengths are fractions of ``num_steps``."""

    kind: LrSchedulerKind = MISSING
    warmup_fraction: float = checked(0.05, is_fraction)
    # Of the peak, at the end; ignored by constant.
    final_fraction: float = checked(0.1, is_fraction)
    decay_fraction: float = checked(0.2, is_fraction)  # of the steps; only for wsd

    def __post_init__(self) -> None:
        super().__post_init__()
        is_wsd = self.kind is LrSchedulerKind.WSD
        if is_wsd and self.warmup_fraction + self.decay_fraction > 1:
            raise ConfigError(
                f"lr_scheduler.decay_fraction: {self.decay_fraction} beside a warmup_fraction "
                f"of {self.warmup_fraction} but together they must not exceed 1."
            )

    def to_record(self, num_steps: int) -> "Schedule":
        """The schedule for a run of ``num_steps`` steps."""
        from shardhet.training.optim import WarmupDecay

        is_wsd = self.kind is LrSchedulerKind.WSD
        return WarmupDecay(
            num_steps=num_steps,
            num_warmup_steps=round(self.warmup_fraction * num_steps),
            num_decay_steps=round(self.decay_fraction * num_steps) if is_wsd else None,
            final_fraction=1.0
            if self.kind is LrSchedulerKind.CONSTANT
            else self.final_fraction,
            is_cosine=self.kind is LrSchedulerKind.COSINE,
        )


@dataclass(kw_only=True)
class ClusterConf(Checked, prefix="cluster."):
    """Which processes take part."""

    # None: that of the plan, else one per visible GPU.
    num_ranks: int | None = checked(None, at_least(1))
    device: DeviceType = DeviceType.AUTO
    kinds: list[str] = field(default_factory=list)  # the device kinds that ranks announce
    num_threads: int = checked(1, at_least(1))  # of each rank, on the CPU
    speeds: list[float] = field(default_factory=list)  # emulated: 1 is the process's own speed
    memory_mib: list[int] = field(default_factory=list)  # emulated: cap on model and data

    def __post_init__(self) -> None:
        super().__post_init__()
        for i, speed in enumerate(self.speeds):
            above(0)(f"cluster.speeds[{i}]", speed)
            if speed > 1:
                raise ConfigError(
                    f"cluster.speeds[{i}]: {speed} but a process can only be made slower. "
                    "Divide all speeds by the highest."
                )
        for i, mib in enumerate(self.memory_mib):
            at_least(1)(f"cluster.memory_mib[{i}]", mib)
        if self.is_emulated and self.device is not DeviceType.CPU:
            raise ConfigError(
                f"cluster.device: {self.device.name} but cluster.speeds and cluster.memory_mib "
                "emulate devices by processes on the CPU. Set cluster.device=CPU, or drop them."
            )
        if self.num_ranks is None:
            return
        for name, values in self.per_rank.items():
            if values and len(values) != self.num_ranks:
                raise ConfigError(
                    f"cluster.{name}: {len(values)} entries but cluster.num_ranks is "
                    f"{self.num_ranks}. Give one for every rank, or none."
                )

    @property
    def per_rank(self) -> dict[str, Sequence[object]]:
        """The lists that have one entry per rank, or none, by name."""
        return {"kinds": self.kinds, "speeds": self.speeds, "memory_mib": self.memory_mib}

    @property
    def is_emulated(self) -> bool:
        """Whether processes are made slower or given less memory."""
        return bool(self.speeds or self.memory_mib)

    def emulated_device(self, rank: int) -> "EmulatedDevice | None":
        """The device that the rank's process emulates; None if it is not emulated."""
        if not self.is_emulated:
            return None
        from shardhet.training.emulation import EmulatedDevice

        return EmulatedDevice(
            speed=self.speeds[rank] if self.speeds else 1.0,
            memory_bytes=self.memory_mib[rank] * 2**20 if self.memory_mib else None,
        )

    def devices(self, world_size: int) -> list[DeviceSpec]:
        """The device that the plan expects at each position."""
        kinds: Sequence[str | None] = self.kinds or [None] * world_size
        if len(kinds) != world_size:
            raise ConfigError(
                f"cluster.kinds: {len(kinds)} names but there are {world_size} ranks. Name "
                "every rank's device, or none."
            )
        return [DeviceSpec(kind=kind) for kind in kinds]


@dataclass(kw_only=True)
class PlanConf(Checked, prefix="plan."):
    """What each device computes and stores."""

    kind: PlanKind = MISSING

    @property
    def stated_world_size(self) -> int | None:
        """The number of devices that it is for; None if it adapts to the cluster."""
        return None

    @property
    def usual_world_size(self) -> int | None:
        """The number of devices to start if nothing says how many."""
        return None

    def to_record(self, devices: Sequence[DeviceSpec]) -> Plan:
        """The plan for these devices."""
        raise NotImplementedError


@dataclass(kw_only=True)
class EvenPlanConf(PlanConf):
    """Every device computes and stores the same, as in stock FSDP."""

    kind: PlanKind = PlanKind.EVEN
    global_batch_size: int = checked(32, at_least(1))
    microbatch_size: int = checked(8, at_least(1))
    recompute: bool = False
    whole_matrices: bool = False  # of blocks, each on one device, as Muon needs them

    def to_record(self, devices: Sequence[DeviceSpec]) -> Plan:
        """The plan for these devices; a remainder of samples goes to the first."""
        number = len(devices)
        whole, rest = divmod(self.global_batch_size, number)
        with config_errors():
            return Plan.by_hand(
                microbatch_sizes=[self.microbatch_size] * number,
                rank_batch_sizes=[whole + (i < rest) for i in range(number)],
                recompute=self.recompute,
                whole_matrices=self.whole_matrices,
                devices=devices,
            )


@dataclass(kw_only=True)
class StageConf:
    """One stage of a pipeline: its units, and how many devices it has, next in the lists."""

    units: list[str] = MISSING  # patterns: [embedding, "blocks.[01]"]
    num_ranks: int = MISSING
    in_flight: int | None = None  # rounds begun and not finished; null: as stages follow, and 1

    def to_record(self) -> Stage:
        """The stage of a plan."""
        return Stage(**fields_of(self, Stage) | {"units": tuple(self.units)})


@dataclass(kw_only=True)
class ByHandPlanConf(PlanConf):
    """One entry per device in every list."""

    kind: PlanKind = PlanKind.BY_HAND
    microbatch_sizes: list[int] = MISSING
    num_microbatches: list[int] = field(default_factory=list)  # empty: one microbatch each
    state_shares: list[float] = field(default_factory=list)  # empty: even
    recompute: list[bool] = field(default_factory=list)  # empty: no recomputation
    inputs_on_host: list[bool] = field(default_factory=list)  # of recomputed units
    optimizer_on_host: list[bool] = field(default_factory=list)  # empty: on the devices
    reshard_after_forward: bool = True
    num_rounds: int = 1  # of one optimizer step; the lists are of one round
    reshard_after_backward: bool = True
    reduce_each_round: bool = True
    resident_units: list[str] = field(default_factory=list)  # ["*"]: frozen weights stay whole
    whole_matrices: bool = False  # of blocks, each on one device, as Muon needs them
    global_batch_size: int | None = None  # null: all rounds are full
    stages: list[StageConf] = field(default_factory=list)  # of a pipeline; empty: none

    @property
    def stated_world_size(self) -> int | None:
        """One device per entry."""
        return len(self.microbatch_sizes)

    def to_record(self, devices: Sequence[DeviceSpec]) -> Plan:
        """The plan for these devices."""
        if not self.microbatch_sizes:
            raise ConfigError(
                "plan.microbatch_sizes: it is empty. Give one entry per device: "
                "'plan.microbatch_sizes=[8,4]'."
            )
        stages = [each.to_record() for each in self.stages]
        given = fields_of(self, Plan.by_hand) | {"stages": stages, "devices": devices}
        with config_errors():
            return Plan.by_hand(**{name: each for name, each in given.items() if each != []})


@dataclass(kw_only=True)
class FilePlanConf(PlanConf):
    """A plan that was made before, as JSON."""

    kind: PlanKind = PlanKind.FILE
    path: str = MISSING
    measured: str = ""  # folder of `shardhet measure`, to compare the run with its prediction

    def __post_init__(self) -> None:
        super().__post_init__()
        if not Path(self.path).is_file():
            raise ConfigError(
                f"plan.path: {self.path!r} does not exist. Pass the path of a plan.json."
            )
        if self.measured:
            check_measured("plan.measured", Path(self.measured))

    @property
    def stated_world_size(self) -> int | None:
        """As many devices as the file has."""
        return self.to_record(()).world_size

    def to_record(self, devices: Sequence[DeviceSpec]) -> Plan:
        """The plan as read from the file."""
        with config_errors("plan.path"):
            return Plan.load(self.path)


@dataclass(kw_only=True)
class MeasuredPlanConf(PlanConf):
    """A plan that is made at every start, for those of the measured devices that are there."""

    kind: PlanKind = PlanKind.MEASURED
    # Folder of `shardhet measure`.  Devices that are not in it are measured when they are first
    # there, with all others, into measured/ of the run folder; null: all are.
    measured: str | None = None
    global_batch_size: int = checked(32, at_least(1))
    # That is measured then; larger ones are extrapolated.
    max_microbatch_size: int = checked(32, at_least(1))
    # Of that, approximate, for compute; collectives come on top.
    time_limit_s: float = checked(60.0, above(0))
    max_stages: int = checked(1, at_least(1))  # of a pipeline, where that is faster; 1: none
    context_groups: bool = False  # devices may compute a sample together, by tokens

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.measured is not None:
            check_measured("plan.measured", Path(self.measured))

    @property
    def usual_world_size(self) -> int | None:
        """As many devices as were measured."""
        scenario = self.scenario()
        return None if scenario is None else scenario.cluster.world_size

    def scenario(self) -> "Scenario | None":
        """What was measured before the run."""
        from shardhet.pricing.scenario import Scenario

        if self.measured is None:
            return None
        with config_errors("plan.measured"):
            return Scenario.load(self.measured)


@dataclass(kw_only=True)
class LoggerConf:
    """Where metrics go besides metrics.jsonl."""

    kind: LoggerKind = LoggerKind.NONE
    project: str = "shardhet"  # only wandb has projects
    is_offline: bool = True  # only wandb can be online
