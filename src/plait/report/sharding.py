"""Which rank holds what: a table of the whole model, and a drawing of one tensor."""

from __future__ import annotations

import math

from rich import box as boxes
from rich.table import Table

from ..design.balance import UNIFORM, WORDS, weights, written
from ..design.errors import listed
from ..design.facts import ModelFacts
from ..design.layout import Box, Layout, box_shape
from ..design.mesh import Mesh
from ..design.plan import Plan, stage_blocks
from ..design.records import Holding
from ..design.sharding import Sharding, holdings
from . import svg as drawing
from .words import counted, percent, runs, size

ITEM = 4
"""Bytes of a stored weight: they are fp32 whatever the type of compute."""


def work(plan: Plan, *, sp: bool) -> str:
    """'pp 2 x dp 2 x tp 2 with sp, 1f1b, 3 microbatches of 3 or 2 x 128 tokens'."""
    rows = listed(dict.fromkeys(plan.microbatch_rows))
    return f"{layout(plan, sp=sp)} of {rows} x {plan.seq} tokens{_types(plan)}"


def _types(plan: Plan) -> str:
    """', in fp16, gradients in fp32, summed in bf16'; nothing where all is fp32."""
    said = f", in {plan.compute}" if plan.compute != "fp32" else ""
    if plan.accumulate != "auto":
        said += f", gradients in {plan.accumulates}"
    return said + (f", summed over ranks in {plan.reduces}" if plan.reduces != plan.accumulates else "")


def layout(plan: Plan, *, sp: bool) -> str:
    """'pp 2 x dp 2 x tp 2 with sp, ZeRO-3, 1f1b, recompute full, freeze *norm*, 3 microbatches'; whether with sp is said
    by whoever has the model (`cuts_rows`)."""
    words = [f"{plan.mesh} with sp" if sp else str(plan.mesh)]
    if plan.zero:
        words.append(f"ZeRO-{plan.zero}" + (f" in {plan.replicas} replicas" if plan.replicas > 1 else ""))
    words.append(plan.schedule)
    if plan.recompute != "none":
        every = f" every {plan.recompute_every} blocks" if plan.recompute_every > 1 else ""
        words.append(f"recompute {plan.recompute}{every}")
    if plan.chunks_loss:
        words.append(f"the loss in {plan.loss_chunks} chunks")
    words += [
        f"{field} {named}" for field, named in (("freeze", plan.freeze), ("train_only", plan.train_only)) if named
    ]
    if plan.dp_method == "master":
        words.append("all through rank 0")
    if plan.data_order == "own":
        words.append("each dp rank's data in its own order")
    return ", ".join([*words, counted(plan.microbatches, "microbatch")])


def deal(plan: Plan, facts: ModelFacts) -> str:
    """How a balance that is not uniform deals the blocks, and what that does to the largest stage; else nothing."""
    if plan.balance == UNIFORM or plan.stages == 1:
        return ""
    what = plan.balance if plan.balance in WORDS else "cost" if facts.heads else "parameters"
    counts = weights(facts, what, plan.seq)

    def largest(plan: Plan) -> str:
        return percent(max(sum(counts[start:stop]) for start, stop in stage_blocks(plan, facts)) / sum(counts))

    sizes = ", ".join(str(stop - start) for start, stop in stage_blocks(plan, facts))
    even = largest(plan.model_copy(update={"balance": UNIFORM}))
    unit = "parameters" if what == "parameters" else "FLOPs"
    said = "" if written(plan.balance) else f" (balance {plan.balance})"
    return f"blocks of the stages{said}: {sizes}; the largest has {largest(plan)} of the {unit}, {even} if uniform"


def table(sharding: Sharding, plan: Plan) -> Table:
    """One line a rank: its place on each axis, the modules and blocks it holds, its slice of the tensors that are cut,
    how many are cut and how many whole, and how many ranks hold the same."""
    mesh = sharding.mesh
    rows = holdings(sharding, ITEM)
    once = sum(math.prod(part.compute.shape) for part in sharding.parts)
    held = sum(row.bytes for row in rows)
    ranks = "1 rank" if mesh.size == 1 else f"{mesh.size} ranks"
    found = Table(
        title=f"{plan.model} over {mesh}: {ranks}",
        caption=f"{once:,} parameters, {size(once * ITEM)} once; {size(held)} over all ranks\n"
        "cut/whole: tensors cut and held whole; copies: ranks that hold the same slice",
        box=boxes.SIMPLE_HEAD,
        pad_edge=False,
        padding=0,
        title_justify="left",
        caption_justify="left",
    )
    for name in ("rank", *mesh.names):
        found.add_column(name, justify="right", no_wrap=True)
    for name in ("holds", "slice", "cut/whole"):
        found.add_column(name)
    for name in ("parameters", "bytes", "copies"):
        found.add_column(name, justify="right", no_wrap=True)
    for rank in range(mesh.size):
        found.add_row(*line(sharding, rank, [row for row in rows if row.rank == rank]))
    return found


def line(sharding: Sharding, rank: int, rows: list[Holding]) -> list[str]:
    """What a row of the table says of one rank that holds `rows`."""
    mesh = sharding.mesh
    place = mesh.coordinate(rank)
    parts = [sharding.part(row.part) for row in rows]
    axes = {axis for part in parts for axis in part.stored.cut_axes}
    whole = sum(not part.stored.cut_axes for part in parts)
    slices = [f"{place[axis] + 1} of {mesh.degree(axis)}" for axis in mesh.names if axis in axes]
    held = sum(row.bytes for row in rows)
    return [
        str(rank),
        *(str(place[name]) for name in mesh.names),
        modules(sharding, rows),
        ", ".join(slices) or "whole",
        f"{len(parts) - whole}/{whole}",
        f"{held // ITEM:,}",
        size(held),
        ", ".join(str(copies) for copies in sorted({row.copies for row in rows})),
    ]


def modules(sharding: Sharding, rows: list[Holding], *, spelt: bool = False) -> str:
    """'embed_tokens, 0-3' or '4-7, norm, lm_head': in the order of the model, the blocks as one run ('blocks 4-7' where
    it is spelt out)."""
    blocks = runs(row.block for row in rows if row.block is not None)
    if spelt:
        blocks = f"block{'' if blocks.isdigit() else 's'} {blocks}"
    names: list[str] = []
    tied: list[str] = []
    for row in rows:
        part, where = sharding.part(row.part), sharding.mesh.coordinate(row.rank)["pp"]
        here = [
            module.rpartition(".")[2]
            for (_, module), place in zip(part.uses, part.places, strict=True)
            if place == where
        ]
        # A head that is tied to the embedding comes last wherever the embedding is.
        tied += [name for name in here if len(part.uses) > 1 and name != part.uses[0][1].rpartition(".")[2]]
        name = blocks if row.block is not None else here[0]
        if name not in (*names, *tied):
            names.append(name)
    return ", ".join([*names, *dict.fromkeys(tied)])


def svg(layout: Layout, mesh: Mesh, *, title: str) -> str:
    """One tensor of one or two dims, cut over the ranks of a mesh: dim 0 downwards, dim 1 to the right, in every slice
    the ranks that hold it and its shape."""
    if len(layout.shape) not in (1, 2):
        raise ValueError(f"only tensors of 1 or 2 dims can be drawn, not of {len(layout.shape)}: {layout.shape}")
    slices: dict[Box, list[int]] = {}
    for rank, box in layout.holders(mesh):
        if 0 not in box_shape(box):
            slices.setdefault(box, []).append(rank)
    shape = (*layout.shape, 1)[:2]
    scale = 320 / max(shape)
    height, width = (max(120, length * scale) for length in shape)
    left, top = 90, 70
    drawn: list[str] = []
    for index, (box, ranks) in enumerate(slices.items()):
        rows, columns = (*box, (0, 1))[:2]
        y, bottom = (top + height * place / shape[0] for place in rows)
        x, right = (left + width * place / shape[1] for place in columns)
        middle, centre = (x + right) / 2, (y + bottom) / 2
        ink = "on-dark" if index % 4 in (1, 3) else "on-light"
        drawn.append(drawing.rect(x, y, right - x, bottom - y, f"slice{index % 4}"))
        name = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
        drawn.append(drawing.text(middle, centre - 4, name, f"middle {ink}"))
        drawn.append(drawing.text(middle, centre + 14, " x ".join(map(str, box_shape(box))), f"middle {ink}"))
    labels = [drawing.text(left - 10, top + height / 2, f"dim 0: {layout.shape[0]}", "end")]
    if len(layout.shape) == 2:
        labels.append(drawing.text(left + width / 2, top - 10, f"dim 1: {layout.shape[1]}", "middle"))
    note = f"mesh {mesh}; ranks in one slice hold copies"
    labels.append(drawing.text(left, top + height + 22, note))
    total = max(left + width + 20, 40 + 8 * len(title), left + 20 + 7 * len(note))
    return drawing.document(total, top + height + 38, title, [*drawing.group("slices", drawn), *labels])
