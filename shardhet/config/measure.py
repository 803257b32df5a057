"""MeasureConf: the configuration of ``shardhet measure``."""

from dataclasses import dataclass

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING

from shardhet.config.checks import above, at_least, checked
from shardhet.config.compose import register_schemas
from shardhet.config.train import RanksConf

MEASURE_CONFIG_NAME = "measure"
MEASURE_GROUPS = ("model", "data", "optim", "cluster")


@dataclass(kw_only=True)
class MeasureConf(RanksConf):
    """What to measure and for how long.  Every key is here or in the class of its group."""

    out: str = MISSING  # the folder to write to
    max_microbatch_size: int = checked(32, at_least(1))  # larger ones are extrapolated
    num_repeats: int = checked(10, at_least(3))  # of every measurement, if the time allows
    # Approximate, for compute; collectives and links come on top.
    time_limit_s: float = checked(60.0, above(0))


def register_measure_schemas() -> None:
    """Register the schemas with Hydra."""
    register_schemas()
    ConfigStore.instance().store(group="schema", name="measure", node=MeasureConf)
