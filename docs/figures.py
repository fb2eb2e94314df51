"""Regenerates the pictures and the tables of numbers of these pages from plait's own objects.

    python docs/figures.py

writes docs/figures/*.svg, and in docs/methods/*.md whatever stands between `<!-- numbers: NAME -->` and `<!-- end -->`.
tests/docs/test_figures.py compares both with the committed files, so that no page states a number that plait does not
compute.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

from plait.design.balance import WORDS, weights
from plait.design.cost.memory import kept_of, memory
from plait.design.cost.traffic import traffic
from plait.design.facts import ModelFacts, ParameterFact, Piece
from plait.design.layout import Cut, Layout
from plait.design.mesh import Mesh
from plait.design.per_token import Here, block_bytes
from plait.design.plan import Plan, stage_blocks
from plait.design.precision import kept
from plait.design.records import Timeline
from plait.design.schedule import METHODS, Action, Kind, live_microbatches, lower, make
from plait.design.sharding import needed, shard
from plait.design.simulate import simulate, unit_seconds
from plait.design.styles import STYLES
from plait.design.table import table
from plait.design.unit import Unit
from plait.report import fetching, products, schedules, sharding, shares, timeline, tokens
from plait.report.schedules import Played
from plait.report.words import percent, size

DOCS = Path(__file__).parent
HIDDEN, VOCABULARY = 256, 512
BLOCK = (
    ("self_attn.q_proj", (HIDDEN, HIDDEN), "colwise", 64),
    ("self_attn.k_proj", (HIDDEN // 2, HIDDEN), "colwise", 32),
    ("self_attn.v_proj", (HIDDEN // 2, HIDDEN), "colwise", 32),
    ("self_attn.o_proj", (HIDDEN, HIDDEN), "rowwise", 64),
    ("mlp.gate_proj", (2 * HIDDEN, HIDDEN), "colwise", 1),
    ("mlp.up_proj", (2 * HIDDEN, HIDDEN), "colwise", 1),
    ("mlp.down_proj", (HIDDEN, 2 * HIDDEN), "rowwise", 1),
    ("input_layernorm", (HIDDEN,), None, 1),
    ("post_attention_layernorm", (HIDDEN,), None, 1),
)
"""(module, shape of its weight, style, quantum) of one decoder block of the example model."""


def example_model(blocks: int = 4, vocabulary: int = VOCABULARY) -> ModelFacts:
    """A llama of hidden size 256 with 8 heads in 4 groups: what the tables of these pages count."""

    def weight(
        module: str, shape: tuple[int, ...], style: str | None, quantum: int, block: int | None
    ) -> ParameterFact:
        after = module in ("model.norm", "lm_head")
        reads = module.rpartition(".")[0] or module
        cut = {"out": 0, "in": 1}.get(STYLES[style].cuts) if style else None
        pieces = (Piece("", shape[cut or 0], quantum),)
        return ParameterFact(module, "weight", shape, block, after, style, cut, pieces, reads, len(shape) > 1)

    parameters = [weight("model.embed_tokens", (vocabulary, HIDDEN), "embedding_rowwise", 1, None)]
    for block in range(blocks):
        parameters += [weight(f"model.layers.{block}.{name}", *row, block) for name, *row in BLOCK]
    parameters.append(weight("model.norm", (HIDDEN,), None, 1, None))
    parameters.append(weight("lm_head", (vocabulary, HIDDEN), "colwise_gather_output", 1, None))
    return ModelFacts("llama", blocks, HIDDEN, 8, 4, vocabulary, 256, "lm_head", tuple(parameters))


def _timeline(name: str, ranks: int, microbatches: int, *, work: int = 1, reduction: int = 0) -> Timeline:
    """The textbook's clock, each microbatch taking `work` times as long and the sum of gradients `reduction` units."""

    def seconds(action: Action) -> float:
        return reduction if action.kind is Kind.REDUCE else work * unit_seconds(action)

    return simulate(lower(make(name, ranks, microbatches), reduce=reduction > 0), seconds)


def _picture(name: str) -> str:
    """4 ranks, as many microbatches up to 8 as the schedule takes, as few stages a rank."""
    most = min(8, METHODS[name].microbatches[1])
    played = schedules.play(name, 4, most)
    chunks = f", chunks {played.table.chunks}" if played.table.chunks > 1 else ""
    title = f"{name}: pp 4{chunks}, microbatches {most}"
    return timeline.svg_panels({played.caption: played.timeline}, title=title)


def _compared() -> list[Played]:
    return [one for one in schedules.compare(4, 8) if isinstance(one, Played)]


def figures() -> dict[str, str]:
    """File name -> SVG."""
    found = {f"{name}.svg": _picture(name) for name in METHODS}
    found["schedules.svg"] = timeline.svg_panels(
        {f"{one.table.name}: {one.caption}": one.timeline for one in _compared()},
        title="pp 4, microbatches 8, one clock",
    )
    found["pipelines.svg"] = timeline.svg_panels(
        {
            f"{name}, microbatches {m}: bubble {percent(drawn.bubble)}, {drawn.seconds} units": drawn
            for name, m, drawn in (
                (name, m, _timeline(name, 4, m, work=8 // m)) for name, m in (("naive", 1), ("gpipe", 8), ("1f1b", 8))
            )
        },
        title="The same batch through 4 stages, one clock",
    )
    found["ddp.svg"] = timeline.svg(
        _timeline("1f1b", 2, 4, reduction=1), title="1f1b, pp 2 x dp 2, microbatches 4: one of the two replicas"
    )
    found["accumulation.svg"] = timeline.svg(_timeline("1f1b", 1, 4), title="1f1b: pp 1, microbatches 4")
    sharing = shard(example_model(), Plan(dp=4, zero=1)).units(0)
    found["zero.svg"] = shares.svg(
        next(u for u in sharing if u.block == 0), title="One block on dp 4: what each rank keeps"
    )
    found["zero-order.svg"] = _fetching()
    mesh = Mesh((("dp", 2), ("tp", 2)))
    for file, name, shape in (
        ("colwise", "colwise", (2 * HIDDEN, HIDDEN)),
        ("rowwise", "rowwise", (HIDDEN, 2 * HIDDEN)),
        ("vocabulary", "colwise_gather_output", (VOCABULARY, HIDDEN)),
    ):
        layout = Layout(shape, (Cut({"out": 0, "in": 1}[STYLES[name].cuts], ("tp",)),))
        found[f"{file}.svg"] = sharding.svg(layout, mesh, title=f"{name}: weight (out x in) cut over tp")
    for file, name, shape in (
        ("columns", "colwise", (2 * HIDDEN, HIDDEN)), ("rows", "rowwise", (HIDDEN, 2 * HIDDEN)),
    ):  # fmt: skip
        layout = Layout(shape, (Cut({"out": 0, "in": 1}[STYLES[name].cuts], ("tp",)),))
        found[f"{file}.svg"] = products.svg(
            layout, Mesh((("tp", 2),)), tokens=HIDDEN, title=f"{name} on tp 2: x times the transposed weight"
        )
    found["sequence.svg"] = tokens.svg((64, 64), title="One block on tp 2: who has which tokens")
    return found


def _needed(facts: ModelFacts, plan: Plan) -> list[tuple[str, Unit]]:
    """What a step needs on rank 0, in order, and for which work."""
    sharding_, row = shard(facts, plan), table(plan, facts).rows[0]
    return [
        ("forward" if action.kind is Kind.FORWARD else "backward", unit)
        for action in row
        for unit in needed(sharding_, 0, [action])
    ]


def _fetching() -> str:
    """Three blocks over three ranks; what comes before and after the blocks is not drawn."""
    facts, plan = example_model(blocks=3), Plan(dp=3, batch=3, seq=128, zero=3)
    sequence = [(work, unit) for work, unit in _needed(facts, plan) if unit.block is not None]
    names = {unit: "abc"[unit.block or 0] for _, unit in sequence}
    return fetching.svg(sequence, names, title="ZeRO-3, three blocks on dp 3: who has what, and what is fetched when")


def _markdown(head: tuple[str, ...], rows: list[tuple[object, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *(tuple(map(str, row)) for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _pipelines(name: str, counts: tuple[int, ...], *, chunks: tuple[int, ...] = (0,), own: bool = False) -> str:
    """Time, bubble and live microbatches of one schedule; `own` adds the longest that a rank is at work, from its first
    action to its last."""
    rows: list[tuple[object, ...]] = []
    for p in (2, 4, 8):
        for v in chunks:
            for m in counts:
                played = schedules.play(name, p, m, v)
                drawn, live = played.timeline, [f"{played.live[rank]:g}" for rank in (0, p - 1)]
                at_work = max(max(s.end for s in row) - min(s.start for s in row) for row in drawn.rows)
                many = (v,) if len(chunks) > 1 else ()
                longest = (f"{at_work:g}",) if own else ()
                rows.append((p, *many, m, f"{drawn.seconds:g}", *longest, percent(drawn.bubble), *live))
    many, longest = (("v",) if len(chunks) > 1 else ()), (("longest rank, F",) if own else ())
    return _markdown(("p", *many, "m", "time, F", *longest, "bubble", "live on rank 0", "live on the last rank"), rows)


def _comparison() -> str:
    """A row a schedule, its name a link to its page."""
    rows: list[tuple[object, ...]] = [
        (f"[{name}]({name}.md)", *numbers)
        for name, *numbers in (schedules.cells(schedules.row(o)) for o in _compared())
    ]
    return _markdown(schedules.HEAD, rows)


def _traffic(plan: Plan, axis: str) -> str:
    """Per rank: the calls, payload and bytes sent of one axis."""
    rows: list[tuple[object, ...]] = [
        (row.rank, row.why, row.operation, row.calls, f"{row.payload:,}", f"{int(row.sent):,}")
        for row in traffic(plan, example_model())
        if row.axis == axis
    ]
    return _markdown(("rank", "reason", "operation", "calls", "payload", "bytes sent"), rows)


@cache
def numbers() -> dict[str, str]:
    """Name -> Markdown table; the page that shows it is found by its marker."""
    example = {"batch": 8, "seq": 128}
    return {
        "naive": _pipelines("naive", (1,)),
        "gpipe": _pipelines("gpipe", (4, 8, 32)),
        "1f1b": _pipelines("1f1b", (4, 8, 32)),
        "interleaved": _pipelines("interleaved", (8, 32), chunks=(2, 4)),
        "zb-h1": _pipelines("zb-h1", (4, 8, 32), own=True),
        "zb-h2": _pipelines("zb-h2", (4, 8, 32), own=True),
        "zb-v": _pipelines("zb-v", (4, 8, 32)),
        "v-half": _pipelines("v-half", (4, 8, 32)),
        "v-min": _pipelines("v-min", (4, 8, 32)),
        "dualpipe-v": _pipelines("dualpipe-v", (8, 16, 32)),
        "dualpipe": _pipelines("dualpipe", (8, 16, 32)),
        "auto": _pipelines("auto", (4, 8, 32)),
        "schedules": _comparison(),
        "pp traffic": _traffic(Plan(**example, pp=2, microbatches=4), "pp"),
        "loss at last": _traffic(Plan(**example, pp=2, microbatches=4), "pp"),
        "loss at first": _traffic(Plan(**example, pp=2, microbatches=4, loss_at="first"), "pp"),
        "dp traffic": _traffic(Plan(**example, dp=2, microbatches=4), "dp"),
        "master traffic": _traffic(Plan(**example, dp=4, dp_method="master", microbatches=2), "dp"),
        "zero traffic": _zero_traffic(),
        "zero memory": _zero_memory(),
        "zero paper": _zero_paper(),
        "zero order": _zero_order(),
        "precision": _precision(),
        "frozen memory": _frozen_memory(),
        "tp traffic": _traffic(Plan(**example, tp=2, sp=False, microbatches=4), "tp"),
        "sp traffic": _traffic(Plan(**example, tp=2, sp=True, microbatches=4), "tp"),
        "sp memory": _sp_memory(),
        "accumulation": _pipelines_of_one((1, 4, 16)),
        "balance": _balances(),
    }


ZEROS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("none", {"zero": 0}), ("ZeRO-1", {"zero": 1}), ("ZeRO-2", {"zero": 2}), ("ZeRO-3", {"zero": 3}),
    ("ZeRO-3, keep_gathered", {"zero": 3, "keep_gathered": "yes"}),
    ("ZeRO-3, replicas 2", {"zero": 3, "replicas": 2}),
)  # fmt: skip


def _zero_traffic() -> str:
    """What rank 0 sends in a step of one microbatch, and as a multiple of the model."""
    facts, rows = example_model(), list[tuple[object, ...]]()
    for name, fields in ZEROS:
        found = [row for row in traffic(Plan(dp=4, batch=8, seq=128, **fields), facts) if row.rank == 0]
        moved = [row for row in found if row.axis in ("dp", "shard", "replica")]
        sent = sum(int(row.sent) for row in moved)
        model = 4 * facts.elements * 3 / 4
        what = ", ".join(f"{row.calls} {row.operation}" for row in moved)
        rows.append((name, what, f"{sent:,}", f"{sent / model:.3f}"))
    return _markdown(("stage", "calls", "bytes sent", "of (d - 1)/d 4 P"), rows)


def _zero_memory() -> str:
    """The fullest rank of dp 4, in bytes a parameter, and what the paper's formula gives."""
    facts, rows = example_model(blocks=32, vocabulary=8192), list[tuple[object, ...]]()
    for name, fields in ZEROS:
        bills = memory(Plan(dp=4, batch=8, seq=128, compute="bf16", **fields), facts)
        bill = max(bills, key=lambda one: sum(one.held))
        parts = (bill.weights, bill.gradients, bill.master_weights + bill.state, bill.units)
        rows.append((name, *(f"{part / facts.elements:.2f}" for part in (*parts, sum(parts)))))
    return _markdown(("stage", "weights", "gradients", "masters and state", "units on their way", "held"), rows)


def _zero_paper() -> str:
    """Gigabytes of a model of 7.5 G parameters in the paper's types, by what counts a rank's bill."""
    rows = list[tuple[object, ...]]()
    for ranks in (1, 4, 16, 64, 256, 1024):
        unit = Unit("model", 0, None, ("weight",), (7_500_000_000,), ranks)
        kept = [kept_of([unit], zero) for zero in range(4)]
        bytes_ = [2 * one.weights + 2 * one.gradients + 12 * one.state for one in kept]
        rows.append((ranks, *(f"{each / 1e9:.4g}" for each in bytes_)))
    return _markdown(("dp", "none", "ZeRO-1", "ZeRO-2", "ZeRO-3"), rows)


FROZEN: tuple[tuple[str, dict[str, Any]], ...] = (
    ("nothing is frozen", {}), ("the embedding", {"freeze": "*embed_tokens*"}),
    ("all but the last 8 blocks and what follows",
     {"freeze": "*embed_tokens*,*layers.?.*,*layers.1?.*,*layers.2[0-3].*"}),
    ("all but norms", {"train_only": "*norm*"}), ("all but the head", {"train_only": "lm_head.weight"}),
)  # fmt: skip


def _frozen_memory() -> str:
    """The fullest rank of dp 4 without ZeRO and with ZeRO-3: bytes a parameter, and kept bytes a token."""
    facts, rows = example_model(blocks=32, vocabulary=8192), list[tuple[object, ...]]()
    for name, fields in FROZEN:
        cells: list[str] = []
        for zero in (0, 3):
            plan = Plan(dp=4, batch=8, seq=128, compute="bf16", zero=zero, **fields)
            bill = max(memory(plan, facts), key=lambda one: sum(one.held))
            cells.append(f"{sum(bill.held) / facts.elements:.2f}")
        rows.append((name, *cells, f"{bill.activations // (2 * 128):,}"))
    return _markdown(("frozen", "held", "held, ZeRO-3", "kept"), rows)


def _sp_memory() -> str:
    """Bytes a token that one block keeps, with tp alone and with sp."""
    rows = list[tuple[object, ...]]()
    facts = example_model()
    for tp in (1, 2, 4):
        cells: list[str] = []
        for sp in (False, True) if tp > 1 else (False,):
            plan = Plan(tp=tp, sp=sp, batch=8, seq=128)
            here = Here(plan, facts, shard(facts, plan), 0)
            block = [fact for fact in facts.parameters if fact.block == 0]
            cells.append(f"{block_bytes(here, block, reached=True):,.0f}")
        rows.append((tp, *cells, *["-"] * (2 - len(cells))))
    return _markdown(("tp", "tp alone", "with sp"), rows)


def _zero_order() -> str:
    """What a rank of ZeRO-3 needs one after the other, and what it gathers for it, with three blocks a, b and c."""
    facts = example_model(blocks=3)
    plan = Plan(dp=2, batch=8, seq=128, zero=3)
    rows = list[tuple[object, ...]]()
    for need in fetching.needs(_needed(facts, plan)):
        unit = need.unit
        name = f"block {'abc'[unit.block]}" if unit.block is not None else unit.name
        where = f"blocks, {'first' if unit.block % 2 == 0 else 'second'}" if unit.block is not None else "ends"
        rows.append((len(rows) + 1, need.work, name, where, "gathered" if need.fetched else "still there"))
    return _markdown(("", "work", "needs", "slot", ""), rows)


def _precision() -> str:
    """What a parameter takes, by the types of compute, gradients and their sums."""
    rows = list[tuple[object, ...]]()
    for compute, accumulate, reduce in (
        ("fp32", "fp32", "fp32"), ("fp32", "fp32", "bf16"), ("bf16", "fp32", "fp32"), ("bf16", "fp32", "bf16"),
        ("bf16", "bf16", "bf16"), ("bf16", "bf16", "fp32"), ("fp16", "fp32", "fp32"), ("fp16", "fp32", "fp16"),
    ):  # fmt: skip
        plan = Plan.read({"dp": 2, "compute": compute, "accumulate": accumulate, "reduce": reduce})
        found = {what: size for what, _, size in kept(plan)}
        cells = [found.get(what, 0) or "-" for what in HELD]
        rows.append((f"`{compute}`", f"`{accumulate}`", f"`{reduce}`", *cells, sum(found.values())))
    return _markdown(("compute", "accumulate", "reduce", *HELD, "together"), rows)


HELD = ("weights", "master weights", "gradients", "gradients on their way", "two moments")


def _balances() -> str:
    """Per balance: the stages, and the largest of them by each measure."""
    facts = example_model(blocks=16, vocabulary=8192)
    rows: list[tuple[object, ...]] = []
    for balance in WORDS:
        plan = Plan(pp=4, balance=balance, seq=256)
        spans = stage_blocks(plan, facts)
        largest = []
        for what in ("parameters", "cost"):
            counts = weights(facts, what, plan.seq)
            largest.append(percent(max(sum(counts[start:stop]) for start, stop in spans) / sum(counts)))
        held = max(sum(bill.held) for bill in memory(plan, facts))
        rows.append((f"`{balance}`", ", ".join(str(b - a) for a, b in spans), *largest, size(held)))
    head = ("balance", "blocks of the stages", "most parameters", "most FLOPs", "most held by a rank")
    return _markdown(head, rows)


def _pipelines_of_one(counts: tuple[int, ...]) -> str:
    rows: list[tuple[object, ...]] = [
        (m, percent(_timeline("1f1b", 1, m).bubble), *(live_microbatches(make(n, 1, m), 0) for n in ("1f1b", "gpipe")))
        for m in counts
    ]
    return _markdown(("m", "bubble", "live, 1f1b", "live, gpipe"), rows)


def with_numbers(page: str) -> str:
    """The page with every marked table computed anew."""
    tables = numbers()
    return re.sub(
        r"<!-- numbers: (.+?) -->\n.*?<!-- end -->",
        lambda found: f"<!-- numbers: {found[1]} -->\n\n{tables[found[1]]}\n\n<!-- end -->",
        page,
        flags=re.DOTALL,
    )


def main() -> None:
    folder = DOCS / "figures"
    folder.mkdir(exist_ok=True)
    for name, picture in figures().items():
        (folder / name).write_text(picture, encoding="utf-8")
    for page in sorted((DOCS / "methods").glob("*.md")):
        page.write_text(with_numbers(page.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
