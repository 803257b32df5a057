"""TrainConf: the configuration of a training run, and checks that it can run."""

from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from omegaconf import MISSING

from shardhet.config.checks import (
    Checked,
    ConfigError,
    above,
    at_least,
    check_fp16_accumulation,
    checked,
    one_of,
)
from shardhet.config.models import (
    NUM_BYTES,
    DataConf,
    DecoderConf,
    HfConf,
    ModelConf,
    ModelKind,
)
from shardhet.config.training import (
    ClusterConf,
    DeviceType,
    FilePlanConf,
    LoggerConf,
    LrSchedulerConf,
    MeasuredPlanConf,
    OptimConf,
    PlanConf,
)
from shardhet.records.plan import HoldsFor, Plan
from shardhet.training.hooks.bad_steps import OnBadStep


class Precision(Enum):
    """Number formats; gradients are summed in the format of the stored parameters."""

    AUTO = "auto"  # that of a plan that says it, else FP32; resolved in ``__post_init__``
    FP64 = "float64"
    FP32 = "float32"
    BF16 = "bfloat16"  # of gathered parameters and activations; stored in float32
    FP16 = "float16"  # the same, and the loss is scaled; for cards without bfloat16


class OnOom(Enum):
    """What happens if a rank is out of memory."""

    STOP = "stop"  # the run fails on every rank
    # Its device's budget is lowered; all ranks start again, plan again with it, and go on from
    # the newest checkpoint or replica.
    REPLAN = "replan"


TRANSPORTS = ("auto", "gloo")  # of shardhet.comm.calls, which imports torch


@dataclass(kw_only=True)
class TraceConf(Checked, prefix="trace_steps."):
    """Which steps torch.profiler records, on every rank."""

    first_step: int = checked(10, at_least(1))
    num_steps: int = checked(3, at_least(1))


@dataclass(kw_only=True)
class CheckpointConf(Checked, prefix="checkpoint."):
    """When the whole state is written to checkpoints/ in the run folder, and what stays."""

    # Steps between two checkpoints, and one at the end; 0: none.
    every: int = checked(0, at_least(0))
    # Where there are none by steps: minutes between two, and one at the end of a run that has
    # had one; 0: none.
    every_minutes: float = checked(30.0, at_least(0))
    keep_last: int = checked(2, at_least(0))  # newest ones that stay; 0: all
    keep_every: int = checked(0, at_least(0))  # steps whose multiples stay, too; 0: none
    in_background: bool = False  # copy the state to host memory and go on while it is written

    @property
    def loss(self) -> str | None:
        """What a run loses that fails, in words; None where checkpoints are made by steps."""
        if self.every:
            return None
        times = f"every {self.every_minutes:g} minutes (checkpoint.every_minutes)"
        return (
            f"checkpoint.every=0: checkpoints {times if self.every_minutes else 'only'} and on "
            "Ctrl-C or SIGTERM; a run that fails loses "
            + ("the steps since the last one" if self.every_minutes else "all of its steps")
        )


@dataclass(kw_only=True)
class ReplicasConf(Checked, prefix="replicas."):
    """When the whole state is kept on the nodes themselves, each rank's rows on two of them.

    ``resume=auto`` then loses no step if a node is lost, and reads little from where the
    checkpoints are.  Each node holds two versions of what its ranks store, and of what others
    have it keep.
    """

    every: int = checked(0, at_least(0))  # steps between two replicas; 0: none
    # Of each node's own: in its memory or on its disk.  null: /dev/shm where there is one, and
    # the folder for temporary files elsewhere.
    folder: str | None = None


@dataclass(kw_only=True)
class GuardConf(Checked, prefix="guard."):
    """Which steps are bad: a loss or gradient norm that is not finite, or a spike."""

    on_bad_step: OnBadStep = OnBadStep.STOP
    # Also bad: above so many times the median of the last 50 good steps.  null: no such limit.
    spike_factor: float | None = checked(None, above(1))
    # Bad steps, before the run stops in any case.
    max_in_a_row: int = checked(10, at_least(1))


@dataclass(kw_only=True)
class StopOnSignalConf(Checked, prefix="stop_on_signal."):
    """How a run is told to end soon: Ctrl-C, SIGTERM or SIGUSR1, or a file that appears.

    The step in progress is finished, a checkpoint is written, and all ranks end with status 0;
    ``resume=RUN_FOLDER`` goes on from there.  The file ``stop`` in that folder does it
    too.
    """

    file: str | None = None  # of the notices that a cloud gives a spot instance, for example
    # After SIGTERM to shardhet train, its ranks are killed.
    grace_s: int = checked(30, at_least(1))


AUTO = "auto"


@dataclass(kw_only=True)
class RanksConf(Checked):
    """What training and measuring have in common: a model on ranks."""

    seed: int = checked(0, at_least(0))  # of weights, batches and dropout
    precision: Precision = Precision.AUTO
    # Products in float16 also sum in float16: twice as fast on GeForce cards, but sums keep 11
    # bits instead of 24, so those of K terms are off by about sqrt(K) / 2^11 of their size.
    fp16_accumulation: bool = False
    # The run ends, naming the rank, if one stands still while others wait for it: for as long,
    # or for five times the slowest of the last steps if that is longer; before the first step
    # has ended, while torch compiles and while a checkpoint is written, ten times as long.
    # 0 or null: never.
    hang_timeout_s: float | None = checked(60.0, at_least(0))
    # gloo: through sockets alone, and in place of NCCL, as GPUs of two vendors need it
    transport: str = checked("auto", one_of(TRANSPORTS))
    model: ModelConf = MISSING
    data: DataConf = MISSING  # of measurements only its shapes matter
    optim: OptimConf = MISSING
    cluster: ClusterConf = MISSING

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.precision is Precision.AUTO:
            self.precision = self._usual_precision
        check_fp16_accumulation(self.fp16_accumulation, self.precision)

    @property
    def _usual_precision(self) -> Precision:
        return Precision.FP32

    @property
    def _planned_world_size(self) -> int | None:
        """The number of ranks that the plan is for, if it is for so many alone."""
        return None

    @property
    def _usual_world_size(self) -> int:
        """One rank per visible GPU."""
        import torch

        is_on_cpu = self.cluster.device is DeviceType.CPU
        return 1 if is_on_cpu else max(1, torch.cuda.device_count())

    def world_size(self, num_launched: int | None) -> int:
        """The number of ranks needed; ``num_launched`` is the number running, if any."""
        stated = {
            "cluster.num_ranks": self.cluster.num_ranks,
            "plan": self._planned_world_size,
            **{f"cluster.{k}": len(v) or None for k, v in self.cluster.per_rank.items()},
            "the launcher": num_launched,
        }
        known = {key: number for key, number in stated.items() if number}
        if len(set(known.values())) > 1:
            said = ", ".join(f"{key} says {number}" for key, number in known.items())
            raise ConfigError(
                f"number of ranks: {said}, but all must agree. Change or drop one of them."
            )
        return next(iter(known.values()), 0) or self._usual_world_size

    def check(self) -> None:
        """Raise if the device is not here, or the model cannot be trained on the data."""
        import torch

        if self.cluster.device is DeviceType.CUDA and not torch.cuda.is_available():
            raise ConfigError(
                "cluster.device: CUDA but torch finds no GPU. Set cluster.device=CPU, or "
                "install the torch build for your driver."
            )
        self.optim.check()
        self.check_model_fits_data()

    def check_model_fits_data(self) -> None:
        """Raise if the model cannot be built or cannot be trained on the data."""
        if isinstance(self.model, DecoderConf):
            self.model.to_record(vocab_size=NUM_BYTES, seq_len=self.data.seq_len)
        elif isinstance(self.model, HfConf):
            self.model.check_fits(self.data)


@dataclass(kw_only=True)
class TrainConf(RanksConf):
    """A training run.  Every key is here or in the class of its group."""

    run_dir: str = MISSING
    num_steps: int = checked(200, at_least(1))
    max_grad_norm: float = checked(1.0, above(0))
    compile: bool = False  # compile each unit with torch.compile, on ranks where that works
    # Steps between two log lines, and two reports of device use.
    log_every: int = checked(10, at_least(1))
    # Steps between two evaluations; 0: only at the end.
    eval_every: int = checked(0, at_least(0))
    # The whole model at the end: model.safetensors in the run folder; with model=hf, the folder
    # model/ that from_pretrained opens (PeftModel's, of adapters).  null: with model=hf.
    save_model: bool | None = None
    checkpoint: CheckpointConf = field(default_factory=CheckpointConf)
    replicas: ReplicasConf = field(default_factory=ReplicasConf)
    guard: GuardConf = field(default_factory=GuardConf)
    stop_on_signal: StopOnSignalConf = field(default_factory=StopOnSignalConf)
    # REPLAN: with a lower budget for the device, from the newest checkpoint or replica
    on_oom: OnOom = OnOom.STOP
    # If a device stays slower than plan.measured says, which is always said: plan anew, and
    # move parameters and optimizer states to the new plan without a restart.
    rebalance: bool = False
    # The folder of a run: it goes on, with its configuration but for the keys that are given.
    # "auto": the newest whole checkpoint in the run folder, if there is one; or the path of a
    # checkpoint, or of a folder with several, which must exist; null: begin at step 0.  Where
    # the launcher starts ranks again, they go on from what this run itself has kept, if any.
    resume: str | None = None
    trace: bool = False
    trace_steps: TraceConf = field(default_factory=TraceConf)
    lr_scheduler: LrSchedulerConf = MISSING
    plan: PlanConf = MISSING
    logger: LoggerConf = MISSING

    def __post_init__(self) -> None:
        super().__post_init__()
        rolls_back = self.guard.on_bad_step is OnBadStep.ROLL_BACK
        if rolls_back and not self.checkpoint.every:
            raise ConfigError(
                "guard.on_bad_step: ROLL_BACK but checkpoint.every is 0, so there is no "
                "checkpoint to load. Set checkpoint.every=500, for example."
            )
        last_traced = self.trace_steps.first_step + self.trace_steps.num_steps - 1
        if self.trace and last_traced > self.num_steps:
            raise ConfigError(
                f"trace_steps: steps up to {last_traced} but num_steps is {self.num_steps}. "
                "Lower trace_steps.first_step or trace_steps.num_steps."
            )

    @property
    def _usual_precision(self) -> Precision:
        held = self._plan_holds_for
        return Precision.FP32 if held is None else Precision(held.param_dtype)

    @property
    def _planned_world_size(self) -> int | None:
        return self.plan.stated_world_size

    @property
    def _usual_world_size(self) -> int:
        return self.plan.usual_world_size or super()._usual_world_size

    def to_plan(self, world_size: int) -> Plan:
        """The plan for ``world_size`` ranks."""
        return self.plan.to_record(self.cluster.devices(world_size))

    @property
    def _plan_holds_for(self) -> HoldsFor | None:
        return (
            self.plan.to_record(()).holds_for if isinstance(self.plan, FilePlanConf) else None
        )

    def check_holds(self) -> None:
        """Raise if the plan was made for another precision, or for less memory."""
        held = self._plan_holds_for
        if held is None:
            return
        mismatch = held.mismatch(
            param_dtype=self.precision.value,
            tokens_per_sample=self.data.seq_len,
            num_moments=self.optim.to_record().count_moments(),
        )
        if mismatch is not None:
            raise ConfigError(
                f"{mismatch}. Train as it says (precision=, data.seq_len=, optim=), or plan "
                "again for this run."
            )

    def check_resume(self) -> None:
        """Raise if there is nothing at the path to resume from."""
        if self.resume not in (None, AUTO) and not Path(self.resume).is_dir():
            raise ConfigError(
                f"resume: {self.resume!r} is not a folder. Give the path of a run or of a "
                "checkpoint, or resume=auto for the newest one in the run folder."
            )

    @property
    def can_plan_again(self) -> bool:
        """Whether something says how fast the devices are and what the model needs."""
        return isinstance(self.plan, MeasuredPlanConf) or (
            isinstance(self.plan, FilePlanConf) and bool(self.plan.measured)
        )

    def check_on_oom(self, why_not_started_again: str | None = None) -> None:
        """Raise if a run that is out of memory cannot plan again and go on.

        ``why_not_started_again`` is of ranks that would not start again, and says what helps.
        """
        if self.on_oom is not OnOom.REPLAN:
            return
        if not self.can_plan_again:
            raise ConfigError(
                f"on_oom: REPLAN but plan={self.plan.kind.value} leaves nothing to plan. Set "
                "plan=measured, or plan=file with plan.measured, the folder of `shardhet "
                "measure`; or on_oom=STOP."
            )
        if not (self.checkpoint.every or self.replicas.every):
            raise ConfigError(
                "on_oom: REPLAN but checkpoint.every and replicas.every are 0, so there is "
                "nothing to go on from. Set checkpoint.every=500, for example."
            )
        if why_not_started_again is not None:
            raise ConfigError(f"on_oom: REPLAN but {why_not_started_again}")

    def check_rebalance(self) -> None:
        """Raise if there is nothing to plan from."""
        if self.rebalance and not self.can_plan_again:
            raise ConfigError(
                "rebalance: true but nothing says how fast the devices are. Set plan=measured "
                "or plan=file, with plan.measured, the folder of `shardhet measure`."
            )

    def check_model_fits_data(self) -> None:
        """Raise if the model cannot be built or cannot be trained on the data."""
        super().check_model_fits_data()
        if self.model.kind is ModelKind.IMPORTED:
            raise ConfigError(
                "model: imported is for measure and plan. Train it in a loop of your own, with "
                "HetFSDP(model, Plan.load('plan.json')), or choose another model."
            )
        if isinstance(self.model, HfConf):
            self.model.check_is_trained()
