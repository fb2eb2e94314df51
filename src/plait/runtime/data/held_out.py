"""The evaluation set: documents that training never reads, or a text of its own.

    documents    d0  d1  d2  d3  d4  d5  d6  d7        a document is held out when its digest / 2^64 < eval_share
    digest       .41 .93 .004 .6 .27 .88 .52 .13       with eval_share 0.01: d2
    training     d0  d1      d3  d4  d5  d6  d7

The digest is of the document's bytes, so the choice depends on nothing else: not on the layout, the seed, the tokenizer,
or the other documents; and two equal documents stay on one side. The rows of the set are read in order, each once,
dealt to the ranks as those of a training batch are: all ranks make equally many passes, the last filled with padding.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from ...design.errors import PlanError
from ...design.plan import Plan
from ..batch import Batch
from .packing import Stream
from .tokens import Corpus, prepare_with


def held_out(corpus: Corpus, share: float) -> np.ndarray:
    """Which documents are held out, [documents] bool: about `share` of them, one at least, and never all."""
    count = len(corpus.lengths)
    if corpus.digests is None or count < 2:
        raise PlanError(
            f"The data is {count} document, of which no share can be held out for eval_every: name a text for eval_data, "
            "or data of several files."
        )
    chosen: np.ndarray = corpus.digests < np.uint64(share * 2**64)
    least, most = corpus.digests.argmin(), corpus.digests.argmax()
    if corpus.digests[least] == corpus.digests[most]:
        raise PlanError("All documents of the data are one and the same: name a text for eval_data.")
    # Equal documents stay on one side here, too.
    chosen[corpus.digests == corpus.digests[least]] = True
    chosen[corpus.digests == corpus.digests[most]] = False
    return chosen


def training_part(corpus: Corpus, plan: Plan) -> Corpus:
    """What the run trains on: all of `corpus`, or what is left when a share is held out."""
    return corpus.part(~held_out(corpus, plan.held_out)) if plan.held_out else corpus


def evaluation_part(corpus: Corpus, plan: Plan, *, cache: Path | None = None) -> Corpus | None:
    """What the run is evaluated on, in the tokens of `corpus` (all of the data): None where it is not."""
    if not plan.eval_every:
        return None
    if plan.eval_data:
        return prepare_with(plan.eval_data, corpus, cache=cache)
    return corpus.part(held_out(corpus, plan.held_out))


def seen_in_training(corpus: Corpus, part: Corpus) -> int:
    """How many documents of an evaluation set are documents of the training data, too."""
    if corpus.digests is None or part.digests is None:
        return 0
    return int(np.isin(part.digests, corpus.digests).sum())


class EvalBatches:
    """This rank's rows of the whole evaluation set, in passes of [batch / dp, seq]: to be read any number of times."""

    def __init__(self, part: Corpus, plan: Plan, rank: int) -> None:
        # Always as a stream, so that losses can be compared between runs whose training rows are packed differently.
        self._packing = Stream(part, plan.seq)
        self._batch, self._share = plan.batch, plan.batch // plan.dp
        self._first = plan.mesh.coordinate(rank)["dp"] * self._share
        self.rows = self._packing.count

    def __len__(self) -> int:
        """Passes: the same number on every rank."""
        return -(-self.rows // self._batch)

    def __iter__(self) -> Iterator[Batch]:
        for begin in range(self._first, len(self) * self._batch, self._batch):
            mine = np.arange(min(begin, self.rows), min(begin + self._share, self.rows))
            yield self._packing.take(mine).padded(self._share)
