"""Runs the layout beside the reference and holds what every rank has at every place against it.

Each rank compares its own slices (copies too), so nothing is gathered. Findings travel through files in the check's own
folder, not through the layout's collectives, which are what is being checked. Rank 0 joins them, names the first place
that departs, asks the ranks for their tensors there, and says what they look like (cause.py).
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from ..design.cost.traffic import traffic
from ..design.plan import Plan
from ..design.records import Traffic
from ..design.styles import STYLES
from ..runtime.batch import Batch
from ..runtime.comm.world import World
from ..runtime.data import batches as dealt
from ..runtime.hf.read import Model
from ..runtime.training.assemble import build
from ..runtime.training.replicas import digest
from ..runtime.training.step import Run
from .bill import looks_inside
from .cause import explained
from .evidence import Evidence
from .join import Findings, join
from .observe import Observer
from .places import BYTES, PARTS, Found, Place, Verdict, boxes_of, held_of, output_of, slices_of
from .reference import computing, of_pass, slack_key, step_file
from .rounding import UPDATED

POLL_S = 0.005
HELD = "held"
"""The name of what a rank has at the place that is asked for; a block's input has the block's."""


def compare(
    plan: Plan, world: World, model: Model, batches: list[Batch], folder: Path, numerics: str = "wide"
) -> Verdict:
    """The verdict over all ranks, the same on each. All ranks must call; the reference of the same `numerics` writes to
    `folder`, whose files are waited for. Ends with the first step that departs."""
    plan = of_pass(plan, numerics)
    with computing(numerics):
        run = build(plan, world, model=model, wide=numerics == "wide")
    observer = Observer(run, inside=looks_inside(plan, model.facts))
    desk = _Desk(plan, run, model, observer, folder, numerics)
    observer.initial()
    verdict = desk.judge(0, None)
    for step, batch in enumerate(batches, 1):
        if verdict.passed:
            own = dealt.own_rows(plan, world.rank)  # asked of the runtime, whose answer is on trial too
            with computing(numerics):
                observer.step(batch.slice(own.start, own.stop))
            verdict = desk.judge(step, verdict)
    return verdict


class _Desk:
    """Where one rank compares what it has with the reference's file of a step, and learns what the others found."""

    def __init__(self, plan: Plan, run: Run, model: Model, observer: Observer, folder: Path, numerics: str) -> None:
        self._plan, self._run, self._observer = plan, run, observer
        self._model, self._folder, self._numerics = model, folder, numerics
        self._world = run.world
        self._run_has_loss = run.has_loss
        self._sent = [row for row in traffic(plan, model.facts, wide=numerics == "wide") if row.rank == run.world.rank]
        self._boxes = {
            quantity: {
                held.name: boxes_of(held, quantity, plan.mesh, run.world.rank) for held in run.sharding.parameters
            }
            for quantity in PARTS
        }

    def judge(self, step: int, before: Verdict | None) -> Verdict:
        """Compares `step`; the verdict over all steps so far, the same on every rank."""
        file = step_file(self._folder, self._numerics, step)
        _wait(file)
        with safe_open(file, framework="pt") as whole:
            order, self._keys = json.loads(whole.metadata()["order"]), set(whole.keys())
            order = [row for row in order if not self._is_in_shares(Place.of(step, row[0]))]
            found = {key: self._find(step, key, whole) for key, _, _ in order if self._mine(Place.of(step, key))}
        found |= self._bytes(step) if step else {}
        name = f"{self._numerics}-{step}"
        told = {key: [mine.deviation, mine.ratio, mine.digest] for key, mine in found.items()}
        _write(self._folder / f"{name}-{self._world.rank}.json", told)
        verdict_file = self._folder / f"{name}-verdict.json"
        if self._world.rank == 0:
            self._preside(step, name, order, before, verdict_file)
        asked = self._folder / f"{name}-asked.json"
        _wait(asked)
        self._show(json.loads(asked.read_text()), self._folder / f"{name}-held-{self._world.rank}.safetensors")
        _wait(verdict_file)
        return Verdict.from_json(json.loads(verdict_file.read_text()))

    def _is_in_shares(self, place: Place) -> bool:
        """Whether no rank has a slice of what the reference has, but each a share: of a copy's output, the gradient that
        its own heads give; with sp of what experts give, their part of the sum."""
        if place.quantity == "output gradient":
            return self._run.sharding.has_copies(place.name)
        named = self._model.facts.styles.get(place.name)
        return (
            place.quantity == "output" and self._run.sharding.sp and named is not None and STYLES[named].cuts == "both"
        )

    def _mine(self, place: Place) -> bool:
        """Whether this rank has something at `place`, on paper."""
        plan, here = self._plan, self._world.coordinate
        if place.quantity in PARTS:
            # A master has all sums and updates, and the others what it publishes.
            if plan.dp_method == "master" and here["dp"] and place.quantity != "published weight":
                return False
            return bool(self._boxes[place.quantity].get(place.name))
        if place.microbatch is None:
            return True
        if place.microbatch // plan.microbatches != here["dp"]:
            return False
        if place.quantity == "share":
            return self._run_has_loss
        return place.quantity == "batch" or place.name in self._observer.modules

    def _find(self, step: int, key: str, whole: Any) -> Found:
        place = Place.of(step, key)
        held = self._observer.seen.get(key)
        if held is None:
            return Found(float("inf"))
        bits = digest(held) if place.quantity in PARTS else 0
        reference = self._own(place, held, whole.get_slice(key))
        if held.shape != reference.shape or (place.quantity in PARTS and held.dtype != reference.dtype):
            return Found(float("inf"), None, bits)
        return Found(*_difference(held.cpu(), reference, self._slack(place, whole)), bits)

    def _slack(self, place: Place, whole: Any) -> Tensor | None:
        """By how much each element of a weight's slice may be off beyond the bound (rounding.py); None for not at all."""
        key = slack_key(place.name)
        if place.quantity not in UPDATED or key not in self._keys:
            return None
        return self._slices(place, whole.get_slice(key))

    def _own(self, place: Place, held: Tensor, whole: Any) -> Tensor:
        """The slice of the reference that `held` should be."""
        shape = whole.get_shape()
        if not shape:
            scalar: Tensor = whole[...]
            return scalar
        if place.quantity in PARTS:
            return self._slices(place, whole)
        return output_of(place.name, held.shape, whole, self._run.sharding, self._world.rank)

    def _slices(self, place: Place, whole: Any) -> Tensor:
        """What this rank holds of a whole parameter, its parts side by side."""
        sharding = self._run.sharding
        held = held_of(sharding, place.name, place.quantity, self._world.rank)
        return slices_of(whole, held, sharding.parameter(place.name))

    def _bytes(self, step: int) -> dict[str, Found]:
        """The ledger of the step against the prediction: calls and payloads, by reason."""

        def counts(rows: list[Traffic]) -> dict[str, tuple[int, int]]:
            return {f"{r.axis}: {r.why} ({r.operation})": (r.calls, r.payload) for r in rows if r.payload}

        sent, wanted = counts(self._world.ledger.rows(self._world.rank)), counts(self._sent)
        found = {}
        for name in {**wanted, **sent}:
            have, want = sent.get(name, (0, 0)), wanted.get(name, (0, 0))
            ratio = have[1] / want[1] if want[1] else None
            found[Place(step, BYTES, name).key] = Found(float(abs(have[1] - want[1]) + abs(have[0] - want[0])), ratio)
        return found

    def _preside(self, step: int, name: str, order: list[Any], before: Verdict | None, file: Path) -> None:
        """Rank 0 joins what all ranks found, and looks at the tensors of the first departure."""
        findings: list[Findings] = []
        for rank in range(self._plan.world):
            place = self._folder / f"{name}-{rank}.json"
            _wait(place)
            findings.append({key: Found(*values) for key, values in json.loads(place.read_text()).items()})
        verdict = join(self._numerics, step, order, findings, self._run.sharding, before)
        asked = None if verdict.passed else verdict.first.place.key
        _write(self._folder / f"{name}-asked.json", asked)
        if asked is not None:
            self._show(asked, self._folder / f"{name}-held-0.safetensors")
            verdict = self._explain(verdict, name)
        _write(file, verdict.to_json())

    def _explain(self, verdict: Verdict, name: str) -> Verdict:
        held, inputs = {}, {}
        for rank in range(self._plan.world):
            file = self._folder / f"{name}-held-{rank}.safetensors"
            _wait(file)
            inputs[rank] = load_file(file)
            if HELD in inputs[rank]:
                held[rank] = inputs[rank].pop(HELD)
        evidence = Evidence(
            self._plan, self._model, self._run.sharding, verdict.first, held, self._folder, self._numerics, inputs
        )
        return explained(verdict, evidence)

    def _show(self, key: str | None, file: Path) -> None:
        """Writes what this rank has at the place that rank 0 asks for, and what its other blocks got of it."""
        if key is None or file.exists():
            return
        quantity, rest = key.split("|", 1)
        if quantity == "replicas":  # its name holds the quantity that the copies are of
            key = rest.split("|", 1)[1].replace(" of ", "||", 1)
        microbatch = Place.of(0, key).microbatch
        shown = {
            place.name: tensor
            for place, tensor in ((Place.of(0, seen), tensor) for seen, tensor in self._observer.seen.items())
            if place.quantity == "input" and place.microbatch == microbatch and place.key != key
        }
        held = self._observer.seen.get(key)
        if held is not None:
            shown[HELD] = held
        draft = file.with_suffix(".draft")
        save_file({name: tensor.cpu().contiguous() for name, tensor in shown.items()}, draft)
        os.replace(draft, file)


def _difference(held: Tensor, reference: Tensor, slack: Tensor | None) -> tuple[float, float | None]:
    if not reference.numel():
        return 0.0, None
    if not held.is_floating_point():
        return float((held != reference).sum()), None
    held, reference = held.double(), reference.double()
    apart = (held - reference).abs()
    deviation = float(apart.max() if slack is None else (apart - slack).max().clamp(min=0))
    square = float(reference.square().sum())
    ratio = float((held * reference).sum()) / square if square else None
    finite = deviation == deviation
    return (deviation if finite else float("inf")), (ratio if finite else None)


def _write(file: Path, value: Any) -> None:
    draft = file.with_suffix(".draft")
    draft.write_text(json.dumps(value))
    os.replace(draft, file)


def _wait(file: Path, sleep: Callable[[float], None] = time.sleep) -> None:
    """Returns when `file` is there: it is published whole, by a rename. Whoever should write it and dies ends us all."""
    while not file.exists():
        sleep(POLL_S)
