"""Who holds what, for the page of a run: a card a place on the pp axis, its ranks in the colour of
their slice."""

from __future__ import annotations

from ..design.records import Holding
from ..design.sharding import holdings, shard
from .markup import key, left_out, paragraph, said, section, some, table
from .record import RunRecord
from .sharding import ITEM, deal, line, modules
from .words import counted, runs, size

MOST_CARDS = 16
MOST_CELLS = 128
"""Ranks drawn on one card."""
COLOURS = 4


def holders(record: RunRecord) -> str:
    """The section."""
    plan, facts = record.plan, record.facts
    sharding = shard(facts, plan)
    mesh = sharding.mesh
    rows: dict[int, list[Holding]] = {rank: [] for rank in range(mesh.size)}
    for row in holdings(sharding, ITEM):
        rows[row.rank].append(row)
    held = sum(row.bytes for ours in rows.values() for row in ours)
    once = facts.elements * ITEM
    about = (
        f"{facts.elements / 1e6:,.1f} M parameters over {counted(mesh.size, 'rank')}, {mesh}: {size(once)} of weights "
        f"once, {size(held)} over all ranks. "
    )
    if plan.dp > 1:
        shared = {
            1: "optimizer state", 2: "gradients and optimizer state", 3: "weights, gradients and optimizer state"
        }.get(sharding.zero)  # fmt: skip
        about += (
            f"The {plan.dp} rows of a card compute with the same, and share out {shared} (ZeRO-{sharding.zero}). "
            if shared
            else f"The {plan.dp} rows of a card are replicas, which hold the same. "
        )
    if plan.tp > 1:
        about += f"Its {plan.tp} columns are slices of the tensors that tp cuts; norms are whole on each."
    dealt = deal(plan, facts)
    cards = []
    for place in some(plan.pp, MOST_CARDS):
        ours = rows[mesh.rank(pp=place)]
        title = f"pp {place}"
        if plan.stages > plan.pp:
            title += f": stages {runs(sharding.stages_at(place))}"
        cards.append(_card(record, place, title, modules(sharding, ours, spelt=True), sum(row.bytes for row in ours)))
    head = ("rank", *mesh.names, "holds", "slice", "cut/whole", "parameters", "bytes", "copies")
    listed = [line(sharding, rank, rows[rank]) for rank in some(mesh.size)]
    colours = [(f"slice{place}", f"tp {place}") for place in range(min(plan.tp, COLOURS))]
    return section(
        "layout", "Layout",
        paragraph(about.strip()),
        paragraph(f"{dealt[0].upper()}{dealt[1:]}.") if dealt else "",
        key(colours) if 1 < plan.tp <= COLOURS else "",
        f'<div class="stages">{"".join(cards)}</div>',
        left_out(plan.pp, "pipeline ranks", MOST_CARDS),
        table(head, listed, name="Numbers: each rank", words=(len(mesh.names) + 1, len(mesh.names) + 2)),
        paragraph("cut/whole: tensors cut, and held whole; copies: ranks with the same slice. Bytes of fp32.", "note"),
        left_out(mesh.size, "ranks"),
    )  # fmt: skip


def _card(record: RunRecord, place: int, named: str, names: str, held: int) -> str:
    plan, mesh = record.plan, record.plan.mesh
    head = "".join(f"<th>tp {tp}</th>" for tp in range(plan.tp)) if plan.tp > 1 else ""
    lines = [f"<tr>{'<th></th>' if plan.dp > 1 else ''}{head}</tr>"] if head else []
    shown = max(1, MOST_CELLS // plan.tp)
    for dp in range(min(plan.dp, shown)):
        cells = [f"<th>dp {dp}</th>"] if plan.dp > 1 else []
        for tp in range(plan.tp):
            rank = mesh.rank(pp=place, dp=dp, tp=tp)
            title = said(f"rank {rank}: pp {place}, dp {dp}, tp {tp}; {names}; slice {tp + 1} of {plan.tp}")
            cells.append(f'<td class="slice{tp % COLOURS}" title="{title}">{rank}</td>')
        lines.append(f"<tr>{''.join(cells)}</tr>")
    more = f"<p>and {plan.dp - shown:,} more replicas</p>" if plan.dp > shown else ""
    title = f"<h3>{said(named)}</h3>" if plan.pp > 1 else ""
    each = f"{size(held)} a rank"
    ranks = f'<table class="ranks">{"".join(lines)}</table>'
    return f'<div class="stage">{title}<p>{said(names)}<br>{each}</p>{ranks}{more}</div>'
