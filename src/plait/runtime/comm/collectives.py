"""Collectives on plain tensors. Every call says why, and the ledger writes it down; a group of one moves nothing.

All work in place on contiguous tensors and return a `Handle`, to be waited for before the tensor is touched again.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from .world import Group, World


@dataclass
class Handle:
    """Something under way. It keeps its tensor alive until it is done."""

    work: dist.Work | None
    tensor: Tensor | None

    def wait(self) -> None:
        """On a CPU returns when it is done; on a GPU makes the current stream wait, and returns at once."""
        if self.work is not None:
            self.work.wait()
        self.work = self.tensor = None

    def done(self) -> bool:
        return self.work is None or self.work.is_completed()


DONE = Handle(None, None)
_OPERATIONS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}


def all_reduce(x: Tensor, group: Group, *, why: str, op: str = "sum", wait: bool = True) -> Handle:
    """x becomes the sum (or maximum) of the group's x, the same bits on every rank."""
    if group.handle is None:
        return DONE
    group.ledger.add(group.axis, why, "all_reduce", group.size, x.numel() * x.element_size())
    since = group.ledger.now()
    work = dist.all_reduce(x, _OPERATIONS[op], group=group.handle, async_op=True)
    handle = Handle(work, x)
    if wait:
        handle.wait()
        group.ledger.waited(group.axis, why, since)
    return handle


def all_gather(x: Tensor, group: Group, *, why: str) -> Tensor:
    """[...] on each rank -> [ranks, ...] on all, in the order of the group."""
    if group.handle is None:
        return x.unsqueeze(0)
    gathered = x.new_empty((group.size, *x.shape))
    group.ledger.add(group.axis, why, "all_gather", group.size, gathered.numel() * x.element_size())
    since = group.ledger.now()
    dist.all_gather(list(gathered.unbind(0)), x.contiguous(), group=group.handle)
    group.ledger.waited(group.axis, why, since)
    return gathered


def send(x: Tensor, to: int, group: Group, *, why: str, tag: int) -> Handle:
    """Starts sending x to the group's rank `to`; x must not change until the handle is done."""
    x = x.contiguous()
    group.ledger.add(group.axis, why, "send", group.size, x.numel() * x.element_size())
    return Handle(dist.isend(x, group.ranks[to], group=group.handle, tag=tag), x)


def receive(x: Tensor, source: int, group: Group, *, why: str, tag: int) -> Handle:
    """Starts receiving into x from the group's rank `source`."""
    group.ledger.add(group.axis, why, "receive", group.size, x.numel() * x.element_size())
    return Handle(dist.irecv(x, group.ranks[source], group=group.handle, tag=tag), x)


def barrier(world: World) -> None:
    """Returns when every rank is here."""
    token = torch.zeros(1, device=world.device)
    all_reduce(token, world.everyone, why="barrier")
    if token.is_cuda:
        torch.cuda.synchronize()
