"""What is kept in which type, and how many bytes a parameter that takes.

    compute         weights as forward and backward read them, activations and their gradients
    accumulate      gradients, added up over microbatches
    reduce          the same on their way through sums over dp
    fp32            the optimizer's weights (those of compute, where compute is fp32) and its two moments

fp16 has the bits of fp32's sums but not their range: 6e-8 to 65504. So the loss is multiplied by a scale before backward,
gradients are divided by it after their sums, and a step that overflows is skipped. Micikevicius et al., "Mixed Precision
Training", 2018, section 3.
"""

from __future__ import annotations

from .plan import Plan

ELEMENT = {"fp32": 4, "bf16": 2, "fp16": 2}
"""Bytes of an element."""
WIDE = 4
"""Bytes of an element of master weights, of a moment, and of what a norm or the loss computes in fp32."""
BITS = {"fp32": 24, "bf16": 8, "fp16": 11}
"""Of the significand."""


def kept(plan: Plan) -> list[tuple[str, str, int]]:
    """(what, type, bytes a parameter) of a rank that shares nothing."""
    rows: list[tuple[str, str, int]] = [("weights", plan.compute, ELEMENT[plan.compute])]
    if ELEMENT[plan.compute] < WIDE:
        rows.append(("master weights", "fp32", WIDE))
    rows.append(("gradients", plan.accumulates, ELEMENT[plan.accumulates]))
    if plan.reduces != plan.accumulates:
        rows.append(("gradients on their way", plan.reduces, ELEMENT[plan.reduces]))
    return [*rows, ("two moments", "fp32", 2 * WIDE)]
