"""What is done with a command line before hydra reads it."""

import json
from pathlib import Path

import pytest

from shardhet.apps.launch.hydra_entry import (
    flags_first,
    own_config_dir,
    refuse,
)
from shardhet.apps.launch.rank_env import RankEnv
from shardhet.config.checks import ConfigError

ENV = RankEnv(rank=0, world_size=2, local_rank=0, store_host="localhost", store_port=0)


@pytest.mark.parametrize(
    "typed, read",
    [
        ("seed=1 -m optim.lr=1,2", "-m seed=1 optim.lr=1,2"),
        ("optim=sgd --cfg job ~experiment +x=1", "--cfg job optim=sgd ~experiment +x=1"),
        ("seed=1 --config-dir=mine -cn my seed=2", "--config-dir=mine -cn my seed=1 seed=2"),
    ],
)
def test_flags_may_stand_anywhere(typed: str, read: str) -> None:
    assert flags_first(typed.split()) == read.split()


@pytest.mark.parametrize("flag", ["--config-dir={}", "--config-dir {}", "-cd {}"])
def test_the_users_own_folder_is_found(flag: str, tmp_path: Path) -> None:
    arguments = ["seed=1", "-m", *flag.format(tmp_path).split(), "--cfg", "job"]
    assert own_config_dir(arguments) == tmp_path
    assert own_config_dir(["seed=1", "-cn", "my"]) is None
    with pytest.raises(SystemExit, match="--config-dir: '/no/such' is not a folder"):
        own_config_dir(["--config-dir", "/no/such"])


def test_torchrun_is_told_what_is_wrong_with_a_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    error = ConfigError("seed: -1 but it must be at least 0.")
    assert refuse(error, None).code == 1
    assert capsys.readouterr().err == f"{error}\nNothing was started.\n"
    assert not list(tmp_path.iterdir())
    try:
        raise error
    except ConfigError as raised:
        refuse(raised, ENV)
    told = json.loads((tmp_path / "error.json").read_text())["message"]
    callstack = told["extraInfo"]["py_callstack"].strip()
    assert callstack.endswith(str(error))
    assert callstack.count("\n") <= 4  # in a report that is long enough
