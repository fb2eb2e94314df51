"""What usually goes wrong, the most telling first: each guess looks at the evidence and says a sentence, or None.

A guess is tested on numbers: that a sum is missing is said when the ranks' tensors, summed over that axis, are the
reference. There is a planted fault for every hypothesis.
"""

from __future__ import annotations

from collections.abc import Callable

from ..evidence import Evidence
from . import batch, loss, pipeline, sequence, tensors, update

Guess = Callable[[Evidence], str | None]

GUESSES: tuple[Guess, ...] = (
    update.bytes_differ, update.copies_differ, batch.never_came, batch.nothing_there, batch.rows_of_another_rank,
    batch.rows_of_another_microbatch, batch.field_is_wrong, update.target_count, update.learning_rate_of,
    update.norm_of, update.stale, update.decay, tensors.drawn_alike, tensors.sum_missing, tensors.rounded,
    loss.weight_of, loss.loss_of, tensors.from_another_microbatch, pipeline.stages_in_another_order,
    tensors.one_factor, sequence.tokens_of_another_rank, sequence.tokens_in_other_places, tensors.wrong_rows,
    tensors.drawn_otherwise, tensors.step_before, tensors.made_of_microbatches, pipeline.one_use,
    pipeline.factors_mixed, tensors.across_documents,
)  # fmt: skip
SCHEDULE: tuple[Guess, ...] = (
    batch.never_came, batch.rows_of_another_microbatch, tensors.from_another_microbatch,
    pipeline.stages_in_another_order, pipeline.factors_mixed,
)  # fmt: skip
"""Those that put it down to who does what when."""
