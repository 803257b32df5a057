"""Runs that are cut off and go on: the same losses, each once."""

import json
import random
import re
import shutil
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from hydra import compose, initialize_config_dir
from rich.console import Console

from shardhet.apps.launch.rank_env import RankEnv
from shardhet.apps.launch.run_folder import RunFolder
from shardhet.apps.run.worker import Run
from shardhet.config.checks import ConfigError
from shardhet.config.compose import (
    CONFIG_NAME,
    OF_RUN,
    VERSION_BASE,
    conf_dir,
    implied_choices,
    register_run,
    to_conf,
)
from shardhet.training.resuming import (
    options_of,
    put_options,
    random_states,
    restore_random_states,
)
from tests.selection import one_in
from tests.test_train import ALONE, run
from tests.test_worker import configure, train_rank, write_pages
from tests.worlds import run_ranks, run_ranks_expecting_failure

NUM_STEPS = 7
TEXT = (
    "data=text_dir",
    "debug=quick",
    f"num_steps={NUM_STEPS}",
    "model.width=16",
    "model.num_layers=1",
    "data.seq_len=8",
    "checkpoint.every=2",
    "precision=FP64",
)
UNEVEN = (
    "plan=by_hand",
    "cluster.num_ranks=2",
    "plan.microbatch_sizes=[2,1]",
    "plan.num_microbatches=[3,2]",
    "plan.state_shares=[0.3,0.7]",
)
STORING = (
    "plan=by_hand",
    "cluster.num_ranks=3",
    "plan.microbatch_sizes=[4,0,2]",
    "plan.num_microbatches=[1,0,2]",
    "plan.state_shares=[0.0,0.9,0.1]",
)


def train_until(rank: int, path: str, world_size: int, stop: int) -> None:
    """As one of the ranks, which are all gone after step ``stop``."""
    folder = RunFolder(Path(path))
    env = RankEnv(
        rank=rank, world_size=world_size, local_rank=rank, store_host="localhost", store_port=0
    )
    run = Run(folder.load_config(), folder, env, torch.device("cpu"))
    with suppress(ConnectionError), run.in_training(Console(quiet=True)):
        while run.model.step < stop:
            run.take_step()
        # These processes stay, and so would a copy on its way, which those that are gone end.
        run._checkpoints.close()
        raise ConnectionError


def losses(folder: Path) -> dict[int, float]:
    """By step; fails if a step is there twice."""
    entries = [json.loads(line) for line in (folder / "metrics.jsonl").open()]
    found = [(entry["step"], entry["loss"]) for entry in entries if "loss" in entry]
    assert len(dict(found)) == len(found), found
    return dict(found)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pages(tmp_path_factory.mktemp("resume") / "text")


@pytest.fixture(scope="module")
def undisturbed(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that nothing has happened to."""
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    path = configure(folder, *TEXT, *UNEVEN, f"data.path={text}", "checkpoint.keep_last=0")
    run_ranks(train_rank, 2, [path] * 2)
    names = sorted(each.name for each in RunFolder(folder).checkpoints_dir.iterdir())
    assert names == [f"step_{step:08d}" for step in (2, 4, 6, 7)]
    return folder


@pytest.mark.parametrize("in_background", one_in(2, [True, False]))
def test_a_run_that_was_cut_off_goes_on_bit_by_bit(
    text: Path, undisturbed: Path, tmp_path: Path, in_background: bool
) -> None:
    more = (f"data.path={text}", f"checkpoint.in_background={in_background}")
    folder = tmp_path / "run"
    path = configure(folder, *TEXT, *UNEVEN, *more, "resume=auto")
    run_ranks(train_until, 2, path, 2, 5)
    assert list(losses(folder)) == [1, 2, 3, 4, 5]
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "lo')  # as a kill leaves it
    configure(folder, *TEXT, *UNEVEN, *more, "resume=auto")
    run_ranks(train_rank, 2, [path] * 2)
    assert losses(folder) == losses(undisturbed)
    names = sorted(each.name for each in RunFolder(folder).checkpoints_dir.iterdir())
    assert names == ["step_00000006", "step_00000007"]


def metrics(folder: Path, name: str) -> list[int]:
    """The steps with a value of this name."""
    entries = [json.loads(line) for line in (folder / "metrics.jsonl").open()]
    return [entry["step"] for entry in entries if name in entry]


def test_a_run_goes_on_from_replicas_where_there_is_no_checkpoint(
    text: Path, undisturbed: Path, tmp_path: Path
) -> None:
    nodes, folder = tmp_path / "nodes", tmp_path / "run"
    more = (f"data.path={text}", "checkpoint.every=0", "resume=auto")
    more += ("replicas.every=1", f"replicas.folder={nodes}")
    path = configure(folder, *TEXT, *UNEVEN, *more)
    run_ranks(train_until, 2, path, 2, 4)
    [kept] = nodes.iterdir()
    assert kept.name == RunFolder(folder).identity()
    found = sorted(each.name for each in kept.iterdir() if each.name.startswith("step_"))
    assert found[-1] in ("step_00000003", "step_00000004")  # the last one may be on its way
    assert metrics(folder, "replica_s") == [1, 2, 3, 4]
    run_ranks(train_rank, 2, [path] * 2)
    assert losses(folder) == losses(undisturbed)
    assert list(nodes.iterdir()) == []  # nothing stays in memory after the last step
    assert metrics(folder, "went_on") in ([4], [5])


def test_a_run_without_a_checkpoint_begins_anew(
    text: Path, undisturbed: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    more = (f"data.path={text}", "resume=auto")
    path = configure(folder, *TEXT, *UNEVEN, *more)
    run_ranks(train_until, 2, path, 2, 1)
    assert list(losses(folder)) == [1]
    run_ranks(train_rank, 2, [path] * 2)
    assert losses(folder) == losses(undisturbed)


def test_another_plan_goes_on_from_a_path(
    text: Path, undisturbed: Path, tmp_path: Path
) -> None:
    expected = losses(undisturbed)
    source = RunFolder(undisturbed).checkpoints_dir / "step_00000004"
    path = configure(tmp_path / "run", *TEXT, *STORING, f"data.path={text}", f"resume={source}")
    run_ranks(train_rank, 3, [path] * 3)
    found = losses(tmp_path / "run")
    assert list(found) == [5, 6, 7]
    np.testing.assert_allclose(list(found.values()), [expected[step] for step in found], 1e-9)


def test_a_folder_of_checkpoints_is_a_path_too(
    text: Path, undisturbed: Path, tmp_path: Path
) -> None:
    source = RunFolder(undisturbed).checkpoints_dir
    path = configure(tmp_path / "run", *TEXT, *UNEVEN, f"data.path={text}", f"resume={source}")
    run_ranks(train_rank, 2, [path] * 2)
    assert losses(tmp_path / "run") == {}  # the newest one is of the last step


@pytest.mark.parametrize(
    ("change", "said"),
    one_in(
        2,
        [
            ("seed=5", "was written with seed 0 but here it is 5"),
            ("plan.num_microbatches=[3,3]", "was written with global_batch_size 8"),
            ("optim=sgd", "holds the state of AdamW, not of SGD"),
            ("model.width=24", "does not fit the model"),
        ],
    ),
)
def test_a_run_that_would_not_be_the_same_is_refused(
    text: Path, undisturbed: Path, tmp_path: Path, change: str, said: str
) -> None:
    source = RunFolder(undisturbed).checkpoints_dir / "step_00000004"
    path = configure(
        tmp_path / "run", *TEXT, *UNEVEN, f"data.path={text}", change, f"resume={source}"
    )
    for outcome in run_ranks_expecting_failure(train_rank, 2, [path] * 2, within_s=30.0):
        assert said in outcome.message, outcome.traceback


def test_the_folder_of_a_run_is_all_that_it_takes_to_go_on(
    undisturbed: Path, tmp_path: Path
) -> None:
    """Its configuration was given by many keys, and those that are given now come on top."""
    folder = Path(shutil.copytree(undisturbed, tmp_path / "run"))
    for step in (6, 7):
        shutil.rmtree(RunFolder(folder).checkpoints_dir / f"step_{step:08d}")
    done = run([*ALONE, "resume=run", "log_every=7"], tmp_path)
    assert done.returncode == 0, done.stderr
    assert "with the configuration of run, but log_every was 1 and is 7\n" in done.stdout
    assert "goes on after step 4" in done.stdout
    assert losses(folder) == losses(undisturbed)
    assert [each.name for each in tmp_path.iterdir()] == ["run"]


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (["seed=3"], "seed: 3 but .* was trained with 0, .* Leave seed out"),
        (["model.width=24"], "model.width: 24 but .* was trained with 16"),
        (["optim=sgd"], "optim.kind: SGD but .* was trained with AdamW"),
        (["optim=sgd", "optim.kind=AdamW"], "optim.betas was .*; optim.lr was"),
        (["model.dropout=0.5", "plan.microbatch_sizes=[4,2]"], "model.dropout was 0.0 and is"),
        ([], ""),
    ],
)
def test_what_may_not_change_of_a_run_is_named(
    undisturbed: Path, keys: list[str], said: str
) -> None:
    folder = RunFolder(undisturbed)
    found = register_run(folder.config_path, is_launched=False, is_sweep=False)
    assert implied_choices(["plan.microbatch_sizes=[4,2]"], found.plan.kind) == []
    with initialize_config_dir(str(conf_dir()), version_base=VERSION_BASE):
        cfg = compose(OF_RUN, keys)
    if "but" not in said:
        assert re.match(said, folder.check_goes_on(cfg))
        return
    with pytest.raises(ConfigError, match=said):
        folder.check_goes_on(cfg)


def record(folder: Path) -> dict[str, bytes]:
    """What a run leaves, but for its logs."""
    files = [each for each in folder.rglob("*") if each.is_file() and each.name != "lock"]
    return {
        str(each.relative_to(folder)): each.read_bytes()
        for each in files
        if "logs" not in each.parts
    }


@pytest.mark.parametrize(
    ("kept", "said"),
    [
        (True, "does not fit the model"),
        (False, "holds a run with another .*model.width but no checkpoint or replica"),
    ],
)
def test_a_refused_start_leaves_the_record_of_the_run_as_it_was(
    text: Path, undisturbed: Path, tmp_path: Path, kept: bool, said: str
) -> None:
    """A start without the options of the run: no default model gets into its folder."""
    folder = Path(shutil.copytree(undisturbed, tmp_path / "run"))
    if not kept:
        shutil.rmtree(RunFolder(folder).checkpoints_dir)
    before = record(folder)
    assert {"config.yaml", "run.json", "end.json", "metrics.jsonl"} <= before.keys()
    others = [each for each in TEXT if not each.startswith("model.width")]
    path = configure(folder, *others, *UNEVEN, f"data.path={text}", "resume=auto")
    for outcome in run_ranks_expecting_failure(train_rank, 2, [path] * 2, within_s=60.0):
        assert re.search(said, outcome.message), outcome.traceback
    assert record(folder) == before


def test_a_run_that_has_ended_does_not_begin_anew(
    text: Path, undisturbed: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(undisturbed, tmp_path / "run"))
    shutil.rmtree(RunFolder(folder).checkpoints_dir)
    before = record(folder)
    more = (f"data.path={text}", "checkpoint.keep_last=0", "resume=auto")
    path = configure(folder, *TEXT, *UNEVEN, *more)
    for outcome in run_ranks_expecting_failure(train_rank, 2, [path] * 2, within_s=60.0):
        assert "holds a run that has ended but no checkpoint" in outcome.message
    assert record(folder) == before


def test_a_path_must_exist(tmp_path: Path) -> None:
    configure(tmp_path / "run", "debug=quick")
    with initialize_config_dir(str(conf_dir()), version_base=VERSION_BASE):
        for value in (str(tmp_path / "nowhere"), "Auto"):
            cfg = compose(CONFIG_NAME, [f"run_dir={tmp_path}", f"resume={value}"])
            with pytest.raises(ConfigError, match=r"resume: .* is not a folder"):
                to_conf(cfg).check_resume()
        for name in ("checkpoint.every", "replicas.every"):
            with pytest.raises(ConfigError, match=f"{name}: -1"):
                to_conf(compose(CONFIG_NAME, [f"run_dir={tmp_path}", f"{name}=-1"]))


def test_random_states_come_back() -> None:
    states = random_states(torch.device("cpu"))

    def draw() -> tuple[float, float, float]:
        return random.random(), np.random.random(), torch.rand(()).item()  # noqa: NPY002

    drawn = draw()
    assert draw() != drawn
    restore_random_states(states, torch.device("cpu"))
    assert draw() == drawn


def test_options_of_an_optimizer_are_those_of_the_run_that_goes_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    param = torch.nn.Parameter(torch.zeros(3))
    before, here = (
        torch.optim.AdamW([param], lr=lr, betas=(beta, 0.9), weight_decay=decay)
        for lr, beta, decay in ((0.1, 0.8, 0.1), (0.2, 0.5, 0.7))
    )
    options = options_of(here)
    here.load_state_dict(before.state_dict())
    put_options(here, options, source="saved")
    [group] = here.param_groups
    assert (group["betas"], group["weight_decay"]) == ((0.5, 0.9), 0.7)
    assert group["lr"] == 0.1  # the schedule sets it
    assert "optimizer of saved: betas was (0.8, 0.9) and is (0.5, 0.9)" in caplog.text
    caplog.clear()
    put_options(here, options, source="saved")
    assert not caplog.text
