"""Models of Hugging Face's by their folders: made here, tiny, nothing is downloaded."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers", reason="model=hf needs transformers")
if find_spec("peft") is None:  # a second of a core to import
    pytest.skip("model.lora needs peft", allow_module_level=True)

from hydra import compose, initialize_config_dir

from shardhet import HetFSDP, Plan
from shardhet.apps.run.model_to_measure import model_to_measure
from shardhet.apps.run.task import make_files, make_task
from shardhet.config.checks import ConfigError
from shardhet.config.compose import (
    CONFIG_NAME,
    VERSION_BASE,
    conf_dir,
    register_schemas,
    to_conf,
)
from shardhet.config.measure import MeasureConf
from shardhet.config.models import HfConf
from shardhet.config.train import TrainConf
from shardhet.models.pretrained import (
    LanguageModel,
    Lora,
    Objective,
    PretrainedFolder,
    language_loss,
)
from shardhet.profiler.describe import describe
from shardhet.profiler.model_spec import trace_model
from tests.parity import Batch, Course, Problem, check_parity
from tests.programs import SHARDHET, run
from tests.selection import one_in, only
from tests.small_models import TRANSFORMERS_SHAPE
from tests.worlds import TRANSFORMERS, preload, run_ranks

preload(*TRANSFORMERS)

VOCAB_SIZE, SEQ_LEN = 260, 8
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    **TRANSFORMERS_SHAPE,
    "num_hidden_layers": 3,
    "num_key_value_heads": 1,
    "max_position_embeddings": 32,
}
GROUPED = {**SHAPE, "head_dim": 8}
PLAIN = {key: SHAPE[key] for key in SHAPE if key != "num_key_value_heads"}
GPT2 = {"vocab_size": VOCAB_SIZE, "n_embd": 16, "n_layer": 3, "n_head": 2, "n_positions": 32}
T5 = {
    "d_model": 16,
    "d_kv": 8,
    "d_ff": 24,
    "num_layers": 3,
    "num_heads": 2,
    "dropout_rate": 0.0,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "gpt2": {**GPT2, "bos_token_id": 0, "eos_token_id": 0, "tie_word_embeddings": True},
    "llama": SHAPE,
    "qwen3": GROUPED,
    "gemma2": GROUPED,
    "bert": PLAIN,
    "t5": {"vocab_size": VOCAB_SIZE, **T5},
    "mixtral": {**SHAPE, "num_local_experts": 2},
}
OBJECTIVES = {"bert": Objective.MASKED, "t5": Objective.SECOND_HALF}
UNEVEN = Plan.by_hand(
    microbatch_sizes=[2, 1, 0],
    rank_batch_sizes=[3, 2, 0],
    state_shares=[0.5, 0.2, 0.3],
    recompute=[True, False, False],
)


def make_folder(folder: Path, kind: str) -> Path:
    """config.json of a model of this kind."""
    from transformers import AutoConfig

    AutoConfig.for_model(kind, **CONFIGS[kind]).save_pretrained(folder / kind)
    return folder / kind


def add_weights(path: Path) -> Path:
    model: Any = PretrainedFolder.open(str(path)).in_memory(
        dtype=torch.float32, weights=False, seed=3
    )
    model.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return add_weights(make_folder(tmp_path_factory.mktemp("models"), "llama"))


@pytest.fixture(scope="module", autouse=True)
def _schemas() -> None:
    register_schemas()


def conf_of(path: Path | str, *overrides: str) -> TrainConf:
    typed = ["model=hf", f"model.path={path}", "run_dir=unused", f"data.seq_len={SEQ_LEN}"]
    with initialize_config_dir(str(conf_dir()), version_base=VERSION_BASE):
        return to_conf(compose(CONFIG_NAME, [*typed, *overrides]))


@pytest.mark.parametrize("kind", one_in(6, [kind for kind in CONFIGS if kind != "mixtral"]))
def test_any_language_model_is_counted_from_its_configuration(
    kind: str, tmp_path: Path
) -> None:
    folder = PretrainedFolder.open(str(make_folder(tmp_path, kind)))
    assert folder.objective is OBJECTIVES.get(kind, Objective.NEXT_TOKEN)
    module = folder.on_meta(dtype=torch.float32)
    called = LanguageModel(folder.objective)
    sketch = trace_model(called.trained(module, vocab_size=VOCAB_SIZE, seq_len=SEQ_LEN))
    assert sketch.goes_on == (kind == "gemma2")  # which caps its logits
    assert sketch.times_loss
    workload = HfConf(path=str(folder.path)).to_workload(seq_len=SEQ_LEN, param_dtype="float32")
    assert workload.numel == sum(param.numel() for param in module.parameters())
    blocks = [unit.kind for unit in workload.units if unit.fqn.split(".")[-1].isdigit()]
    assert len(blocks) == (6 if kind == "t5" else 3)
    # The first block of T5 has the position bias; elsewhere only a layer's index differs.
    assert len(set(blocks)) == (4 if kind == "t5" else 1)


def test_logits_that_wait_for_a_loss_outside_are_counted(tmp_path: Path) -> None:
    from transformers import AutoConfig

    input_bytes = []
    for cap in (None, 30.0):
        config = AutoConfig.for_model("gemma2", **GROUPED, final_logit_softcapping=cap)
        config.save_pretrained(tmp_path / str(cap))
        workload = describe_folder(PretrainedFolder.open(str(tmp_path / str(cap))), None)
        head = workload.units[0].kind  # tied to the embedding
        input_bytes.append(workload.kind_by_name[head].input_bytes)
    inside, outside = input_bytes
    logits_bytes = 4 * SEQ_LEN * VOCAB_SIZE
    # The head's output, the cap's tanh, the log-probabilities; the capped logits are freed.
    assert 3 * logits_bytes <= outside - inside <= 4.1 * logits_bytes


def test_frozen_parameters_have_no_gradient_and_no_moments(llama: Path) -> None:
    folder = PretrainedFolder.open(str(llama))
    whole = describe_folder(folder, None)
    adapted = describe_folder(folder, Lora(rank=2, alpha=4.0, targets=("q_proj", "v_proj")))
    assert whole.state_bytes_per_element == 16
    part = adapted.trained_numel / adapted.numel
    assert 0 < part < 0.2
    assert adapted.state_bytes_per_element == pytest.approx(4 * (1 + 3 * part))
    assert min(kind.trained_numel for kind in adapted.kinds) == 0  # the embedding


def describe_folder(folder: PretrainedFolder, lora: Lora | None) -> Any:
    module = folder.on_meta(dtype=torch.float32, lora=lora)
    trained = LanguageModel(folder.objective).trained(
        module, vocab_size=VOCAB_SIZE, seq_len=SEQ_LEN
    )
    return describe(module, trained.batch, loss_fn=trained.loss_fn)


def mixtral_with(folder: Path, experts: str) -> HfConf:
    """Its experts are computed in one of transformers' ways."""
    path = make_folder(folder, "mixtral")
    config = json.loads((path / "config.json").read_text())
    config["experts_implementation"] = experts
    (path / "config.json").write_text(json.dumps(config))
    return HfConf(path=str(path))


def test_what_depends_on_values_is_refused_by_unit(tmp_path: Path) -> None:
    conf = mixtral_with(tmp_path, "eager")
    with pytest.raises(ConfigError, match=r"unit 'model.layers.0'.*plan=by_hand"):
        conf.to_workload(seq_len=SEQ_LEN, param_dtype="float32")


def test_experts_are_counted_in_whatever_way_they_are_computed(tmp_path: Path) -> None:
    grouped, batched = (
        mixtral_with(tmp_path, each)
        .to_workload(seq_len=SEQ_LEN, param_dtype="bfloat16")
        .kind_by_name["mixtral_decoder_layer"]
        for each in ("grouped_mm", "batched_mm")
    )
    assert grouped.forward_flops == batched.forward_flops
    assert grouped.backward_flops == batched.backward_flops


def test_a_torchvision_that_does_not_fit_torch_is_named(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Transformers says only that it cannot import a class of its own."""
    package = tmp_path / "torchvision"
    package.mkdir()
    fails = "raise RuntimeError('operator torchvision::nms does not exist')"
    (package / "__init__.py").write_text(fails)
    info = tmp_path / "torchvision-0.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torchvision\nVersion: 0.1\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "torchvision", raising=False)
    said = r"model.path: torchvision 0.1: it does not fit torch \S+ \(operator .*uninstall it"
    with pytest.raises(ConfigError, match=said):
        HfConf(path=str(llama)).folder()
    for name in [each for each in sys.modules if each.startswith("shardhet.hf")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(ImportError, match=r"torchvision 0.1: it does not fit torch"):
        import_module("shardhet.hf")


def test_what_cannot_be_is_said_before_any_rank_starts(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bare = make_folder(tmp_path, "gpt2")
    lora = "model.lora.rank=2"
    for path, overrides, words in (
        (tmp_path / "nowhere", (), "is not a folder"),
        (tmp_path, (), "has no config.json"),
        (bare, (), "model.weights: true but .* no safetensors"),
        (bare, ("model.weights=false", "data.seq_len=33"), "takes 1 to 32"),
        (make_folder(tmp_path, "bert"), ("model.weights=false",), "is not causal.*HetTr"),
        (llama, (lora,), r"model.lora: rank 2 and targets \[\]"),
        (llama, (lora, "model.lora.targets=[wq]"), "Choose among down_proj, gate_proj"),
    ):
        with pytest.raises(ConfigError, match=words):  # any of the two
            conf_of(path, *overrides).check_model_fits_data()
    monkeypatch.setattr("shardhet.config.models.find_spec", lambda _name: None)
    with pytest.raises(ConfigError, match=r"pip install 'shardhet\[hf\]'"):
        conf_of(llama)


def problem_of(path: str, lora: Lora | None = None) -> Problem:
    """Training the folder's model, in double precision."""
    folder = PretrainedFolder.open(path)
    called = LanguageModel(folder.objective)

    def make_module() -> nn.Module:
        has = folder.has_weights
        module = folder.in_memory(dtype=torch.float64, weights=has, seed=5, lora=lora)
        for each in module.modules():
            if isinstance(each, nn.Dropout):
                each.p = 0.0
        return module

    def make_batch(num_samples: int) -> Batch:
        tokens = torch.randint(VOCAB_SIZE, (num_samples, SEQ_LEN + 1))
        return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}

    def loss(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor | int]:
        if isinstance(model, HetFSDP):
            return called(model, tuple(batch.values()))
        tokens, targets = batch.values()
        return language_loss(model(**called.inputs(tokens)), called.predicted(targets))

    return Problem(
        make_module=make_module,
        make_batch=make_batch,
        loss=loss,
        options={"loss_fn": language_loss},
    )


@contextmanager
def double_norms() -> Iterator[None]:
    """Inside, transformers' norms, which compute in float32 whatever the dtype, do not."""
    cast = Tensor.to

    def to(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        args = tuple(torch.float64 if each is torch.float32 else each for each in args)
        return cast(tensor, *args, **kwargs)

    with patch.object(Tensor, "to", to), patch.object(Tensor, "float", Tensor.double):
        yield


@double_norms()
def train_beside_one_process(rank: int, path: str, lora: Lora | None = None) -> None:
    check_parity(rank, problem_of(path, lora), UNEVEN, Course.of(UNEVEN, num_steps=2))


@pytest.mark.parametrize("kind", only(["gpt2"], ["gpt2", "gemma2", "bert", "t5"]))
def test_every_plan_trains_it_as_one_process_does(kind: str, tmp_path: Path) -> None:
    path = make_folder(tmp_path, kind)
    run_ranks(train_beside_one_process, UNEVEN.world_size, str(path))


def test_adapters_are_trained_as_in_one_process(llama: Path) -> None:
    lora = Lora(rank=2, alpha=4.0, targets=("q_proj", "v_proj"))
    run_ranks(train_beside_one_process, UNEVEN.world_size, str(llama), lora)


def save_tokenizer(path: Path, text: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=["[MASK]", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.enable_truncation(3)  # as some folders have it
    backend.train([str(each) for each in text.iterdir()], trainer)
    backend.save(str(path / "tokenizer.json"))


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    for i in range(60):  # some of which are held out
        (folder / f"{i}.txt").write_text("the cat sat on the mat; \u00e9t\u00e9. " * 9)
    return folder


def test_text_is_cut_by_the_tokenizer_in_the_folder(tmp_path: Path, text: Path) -> None:
    path = make_folder(tmp_path, "gpt2")
    save_tokenizer(path, text)
    conf = conf_of(path, "model.weights=false", "data=text_dir", f"data.path={text}")
    make_files(conf, token_dir=tmp_path / "tokens")
    task = make_task(conf, global_batch_size=4, token_dir=tmp_path / "tokens")
    assert task.score_name == "bits per token"
    batch: Any = task.batches[0]
    assert (batch.tokens[:, 1:] == batch.targets[:, :-1]).all()
    plain = conf_of(path, "model.weights=false", "data.tokenizer=BYTES")
    assert not isinstance(plain.model, HfConf) or not plain.model.reads_with_own_tokenizer(
        plain.data  # type: ignore[arg-type]  # text
    )


def shardhet(folder: Path, *arguments: str) -> str:
    done = run([*SHARDHET, *arguments], folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.campaign  # measure, plan and train have their own tests
def test_a_folder_is_measured_planned_for_and_trained(
    llama: Path, text: Path, tmp_path: Path
) -> None:
    model = ("model=hf", f"model.path={llama}", f"data.seq_len={SEQ_LEN}")
    ranks = ("cluster.num_ranks=2", "cluster.device=CPU")
    quick = ("max_microbatch_size=2", "num_repeats=3", "time_limit_s=0.5")
    shardhet(tmp_path, "measure", *model, *ranks, *quick, "out=measured")
    workload = json.loads((tmp_path / "measured/workload.json").read_text(encoding="ascii"))
    assert [kind["name"] for kind in workload["kinds"]][1] == "llama_decoder_layer"
    planned = ("measured=measured", "global_batch_size=4", "out=plan.json")
    shardhet(tmp_path, "plan", *planned, "what_if_s=0")
    shown = shardhet(
        tmp_path,
        "train",
        *model,
        *ranks,
        "plan=file",
        "plan.path=plan.json",
        "plan.measured=measured",
        "data=text_dir",
        f"data.path={text}",
        "data.num_eval_samples=2",
        "num_steps=2",
        "run_dir=run",
    )
    assert "LlamaForCausalLM with " in shown
    assert "bits per byte" in shown
    lines = (tmp_path / "run/metrics.jsonl").read_text(encoding="utf-8").splitlines()
    assert json.loads(lines[0])["loss"] == pytest.approx(5.56, abs=0.2)  # ln 260


def test_what_is_measured_is_what_is_trained(llama: Path) -> None:
    conf = conf_of(llama)
    measured = model_to_measure(
        MeasureConf(
            out="unused",
            model=conf.model,
            data=conf.data,
            optim=conf.optim,
            cluster=conf.cluster,
        )
    )
    assert measured.loss_fn is language_loss
    assert measured.batch.tensors[0].shape[1] == SEQ_LEN
