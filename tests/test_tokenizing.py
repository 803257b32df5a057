"""Byte-pair encoding loses nothing, learns from the training part alone, and is checked."""

from pathlib import Path

import numpy as np
import pytest

from shardhet.training.data import Corpus, TokenBatch, held_out_windows
from shardhet.training.tokenizing import BpeTokenizer, ByteTokenizer, TokenFile, as_bytes

pytest.importorskip("tokenizers", reason="needs the package tokenizers, of the extra bpe")

VOCAB_SIZE = 300
WORDS = (
    b"def ",
    b"return ",
    b"self",
    b"import ",
    b"\xc3\xa9t\xc3\xa9 ",
    b"  \n\t",
    b"x = 12\n",
)


def text(num_documents: int, seed: int) -> np.ndarray:
    generator = np.random.Generator(np.random.Philox(key=seed))
    documents = (
        b"".join(WORDS[i] for i in generator.integers(0, len(WORDS), 50))
        for _ in range(num_documents)
    )
    return np.frombuffer(b"".join(d + b"\0" for d in documents), dtype=np.uint8)


def corpus() -> Corpus:
    return Corpus(train=text(40, seed=1), held_out=text(8, seed=2))


@pytest.fixture(scope="module")
def tokenizer() -> BpeTokenizer:
    return BpeTokenizer.learn(corpus().train, vocab_size=VOCAB_SIZE)


def test_every_sequence_of_bytes_comes_back(tokenizer: BpeTokenizer) -> None:
    generator = np.random.Generator(np.random.Philox(key=5))
    for raw in (bytes(range(256)), generator.bytes(5000), corpus().held_out.tobytes(), b""):
        assert tokenizer.decode(tokenizer.encode(raw)) == raw


def test_it_makes_text_shorter_within_its_vocabulary(tokenizer: BpeTokenizer) -> None:
    train = corpus().train
    tokens = tokenizer.encode_all(train)
    assert tokens.dtype == np.uint16
    assert tokens.max() < VOCAB_SIZE
    assert len(tokens) < train.size / 2
    assert tokenizer.decode(tokens.tolist()) == train.tobytes()


def test_no_token_reaches_over_the_end_of_a_document(tokenizer: BpeTokenizer) -> None:
    assert not any(b"\0" in each[:-1] for each in tokenizer.bytes_by_token)


def test_tokens_that_were_never_learned_have_no_bytes() -> None:
    short = BpeTokenizer.learn(np.frombuffer(b"ab", dtype=np.uint8), vocab_size=VOCAB_SIZE)
    assert short.decode([97, VOCAB_SIZE - 1, 98]) == b"ab"


def test_a_vocabulary_of_bytes_is_refused() -> None:
    with pytest.raises(ValueError, match="vocab_size: 256 but it must be above 256"):
        BpeTokenizer.learn(corpus().train, vocab_size=256)


def test_tokens_are_made_once_and_mapped(tmp_path: Path) -> None:
    first = TokenFile.load(tmp_path / "bpe", corpus(), vocab_size=VOCAB_SIZE)
    made_at = (tmp_path / "bpe" / "train.npy").stat().st_mtime_ns
    again = TokenFile.load(tmp_path / "bpe", corpus(), vocab_size=VOCAB_SIZE)
    assert isinstance(again.corpus.train, np.memmap)
    assert again.corpus.digest == first.corpus.digest
    assert again.tokenizer.digest == first.tokenizer.digest
    assert (tmp_path / "bpe" / "train.npy").stat().st_mtime_ns == made_at
    assert [path.name for path in tmp_path.iterdir()] == ["bpe"]


def test_the_held_out_part_is_not_learned_from(tmp_path: Path) -> None:
    other = Corpus(train=corpus().train, held_out=text(8, seed=3))
    one = TokenFile.load(tmp_path / "one", corpus(), vocab_size=VOCAB_SIZE)
    two = TokenFile.load(tmp_path / "two", other, vocab_size=VOCAB_SIZE)
    assert one.tokenizer.digest == two.tokenizer.digest


def test_files_that_were_changed_or_are_of_another_text_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "bpe"
    TokenFile.load(folder, corpus(), vocab_size=VOCAB_SIZE)
    other = Corpus(train=text(40, seed=9), held_out=corpus().held_out)
    with pytest.raises(ValueError, match="its text digest are not those of this run"):
        TokenFile.load(folder, other, vocab_size=VOCAB_SIZE)
    with pytest.raises(ValueError, match="its vocab_size are not"):
        TokenFile.load(folder, corpus(), vocab_size=VOCAB_SIZE + 1)
    tokens = np.load(folder / "train.npy")
    tokens[3] ^= 1
    np.save(folder / "train.npy", tokens)
    with pytest.raises(ValueError, match="its token digest are not"):
        TokenFile.load(folder, corpus(), vocab_size=VOCAB_SIZE)


def test_bytes_of_what_is_judged_are_counted_exactly(tokenizer: BpeTokenizer) -> None:
    found = corpus()
    tokens = Corpus(
        train=tokenizer.encode_all(found.train), held_out=tokenizer.encode_all(found.held_out)
    )
    judged = held_out_windows(tokens, seq_len=8, num_samples=5)
    in_bytes = as_bytes(judged, tokenizer)
    wanted = b"".join(tokenizer.decode(row) for row in judged.targets.tolist())
    assert bytes(in_bytes.targets[0].tolist()) == wanted
    assert in_bytes.num_targets == len(wanted)
    # The byte before each target is the one that precedes it in the text.
    for row, window in zip(judged.tokens.tolist(), judged.targets.tolist(), strict=True):
        whole = tokenizer.decode([*row[:1], *window])
        length = len(tokenizer.decode(window))
        pairs = set(zip(whole[-length - 1 : -1], whole[-length:], strict=True))
        assert pairs <= set(zip(in_bytes.tokens[0], in_bytes.targets[0], strict=True))


def test_bytes_as_tokens_are_themselves() -> None:
    batch = TokenBatch(tokens=np.array([[1, 2, 3]]), targets=np.array([[2, 3, 4]]))
    in_bytes = as_bytes(batch, ByteTokenizer())
    assert in_bytes.tokens.tolist() == [[1, 2, 3]]
    assert in_bytes.targets.tolist() == [[2, 3, 4]]
