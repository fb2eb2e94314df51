"""The tokenizers: plain bytes, byte pair encoding trained on the data at hand, and a model's own.

The first two turn every text into ids and back without loss, and have one id that no text gives: the end of a document. A
model's own does what its tokenizer.json says; its end is what the model learnt to end with.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Protocol

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from ...design.errors import PlanError

TRAINED_ON = 8_000_000
"""About how many characters BPE is trained on: an even sample of a longer corpus."""


BESIDE = ("tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja", "added_tokens.json")
"""What a tokenizer.json may have beside it."""


class Tokenizer(Protocol):
    """Text to ids and back; `decode` skips ids that stand for no text (the end token, ids never given out). `begin` are
    the ids before a document's first, `end` the one after its last; `encode` gives a document's beginning, `encode_all`
    pieces of documents."""

    @property
    def kind(self) -> str: ...
    @property
    def begin(self) -> tuple[int, ...]: ...
    @property
    def end(self) -> int: ...
    @property
    def fingerprint(self) -> str:
        """The same for tokenizers that give every text the same ids."""
        ...

    @property
    def text(self) -> str:
        """What a tokenizer.json says of it."""
        ...

    def encode(self, text: str) -> list[int]: ...
    def encode_all(self, texts: Sequence[str]) -> list[list[int]]: ...
    def decode(self, ids: Sequence[int]) -> str: ...


class Bytes:
    """The 256 byte values of UTF-8, and an end token after them."""

    kind = "bytes"
    begin: tuple[int, ...] = ()
    end = 256
    least = 257
    fingerprint = "bytes"

    @property
    def text(self) -> str:
        """Byte pairs of which none are joined."""
        letters = bytes_as_letters()
        inner = tokenizers.Tokenizer(models.BPE({letters[byte]: byte for byte in range(256)}, []))
        inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        inner.decoder = decoders.ByteLevel()
        inner.add_special_tokens([Bpe.END])
        return str(inner.to_str())

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        return [self.encode(text) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(i for i in ids if i < self.end).decode(errors="replace")


class Bpe:
    """Byte-level byte pair encoding (Sennrich et al., 2016; on bytes: Radford et al., 2019): no text is unknown."""

    kind = "bpe"
    END = "<|end|>"
    begin: tuple[int, ...] = ()
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
    def of(cls, text: str) -> Bpe:
        return cls(tokenizers.Tokenizer.from_str(text))

    @property
    def text(self) -> str:
        """What a tokenizer.json says of it."""
        return str(self._inner.to_str())

    @property
    def fingerprint(self) -> str:
        return blake2b(self.text.encode(), digest_size=16).hexdigest()

    def encode(self, text: str) -> list[int]:
        return self._inner.encode(text).ids

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        return [encoding.ids for encoding in self._inner.encode_batch_fast(texts)]

    def decode(self, ids: Sequence[int]) -> str:
        return self._inner.decode(ids, skip_special_tokens=True)


class Own:
    """A model's own, from its tokenizer.json. Names of special tokens in a text are text."""

    kind = "model"

    def __init__(self, inner: tokenizers.Tokenizer, begin: tuple[int, ...], end: int) -> None:
        inner.encode_special_tokens = True
        self._inner, self.begin, self.end = inner, begin, end

    @classmethod
    def read(cls, path: Path, ends: Sequence[int]) -> Own:
        """`ends` are the ids that end a document by the model's config; tokenizer_config.json beside it goes first."""
        try:
            inner = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises plain exceptions
            raise PlanError(
                f"{path} is not a tokenizer ({' '.join(str(error).split())[:200]}): download or save it again, or choose "
                f"--tokenizer bpe or bytes."
            ) from None
        end = _end_of(path.with_name("tokenizer_config.json"), inner)
        end = next(iter(ends), None) if end is None else end
        if end is None or inner.id_to_token(end) is None:
            raise PlanError(
                f"{path} has no end of a document: name one as eos_token in tokenizer_config.json beside it, or as "
                f"eos_token_id in config.json{'' if end is None else f' ({end} there is no id of it)'}."
            )
        inner.no_truncation()
        inner.no_padding()
        bare, dressed = (inner.encode("a", add_special_tokens=added).ids for added in (False, True))
        begin = dressed[: next((at for at in range(len(dressed)) if dressed[at : at + len(bare)] == bare), 0)]
        return cls(inner, tuple(begin), end)

    @classmethod
    def of(cls, text: str, begin: tuple[int, ...], end: int) -> Own:
        return cls(tokenizers.Tokenizer.from_str(text), begin, end)

    @property
    def text(self) -> str:
        """What a tokenizer.json says of it."""
        return str(self._inner.to_str())

    @property
    def fingerprint(self) -> str:
        said = json.dumps([self.text, self.begin, self.end])
        return blake2b(said.encode(), digest_size=16).hexdigest()

    @property
    def least(self) -> int:
        """One more than the largest id."""
        return max(self._inner.get_vocab(with_added_tokens=True).values()) + 1

    def encode(self, text: str) -> list[int]:
        return [*self.begin, *self._inner.encode(text, add_special_tokens=False).ids]

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        return [found.ids for found in self._inner.encode_batch_fast(texts, add_special_tokens=False)]

    def decode(self, ids: Sequence[int]) -> str:
        return self._inner.decode(ids, skip_special_tokens=True)


def bytes_as_letters() -> list[str]:
    """The letter that stands for each byte in byte-level BPE (Radford et al., 2019): its own where it has one that is
    printed, else the next after all bytes."""
    printed = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    found, more = [""] * 256, 256
    for byte in range(256):
        if byte in printed:
            found[byte] = chr(byte)
        else:
            found[byte], more = chr(more), more + 1
    return found


def files_of(tokenizer: Tokenizer, beside: Path | None) -> dict[str, bytes]:
    """The files of a tokenizer, by their names, as transformers reads them. `beside` is the tokenizer.json of a model's
    own: what stands there with it is taken along."""
    found = {"tokenizer.json": tokenizer.text.encode()}
    if beside is not None and tokenizer.kind == "model":
        found |= {name: (beside.parent / name).read_bytes() for name in BESIDE if (beside.parent / name).is_file()}
        return found
    end = tokenizers.Tokenizer.from_str(tokenizer.text).id_to_token(tokenizer.end)
    values = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end}
    return {**found, "tokenizer_config.json": json.dumps(values, indent=2).encode()}


def _end_of(file: Path, inner: tokenizers.Tokenizer) -> int | None:
    """The id of the eos_token that a tokenizer_config.json names, if it does."""
    try:
        token = json.loads(file.read_bytes()).get("eos_token")
    except (OSError, ValueError, AttributeError):
        return None
    text = token.get("content") if isinstance(token, dict) else token
    found: int | None = inner.token_to_id(text) if isinstance(text, str) else None
    return found
