"""The checker says no: it finds every planted fault at its place and with its cause, and some that are not listed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from plait.check.faults import FAULTS
from plait.check.faults.fault import instead
from plait.check.proof import prove
from tests.conftest import Models
from tests.docs.conftest import load
from tests.nursery import Nursery

REPORTS = {
    "P001", "P003", "P005", "P007", "P009", "P015", "P017", "P025", "P029", "P036", "P038", "P040",
}  # fmt: skip
"""Wrong numbers that people met in other tools, as far as what they need exists here."""


def found(name: str) -> tuple[str, str, str]:
    """(kind, place, cause): what the checker says of a listed fault."""
    faults = load("faults")
    return faults.said(faults.checked(FAULTS[name].layout, FAULTS[name].patch))  # type: ignore[no-any-return]


EVERY_OTHER = [pytest.param(name, marks=[pytest.mark.rest] * (number % 2)) for number, name in enumerate(FAULTS)]
"""The rest of them with --all-layouts."""


@pytest.mark.parametrize("name", EVERY_OTHER)
def test_a_planted_fault_is_found_at_its_place_with_its_cause(nursery: Nursery, name: str) -> None:
    fault = FAULTS[name]
    kind, place, cause = nursery(found, name)
    assert kind == fault.kind
    assert fault.at in place
    assert fault.says in cause
    faults = load("faults")
    assert faults.finding(fault, kind, place, cause) in faults.PAGE.read_text(), "run python docs/faults.py"


def test_the_list_is_what_was_asked_for() -> None:
    assert len(FAULTS) >= 24
    assert {fault.kind for fault in FAULTS.values()} >= {"module", "batch item", "optimizer", "schedule"}
    assert {report for fault in FAULTS.values() for report in fault.stands_for} >= REPORTS


# --- faults that are not in the list


def bias_on_every_rank() -> None:
    """The bias of a row-parallel layer is added before the sum, by every rank."""
    from plait.runtime.parallel import tensor

    @instead(tensor, "_linear")
    def wrong(right: Any, module: Any, row: Any, group: Any, *rest: Any) -> Any:
        forward = right(module, row, group, *rest)
        if row.leave != "sum" or module.bias is None:
            return forward
        # The sum's backward is the identity, so that each rank's gradient of it is right.
        return lambda x: forward(x) + (group.size - 1) * module.bias.detach()


def one_block_scaled() -> None:
    """One block's attention is a little too sharp on one rank."""
    from plait.runtime.hf.stage_model import StageModel

    @instead(StageModel, "materialise")
    def wrong(right: Any, self: Any, sharding: Any, rank: int, *rest: Any) -> None:
        right(self, sharding, rank, *rest)
        if rank == 1:
            self.module.model.layers[2].self_attn.scaling *= 1.001


def row_too_few() -> None:
    """A rank holds a row of the embedding less than it should."""
    from plait.runtime.hf import stage_model

    @instead(stage_model, "take")
    def wrong(right: Any, parameter: Any, whole: Any, mesh: Any, rank: int) -> Any:
        slices = right(parameter, whole, mesh, rank)
        return slices[: len(slices) - rank] if parameter.name == "model.embed_tokens.weight" else slices


UNLISTED: dict[Callable[[], None], tuple[str, str, str]] = {
    bias_on_every_rank: (
        # Biases are zero at first, so that the first step is right.
        "module", "step 2, microbatch 0: the output of model.layers.0.self_attn.o_proj",
        "up to there (step 2, microbatch 0: the output of model.layers.0.self_attn.v_proj) all agrees",
    ),
    one_block_scaled: (
        "module", "step 1, microbatch 0: the output of model.layers.2.self_attn.o_proj",
        "up to there (step 1, microbatch 0: the output of model.layers.2.self_attn.v_proj) all agrees",
    ),
    row_too_few: (
        "module", "the initial weight of model.embed_tokens.weight",
        "rank 1 has [47, 32] where the layout gives it [48, 32]",
    ),
}  # fmt: skip


def found_unlisted(name: str, model: str) -> tuple[str, str, str]:
    faults = load("faults")
    patch = next(patch for patch in UNLISTED if patch.__name__ == name)
    return faults.said(faults.checked({"model": model, "tp": 2}, patch))  # type: ignore[no-any-return]


@pytest.mark.parametrize("patch", UNLISTED, ids=lambda patch: patch.__name__)
def test_a_fault_that_is_not_listed_is_located(nursery: Nursery, tiny: Models, patch: Callable[[], None]) -> None:
    assert not {patch.__name__.replace("_", "-")} & set(FAULTS)
    kind, place, cause = nursery(found_unlisted, patch.__name__, tiny(attention_bias=True))
    wanted_kind, at, says = UNLISTED[patch]
    assert kind == wanted_kind
    assert at in place
    assert says in cause


# --- as shipped


def as_shipped(plant: str) -> list[Any]:
    """[(numerics, passed)] of a bf16 layout, wide and as shipped; with `plant`, the compute weights miss their update."""
    from plait.check.batches import awkward_batches
    from plait.design.plan import Plan
    from plait.runtime.hf.read import read

    plan = Plan(model="llama-tiny", seq=16, steps=3, dp=2, batch=8, compute="bf16")
    model = read(plan.model)
    patch = unpublished if plant else None
    verdicts = prove(plan, model, lambda: awkward_batches(plan, model.facts.vocabulary, 1), plant=patch)
    return [(v.numerics, v.passed, *([str(v.first.place), v.cause] if v.departures else [])) for v in verdicts]


def unpublished() -> None:
    from plait.runtime.training.optimizer import Optimizer

    @instead(Optimizer, "__init__")
    def wrong(right: Any, self: Any, *rest: Any) -> None:
        right(self, *rest)
        self._published = []


def test_what_is_wrong_only_in_bf16_is_found_as_shipped(nursery: Nursery) -> None:
    """Wide there is one copy of the weights and nothing to publish; in bf16 the model would go on with old ones."""
    assert [verdict[:2] for verdict in nursery(as_shipped, "")] == [["wide", True], ["bf16", True]]
    wide, shipped = nursery(as_shipped, "unpublished")
    assert wide == ["wide", True]
    assert shipped[:2] == ["bf16", False]
    assert shipped[2] == "step 1: the published weight of model.embed_tokens.weight"
    assert "from before the update" in shipped[3]
