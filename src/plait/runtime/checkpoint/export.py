"""A checkpoint's weights as a model directory that transformers, vLLM and the rest read: safetensors, config, tokenizer.

    slices -> a parameter, whole, one at a time -> the tensors that files have of it -> the chosen type -> shards

What stands in which shard follows from the shapes, so the headers are written first and nothing is kept. The moments
are not read. The directory appears by one rename, when it is all there.
"""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from ...design.errors import PlanError
from ..hf.written import TYPES, Written
from . import disk, folders
from .files import Files
from .index import Index
from .load import TYPES as STORED
from .save import view_of

NAMES = {dtype: name for name, dtype in STORED.items()} | {
    torch.int64: "I64", torch.int32: "I32", torch.bool: "BOOL"
}  # fmt: skip
SHARD = 5 << 30
"""Bytes of a shard, no more than, if no tensor has more."""
TOKENIZER = "tokenizer"
"""The folder beside the checkpoints that has the run's tokenizer."""


@dataclass(frozen=True)
class Placed:
    """A tensor of a shard."""

    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def size(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


def parameters(folder: Path, index: Index) -> Iterator[tuple[str, Tensor]]:
    """Every parameter of a checkpoint, whole, in the model's order; its bytes are found to be what was written."""
    with Files(folder) as files:
        for tensor in index.tensors:
            parts = [
                (file, one) for file in index.files for one in file.slices
                if (one.name, one.quantity) == (tensor.name, "weight")
            ]  # fmt: skip
            whole = torch.empty(tensor.shape, dtype=STORED[parts[0][1].dtype])
            for file, one in parts:
                box = tuple(slice(*side) for side in one.box)
                read = torch.frombuffer(files.read(file, one), dtype=whole.dtype)
                whole[box] = read.view(whole[box].shape)
            yield tensor.name, whole


def shards(tensors: Iterable[tuple[str, Tensor]], dtype: torch.dtype, most: int) -> list[list[Placed]]:
    """What stands in which shard, in order; what is no number of floating point keeps its type."""
    found: list[list[Placed]] = [[]]
    filled = 0
    for key, one in tensors:
        placed = Placed(key, tuple(one.shape), dtype if one.is_floating_point() else one.dtype)
        if found[-1] and filled + placed.size > most:
            found.append([])
            filled = 0
        found[-1].append(placed)
        filled += placed.size
    return found


def export(folder: Path, index: Index, into: Path, *, dtype: str = "", most: int = SHARD) -> list[Path]:
    """Writes the weights of a checkpoint to the new directory `into`, in `dtype` (fp32, bf16, fp16; empty: the run's
    type of compute): what was written. A `PlanError` where that cannot be."""
    if index.config is None:
        raise PlanError(f"{folder} is of a model that transformers does not know: it has no config to export.")
    if into.exists() and (not into.is_dir() or any(into.iterdir())):
        raise PlanError(f"{into} is there already: name a directory that is not.")
    draft = into.with_name(into.name + folders.PARTIAL)
    try:
        if draft.exists():
            shutil.rmtree(draft)
        draft.mkdir(parents=True)
        made = _files(folder, index, draft, dtype or index.plan.compute, most)
        if into.exists():
            into.rmdir()
        disk.sync_folder(draft)
        disk.rename(draft, into)
        disk.sync_folder(into.absolute().parent)
    except OSError as error:
        shutil.rmtree(draft, ignore_errors=True)
        raise PlanError(
            f"{into} cannot be written: {error.filename or draft}: {(error.strerror or str(error)).lower()}."
        ) from None
    except PlanError:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    return [into / path.name for path in made]


def _files(folder: Path, index: Index, draft: Path, dtype: str, most: int) -> list[Path]:
    assert index.config is not None
    written, kind = Written(index.config), TYPES[dtype]
    buffers = written.buffers(index.plan.model, index.plan.seed)
    shapes = ((tensor.name, torch.empty(tensor.shape, device="meta")) for tensor in index.tensors)
    placed = shards(as_written(written, chain(shapes, buffers.items())), kind, most)
    count = len(placed)
    names = (
        [f"model-{n + 1:05}-of-{count:05}.safetensors" for n in range(count)] if count > 1 else ["model.safetensors"]
    )
    tensors = as_written(written, chain(parameters(folder, index), buffers.items()))
    made = []
    for name, shard in zip(names, placed, strict=True):
        _write_shard(draft / name, shard, tensors)
        made.append(draft / name)
    if count > 1:
        total = sum(one.size for shard in placed for one in shard)
        where = {one.key: name for name, shard in zip(names, placed, strict=True) for one in shard}
        file = draft / "model.safetensors.index.json"
        file.write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": where}, indent=2) + "\n")
        made.append(file)
    beside = folder.parent / TOKENIZER
    for source in sorted(beside.iterdir()) if beside.is_dir() else ():
        shutil.copyfile(source, draft / source.name)
        made.append(draft / source.name)
    return made + written.describe(draft, dtype)


def as_written(written: Written, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """The tensors of files, made of the model's own one at a time."""
    for name, whole in tensors:
        yield from written.tensors(name, whole).items()


def _write_shard(path: Path, shard: list[Placed], tensors: Iterator[tuple[str, Tensor]]) -> None:
    """A safetensors file of the next tensors."""
    values: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for one in shard:
        values[one.key] = {"dtype": NAMES[one.dtype], "shape": list(one.shape), "data_offsets": [at, at + one.size]}
        at += one.size
    text = json.dumps(values, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    fd = disk.create(path)
    with open(fd, "wb", buffering=0):
        disk.write(fd, [memoryview(struct.pack("<Q", len(text)) + text)], path)
        for one in shard:
            key, tensor = next(tensors)
            if key != one.key or tuple(tensor.shape) != one.shape:
                raise PlanError(f"transformers writes {key} {tuple(tensor.shape)} where it said {one.key} {one.shape}.")
            disk.write(fd, [view_of(tensor.to(one.dtype).contiguous())], path)
        disk.sync(fd, path)
