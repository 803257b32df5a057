"""Train from a command line.

    shardhet train key=value ...                                       starts its own ranks
    torchrun --nproc-per-node=4 -m shardhet.apps.train key=value ...   is one of the ranks
    srun --ntasks=4 shardhet train key=value ...                       likewise

Hydra composes the configuration.  Without a launcher, this happens once, here, and the workers
load the result from the run folder.  Under torchrun or srun every rank composes it, in a run
folder whose name the ranks have agreed on before.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

import hydra
from hydra.conf import HydraConf
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from torch.distributed.elastic.multiprocessing.errors import record

from shardhet.apps.cli.help import show_help
from shardhet.apps.cli.streamed import say
from shardhet.apps.launch.hydra_entry import enter, launched_environment, refuse
from shardhet.apps.launch.launch import start_ranks
from shardhet.apps.launch.run_folder import RunFolder
from shardhet.apps.launch.sole_writer import sole_writer
from shardhet.apps.run.loggers import check_logger
from shardhet.config.checks import ConfigError
from shardhet.config.compose import (
    CONFIG_NAME,
    VERSION_BASE,
    conf_dir,
    register_schemas,
    to_conf,
)
from shardhet.config.train import AUTO, TrainConf
from shardhet.config.training import MeasuredPlanConf


@hydra.main(config_path=str(conf_dir()), config_name=CONFIG_NAME, version_base=VERSION_BASE)
@record  # inside hydra's, or torchrun shows no traceback
def _train(cfg: DictConfig) -> None:
    env = launched_environment("train")
    context = HydraConfig.get()
    is_named = names_run_dir(cfg, context)
    cfg.run_dir = context.runtime.output_dir
    folder = RunFolder(Path(cfg.run_dir))
    try:
        goes_on = take_up(cfg, folder)
        may_go_on = env is not None and env.may_go_on
        if may_go_on and not is_named:
            raise ConfigError(
                "hydra.run.dir: it is not given, but this run is started again where it fails "
                "(torchrun --max-restarts, or a job that Slurm has requeued), and would begin "
                "anew in a folder of another name. Add hydra.run.dir=FOLDER, the same on all "
                "nodes."
            )
        folder.check_unused(is_restart=may_go_on or cfg.resume == AUTO)
        conf = to_conf(cfg)
        conf.check_on_oom(None if env is None else env.why_not_started_again)
        world_size = checked_world_size(
            conf, num_launched=None if env is None else env.world_size
        )
    except ConfigError as error:
        folder.remove_if_empty()
        raise refuse(error, env) from None

    if goes_on is not None and (env is None or env.rank == 0):
        say(Console(highlight=False), goes_on)

    def begin() -> None:
        cfg.cluster.num_ranks, cfg.precision = world_size, conf.precision
        folder.begin(cfg)

    if env is None:
        try:
            with sole_writer(folder, rank=0):
                begin()
        except RuntimeError as error:
            raise refuse(ConfigError(str(error)), env) from None
        start_ranks(folder, world_size, grace_s=conf.stop_on_signal.grace_s)
    else:
        from shardhet.apps.run.worker import run_rank

        env.publish()
        run_rank(conf, folder, env, begin)


def take_up(cfg: DictConfig, folder: RunFolder) -> str | None:
    """Where ``cfg.resume`` names the folder of a run: what it changes of that run, in words.

    ``cfg.resume`` then names what to load, which is in ``folder`` itself unless another was
    given for a run that begins with the state of the first.
    """
    source = RunFolder(Path(cfg.resume or ""))
    if cfg.resume in (None, AUTO) or not source.config_path.is_file():
        return None
    changed = source.check_goes_on(cfg)
    is_same = source.path.resolve() == folder.path.resolve()
    cfg.resume = AUTO if is_same else str(source.checkpoints_dir)
    return f"with the configuration of {source.path}" + (changed and f", but {changed}")


def names_run_dir(cfg: DictConfig, context: HydraConf) -> bool:
    """Whether the run folder has a name that does not depend on when the run began."""
    raw_cfg, raw_context = (
        OmegaConf.to_container(each, resolve=False) for each in (cfg, context)
    )
    assert isinstance(raw_cfg, dict)
    assert isinstance(raw_context, dict)
    path = str(raw_context["run"]["dir"]).replace("${run_dir}", str(raw_cfg["run_dir"]))
    return "run_stamp" not in path


def checked_world_size(conf: TrainConf, *, num_launched: int | None) -> int:
    """The number of ranks, after checking that the configuration can be run here.

    ``num_launched`` is the number of running ranks; None if they have yet to be started.
    """
    check_logger(conf.logger)
    conf.check()
    conf.check_resume()
    conf.check_rebalance()
    conf.check_holds()
    world_size = conf.world_size(num_launched)
    if isinstance(conf.plan, MeasuredPlanConf):  # planned once it is known who is there
        return world_size
    plan = conf.to_plan(world_size)
    return plan.world_size


def main(arguments: Sequence[str] | None = None) -> None:
    """Train; Hydra reads the command line."""
    if arguments is not None:
        sys.argv = ["shardhet train", *arguments]
    register_schemas()
    enter(_train, config_name=CONFIG_NAME, show_help=show_help)


if __name__ == "__main__":
    main()
