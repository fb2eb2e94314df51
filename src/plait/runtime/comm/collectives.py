"""Collectives on plain tensors. Every call says why, and the ledger and the board write it down; a group of one moves
nothing.

All work in place on contiguous tensors and return a `Handle`, to be waited for before the tensor is touched again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from .board import Board, Channel, Mark
from .world import Group, World


@dataclass
class Handle:
    """Something under way, and its place on the board. It keeps its tensor alive until it is done; what is left to do
    then is `after`."""

    work: dist.Work | None
    tensor: Tensor | None
    place: tuple[Board, Mark] | None = None
    received: tuple[Group, Channel] | None = None
    after: Callable[[], object] | None = None

    def wait(self) -> None:
        """On a CPU returns when it is done; on a GPU makes the current stream wait, and returns at once."""
        if self.work is not None and self.place is not None:
            board, mark = self.place
            board.wait(mark)
            self.work.wait()
            board.go_on()
            if self.received is not None:
                group, channel = self.received
                if group.checked is not None:
                    group.checked.after_receive(channel, mark)
        self.work = self.tensor = None
        if self.after is not None:
            self.after()
            self.after = None


DONE = Handle(None, None)
# torch 2.13 calls them otherwise, and warns of the names before.
_GATHER = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_SCATTER = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
_OPERATIONS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}
_NAMES = {"sum": "all_reduce", "max": "all_reduce (maximum)"}


def _note(x: Tensor, group: Group, operation: str, why: str, payload: int, op: str = "") -> tuple[Board, Mark]:
    """Writes down a collective that is about to be called; with --comm-check, once all ranks are about to call it."""
    group.ledger.add(group.axis, why, operation, group.size, payload)
    assert group.board is not None
    assert group.channel is not None
    mark = group.board.note(group.channel, op or operation, x, group.axis, why)
    if group.checked is not None:
        group.checked.before_call(group.channel, mark)
    return group.board, mark


def _note_message(
    x: Tensor, group: Group, operation: str, why: str, rank: int, tag: int
) -> tuple[Board, Mark, Channel]:
    """The same for a message to or from a rank. With --comm-check it is compared when it has come: whoever waited for
    the other here might wait forever."""
    group.ledger.add(group.axis, why, operation, group.size, x.numel() * x.element_size())
    assert group.board is not None
    channel = group.board.channel(("to" if operation == "send" else "from", (rank,)))
    mark = group.board.note(channel, operation, x, group.axis, why, tag)
    if group.checked is not None and operation == "send":
        group.checked.before_send(channel, mark)
    return group.board, mark, channel


def all_reduce(x: Tensor, group: Group, *, why: str, op: str = "sum", wait: bool = True) -> Handle:
    """x becomes the sum (or maximum) of the group's x, the same bits on every rank."""
    if group.handle is None:
        return DONE
    place = _note(x, group, "all_reduce", why, x.numel() * x.element_size(), _NAMES[op])
    since = group.ledger.now()
    work = dist.all_reduce(x, _OPERATIONS[op], group=group.handle, async_op=True)
    handle = Handle(work, x, place)
    if wait:
        handle.wait()
        group.ledger.waited(group.axis, why, since)
    return handle


def all_gather(x: Tensor, group: Group, *, why: str) -> Tensor:
    """[...] on each rank -> [ranks, ...] on all, in the order of the group."""
    if group.handle is None:
        return x.unsqueeze(0)
    gathered = x.new_empty((group.size, *x.shape))
    place = _note(x, group, "all_gather", why, gathered.numel() * x.element_size())
    since = group.ledger.now()
    x = x.contiguous()
    Handle(dist.all_gather(list(gathered.unbind(0)), x, group=group.handle, async_op=True), x, place).wait()
    group.ledger.waited(group.axis, why, since)
    return gathered


def gather_shares(whole: Tensor, share: Tensor, group: Group, *, why: str) -> Handle:
    """Starts filling `whole` with everyone's share, in the order of the group. `share` may be this rank's place in it."""
    if group.handle is None:
        if whole.data_ptr() != share.data_ptr():
            whole.copy_(share)
        return DONE
    place = _note(whole, group, "all_gather", why, whole.numel() * whole.element_size())
    work = _GATHER(whole, share, group=group.handle, async_op=True)
    return Handle(work, whole, place)


def reduce_scatter(x: Tensor, share: Tensor, group: Group, space: Tensor, *, why: str, add: bool) -> Handle:
    """Starts the sum of everyone's x, of which each rank gets its share: written to `share`, or with `add` added to it,
    when the handle is waited for. `space` is as large as x, and both are in use until then; `share` may be this rank's
    place in x. On Gloo everyone's pieces are exchanged and summed here, in the order of the group: its own reduce_scatter
    moves as many bytes as an all_reduce."""
    if group.handle is None:
        (share.add_ if add else share.copy_)(x)
        return DONE
    place = _note(x, group, "reduce_scatter", why, x.numel() * x.element_size())
    if by_tag(group):
        work = dist.all_to_all_single(space, x, group=group.handle, async_op=True)
        pieces = space.view(group.size, -1)
        summed = (lambda: share.add_(pieces.sum(0))) if add else lambda: torch.sum(pieces, 0, out=share)
        return Handle(work, x, place, after=summed)
    into = space[: share.numel()] if add else share
    work = _SCATTER(into, x, group=group.handle, async_op=True)
    return Handle(work, x, place, after=(lambda: share.add_(into)) if add else None)


def send(x: Tensor, to: int, group: Group, *, why: str, tag: int) -> Handle:
    """Starts sending x to the group's rank `to`; x must not change until the handle is done."""
    x = x.contiguous()
    board, mark, _ = _note_message(x, group, "send", why, group.ranks[to], tag)
    return Handle(dist.isend(x, group.ranks[to], group=group.handle, tag=tag), x, (board, mark))


def receive(x: Tensor, source: int, group: Group, *, why: str, tag: int) -> Handle:
    """Starts receiving into x from the group's rank `source`."""
    board, mark, channel = _note_message(x, group, "receive", why, group.ranks[source], tag)
    work = dist.irecv(x, group.ranks[source], group=group.handle, tag=tag)
    return Handle(work, x, (board, mark), (group, channel))


def by_tag(group: Group) -> bool:
    """Whether messages find their receives by tag, in whatever order those are posted. NCCL goes by the order alone."""
    return group.handle is not None and dist.get_backend(group.handle) == "gloo"


def barrier(world: World) -> None:
    """Returns when every rank is here."""
    token = torch.zeros(1, device=world.device)
    all_reduce(token, world.everyone, why="barrier")
    if token.is_cuda:
        torch.cuda.synchronize()
