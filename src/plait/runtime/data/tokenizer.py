"""The two tokenizers: plain bytes, and byte pair encoding trained on the data at hand.

Both turn every text into ids and back without loss, and both have one id that no text gives: the end of a document.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Protocol

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

TRAINED_ON = 8_000_000
"""About how many characters BPE is trained on: an even sample of a longer corpus."""


class Tokenizer(Protocol):
    """Text to ids and back; `decode` skips ids that stand for no text (the end token, ids never given out)."""

    @property
    def end(self) -> int: ...
    @property
    def fingerprint(self) -> str:
        """The same for tokenizers that give every text the same ids."""
        ...

    def encode(self, text: str) -> list[int]: ...
    def encode_all(self, texts: Sequence[str]) -> list[list[int]]: ...
    def decode(self, ids: Sequence[int]) -> str: ...


class Bytes:
    """The 256 byte values of UTF-8, and an end token after them."""

    end = 256
    least = 257
    fingerprint = "bytes"

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        return [self.encode(text) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(i for i in ids if i < self.end).decode(errors="replace")


class Bpe:
    """Byte-level byte pair encoding (Sennrich et al., 2016; on bytes: Radford et al., 2019): no text is unknown."""

    END = "<|end|>"
    least = 300

    def __init__(self, inner: tokenizers.Tokenizer) -> None:
        # A document that contains the words "<|end|>" contains that text, not the end of a document.
        inner.encode_special_tokens = True
        end = inner.token_to_id(self.END)
        if end is None:
            raise ValueError(f"this tokenizer has no {self.END}")
        self._inner = inner
        self.end = end

    @classmethod
    def train(cls, texts: Sequence[str], vocabulary: int) -> Bpe:
        """`vocabulary` entries, the end token and the 256 bytes among them; fewer when the text has too few pairs."""
        inner = tokenizers.Tokenizer(models.BPE())
        inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        inner.decoder = decoders.ByteLevel()
        stride = -(-sum(map(len, texts)) // TRAINED_ON)
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(
            vocab_size=vocabulary, special_tokens=[cls.END], initial_alphabet=alphabet, show_progress=False
        )
        inner.train_from_iterator(texts[::stride], trainer)
        return cls(inner)

    @classmethod
    def read(cls, path: Path) -> Bpe:
        return cls(tokenizers.Tokenizer.from_str(path.read_text(encoding="utf-8")))

    def write(self, path: Path) -> None:
        path.write_text(self._inner.to_str(), encoding="utf-8")

    @property
    def fingerprint(self) -> str:
        return blake2b(self._inner.to_str().encode(), digest_size=16).hexdigest()

    def encode(self, text: str) -> list[int]:
        return self._inner.encode(text).ids

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        return [encoding.ids for encoding in self._inner.encode_batch_fast(texts)]

    def decode(self, ids: Sequence[int]) -> str:
        return self._inner.decode(ids, skip_special_tokens=True)
