"""Guesses about one tensor: sums, factors, slices, draws, precision, and what a gradient is made of."""

from __future__ import annotations

import math

import torch

from ...runtime.hf.initial import draw
from ...runtime.hf.read import build_on_meta
from ..evidence import CLOSE, Evidence, ranks_in_words
from ..places import PARTS, slices_of
from ..reference import computing


def sum_missing(e: Evidence) -> str | None:
    """Over one axis, or several: the group's tensors add up to the reference."""
    if e.place.quantity in ("batch", "tokens", "lr", "clip") or not e.wrong:
        return None
    for axes in e.axes:
        groups = {e.mesh.group(rank, *axes) for rank in e.wrong}
        if not all(_adds_up(e, group) for group in groups):
            continue
        over, n = " and ".join(axes), e.mesh.degree(*axes)
        first = min(groups)
        if all(e.same(e.held[rank], e.held[first[0]]) for rank in first):
            return f"averaged over {over} instead of summed: every rank has 1/{n} of it"
        return f"the sum over {over} is missing: added up over {over}, what the ranks have is the reference"
    return None


def _adds_up(e: Evidence, group: tuple[int, ...]) -> bool:
    first = group[0]
    if any(
        rank not in e.held or e.boxes(rank) != e.boxes(first) or e.stretch(rank) != e.stretch(first) for rank in group
    ):
        return False
    held, own = [e.held[rank] for rank in group], e.own(e.whole, first)
    if any(tensor.shape != own.shape for tensor in held):
        return False
    return e.same(torch.stack([tensor.double() for tensor in held]).sum(0), own)


def from_another_microbatch(e: Evidence) -> str | None:
    if e.place.microbatch is None:
        return None
    for other in range(e.plan.dp * e.plan.microbatches):
        whole = e.beside(e.place.quantity, e.place.name, other)
        if other != e.place.microbatch and e.is_whole(whole):
            return f"it is that of microbatch {other}: two microbatches are mixed up on the way here"
    return None


def one_factor(e: Evidence) -> str | None:
    """The reference times a number, which may be telling."""
    ratio = e.departure.ratio
    if ratio is None or not e.is_whole(ratio * e.whole):
        return None
    if ratio == 0:
        return "it is zero: nothing arrived, or nothing was added"
    for axes in e.axes:
        n = e.mesh.degree(*axes)
        if math.isclose(ratio, n, rel_tol=1e-6):
            return f"summed twice over {' and '.join(axes)}: every rank has {n} times the reference"
    scale = e.plan.first_loss_scale
    if scale != 1 and math.isclose(ratio, scale, rel_tol=1e-6):
        return f"the scale of the loss, {scale:g}, is still in it"
    what = f"{ratio:.4g} times the reference on {ranks_in_words(e.wrong, e.mesh)}"
    return f"{what}, and what it comes from agrees: a weight or a scale is wrong"


def wrong_rows(e: Evidence) -> str | None:
    """The right numbers from the wrong rows or columns."""
    if e.place.quantity not in PARTS or not e.wrong:
        return None
    rank = e.wrong[0]
    if e.stretch(rank) is not None:
        return _wrong_share(e, rank)
    if len(e.boxes(rank)) > 1:  # slices of several parts side by side
        return None
    box = e.boxes(rank)[0]
    for dim, (start, stop) in enumerate(box):
        rows = _rows_in(e, rank, dim)
        if rows is None:
            continue
        whose = [r for r in range(e.mesh.size) if r != rank and e.boxes(r) != (box,) and _is(rows, e, r, dim)]
        if whose:
            return f"rank {rank} has the slice of rank {whose[0]}: which ranks hold which slices is mixed up"
        if rows == list(range(rows[0], rows[0] + len(rows))):
            shift = rows[0] - start
            return f"rank {rank}'s slice begins {abs(shift)} too {'early' if shift < 0 else 'late'} in dim {dim}"
        return f"rank {rank} has {_runs(rows)} (dim {dim} of the whole) in the place of {start}-{stop - 1}"
    return None


def _wrong_share(e: Evidence, rank: int) -> str | None:
    """The right numbers of another stretch of the rank's slice."""
    start, stop = e.stretch(rank) or (0, 0)
    held = e.held[rank]
    flat = slices_of(e.whole, (e.boxes(rank), None), e.sharding.parameter(e.place.name)).flatten()
    bound = max(e.departure.bound, 1e-9 * e.departure.scale)
    for place in torch.nonzero((flat - held[0]).abs() <= bound).flatten().tolist() if held.numel() else ():
        there = flat[place : place + held.numel()]
        if place != start and e.same(held, there):
            return (
                f"rank {rank} has elements {place} to {place + held.numel() - 1} of its slice in the place of {start} to "
                f"{stop - 1}: which ranks hold which shares is mixed up"
            )
    return None


def _rows_in(e: Evidence, rank: int, dim: int) -> list[int] | None:
    """Which rows of the whole (along `dim`) the rank's rows are, or None when they are none of them."""
    box, held = e.boxes(rank)[0], e.held[rank].double()
    others = tuple(slice(None) if d == dim else slice(*side) for d, side in enumerate(box))
    mine, all_rows = (x.movedim(dim, 0).unsqueeze(-1).flatten(1) for x in (held, e.whole[others].double()))
    if not mine.numel():
        return None
    # Rows are told apart by their product with one random vector, and then compared.
    probe = torch.rand(mine.shape[1], generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    sorted_keys, order = (all_rows @ probe).sort()
    above = torch.searchsorted(sorted_keys, mine @ probe).clamp(max=len(order) - 1)
    below = (above - 1).clamp(min=0)
    nearer = (sorted_keys[below] - mine @ probe).abs() < (sorted_keys[above] - mine @ probe).abs()
    rows = order[torch.where(nearer, below, above)]
    return rows.tolist() if e.same(mine, all_rows[rows]) else None


def _is(rows: list[int], e: Evidence, rank: int, dim: int) -> bool:
    boxes = e.boxes(rank)
    return len(boxes) == 1 and rows == list(range(*boxes[0][dim]))


def _runs(rows: list[int]) -> str:
    """[0, 1, 2, 8, 9] as '0-2, 8-9'."""
    starts = [i for i, row in enumerate(rows) if i == 0 or row != rows[i - 1] + 1]
    return ", ".join(f"{rows[a]}-{rows[b - 1]}" for a, b in zip(starts, [*starts[1:], len(rows)], strict=True))


def drawn_alike(e: Evidence) -> str | None:
    if e.place.quantity != "initial weight" or not e.wrong:
        return None
    values = [e.held[rank] for rank in {e.boxes(rank): rank for rank in e.held}.values()]
    if len(values) < 2 or not all(e.same(value, values[0]) for value in values[1:]):
        return None
    return "ranks with different slices have the same numbers: each drew its own instead of cutting it from the whole"


def drawn_otherwise(e: Evidence) -> str | None:
    """Drawn from another seed."""
    if e.model.weights is not None:  # they are read
        return None
    if e.place.quantity != "initial weight" or not e.wrong:
        return None
    module, _, tensor = e.place.name.rpartition(".")
    for seed in range(e.plan.seed + 1, e.plan.seed + e.mesh.size):
        with computing(e.numerics):  # wide, the draw is too
            model = build_on_meta(e.model.config)
            drawn = dict(draw(model, module, model.get_submodule(module), seed))
        if e.is_whole(drawn[tensor]):
            on = ranks_in_words(e.wrong, e.mesh)
            return (
                f"it is what seed {seed} gives, on {on}, and the run's is {e.plan.seed}: the seed depends on the rank"
            )
    return None


def rounded(e: Evidence) -> str | None:
    """In the wide pass nothing is narrow; numbers that all fit a narrow type have been through it."""
    if e.numerics != "wide" or not e.whole.is_floating_point():
        return None
    for name, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
        near = float(torch.finfo(dtype).eps) * 4 * e.departure.scale
        if e.departure.deviation <= near and e.fits(lambda r, t=dtype: bool((e.held[r] == e.held[r].to(t)).all())):  # type: ignore[misc]
            return f"it has been through {name}: all of its numbers are {name} numbers near the right ones"
    return None


def step_before(e: Evidence) -> str | None:
    """What is too much is a multiple of the gradient that the step before used."""
    before = e.before("clipped gradient") if e.place.quantity == "gradient" else None
    if before is None or not e.wrong:
        return None
    rank = e.wrong[0]
    kept = e.own(before, rank).double()
    square = float(kept.square().sum())
    factor = float(((e.held[rank] - e.own(e.whole, rank)) * kept).sum()) / square if square else 0.0
    if not factor or not e.is_whole(e.whole + factor * before):
        return None
    return f"the step before is still in it: {factor:.4g} times its gradient is too much"


def made_of_microbatches(e: Evidence) -> str | None:
    """A gradient as a sum of the microbatches' gradients, each with a factor that should be 1."""
    if e.place.quantity != "gradient" or not e.wrong:
        return None
    wholes = [e.beside("microbatch gradient", e.place.name, k) for k in range(e.plan.dp * e.plan.microbatches)]
    pieces = {k: whole for k, whole in enumerate(wholes) if whole is not None and bool(whole.any())}
    if not pieces:
        return None
    found = {}
    for rank in e.wrong:
        terms = torch.stack([e.own(whole, rank).double().flatten() for whole in pieces.values()], 1)
        held = e.held[rank].double().flatten()
        factors = torch.linalg.lstsq(terms, held.unsqueeze(1)).solution.squeeze(1)
        if not e.same(terms @ factors, held):
            return None
        found[rank] = dict(zip(pieces, factors.tolist(), strict=True))
    missing = {rank: [k for k, f in mine.items() if abs(f) < CLOSE] for rank, mine in found.items()}
    m = e.plan.microbatches
    # What came too late for the sum is in the rank's own gradient all the same.
    others_last = all(
        k % m == m - 1 and k // m != e.mesh.coordinate(rank)["dp"] for rank, lacking in missing.items() for k in lacking
    )
    if others_last and all(missing.values()):
        lacks = "; ".join(
            f"rank {rank}'s lacks microbatch {', '.join(map(str, lacking))}" for rank, lacking in missing.items()
        )
        return f"it left before its last gradient was in: {lacks}"
    rank = e.wrong[0]
    terms_said = ", ".join(f"{round(f, 9) + 0:.4g} x microbatch {k}" for k, f in found[rank].items())
    return f"it is {terms_said} (rank {rank}), and each should count once"


def across_documents(e: Evidence) -> str | None:
    """A row's first document is right and only what comes after it is wrong."""
    documents = e.beside("batch", "document_ids", e.place.microbatch)
    if e.place.quantity not in ("output", "input") or documents is None or e.whole.shape[:2] != documents.shape:
        return None

    def only_later(rank: int) -> bool:
        off = (e.held[rank] - e.own(e.whole, rank)).abs() > e.departure.bound
        of_each = documents.reshape(*documents.shape, *[1] * (e.whole.dim() - 2)).expand(e.whole.shape)
        return not bool(off[e.own(of_each, rank) == 0].any())

    if not e.fits(only_later):
        return None
    return "right in the first document of each row and wrong in those after it: attention looks across documents"
