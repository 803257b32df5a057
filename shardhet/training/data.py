"""Training text that every machine has, cut into the same global batches under every plan.

The default corpus is the running interpreter's standard library: about 9 MB of source text
that needs no download, no tokenizer and no licence but Python's own.  If a token is a byte, a
loss in nats per token divided by ln 2 is bits per byte.

A global batch is a pure function of (corpus, seed, step).  A plan only says which of its
samples a rank takes.  So two runs under different plans, or one run that changes its plan
between two steps, see the same samples in the same order:

    global batch    | s0 s1 s2 s3 s4 | s5 s6 | s7 |
    plan position          0             1      3       (position 2 computes nothing)
"""

import hashlib
import json
import os
import shutil
import sysconfig
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from shardhet.records.layout import Span

DIGEST_LENGTH_IN_NAMES = 12  # hexadecimal digits
SEPARATOR = 0  # the byte between two documents; no source file contains it

# Skipped, because it is not source written to be read: installed packages, test suites, and
# generated files (character tables; pydoc's topics, a file as long as all held-out ones).
SKIPPED_FOLDERS = frozenset(
    {"site-packages", "dist-packages", "__pycache__"}
    | {"idle_test", "test", "tests"}
    | {"encodings", "pydoc_data"}
)
HELD_OUT_PERCENT = 5
FEW_FILES = 100 // HELD_OUT_PERCENT  # below, a hash of the path may hold out none or most
JSON_LINES = (".jsonl", ".ndjson")
SEPARATOR_BYTE = bytes([SEPARATOR])

Chat = Callable[[list[Any]], str]  # the messages of a conversation as text


@dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    """Training text and held-out text, as bytes or larger tokens."""

    train: npt.NDArray[Any]  # [tokens], unsigned integers
    held_out: npt.NDArray[Any]

    @property
    def digest(self) -> str:
        """A hash that is equal on two machines exactly if their corpora are equal."""
        digest = hashlib.sha256()
        for part in (self.train, self.held_out):
            digest.update(part.size.to_bytes(8, "little"))
            digest.update(part.tobytes())
        return digest.hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class TextDir:
    """A file, or all files below ``root`` that match ``pattern``; see ``_documents_in``.

    Held out are files, by a hash of their path; or the last part of each, of at least
    ``held_out_share``: by default where there are too few files.  Or ``held_out`` is another
    file or folder.
    """

    root: Path
    pattern: str = "*.txt"
    held_out: Path | None = None
    held_out_share: float | None = None
    field: str = "text"  # of JSON lines
    chat: Chat | None = None
    skipped: frozenset[str] = frozenset()  # names of folders

    @classmethod
    def of_standard_library(cls) -> Self:
        """The sources of Python's own, which differ between releases in their text."""
        root = Path(sysconfig.get_paths()["stdlib"])
        return cls(root=root, pattern="*.py", skipped=SKIPPED_FOLDERS)

    def load(self, cache_dir: Path) -> Corpus:
        """The corpus, mapped from files in ``cache_dir``; made there if they are absent."""
        places = [each and str(each.absolute()) for each in (self.root, self.held_out)]
        named = f"{places} {self.pattern} {self.held_out_share} {self.field}"
        name = hashlib.sha256(named.encode()).hexdigest()[:DIGEST_LENGTH_IN_NAMES]
        return mapped(cache_dir / name, self.read)

    def read(self) -> Corpus:
        """The corpus, in memory."""
        found = [
            (name, self._documents_in(path)) for name, path in self._files_below(self.root)
        ]
        parts: list[tuple[bytes | None, bytes | None]]
        share = HELD_OUT_PERCENT / 100 if self.held_out_share is None else self.held_out_share
        if self.held_out is not None:
            judged = self._files_below(self.held_out)
            parts = [(text, None) for _, text in found]
            parts += [(None, self._documents_in(path)) for _, path in judged]
        elif (
            self.held_out_share is None
            and len(found) >= FEW_FILES
            and any(is_held_out(name) for name, _ in found)
        ):
            parts = [
                (None, text) if is_held_out(name) else (text, None) for name, text in found
            ]
        else:
            halves = [_cut(text, share) for _, text in found]
            parts = [(train or None, judged or None) for train, judged in halves]
        train, held_out = (
            b"".join(text + SEPARATOR_BYTE for each in parts if (text := each[i]) is not None)
            for i in range(2)
        )
        if not train or not (held_out or share == 0):
            raise ValueError(
                f"{self.root}: {len(found)} files fit {self.pattern!r}, with {len(train)} "
                f"bytes to train on and {len(held_out)} held out, but both are needed. Name "
                "another folder or pattern, or set data.held_out."
            )
        return Corpus(
            train=np.frombuffer(train, dtype=np.uint8),
            held_out=np.frombuffer(held_out, dtype=np.uint8),
        )

    def _files_below(self, root: Path) -> list[tuple[str, Path]]:
        """(path relative to ``root`` with forward slashes, path), sorted by the former."""
        if root.is_file():
            return [(root.name, root)]
        paths: list[Path] = []
        for folder, subfolders, names in os.walk(root):
            subfolders[:] = set(subfolders) - self.skipped  # these are not even looked into
            paths += [Path(folder, name) for name in names]
        found = [each for each in paths if each.match(self.pattern) and each.is_file()]
        return sorted((each.relative_to(root).as_posix(), each) for each in found)

    def _documents_in(self, path: Path) -> bytes:
        """The text of a file; of JSON lines, that of each line, with separators between."""
        if path.suffix not in JSON_LINES:
            return path.read_bytes()
        documents = []
        for number, line in enumerate(path.read_bytes().splitlines(), start=1):
            if line.strip():
                try:
                    text = self._text_of(json.loads(line))
                except ValueError as error:
                    raise ValueError(f"{path}:{number}: {error}") from None
                documents.append(text.replace(chr(SEPARATOR), "").encode())
        return SEPARATOR_BYTE.join(documents)

    def _text_of(self, row: Any) -> str:
        """The text of one line: a field, or a conversation as the model's template has it."""
        fields = row if isinstance(row, dict) else {}
        if isinstance(fields.get(self.field), str):
            return str(fields[self.field])
        messages = fields.get("messages")
        for question, answer in (("instruction", "output"), ("prompt", "completion")):
            if question in fields and answer in fields:
                asked = "\n\n".join(filter(None, (fields[question], fields.get("input"))))
                messages = [{"role": "user", "content": asked}]
                messages += [{"role": "assistant", "content": fields[answer]}]
        if not isinstance(messages, list):
            raise ValueError(
                f"an object with {sorted(fields) or 'no fields'} but {self.field!r} is needed, "
                "or messages, or instruction and output. Set data.field=NAME of the text."
            )
        if self.chat is None:
            raise ValueError(
                "a conversation, but nothing says how it is written as text. Choose model=hf "
                "with a folder whose tokenizer has a chat template."
            )
        return self.chat(messages)


def _cut(text: bytes, share: float) -> tuple[bytes, bytes]:
    """``text`` and the last part of it, of whole documents; of one document, of whole lines."""
    at = round(len(text) * (1 - share))
    mark = SEPARATOR_BYTE if SEPARATOR_BYTE in text else b"\n"
    if share:
        after = text.find(mark, max(0, at - 1), -1) + 1
        if not after and mark == SEPARATOR_BYTE:
            after = text.rfind(mark, 0, at) + 1
        at = after or at
    return text[:at].rstrip(SEPARATOR_BYTE), text[at:]


def is_held_out(name: str) -> bool:
    """Whether the file is kept from training; depends on its relative path alone."""
    first_bytes = hashlib.sha256(name.encode()).digest()[:8]
    return int.from_bytes(first_bytes, "little") % 100 < HELD_OUT_PERCENT


def mapped(folder: Path, make: Callable[[], Corpus]) -> Corpus:
    """What ``make`` returns, from files in ``folder``, which is made once by whoever is first.

    Raises ``ValueError`` if the files are not those that were written.
    """
    if not folder.exists():
        corpus = make()
        folder.parent.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(dir=folder.parent))
        np.save(draft / "train.npy", corpus.train)
        np.save(draft / "held_out.npy", corpus.held_out)
        (draft / "digest").write_text(corpus.digest, encoding="ascii")
        try:
            draft.rename(folder)  # atomic, so that nobody finds half of it
        except OSError:
            if not folder.exists():
                raise
            shutil.rmtree(draft)  # another rank was first
    train, held_out = (
        np.load(folder / f"{part}.npy", mmap_mode="r") for part in ("train", "held_out")
    )
    corpus = Corpus(train=train, held_out=held_out)
    if corpus.digest != (folder / "digest").read_text(encoding="ascii"):
        raise ValueError(
            f"{folder}: its files have been changed since they were written. Remove the folder "
            "to have it made again, or name another data.cache_dir."
        )
    return corpus


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenBatch:
    """Samples in global order: at each place, the input token and the token to predict."""

    tokens: npt.NDArray[np.int64]  # [samples, seq_len]
    targets: npt.NDArray[np.int64]  # [samples, seq_len]

    @property
    def arrays(self) -> tuple[npt.NDArray[Any], ...]:
        """The model's positional arguments."""
        return self.tokens, self.targets

    @property
    def num_samples(self) -> int:
        """The number of samples."""
        return len(self.tokens)

    @property
    def num_targets(self) -> int:
        """The number of predictions that its loss is summed over."""
        return int((self.targets >= 0).sum())

    def samples(self, span: Span) -> "TokenBatch":
        """Only the samples in ``span``; views, no copy."""
        part = slice(span.start, span.stop)
        return TokenBatch(tokens=self.tokens[part], targets=self.targets[part])


def windows(text: npt.NDArray[Any], starts: npt.NDArray[np.int64], seq_len: int) -> TokenBatch:
    """The ``seq_len`` tokens from each start, and as targets the same shifted by one."""
    positions = starts[:, None] + np.arange(seq_len + 1)
    window = text[positions].astype(np.int64)
    return TokenBatch(tokens=window[:, :-1], targets=window[:, 1:])


@dataclass(frozen=True, slots=True, kw_only=True)
class GlobalBatches:
    """``batches[step]``: windows of the training text at places drawn for (seed, step).

    Places are drawn with replacement by a counter-based generator, so the batch of any step
    can be computed at any time and nothing has to be saved to resume.
    """

    corpus: Corpus
    seq_len: int
    global_batch_size: int
    seed: int = 0

    def __post_init__(self) -> None:
        _check_long_enough(self.corpus.train, self.seq_len)

    def __getitem__(self, step: int) -> TokenBatch:
        """The batch for the next step after ``step`` finished steps."""
        # The raw words of Philox are the same in every NumPy release; the streams of
        # Generator are not guaranteed to be.
        words = np.random.Philox(key=[self.seed, step]).random_raw(self.global_batch_size)
        num_starts = self.corpus.train.size - self.seq_len
        starts = (words % np.uint64(num_starts)).astype(np.int64)
        return windows(self.corpus.train, starts, self.seq_len)


def held_out_windows(corpus: Corpus, *, seq_len: int, num_samples: int) -> TokenBatch:
    """``num_samples`` windows spread evenly over the held-out text; always the same."""
    last_start = _check_long_enough(corpus.held_out, seq_len)
    starts = np.linspace(0, last_start, num_samples).astype(np.int64)
    return windows(corpus.held_out, starts, seq_len)


def _check_long_enough(text: npt.NDArray[Any], seq_len: int) -> int:
    """The last place where a window and its targets fit."""
    last_start = text.size - seq_len - 1
    if last_start < 0:
        raise ValueError(
            f"text: {text.size} tokens but one window needs {seq_len + 1}. "
            f"Lower seq_len or use a longer corpus."
        )
    return last_start


@dataclass(frozen=True)
class ModelTokenizer:
    """The tokenizer that a model was trained with, in the JSON of the package ``tokenizers``.

    Its text is UTF-8.  Invalid bytes become the replacement character, and some tokenizers
    normalise letters, so tokens do not determine every byte.
    """

    state: str
    end: int | None = None  # the token after each document, if there is one

    @cached_property
    def _backend(self) -> Any:
        from tokenizers import Tokenizer as Backend

        backend = Backend.from_str(self.state)
        backend.no_truncation()
        backend.no_padding()
        return backend

    @property
    def num_token_kinds(self) -> int:
        """The number of embedding rows that it needs."""
        return int(max(self._backend.get_vocab().values())) + 1

    @property
    def digest(self) -> str:
        """A hash that is equal exactly for tokenizers that do the same."""
        return hashlib.sha256(f"{self.end} {self.state}".encode()).hexdigest()

    def token(self, *names: str) -> int | None:
        """The id of the first of these tokens that the vocabulary has."""
        found = (self._backend.token_to_id(name) for name in names)
        return next((token for token in found if token is not None), None)

    def encode_all(self, text: npt.NDArray[np.uint8]) -> npt.NDArray[Any]:
        """The tokens of all documents of ``text``, [tokens], in the smallest type that fits."""
        dtype = np.min_scalar_type(self.num_token_kinds - 1)
        end = [] if self.end is None else [self.end]
        documents = text.tobytes().split(bytes([SEPARATOR]))
        plain = [each.decode("utf-8", errors="replace") for each in documents if each]
        encodings = self._backend.encode_batch_fast(plain, add_special_tokens=False)
        parts = [np.array([*each.ids, *end], dtype=dtype) for each in encodings]
        return np.concatenate(parts) if parts else np.empty(0, dtype=dtype)

    def tokens_of(self, text: Corpus) -> Corpus:
        """The same text as tokens."""
        train, held_out = map(self.encode_all, (text.train, text.held_out))
        return Corpus(train=train, held_out=held_out)
