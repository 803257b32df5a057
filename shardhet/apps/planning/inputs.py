"""Read the command line of ``shardhet plan`` and ``shardhet simulate``.

It uses Hydra's composition without a Hydra application, so only requested files are written.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException
from rich.console import Console

from shardhet.apps.cli.help import choices_by_group, choices_table, indented
from shardhet.apps.cli.quantities import counted
from shardhet.apps.cli.streamed import say
from shardhet.config.checks import ConfigError
from shardhet.config.compose import (
    CHOICES,
    VERSION_BASE,
    conf_dir,
    reasons_of,
    searching_first,
    to_checked,
)
from shardhet.config.planning import Inputs, InputsConf, LimitConf, register_planning_schemas
from shardhet.records.cluster import DESCRIPTIONS, Cluster

DESCRIBED = "described"  # the folder of the group cluster that holds descriptions
LIMITS = "limits."
FLAGS = """\
--cfg job          show the configuration, cluster and model included, and stop
--config-dir DIR   your own files, laid out like conf/, searched first\
"""
Conf = TypeVar("Conf", bound=InputsConf)


@dataclass(frozen=True, slots=True)
class Request:
    """A parsed command line."""

    overrides: tuple[str, ...]
    files: tuple[str, ...]  # arguments that are not key=value
    config_dir: Path | None


@dataclass(frozen=True, slots=True)
class CommandSpec:
    """The properties of one command."""

    command: str  # "shardhet plan"
    config_name: str
    usage: str
    num_files: int = 0  # expected arguments that are not key=value


def read_request(command_spec: CommandSpec, arguments: Sequence[str]) -> Request | None:
    """Parse the command line; None if it only asked for help or for the configuration."""
    parser = argparse.ArgumentParser(prog=command_spec.command, add_help=False)
    parser.add_argument("-h", "--help", action="store_true")
    parser.add_argument("--cfg", choices=["job"])
    parser.add_argument("--config-dir", type=Path)
    parser.add_argument("rest", nargs="*")
    flags = [each for each in arguments if each.startswith("--") and "=" in each]
    for each in flags:
        if each.partition("=")[0] not in ("--cfg", "--config-dir"):
            parser.error(f"{each}: keys have no dashes. Write {each.lstrip('-')}.")
    given = parser.parse_intermixed_args(list(arguments))
    overrides = tuple(_spelled_out(each) for each in given.rest if "=" in each)
    files = tuple(each for each in given.rest if "=" not in each)
    if given.config_dir is not None and not given.config_dir.is_dir():
        parser.error(f"--config-dir: {str(given.config_dir)!r} is not a folder.")
    request = Request(overrides, files, given.config_dir)
    register_planning_schemas()
    if given.help:
        show_help(command_spec, request, Console(highlight=False))
        return None
    if given.cfg:
        cfg, _ = composed(command_spec, request)
        say(Console(highlight=False), OmegaConf.to_yaml(cfg))
        return None
    if len(files) != command_spec.num_files:
        named = f" ({', '.join(files)}; keys are written key=value)" if files else ""
        parser.error(f"{counted(len(files), 'file')} given{named}, but:\n{command_spec.usage}")
    return request


def _spelled_out(override: str) -> str:
    """An override with short forms spelled out for Hydra."""
    key, _, value = override.partition("=")
    if key == "cluster" and Path(value).is_file():
        return f"cluster_file={value}"
    if key in ("cards", "network") and value[:1] not in ("'", '"'):
        quoted = value.replace("\\", "\\\\").replace('"', '\\"')
        return f'{key}="{quoted}"'  # Hydra's grammar has no + and |
    if key == "cluster" and value.endswith(DESCRIPTIONS):
        return f"cluster_file={value}"
    if key == "cluster" and (conf_dir() / "cluster" / DESCRIBED / f"{value}.yaml").is_file():
        return f"cluster={DESCRIBED}/{value}"
    return override


def composed(command_spec: CommandSpec, request: Request) -> tuple[DictConfig, dict[str, str]]:
    """The configuration and the file chosen for each group; errors are SystemExit."""
    overrides = [each for each in request.overrides if not each.startswith(LIMITS)]
    changed = [each for each in overrides if each.startswith("cluster.")]
    if changed and not any(each.startswith("cluster=") for each in overrides):
        raise ConfigError(f"{changed[0]}: of no cluster. Name one of conf/, as cluster=office.")
    GlobalHydra.instance().clear()
    with (
        searching_first(request.config_dir),
        initialize_config_dir(str(conf_dir()), version_base=VERSION_BASE),
    ):
        try:
            cfg = compose(command_spec.config_name, overrides, return_hydra_config=True)
            _set_limits(cfg, [each for each in request.overrides if each.startswith(LIMITS)])
        except (HydraException, OmegaConfBaseException) as error:
            raise _refusal(request, error) from None
    choices = dict(cfg.hydra.runtime.choices)
    with open_dict(cfg):
        del cfg["hydra"]
    return cfg, {str(group): str(choice) for group, choice in choices.items()}


def _set_limits(cfg: DictConfig, overrides: Sequence[str]) -> None:
    """Apply ``limits.0.memory_gib=8``, because Hydra itself would refuse a new key."""
    for override in overrides:
        _, _, key = override.partition(".")
        name, _, assignment = key.partition(".")
        if "=" not in assignment:
            known = ", ".join(field.name for field in fields(LimitConf))
            raise ConfigError(
                f"{override}: it names no limit. Write limits.0.batch=0; a limit has {known}."
            )
        parsed = OverridesParser.create().parse_override(assignment)
        with open_dict(cfg):
            if name not in cfg.limits:
                cfg.limits[name] = OmegaConf.structured(LimitConf)
        if parsed.key_or_group not in cfg.limits[name]:
            known = ", ".join(cfg.limits[name])
            raise ConfigError(
                f"limits.{name}.{parsed.key_or_group}: no such key; a limit has {known}."
            )
        try:
            cfg.limits[name][parsed.key_or_group] = parsed.value()
        except OmegaConfBaseException as error:
            reason = str(error).splitlines()[0]
            raise ConfigError(f"limits.{name}.{assignment}: {reason}.") from None


def _refusal(request: Request, error: Exception) -> SystemExit:
    """The SystemExit for an invalid command line, with the existing keys or choices."""
    plain = [each for each in request.overrides if not each.startswith(LIMITS)]
    mends = list[str]()
    if any(each.startswith("limits=") for each in plain):
        mends.append("limits: write one key after the other, as in limits.0.memory_gib=8.")
    models = sorted(path.stem for path in (conf_dir() / "model").glob("*.yaml"))
    known = {"cluster": _descriptions(), "model": models}
    for each in plain:
        group, _, choice = each.partition("=")
        if group in known and choice.removeprefix(f"{DESCRIBED}/") not in known[group]:
            mends.append(_choose(group, choice, known[group]))
    reasons = [each for each in reasons_of(error) if not each.startswith(CHOICES)]
    Console(stderr=True, highlight=False, soft_wrap=True).print(
        "\n".join([*reasons, *mends]), markup=False
    )
    return SystemExit(2)


def _choose(group: str, choice: str, known: Sequence[str]) -> str:
    near = get_close_matches(choice.removeprefix(f"{DESCRIBED}/"), known, n=1)
    meant = f" Did you mean {near[0]}?" if near else ""
    or_file = ", or a file" if group == "cluster" else ""
    return f"{group}: choose one of {', '.join(known)}{or_file}.{meant}"


def load(
    command_spec: CommandSpec, request: Request, schema: type[Conf]
) -> tuple[Conf, Inputs]:
    """The checked configuration and the inputs that it names; errors are ConfigError."""
    cfg, choices = composed(command_spec, request)
    _refuse_ignored(request, cfg)
    conf = to_checked(cfg, schema)

    def described() -> Cluster:
        if cfg.cluster is None:
            from shardhet.profiler.here import cluster_here, said_of  # imports torch

            found = cluster_here()
            Console(stderr=True, highlight=False, soft_wrap=True).print(said_of(found))
            return found
        choice = choices["cluster"]
        document: Any = OmegaConf.to_container(cfg.cluster)
        if "nodes" not in document:
            listed = ", ".join(_descriptions())
            raise ConfigError(
                f"cluster: {choice} describes no hardware. Choose one of {listed}, or give a "
                "file: cluster=my_cluster.yaml."
            )
        return Cluster.from_document(document, source=f"cluster={choice}")

    return conf, conf.load(described, choices["model"])


def _refuse_ignored(request: Request, cfg: DictConfig) -> None:
    """Refuse what measured files or a cluster's own file would silently replace."""
    hardware = ("cluster", "cluster_file", "cards", "network")
    numbers = ("compute_fraction", "link_fraction")
    here = (*hardware, "hosts")
    samples = ("model", "vocab_size", "seq_len", "precision", "fp16_accumulation")
    replaced_by = {
        "cluster_file": ("cluster", "cards", "network"),
        "cards": hardware[:1],
        "measured": (*here, *samples, "num_moments", *numbers),
    }
    for key, replaced in replaced_by.items():
        if cfg[key] is None:
            continue
        for override in request.overrides:
            name = override.lstrip("+").partition("=")[0]
            if name.partition(".")[0] in replaced:
                raise ConfigError(f"{name}: it has no effect beside {key}. Drop one of them.")


def _descriptions() -> list[str]:
    return sorted(path.stem for path in (conf_dir() / "cluster" / DESCRIBED).glob("*.yaml"))


def show_help(command_spec: CommandSpec, request: Request, console: Console) -> None:
    """Show how the command is used, the choices of each group, and all keys with values."""
    say(console, command_spec.usage)
    groups = {
        "cluster": choices_by_group(conf_dir() / "cluster")[DESCRIBED],
        "model": choices_by_group(conf_dir())["model"],
    }
    console.print("\nChoose one of each group:\n")
    console.print(choices_table(groups))
    console.print("\nChange any value; these are the defaults:\n")
    text = (conf_dir() / f"{command_spec.config_name}.yaml").read_text(encoding="utf-8")
    _, _, keys = text.partition("  - _self_\n")
    say(console, indented(keys), FLAGS)
