"""`Batch`: rows of tokens with everything that a layout needs to compute their loss, and nothing else.

No attention mask travels: runtime/hf derives whatever mask a class takes from `document_ids`.

    tokens        5  8  2  0  9  1        shapes: all [rows, seq] int64, sample_ids [rows] int64
    targets       8  2  ×  9  1  ×        × = IGNORE: the next token belongs to another document
    positions     0  1  2  0  1  2        restart in every document
    document_ids  0  0  0  1  1  1        numbered within the row; -1 = padding
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property

import torch
from torch import Tensor

from ..design.layout import balanced

IGNORE = -100
"""A target that is not trained on."""


@dataclass(frozen=True)
class Batch:
    tokens: Tensor
    targets: Tensor
    positions: Tensor
    document_ids: Tensor
    sample_ids: Tensor

    @classmethod
    def of(cls, tokens: Tensor) -> Batch:
        """One document a row, every next token a target: `tokens` is [rows, seq + 1]."""
        rows, length = tokens.shape[0], tokens.shape[1] - 1
        return cls(
            tokens=tokens[:, :-1].contiguous(),
            targets=tokens[:, 1:].contiguous(),
            positions=torch.arange(length).expand(rows, length).contiguous(),
            document_ids=torch.zeros(rows, length, dtype=torch.int64),
            sample_ids=torch.arange(rows),
        )

    @classmethod
    def joined(cls, batches: Sequence[Batch]) -> Batch:
        """The rows of all of them, in order."""
        names = [field.name for field in fields(cls)]
        return cls(**{name: torch.cat([getattr(batch, name) for batch in batches]) for name in names})

    @property
    def rows(self) -> int:
        return self.tokens.shape[0]

    @property
    def weight(self) -> Tensor:
        """How many targets are trained on: a scalar, int64."""
        return (self.targets != IGNORE).sum()

    @cached_property
    def plain(self) -> bool:
        """Whether every row is one unpadded document, so that plain causal attention is right."""
        return bool((self.document_ids == 0).all())

    @cached_property
    def restarts(self) -> bool:
        """Whether positions alone tell the documents apart: one more at each token of a document, and only there."""
        inside = (self.document_ids[:, 1:] == self.document_ids[:, :-1]) & (self.document_ids[:, 1:] >= 0)
        return bool((inside == (self.positions.diff() == 1)).all())

    def slice(self, start: int, stop: int) -> Batch:
        return Batch(**{f.name: getattr(self, f.name)[start:stop] for f in fields(self)})

    def split(self, parts: int) -> list[Batch]:
        """`parts` batches, in order; their rows differ by at most one, larger first."""
        if self.rows < parts:
            raise ValueError(f"{self.rows} rows do not split into {parts} parts of at least one")
        if parts == 1:
            return [self]
        return [self.slice(*balanced(self.rows, parts, part)) for part in range(parts)]

    def padded(self, rows: int) -> Batch:
        """This batch with rows of padding (no targets, weight 0) up to `rows`."""
        missing = rows - self.rows
        if missing <= 0:
            return self
        fill = {"tokens": 0, "targets": IGNORE, "positions": 0, "document_ids": -1, "sample_ids": -1}
        grown = {}
        for name, value in fill.items():
            tensor: Tensor = getattr(self, name)
            grown[name] = torch.cat([tensor, tensor.new_full((missing, *tensor.shape[1:]), value)])
        return Batch(**grown)

    def to(self, device: torch.device) -> Batch:
        if self.tokens.device == device:
            return self
        moved = Batch(**{f.name: getattr(self, f.name).to(device, non_blocking=True) for f in fields(self)})
        # Known before the move, so that no one asks the device for it.
        moved.__dict__.update(plain=self.plain, restarts=self.restarts)
        return moved
