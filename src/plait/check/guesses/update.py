"""Guesses about what a step reports and how it updates: counts, norm, learning rate, decay; copies and bytes."""

from __future__ import annotations

import math

from torch import Tensor

from ...runtime.training.optimizer import learning_rate
from ..evidence import Evidence
from ..places import BYTES, REPLICAS, held_of


def bytes_differ(e: Evidence) -> str | None:
    if e.place.quantity != BYTES:
        return None
    ratio = e.departure.ratio
    if ratio is None:
        return "this is sent and was not to be"
    return f"{ratio:.4g} times the predicted bytes" if ratio != 1 else "the predicted bytes in another number of calls"


def copies_differ(e: Evidence) -> str | None:
    if e.place.quantity != REPLICAS:
        return None
    quantity, _, name = e.place.name.partition(" of ")
    copies: dict[object, list[Tensor]] = {}
    for rank, held in e.held.items():
        copies.setdefault(held_of(e.sharding, name, quantity, rank), []).append(held.double())
    apart = max(float((one - same[0]).abs().max()) for same in copies.values() for one in same)
    largest = max(float(one.abs().max()) for same in copies.values() for one in same)
    far = apart / largest if largest else apart
    return f"they are not the same bits, {far:.1e} of the largest apart: nothing brings copies together again"


def target_count(e: Evidence) -> str | None:
    if e.place.quantity != "tokens" or not e.wrong:
        return None
    held, right = int(e.held[e.wrong[0]]), int(e.whole)
    if held == e.plan.batch * e.plan.seq:
        return f"{held} counts the ignored targets too; {right} are trained on"
    return f"{held} targets are reported and {right} are trained on"


def learning_rate_of(e: Evidence) -> str | None:
    if e.place.quantity != "lr" or not e.wrong:
        return None
    done, steps = e.place.step - 1, e.plan.steps
    guesses = {f"it is the rate of {n} update{'s' * (n > 1)} later": done + n for n in range(1, steps + 1)}
    if done:
        told = "it is the rate of update {}: the schedule moves {} times a step"
        guesses = {told.format(done * n, n): done * n for n in range(2, 65)} | guesses
    for sentence, update in guesses.items():
        rate = learning_rate(e.plan, update, steps)
        if e.fits(lambda r, rate=rate: math.isclose(float(e.held[r]), rate, rel_tol=1e-9)):  # type: ignore[misc]
            return sentence
    return None


def norm_of(e: Evidence) -> str | None:
    """Copies counted, or a part of the model only."""
    if e.place.quantity not in ("norm", "clip"):
        return None

    def fits(rank: int, square: float) -> bool:
        norm = math.sqrt(square)
        if e.place.quantity == "clip":
            norm = min(1.0, e.plan.clip / (norm + 1e-6)) if e.plan.clip else 1.0
        return math.isclose(float(e.held[rank]), norm, rel_tol=1e-6)

    scale, whole = e.plan.first_loss_scale, e.beside("norm")
    if scale != 1 and whole is not None and e.fits(lambda r: fits(r, (scale * float(whole)) ** 2)):
        return f"it is that of the gradients times the scale of the loss, {scale:g}"
    found = {held: e.beside("gradient", held.name) for held in e.sharding.parameters}
    squares = {held: float(whole.double().square().sum()) for held, whole in found.items() if whole is not None}
    for axes in e.axes:
        times = {held: e.mesh.degree(*(set(axes) - held.first.grad.cut_axes - {"pp"})) for held in squares}
        counted = sum(square * times[held] for held, square in squares.items())
        if e.fits(lambda r, counted=counted: fits(r, counted)):  # type: ignore[misc]
            return f"copies over {' and '.join(axes)} are each counted"

    def of(rank: int) -> float:
        own = [e.mine(found[held], held.name, "gradient", rank) for held in squares]  # type: ignore[arg-type]
        return sum(float(one.double().square().sum()) for one in own if one is not None)

    if e.fits(lambda r: fits(r, of(r))):
        return "each rank goes by the norm of what it holds, and not by that of the whole model"
    return None


def stale(e: Evidence) -> str | None:
    """What it was before the update."""
    if e.place.quantity not in ("weight", "published weight"):
        return None
    before = e.before(e.place.quantity)
    if before is None:
        return None
    if e.plan.zero and e.fits(lambda r: _partly(e, before, r)):
        return "only this rank's own share is new: the others' are from before the update, and have not been gathered"
    if not e.fits(lambda r: e.same(e.held[r], e.own(before, r).to(e.held[r].dtype))):
        return None
    return "it is still the weight from before the update: the update does not reach it"


def _partly(e: Evidence, before: Tensor, rank: int) -> bool:
    """Some elements are those after the update, the others those before it."""
    held, new, old = e.held[rank].double(), e.own(e.whole, rank).double(), e.own(before, rank).double()
    bound = max(e.departure.bound, 1e-9)
    is_new, is_old = (held - new).abs() <= bound, (held - old).abs() <= bound
    return bool((is_new | is_old).all()) and bool((is_new & ~is_old).any()) and bool((is_old & ~is_new).any())


def decay(e: Evidence) -> str | None:
    """The difference is the weight decay itself."""
    if e.place.quantity not in ("weight", "published weight"):
        return None
    before, lr = e.before(e.place.quantity), e.beside("lr")
    if before is None or lr is None:
        return None
    step = float(lr) * e.plan.weight_decay * before
    if not e.sharding.parameter(e.place.name).first.trains:
        decayed = e.is_whole(before - step)
        return "it is frozen, and decayed: the difference is lr x weight_decay x weight" if decayed else None
    for sign, words in ((-1, "decayed, and its kind is not to be"), (1, "not decayed, and its kind is to be")):
        if e.is_whole(e.whole + sign * step):
            return f"it is {words}: the difference is lr x weight_decay x weight"
    return None
