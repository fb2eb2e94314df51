"""Rows of whole documents, filled by best fit, and an order in which the rows of a step cost the same.

    documents           a a a   b b b b b   c c   d d d d d d d       E, the end, is one of their tokens
    rows of 5           b b b b b | d d d d d | a a a c c | d d . . .
    cost                    25          25          13          4     sum of the squares of the pieces' lengths

A document longer than a row is cut into full rows and a rest, as packing.py cuts it; all else stays whole. The longest
piece is placed first, each in the row with the least room that still takes it (best fit decreasing; Johnson et al.,
"Worst-case performance bounds for simple one-dimensional packing algorithms", 1974). The rows depend on the documents
and on seq alone; `even` puts them in the order of one epoch.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from ..batch import IGNORE, Batch
from .tokens import Corpus

GROUPS = 1 << 62
"""Added to the epoch where groups are drawn, so that they do not come in the order of the rows."""

Draw = Callable[[int, int, int], np.ndarray]
"""(count, seed, epoch) -> the numbers 0 to count - 1 in an order of their own."""


class BestFit:
    """The packing `sorted`: `count` rows of `seq` tokens, `costs` [count] int64, and `take`."""

    def __init__(self, corpus: Corpus, seq: int) -> None:
        self._stream, self._seq = corpus.stream, seq
        begins, lengths, ends = _pieces(corpus, seq)
        longest_first = np.argsort(-lengths, kind="stable")
        rows = fit(lengths[longest_first], seq)
        pieces = longest_first[np.argsort(rows, kind="stable")]
        self._begins, self._lengths, self._ends = begins[pieces], lengths[pieces], ends[pieces]
        self._firsts = np.searchsorted(np.sort(rows), np.arange(rows.max(initial=-1) + 2))
        self.count = len(self._firsts) - 1
        self.costs = np.add.reduceat(self._lengths**2, self._firsts[:-1]) if self.count else np.zeros(0, np.int64)

    def take(self, ids: np.ndarray) -> Batch:
        """The rows with the sample ids `ids` [rows], in that order: [rows, seq]. IndexError for no such row."""
        ids = np.asarray(ids, np.int64)
        if ids.size and not 0 <= ids.min() <= ids.max() < self.count:
            raise IndexError(f"sample ids {ids.min()} to {ids.max()}, but there are {self.count} rows of {self._seq}")
        shape = (len(ids), self._seq)
        tokens, positions = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        targets, documents = np.full(shape, IGNORE, np.int64), np.full(shape, -1, np.int64)
        for row, number in enumerate(ids):
            at = 0
            for place, piece in enumerate(range(self._firsts[number], self._firsts[number + 1])):
                begin, length = int(self._begins[piece]), int(self._lengths[piece])
                # The last token of a piece has its target all the same, where the document goes on.
                learnt = min(length, int(self._ends[piece]) - begin - 1)
                tokens[row, at : at + length] = self._stream[begin : begin + length]
                targets[row, at : at + learnt] = self._stream[begin + 1 : begin + 1 + learnt]
                positions[row, at : at + length] = np.arange(length)
                documents[row, at : at + length] = place
                at += length
        return Batch(*map(torch.from_numpy, (tokens, targets, positions, documents, ids.copy())))


def _pieces(corpus: Corpus, seq: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Where each piece begins in the stream, its length, and where its document ends. An end token that would be a piece
    by itself has no target, and is left out."""
    counts = -(-corpus.lengths // seq)
    document = np.repeat(np.arange(len(counts)), counts)
    within = np.arange(len(document)) - np.repeat(np.cumsum(counts) - counts, counts)
    begins = corpus.begins[document] + within * seq
    ends = (corpus.begins + corpus.lengths)[document]
    useful = ends - begins > 1
    begins, ends = begins[useful], ends[useful]
    return begins, np.minimum(seq, ends - begins), ends


def fit(lengths: np.ndarray, seq: int) -> np.ndarray:
    """The row of each piece; `lengths` fall. Rows count up from 0 in the order in which they are opened."""
    full = int(np.searchsorted(-lengths, -seq, side="right"))
    rows = np.arange(len(lengths))
    waiting: list[list[int]] = [[] for _ in range(seq + 1)]  # rows by the room that is left in them
    rooms = 0  # bit r is set when a row with room r waits
    opened = full
    for piece in range(full, len(lengths)):
        length = int(lengths[piece])
        above = rooms >> length
        if above:
            room = length + (above & -above).bit_length() - 1
            row = waiting[room].pop()
            if not waiting[room]:
                rooms ^= 1 << room
        else:
            room, row, opened = seq, opened, opened + 1
        rows[piece] = row
        if room > length:
            waiting[room - length].append(row)
            rooms |= 1 << (room - length)
    return rows


def even(costs: np.ndarray, size: int, seed: int, epoch: int, draw: Draw) -> np.ndarray:
    """The rows of one epoch in groups of `size` whose costs are close, so that however a group is dealt to ranks and
    microbatches, the shares are even. Groups come in a random order; the rows that fill no group, drawn at random too,
    come last."""
    shuffled = draw(len(costs), seed, epoch)
    whole = len(costs) - len(costs) % size
    ranked = shuffled[:whole]
    ranked = ranked[np.argsort(costs[ranked], kind="stable")].reshape(-1, size)
    # The dearest beside the cheapest: pairs are even where a group is not.
    half = size // 2
    pairs = np.stack((ranked[:, :half], ranked[:, ::-1][:, :half]), axis=-1).reshape(len(ranked), 2 * half)
    ranked = np.concatenate((pairs, ranked[:, half : size - half]), axis=1)
    return np.concatenate((ranked[draw(len(ranked), seed, epoch + GROUPS)].ravel(), shuffled[whole:]))
