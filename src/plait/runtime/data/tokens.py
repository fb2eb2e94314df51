"""Text to token ids, done once and kept on disk.

    documents   "def f(): ..."          "import os"             one file is one document
    stream       17  4 92 ...   E        8 301 55   E           every document ends with the end token E (and begins with
                                                                what the model's own tokenizer begins it with)
    offsets      0                       n                m     where each document starts, and the end of the last

A cache entry is one directory, named by a hash of what it was made from (the files' paths, sizes and times, the
tokenizer, the vocabulary): `stream.npy`, `corpus.json` and, except for bytes, `tokenizer.json`. It appears by one rename,
so it is there whole or not at all; a file lock lets one process work while the others wait for its result. An entry
whose checksums do not hold is made again.

No torch here, and no ranks: every rank sees the same corpus, and data/batches.py says who reads which rows.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import sysconfig
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from zlib_ng.zlib_ng import crc32

from ...design.errors import PlanError, nearest
from ...design.plan import Plan
from .tokenizer import Bpe, Bytes, Own, Tokenizer

FORMAT = 3
"""Raised by one whenever the same files would give other bytes on disk, so that old entries are not read."""

NAMES = {"bytes": "bytes", "bpe": "bpe", "model": "the model's own tokenizer"}
TEXT_SUFFIXES = (".md", ".py", ".rst", ".txt")
NOT_STDLIB = frozenset({"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__"})
SNIFFED = 1 << 16
"""How many bytes of a file are looked at to tell text from binary."""
PIECE = 1 << 18
"""Characters encoded in one go. A longer document is encoded in pieces, so that all cores work on it and memory stays
small; one word in a quarter million characters may be cut there, and decodes to the same text all the same."""
ENCODED_TOGETHER = 64
"""Pieces in one call of the tokenizer, whose results take some 100 bytes a token until they are ids."""


@dataclass(frozen=True, eq=False)
class Corpus:
    """All documents as one stream, or some of them (`part`).

    `stream` [tokens] uint16 or uint32, mapped from disk; `offsets` [documents + 1] int64; `entropy` in nats a token of
    the stream's single-token frequencies: the loss of a model that has learnt those and nothing else. `digests`
    [documents] uint64 of the documents' bytes. Of a part, `offsets` count its own tokens, and `starts` [documents] says
    where its documents begin in the stream (None: at `offsets`).
    """

    stream: np.ndarray
    offsets: np.ndarray
    entropy: float
    tokenizer: Tokenizer
    description: str
    digests: np.ndarray | None = None
    starts: np.ndarray | None = None

    @property
    def tokens(self) -> int:
        return int(self.offsets[-1])

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each document, its end token with them."""
        return np.diff(self.offsets)

    @property
    def begins(self) -> np.ndarray:
        """Where each document begins in the stream."""
        return self.offsets[:-1] if self.starts is None else self.starts

    @property
    def digest(self) -> str:
        """32 letters that stand for the documents and their tokens: of their bytes, and of how many tokens each has."""
        found = hashlib.blake2b(np.ascontiguousarray(self.offsets, np.int64).tobytes(), digest_size=16)
        found.update((self.stream if self.digests is None else self.digests).tobytes())
        return found.hexdigest()

    def part(self, chosen: np.ndarray) -> Corpus:
        """The documents where `chosen` [documents] is true; the stream is shared."""
        offsets = np.concatenate(([0], np.cumsum(self.lengths[chosen])))
        digests = None if self.digests is None else self.digests[chosen]
        return replace(self, offsets=offsets, digests=digests, starts=self.begins[chosen])


def documents(data: str) -> list[Path]:
    """The files that `data` names, in order: 'stdlib', a directory of text files, or one file.

    In a directory, binary and blank files are left out. Raises a `PlanError` when nothing is left to read.
    """
    if data == "stdlib":
        root = Path(sysconfig.get_path("stdlib"))
        found = [path for path in _walk(root, (".py",), NOT_STDLIB) if _is_text(path)]
        if not found:
            raise PlanError(f"This Python keeps no sources of its standard library in {root}: name a text file.")
        return found
    path = Path(data).expanduser()
    if path.is_dir():
        files = _walk(path, TEXT_SUFFIXES, frozenset({"__pycache__"}))
        found = [file for file in files if _is_text(file)]
        if not found:
            endings = ", ".join(TEXT_SUFFIXES)
            raise PlanError(
                f"{data} has no text: of its {len(files)} files ending in {endings} none is text that is not blank. "
                "Name a directory with such files, a single file of any name, or 'stdlib'."
            )
        return found
    if not path.exists():
        beside = sorted(p.name for p in path.parent.iterdir()) if path.parent.is_dir() else []
        hint = nearest(path.name, ["stdlib", *beside])
        raise PlanError(f"There is no file or directory {data}.{hint} Name a text file, a directory, or 'stdlib'.")
    if not path.is_file():
        raise PlanError(f"{data} is neither a file nor a directory (a pipe or a device): name a text file.")
    head = _head(path)
    if b"\0" in head:
        raise PlanError(f"{data} is not text: its first {len(head)} bytes hold NUL bytes. Name a file in UTF-8.")
    if not head.strip():
        raise PlanError(f"{data} has no text in it: its first {len(head)} bytes are blank. Name a file with text.")
    return [path]


def _walk(root: Path, suffixes: tuple[str, ...], without: frozenset[str]) -> list[Path]:
    """The files under `root` with one of the suffixes, sorted, directories named in `without` left out."""
    found = []
    for directory, below, names in os.walk(root):
        below[:] = [name for name in below if name not in without]
        found += [Path(directory, name) for name in names if name.endswith(suffixes)]
    return sorted(path for path in found if path.is_file())


def _is_text(path: Path) -> bool:
    head = _head(path)
    return b"\0" not in head and bool(head.strip())


def _head(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(SNIFFED)
    except OSError as error:
        raise PlanError(f"{path} cannot be read ({error.strerror}): allow it, or name other data.") from None


@dataclass(frozen=True)
class TokenizerFile:
    """A model's own tokenizer: its tokenizer.json (None: it has none), the ids that end a document by the model's config,
    and whether the model's weights have learnt it."""

    file: Path | None = None
    ends: tuple[int, ...] = ()
    learnt: bool = False


NONE = TokenizerFile()


def prepare(plan: Plan, vocabulary: int, *, own: TokenizerFile = NONE, cache: Path | None = None) -> Corpus:
    """The corpus of `plan.data` for a model with `vocabulary` ids, from the cache when it is there.

    `cache` is the directory of all entries (None: ~/.cache/plait). Any number of processes may call this at once.
    Raises a `PlanError` when there is no text, or when the vocabulary is too small for the tokenizer.
    """
    tokenizer = _given(_kind(plan, own), vocabulary, own)
    return _cached(documents(plan.data), vocabulary, cache, tokenizer)


def prepare_with(data: str, corpus: Corpus, *, cache: Path | None = None) -> Corpus:
    """Another text in the tokens of `corpus`, whose tokenizer is taken as it is; from the cache when it is there."""
    most = int(np.iinfo(corpus.stream.dtype).max) + 1
    return _cached(documents(data), most, cache, corpus.tokenizer)


def _cached(paths: list[Path], vocabulary: int, cache: Path | None, tokenizer: Tokenizer | None) -> Corpus:
    """The corpus of these files: with `tokenizer`, or with BPE trained on them."""
    stats = [(str(path.resolve()), path.stat()) for path in paths]
    given = "trained" if tokenizer is None else tokenizer.fingerprint
    source = [FORMAT, given, vocabulary, [[name, stat.st_size, stat.st_mtime_ns] for name, stat in stats]]
    key = hashlib.blake2b(json.dumps(source).encode(), digest_size=16).hexdigest()
    cache = Path.home() / ".cache" / "plait" if cache is None else cache
    entry, scratch = cache / key, cache / f"{key}.new"
    with _locked(cache / f"{key}.lock"):
        corpus = _load(entry)
        if corpus is None:
            for stale in (entry, scratch):
                shutil.rmtree(stale, ignore_errors=True)
                stale.unlink(missing_ok=True)  # a plain file, which no one here wrote
            scratch.mkdir()
            _build(paths, tokenizer, vocabulary, scratch)
            scratch.rename(entry)
            corpus = _load(entry)
    if corpus is None:
        raise OSError(f"the cache entry {entry} does not read back as it was written: is the disk full or failing?")
    return corpus


def _kind(plan: Plan, own: TokenizerFile) -> str:
    """The tokenizer that "auto" stands for: real weights have learnt one."""
    if plan.tokenizer == "auto" and not own.learnt:
        return "bpe"
    if own.file is None and plan.tokenizer in ("auto", "model"):
        why = "its weights have learnt one" if own.learnt else "tokenizer model asks for it"
        raise PlanError(
            f"{plan.model} has no tokenizer.json, and {why}: put it beside config.json (save_pretrained of the tokenizer "
            f"writes it), or choose --tokenizer bpe or bytes, which mean nothing to weights that are trained."
        )
    return "model" if plan.tokenizer == "auto" else plan.tokenizer


def _given(kind: str, vocabulary: int, own: TokenizerFile) -> Tokenizer | None:
    """The tokenizer, unless it has to be trained on the data. Refuses a vocabulary that is too small for it."""
    if kind == "bytes" and vocabulary < Bytes.least:
        raise PlanError(
            f"The bytes tokenizer needs {Bytes.least} ids (256 bytes and the end), but the model has a vocabulary of "
            f"{vocabulary}: choose a model with {Bytes.least} or more."
        )
    if kind == "bpe" and vocabulary < Bpe.least:
        raise PlanError(
            f"BPE needs a vocabulary of {Bpe.least} or more to be worth training, but the model has {vocabulary}: use "
            f"tokenizer bytes (from {Bytes.least} on), or a model with a larger vocabulary."
        )
    if kind != "model":
        return Bytes() if kind == "bytes" else None
    assert own.file is not None
    found = Own.read(own.file, own.ends)
    if vocabulary < found.least:
        raise PlanError(
            f"{own.file} gives ids up to {found.least - 1}, but the model has a vocabulary of {vocabulary}: they are of "
            f"different models. Fetch both again, or choose --tokenizer bpe or bytes."
        )
    return found


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Holds the lock file `path` against every other process and thread; the system frees it if this one dies."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("w")
    except OSError as error:
        why = f"The token cache {path.parent} cannot be written ({error.strerror})"
        raise PlanError(f"{why}: allow it, or name another cache directory.") from None
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _build(paths: Sequence[Path], tokenizer: Tokenizer | None, vocabulary: int, entry: Path) -> None:
    """Reads, tokenises and counts everything, and writes the files of one cache entry into the directory `entry`."""
    texts = [path.read_bytes().decode(errors="replace") for path in paths]
    cut = [[text[at : at + PIECE] for at in range(0, len(text), PIECE)] for text in texts]
    pieces = [piece for document in cut for piece in document]
    tokenizer = Bpe.train(pieces, vocabulary) if tokenizer is None else tokenizer
    if isinstance(tokenizer, Bpe | Own):
        (entry / "tokenizer.json").write_text(tokenizer.text, encoding="utf-8")

    dtype = np.uint16 if vocabulary <= 1 << 16 else np.uint32
    groups = (pieces[at : at + ENCODED_TOGETHER] for at in range(0, len(pieces), ENCODED_TOGETHER))
    encoded = (np.asarray(ids, dtype) for group in groups for ids in tokenizer.encode_all(group))
    begin, end = np.asarray(tokenizer.begin, dtype), np.asarray([tokenizer.end], dtype)
    whole = [np.concatenate((begin, *islice(encoded, len(document)), end)) for document in cut]
    stream = np.concatenate(whole)
    np.save(entry / "stream.npy", stream)

    counts = np.bincount(stream)
    share = counts[counts > 0] / len(stream)
    size = sum(path.stat().st_size for path in paths)
    about = {
        "tokenizer": tokenizer.kind,
        "begin": tokenizer.begin,
        "end": tokenizer.end,
        "digests": [int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") for text in texts],
        "offsets": np.cumsum([0, *map(len, whole)]).tolist(),
        "entropy": float(-(share * np.log(share)).sum()),
        "description": f"{len(texts):,} document{'s' * (len(texts) != 1)}, {size:,} bytes, "
        f"{len(stream):,} tokens ({NAMES[tokenizer.kind]})",
        "checksums": {path.name: crc32(path.read_bytes()) for path in sorted(entry.iterdir())},
    }
    (entry / "corpus.json").write_text(json.dumps(about), encoding="utf-8")


def _load(entry: Path) -> Corpus | None:
    """The corpus in a cache entry, or None when it is not there or not what was written."""
    try:
        about = json.loads((entry / "corpus.json").read_text(encoding="utf-8"))
        for name, checksum in about["checksums"].items():
            if crc32(np.memmap(entry / name, mode="r").data) != checksum:
                return None
        return Corpus(
            stream=np.load(entry / "stream.npy", mmap_mode="r"),
            offsets=np.asarray(about["offsets"], np.int64),
            entropy=about["entropy"],
            tokenizer=_tokenizer(about, entry),
            description=about["description"],
            digests=np.asarray(about["digests"], np.uint64),
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _tokenizer(about: dict[str, Any], entry: Path) -> Tokenizer:
    if about["tokenizer"] == "bytes":
        return Bytes()
    text = (entry / "tokenizer.json").read_text(encoding="utf-8")
    if about["tokenizer"] == "bpe":
        return Bpe.of(text)
    return Own.of(text, tuple(about["begin"]), about["end"])
