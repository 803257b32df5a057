"""The corpus, the batches drawn from it, and how a plan deals them out."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardhet.training.data import (
    Corpus,
    GlobalBatches,
    TextDir,
    TokenBatch,
    held_out_windows,
    is_held_out,
)

GLOBAL_BATCH_SIZE = 12


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return TextDir.of_standard_library().read()


def sources_in(root: Path) -> TextDir:
    return replace(TextDir.of_standard_library(), root=root)


def toy_corpus(num_bytes: int = 1000) -> Corpus:
    text = np.random.Generator(np.random.Philox(key=7)).integers(0, 256, num_bytes, np.uint8)
    return Corpus(train=text, held_out=text[::-1].copy())


def toy_batches(*, seed: int = 0) -> GlobalBatches:
    return GlobalBatches(
        corpus=toy_corpus(), seq_len=16, global_batch_size=GLOBAL_BATCH_SIZE, seed=seed
    )


def assert_equal(one: TokenBatch, other: TokenBatch) -> None:
    np.testing.assert_array_equal(one.tokens, other.tokens)
    np.testing.assert_array_equal(one.targets, other.targets)


def test_the_standard_library_is_enough_text(corpus: Corpus) -> None:
    assert corpus.train.size > 5_000_000
    assert 0.01 < corpus.held_out.size / corpus.train.size < 0.15


def test_two_loads_give_the_same_bytes(corpus: Corpus) -> None:
    assert TextDir.of_standard_library().read().digest == corpus.digest


def test_digest_tells_where_the_held_out_part_begins() -> None:
    text = np.arange(10, dtype=np.uint8)
    digests = {Corpus(train=text[:n], held_out=text[n:]).digest for n in range(1, 10)}
    assert len(digests) == 9


def test_no_held_out_file_is_trained_on(tmp_path: Path) -> None:
    names = [f"package_{i % 7}/module_{i}.py" for i in range(200)]
    for name in names:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"<{name}>")
    corpus = sources_in(tmp_path).read()
    documents = {
        part: set(getattr(corpus, part).tobytes().decode().split("\0")) - {""}
        for part in ("train", "held_out")
    }
    assert documents["held_out"] == {f"<{name}>" for name in names if is_held_out(name)}
    assert documents["train"] == {f"<{name}>" for name in names if not is_held_out(name)}
    assert documents["held_out"]


def test_tests_and_installed_packages_are_left_out(tmp_path: Path) -> None:
    for name in ("a.py", "test/b.py", "c/tests/d.py", "site-packages/e.py", "f/g.py", "h.txt"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x")
    assert [name for name, _ in sources_in(tmp_path)._files_below(tmp_path)] == [
        "a.py",
        "f/g.py",
    ]


def test_a_folder_without_sources_is_refused_with_its_name(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="0 bytes to train on and 0 held out"):
        sources_in(tmp_path).read()


def test_a_folder_of_text_is_mapped_from_token_files(tmp_path: Path) -> None:
    root, cache_dir = tmp_path / "text", tmp_path / "tokens"
    root.mkdir()
    for i in range(100):
        (root / f"page_{i}.md").write_text(f"page {i}\n")
    (root / "page_1.txt").write_text("not asked for")
    first = TextDir(root=root, pattern="*.md").load(cache_dir)
    assert isinstance(first.train, np.memmap)
    assert first.train.size + first.held_out.size == 100 * 8 - 10 + 100
    (root / "page_0.md").write_text("changed")
    assert TextDir(root=root, pattern="*.md").load(cache_dir).digest == first.digest
    assert TextDir(root=root, pattern="*.txt").load(cache_dir).train.size < 20  # not the same


LINES = [f"line {i}\n" for i in range(40)]
TALK = {"instruction": "Add.", "input": "1 1", "output": "2"}


@pytest.mark.parametrize(
    ("options", "name", "content", "held_out"),
    [
        ({}, "a.txt", "".join(LINES), "line 38\nline 39\n"),
        ({"held_out_share": 0.5}, "a.txt", "".join(LINES[:10]), "".join(LINES[5:10])),
        ({"held_out_share": 0.0}, "a.txt", "".join(LINES), ""),
        ({}, "a.txt", "x" * 40, "xx"),  # one long line
        ({"held_out": "b.txt"}, "a.txt", "".join(LINES), "of its own"),
        ({}, "a.jsonl", "".join(f'{{"text": "n{i}"}}\n' for i in range(30)), "n29"),
        ({"field": "body"}, "a.jsonl", '{"body": "one"}\n\n{"body": "two"}', "two"),
        ({"chat": str}, "a.jsonl", '{"messages": [1]}\n{"messages": [2]}', "[2]"),
        ({}, "a.jsonl", '{"messages": []}', ValueError("a.jsonl:1: a conversation, but")),
        ({}, "a.jsonl", '\n{"txt": 1}', ValueError(r"a.jsonl:2: an object with \['txt'\] but")),
        ({}, "a.jsonl", '{"text', ValueError("a.jsonl:1: Unterminated string")),
    ],
)
def test_one_file_is_enough_text(
    options: dict[str, Any], name: str, content: str, held_out: Any, tmp_path: Path
) -> None:
    """Each byte is trained on or held out, in its order; lines and documents stay whole."""
    (tmp_path / name).write_text(content)
    (tmp_path / "b.txt").write_text("of its own")
    if "held_out" in options:
        options = {"held_out": tmp_path / options["held_out"]}
    source = TextDir(root=tmp_path / name, **options)
    if isinstance(held_out, ValueError):
        with pytest.raises(ValueError, match=str(held_out)):
            source.load(tmp_path / "tokens")
        return
    corpus = source.load(tmp_path / "tokens")
    train, judged = (each.tobytes().decode() for each in (corpus.train, corpus.held_out))
    assert judged == held_out + "\0" * bool(held_out)
    if name == "a.txt" and "held_out" not in options:
        assert train.rstrip("\0") + judged.rstrip("\0") == content
    assert not any(f"{mark}\0" in train for mark in ("line", "\0", "{"))


def test_conversations_are_written_by_the_template(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(f"{json.dumps(TALK)}\n" * 2)
    corpus = TextDir(root=tmp_path / "a.jsonl", chat=str).load(tmp_path / "tokens")
    talk = [
        {"role": "user", "content": "Add.\n\n1 1"},
        {"role": "assistant", "content": "2"},
    ]
    assert corpus.train.tobytes().decode() == corpus.held_out.tobytes().decode() == f"{talk}\0"


def test_a_pattern_that_leaves_nothing_is_refused_with_it(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(ValueError, match=r"0 files fit '\*\.md'"):
        TextDir(root=tmp_path, pattern="*.md").load(tmp_path / "tokens")


def test_targets_are_the_tokens_moved_by_one() -> None:
    batch = toy_batches()[3]
    assert batch.tokens.shape == batch.targets.shape == (GLOBAL_BATCH_SIZE, 16)
    np.testing.assert_array_equal(batch.tokens[:, 1:], batch.targets[:, :-1])


def test_a_batch_depends_on_seed_and_step_alone() -> None:
    assert_equal(toy_batches()[5], toy_batches()[5])
    different = [toy_batches()[5], toy_batches()[6], toy_batches(seed=1)[5]]
    assert len({batch.tokens.tobytes() for batch in different}) == 3


def test_samples_of_a_step_are_those_of_every_numpy_release() -> None:
    corpus = Corpus(train=np.arange(200, dtype=np.uint8), held_out=np.zeros(9, np.uint8))
    batches = GlobalBatches(corpus=corpus, seq_len=4, global_batch_size=4, seed=1)
    assert batches[0].tokens[:, 0].tolist() == [3, 115, 38, 154]


@given(num_bytes=st.integers(9, 40), step=st.integers(0, 10**6))
def test_every_window_fits_into_a_short_text(num_bytes: int, step: int) -> None:
    batches = GlobalBatches(corpus=toy_corpus(num_bytes), seq_len=8, global_batch_size=3)
    assert batches[step].targets.shape == (3, 8)


def test_a_text_shorter_than_a_window_is_refused() -> None:
    with pytest.raises(ValueError, match="8 tokens but one window needs 9"):
        GlobalBatches(corpus=toy_corpus(8), seq_len=8, global_batch_size=3)


def test_held_out_windows_reach_from_the_first_byte_to_the_last() -> None:
    corpus = toy_corpus()
    batch = held_out_windows(corpus, seq_len=9, num_samples=20)
    np.testing.assert_array_equal(batch.tokens[0], corpus.held_out[:9])
    np.testing.assert_array_equal(batch.targets[-1], corpus.held_out[-9:])
    assert_equal(batch, held_out_windows(corpus, seq_len=9, num_samples=20))
