"""What carries the bytes of a group: torch.distributed (Gloo between CPUs, NCCL between GPUs), or memory that the ranks
of one host share (comm/shared.py). collectives.py says what is called and why; a transport only moves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

Op = Literal["sum", "max"]


class Work(Protocol):
    """Something under way."""

    def wait(self) -> object: ...

    def is_completed(self) -> bool: ...


class Transport(Protocol):
    """The ranks of a group, in order. Tensors are contiguous, and are not touched by anyone else until a call is done."""

    by_tag: bool
    """Whether messages find their receives by tag, in whatever order those are posted."""

    def room(self, count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """[count] zeros for what is brought to many calls: `all_reduce`, `all_gather` and `reduce_scatter` may then read
        them where they are. What was brought from there to the last two is not changed before another call with the same
        ranks has been waited for: theirs may not have ended yet."""
        ...

    def all_reduce(self, x: Tensor, op: Op) -> Work:
        """x becomes the sum or maximum of everyone's, the same bits everywhere."""
        ...

    def all_reduced(self, x: Tensor, op: Op) -> tuple[Tensor, Work]:
        """The sum or maximum of everyone's x, which stays as it is: there when the work is done."""
        ...

    def all_gather(self, whole: Tensor, share: Tensor) -> Work:
        """`whole` becomes everyone's share, in order; `share` may be this rank's place in it."""
        ...

    def reduce_scatter(self, x: Tensor, share: Tensor, space: Tensor, add: bool) -> Work:
        """`share` becomes this rank's piece of the sum of everyone's x, or has it added. `space` is as large as x and of
        its type, which need not be that of `share`."""
        ...

    def send(self, x: Tensor, to: int, tag: int) -> Work: ...

    def receive(self, x: Tensor, source: int, tag: int) -> Work: ...


class _Then:
    """A call of torch's, and what is left to do when it is done."""

    def __init__(self, work: Work, after: Callable[[], object]) -> None:
        self._work, self._after = work, after

    def wait(self) -> None:
        self._work.wait()
        self._after()

    def is_completed(self) -> bool:
        return False


# torch 2.13 calls them otherwise, and warns of the names before.
_GATHER = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_SCATTER = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
_OPERATIONS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}


class Distributed:
    """torch.distributed's. `ranks` are the group's, as the world counts them."""

    def __init__(self, handle: dist.ProcessGroup, ranks: tuple[int, ...]) -> None:
        self._handle, self._ranks = handle, ranks
        self._gloo = dist.get_backend(handle) == "gloo"
        self.by_tag = self._gloo

    def room(self, count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.zeros(count, dtype=dtype, device=device)

    def all_reduce(self, x: Tensor, op: Op) -> Work:
        return dist.all_reduce(x, _OPERATIONS[op], group=self._handle, async_op=True)  # type: ignore[no-any-return]

    def all_reduced(self, x: Tensor, op: Op) -> tuple[Tensor, Work]:
        # A copy: autograd may hand the same tensor to someone else.
        summed = x.clone(memory_format=torch.contiguous_format)
        return summed, self.all_reduce(summed, op)

    def all_gather(self, whole: Tensor, share: Tensor) -> Work:
        return _GATHER(whole.view(-1), share.view(-1), group=self._handle, async_op=True)  # type: ignore[no-any-return]

    def reduce_scatter(self, x: Tensor, share: Tensor, space: Tensor, add: bool) -> Work:
        # On Gloo pieces are exchanged and summed here, in the order of the group: its own reduce_scatter moves as many
        # bytes as an all_reduce.
        if self._gloo:
            work = dist.all_to_all_single(space, x, group=self._handle, async_op=True)
            pieces = space.view(len(self._ranks), -1)
            if share.dtype == x.dtype and not add:
                return _Then(work, lambda: torch.sum(pieces, 0, out=share))
            return _Then(work, lambda: (share.add_ if add else share.copy_)(pieces.sum(0)))
        in_place = share.dtype == x.dtype and not add
        into = share if in_place else space[: share.numel()]
        work = _SCATTER(into, x, group=self._handle, async_op=True)
        return work if in_place else _Then(work, lambda: (share.add_ if add else share.copy_)(into))

    def send(self, x: Tensor, to: int, tag: int) -> Work:
        return dist.isend(x, self._ranks[to], group=self._handle, tag=tag)  # type: ignore[return-value]

    def receive(self, x: Tensor, source: int, tag: int) -> Work:
        return dist.irecv(x, self._ranks[source], group=self._handle, tag=tag)  # type: ignore[return-value]
