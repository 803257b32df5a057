"""Folders of transformers are read by rows and written by units, bit for bit."""

import copy
import ctypes
import json
import os
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from shardhet import HetFSDP, Plan
from tests.worlds import TRANSFORMERS, preload, run_ranks, run_ranks_expecting_failure

transformers = pytest.importorskip("transformers", reason="needs the hf extra")
preload(*TRANSFORMERS)

FIRST_CASE_S = 110.0  # every rank imports transformers once, on a busy machine slowly
MIB = 2**20
M_MMAP_THRESHOLD = -3  # of mallopt(3)
PLAN = Plan.by_hand(
    microbatch_sizes=[2, 1, 0], num_microbatches=[2, 1, 0], state_shares=[0.5, 0.2, 0.3]
)
ONE = Plan.even(1, microbatch_size=2)
SMALL = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}


def _llama(**changes: Any) -> Any:
    config = transformers.LlamaConfig(**{**SMALL, **HEADS, **changes})
    return transformers.LlamaForCausalLM(config)


def _tied() -> Any:
    return _llama(tie_word_embeddings=True).bfloat16()


def _experts() -> Any:  # stacked on the way in, apart in the folder
    return transformers.MixtralForCausalLM(
        transformers.MixtralConfig(**SMALL, **HEADS, num_local_experts=4)
    )


def _t5() -> Any:
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            vocab_size=64,
            d_model=32,
            d_ff=64,
            d_kv=8,
            num_layers=2,
            num_heads=4,
            decoder_start_token_id=0,
        )
    )


def _bert() -> Any:
    return transformers.BertForMaskedLM(transformers.BertConfig(**SMALL, num_attention_heads=4))


def _gpt2() -> Any:
    config = transformers.GPT2Config(
        vocab_size=64, n_embd=32, n_layer=2, n_head=4, bos_token_id=1, eos_token_id=1
    )
    return transformers.GPT2LMHeadModel(config)


MODELS: dict[str, Callable[[], Any]] = {
    "llama": _llama,
    "tied": _tied,
    "experts": _experts,
    "t5": _t5,
    "bert": _bert,
    "gpt2": _gpt2,
}


def logits(model: Any, words: Tensor) -> Tensor:
    """Of a plain model."""
    decoded = {"decoder_input_ids": words} if model.config.is_encoder_decoder else {}
    with torch.no_grad():
        output: Tensor = model(words, **decoded).logits
    return output


def keys(folder: Path) -> list[str]:
    """All keys of a folder's files."""
    from safetensors import safe_open

    found: list[str] = []
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            found += file.keys()
    return sorted(found)


def there_and_back(rank: int, folder: str) -> None:
    """Read each folder by plan, compare, and save it again."""
    from shardhet.hf import load_pretrained, save_pretrained

    for name in MODELS:
        path = Path(folder) / name
        model = load_pretrained(path, PLAN)
        plain = getattr(transformers, type(model.module).__name__).from_pretrained(path)
        buffers = dict(model.module.named_buffers())
        for fqn, buffer in plain.named_buffers():
            assert torch.equal(buffers[fqn], buffer), f"{name}: {fqn}"
        words = torch.randint(4, 60, (2, 7))
        with model.unit_by_unit():
            assert torch.equal(logits(model.module, words), logits(plain, words)), name
        save_pretrained(model, Path(folder) / f"{name}-again", least_file_bytes=40_000)


def test_a_folder_is_read_and_written_bit_for_bit(tmp_path: Path) -> None:
    for name, make in MODELS.items():
        torch.manual_seed(1)
        make().save_pretrained(tmp_path / name, max_shard_size="60KB")
    run_ranks(there_and_back, PLAN.world_size, str(tmp_path), timeout_s=FIRST_CASE_S)
    words = torch.randint(4, 60, (2, 7))
    for name, make in MODELS.items():
        before = type(make()).from_pretrained(tmp_path / name)
        after = type(before).from_pretrained(tmp_path / f"{name}-again")
        assert before.dtype == after.dtype
        assert torch.equal(logits(before, words), logits(after, words)), name
        assert keys(tmp_path / name) == keys(tmp_path / f"{name}-again")
        index = tmp_path / f"{name}-again" / "model.safetensors.index.json"
        assert sorted(json.loads(index.read_text())["weight_map"]) == keys(tmp_path / name)
    assert not list(tmp_path.glob("*.unfinished"))


class Watch:
    """The most private and shared memory that this process held while it was open."""

    def __init__(self) -> None:
        self.peak_bytes = self.baseline_bytes = held_bytes()
        self._is_open = True
        self._thread = threading.Thread(target=self._look)

    def __enter__(self) -> "Watch":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_open = False
        self._thread.join()

    def _look(self) -> None:
        while self._is_open:
            self.peak_bytes = max(self.peak_bytes, held_bytes())
            time.sleep(0.002)

    @property
    def grown_bytes(self) -> int:
        return self.peak_bytes - self.baseline_bytes


def held_bytes() -> int:
    """Anonymous memory, and shared memory with each page shared out among those that map it.

    Not `Pss_Anon` (proc(5)): ranks are forks, whose share of their common pages grows without
    an allocation when another fork of the same server ends.
    """
    names = ("Anonymous:", "Pss_Shmem:")
    lines = Path("/proc/self/smaps_rollup").read_text(encoding="ascii").splitlines()
    found = [line.split() for line in lines if line.startswith(names)]
    assert len(found) == len(names)
    return sum(int(words[1]) for words in found) * 1024


def load_under_watch(rank: int, folder: str) -> tuple[int, int, int]:
    """Growth of memory, this rank's rows, and the largest unit, in bytes."""
    from shardhet.hf import load_pretrained, save_pretrained

    # Else glibc learns to keep freed blocks of a unit's size: up to 75 MiB that nobody holds.
    assert ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 128 * 1024)
    with Watch() as watch:
        model = load_pretrained(folder, PLAN)
        save_pretrained(model, f"{folder}-again")
    rows = sum(p.numel() * p.element_size() for p in model.parameters())
    return watch.grown_bytes, rows, max(unit.numel for unit in model.plan.units) * 4


@pytest.mark.alone  # shared pages are shared out among all processes that map them
@pytest.mark.skipif(not os.path.exists("/proc/self/smaps_rollup"), reason="needs Linux")  # noqa: PTH110
def test_no_rank_holds_more_than_its_rows_and_two_units(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    _llama(hidden_size=512, intermediate_size=2048, num_hidden_layers=12).save_pretrained(
        folder, max_shard_size="20MB"
    )
    found = run_ranks(
        load_under_watch, 3, str(folder), timeout_s=FIRST_CASE_S, fresh_world=True
    )
    total = sum(rows for _, rows, _ in found)
    for grown, rows, unit in found:
        assert grown <= rows + 2 * unit + 40 * MIB
    assert total > 160 * MIB


def test_the_folder_appears_when_it_is_complete(tmp_path: Path) -> None:
    from shardhet.hf import save_pretrained
    from shardhet.hf.folders import saving

    plain = _llama()
    model = HetFSDP(copy.deepcopy(plain), ONE)
    folder = tmp_path / "model"
    save_pretrained(model, folder)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}

    def fail(*_: Any, **__: Any) -> None:
        raise OSError("no space left on device")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saving.WeightFiles, "add", fail)
        with pytest.raises(OSError, match="no space left"):
            save_pretrained(model, folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def fail_to_write(rank: int, folder: str) -> None:
    from shardhet.hf import save_pretrained

    save_pretrained(HetFSDP(_llama(), PLAN), folder)


def test_a_folder_that_cannot_be_written_ends_all_ranks(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file")
    outcomes = run_ranks_expecting_failure(
        fail_to_write, 3, str(tmp_path / "taken"), within_s=FIRST_CASE_S
    )
    assert all("is a file" in outcome.message for outcome in outcomes)


def test_the_module_inside_does_not_save_its_rows(tmp_path: Path) -> None:
    model = HetFSDP(_llama(), ONE)
    module: Any = model.module
    for part in (module, module.model):
        with pytest.raises(RuntimeError, match=r"save_pretrained\(model, path\)"):
            part.save_pretrained(tmp_path)
    assert not list(tmp_path.iterdir())


def test_what_a_folder_lacks_is_initialised_and_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from shardhet.hf import load_pretrained

    plain = _bert()
    plain.save_pretrained(tmp_path)
    made = []
    for seed in (0, 0, 1):
        caplog.clear()
        model = load_pretrained(
            tmp_path,
            ONE,
            model_class=transformers.AutoModelForSequenceClassification,
            seed=seed,
        )
        assert "lacks" in caplog.text
        assert "classifier.weight" in caplog.text
        assert "cls.predictions.transform.dense.weight not used" in caplog.text
        made.append(model.state_dict())
    assert torch.equal(made[0]["classifier.weight"], made[1]["classifier.weight"])
    assert not torch.equal(made[0]["classifier.weight"], made[2]["classifier.weight"])
    name = "bert.encoder.layer.0.output.dense.weight"
    assert torch.equal(made[0][name], plain.state_dict()[name])


def test_what_cannot_be_read_by_rows_is_refused(tmp_path: Path) -> None:
    from shardhet.hf import load_pretrained

    with pytest.raises(ValueError, match="snapshot_download"):
        load_pretrained(tmp_path / "absent", ONE)
    _llama().save_pretrained(tmp_path)
    larger, tied = _llama(vocab_size=65).config, _llama(tie_word_embeddings=True).config
    with pytest.raises(ValueError, match="has shape"):
        load_pretrained(tmp_path, ONE, config=larger)
    with pytest.raises(ValueError, match="differ in the folder"):
        load_pretrained(tmp_path, ONE, config=tied)
    with pytest.raises(ValueError, match="values would be lost"):
        load_pretrained(tmp_path, ONE, adapt=lambda model: model.get_input_embeddings())


@pytest.mark.parametrize(
    "tensors, words",
    [
        ({"lm_head.weight": None}, "'lm_head.weight'.* not in the file"),
        (
            {"model.embed_tokens.weight": torch.ones(64, 32)},
            "'model.embed_tokens.weight'.* or in two files",
        ),
        ({"lm_head.weight": torch.ones(64, 31)}, "lm_head.weight has shape"),
        ({"lm_head.weight": torch.ones(64, 32, dtype=torch.int8)}, "is torch.int8 but"),
    ],
)
def test_a_folder_that_does_not_hold_what_its_index_lists_is_refused(
    tensors: dict[str, Tensor | None], words: str, tmp_path: Path
) -> None:
    """As ranks leave it that write with torch's HuggingFaceStorageWriter (2.13)."""
    from safetensors.torch import load_file, save_file

    from shardhet.hf import load_pretrained

    _llama().save_pretrained(tmp_path, max_shard_size="40KB")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    path = tmp_path / index["lm_head.weight"]
    assert index["model.embed_tokens.weight"] != path.name
    changed = {**load_file(path), **tensors}
    save_file({key: t for key, t in changed.items() if t is not None}, path, {"format": "pt"})
    with pytest.raises(ValueError, match=words):
        load_pretrained(tmp_path, ONE)


def write_of_two(folder: Path, tensor: Tensor) -> None:
    from shardhet.hf.folders.saving import WeightFiles

    listed = {"a": torch.ones(2, 3), "b": torch.ones(1)}
    files = WeightFiles(folder, listed, least_file_bytes=MIB)
    files.add({"a": tensor})
    files.close(7)


@pytest.mark.parametrize(
    "tensor, words",
    [(torch.ones(2, 3), "'b'.* never written"), (torch.ones(3, 2), r"a: .* but .*\(2, 3\) is")],
)
def test_what_is_written_is_what_was_expected(
    tensor: Tensor, words: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=words):
        write_of_two(tmp_path, tensor)


def adapt_and_save(rank: int, folder: str) -> None:
    """LoRA on a folder that is read by rows; the adapter is saved alone."""
    from peft import LoraConfig, PeftModel, get_peft_model

    from shardhet.hf import load_pretrained, save_pretrained

    warnings.simplefilter("ignore", FutureWarning)  # PEFT asks transformers by an old name
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    model = load_pretrained(
        Path(folder) / "base", PLAN, adapt=lambda plain: get_peft_model(plain, config)
    )
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)
    words = torch.randint(4, 60, (5, 9), generator=torch.Generator().manual_seed(0))
    first = PLAN.first_sample(model.position)
    part = words[first : first + PLAN.ranks[model.position].rank_batch_size]
    for _ in range(2):
        output = model(input_ids=part, use_cache=False)
        is_computing = bool(len(part))
        loss = output.logits.square().sum() if is_computing else torch.zeros(())
        model.backward(loss, len(part))
        optimizer.step()
        optimizer.zero_grad()
    save_pretrained(model, Path(folder) / "adapter")
    base = transformers.LlamaForCausalLM.from_pretrained(Path(folder) / "base")
    before = logits(base, words)
    plain = PeftModel.from_pretrained(base, Path(folder) / "adapter").eval()
    model.eval()
    with model.unit_by_unit():
        module: Any = model.module
        found = module(words).logits
    assert torch.equal(found, logits(plain, words))
    assert not torch.allclose(found, before)
    assert sorted(p.name for p in (Path(folder) / "adapter").glob("*.*")) == [
        "README.md",
        "adapter_config.json",
        "adapter_model.safetensors",
    ]


def test_an_adapter_opens_with_peft(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    torch.manual_seed(1)
    _llama().save_pretrained(tmp_path / "base")
    run_ranks(adapt_and_save, 3, str(tmp_path), timeout_s=FIRST_CASE_S)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # PEFT asks transformers by an old name
def test_embeddings_of_another_size_than_the_base_models_are_saved_with_an_adapter(
    tmp_path: Path,
) -> None:
    peft = pytest.importorskip("peft")
    from shardhet.hf import save_pretrained

    torch.manual_seed(1)
    _llama().save_pretrained(tmp_path / "base")

    def resized() -> Any:
        plain: Any = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "base")
        plain.resize_token_embeddings(plain.config.vocab_size + 3)
        return plain

    config = peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(resized(), config).eval()
    words = torch.arange(4, adapted.config.vocab_size)[None]
    expected = logits(adapted, words)
    save_pretrained(HetFSDP(adapted, ONE), tmp_path / "adapter")
    again = peft.PeftModel.from_pretrained(resized(), tmp_path / "adapter").eval()
    assert torch.equal(logits(again, words), expected)


SAVED_WITH: dict[str, Any] = {
    "embeddings": {"modules_to_save": ["embed_tokens"]},
    "embeddings and head": {"modules_to_save": ["embed_tokens", "lm_head"]},
    "tied": {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
    "adapted embeddings": {"target_modules": ["q_proj", "embed_tokens"]},
    "tokens": {"trainable_token_indices": {"embed_tokens": [1, 5]}},
}


def save_with_embeddings(rank: int, folder: str, name: str) -> None:
    import peft

    from shardhet.hf import save_pretrained

    warnings.simplefilter("ignore")
    torch.manual_seed(1)
    model = _llama(tie_word_embeddings=name == "tied")
    config = peft.LoraConfig(**{"r": 2, "target_modules": ["q_proj"], **SAVED_WITH[name]})
    adapted = peft.get_peft_model(model, config)
    plain, found = Path(folder) / "plain", Path(folder) / "found"
    if rank == 0:
        adapted.save_pretrained(plain)
    save_pretrained(HetFSDP(adapted, Plan.by_hand(microbatch_sizes=[2, 1])), found)
    if rank == 0:
        assert {each.name for each in found.iterdir()} == {
            each.name for each in plain.iterdir()
        }
        states = [load_file(each / "adapter_model.safetensors") for each in (found, plain)]
        assert states[0].keys() == states[1].keys()
        assert all(torch.equal(states[0][key], value) for key, value in states[1].items())


@pytest.mark.parametrize("name", SAVED_WITH)
def test_embeddings_are_saved_with_adapters_as_peft_saves_them(
    name: str, tmp_path: Path
) -> None:
    pytest.importorskip("peft")
    run_ranks(save_with_embeddings, 2, str(tmp_path), name, timeout_s=FIRST_CASE_S)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # PEFT asks transformers by an old name
@pytest.mark.parametrize("kind", ["PromptTuningConfig", "PromptEncoderConfig"])
def test_a_prompt_opens_with_peft(kind: str, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    from shardhet.hf import save_pretrained

    torch.manual_seed(1)
    plain = _llama().eval()
    base = copy.deepcopy(plain)
    config = getattr(peft, kind)(num_virtual_tokens=4, task_type="CAUSAL_LM")
    adapted = peft.get_peft_model(plain, config).eval()
    words = torch.randint(4, 60, (2, 9))
    expected = logits(adapted, words)
    save_pretrained(HetFSDP(adapted, ONE), tmp_path)
    assert torch.equal(logits(peft.PeftModel.from_pretrained(base, tmp_path), words), expected)
