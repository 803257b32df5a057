"""From bytes to tokens, by the tokenizer of a model; without one, each byte is a token."""

import hashlib
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from shardhet.training.data import SEPARATOR, Corpus


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
