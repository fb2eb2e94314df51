"""One true gradient norm over all ranks, the clip that follows from it, and whether a step has overflowed.

Every element counts once: a rank adds the slices of which it holds the first copy, and one sum over the world gives the
same norm, bit for bit, everywhere. Loss and norm travel together: one collective, one host sync a step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from ..comm.collectives import all_reduce
from ..comm.world import World

ROW = 1024
PIECE = 1 << 20
"""Elements that are made wider at one time."""


def squared_norm(rows: Sequence[Tensor], device: torch.device) -> Tensor:
    """Sum of squares of gradients whose `rows` are given, a scalar on the device: a row at a time in their type or fp32,
    the rows in fp64. torch's norm of a whole tensor adds up few numbers of its type on a CPU, and is 4e-4 off for 12 M
    elements of fp32."""
    if not rows:
        return torch.zeros((), dtype=torch.float64, device=device)
    norms = [
        torch.linalg.vector_norm(part, dim=-1, dtype=torch.promote_types(part.dtype, torch.float32)).flatten()
        for part in rows
    ]
    return torch.cat(norms).double().square().sum()


def rows_of(pieces: Iterable[Tensor]) -> list[Tensor]:
    """Views of contiguous tensors as [n, ROW], and as [less than ROW] what is left over. Pieces that follow each other
    in one storage, as the gradients of a bucket or of a unit do, are taken as one: a few calls, not one a parameter."""
    runs: dict[tuple[int, torch.dtype], list[Tensor]] = {}
    for piece in pieces:
        runs.setdefault((piece.untyped_storage().data_ptr(), piece.dtype), []).append(piece)
    return [row for together in runs.values() for run in _joined(together) for row in _rows(run)]


def _joined(pieces: list[Tensor]) -> Iterator[Tensor]:
    """The pieces of one storage, flat, each joined with those that follow it without a gap. An overlap counts twice."""
    spans: list[list[int]] = []
    for start, size in sorted((int(piece.storage_offset()), piece.numel()) for piece in pieces if piece.numel()):
        if spans and start == spans[-1][1]:
            spans[-1][1] += size
        else:
            spans.append([start, start + size])
    for start, stop in spans:
        yield pieces[0].as_strided((stop - start,), (1,), start)


def _rows(flat: Tensor) -> Iterator[Tensor]:
    whole = flat.numel() // ROW * ROW
    if whole:
        yield flat[:whole].view(-1, ROW)
    if whole < flat.numel():
        yield flat[whole:]


def loss_and_norm(loss: Tensor, squared: Tensor, world: World) -> tuple[Tensor, Tensor]:
    """This rank's shares of both -> the step's loss and global gradient norm, on every rank."""
    both = torch.stack((loss.double(), squared))
    all_reduce(both, world.everyone, why="loss and gradient norm")
    return both[0], both[1].sqrt()


def unscaled(buffers: Iterable[Tensor], scale: float) -> None:
    """Takes the loss's scale out of all gradients; exact where it is a power of two."""
    for buffer in buffers if scale != 1 else ():
        buffer.mul_(1 / scale)


def clip(buffers: Iterable[Tensor], norm: Tensor, limit: float) -> None:
    """Scales all gradients by min(1, limit / (norm + 1e-6)), as torch's clip_grad_norm_ does; no host sync. Where the
    norm is not finite they stay as they are: which of them it is can still be seen."""
    if not limit:
        return
    factor = torch.where(norm.isfinite(), (limit / (norm + 1e-6)).clamp(max=1.0), 1.0)
    for buffer in buffers:
        if torch.promote_types(buffer.dtype, torch.float32) == buffer.dtype:
            buffer.mul_(factor.to(buffer.dtype))
            continue
        # The product is rounded, the factor is not: it would be the same error in all of them.
        for part in buffer.split(PIECE):
            part.copy_(part.float().mul_(factor))


def overflow(loss: Tensor, norm: Tensor) -> Tensor:
    """Whether a step's numbers are not finite: on the device, the same on every rank."""
    return ~(loss.isfinite() & norm.isfinite())
