"""Who reads which rows, and when: one global order, dealt to the data parallel ranks.

    epoch 0   7 2 9 0 | 4 1 8 5 | 6 3 - -        batch 4, 10 rows; - = padding, no targets
    epoch 1   3 9 4 4 ...                        an order of its own
              dp 0: 7 2, 4 1, 6 3    dp 1: 9 0, 8 5, - -

The order depends on the seed and the epoch alone, so every layout trains on the same batches, and a run that stops
resumes on any layout with exactly the rows that were left. Ranks that differ only in pp or tp get the same rows. Which
rows there are is the packing's (packing.py, best_fit.py); with packing sorted the order depends on their costs and on
the batch, too.

With data_order own each data parallel rank goes through all of the data, in an order of its own:

              dp 0: 7 2, 9 0, 4 1, 8 5, 6 3    dp 1: 3 8, 1 6, ...
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Protocol

import numpy as np

from ...design.errors import PlanError
from ...design.plan import Plan
from ..batch import Batch
from .best_fit import BestFit, even
from .held_out import training_part
from .packing import Stream
from .tokens import Corpus


class Packing(Protocol):
    """Documents in rows: how many rows, the rows themselves by their ids, and what each costs where that decides when
    it is read."""

    @property
    def count(self) -> int: ...

    @property
    def costs(self) -> np.ndarray | None: ...

    def take(self, ids: np.ndarray) -> Batch: ...


def packed(corpus: Corpus, plan: Plan) -> Packing:
    return BestFit(corpus, plan.seq) if plan.packing == "sorted" else Stream(corpus, plan.seq)


OWN = 1 << 40
"""What the epochs of one rank's own order begin with, times its place among the dp ranks and one."""


def order(count: int, seed: int, epoch: int) -> np.ndarray:
    """The sample ids 0 to count - 1 in the order of one epoch, int64.

    Sorted by raw Philox draws (Salmon et al., 2011), keyed by (seed, epoch): numpy promises those bits for every
    version, which it does not for its own `permutation`, and a resumed run may well meet another numpy.
    """
    key = np.array([seed % 2**64, epoch], np.uint64)
    return np.argsort(np.random.Philox(key=key).random_raw(count), kind="stable")


def own_rows(plan: Plan, rank: int) -> slice:
    """Which rows of a global batch `rank` reads: ranks that differ only in pp or tp read the same. Of a master's ranks
    the first reads all, and deals them out."""
    share = plan.batch // plan.dp
    first = plan.mesh.coordinate(rank)["dp"] * share
    if plan.dp_method == "master" and first == 0:
        return slice(0, plan.batch)
    return slice(first, first + share)


class Batches:
    """This rank's part of every global batch, in turn, or with data_order own what it draws itself: an iterator over
    batches of [batch / dp, seq]. `corpus` is all of the data; documents held out for evaluation are not read.

    It ends after plan.steps batches, or after plan.epochs passes over the data when those are counted. The plan must
    have passed its rules: dp divides batch.
    """

    def __init__(self, corpus: Corpus, plan: Plan, rank: int) -> None:
        self._plan = plan
        self._own, self._size, self._draws = own_rows(plan, rank), plan.batch, 0
        if plan.data_order == "own":
            self._size = plan.batch // plan.dp
            self._own, self._draws = slice(0, self._size), OWN * (1 + plan.mesh.coordinate(rank)["dp"])
        self._packing = packed(training_part(corpus, plan), plan)
        self._rows = self._packing.count
        self._epoch, self._row = 0, 0
        self._group = self._size
        self._order = self._in_order(0)

    @property
    def steps_total(self) -> int:
        """Batches in the whole run, those before a resume included."""
        return self._plan.epochs * self._steps_an_epoch or self._plan.steps

    @property
    def state(self) -> dict[str, int]:
        """Where the next batch starts: its epoch, and how many rows of the epoch are behind it, over all ranks; where
        rows are grouped by cost, the size of the epoch's groups; where each dp rank reads in its own order, how many of
        them do, and epoch and row are those of one."""
        group = {} if self._packing.costs is None else {"group": self._group}
        own = {"orders": self._plan.dp} if self._draws else {}
        return {"epoch": self._epoch, "row": self._row, **group, **own}

    def restore(self, state: Mapping[str, int]) -> None:
        """Goes on from `state`, which any layout may have left; the seed, the data and seq must be the same.

        The batch may differ: each row is still read once an epoch, and steps count as if all had been this size.
        """
        epoch, place = state["epoch"], state["row"]
        if state.get("orders", 0) != (self._plan.dp if self._draws else 0):
            was = f"data_order own and dp {state['orders']}" if "orders" in state else "data_order global"
            raise PlanError(f"The data stopped with {was}: resume with the same.")
        if ("group" in state) != (self._packing.costs is not None):
            other = "sorted" if "group" in state else "stream"
            raise PlanError(f"The data stopped with packing {other}: resume with it, not with {self._plan.packing}.")
        if epoch < 0 or not 0 <= place < self._rows:
            raise PlanError(
                f"The data stopped at row {place} of epoch {epoch}, but it has {self._rows} rows of {self._plan.seq} "
                "tokens now: resume with the data, the tokenizer and the seq that the run began with."
            )
        self._epoch, self._row, self._group = epoch, place, state.get("group", self._size)
        self._order = self._in_order(epoch)

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        if self._ended:
            raise StopIteration
        ids = self._order[self._row : self._row + self._size]
        mine = ids[self._own]
        # The state moves on before the batch is handed out: a checkpoint taken after its step must not repeat it.
        after = self._row + len(ids)
        if after < self._rows:
            self._row = after
        else:
            self._epoch, self._row, self._group = self._epoch + 1, 0, self._size
            self._order = self._in_order(self._epoch)
        return self._packing.take(mine).padded(self._own.stop - self._own.start)

    @property
    def _steps_an_epoch(self) -> int:
        return -(-self._rows // self._size)

    @property
    def _ended(self) -> bool:
        if self._plan.epochs:
            return self._epoch >= self._plan.epochs
        return self._epoch * self._steps_an_epoch + -(-self._row // self._size) >= self._plan.steps

    def _in_order(self, epoch: int) -> np.ndarray:
        costs, epoch = self._packing.costs, epoch + self._draws
        if costs is None:
            return order(self._rows, self._plan.seed, epoch)
        return even(costs, self._group, self._plan.seed, epoch, order)


def global_batches(corpus: Corpus, plan: Plan, count: int) -> list[Batch]:
    """The first `count` global batches of [batch, seq], fewer if the run is shorter: what a single rank would read, or
    with data_order own what the dp ranks read between them."""
    if plan.data_order == "own":
        ranks = [Batches(corpus, plan, plan.mesh.rank(dp=place)) for place in range(plan.dp)]
        return [Batch.joined(parts) for parts in islice(zip(*ranks, strict=True), count)]
    alone = plan.model_copy(update={"ranks": 0, "dp": 1, "tp": 1, "pp": 1})
    return list(islice(Batches(corpus, alone, 0), count))
