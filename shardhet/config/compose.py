"""Compose a TrainConf from files and a command line, and load it back from a run folder.

``conf/`` holds YAML only; the schemas define which keys exist and their types.
"""

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import is_dataclass
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import (
    ConfigAttributeError,
    ConfigKeyError,
    MissingMandatoryValue,
    OmegaConfBaseException,
)

from shardhet.config.checks import ConfigError, check_can_be_folder
from shardhet.config.imported import ImportedConf
from shardhet.config.models import (
    DataKind,
    DecoderConf,
    HfConf,
    ModelKind,
    PySourceConf,
    TextDirConf,
)
from shardhet.config.train import TrainConf
from shardhet.config.training import (
    ByHandPlanConf,
    ClusterConf,
    EvenPlanConf,
    FilePlanConf,
    LoggerConf,
    LoggerKind,
    LrSchedulerConf,
    LrSchedulerKind,
    MeasuredPlanConf,
    OptimConf,
    PlanKind,
)
from shardhet.records.kinds import conf_dir as conf_dir

C = TypeVar("C")  # a schema

CONFIG_NAME = "train"
OF_RUN = "of_run"  # the configuration of a run to go on with, and its choice in each group
VERSION_BASE = "1.3"
HOSTS_OWN_KEYS = (  # paths; contents of folders are compared instead
    "run_dir",
    "stop_on_signal.file",
    "replicas.folder",
    "model.path",
    "data.path",
    "data.held_out",
    "data.cache_dir",
    "plan.path",
    "plan.measured",
)
BATCH_SIZES_KEY = "plan.microbatch_sizes"
FOLDER_KEYS = ("out", "run_dir", "hydra.run.dir")  # of folders that are made
LIST_KEYS = (BATCH_SIZES_KEY, "plan.num_microbatches", "plan.state_shares")

MAIN_PROVIDER = "main"  # Hydra's name for the folder that a program comes with

# A user's own folder, laid out like conf/, inside ``searching_first``.
_own_dir: ContextVar[Path | None] = ContextVar("own_dir", default=None)

# The schema of each choice of a group, by its kind; files refer to /schema/<group>: <kind>.
SCHEMA_BY_KIND: dict[str, dict[Any, type]] = {
    "model": {
        ModelKind.DECODER: DecoderConf,
        ModelKind.HF: HfConf,
        ModelKind.IMPORTED: ImportedConf,
    },
    "data": {
        DataKind.PYSOURCE: PySourceConf,
        DataKind.TEXT_DIR: TextDirConf,
    },
    "plan": {
        PlanKind.EVEN: EvenPlanConf,
        PlanKind.BY_HAND: ByHandPlanConf,
        PlanKind.FILE: FilePlanConf,
        PlanKind.MEASURED: MeasuredPlanConf,
    },
    "lr_scheduler": dict.fromkeys(LrSchedulerKind, LrSchedulerConf),
    "logger": dict.fromkeys(LoggerKind, LoggerConf),
}

# The values that a file begins with, by the schema that it names.
OPTIM_BY_SCHEMA: dict[str, dict[str, Any]] = {
    "any": {},
    "adamw": {"kind": "AdamW", "betas": [0.9, 0.95], "eps": 1e-8},
    "sgd": {"kind": "SGD", "momentum": 0.9, "nesterov": False},
}


@contextmanager
def searching_first(own_dir: Path | None) -> Iterator[None]:
    """Context in which a file in ``own_dir`` precedes one of the same name in ``conf/``.

    Hydra's own --config-dir and searchpath come after ``conf/``.
    """
    before = _own_dir.set(own_dir)
    try:
        yield
    finally:
        _own_dir.reset(before)


class OwnFilesFirst(SearchPathPlugin):
    """Makes Hydra search the folder of ``searching_first`` first."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        own_dir = _own_dir.get()
        if own_dir is not None:
            search_path.prepend("own files", f"file://{own_dir.resolve()}", MAIN_PROVIDER)


@cache
def register_schemas() -> None:
    """Register the schemas and the search path with Hydra."""
    Plugins.instance().register(OwnFilesFirst)
    store = ConfigStore.instance()
    store.store(group="schema", name="train", node=TrainConf)
    store.store(group="schema/cluster", name="cluster", node=ClusterConf)
    for name, values in OPTIM_BY_SCHEMA.items():
        node = OmegaConf.merge(OmegaConf.structured(OptimConf), values)
        store.store(group="schema/optim", name=name, node=node)
    for group, schema_by_kind in SCHEMA_BY_KIND.items():
        for kind, schema in schema_by_kind.items():
            store.store(group=f"schema/{group}", name=kind.value, node=schema)


def to_conf(cfg: DictConfig) -> TrainConf:
    """The checked configuration; raises if a value is missing or makes no sense."""
    return to_checked(cfg, TrainConf)


def to_checked(cfg: DictConfig, schema: type[C]) -> C:
    """The same as ``to_conf`` for a command with its own schema."""
    _refuse_added_keys(cfg, "")
    try:
        conf = OmegaConf.to_object(cfg)
    except MissingMandatoryValue as error:
        key = error.full_key
        raise ConfigError(f"{key}: no value. Set {key}=...") from None
    except OmegaConfBaseException as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"{error.full_key}: {reason}") from None
    assert isinstance(conf, schema)
    return conf


def _refuse_added_keys(cfg: DictConfig, where: str) -> None:
    """Refuse keys that ``+key=value`` added and no schema has."""
    schema = OmegaConf.get_type(cfg)
    if not is_dataclass(schema):  # a map with keys of the user's choice
        return
    known = OmegaConf.structured(schema)
    for key in map(str, cfg):
        dotted = f"{where}.{key}" if where else key
        if key not in list(known):
            raise ConfigError(no_such_key(known, dotted))
        node = cfg._get_node(key)
        if isinstance(node, DictConfig) and not (node._is_none() or node._is_missing()):
            _refuse_added_keys(node, dotted)


def save_resolved(cfg: DictConfig, path: Path) -> None:
    """Write every key with its value to a YAML file."""
    path.write_text(OmegaConf.to_yaml(cfg, resolve=True), encoding="utf-8")


def portable_values(conf: TrainConf) -> dict[str, Any]:
    """The values that must be equal on every rank, by dotted key; folders may differ."""
    values = _leaves(OmegaConf.structured(conf))
    return {key: value for key, value in values.items() if key not in HOSTS_OWN_KEYS}


def leaves_of(saved: Path | DictConfig) -> dict[str, Any]:
    """The values of ``save_resolved`` by dotted key, or what it would save of a configuration.

    None if there is no such file.
    """
    if isinstance(saved, DictConfig):
        return _leaves(OmegaConf.create(OmegaConf.to_yaml(saved, resolve=True)))
    return _leaves(OmegaConf.load(saved)) if saved.exists() else {}


def load_resolved(path: Path) -> TrainConf:
    """The inverse of ``save_resolved``."""
    return load_checked(path, TrainConf)


def load_checked(path: Path, schema: type[C]) -> C:
    """The same as ``load_resolved`` for a command with its own schema."""
    return to_checked(_with_schemas(path, schema), schema)


def register_run(path: Path, *, is_launched: bool, is_sweep: bool) -> DictConfig:
    """Register the values of ``save_resolved`` in a run folder as those of ``OF_RUN``.

    A run that goes on stays in its folder, and the jobs of a sweep get folders of their own.
    How many ranks there are, a launcher says.
    """
    register_schemas()
    of_run = _with_schemas(path, TrainConf)
    if is_launched:
        of_run.cluster.num_ranks = None
    primary = OmegaConf.load(conf_dir() / f"{CONFIG_NAME}.yaml")
    own = {**of_run, "run_dir": primary.run_dir if is_sweep else str(path.parent)}
    store = ConfigStore.instance()
    for i, each in enumerate(primary.defaults):
        group = str(next(iter(each))) if isinstance(each, DictConfig) else ""
        if group in own:
            store.store(group=group, name=OF_RUN, node=own.pop(group))
            primary.defaults[i] = {group: OF_RUN}
    store.store(name=OF_RUN, node=OmegaConf.merge(primary, own))
    return of_run


def _with_schemas(path: Path, schema: type) -> DictConfig:
    values = OmegaConf.load(path)
    assert isinstance(values, DictConfig)
    known = OmegaConf.structured(schema)
    for group, schema_by_kind in SCHEMA_BY_KIND.items():
        if group in values:
            by_name = {kind.name: each for kind, each in schema_by_kind.items()}
            kind = str(values[group].kind)
            if kind not in by_name:
                raise ConfigError(
                    f"{path}: {group} is {kind.lower()}, which this version does not have. "
                    "Begin a new run from its checkpoints: resume=PATH."
                )
            known[group] = OmegaConf.structured(by_name[kind])
    known.cluster = OmegaConf.structured(ClusterConf)
    known.optim = OmegaConf.structured(OptimConf)
    merged = OmegaConf.merge(known, values)
    assert isinstance(merged, DictConfig)
    return merged


def _leaves(cfg: Any) -> dict[str, Any]:
    """Values by dotted key; a list is one value, and enums are given by name."""
    plain = OmegaConf.to_container(cfg, resolve=not _has_missing(cfg), enum_to_str=True)
    return dict(_flat(plain, ""))


def _has_missing(cfg: Any) -> bool:
    return bool(OmegaConf.missing_keys(cfg))


def _flat(node: Any, prefix: str) -> Iterable[tuple[str, Any]]:
    if isinstance(node, dict):
        for key, value in node.items():
            yield from _flat(value, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, node


def implied_choices(overrides: Iterable[str], plan_kind: PlanKind | None = None) -> list[str]:
    """The choices that other overrides imply: whoever types batch sizes plans by hand.

    ``plan_kind`` is that of a run that goes on.
    """
    keys = {each.partition("=")[0] for each in overrides}
    is_implied = BATCH_SIZES_KEY in keys and not keys & {"plan", "experiment"}
    return ["plan=by_hand"] if is_implied and plan_kind is not PlanKind.BY_HAND else []


def check_choices(overrides: Iterable[str]) -> None:
    """Raise if a group is null, a folder cannot be made or a list has no brackets.

    Hydra itself would print a traceback, or ask for --multirun.
    """
    try:
        parsed = OverridesParser.create().parse_overrides(list(overrides))
    except HydraException:
        return  # Hydra reports it itself
    for each in parsed:
        folder = conf_dir() / each.key_or_group
        if folder.is_dir() and not each.is_delete() and each.value() is None:
            choices = sorted(path.stem for path in folder.glob("*.yaml"))
            raise ConfigError(
                f"{each.key_or_group}: null but it must be one of {', '.join(choices)}."
            )
        if each.key_or_group in LIST_KEYS and each.is_choice_sweep():
            values = list(each.sweep_iterator())
            if not any(isinstance(value, list) for value in values):
                listed = ",".join(map(str, values))
                raise ConfigError(
                    f"{each.key_or_group}: {listed} is a sweep but one list is needed. Write "
                    f"'{each.key_or_group}=[{listed}]', with the quotes."
                )
        if each.key_or_group in FOLDER_KEYS and not each.is_sweep_override():
            name = str(each.value())
            if "${" not in name:  # known only after Hydra has resolved it
                check_can_be_folder(each.key_or_group, name)


def no_such_key(known: DictConfig, dotted: str) -> str:
    """That a key does not exist, and those that do in its place, which ``known`` has."""
    where, _, key = dotted.rpartition(".")
    keys = sorted(each for each in map(str, known) if each != "hydra")
    close = get_close_matches(key, keys, n=1)
    schemas = SCHEMA_BY_KIND.get(where, {}).items()
    choices = [kind.value for kind, each in schemas if key in get_type_hints(each)]
    files = conf_dir() / where
    others = [f"{where}={each}" for each in choices if (files / f"{each}.yaml").exists()]
    nodes = ((name, known._get_node(name)) for name in keys)
    groups = {name: node for name, node in nodes if isinstance(node, DictConfig)}
    close = close or [f"{name}.{key}" for name, node in groups.items() if key in list(node)]
    remedy = f" Did you mean {f'{where}.' if where else ''}{close[0]}?" if close else ""
    remedy = f" It is a key of {' and '.join(others)}." if others else remedy
    there = f"{where or 'the configuration'} has {', '.join(keys)}"
    return f"{dotted}: no such key; {there}.{remedy}"


CHOICES = "Available options"  # of a group of which an unknown one was named
# What helps only who has written the schema, or does not help here.
LEFT_OUT = ("full_key:", "object_type=", "reference_type=", "To append", "1. ", "2. ", "3. ")
SEARCH_PATH = "Config search path"  # the folders that Hydra has looked into come below


def reasons_of(error: Exception) -> list[str]:
    """What Hydra or OmegaConf says is wrong, and what may be written in its place."""
    reasons, cause = list(_lines(str(error))), error.__cause__
    if cause is not None:
        lines = list(_lines(str(cause)))
        key = getattr(cause, "full_key", None)
        reasons += [f"{key}: {lines[0]}" if key else lines[0], *lines[1:]]
        is_key = isinstance(cause, ConfigAttributeError | ConfigKeyError)
        if is_key and isinstance(there := getattr(cause, "parent_node", None), DictConfig):
            reasons.append(no_such_key(there, str(key)))
    return reasons + _value_hints(" ".join(reasons))


def _lines(text: str) -> Iterator[str]:
    """Its lines that help who has typed; a list of choices is one."""
    lines = text.partition(SEARCH_PATH)[0].splitlines()
    found = [each.strip() for each in lines if each.strip()]
    for i, line in enumerate(found):
        if line.startswith(CHOICES):
            yield f"{line} {', '.join(found[i + 1 :])}"
            return
        if not line.startswith(LEFT_OUT):
            yield line


def _value_hints(reason: str) -> list[str]:
    """What may be written where a value of the wrong kind was, if the reason shows it."""
    allowed = {
        "converted to Integer": "Write a whole number: 64, not 64.0, 1e3 or 64k.",
        "converted to Float": "Write a plain number, without a unit: 0.5, not 50%.",
        "not a valid bool": "Write true or false.",
        "is not a ListConfig": "Write a list, in brackets and quotes: 'hosts=[west-*]', "
        "'equal=[[0,1],[2,3]]'.",
        "Ambiguous value": "Write a list in brackets and quotes: 'equal=[[0,1],[2,3]]'.",
        "to string": "Write one word, without brackets.",
    }
    found = [hint for sign, hint in allowed.items() if sign in reason]
    value, choices = re.search(r"value '(.*?)'", reason), re.search(r"one of \[(.*)\]", reason)
    if value and choices:
        near = get_close_matches(value[1].upper(), choices[1].split(", "), n=1)
        found += [f"Did you mean {each}?" for each in near]
    return found
