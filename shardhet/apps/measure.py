"""Measure the speed of these devices with a model, from the command line.

    shardhet measure key=value ... out=DIR                              starts its own ranks
    torchrun --nproc-per-node=4 -m shardhet.apps.measure key=value ...  is one of the ranks

Ranks are started, and report failures, as in ``shardhet train``.  DIR then contains
cluster.json, workload.json and profile.json, which ``shardhet plan measured=DIR`` reads.
"""

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig
from torch.distributed.elastic.multiprocessing.errors import record

from shardhet.apps.cli.help import show_help
from shardhet.apps.launch.hydra_entry import enter, launched_environment, refuse
from shardhet.apps.launch.launch import start_ranks
from shardhet.apps.launch.run_folder import RunFolder
from shardhet.config.checks import ConfigError
from shardhet.config.compose import VERSION_BASE, conf_dir, to_checked
from shardhet.config.measure import (
    MEASURE_CONFIG_NAME,
    MEASURE_GROUPS,
    MeasureConf,
    register_measure_schemas,
)

PROFILE_NAME = "profile.json"
MEASURE_REMARKS = """\
hang_timeout_s     end the measurement if a rank makes no progress for so long (or three times
                   time_limit_s, if that is longer) while others wait for it. 0 or null: never
"""
USAGE = """\
[bold]shardhet measure key=value ... out=DIR[/]   measure these devices with this model
[bold]torchrun --nproc-per-node=4 -m shardhet.apps.measure key=value ...[/]
                                        the same program, started by torchrun

All ranks compute at once; then come optimizer, collectives and links.
No data is read: only the shapes of data=... matter.  Then:

[bold]shardhet plan measured=DIR global_batch_size=64[/]
"""


@hydra.main(
    config_path=str(conf_dir()), config_name=MEASURE_CONFIG_NAME, version_base=VERSION_BASE
)
@record  # inside hydra's, or torchrun shows no traceback
def _measure(cfg: DictConfig) -> None:
    env = launched_environment("measure")
    context = HydraConfig.get()
    cfg.out = context.runtime.output_dir
    folder = RunFolder(Path(cfg.out))
    try:
        if (folder.path / PROFILE_NAME).exists() or folder.metrics_path.exists():
            raise ConfigError(
                f"out: {folder.path} holds a profile already, or a run. Name another."
            )
        conf = to_checked(cfg, MeasureConf)
        conf.check()
        world_size = conf.world_size(None if env is None else env.world_size)
    except ConfigError as error:
        folder.remove_if_empty()
        raise refuse(error, env) from None
    if env is None or env.rank == 0:
        cfg.cluster.num_ranks = world_size
        folder.begin(cfg)
        folder.accept_start()
    if env is None:
        start_ranks(
            folder,
            world_size,
            worker_module="shardhet.apps.run.measure_rank",
        )
    else:
        from shardhet.apps.run.measure_rank import measure_as_rank

        measure_as_rank(conf, folder, env)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure; Hydra reads the command line."""
    if arguments is not None:
        sys.argv = ["shardhet measure", *arguments]
    register_measure_schemas()
    enter(
        _measure,
        config_name=MEASURE_CONFIG_NAME,
        show_help=partial(
            show_help,
            usage=USAGE,
            config_name=MEASURE_CONFIG_NAME,
            groups=MEASURE_GROUPS,
            remarks=MEASURE_REMARKS,
        ),
    )


if __name__ == "__main__":
    main()
