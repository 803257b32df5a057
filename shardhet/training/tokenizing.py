"""From bytes to tokens, by the tokenizer of a model; without one, each byte is a token."""

import hashlib
import json
import shutil
import tempfile
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from shardhet.training.data import SEPARATOR, Corpus

FILE_VERSION = 1


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


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenFile:
    """A corpus as tokens, and the tokenizer that made them, saved in a folder."""

    tokenizer: ModelTokenizer
    corpus: Corpus  # [tokens], mapped from disk

    @classmethod
    def load(
        cls,
        folder: Path,
        text: Corpus,
        tokenizer: ModelTokenizer,
    ) -> "TokenFile":
        """Load the tokens in ``folder``; they are created from ``text`` if it does not exist.

        Raises ``ValueError`` if the tokens were made from another text, by another tokenizer,
        or have been changed since.
        """
        if not folder.exists():
            cls._make(folder, text, tokenizer)
        about = json.loads((folder / "about.json").read_text(encoding="utf-8"))
        train, held_out = (
            np.load(folder / f"{part}.npy", mmap_mode="r") for part in ("train", "held_out")
        )
        found = cls(tokenizer=tokenizer, corpus=Corpus(train=train, held_out=held_out))
        wanted = found._about(text)
        differing = [key for key, value in wanted.items() if about.get(key) != value]
        if differing:
            raise ValueError(
                f"{folder}: its {', '.join(differing)} are not those of this run. Remove the "
                "folder to have it made again, or name another data.cache_dir."
            )
        return found

    @classmethod
    def _make(cls, folder: Path, text: Corpus, tokenizer: ModelTokenizer) -> None:
        corpus = Corpus(
            train=tokenizer.encode_all(text.train),
            held_out=tokenizer.encode_all(text.held_out),
        )
        about = cls(tokenizer=tokenizer, corpus=corpus)._about(text)
        folder.parent.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(dir=folder.parent))
        (draft / "tokenizer.json").write_text(tokenizer.state, encoding="utf-8")
        (draft / "about.json").write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
        np.save(draft / "train.npy", corpus.train)
        np.save(draft / "held_out.npy", corpus.held_out)
        try:
            draft.rename(folder)  # atomic, so that nobody finds half of it
        except OSError:
            if not folder.exists():
                raise
            shutil.rmtree(draft)  # another rank was first

    def _about(self, text: Corpus) -> dict[str, Any]:
        return {
            "version": FILE_VERSION,
            "vocab_size": self.tokenizer.num_token_kinds,
            "text digest": text.digest,
            "tokenizer digest": self.tokenizer.digest,
            "token digest": self.corpus.digest,
        }
