"""MeasureConf: the configuration of ``shardhet measure``."""

from dataclasses import dataclass
from pathlib import Path

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING

from shardhet.config.checks import check_above, check_at_least, check_is_one_of
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
class MeasureConf:
    """What to measure and for how long.  Every key is here or in the class of its group."""

    out: str = MISSING  # the folder to write to
    seed: int = 0  # of weights, tokens and dropout; the values hardly matter
    precision: Precision = Precision.FP32
    fp16_accumulation: bool = False  # as in training; the profile is of what is set here
    max_microbatch_size: int = 32  # larger ones are extrapolated
    num_repeats: int = 10  # of every measurement, if the time allows
    time_limit_s: float = 60.0  # approximate, for compute; collectives and links come on top
    # The run ends, naming the rank, if one stands still for as long while others wait for it;
    # before the first collective has been measured, ten times as long.  0 or null: never.
    hang_timeout_s: float | None = 60.0
    # gloo: through sockets alone, and in place of NCCL, as GPUs of two vendors need it
    transport: str = "auto"
    model: ModelConf = MISSING
    data: DataConf = MISSING  # only its shapes matter
    optim: OptimConf = MISSING
    cluster: ClusterConf = MISSING

    def __post_init__(self) -> None:
        check_at_least("seed", self.seed, 0)
        check_is_one_of("transport", self.transport, TRANSPORTS)
        check_fp16_accumulation(self.fp16_accumulation, self.precision)
        check_at_least("max_microbatch_size", self.max_microbatch_size, 1)
        check_at_least("num_repeats", self.num_repeats, 3)
        check_above("time_limit_s", self.time_limit_s, 0)
        check_at_least("hang_timeout_s", self.hang_timeout_s, 0)

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
