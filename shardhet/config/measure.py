"""MeasureConf: the configuration of ``shardhet measure``."""

from dataclasses import dataclass
from pathlib import Path

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING

from shardhet.config.checks import Checked, above, at_least, checked, one_of
from shardhet.config.compose import load_checked, register_schemas
from shardhet.config.models import DataConf, ModelConf
from shardhet.config.train import (
    TRANSPORTS,
    Precision,
    agreed_world_size,
    check_device,
    check_fp16_accumulation,
    check_model_fits_data,
)
from shardhet.config.training import ClusterConf, OptimConf

MEASURE_CONFIG_NAME = "measure"
MEASURE_GROUPS = ("model", "data", "optim", "cluster")


@dataclass(kw_only=True)
class MeasureConf(Checked):
    """What to measure and for how long.  Every key is here or in the class of its group."""

    out: str = MISSING  # the folder to write to
    # Of weights, tokens and dropout; the values hardly matter.
    seed: int = checked(0, at_least(0))
    precision: Precision = Precision.FP32
    fp16_accumulation: bool = False  # as in training; the profile is of what is set here
    max_microbatch_size: int = checked(32, at_least(1))  # larger ones are extrapolated
    num_repeats: int = checked(10, at_least(3))  # of every measurement, if the time allows
    # Approximate, for compute; collectives and links come on top.
    time_limit_s: float = checked(60.0, above(0))
    # The run ends, naming the rank, if one stands still for as long while others wait for it;
    # before the first collective has been measured, ten times as long.  0 or null: never.
    hang_timeout_s: float | None = checked(60.0, at_least(0))
    # gloo: through sockets alone, and in place of NCCL, as GPUs of two vendors need it
    transport: str = checked("auto", one_of(TRANSPORTS))
    model: ModelConf = MISSING
    data: DataConf = MISSING  # only its shapes matter
    optim: OptimConf = MISSING
    cluster: ClusterConf = MISSING

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.precision is Precision.AUTO:
            self.precision = Precision.FP32
        check_fp16_accumulation(self.fp16_accumulation, self.precision)

    def world_size(self, num_launched: int | None) -> int:
        """The number of ranks needed; ``num_launched`` is the number running, if any."""
        stated = {
            "cluster.num_ranks": self.cluster.num_ranks,
            **{f"cluster.{k}": len(v) or None for k, v in self.cluster.per_rank.items()},
            "the launcher": num_launched,
        }
        return agreed_world_size(stated, self.cluster)

    def check(self) -> None:
        """Raise if it is not possible to measure here."""
        check_device(self.cluster)
        self.optim.check()
        check_model_fits_data(self.model, self.data)

    @classmethod
    def load(cls, path: Path) -> "MeasureConf":
        """Load what ``compose.save_resolved`` wrote."""
        return load_checked(path, cls)


def register_measure_schemas() -> None:
    """Register the schemas with Hydra."""
    register_schemas()
    ConfigStore.instance().store(group="schema", name="measure", node=MeasureConf)
