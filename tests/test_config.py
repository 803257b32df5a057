"""Configurations: bad ones are refused by key and choice, good ones come back as they were."""

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf

from shardhet.apps.cli.help import choices_by_group
from shardhet.apps.train import checked_world_size
from shardhet.config.checks import ConfigError
from shardhet.config.compose import (
    CONFIG_NAME,
    VERSION_BASE,
    check_choices,
    conf_dir,
    implied_choices,
    load_resolved,
    reasons_of,
    register_schemas,
    save_resolved,
    searching_first,
    to_conf,
)
from shardhet.config.imported import ImportedConf
from shardhet.config.train import Precision, TrainConf
from shardhet.profiler.measure import MeasuringEffort, measure
from shardhet.records.plan import HoldsFor, Plan
from shardhet.records.stages import Stage
from shardhet.training.optim import OptimizerSpec, WarmupDecay
from tests.selection import one_in
from tests.test_fewer import scenario_of

BY_HAND = "plan=by_hand plan.microbatch_sizes=[2,1] plan.num_microbatches=[1,2] "


@pytest.fixture(scope="module", autouse=True)
def _schemas() -> None:
    OmegaConf.register_new_resolver("run_stamp", lambda: "stamp", replace=True)
    register_schemas()


def compose_with(overrides: list[str]) -> DictConfig:
    with initialize_config_dir(str(conf_dir()), version_base=VERSION_BASE):
        return compose(CONFIG_NAME, overrides)


def conf_with(*overrides: str) -> TrainConf:
    return to_conf(compose_with(list(overrides)))


def complaint(overrides: list[str], monkeypatch: pytest.MonkeyPatch) -> str:
    """All that a user is told about a configuration that cannot be run."""
    monkeypatch.setitem(
        __import__("sys").modules, "wandb", None
    )  # as where it is not installed
    try:
        check_choices(overrides)
        checked_world_size(to_conf(compose_with(overrides)), num_launched=None)
    except ConfigError as error:
        return str(error)
    except HydraException as error:
        return "\n".join(reasons_of(error))
    pytest.fail(f"{overrides} was taken for good")


def test_a_key_of_one_stage_can_be_changed() -> None:
    stages = "plan.stages=[{units:[embedding],num_ranks:1},{units:[head],num_ranks:1}]"
    conf: Any = conf_with(
        "plan=by_hand", "plan.microbatch_sizes=[1,1]", stages, "plan.stages.0.in_flight=2"
    ).plan
    assert conf.stages[0].to_record() == Stage(units=("embedding",), num_ranks=1, in_flight=2)


def test_batch_sizes_alone_are_a_plan_by_hand() -> None:
    typed = ["plan.microbatch_sizes=[2,2,2,15]"]
    check_choices(["plan.microbatch_sizes=[1,2],[2,1]"])  # a sweep over two lists
    conf = conf_with(*typed, *implied_choices(typed))
    assert conf.to_plan(4) == Plan.by_hand(microbatch_sizes=[2, 2, 2, 15])
    assert not implied_choices([*typed, "experiment=demo"])
    assert not implied_choices([*typed, "plan=demo_4"])


def test_a_folder_that_cannot_be_made_is_refused_by_its_key(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    check_choices([f"out={tmp_path}/new/folder", f"plan.path={tmp_path}/file", "~data"])
    assert [each.name for each in tmp_path.iterdir()] == ["file"]
    check_choices([f"plan.recompute=[{'block,' * 100}]"])  # longer than a file's name may be
    for path in ("file", "file/below"):
        with pytest.raises(ConfigError, match=r"out: .*file is a file"):
            check_choices([f"out={tmp_path}/{path}"])
    if Path("/proc/self").exists():
        with pytest.raises(ConfigError, match="run_dir: '/proc/x': /proc may not be written"):
            check_choices(["run_dir=/proc/x"])


def test_a_device_that_is_not_here_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    message = complaint(["cluster.device=CUDA"], monkeypatch)
    assert message.startswith("cluster.device: CUDA but torch finds no GPU")


CHOICES = [
    f"{group}={choice}"
    for group, choices in choices_by_group(conf_dir()).items()
    for choice in choices
    if choice != "imported"  # not for train
]
LLAMA = {"model_type": "llama", "vocab_size": 260, "hidden_size": 16, "num_hidden_layers": 2,
         "intermediate_size": 24, "num_attention_heads": 2}  # fmt: skip
NEEDED = {
    "model=hf": ["model.path={tmp}", "model.weights=false"],
    "optim=any": ["optim.kind=Adagrad", "optim.lr=0.1"],
    "plan=by_hand": [*BY_HAND.split()[1:], "plan.state_shares=[0.5,0.5]"],
    "plan=file": ["plan.path={tmp}/plan.json"],
    "plan=measured": ["plan.measured={tmp}/measured"],
    "data=text_dir": ["data.path={tmp}", "data.pattern='*.json'"],
}


@pytest.mark.parametrize("choice", one_in(5, CHOICES))
def test_every_choice_comes_back_from_its_run_folder(choice: str, tmp_path: Path) -> None:
    if choice == "model=hf":
        pytest.importorskip("transformers")
    Plan.even(2, microbatch_size=1).save(tmp_path / "plan.json")
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    scenario_of("fs", s_per_byte=1e-12).save(tmp_path / "measured")
    more = [each.format(tmp=tmp_path) for each in NEEDED.get(choice, [])]
    cfg = compose_with([choice, *more])
    conf = to_conf(cfg)
    checked_world_size(conf, num_launched=None) if choice != "logger=wandb" else None
    save_resolved(cfg, tmp_path / "config.yaml")
    assert load_resolved(tmp_path / "config.yaml") == conf


def test_a_choice_of_another_version_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("plan: {kind: PROPORTIONAL}\n")
    with pytest.raises(ConfigError, match="plan is proportional, which this version does not"):
        load_resolved(tmp_path / "config.yaml")


@pytest.mark.parametrize(
    ("keys", "found"),
    [
        ([], Precision.BF16),
        (["optim=sgd", "data.seq_len=100", "precision=BF16"], Precision.BF16),
        (
            ["precision=FP32"],
            "param_dtype is float32 but the plan was made for bfloat16. Train",
        ),
        (
            ["data.seq_len=129"],
            "tokens_per_sample is 129 but the plan was made for 128. .*data.seq_len=",
        ),
        (
            ["+optim.arguments.amsgrad=true"],
            "num_moments is 3 but the plan was made for 2",
        ),
    ],
)
def test_a_plan_says_what_it_holds_for(keys: list[str], found: Any, tmp_path: Path) -> None:
    """Its precision is followed where none is given; what takes more memory is refused."""
    path = tmp_path / "plan.json"
    said = HoldsFor(param_dtype="bfloat16", tokens_per_sample=128, num_moments=2)
    replace(Plan.even(2, microbatch_size=1), holds_for=said).save(path)
    conf = conf_with("plan=file", f"plan.path={path}", "cluster.device=CPU", *keys)
    if isinstance(found, Precision):
        assert checked_world_size(conf, num_launched=None) == 2
        assert conf.precision is found
        return
    with pytest.raises(ConfigError, match=found):
        checked_world_size(conf, num_launched=None)


@pytest.mark.parametrize("experiment", choices_by_group(conf_dir())["experiment"])
def test_every_experiment_can_be_tried_quickly(experiment: str) -> None:
    conf = conf_with(f"experiment={experiment}", "debug=quick")
    checked_world_size(conf, num_launched=None)
    assert conf.num_steps == 5


def test_every_choice_says_what_it_is_for() -> None:
    groups = choices_by_group(conf_dir())
    assert all(purpose for choices in groups.values() for purpose in choices.values())


def test_own_files_come_first(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "tiny.yaml").write_text("defaults: [small]\nnum_layers: 1\n")
    own, files = searching_first(tmp_path), initialize_config_dir
    with own, files(str(conf_dir()), version_base=VERSION_BASE):
        cfg = compose(CONFIG_NAME)
    assert (cfg.model.num_layers, cfg.model.width) == (1, 256)
    assert compose_with([]).model.width == 128  # tiny's own again


def test_configurations_become_records() -> None:
    conf = conf_with("lr_scheduler=wsd", "num_steps=100", "precision=BF16")
    assert conf.precision is Precision.BF16
    assert conf.optim.to_record() == OptimizerSpec(
        learning_rate=4e-3, weight_decay=0.1, arguments={"betas": [0.9, 0.95], "eps": 1e-8}
    )
    assert conf.lr_scheduler.to_record(100) == WarmupDecay(
        num_steps=100,
        num_decay_steps=20,
        num_warmup_steps=5,
        final_fraction=0.1,
        is_cosine=False,
    )
    given = {"+optim.arguments.eps=1e-7": ("Adagrad", 1), "optim.momentum=0.5": ("SGD", 1),
             "optim.lr=0.2": ("sgd", 0), "optim.betas=[0.8,0.9]": ("NAdam", 2)}  # fmt: skip
    for override, (kind, num_moments) in given.items():
        optim = conf_with("optim=any", f"optim.kind={kind}", "optim.lr=0.1", override).optim
        assert optim.to_record().count_moments() == num_moments


@pytest.mark.parametrize("world_size", range(1, 5))
def test_an_even_plan_fits_any_number_of_ranks(world_size: int) -> None:
    conf = conf_with("plan.global_batch_size=10", "plan.microbatch_size=3")
    plan = conf.to_plan(checked_world_size(conf, num_launched=world_size))
    batches = [rank.rank_batch_size for rank in plan.ranks]
    assert sum(batches) == 10
    assert max(batches) - min(batches) <= 1


def test_ranks_are_counted_from_whatever_is_stated() -> None:
    assert conf_with("cluster=demo_4").world_size(None) == 4
    assert conf_with("plan=demo_4").world_size(None) == 4
    assert conf_with("cluster.device=CPU").world_size(None) == 1
    with pytest.raises(ConfigError, match="plan says 4, the launcher says 2"):
        conf_with("plan=demo_4").world_size(2)


def test_devices_have_the_names_of_the_cluster() -> None:
    conf = conf_with("experiment=demo")
    plan = conf.to_plan(checked_world_size(conf, num_launched=None))
    kinds: list[Any] = [rank.device.kind for rank in plan.ranks]
    assert kinds == ["emulated big", "emulated cramped", "emulated slow", "emulated store"]


def test_every_pair_of_optimizer_and_schedule_composes() -> None:
    groups = choices_by_group(conf_dir())
    for optim, schedule in itertools.product(groups["optim"], groups["lr_scheduler"]):
        needed = NEEDED.get(f"optim={optim}", [])
        conf = conf_with(f"optim={optim}", *needed, f"lr_scheduler={schedule}")
        assert conf.lr_scheduler.to_record(conf.num_steps)(0) > 0


QUICK = MeasuringEffort(max_microbatch_size=2, num_repeats=3, time_limit_s=0.2)
MINE = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.scale = nn.Parameter(torch.ones(width))  # no reset_parameters() gives it values

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x * self.scale

def batch():
    return torch.rand(2, 6)

nothing = None
"""


def test_a_class_by_its_import_path_is_described_and_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine_to_import.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*__import__("sys").path])
    conf = ImportedConf(
        target="mine_to_import:Model", batch="mine_to_import:batch", arguments={"width": 6}
    )
    workload = conf.to_workload(param_dtype="bfloat16")
    assert workload.numel == 3 * (36 + 6) + 6
    assert workload.param_dtype == "bfloat16"
    assert measure(conf.trained(), effort=QUICK).scenario.workload.numel == workload.numel
    for target, words in {
        "nowhere:Model": "model.target: 'nowhere:Model' cannot be imported",
        "mine_to_import:nothing": "nothing callable named 'nothing'",
        "mine_to_import:batch": "returned Tensor, but a model is needed",
    }.items():
        with pytest.raises(ConfigError, match=words):
            ImportedConf(target=target, batch="mine_to_import:batch").trained()
    with pytest.raises(ConfigError, match=r"seq_len: the samples are those of model\.batch"):
        conf.to_workload(seq_len=3, param_dtype="float32")
