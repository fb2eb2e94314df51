"""Loading: the moves from the slices in the files to what each rank keeps, in whatever layout.

    in the files      | rows 0-31 | rows 32-63 |  rows 64-95 |         each a slice with a checksum
    wanted                   [ rows 20-70 ]                            reads all three, checks each, keeps its part

A rank reads the slices that it needs something of, one at a time, whole, and checks each; one that it keeps as it is goes
straight to its place. Between them the ranks read every slice, so what is damaged is found by every load.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from ...design.errors import PlanError
from ...design.layout import box_shape, overlap
from ...design.slices import Slice
from .files import Files
from .index import Index, Saved, SavedFile, TensorShape
from .save import view_of

TYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


@dataclass(frozen=True)
class Target:
    """Where a quantity of a parameter goes: `slices` of it stand in `flat`, which is contiguous."""

    slices: tuple[Slice, ...]
    flat: Tensor

    def view(self, box: tuple[tuple[int, int], ...], one: Slice) -> Tensor:
        """The elements of a box, which lies in one of the slices."""
        at = one.start + sum(
            (start - first) * stride for (start, _), (first, _), stride in zip(box, one.box, one.strides, strict=True)
        )
        return self.flat.as_strided(box_shape(box), one.strides, self.flat.storage_offset() + at)


def load(folder: Path, index: Index, targets: Callable[[str, str], Sequence[Target]]) -> None:
    """Fills every target from a checkpoint, whose index is right; a `DamagedError` where a file is not. `targets` says
    where a quantity of a parameter goes, here; it is asked once, when the first slice comes, while others are read."""
    find = cache(targets)
    with Files(folder) as files, torch.no_grad(), torch._C.DisableTorchFunction():
        for file in index.files:
            checked = False
            for one in file.slices:
                there = find(one.name, one.quantity)
                if there and not checked:
                    files.check_header(file)
                    checked = True
                _move(files, file, one, there)
        files.settle()


def _move(files: Files, file: SavedFile, one: Saved, targets: Iterable[Target]) -> None:
    """What `targets` need of one slice."""
    moves = [
        (target.view(shared, kept), shared)
        for target in targets
        for kept in target.slices
        if (shared := overlap(kept.box, one.box)) is not None
    ]
    if not moves:
        return
    dtype = TYPES[one.dtype]
    if len(moves) == 1:
        ((view, shared),) = moves
        if shared == one.box and view.dtype == dtype and view.device.type == "cpu" and view.is_contiguous():
            files.read_into(view_of(view), file, one)
            return
    whole = torch.frombuffer(files.read(file, one), dtype=dtype).view(box_shape(one.box))
    for view, shared in moves:
        inside = tuple(
            slice(start - first, stop - first) for (start, stop), (first, _) in zip(shared, one.box, strict=True)
        )
        view.copy_(whole[inside])


def refuse_other_tensors(index: Index, wanted: Mapping[str, TensorShape], where: Path) -> None:
    """Raises a `PlanError` that names the first tensor of a checkpoint that this model lacks, or has otherwise."""
    saved = {tensor.name: tensor for tensor in index.tensors}
    missing = [name for name in wanted if name not in saved]
    extra = [name for name in saved if name not in wanted]
    other = [name for name, tensor in wanted.items() if name in saved and saved[name].shape != tensor.shape]
    trained = [name for name, tensor in wanted.items() if name in saved and saved[name].trains != tensor.trains]
    if missing:
        how = f"lacks {_several(missing, 'tensors of this model')}"
    elif extra:
        how = f"has {_several(extra, 'tensors that this model has not')}"
    elif other:
        name = other[0]
        how = f"has {name} as {saved[name].shape}, and this model has it as {wanted[name].shape}"
    elif trained:
        name, now = trained[0], "trained" if wanted[trained[0]].trains else "frozen"
        how = f"has {name} {'frozen' if now == 'trained' else 'trained'}, and here it is {now}"
    else:
        return
    raise PlanError(f"{where} {how}: resume with the model, freeze and train_only that the run began with.")


def _several(names: list[str], what: str) -> str:
    return f"{len(names)} {what} (the first {names[0]})"


def verify(folder: Path, index: Index) -> None:
    """Reads every byte of a checkpoint; a `DamagedError` where one is not as it was written."""
    with Files(folder) as files:
        for file in index.files:
            files.check_header(file)
            for one in file.slices:
                files.read(file, one)
