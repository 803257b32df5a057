"""What one rank does with a configuration, without starting a program."""

import json
from pathlib import Path

import numpy as np
import torch
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from shardhet.apps.rank_env import RankEnv
from shardhet.apps.run_folder import RunFolder
from shardhet.apps.worker import Run
from shardhet.config.compose import (
    CONFIG_NAME,
    VERSION_BASE,
    conf_dir,
    load_resolved,
    register_schemas,
    save_resolved,
)
from tests.worlds import run_ranks

NUM_RANKS = 4  # of the demo
SHORT_DEMO = (
    "experiment=demo",
    "num_steps=40",
    "eval_every=0",
    "model.width=32",
    "model.num_layers=1",
    "data.seq_len=16",
    "data.num_judged_samples=40",
)


def train_rank(rank: int, path: str) -> None:
    folder = RunFolder(Path(path))
    env = RankEnv(
        rank=rank,
        world_size=NUM_RANKS,
        local_rank=rank,
        store_host="localhost",
        store_port=0,
    )
    Run(folder.load_config(), folder, env, torch.device("cpu")).train()


def train(folder: Path, *overrides: str) -> tuple[np.ndarray, float]:
    """Losses of all steps, and the held-out bits per byte."""
    register_schemas()
    OmegaConf.register_new_resolver("run_stamp", lambda: "stamp", replace=True)
    folder.mkdir()
    with initialize_config_dir(str(conf_dir()), version_base=VERSION_BASE):
        cfg = compose(CONFIG_NAME, [*overrides, f"run_dir={folder}"])
    save_resolved(cfg, folder / "config.yaml")
    assert load_resolved(folder / "config.yaml").run_dir == str(folder)
    run_ranks(train_rank, NUM_RANKS, str(folder))
    entries = [json.loads(line) for line in (folder / "metrics.jsonl").open()]
    losses = np.array([entry["loss"] for entry in entries if "loss" in entry])
    return losses, entries[-1]["held_out_bits_per_byte"]


def test_bfloat16_learns_as_float32_does(tmp_path: Path) -> None:
    in_float32, score_in_float32 = train(tmp_path / "fp32", *SHORT_DEMO)
    in_bfloat16, score = train(tmp_path / "bf16", *SHORT_DEMO, "precision=BF16")
    assert np.isfinite(in_bfloat16).all()
    assert in_bfloat16[-5:].mean() < 0.7 * in_bfloat16[0]
    assert (in_bfloat16 != in_float32).any()
    np.testing.assert_allclose(in_bfloat16, in_float32, rtol=0.02)
    assert abs(score - score_in_float32) < 0.02
