"""The guesses of cause.py, the most telling first: each looks at the evidence and says a sentence, or None."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from ..runtime.batch import IGNORE
from ..runtime.training.optimizer import learning_rate
from .cause import Evidence, order_of, ranks_in_words
from .places import BYTES, PARTS, REPLICAS, Place

Guess = Callable[[Evidence], str | None]


def bytes_differ(e: Evidence) -> str | None:
    if e.place.quantity != BYTES:
        return None
    ratio = e.departure.ratio
    if ratio is None:
        return "this is sent and was not to be"
    if ratio == 0:
        return "this was to be sent and is not"
    return f"{ratio:.4g} times the predicted bytes, or another number of calls"


def copies_differ(e: Evidence) -> str | None:
    if e.place.quantity != REPLICAS:
        return None
    return "ranks that hold one and the same slice do not hold the same bits: they drift apart, step by step"


def batch_item(e: Evidence) -> str | None:
    """Another microbatch's rows, another rank's rows, shifted targets, or targets that should be ignored."""
    if e.place.quantity != "batch" or e.place.microbatch is None:
        return None
    mine, m = e.place.microbatch, e.plan.microbatches
    for other in range(e.plan.dp * m):
        rows = e.reference(Place(e.place.step, "batch", e.place.name, other))
        if other != mine and rows is not None and e.all_wrong(lambda r, rows=rows: e.same(e.held[r], rows)):  # type: ignore[misc]
            if other // m != mine // m:
                return f"these are rows of dp rank {other // m}: the rank reads another rank's samples"
            return f"these are the rows of microbatch {other}: the microbatches are swapped, or one is used twice"
    if e.place.name == "targets":
        return _targets(e)
    return "the rows are none of this step's"


def _targets(e: Evidence) -> str | None:
    for step in (-1, 1):
        if e.all_wrong(lambda r, step=step: torch.equal(e.held[r], e.whole.roll(step, 1))):  # type: ignore[misc]
            return "the targets are shifted by one token more than they should be"
    ignored = e.whole == IGNORE
    if e.all_wrong(lambda r: torch.equal(e.held[r][~ignored], e.whole[~ignored])):
        return "targets that are to be ignored (padding, the next document's first token) are trained on"
    return "the targets are not the tokens that follow"


def absent(e: Evidence) -> str | None:
    """Nothing there, or something of another shape, or not a number."""
    if e.departure.deviation != float("inf"):
        return None
    place = e.place
    if not e.departure.ranks:
        return "no rank has it"
    for rank in e.departure.ranks:
        held = e.held.get(rank)
        if held is None:
            if place.microbatch is not None:
                return f"rank {rank} never came to it: a microbatch is dropped, or its order is not the schedule's"
            return f"rank {rank} does not have it, though the layout gives it a slice"
        own = e.own(e.whole, rank)
        if held.shape != own.shape:
            return f"rank {rank} has {list(held.shape)} where the layout gives it {list(own.shape)}"
    return "it holds numbers that are not finite"


def target_count(e: Evidence) -> str | None:
    if e.place.quantity != "tokens" or not e.wrong:
        return None
    held, right = int(e.held[e.wrong[0]]), int(e.whole)
    rows = e.reference(Place(e.place.step, "batch", "targets", 0))
    everything = 0 if rows is None else rows.numel() * e.plan.dp * e.plan.microbatches
    if held == everything:
        return f"{held} counts the ignored targets too; {right} are trained on"
    if right and held % right == 0:
        return f"{held} is {held // right} times {right}: copies of a row are counted on several ranks"
    return f"{held} targets are counted and {right} are there: some rank's rows are left out, or counted twice"


def learning_rate_of(e: Evidence) -> str | None:
    if e.place.quantity != "lr" or not e.wrong:
        return None
    for factor in range(2, 65):
        guess = learning_rate(e.plan, (e.place.step - 1) * factor, e.plan.steps)
        if e.all_wrong(lambda r, guess=guess: math.isclose(float(e.held[r]), guess, rel_tol=1e-9)):  # type: ignore[misc]
            return f"it is the rate of update {(e.place.step - 1) * factor}: the schedule moves {factor} times a step"
    for later in range(1, e.plan.steps + 1):
        guess = learning_rate(e.plan, e.place.step - 1 + later, e.plan.steps)
        if e.all_wrong(lambda r, guess=guess: math.isclose(float(e.held[r]), guess, rel_tol=1e-9)):  # type: ignore[misc]
            return f"it is the rate of {later} update{'s' if later > 1 else ''} later"
    return "it depends on the layout or on the rank"


def norm_of(e: Evidence) -> str | None:
    """Copies counted, or a part of the model only."""
    if e.place.quantity not in ("norm", "clip"):
        return None
    squares: dict[str, float] = {}
    for part in e.sharding.parameters:
        gradient = e.reference(Place(e.place.step, "gradient", part.name))
        squares[part.name] = 0.0 if gradient is None else float(gradient.double().square().sum())

    def told(norm: float) -> float:
        if e.place.quantity == "norm":
            return norm
        return min(1.0, e.plan.clip / (norm + 1e-6)) if e.plan.clip else 1.0

    def fits(rank: int, norm: float) -> bool:
        return math.isclose(float(e.held[rank]), told(norm), rel_tol=1e-6)

    def of_stage(rank: int) -> float:
        stage = e.mesh.coordinate(rank)["pp"]
        return math.sqrt(sum(squares[part.name] for part in e.sharding.on_stage(stage)))

    for axes in e.axes:
        counted = 0.0
        for part in e.sharding.parameters:
            cut = set(part.first.grad.cut_axes)
            counted += squares[part.name] * e.mesh.degree(*(axis for axis in axes if axis not in cut and axis != "pp"))
        if e.all_wrong(lambda r, counted=counted: fits(r, math.sqrt(counted))):  # type: ignore[misc]
            return f"whole copies over {' and '.join(axes)} are each counted"
    if e.all_wrong(lambda r: fits(r, of_stage(r))):
        return "each stage goes by the norm of its own gradients and not by that of the whole model"
    return "not every slice is counted once"


def stale(e: Evidence) -> str | None:
    """What it was before the update."""
    earlier = {"weight": "initial weight", "published weight": "initial weight"}.get(e.place.quantity)
    if earlier is None:
        return None
    if e.place.step > 1:
        earlier = e.place.quantity
    before = e.reference(Place(e.place.step - 1, earlier, e.place.name))
    if before is not None and e.all_wrong(lambda r: e.same(e.held[r], e.own(before, r).to(e.held[r].dtype))):
        return "it is still the weight from before the update: the update does not reach it"
    return None


def decay(e: Evidence) -> str | None:
    """The difference is the weight decay itself."""
    if e.place.quantity != "weight" or not e.wrong:
        return None
    earlier = "initial weight" if e.place.step == 1 else "weight"
    before, lr = e.reference(Place(e.place.step - 1, earlier, e.place.name)), e.reference(Place(e.place.step, "lr"))
    if before is None or lr is None:
        return None
    step = float(lr) * e.plan.weight_decay * before
    for sign, words in ((-1, "decayed, and its kind is not to be"), (1, "not decayed, and its kind is to be")):
        if e.all_wrong(lambda r, sign=sign: e.same(e.held[r], e.own(e.whole + sign * step, r))):  # type: ignore[misc]
            return f"it is {words}: the difference is lr x weight_decay x weight"
    return None


def missing_sum(e: Evidence) -> str | None:
    """Over one axis, or several: the group's tensors add up to the reference."""
    if e.place.quantity in ("batch", "tokens", "lr", "clip") or not e.wrong:
        return None
    for axes in e.axes:
        groups = {e.mesh.group(rank, *axes) for rank in e.wrong}
        if not all(_add_up(e, group) for group in groups):
            continue
        over, n = " and ".join(axes), e.mesh.degree(*axes)
        first = min(groups)
        if all(e.same(e.held[rank], e.held[first[0]]) for rank in first):
            return f"averaged over {over} instead of summed: every rank has 1/{n} of it"
        return f"the sum over {over} is missing: added up over {over}, what the ranks have is the reference"
    return None


def _add_up(e: Evidence, group: tuple[int, ...]) -> bool:
    held = [e.held.get(rank) for rank in group]
    if any(tensor is None for tensor in held) or any(e.box(rank) != e.box(group[0]) for rank in group):
        return False
    own = e.own(e.whole, group[0])
    if any(tensor.shape != own.shape for tensor in held):  # type: ignore[union-attr]
        return False
    total: Tensor = torch.stack([t.double() for t in held]).sum(0)  # type: ignore[union-attr]
    return e.same(total, own)


def repeated_sum(e: Evidence) -> str | None:
    """A whole number of times the reference."""
    if not _scaled(e) or e.departure.ratio is None:
        return None
    for axes in e.axes:
        n = e.mesh.degree(*axes)
        if math.isclose(e.departure.ratio, n, rel_tol=1e-6):
            also = " (or accumulation is not scaled)" if n == e.plan.microbatches else ""
            return f"summed twice over {' and '.join(axes)}: every rank has {n} times the reference{also}"
    m = e.plan.microbatches
    if m > 1 and math.isclose(e.departure.ratio, m, rel_tol=1e-6):
        return f"{m} times the reference, as many as there are microbatches: accumulation is not scaled"
    if m > 1 and math.isclose(e.departure.ratio, 1 / m, rel_tol=1e-6):
        return f"1/{m} of the reference: divided by the number of microbatches once more"
    return None


def same_factor(e: Evidence) -> str | None:
    ratio = e.departure.ratio
    if not _scaled(e) or ratio is None:
        return None
    if ratio == 0:
        return "it is zero: nothing arrived, or nothing was added"
    place = e.place
    if place.microbatch is not None and place.quantity in ("share", "output gradient"):
        return f"this microbatch is weighted {ratio:.4g} times as much as its share of the target tokens"
    return f"right but for one factor, {ratio:.4g}, on {ranks_in_words(e.wrong, e.mesh)}: a weight or a scale is wrong"


def _scaled(e: Evidence) -> bool:
    if not e.wrong or not e.whole.is_floating_point() or e.whole.numel() < 1:
        return False
    ratio = e.departure.ratio
    return ratio is not None and e.all_wrong(lambda r: e.same(e.held[r], ratio * e.own(e.whole, r)))


def other_microbatch(e: Evidence) -> str | None:
    if e.place.microbatch is None:
        return None
    for other in range(e.plan.dp * e.plan.microbatches):
        whole = e.reference(Place(e.place.step, e.place.quantity, e.place.name, other))
        if other == e.place.microbatch or whole is None or whole.shape != e.whole.shape:
            continue
        if e.all_wrong(lambda r, whole=whole: e.same(e.held[r], e.own(whole, r))):  # type: ignore[misc]
            return f"it is that of microbatch {other}: two microbatches are mixed up on the way here"
    return None


def shifted_slice(e: Evidence) -> str | None:
    """The right numbers from the wrong rows."""
    if e.place.quantity not in PARTS or not e.wrong:
        return None
    rank = e.wrong[0]
    box, held = e.box(rank), e.held[rank]
    assert box is not None
    for other in range(e.mesh.size):
        theirs = e.box(other)
        if theirs is not None and theirs != box and e.same(held, e.whole[tuple(slice(*side) for side in theirs)]):
            return f"rank {rank} has the slice of rank {other}: which ranks hold which slices is mixed up"
    for dim, (start, stop) in enumerate(box):
        for shift in (shift for by in range(1, 65) for shift in (-by, by)):
            if start + shift < 0 or stop + shift > e.whole.shape[dim]:
                continue
            moved = [*box[:dim], (start + shift, stop + shift), *box[dim + 1 :]]
            if e.same(held, e.whole[tuple(slice(*side) for side in moved)]):
                return f"rank {rank}'s slice begins {abs(shift)} too {'early' if shift < 0 else 'late'} in dim {dim}"
    return None


def drawn_alike(e: Evidence) -> str | None:
    if e.place.quantity != "initial weight" or not e.wrong:
        return None
    by_box = {e.box(rank): rank for rank in e.held}
    values = [e.held[rank] for rank in by_box.values()]
    if len(values) > 1 and all(e.same(value, values[0]) for value in values[1:]):
        return (
            "ranks with different slices have the same numbers: each drew its own instead of cutting it from the whole"
        )
    return "it is not the tensor that seed and name give: another seed, another name, or another rule"


def not_the_same_over(e: Evidence) -> str | None:
    """Ranks of one group disagree about what should be one tensor."""
    if not e.wrong or e.place.quantity not in PARTS:
        return None
    for axis in ("dp", "tp"):
        for rank in e.wrong:
            group = [r for r in e.mesh.group(rank, axis) if e.box(r) == e.box(rank) and r in e.held]
            if len(group) > 1 and any(not e.same(e.held[r], e.held[group[0]]) for r in group):
                early = ", or it left before its last gradient was in" if e.place.quantity == "gradient" else ""
                return f"the ranks of one {axis} group disagree: part of it is not summed over {axis}{early}"
    return None


def heads(e: Evidence) -> str | None:
    """Attention's inputs agree and what comes out of it does not."""
    if e.place.quantity != "output" or e.place.microbatch is None:
        return None
    keys = order_of(e.folder, e.numerics, e.place.step)
    before = [Place.of(e.place.step, key) for key in keys[: keys.index(e.place.key)]]
    last = next((place for place in reversed(before) if place.quantity == "output"), None)
    parent, _, leaf = e.place.name.rpartition(".")
    if last is None or last.name.rpartition(".")[0] != parent or not leaf.startswith(("o_", "out", "c_proj", "dense")):
        return None
    return (
        f"{parent}'s queries, keys and values agree and its output does not: heads read the wrong KV head, or the mask, "
        f"the positions or the scale is wrong"
    )


GUESSES: tuple[Guess, ...] = (
    bytes_differ, copies_differ, absent, batch_item, target_count, learning_rate_of, norm_of, stale, decay, missing_sum,
    repeated_sum, other_microbatch, same_factor, shifted_slice, drawn_alike, not_the_same_over, heads,
)  # fmt: skip
