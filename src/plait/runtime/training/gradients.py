"""One true gradient norm over all ranks, and the clip that follows from it.

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


def squared_norm(gradients: list[Tensor], device: torch.device) -> Tensor:
    """Sum of squares of some gradients, a scalar on the device: a row of ROW at a time in their own type, the rows
    in fp64. torch's norm of a whole tensor adds up few numbers of its type on a CPU, and is 4e-4 off for 12 M elements of
    fp32."""
    rows = [torch.linalg.vector_norm(part, dim=-1).flatten() for gradient in gradients for part in _rows(gradient)]
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


def clip(buffers: Iterable[Tensor], norm: Tensor, limit: float) -> None:
    """Scales all gradients by min(1, limit / (norm + 1e-6)), as torch's clip_grad_norm_ does; no host sync."""
    if not limit:
        return
    factor = (limit / (norm + 1e-6)).clamp(max=1.0)
    for buffer in buffers:
        buffer.mul_(factor.to(buffer.dtype))
