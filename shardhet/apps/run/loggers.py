"""Loggers of metrics: always metrics.jsonl, and one more if requested."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from shardhet.apps.launch.run_folder import RunFolder
from shardhet.config.checks import ConfigError
from shardhet.config.training import LoggerConf, LoggerKind


class MetricsLogger:
    """Records numbers by name, step by step; this one nowhere."""

    def log(self, step: int, values: Mapping[str, float | None]) -> None:
        """Record what was measured at ``step``."""

    def roll_back(self, step: int) -> None:
        """Forget what was recorded after ``step``: those steps are taken again."""

    def close(self) -> None:
        """Write everything to disk."""


class JsonLinesLogger(MetricsLogger):
    """Writes one JSON object per line, as soon as it is logged."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._file = self._open()

    def _open(self) -> IO[str]:
        return self._folder.metrics_path.open("a", encoding="utf-8", buffering=1)

    def log(self, step: int, values: Mapping[str, float | None]) -> None:
        self._file.write(json.dumps({"step": step, **values}) + "\n")

    def roll_back(self, step: int) -> None:
        self._file.close()
        self._folder.forget_metrics_after(step, keeps_them=True)
        self._file = self._open()

    def close(self) -> None:
        self._file.close()


class TensorBoardLogger(MetricsLogger):
    """Writes event files for ``tensorboard --logdir``."""

    def __init__(self, folder: Path, *, first_step: int) -> None:
        self._folder = folder
        self._writer = self._open(None if first_step == 1 else first_step)

    def _open(self, purge_step: int | None) -> Any:
        from torch.utils.tensorboard import SummaryWriter

        return SummaryWriter(str(self._folder), purge_step=purge_step)

    def log(self, step: int, values: Mapping[str, float | None]) -> None:
        for name, value in values.items():
            if value is not None:
                self._writer.add_scalar(name, value, step)

    def roll_back(self, step: int) -> None:
        self._writer.close()
        self._writer = self._open(step + 1)  # tensorboard hides earlier events from there on

    def close(self) -> None:
        self._writer.close()


class WandbLogger(MetricsLogger):
    """Logs to a Weights & Biases run; offline runs are uploaded later with ``wandb sync``.

    ``step`` is a metric, which the others are drawn over: wandb's own steps only increase, and
    what is logged at an earlier one would be lost.  It forgets nothing, so steps that are taken
    again come twice.
    """

    def __init__(self, folder: RunFolder, conf: LoggerConf) -> None:
        import wandb

        self._run = wandb.init(
            project=conf.project,
            name=folder.path.name,
            id=folder.identity().rpartition("_")[2],  # a run that goes on is one run there, too
            resume="allow",
            dir=str(folder.path),
            config=folder.config_values(),
            mode="offline" if conf.is_offline else "online",
        )
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, values: Mapping[str, float | None]) -> None:
        self._run.log({"step": step, **values})

    def close(self) -> None:
        self._run.finish()


def check_logger(conf: LoggerConf) -> None:
    """Raise if the package of the chosen logger is not installed."""
    package = {LoggerKind.TENSORBOARD: "tensorboard", LoggerKind.WANDB: "wandb"}.get(conf.kind)
    if package is None:
        return
    try:
        __import__(package)
    except ImportError:
        raise ConfigError(
            f"logger: {conf.kind.value} but the package {package} is not installed. Run "
            f"pip install 'shardhet[{package}]', or leave logger out."
        ) from None


def open_loggers(
    conf: LoggerConf, folder: RunFolder, *, first_step: int
) -> list[MetricsLogger]:
    """The logger of metrics.jsonl, and the one that ``logger=`` selects.

    ``first_step`` is the first that this start takes; later ones of earlier starts are void.
    """
    loggers: list[MetricsLogger] = [JsonLinesLogger(folder)]
    if conf.kind is LoggerKind.TENSORBOARD:
        loggers.append(TensorBoardLogger(folder.path / "tensorboard", first_step=first_step))
    if conf.kind is LoggerKind.WANDB:
        loggers.append(WandbLogger(folder, conf))
    return loggers
