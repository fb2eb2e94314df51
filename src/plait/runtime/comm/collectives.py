"""Collectives on plain tensors. Every call says why, and the ledger and the board write it down; a group of one moves
nothing.

All work in place on contiguous tensors and return a `Handle`, to be waited for before the tensor is touched again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .board import Board, Channel, Mark
from .transport import Op, Work
from .world import Group, World


@dataclass
class Handle:
    """Something under way, and its place on the board. It keeps its tensor alive until it is done; what is left to do
    then is `after`."""

    work: Work | None
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
_NAMES: dict[Op, str] = {"sum": "all_reduce", "max": "all_reduce (maximum)"}


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


def all_reduce(
    x: Tensor, group: Group, *, why: str, op: Op = "sum", wait: bool = True, through: Tensor | None = None
) -> Handle:  # fmt: skip
    """x becomes the sum (or maximum) of the group's x, the same bits on every rank. `through` is as large, of another
    type: there it is summed, and x is read at once and written when the handle is waited for."""
    if group.transport is None:
        return DONE
    into, x = x, x if through is None else through.copy_(x)
    place = _note(x, group, "all_reduce", why, x.nbytes, _NAMES[op])
    since = group.ledger.now()
    work = group.transport.all_reduce(x, op)
    handle = Handle(work, x, place, after=None if through is None else lambda: into.copy_(x))
    if wait:
        handle.wait()
        group.ledger.waited(group.axis, why, since)
    return handle


def all_reduced(x: Tensor, group: Group, *, why: str, op: Op = "sum") -> Tensor:
    """The sum (or maximum) of the group's x, the same bits on every rank, in a tensor of its own."""
    if group.transport is None:
        return x.clone()
    since = group.ledger.now()
    summed, handle = start_all_reduced(x, group, why=why, op=op)
    handle.wait()
    group.ledger.waited(group.axis, why, since)
    return summed


def start_all_reduced(x: Tensor, group: Group, *, why: str, op: Op = "sum") -> tuple[Tensor, Handle]:
    """The same, begun: the tensor has the sum when the handle has been waited for."""
    if group.transport is None:
        return x.clone(), DONE
    place = _note(x, group, "all_reduce", why, x.nbytes, _NAMES[op])
    summed, work = group.transport.all_reduced(x, op)
    return summed, Handle(work, summed, place)


def all_gather(x: Tensor, group: Group, *, why: str) -> Tensor:
    """[...] on each rank -> [ranks, ...] on all, in the order of the group."""
    if group.transport is None:
        return x.unsqueeze(0)
    gathered = x.new_empty((group.size, *x.shape))
    place = _note(x, group, "all_gather", why, gathered.nbytes)
    since = group.ledger.now()
    Handle(group.transport.all_gather(gathered, x.contiguous()), x, place).wait()
    group.ledger.waited(group.axis, why, since)
    return gathered


def all_gather_slices(x: Tensor, group: Group, sizes: Sequence[int], *, why: str) -> Tensor:
    """[..., sizes[i]] on each rank -> [..., sum of sizes] on all. Shorter slices travel as long as the longest."""
    if group.transport is None:
        return x
    longest = max(sizes)
    padded = x if x.shape[-1] == longest else F.pad(x, (0, longest - x.shape[-1]))
    slices = all_gather(padded, group, why=why).unbind(0)
    return torch.cat([one.narrow(-1, 0, size) for one, size in zip(slices, sizes, strict=True)], dim=-1)


def gather_tokens(x: Tensor, group: Group, sizes: Sequence[int], *, why: str) -> Tensor:
    """[b, sizes[i], ...] on each rank -> [b, sum of sizes, ...] on all. Shorter ones travel as long as the longest."""
    longest = max(sizes)
    padded = x if x.shape[1] == longest else F.pad(x, (0, 0, 0, longest - x.shape[1]))
    gathered = all_gather(padded, group, why=why)
    if sum(sizes) == longest * len(sizes):
        return gathered.transpose(0, 1).flatten(1, 2)
    return torch.cat([one.narrow(1, 0, size) for one, size in zip(gathered, sizes, strict=True)], dim=1)


def scatter_tokens(x: Tensor, group: Group, sizes: Sequence[int], *, why: str) -> Tensor:
    """The sum of everyone's [b, sum of sizes, ...] -> of it [b, sizes[i], ...] on each rank."""
    since = group.ledger.now()
    own, handle = start_scatter_tokens(x, group, sizes, why=why)
    handle.wait()
    group.ledger.waited(group.axis, why, since)
    return own


def start_scatter_tokens(
    x: Tensor, group: Group, sizes: Sequence[int], *, why: str
) -> tuple[Tensor, Handle]:  # fmt: skip
    """The same, begun."""
    longest = max(sizes)
    if sum(sizes) == longest * len(sizes):
        pieces = x.unflatten(1, (len(sizes), longest)).transpose(0, 1).contiguous()
    else:
        pieces = x.new_zeros((len(sizes), x.shape[0], longest, *x.shape[2:]))
        for piece, own in zip(pieces, x.split(list(sizes), 1), strict=True):
            piece.narrow(1, 0, own.shape[1]).copy_(own)
    assert group.transport is not None
    place = _note(pieces, group, "reduce_scatter", why, pieces.nbytes)
    share = torch.empty_like(pieces[0])
    work = group.transport.reduce_scatter(pieces.view(-1), share.view(-1), torch.empty_like(pieces).view(-1), False)
    return share.narrow(1, 0, sizes[group.index]), Handle(work, pieces, place)


def gather_shares(whole: Tensor, share: Tensor, group: Group, *, why: str) -> Handle:
    """Starts filling `whole` with everyone's share, in the order of the group. `share` may be this rank's place in it."""
    if group.transport is None:
        if whole.data_ptr() != share.data_ptr():
            whole.copy_(share)
        return DONE
    place = _note(whole, group, "all_gather", why, whole.nbytes)
    return Handle(group.transport.all_gather(whole, share), whole, place)


def reduce_scatter(
    x: Tensor, share: Tensor, group: Group, space: Tensor, *, why: str, add: bool, through: Tensor | None = None
) -> Handle:  # fmt: skip
    """Starts the sum of everyone's x, of which each rank gets its share: written to `share`, or with `add` added to it,
    when the handle is waited for. `space` is as large as x, and both are in use until then; `share` may be this rank's
    place in x. `through` is as large, too, and of the type of `space`: in it the sum is made, where x has another."""
    if group.transport is None:
        (share.add_ if add else share.copy_)(x)
        return DONE
    if through is not None:
        x = through.copy_(x)
    place = _note(x, group, "reduce_scatter", why, x.nbytes)
    return Handle(group.transport.reduce_scatter(x, share, space, add), x, place)


def send(x: Tensor, to: int, group: Group, *, why: str, tag: int) -> Handle:
    """Starts sending x to the group's rank `to`; x must not change until the handle is done."""
    assert group.transport is not None
    x = x.contiguous()
    board, mark, _ = _note_message(x, group, "send", why, group.ranks[to], tag)
    return Handle(group.transport.send(x, to, tag), x, (board, mark))


def receive(x: Tensor, source: int, group: Group, *, why: str, tag: int) -> Handle:
    """Starts receiving into x from the group's rank `source`."""
    assert group.transport is not None
    board, mark, channel = _note_message(x, group, "receive", why, group.ranks[source], tag)
    return Handle(group.transport.receive(x, source, tag), x, (board, mark), (group, channel))


def by_tag(group: Group) -> bool:
    """Whether messages find their receives by tag, in whatever order those are posted. NCCL goes by the order alone."""
    return group.transport is not None and group.transport.by_tag


def room(count: int, group: Group, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[count] zeros for what is brought to many calls of the group, which may then read it where it is: the others'
    calls may end later than this rank's, so what `gather_shares` and `reduce_scatter` were given is not changed before a
    later call with the same ranks (a step's norm) has been waited for."""
    if group.transport is None:
        return torch.zeros(count, dtype=dtype, device=device)
    return group.transport.room(count, dtype, device)


def barrier(world: World) -> None:
    """Returns when every rank is here."""
    token = torch.zeros(1, device=world.device)
    all_reduce(token, world.everyone, why="barrier")
    if token.is_cuda:
        torch.cuda.synchronize()
