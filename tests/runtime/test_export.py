"""What is exported is what was trained, bit for bit, as transformers itself would have written it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from plait.design.errors import PlanError
from plait.design.layout import box_shape
from plait.design.plan import Plan
from plait.design.sharding import shard
from plait.design.slices import kept
from plait.runtime.batch import IGNORE
from plait.runtime.checkpoint import folders
from plait.runtime.checkpoint.export import TOKENIZER, export
from plait.runtime.comm.world import World
from plait.runtime.data.tokenizer import Bpe, Bytes, files_of
from plait.runtime.hf.read import described, read
from plait.runtime.training.assemble import build
from plait.runtime.training.checkpoints import Checkpoints
from plait.runtime.training.launch import launch
from tests import families
from tests.conftest import Models
from tests.nursery import Nursery
from tests.runtime.saving import Rows, global_rows
from tests.runtime.test_zero import odd


def plan_of(model: str, layout: dict[str, Any]) -> Plan:
    return Plan(**{"model": model, "batch": 12, "seq": 6, "steps": 40, "lr": 0.01, **layout})


def trained(model: str, layout: dict[str, Any], folder: str, steps: int) -> float:
    """Saves a run after some steps, and every rank's own weights beside that; the loss of the step after."""
    plan = plan_of(model, layout)

    def main(world: World) -> float:
        run = build(plan, world)
        rows = Rows(plan, world)
        checkpoints = Checkpoints(run, rows, Path(folder) / folders.FOLDER, config=described(run.model.config))
        for _ in range(steps):
            run.step(rows.next())
        checkpoints.save()
        for name, weight in run.stored.items():
            np.save(Path(folder) / f"{world.rank}-{name}.npy", weight.detach().float().view(-1).numpy())
        return run.step(rows.next()).loss

    return float(launch(main, plan)[0])


def live(model: str, layout: dict[str, Any], folder: Path) -> dict[str, torch.Tensor]:
    """The weights that the ranks had, put together."""
    sharding, found = shard(read(model).facts, plan_of(model, layout)), dict[str, torch.Tensor]()
    for rank in range(sharding.mesh.size):
        for one in sharding.parameters:
            for piece in kept(sharding, one.name, "stored", rank):
                flat = torch.from_numpy(np.load(folder / f"{rank}-{one.name}.npy"))
                into = found.setdefault(one.name, torch.full(one.shape, float("nan")))
                values = flat.as_strided(box_shape(piece.box), piece.strides, piece.start)
                into[tuple(slice(*side) for side in piece.box)] = values
    return found


def exported(run: str, into: str, dtype: str, most: int = 1 << 30) -> list[str]:
    folder, index = folders.whole(Path(run))[0][0]
    return [path.name for path in export(folder, index, Path(into), dtype=dtype, most=most)]


def reloaded(folder: str, again: str, steps: int, layout: dict[str, Any]) -> float:
    """Read by transformers, and written again by it; its loss on the rows of the step after."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    model.save_pretrained(again)
    batch = global_rows(plan_of(folder, layout), steps)
    with torch.no_grad():
        logits = model.float()(input_ids=batch.tokens, use_cache=False).logits
    loss = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1).double(), batch.targets.flatten(), ignore_index=IGNORE
    )
    return float(loss)


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {key: one for file in sorted(folder.glob("*.safetensors")) for key, one in load_file(file).items()}


CASES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("llama", {"tie_word_embeddings": True}, {"pp": 2, "dp": 2, "zero": 1}),
    ("gpt2", {}, {"tp": 2, "dp": 2, "zero": 3}),
    ("mixtral", {}, {"tp": 2, "pp": 2}),
    ("phi3", {}, {"tp": 2, "zero": 2, "dp": 2}),
    ("gemma3_text", {"tie_word_embeddings": True}, {"dp": 3}),
    ("qwen3", {}, {"dp": 2, "zero": 3, "compute": "bf16"}),
]


@pytest.mark.parametrize(
    ("family", "changes", "layout"),
    [pytest.param(*case, id=case[0], marks=[pytest.mark.rest] * (number % 2)) for number, case in enumerate(CASES)],
)
def test_p092_an_export_is_what_the_ranks_had(
    nursery: Nursery, tmp_path: Path, family: str, changes: dict[str, Any], layout: dict[str, Any]
) -> None:
    """transformers reads it, computes the loss that the run computes next, and writes the very files again."""
    model, steps = families.write(tmp_path, family, **changes), 3
    (tmp_path / "run").mkdir()
    loss = nursery(trained, model, layout, str(tmp_path / "run"), steps)
    dtype = layout.get("compute", "fp32")
    nursery(exported, str(tmp_path / "run"), str(tmp_path / "export"), dtype)
    found = nursery(reloaded, str(tmp_path / "export"), str(tmp_path / "again"), steps, layout)
    assert found == pytest.approx(loss, rel=1e-5 if dtype == "fp32" else 1e-2)
    here, theirs = tensors(tmp_path / "export"), tensors(tmp_path / "again")
    assert here.keys() == theirs.keys()
    assert all(torch.equal(one, theirs[key]) and one.dtype == theirs[key].dtype for key, one in here.items())
    for name, weight in live(model, layout, tmp_path / "run").items():
        if name in here:  # else the family's files have it in parts
            assert torch.equal(here[name].float(), weight), name
    ours, written = (json.loads((tmp_path / place / "config.json").read_text()) for place in ("export", "again"))
    assert ours == written


@pytest.mark.parametrize(
    ("zero", "tied"),
    [(1, True), (3, False), *(pytest.param(*case, marks=pytest.mark.rest) for case in ((2, True), (2, False)))],
)
def test_p092_odd_sizes(nursery: Nursery, tiny: Models, tmp_path: Path, zero: int, tied: bool) -> None:
    model, layout = tiny(**odd(1), tie_word_embeddings=tied), {"dp": 3, "zero": zero}
    (tmp_path / "run").mkdir()
    nursery(trained, model, layout, str(tmp_path / "run"), 5)
    nursery(exported, str(tmp_path / "run"), str(tmp_path / "export"), "fp32")
    here, wanted = tensors(tmp_path / "export"), live(model, layout, tmp_path / "run")
    assert here.keys() == wanted.keys()
    assert all(torch.equal(one, wanted[key]) for key, one in here.items())
    assert ("lm_head.weight" in here) == (not tied)


def test_p084_fused_projections_come_out_alike_from_any_tp(nursery: Nursery, tmp_path: Path) -> None:
    model = families.write(tmp_path, "phi3", num_key_value_heads=4)
    found = []
    for tp in (1, 2, 4):
        run = tmp_path / f"run{tp}"
        run.mkdir()
        nursery(trained, model, {"tp": tp}, str(run), 0)
        nursery(exported, str(run), str(tmp_path / f"export{tp}"), "fp32")
        found.append((tmp_path / f"export{tp}" / "model.safetensors").read_bytes())
    assert found[0] == found[1] == found[2]


def test_p090_the_type_is_what_was_asked_for(nursery: Nursery, tiny: Models, tmp_path: Path) -> None:
    """In every tensor and in the config, at half the size; in one file or in several."""
    (tmp_path / "run").mkdir()
    nursery(trained, tiny(), {"compute": "bf16"}, str(tmp_path / "run"), 1)
    sizes = {}
    for dtype, name in (("fp32", "float32"), ("bf16", "bfloat16"), ("fp16", "float16"), ("", "bfloat16")):
        into = tmp_path / f"as-{dtype}"
        nursery(exported, str(tmp_path / "run"), str(into), dtype)
        here = tensors(into)
        assert {str(one.dtype) for one in here.values()} == {f"torch.{name}"}
        assert json.loads((into / "config.json").read_text())["dtype"] == name
        sizes[dtype] = sum(one.nbytes for one in here.values())
    assert sizes["bf16"] * 2 == sizes["fp32"]
    files = nursery(exported, str(tmp_path / "run"), str(tmp_path / "many"), "fp32", 50_000)
    assert "model-00001-of-00004.safetensors" in files
    one, many = tensors(tmp_path / "as-fp32"), tensors(tmp_path / "many")
    assert one.keys() == many.keys()
    assert all(torch.equal(tensor, many[key]) for key, tensor in one.items())
    index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sizes["fp32"]
    assert index["weight_map"].keys() == one.keys()
    assert nursery(reloaded, str(tmp_path / "many"), str(tmp_path / "again"), 1, {}) > 0


def test_what_cannot_be_exported_is_refused(nursery: Nursery, tiny: Models, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    nursery(trained, tiny(), {}, str(tmp_path / "run"), 1)
    folder, index = folders.whole(tmp_path / "run")[0][0]
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("")
    with pytest.raises(PlanError, match="is there already"):
        export(folder, index, tmp_path / "full")
    file = folder / "rank-00000.safetensors"
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    at = next(one.offset for one in index.files[0].slices if one.quantity == "weight")
    data[at] ^= 1
    file.write_bytes(data)
    with pytest.raises(PlanError, match=r"rank-00000\.safetensors is damaged"):
        export(folder, index, tmp_path / "new")
    assert not list(tmp_path.glob("new*"))


TEXT = "def f(x):\n\treturn x + 1  # \N{SNOWMAN} ok\r\n"


@pytest.mark.parametrize("kind", ["bytes", "bpe"])
def test_an_exported_tokenizer_gives_the_run_s_ids(
    nursery: Nursery, tiny: Models, tmp_path: Path, kind: str
) -> None:  # fmt: skip
    from transformers import AutoTokenizer

    own = Bytes() if kind == "bytes" else Bpe.train([TEXT * 5, "words and more words"], 300)
    (tmp_path / "run").mkdir()
    nursery(trained, tiny(vocab_size=300), {}, str(tmp_path / "run"), 1)
    place = tmp_path / "run" / folders.FOLDER / TOKENIZER
    place.mkdir()
    for name, content in files_of(own, None).items():
        (place / name).write_bytes(content)
    nursery(exported, str(tmp_path / "run"), str(tmp_path / "export"), "fp32")
    theirs = AutoTokenizer.from_pretrained(tmp_path / "export")
    assert theirs(TEXT)["input_ids"] == own.encode(TEXT)
    assert theirs.decode(own.encode(TEXT)) == TEXT
    assert theirs.eos_token_id == own.end
    generation = json.loads((tmp_path / "export" / "generation_config.json").read_text())
    assert generation["eos_token_id"] == own.end
