"""Tokens of a model's own tokenizer are made once, and checked when they are read again."""

from functools import partial
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from shardhet.training.data import Corpus, ModelTokenizer, mapped

pytest.importorskip("tokenizers", reason="needs the package tokenizers, of the extra hf")


def text(num_documents: int, seed: int) -> np.ndarray:
    generator = np.random.Generator(np.random.Philox(key=seed))
    documents = (b" ".join(b"ab"[i : i + 1] for i in generator.integers(0, 2, 50)) + b"\0"
                 for _ in range(num_documents))  # fmt: skip
    return np.frombuffer(b"".join(documents), dtype=np.uint8)


def corpus() -> Corpus:
    return Corpus(train=text(40, seed=1), held_out=text(8, seed=2))


@pytest.fixture
def tokenizer() -> ModelTokenizer:
    from tokenizers import Tokenizer, models, pre_tokenizers

    backend = Tokenizer(models.WordLevel({"a": 0, "b": 1, "</s>": 2}, unk_token="a"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return ModelTokenizer(backend.to_str(), end=2)


def test_every_document_ends_with_the_end_token(tokenizer: ModelTokenizer) -> None:
    tokens = tokenizer.encode_all(corpus().train)
    assert tokens.dtype == np.uint8
    assert len(tokens) == 40 * 51
    assert (tokens[50::51] == 2).all()


def test_tokens_are_made_once_and_mapped(tmp_path: Path, tokenizer: ModelTokenizer) -> None:
    make = mock.Mock(side_effect=partial(tokenizer.tokens_of, corpus()))
    first, again = (mapped(tmp_path / "own", make) for _ in range(2))
    assert make.call_count == 1
    assert isinstance(again.train, np.memmap)
    assert again.digest == first.digest == tokenizer.tokens_of(corpus()).digest
    assert [path.name for path in tmp_path.iterdir()] == ["own"]


def test_files_that_were_changed_are_refused(tmp_path: Path, tokenizer: ModelTokenizer) -> None:
    make = partial(tokenizer.tokens_of, corpus())
    tokens = np.array(mapped(tmp_path / "own", make).train)
    tokens[3] ^= 1
    np.save(tmp_path / "own" / "train.npy", tokens)
    with pytest.raises(ValueError, match="own: its files have been changed since"):
        mapped(tmp_path / "own", make)
