"""One true gradient norm over all ranks, the clip that follows from it, and whether a step has overflowed.

Every element counts once: a rank adds the slices of which it holds the first copy, and one sum over the world gives the
same norm, bit for bit, everywhere. Loss and norm travel together: one collective, one host sync a step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from ..comm.collectives import all_reduce
from ..comm.world import World

ROW = 1024
PIECE = 1 << 20
"""Elements that are made wider at one time."""


def squared_norm(gradients: list[Tensor], device: torch.device) -> Tensor:
    """Sum of squares of some gradients, a scalar on the device: a row of ROW at a time in their type or fp32, the rows
    in fp64. torch's norm of a whole tensor adds up few numbers of its type on a CPU, and is 4e-4 off for 12 M elements of
    fp32."""
    rows = [
        torch.linalg.vector_norm(part, dim=-1, dtype=torch.promote_types(part.dtype, torch.float32)).flatten()
        for gradient in gradients
        for part in _rows(gradient)
    ]
    if not rows:
        return torch.zeros((), dtype=torch.float64, device=device)
    return torch.cat(rows).double().square().sum()


def _rows(gradient: Tensor) -> Iterator[Tensor]:
    flat = gradient.flatten()
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
