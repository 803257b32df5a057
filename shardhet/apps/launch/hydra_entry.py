"""The entry point of commands that are Hydra applications: the steps before Hydra takes over.

Hydra itself needs all flags before all keys, searches --config-dir after its own files, and
shows its own help.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from rich.console import Console
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from shardhet.apps.launch.launch import RunFailedExit
from shardhet.apps.launch.leaving import end_agent
from shardhet.apps.launch.rank_env import RankEnv, agree_on_stamp
from shardhet.apps.launch.run_folder import RunFolder
from shardhet.comm.liveness.ending import end_with_launcher
from shardhet.config.checks import ConfigError
from shardhet.config.compose import (
    CONFIG_NAME,
    OF_RUN,
    check_choices,
    implied_choices,
    reasons_of,
    register_run,
    searching_first,
)
from shardhet.config.train import AUTO

RAISES = "HYDRA_FULL_ERROR"  # with it, Hydra raises its errors instead of printing them
AGENT_ENDS_WITHIN_S = 5.0  # once its first rank has told it to


class _Refused(SystemExit):
    """The end of a command that has said why."""


def enter(
    application: Callable[[], None],
    *,
    config_name: str,
    show_help: Callable[[Sequence[str], Path | None], None],
) -> None:
    """Run ``application``, which reads ``sys.argv``; errors are SystemExit with a remedy.

    ``show_help`` gets the overrides and the user's own folder.
    """
    env = RankEnv.from_environment()
    end_with_launcher()  # ranks ask its store for the name of their folder
    OmegaConf.register_new_resolver(
        "run_stamp", lambda: agree_on_stamp(env), use_cache=True, replace=True
    )
    os.environ.setdefault(RAISES, "1")
    own_dir = own_config_dir(sys.argv[1:])
    sys.argv[1:] = flags_first(sys.argv[1:])
    overrides = [each for each in sys.argv[1:] if is_override(each)]
    is_train = config_name == CONFIG_NAME
    with searching_first(own_dir):
        try:
            if is_train:
                run = run_to_go_on(overrides, is_launched=env is not None)
                if run is not None:
                    sys.argv[1:1] = ["--config-name", OF_RUN]
                implied = implied_choices(overrides, None if run is None else run.plan.kind)
                sys.argv += implied
                overrides += implied
            check_choices(overrides)
            if {"--help", "-h"} & set(sys.argv[1:]):
                show_help(overrides, own_dir)
            else:
                application()
        except (RunFailedExit, _Refused):
            raise
        except ConfigError as error:
            raise _refusal([str(error)], env) from None
        except (HydraException, OmegaConfBaseException) as error:
            raise _refusal(reasons_of(error), env) from None


def run_to_go_on(overrides: Sequence[str], *, is_launched: bool) -> DictConfig | None:
    """The configuration of the run whose folder ``resume`` names, registered; None without."""
    named = [each.partition("=")[2] for each in overrides if each.startswith("resume=")]
    folder = RunFolder(Path(named[-1].strip("'\"") if named else AUTO))
    if not folder.config_path.is_file():
        return None
    is_sweep = bool({"--multirun", "-m"} & set(sys.argv))
    return register_run(folder.config_path, is_launched=is_launched, is_sweep=is_sweep)


def _refusal(lines: Sequence[str], env: RankEnv | None) -> SystemExit:
    if lines:
        _say(ConfigError("\n".join(lines)), "", env)
    return SystemExit(1)


def launched_environment(command: str) -> RankEnv | None:
    """This rank's environment if torchrun or srun started it; None from a shell.

    Raises ``SystemExit`` for a sweep inside of torchrun.
    """
    env = RankEnv.from_environment()
    if env is not None and HydraConfig.get().mode is RunMode.MULTIRUN:
        raise SystemExit(
            "--multirun inside torchrun or srun: ranks of different jobs would meet. Run "
            f"shardhet {command} -m ..., which starts one torchrun per job."
        )
    return env


def refuse(error: ConfigError, env: RankEnv | None) -> SystemExit:
    """The SystemExit for a configuration that cannot be run, which it says."""
    _say(error, "\nNothing was started.", env)
    return _Refused(1)


def _say(error: ConfigError, what_follows: str, env: RankEnv | None) -> None:
    """Print the error; under torchrun it is recorded for its report, too.

    An agent that would start this rank again is ended: the next start would end as this one.
    """
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    console.print(f"{error}{what_follows}", markup=False)
    if env is None:
        return
    error.__traceback__ = None  # the report has what follows; its last line is the message
    try:
        raise error from None
    except ConfigError:
        get_error_handler().record_exception(error)
    if env.may_start_again:
        sys.stderr.flush()
        if env.local_rank == 0:
            end_agent()
        else:  # if it left before the agent is ended, the agent would start all again
            time.sleep(AGENT_ENDS_WITHIN_S)


def own_config_dir(arguments: Sequence[str]) -> Path | None:
    """The folder that ``--config-dir`` names, if any."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config-dir", "-cd", type=Path)
    given, _ = parser.parse_known_args(list(arguments))
    own_dir: Path | None = given.config_dir
    if own_dir is not None and not own_dir.is_dir():
        raise SystemExit(f"--config-dir: {str(own_dir)!r} is not a folder.")
    return own_dir


def is_override(argument: str) -> bool:
    """Whether ``argument`` is ``key=value``, ``+key=value`` or ``~key``, not part of a flag."""
    return not argument.startswith("-") and ("=" in argument or argument.startswith("~"))


def flags_first(arguments: Sequence[str]) -> list[str]:
    """The arguments with flags first, because argparse needs all ``key=value`` in one row."""
    return sorted(arguments, key=is_override)
