"""Rows of `seq` tokens cut from the stream of documents, with nothing thrown away and nothing learnt across documents.

    stream        a b c E d e E f g h i E                    E ends a document
    rows of 5     a b c E d | e E f g h | i E . . .          the last row is filled with padding
    targets       b c E × e | E × g h i | E × × × ×          × = IGNORE: the next token is another document's
    positions     0 1 2 3 0 | 0 1 0 1 2 | 0 1 0 0 0          restart in every piece of a document
    document_ids  0 0 0 0 1 | 0 0 1 1 1 | 0 0 -1 -1 -1       pieces numbered within the row

A document that a row's end cuts goes on in the next row as a new piece: the last token of the first row still has its
target, but the second row does not see what came before.
"""

from __future__ import annotations

import numpy as np
import torch

from ..batch import IGNORE, Batch
from .tokens import Corpus


class Stream:
    """The packing `stream`, the default: `count` rows of `seq` tokens, and `take`. It gives no order but the shuffled."""

    def __init__(self, corpus: Corpus, seq: int) -> None:
        self._corpus, self._seq = corpus, seq
        self.count = rows(corpus, seq)
        self.costs: np.ndarray | None = None

    def take(self, ids: np.ndarray) -> Batch:
        return row(self._corpus, self._seq, ids)


def rows(corpus: Corpus, seq: int) -> int:
    """How many rows of `seq` tokens the corpus gives.

    The very last end token has no target; it does not begin a row of its own, so every row (of two tokens or
    more) has something to learn.
    """
    return -(-(corpus.tokens - 1) // seq)


def row(corpus: Corpus, seq: int, ids: np.ndarray) -> Batch:
    """The rows with the sample ids `ids` [rows], in that order: a batch of [rows, seq]. IndexError for no such row."""
    ids = np.asarray(ids, np.int64)
    if ids.size and not 0 <= ids.min() <= ids.max() < rows(corpus, seq):
        raise IndexError(f"sample ids {ids.min()} to {ids.max()}, but there are {rows(corpus, seq)} rows of {seq}")
    starts = ids[:, None] * seq
    places = starts + np.arange(seq + 1)  # one more than a row: the last target is the next row's first token
    real = places < corpus.tokens
    places = np.where(real, places, 0)
    document = np.searchsorted(corpus.offsets, places, side="right") - 1
    # Of a part of the documents, places count its own tokens.
    tokens = corpus.stream[places + (corpus.begins - corpus.offsets[:-1])[document]].astype(np.int64)

    has_target = real[:, 1:] & (document[:, 1:] == document[:, :-1])
    real, places, document = real[:, :-1], places[:, :-1], document[:, :-1]
    positions = places - np.maximum(corpus.offsets[document], starts)
    return Batch(
        tokens=torch.from_numpy(np.where(real, tokens[:, :-1], 0)),
        targets=torch.from_numpy(np.where(has_target, tokens[:, 1:], IGNORE)),
        positions=torch.from_numpy(np.where(real, positions, 0)),
        document_ids=torch.from_numpy(np.where(real, document - document[:, :1], -1)),
        sample_ids=torch.from_numpy(ids.copy()),
    )
