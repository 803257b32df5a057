"""RunFolder: the one place that a run writes to, and what it says about itself there."""

import json
import os
import platform
import re
import shlex
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

from omegaconf import DictConfig, OmegaConf

from shardhet.apps.launch.rank_env import is_task_of_srun
from shardhet.checkpoint import Checkpoints
from shardhet.checkpoint.format.writing import version_of
from shardhet.config.checks import ConfigError
from shardhet.config.compose import leaves_of, load_resolved, save_resolved
from shardhet.config.train import TrainConf
from shardhet.records.cluster import DeviceSpec
from shardhet.records.codec import from_document, read_document, to_document

PACKAGES = (
    "shardhet",
    "torch",
    "numpy",
    "scipy",
    "hydra-core",
    "omegaconf",
    "rich",
)
# Prefixes of environment variables that change how a run computes or communicates.
VARIABLE_PREFIXES = ("CUDA_", "GLOO_", "NCCL_", "OMP_", "MKL_", "TORCH", "PYTORCH_", "SLURM_")

IN_MEMORY = Path("/dev/shm")  # a file system that Linux has
MAY_CHANGE = {"run_dir", "resume", "cluster.num_ranks"}  # where the same run begins anew
# Keys of what checkpoints hold, or batches and dropout are drawn from.
OF_CHECKPOINT = re.compile(r"seed|optim\.kind|model\.(?!usual_|path|weights|.*dropout).*")


class _At:
    """A path in the run folder."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, folder: "RunFolder", _: type) -> Path:
        return folder.path / self._name


@dataclass(frozen=True, slots=True)
class RunFolder:
    """The files of one run.

    config.yaml          every key with its value
    run.json             versions, environment, command line
    logs/config.yaml ... both, as the last start had them: only a start that every check has
                         let through replaces those above, and changes what the run has left
    plan.json            what each device computes and stores
    plan_after_step_7.json ...  the same from then on, if the run was planned anew
    devices.json         the device found for each position of the plan
    metrics.jsonl        one line per step, report of device use, and evaluation
    rolled_back.jsonl    such lines of steps that the run has rolled back, if it has
    traces/rank0.json ...  the traced steps of each rank, and predicted.json
    logs/rank0.log ...   the log of each rank; with all output of ranks above zero
    lock                 held by the run while it writes here
    model/               with model=hf, what from_pretrained or PeftModel opens, after the end
    checkpoints/         the whole state after some steps, if the configuration says so
    measured/1 ...       what was measured at starts with devices that were new
    memory_limits/       of devices that were out of memory; the run is planned for so much
    id                   a name that no other run has, for what it keeps on the nodes
    """

    path: Path

    lock_path = _At("lock")
    config_path = _At("config.yaml")
    start_config_path = _At("logs/config.yaml")
    plan_path = _At("plan.json")
    devices_path = _At("devices.json")
    metrics_path = _At("metrics.jsonl")
    rolled_back_path = _At("rolled_back.jsonl")
    model_path = _At("model.safetensors")  # if the configuration says so
    model_dir = _At("model")  # in its place, with model=hf
    checkpoints_dir = _At("checkpoints")
    stop_path = _At("stop")  # asks the run to end: of the launcher, or a user
    end_path = _At("end.json")  # after which step the run has ended in order
    trace_dir = _At("traces")
    predicted_trace_path = _At("traces/predicted.json")  # of as many steps as are traced
    logs_dir = _At("logs")
    memory_limits_dir = _At("memory_limits")

    def new_plan_path(self, step: int) -> Path:
        """The path of the plan that was followed after ``step``."""
        return self.path / f"plan_after_step_{step}.json"

    def measured_dirs(self, subject: str) -> list[Path]:
        """The folders of what was measured of ``subject`` by this run, oldest first."""
        return [
            path
            for path in self._numbered_measured_dirs()
            if (path / "profile.json").exists()  # the last file that is written
            and _text_of(path / "subject.txt") == subject
        ]

    def new_measured_dir(self, subject: str) -> Path:
        """A new one; ``subject`` says what is measured there, on which devices apart."""
        number = 1 + max((int(each.name) for each in self._numbered_measured_dirs()), default=0)
        path = self.path / "measured" / str(number)
        path.mkdir(parents=True)
        write_whole(path / "subject.txt", subject)
        return path

    def _numbered_measured_dirs(self) -> list[Path]:
        found = [each for each in (self.path / "measured").glob("*") if each.name.isdigit()]
        return sorted(found, key=lambda each: int(each.name))

    def identity(self) -> str:
        """A name that no other run has; made on first use.  Rank zero alone calls it.

        A folder that was copied is another run.
        """
        path = self.path / "id"
        mine = str(self.path.stat().st_ino)
        if path.exists():
            name, _, inode = path.read_text(encoding="utf-8").strip().partition(" ")
            if inode in ("", mine):
                return name
        name = f"{self.path.name}_{uuid4().hex[:12]}"
        write_whole(path, f"{name} {mine}\n")
        return name

    def log_path(self, rank: int) -> Path:
        """The path of a rank's log."""
        return self.logs_dir / f"rank{rank}.log"

    def failure_path(self, rank: int) -> Path:
        """The path where a failing rank writes its ``Failure``."""
        return self.logs_dir / f"rank{rank}.failure.json"

    def failure_before_path(self, rank: int) -> Path:
        """The same, of the start of this run before the present one."""
        return self.logs_dir / f"rank{rank}.failure_before.json"

    def check_unused(self, *, is_restart: bool) -> None:
        """Raise if another run has already written here."""
        if self.metrics_path.exists() and not is_restart:
            raise ConfigError(
                f"run_dir: {self.path} holds a run already. Name another folder, or go on "
                "with resume=auto."
            )

    def why_not_anew(self) -> str | None:
        """Why the last start may not begin at step 0 over what is here; None if it may.

        It may if it is the same run, which was cut off before it had kept anything.
        """
        if not self.metrics_path.exists() or not self.metrics_path.stat().st_size:
            return None
        changed = sorted(self.changes(self.start_config_path))
        if not changed and not self.end_path.exists():
            return None
        of_another = f"a run with another {', '.join(changed[:4])}"
        return (
            f"run_dir: {self.path} holds {of_another if changed else 'a run that has ended'} "
            "but no checkpoint or replica to go on from. Name another folder."
        )

    def changes(self, start: Path | DictConfig) -> dict[str, tuple[Any, Any]]:
        """By key, the run's value and that of a ``start`` where it is another."""
        before, here = leaves_of(self.config_path), leaves_of(start)
        return {
            key: (before.get(key), here.get(key))
            for key in (before.keys() | here.keys()) - MAY_CHANGE
            if before.get(key) != here.get(key)
        }

    def check_goes_on(self, cfg: DictConfig) -> str:
        """What the configuration changes of this run, in words, if it can go on with it."""
        changes = sorted(self.changes(cfg).items())
        for key, (before, here) in changes:
            if OF_CHECKPOINT.fullmatch(key):
                raise ConfigError(
                    f"{key}: {here} but {self.path} was trained with {before}, as its "
                    f"checkpoints are. Leave {key} out, or begin a new run."
                )
        if not cfg.replicas.every and not Checkpoints(self.checkpoints_dir).steps():
            raise ConfigError(
                f"resume: {self.path} has no checkpoint to go on from. Begin a new run, with "
                "run_dir=FOLDER and the keys in its config.yaml."
            )
        return "; ".join(f"{key} was {old} and is {new}" for key, (old, new) in changes)

    def remove_if_empty(self) -> None:
        """Remove the folder that Hydra created, if nothing was written to it."""
        with suppress(OSError):  # not empty, or not there
            self.path.rmdir()

    def begin(self, cfg: DictConfig) -> None:
        """Create the folder and write what is known before any rank starts."""
        self.logs_dir.mkdir(parents=True, exist_ok=True)
        self.stop_path.unlink(missing_ok=True)  # of the run that goes on
        self.put_failures_aside()
        save_resolved(cfg, self.start_config_path)
        _write_json(self.logs_dir / "run.json", describe_process())

    def accept_start(self) -> None:
        """Put what ``begin`` wrote in the place of what an earlier start had."""
        self.end_path.unlink(missing_ok=True)
        for name in ("config.yaml", "run.json"):
            write_whole(self.path / name, (self.logs_dir / name).read_text(encoding="utf-8"))

    @property
    def has_begun(self) -> bool:
        """Whether every check has let the last start through."""
        return self._is_of_last_start(self.config_path)

    @property
    def has_ended(self) -> bool:
        """Whether the last start has ended in order."""
        return self._is_of_last_start(self.end_path)

    def _is_of_last_start(self, path: Path) -> bool:
        paths = (path, self.start_config_path)
        written_ns, started_ns = (p.stat().st_mtime_ns if p.exists() else 0 for p in paths)
        return written_ns > started_ns

    @property
    def how_to_go_on(self) -> str:
        """The command that does, started as this run was."""
        command = json.loads((self.logs_dir / "run.json").read_text())["command_line"]
        is_alone = command[0] == "shardhet train"
        path = self.path
        with suppress(ValueError):
            path = path.relative_to(Path.cwd())
        program = "shardhet train" if is_alone else "torchrun ... -m shardhet.apps.train"
        return f"{'srun ... ' * is_task_of_srun()}{program} resume={shlex.quote(str(path))}"

    def ask_to_end(self, why: str) -> None:
        """Tell all ranks to end in order."""
        write_whole(self.stop_path, why)

    def is_asked_to_end_by(self, why: str) -> bool:
        """Whether ``ask_to_end`` was called with this."""
        return _text_of(self.stop_path) == why

    def put_failures_aside(self) -> None:
        """Those of the ranks' last start are no cause of what comes now."""
        for path in self.logs_dir.glob("rank*.failure_before.json"):
            path.unlink()
        for path in self.logs_dir.glob("rank*.failure.json"):
            path.replace(path.with_name(path.name.replace(".failure.", ".failure_before.")))

    def save_end(self, *, step: int, num_steps: int, asked_by: Sequence[str]) -> None:
        """Write after which step the run has ended, and who asked for it if it was early."""
        document = {"step": step, "num_steps": num_steps, "asked_by": list(asked_by)}
        _write_json(self.end_path, document)

    def forget_metrics_after(self, step: int, *, keeps_them: bool = False) -> None:
        """Drop lines of later steps, which the run takes again.

        ``keeps_them``: append them to rolled_back.jsonl.
        """
        if not self.metrics_path.exists():
            return
        lines = self.metrics_path.read_text(encoding="utf-8").splitlines(keepends=True)
        kept = [line for line in lines if _step_of(line) <= step]
        if keeps_them:
            with self.rolled_back_path.open("a", encoding="utf-8") as file:
                file.writelines(line for line in lines if _step_of(line) > step)
        write_whole(self.metrics_path, "".join(kept))

    def save_devices(self, devices: Sequence[DeviceSpec]) -> None:
        """Write the device found for each position of the plan."""
        _write_json(self.devices_path, [to_document(each) for each in devices])

    def load_devices(self) -> list[DeviceSpec]:
        """The inverse of ``save_devices``."""
        return [
            from_document(DeviceSpec, each, source=f"{self.devices_path}: [{i}]")
            for i, each in enumerate(read_document(self.devices_path))
        ]

    def load_config(self) -> TrainConf:
        """The configuration that ``begin`` wrote."""
        return load_resolved(self.start_config_path)

    def config_values(self) -> dict[str, Any]:
        """The same as plain values, for other programs."""
        values = OmegaConf.to_container(OmegaConf.load(self.config_path))
        assert isinstance(values, dict)
        return {str(key): value for key, value in values.items()}


def describe_process() -> dict[str, Any]:
    """Versions, environment and command line of this process."""
    variables = {k: v for k, v in os.environ.items() if k.startswith(VARIABLE_PREFIXES)}
    return {
        "command_line": sys.argv,
        "working_directory": str(Path.cwd()),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "versions": versions(),
        "environment": dict(sorted(variables.items())),
    }


def versions() -> dict[str, str | None]:
    """The versions of the packages that a run depends on; None if not installed."""
    return {name: version_of(name) for name in PACKAGES}


def _step_of(line: str) -> float:
    """The step of a line of metrics; a line that a killed run left in part is of no step."""
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return float("inf")


def _text_of(path: Path) -> str | None:
    return path.read_text(encoding="utf-8") if path.exists() else None


def _write_json(path: Path, document: Any) -> None:
    write_whole(path, json.dumps(document, indent=1) + "\n")


def write_whole(path: Path, text: str) -> None:
    """All of it or nothing, whenever this process is killed."""
    unfinished = path.with_name(f".{path.name}.unfinished")
    try:
        unfinished.write_text(text, encoding="utf-8")
        unfinished.replace(path)
    except OSError:
        unfinished.unlink(missing_ok=True)
        raise
