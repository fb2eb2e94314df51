"""What a resume could lose without a word, planted: each shows in the bits that the tests of resuming compare."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from plait.runtime.checkpoint.load import Target
from plait.runtime.training.checkpoints import Checkpoints
from plait.runtime.training.loss_scale import LossScale
from plait.runtime.training.optimizer import Optimizer
from tests.conftest import Models
from tests.nursery import Nursery
from tests.runtime.saving import Rows, part_of_run

LAYOUT: dict[str, Any] = {
    "dp": 2, "zero": 1, "compute": "fp16", "initial_loss_scale": 2.0**24, "loss_scale_window": 3,
    "freeze": "model.layers.0.*",
}  # fmt: skip


class UpsideDown(Target):
    def view(self, box: Any, one: Any) -> Any:
        found = super().view(box, one)
        return found.flip(0) if found.dim() > 1 else found


def targets_that_are(change: Callable[[str, str, Target], Target | None]) -> Callable[[Callable[..., None]], None]:
    """What `change` makes of each target of a quantity of a parameter: another one, or none."""

    def plant(patch: Callable[..., None]) -> None:
        old = Checkpoints.targets

        def targets(self: Checkpoints, name: str, quantity: str) -> list[Target]:
            return [new for target in old(self, name, quantity) if (new := change(name, quantity, target))]

        patch(Checkpoints, "targets", targets)

    return plant


def without(lost: Callable[[str, str, Target], bool]) -> Callable[[Callable[..., None]], None]:
    return targets_that_are(lambda name, quantity, target: None if lost(name, quantity, target) else target)


def upside_down(name: str, quantity: str, target: Target) -> Target:
    return UpsideDown(target.slices, target.flat) if name == "model.layers.2.mlp.up_proj.weight" else target


def rows_that_begin_one_step_later(patch: Callable[..., None]) -> None:
    patch(Rows, "restore", lambda self, state: setattr(self, "step", state["step"] + 1))


def updates_from_none(patch: Callable[..., None]) -> None:
    old = Optimizer.begin
    patch(Optimizer, "begin", lambda self, updates: old(self, 0))


def skips_that_are_forgotten(patch: Callable[..., None]) -> None:
    old = LossScale.restore
    patch(LossScale, "restore", lambda self, state: old(self, {**state, "skipped": 0}))


def a_scale_that_is_forgotten(patch: Callable[..., None]) -> None:
    patch(LossScale, "restore", lambda self, state: None)


FAULTS: dict[str, Callable[[Callable[..., None]], None]] = {
    "a slice upside down": targets_that_are(upside_down),
    "no first moments": without(lambda name, quantity, target: quantity == "exp_avg"),
    "no second moments": without(lambda name, quantity, target: quantity == "exp_avg_sq"),
    "one moment of one weight": without(
        lambda name, quantity, target: (name, quantity) == ("model.norm.weight", "exp_avg_sq")
    ),
    "no frozen weights": without(lambda name, quantity, target: ".layers.0." in name),
    "weights as they are computed with": without(
        lambda name, quantity, target: quantity == "weight" and target.flat.dtype.itemsize == 4
    ),
    "rows of the step after": rows_that_begin_one_step_later,
    "updates counted from none": updates_from_none,
    "skipped steps forgotten": skips_that_are_forgotten,
    "the loss scale forgotten": a_scale_that_is_forgotten,
}  # fmt: skip


def planted(fault: str, model: str, folder: str) -> Any:
    def patch(owner: type, name: str, function: Any) -> None:
        setattr(owner, name, function)

    if fault:
        FAULTS[fault](patch)
    return part_of_run(model, {**LAYOUT, "seed": 8}, folder, 5, 7)


@pytest.fixture(scope="module")
def halves(nursery: Nursery, tiny: Models, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str, Any]:
    """A run of 7 steps, and the folder with a checkpoint of its fifth."""
    root = tmp_path_factory.mktemp("faults")
    straight = nursery(part_of_run, tiny(), {**LAYOUT, "seed": 9}, str(root / "straight"), 0, 7)
    nursery(part_of_run, tiny(), {**LAYOUT, "seed": 9}, str(root / "half"), 0, 5)
    assert straight["scale"]["skipped"]
    return tiny(), str(root / "half"), straight


def test_without_a_fault_nothing_differs(nursery: Nursery, halves: tuple[str, str, Any]) -> None:
    """Also with another seed, so that nothing is right by being drawn again."""
    model, folder, straight = halves
    assert {**nursery(planted, "", model, folder), "losses": None} == {**straight, "losses": None}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_shows(nursery: Nursery, halves: tuple[str, str, Any], fault: str) -> None:
    model, folder, straight = halves
    assert nursery(planted, fault, model, folder)["keeps"] != straight["keeps"]
