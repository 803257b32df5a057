"""What one rank does with a configuration, without starting a program."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from shardhet.apps.launch.crash import read_failures
from shardhet.apps.launch.joining import joined
from shardhet.apps.launch.rank_env import RankEnv
from shardhet.apps.launch.run_folder import RunFolder
from shardhet.apps.run.worker import Run
from shardhet.config.compose import (
    CONFIG_NAME,
    VERSION_BASE,
    conf_dir,
    register_schemas,
)
from shardhet.config.training import ClusterConf
from tests.worlds import run_ranks, run_ranks_expecting_failure

SHORT_TEXT = (
    "data=text_dir",
    "debug=quick",
    "model.width=16",
    "model.num_layers=1",
    "data.seq_len=8",
    "cluster.num_ranks=2",
)


def train_rank(rank: int, paths: Sequence[str]) -> None:
    """As one of the ranks, each of which has a run folder's configuration."""
    folder = RunFolder(Path(paths[rank]))
    env = RankEnv(
        rank=rank,
        world_size=len(paths),
        local_rank=rank,
        store_host="localhost",
        store_port=0,
    )
    Run(folder.load_config(), folder, env, torch.device("cpu")).train()


def configure(folder: Path, *overrides: str) -> str:
    """A run folder with a configuration."""
    register_schemas()
    OmegaConf.register_new_resolver("run_stamp", lambda: "stamp", replace=True)
    with initialize_config_dir(str(conf_dir()), version_base=VERSION_BASE):
        cfg = compose(CONFIG_NAME, [*overrides, f"run_dir={folder}"])
    RunFolder(folder).begin(cfg)
    return str(folder)


def write_pages(folder: Path, *, changed_page: int | None = None) -> Path:
    folder.mkdir()
    for i in range(40):
        word = "letter" if i == changed_page else "page"
        (folder / f"{i}.txt").write_text(f"{word} {i} of a book")
    return folder


def train(folder: Path, *overrides: str) -> tuple[np.ndarray, float]:
    """Losses of all steps on four ranks, and the held-out bits per byte."""
    run_ranks(train_rank, 4, [configure(folder, *overrides)] * 4)
    entries = [json.loads(line) for line in (folder / "metrics.jsonl").open()]
    losses = np.array([entry["loss"] for entry in entries if "loss" in entry])
    return losses, entries[-1]["held_out_bits_per_byte"]


def complaints(paths: Sequence[str]) -> list[str]:
    outcomes = run_ranks_expecting_failure(train_rank, 2, paths, within_s=30.0)
    assert [each.exception_name for each in outcomes] == ["ValueError", "ValueError"]
    return [each.message for each in outcomes]


def test_ranks_with_unlike_files_all_stop_with_one_message(tmp_path: Path) -> None:
    text = [write_pages(tmp_path / f"text{i}", changed_page=7 * i or None) for i in range(2)]
    paths = [
        configure(tmp_path / f"{i}", *SHORT_TEXT, f"data.path={text[i]}") for i in range(2)
    ]
    messages = complaints(paths)
    assert messages[0] == messages[1]
    assert messages[0].startswith("data: not the same on all ranks. Ranks [1] have")


def test_ranks_with_unlike_configurations_all_stop_with_one_message(tmp_path: Path) -> None:
    text = write_pages(tmp_path / "text")
    rates = ["optim.lr=0.25", "optim.lr=0.5"]
    paths = [
        configure(tmp_path / f"{i}", *SHORT_TEXT, f"data.path={text}", rate)
        for i, rate in enumerate(rates)
    ]
    messages = complaints(paths)
    assert messages[0] == messages[1]
    assert "configuration: not the same on all ranks. Ranks [1] have" in messages[0]
    assert "optim.lr: 0.5" in messages[0]


def test_a_rank_without_a_device_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    env = RankEnv(rank=0, world_size=2, local_rank=1, store_host="", store_port=0)
    folder = RunFolder(tmp_path)
    with pytest.raises(ValueError, match="local rank"), joined(ClusterConf(), folder, env):
        pass
    [failure] = read_failures(folder)
    assert failure.name == "rank 0 (no device)"
    assert "local rank 1 but this host has 1 GPUs" in failure.what


def test_the_same_text_may_lie_elsewhere_on_each_rank(tmp_path: Path) -> None:
    text = [write_pages(tmp_path / f"text{i}") for i in range(2)]
    paths = [
        configure(tmp_path / f"{i}", *SHORT_TEXT, f"data.path={text[i]}") for i in range(2)
    ]
    run_ranks(train_rank, 2, paths)
    assert (tmp_path / "0" / "metrics.jsonl").exists()
