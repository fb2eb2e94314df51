"""Whether ranks that hold one and the same slice hold the same bits: asked before the first step, of every part.

Replicas that begin apart train on, and the loss falls all the same, only slower: nothing else would tell. One digest a
part travels, whatever the model's size.
"""

from __future__ import annotations

from hashlib import blake2b

import torch
from torch import Tensor

from ...design.layout import Box
from ..comm.collectives import all_gather
from ..comm.nursery import BadNumbersError
from .step import Run


def agree(run: Run) -> None:
    """Raises a `BadNumbersError` that names the first part whose copies differ, and the ranks. All ranks must call."""
    world, held = run.world, run.sharding.parameters
    weights = run.stored
    mine = [digest(weights[one.name]) if one.name in weights else 0 for one in held]
    everyones = all_gather(torch.tensor(mine, device=world.device), world.everyone, why="replicas").tolist()
    for number, one in enumerate(held):
        first: dict[tuple[tuple[Box, ...], tuple[int, int] | None], int] = {}
        for rank, digests in enumerate(everyones):
            boxes = one.boxes(world.mesh, rank)
            if not boxes:
                continue
            other = first.setdefault((boxes, run.sharding.stretch(one.name, "stored", rank)), rank)
            if digests[number] != everyones[other][number]:
                raise BadNumbersError(
                    f"{one.name} is not the same on ranks {other} and {rank}, which hold copies of one slice: start all "
                    f"ranks with the same plan (seed {run.plan.seed} here), torch and transformers."
                )


def digest(weight: Tensor) -> int:
    """64 bits that stand for a tensor's bits."""
    raw = weight.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
    return int.from_bytes(blake2b(raw.tobytes(), digest_size=8).digest(), "little", signed=True)
