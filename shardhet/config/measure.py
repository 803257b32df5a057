"""MeasureConf: what ``shardhet measure`` is told."""

from dataclasses import dataclass
from pathlib import Path

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING

from shardhet.config.checks import check_above, check_at_least
from shardhet.config.compose import load_checked, register_schemas
from shardhet.config.models import DataConf, ModelConf
from shardhet.config.train import (
    Precision,
    TransportChoice,
    agreed_world_size,
    check_device,
    check_model_fits_data,
)
from shardhet.config.training import ClusterConf, OptimConf

MEASURE_CONFIG_NAME = "measure"
MEASURE_GROUPS = ("model", "data", "optim", "cluster")


@dataclass(kw_only=True)
class MeasureConf:
    """What to measure, and how long.  Every key is here or in the class of its group."""

    out: str = MISSING  # the folder to write to
    seed: int = 0  # of weights, tokens and dropout; values hardly matter
    precision: Precision = Precision.FP32
    max_microbatch_size: int = 32  # larger ones are extrapolated
    num_repeats: int = 10  # of every figure, as far as the time allows
    time_limit_s: float = 60.0  # of computing, about; collectives and links come on top
    transport: TransportChoice = TransportChoice.AUTO
    model: ModelConf = MISSING
    data: DataConf = MISSING  # only its shapes count
    optim: OptimConf = MISSING
    cluster: ClusterConf = MISSING

    def __post_init__(self) -> None:
        check_at_least("seed", self.seed, 0)
        check_at_least("max_microbatch_size", self.max_microbatch_size, 1)
        check_at_least("num_repeats", self.num_repeats, 3)
        check_above("time_limit_s", self.time_limit_s, 0)

    def world_size(self, num_launched: int | None) -> int:
        """How many ranks it needs; ``num_launched`` is how many there are, if any yet."""
        stated = {
            "cluster.num_ranks": self.cluster.num_ranks,
            **{f"cluster.{k}": len(v) or None for k, v in self.cluster.per_rank.items()},
            "the launcher": num_launched,
        }
        return agreed_world_size(stated, self.cluster)

    def check(self) -> None:
        """Raise if it cannot be measured here."""
        check_device(self.cluster)
        check_model_fits_data(self.model, self.data)

    @classmethod
    def load(cls, path: Path) -> "MeasureConf":
        """From what ``compose.save_resolved`` wrote."""
        return load_checked(path, cls)


def register_measure_schemas() -> None:
    """Make them known to hydra."""
    register_schemas()
    ConfigStore.instance().store(group="schema", name="measure", node=MeasureConf)
