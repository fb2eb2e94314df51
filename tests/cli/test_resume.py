"""`plait train --save-every N` ends, by itself or not, and `--resume` goes on with it: the lines of metrics are those
of a run that was never stopped."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.cli.commands import Driver, until

SAVES = ("--steps", 8, "--save-every", 2)


def lines(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def losses(out: Path) -> list[float]:
    return [line["loss"] for line in lines(out)]


def checkpoints(out: Path) -> list[str]:
    return sorted(path.name for path in (out / "checkpoints").iterdir() if path.name != "tokenizer")


@pytest.fixture(scope="module")
def straight(plait: Driver, small: Sequence[object], tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("straight") / "run"
    ended = plait.run(*small, *SAVES, "--dp", 2, "--out", out)
    assert (ended.code, ended.err) == (0, "")
    return out


def test_a_run_leaves_the_newest_checkpoints(straight: Path) -> None:
    assert checkpoints(straight) == ["latest", "step-00000006", "step-00000008"]
    assert (straight / "checkpoints" / "latest").read_text().split()[0] == "step-00000008"


def test_a_run_goes_on_in_place(plait: Driver, small: Sequence[object], straight: Path, tmp_path: Path) -> None:
    """The very bits: losses, and both files of the last checkpoint, whose digests cover every number of theirs."""
    out = tmp_path / "run"
    assert plait.run(*small, *SAVES, "--dp", 2, "--out", out, "--stop-after", 5).code == 0
    assert checkpoints(out) == ["latest", "step-00000004", "step-00000005"]
    ended = plait.run("train", "--resume", "auto", "--out", out, "--sample", 0)
    assert (ended.code, ended.err) == (0, "")
    assert f"going on from {out / 'checkpoints' / 'step-00000005'}" in ended.out
    assert losses(out) == losses(straight)
    for name in ("rank-00000.safetensors", "rank-00001.safetensors", "index.json"):
        here, there = (run / "checkpoints" / "step-00000008" / name for run in (out, straight))
        assert here.read_bytes() == there.read_bytes(), name


def test_a_run_that_was_killed_goes_on_in_another_layout(
    plait: Driver, small: Sequence[object], straight: Path, tmp_path: Path
) -> None:
    """Steps that are run again replace what they left, the samples too; the run is its checkpoint's, but for the
    flags."""
    out = tmp_path / "run"
    slow = "import time\nimport plait.runtime.training.step as step\nold = step.Run.step\n"
    slow += "step.Run.step = lambda *a, **b: (time.sleep(0.3), old(*a, **b))[1]\n"
    command = plait.start(*small, *SAVES, "--dp", 2, "--out", out, "--sample-every", 1, "--sample", 2, before=slow)
    until(lambda: (out / "metrics.jsonl").exists() and len(lines(out)) >= 5, lambda: command.read("err"))
    for pid in command.processes():
        os.kill(pid, signal.SIGKILL)
    command.ended()
    with (out / "metrics.jsonl").open("a") as file:
        file.write('{"step": 7, "loss": 1.0, "gr')
    ended = plait.run("train", "--resume", out, "--dp", 1, "--pp", 2, "--microbatches", 2, "--sample", 2)
    assert ended.code == 0, ended.err
    assert [line["step"] for line in lines(out)] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert losses(out) == pytest.approx(losses(straight), abs=2e-6)
    samples = [json.loads(line)["step"] for line in (out / "samples.jsonl").read_text().splitlines()]
    assert samples == [1, 2, 3, 4, 5, 6, 7, 8]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_saves_and_ends(
    plait: Driver, small: Sequence[object], tmp_path: Path, number: signal.Signals, code: int
) -> None:
    out = tmp_path / "run"
    command = plait.start(*small, "--steps", 100000, "--save-every", 100000, "--dp", 2, "--out", out)
    command.stepping(out / "metrics.jsonl")
    begun = time.monotonic()
    os.kill(command.pid, number)
    ended = command.ended()
    assert ended.code == code, ended.err
    assert time.monotonic() - begun < 10
    taken = lines(out)[-1]["step"]
    assert checkpoints(out) == ["latest", f"step-{taken:08}"]
    assert f"ended after step {taken} by a signal" in ended.out


def test_a_signal_to_every_process_does_the_same(plait: Driver, small: Sequence[object], tmp_path: Path) -> None:
    out = tmp_path / "run"
    command = plait.start(*small, "--steps", 100000, "--save-every", 100000, "--dp", 2, "--out", out)
    command.stepping(out / "metrics.jsonl")
    os.killpg(command.pid, signal.SIGTERM)
    assert command.ended().code == 143
    assert checkpoints(out) == ["latest", f"step-{lines(out)[-1]['step']:08}"]


def test_a_second_signal_ends_at_once(plait: Driver, small: Sequence[object], tmp_path: Path) -> None:
    """Whatever the ranks do: here they are stopped."""
    out = tmp_path / "run"
    command = plait.start(*small, "--steps", 100000, "--save-every", 100000, "--dp", 2, "--out", out)
    command.stepping(out / "metrics.jsonl")
    for pid in command.processes():
        if pid != command.pid:
            os.kill(pid, signal.SIGSTOP)
    os.kill(command.pid, signal.SIGTERM)
    time.sleep(0.3)
    os.kill(command.pid, signal.SIGTERM)
    assert command.ended().code == 143
    until(lambda: command.processes() == [])


def test_minutes_end_a_run(plait: Driver, small: Sequence[object], tmp_path: Path) -> None:
    out = tmp_path / "run"
    ended = plait.run(*small, "--steps", 100000, "--out", out, "--max-minutes", 0.01)
    assert ended.code == 0, ended.err
    assert "by --max-minutes 0.01" in ended.out
    assert checkpoints(out) == ["latest", f"step-{lines(out)[-1]['step']:08}"]


def test_p096_what_a_killed_save_left_is_cleared(plait: Driver, small: Sequence[object], tmp_path: Path) -> None:
    out = tmp_path / "run"
    left = out / "checkpoints" / "step-00000002.partial"
    left.mkdir(parents=True)
    (left / "rank-00000.safetensors").write_bytes(b"half")
    ended = plait.run(*small, *SAVES, "--out", out, "--resume", "auto", "--stop-after", 2)
    assert ended.code == 0, ended.err
    assert ended.seconds < 30
    assert checkpoints(out) == ["latest", "step-00000002"]


def test_a_finished_run_is_not_begun_again(plait: Driver, straight: Path) -> None:
    before = (straight / "metrics.jsonl").read_bytes()
    ended = plait.run("train", "--resume", straight)
    assert (ended.code, ended.out) == (0, f"{straight} has taken all of its 8 steps.\n")
    assert (straight / "metrics.jsonl").read_bytes() == before


def test_a_finished_run_may_be_made_longer_elsewhere(plait: Driver, straight: Path, tmp_path: Path) -> None:
    """From any of its checkpoints; the run itself stays as it is."""
    before = (straight / "metrics.jsonl").read_bytes()
    place = straight / "checkpoints" / "step-00000006"
    ended = plait.run("train", "--resume", place, "--out", tmp_path / "new", "--steps", 9, "--sample", 0)
    assert ended.code == 0, ended.err
    assert [line["step"] for line in lines(tmp_path / "new")] == [7, 8, 9]
    assert (straight / "metrics.jsonl").read_bytes() == before
    assert checkpoints(straight) == ["latest", "step-00000006", "step-00000008"]


REFUSED: list[tuple[Sequence[object], Sequence[str]]] = [
    (("--batch", 8), ("batch 8 would change the rows of a step", "began with 4")),
    (("--seq", 16), ("seq 16",)),
    (("--seed", 8), ("seed 8", "the order of the rows")),
    (("--packing", "sorted"), ("packing sorted",)),
    (("--data-order", "own"), ("data_order own",)),
    (("--eval-every", 2), ("holds out no document", "0.01 of the documents")),
    (("--freeze", "*norm*"), ("trained, and here it is frozen", "freeze")),
    (("qwen3-tiny",), ("configs differ in", "model_type")),
    (("--vocabulary", 600), ("vocabulary 600 makes 600 rows, but the run began with", "leave it out")),
    (("--tp", 6), ("tp 6 is more than the 4 KV heads", "this model takes tp")),
    (("--overwrite",), ("give one of the two",)),
]


@pytest.mark.parametrize(("flags", "words"), REFUSED, ids=lambda one: str(one[0]).strip("-"))
def test_what_cannot_change_is_refused(
    plait: Driver, straight: Path, flags: Sequence[object], words: Sequence[str]
) -> None:
    plait.run("train", *flags, "--resume", straight, "--steps", 20).refused(*words)


def test_another_text_is_refused(plait: Driver, straight: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.txt"
    other.write_text("other words\n" * 400)
    ended = plait.run("train", "--resume", straight, "--data", other, "--steps", 9, "--out", tmp_path / "run")
    assert ended.code == 2
    assert "another text" in ended.err


def test_nothing_to_resume_is_refused(plait: Driver, straight: Path, tmp_path: Path) -> None:
    plait.run("train", "--resume", tmp_path / "none").refused("There is no directory", "--save-every")
    plait.run("train", "--resume", tmp_path).refused("holds no checkpoint")
    plait.run("train", "--resume", "auto").refused("--out")


def test_of_two_that_go_on_with_a_run_one_is_refused(
    plait: Driver, small: Sequence[object], tmp_path: Path
) -> None:  # fmt: skip
    out = tmp_path / "run"
    assert plait.run(*small, *SAVES, "--out", out, "--stop-after", 2).code == 0
    first = plait.start("train", "--resume", out, "--steps", 100000, "--sample", 0)
    until(lambda: lines(out)[-1]["step"] > 2, lambda: first.read("err"))
    plait.run("train", "--resume", out, "--steps", 100000).refused("Another run is writing to")
    os.kill(first.pid, signal.SIGTERM)
    assert first.ended().code == 143


def test_what_is_kept_is_shown_verified_and_exported(plait: Driver, straight: Path, tmp_path: Path) -> None:
    shown = plait.run("checkpoint", "show", straight)
    assert (shown.code, shown.err) == (0, "")
    newest, older = shown.out.splitlines()
    assert newest.startswith(
        "step-00000008  step 8 of 8, llama-tiny, 0.3 M parameters, 2.9 MiB in 2 files, written over "
    )
    assert older.startswith("step-00000006  step 6 of 8")
    alone = plait.run("checkpoint", "show", straight / "checkpoints" / "step-00000006")
    assert "data at epoch 0, row 24" in alone.out
    assert "39 tensors, 0 of them frozen" in alone.out
    verified = plait.run("checkpoint", "verify", straight)
    assert verified.code == 0
    assert [line.split(":")[0] for line in verified.out.splitlines()] == [
        "step-00000008  whole",
        "step-00000006  whole",
    ]
    ended = plait.run("export", straight, tmp_path / "model", "--dtype", "bf16")
    assert (ended.code, ended.err) == (0, "")
    assert ended.out.splitlines()[-1] == f"serve it with: vllm serve {tmp_path / 'model'}"
    assert {file.name for file in (tmp_path / "model").iterdir()} == {
        "model.safetensors", "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"
    }  # fmt: skip
    # A model directory like any other: it is trained further with its own tokenizer.
    trained = plait.run("train", tmp_path / "model", "--steps", 1, "--sample", 0, "--out", tmp_path / "more")
    assert trained.code == 0, trained.err
    assert "the model's own tokenizer" in trained.out


def test_verify_names_what_is_damaged(plait: Driver, straight: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(straight, tmp_path / "run"))
    file = run / "checkpoints" / "step-00000008" / "rank-00001.safetensors"
    data = bytearray(file.read_bytes())
    data[20] ^= 1
    file.write_bytes(data)
    ended = plait.run("checkpoint", "verify", run)
    assert ended.code == 1
    damaged, whole = ended.out.splitlines()
    assert str(file) in damaged
    assert "its header" in damaged
    assert whole.startswith("step-00000006  whole")
    for command in (("checkpoint", "show"), ("checkpoint", "verify")):
        plait.run(*command, tmp_path).refused("holds no checkpoint")
    plait.run("export", tmp_path, tmp_path / "new").refused("holds no checkpoint")
    plait.run("export", run, tmp_path / "new", "--dtype", "int4").refused("--dtype cannot be 'int4'", "bf16")
    plait.run("export", run, run).refused("is there already")


def test_a_run_that_is_replaced_leaves_no_checkpoint(plait: Driver, small: Sequence[object], tmp_path: Path) -> None:
    """Or its later steps would be taken for the newest of the new one."""
    out = tmp_path / "run"
    assert plait.run(*small, *SAVES, "--out", out).code == 0
    ended = plait.run(*small, *SAVES, "--out", out, "--overwrite", "--stop-after", 2)
    assert ended.code == 0, ended.err
    assert checkpoints(out) == ["latest", "step-00000002"]
    (out / "metrics.jsonl").unlink()
    assert plait.run(*small, *SAVES, "--out", out, "--stop-after", 1).code == 0
    assert checkpoints(out) == ["latest", "step-00000001", "step-00000002.aside"]


def launcher(port: int, *words: object) -> list[str]:
    """torchrun with two ranks on this machine."""
    argv = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-addr", "127.0.0.1"]
    return [*argv, "--master-port", str(port), "-m", "plait", *map(str, words)]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


def test_a_launcher_s_ranks_save_and_go_on(
    plait: Driver, small: Sequence[object], straight: Path, tmp_path: Path
) -> None:
    """torchrun hears SIGTERM and passes it to its ranks; they go on under it, and without it."""
    out = tmp_path / "run"
    command = (*small, "--steps", 100000, "--save-every", 100000, "--dp", 2, "--out", out)
    with subprocess.Popen(launcher(free_port(), *command), env=plait.env, cwd=tmp_path, stderr=subprocess.PIPE) as run:
        until(lambda: (out / "metrics.jsonl").exists() and len(lines(out)) > 2)
        run.send_signal(signal.SIGTERM)
        run.communicate(timeout=60)
        assert run.returncode != 0
    taken = lines(out)[-1]["step"]
    assert checkpoints(out) == ["latest", f"step-{taken:08}"]
    resume = launcher(free_port(), "train", "--resume", out, "--steps", taken + 2, "--save-every", 1, "--sample", 0)
    ended = subprocess.run(resume, env=plait.env, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count(f"going on from {out / 'checkpoints' / f'step-{taken:08}'}") == 1
    assert checkpoints(out) == ["latest", f"step-{taken + 1:08}", f"step-{taken + 2:08}"]
    assert plait.run("train", "--resume", out, "--steps", taken + 3, "--dp", 1, "--tp", 2, "--sample", 0).code == 0
    assert [line["step"] for line in lines(out)] == [*range(1, taken + 4)]


def test_a_disk_without_room_is_refused(plait: Driver, small: Sequence[object], tmp_path: Path) -> None:
    before = "import collections, shutil\nUsage = collections.namedtuple('Usage', 'total used free')\n"
    before += "shutil.disk_usage = lambda path: Usage(10, 9, 1)\n"
    ended = plait.run(*small, "--save-every", 2, "--out", tmp_path / "a" / "b", before=before)
    ended.refused("A checkpoint of llama-tiny takes 0.0 GiB", "has 0.0 GiB free", "--out")
    assert not (tmp_path / "a").exists()
