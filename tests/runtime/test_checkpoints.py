"""A run that is saved and gone on with is the run that was never stopped: bit by bit in one layout, and wide in any
other."""

from __future__ import annotations

import os
from itertools import permutations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from plait.design.plan import Plan
from plait.runtime.checkpoint import folders
from plait.runtime.checkpoint.writer import Writer
from plait.runtime.comm.nursery import launch as fork
from plait.runtime.comm.world import Rendezvous, World
from plait.runtime.training.assemble import build
from plait.runtime.training.checkpoints import Checkpoints, Ends
from plait.runtime.training.launch import batches, launch
from tests.conftest import Models
from tests.nursery import Nursery
from tests.runtime.saving import Rows, part_of_run, whole
from tests.runtime.test_layouts import name

SAME: list[tuple[int, dict[str, Any]]] = [
    (10, {}),
    (10, {"dp": 2, "zero": 3, "compute": "bf16"}),
    (2, {"dp": 2, "tp": 2, "pp": 2, "microbatches": 2}),
    (5, {"dp": 3, "zero": 1, "compute": "fp16", "initial_loss_scale": 2.0**24, "loss_scale_window": 3}),
    (3, {"dp": 4, "zero": 2, "replicas": 2, "freeze": "*norm*,model.layers.1.*"}),
    (2, {"pp": 2, "schedule": "zb-v", "microbatches": 4, "dp": 2, "zero": 3}),
    (3, {"dp": 2, "dp_method": "master"}),
]


@pytest.mark.parametrize(("half", "layout"), SAME, ids=str)
def test_a_resumed_run_has_the_bits_of_one_that_was_never_stopped(
    nursery: Nursery, tiny: Models, tmp_path: Path, half: int, layout: dict[str, Any]
) -> None:
    """Weights, moments, losses, norms, learning rates and the loss scale, on every rank."""
    model, a, b = tiny(), str(tmp_path / "a"), str(tmp_path / "b")
    straight = nursery(part_of_run, model, layout, a, 0, 2 * half)
    first = nursery(part_of_run, model, layout, b, 0, half)
    second = nursery(part_of_run, model, layout, b, half, 2 * half)
    assert first["losses"] + second["losses"] == straight["losses"]
    assert second["keeps"] == straight["keeps"]
    assert second["scale"] == straight["scale"]
    assert first["keeps"] != straight["keeps"]


LAYOUTS: dict[str, dict[str, Any]] = {
    "1": {},
    "dp2.pp2": {"dp": 2, "pp": 2, "microbatches": 3},
    "dp3.zero1": {"dp": 3, "zero": 1},
    "tp2": {"tp": 2},
    "dp2.zero3": {"dp": 2, "zero": 3},
    "pp4": {"pp": 4, "microbatches": 4, "schedule": "zb-h1"},
    "dp2.tp2": {"dp": 2, "tp": 2},
    "pp2": {"pp": 2, "schedule": "interleaved", "microbatches": 2},
    "dp4": {"dp": 4},
    "tp2.pp2": {"tp": 2, "pp": 2, "microbatches": 2},
    "dp2": {"dp": 2},
    "dp2.tp2.pp2": {"dp": 2, "tp": 2, "pp": 2, "microbatches": 2},
}
STEPS = 2


def assert_same_bits(one: Path, other: Path) -> None:
    """Two checkpoints hold the same numbers, wherever they stand in their files."""
    found, wanted = whole(one), whole(other)
    assert found.keys() == wanted.keys()
    for key, tensor in found.items():
        assert torch.equal(tensor, wanted[key]), key


def assert_close(one: Path, other: Path) -> None:
    found, wanted = whole(one), whole(other)
    for key, tensor in found.items():
        bound = 1e-9 * wanted[key].abs().max() + 1e-14
        assert (tensor - wanted[key]).abs().max() <= bound, key


def test_p078_a_run_goes_through_all_layouts(nursery: Nursery, tiny: Models, tmp_path: Path) -> None:
    """Two steps in each, saved and loaded in between, and back to the first: as one process takes them all. What a
    layout has loaded it would save with the same bits."""
    model, ring = tiny(tie_word_embeddings=True), [*LAYOUTS, "1"]
    count = STEPS * len(ring)
    straight = nursery(part_of_run, model, {}, str(tmp_path / "straight"), 0, count, True)
    losses = []
    for hop, layout in enumerate(ring):
        begin = STEPS * hop
        again = str(tmp_path / "again" / layout)
        (tmp_path / "again").mkdir(exist_ok=True)
        run = nursery(part_of_run, model, LAYOUTS[layout], str(tmp_path / "ring"), begin, begin + STEPS, True, again)
        losses += run["losses"]
        if begin:
            place = f"step-{begin:08}"
            assert_same_bits(Path(again) / place, tmp_path / "ring" / place)
    for (loss, norm, lr), (wanted, norm_wanted, lr_wanted) in zip(losses, straight["losses"], strict=True):
        assert loss == pytest.approx(wanted, rel=1e-9)
        assert norm == pytest.approx(norm_wanted, rel=1e-9)
        assert lr == lr_wanted
    assert_close(tmp_path / "ring" / f"step-{count:08}", tmp_path / "straight" / f"step-{count:08}")


@pytest.mark.rest
@pytest.mark.parametrize("source", LAYOUTS)
def test_every_layout_goes_on_from_every_other(
    nursery: Nursery, tiny: Models, tmp_path: Path, source: str
) -> None:  # fmt: skip
    model, saved = tiny(tie_word_embeddings=True), tmp_path / "saved"
    straight = nursery(part_of_run, model, {}, str(tmp_path / "straight"), 0, 2 * STEPS, True)
    nursery(part_of_run, model, LAYOUTS[source], str(saved), 0, STEPS, True)
    place, end = f"step-{STEPS:08}", f"step-{2 * STEPS:08}"
    for _, target in (pair for pair in permutations(LAYOUTS, 2) if pair[0] == source):
        again = tmp_path / "again" / target
        again.parent.mkdir(exist_ok=True)
        run = nursery(part_of_run, model, LAYOUTS[target], str(saved), STEPS, 2 * STEPS, True, str(again))
        assert_same_bits(again / place, saved / place)
        assert [loss for loss, *_ in run["losses"]] == pytest.approx(
            [loss for loss, *_ in straight["losses"][STEPS:]], rel=1e-9
        ), target
        assert_close(saved / end, tmp_path / "straight" / end)


def ids_read(text: str, layout: dict[str, Any], folder: str, stop: int) -> list[list[int]]:
    """The sample ids of every step until `stop`, over all ranks of dp, from the newest checkpoint on."""
    plan = Plan(model="llama-tiny", data=text, tokenizer="bytes", batch=12, seq=16, epochs=2, **layout)

    def main(world: World) -> Any:
        rows = batches(plan, world)
        run = build(plan, world, steps=rows.steps_total)
        checkpoints = Checkpoints(run, rows, Path(folder) / folders.FOLDER)
        found, _ = folders.whole(Path(folder))
        if found:
            checkpoints.load(found)
        read = []
        while run.done < min(stop, rows.steps_total):
            batch = next(rows)
            run.step(batch)
            read.append(batch.sample_ids.tolist())
        checkpoints.save()
        return read

    ranks = launch(main, plan)
    return [[one for rank in ranks for one in rank[step]] for step in range(len(ranks[0]))]


@pytest.mark.parametrize(
    "second",
    [{"dp": 2, "zero": 3}, {"dp": 3}, pytest.param({"dp": 4}, marks=pytest.mark.rest),
     pytest.param({}, marks=pytest.mark.rest)],
    ids=name,
)  # fmt: skip
def test_p087_every_row_is_read_once_an_epoch_across_a_resume(
    nursery: Nursery, tmp_path: Path, second: dict[str, Any]
) -> None:
    """Two epochs of two steps, stopped in the middle of the first."""
    text = tmp_path / "text.txt"
    text.write_text("x" * (24 * 16))
    first = nursery(ids_read, str(text), {"dp": 4}, str(tmp_path), 1)
    then = nursery(ids_read, str(text), second, str(tmp_path), 100)
    assert [len(ids) for ids in first + then] == [12, 12, 12, 12]
    assert sorted(first[0] + then[0]) == sorted(then[1] + then[2]) == list(range(24))
    straight = nursery(ids_read, str(text), {}, str(tmp_path / "straight"), 100)
    assert [sorted(ids) for ids in first + then] == [sorted(ids) for ids in straight]


@pytest.mark.parametrize("zero", [1, pytest.param(2, marks=pytest.mark.rest), 3])
def test_p062_frozen_weights_are_saved(nursery: Nursery, tiny: Models, tmp_path: Path, zero: int) -> None:
    """They are not what a seed draws: the run goes on from a checkpoint with other numbers in them."""
    layout = {"dp": 2, "zero": zero, "freeze": "model.layers.[01].*"}
    nursery(part_of_run, tiny(), {**layout, "seed": 1}, str(tmp_path / "a"), 0, 2)
    straight = nursery(part_of_run, tiny(), {**layout, "seed": 1}, str(tmp_path / "b"), 0, 3)
    resumed = nursery(part_of_run, tiny(), {**layout, "seed": 2}, str(tmp_path / "a"), 2, 3)
    assert resumed["keeps"] == straight["keeps"]
    assert resumed["losses"] == straight["losses"][2:]


@pytest.mark.parametrize("layout", [{"dp": 2, "zero": 3}, {"tp": 2}, {"tp": 3, "dp": 2, "zero": 1}], ids=name)
def test_p043_a_saved_vocabulary_has_its_own_rows(
    nursery: Nursery, tiny: Models, tmp_path: Path, layout: dict[str, Any]
) -> None:
    """And goes on in one process."""
    model = tiny(vocab_size=97, hidden_size=36, num_attention_heads=6, num_key_value_heads=3)
    nursery(part_of_run, model, layout, str(tmp_path / "a"), 0, 1)
    place = tmp_path / "a" / "step-00000001"
    assert whole(place)["lm_head.weight.weight"].shape == (97, 36)
    nursery(part_of_run, model, {}, str(tmp_path / "a"), 1, 1, False, str(tmp_path / "again"))
    assert_same_bits(tmp_path / "again" / place.name, place)


def test_p085_kv_heads_that_ranks_have_copies_of_are_saved_once(
    nursery: Nursery, tiny: Models, tmp_path: Path
) -> None:  # fmt: skip
    """8 heads and 2 KV heads: from one process to tp 8 and 4, and back."""
    model = tiny(num_attention_heads=8, num_key_value_heads=2, head_dim=4)
    nursery(part_of_run, model, {}, str(tmp_path / "a"), 0, 2, True)
    place = tmp_path / "a" / "step-00000002"
    for tp in (8, 4):
        again = tmp_path / f"tp{tp}"
        nursery(part_of_run, model, {"tp": tp}, str(tmp_path / "a"), 2, 2, True, str(again))
        assert_same_bits(again / place.name, place)
        back = tmp_path / f"back{tp}"
        nursery(part_of_run, model, {"dp": 2, "zero": 3}, str(again), 2, 2, True, str(back))
        assert_same_bits(back / place.name, place)


def test_p069_what_is_tied_is_saved_once_and_what_is_not_by_itself(
    nursery: Nursery, tiny: Models, tmp_path: Path
) -> None:  # fmt: skip
    for tied in (True, False):
        folder = tmp_path / str(tied)
        nursery(part_of_run, tiny(tie_word_embeddings=tied), {"pp": 2}, str(folder), 0, 1)
        names = {key.rpartition(".")[0] for key in whole(folder / "step-00000001")}
        assert ("lm_head.weight" in names) == (not tied)
        assert "model.embed_tokens.weight" in names


def test_a_narrow_run_goes_on_wide_and_back(nursery: Nursery, tiny: Models, tmp_path: Path) -> None:
    """bf16 keeps fp32 weights, which is what is saved: fp32 goes on with those, not with what was computed with."""
    nursery(part_of_run, tiny(), {"compute": "bf16", "dp": 2}, str(tmp_path / "a"), 0, 2)
    place = tmp_path / "a" / "step-00000002"
    saved = whole(place)
    assert all(tensor.dtype == torch.float32 for tensor in saved.values())
    weights = [tensor for key, tensor in saved.items() if key.endswith(".weight")]
    assert any(not torch.equal(tensor, tensor.bfloat16().float()) for tensor in weights)
    (tmp_path / "again").mkdir()
    for compute in ("fp32", "bf16"):
        again = tmp_path / "again" / compute
        nursery(part_of_run, tiny(), {"compute": compute}, str(tmp_path / "a"), 2, 2, False, str(again))
        assert_same_bits(again / place.name, place)


def resident(folder: str, method: str) -> list[list[int]]:
    """Of each rank and of its writer, the bytes in memory after save 2 and after save 20."""
    plan = Plan(model="llama-10m", dp=2, batch=2, seq=8)

    def main(meeting: Rendezvous) -> Any:
        writer = Writer() if method == "async" else None
        with World(meeting, plan.mesh) as world:
            run = build(plan, world)
            rows = Rows(plan, world)
            checkpoints = Checkpoints(run, rows, Path(folder), writer=writer)
            found = []
            for _ in range(20):
                run.step(rows.next())
                checkpoints.save()
                checkpoints.finished(wait=True)
                pids = [os.getpid(), *([] if writer is None else [writer.pid])]
                found.append([in_memory(pid) for pid in pids])
            return [[found[1][n], found[-1][n]] for n in range(len(found[0]))]

    return [pair for rank in fork(main, plan.world) for pair in rank]


def in_memory(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("method", ["async", pytest.param("sync", marks=pytest.mark.rest)])
def test_p119_saves_leave_no_memory_behind(nursery: Nursery, tmp_path: Path, method: str) -> None:
    for second, last in nursery(resident, str(tmp_path / "run"), method):
        assert last <= 1.05 * second + (2 << 20)


def test_a_run_that_has_taken_its_last_step_is_not_ended_before_it() -> None:
    """Else it would leave no record, and could not be gone on with for it has taken all of its steps."""
    run: Any = SimpleNamespace(done=2, steps=3)
    ends = Ends(run, after=2)
    assert ends.asked()
    assert ends.why == "--stop-after 2"
    run = SimpleNamespace(done=3, steps=3)
    assert not Ends(run, after=2).asked()
