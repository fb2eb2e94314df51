"""What each command does when all is well: what it prints, what it writes, how it ends."""

from __future__ import annotations

import json
import os
import pty
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from plait.design.schedule import METHODS
from tests.cli.commands import PATIENCE_S, Driver, until

LAYOUT = ("--dp", 2, "--pp", 2)
FILES = ("metrics.jsonl", "run.json", "samples.jsonl", "report.html", "trace.json")
COLOUR = re.compile(r"\x1b\[[\d;]*m")


def losses(out: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (out / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def run(plait: Driver, small: Sequence[object], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A run over four local ranks: where it was written, and what it printed."""
    out = tmp_path_factory.mktemp("runs") / "run"
    ended = plait.run(*small, *LAYOUT, "--out", out)
    assert (ended.code, ended.err) == (0, ""), ended.err
    return out, ended.out


# --- train


def test_a_run_writes_its_metrics(run: tuple[Path, str]) -> None:
    out, _ = run
    assert {file.name for file in out.iterdir()} == set(FILES)
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3]
    for line in lines:
        assert list(line) == ["step", "loss", "grad_norm", "lr", "tokens", "tokens_per_s"]
    assert lines[-1]["loss"] < lines[0]["loss"]


def test_away_from_a_terminal_a_run_prints_plain_lines(run: tuple[Path, str]) -> None:
    out, printed = run
    assert "\x1b" not in printed
    assert "\r" not in printed
    assert re.findall(r"^step (\d)/3 ", printed, re.MULTILINE) == ["1", "2", "3"]
    assert printed.rstrip().splitlines()[-1] == f"written: {', '.join(str(out / name) for name in FILES)}"


def test_torchrun_gives_the_same_run(
    plait: Driver, small: Sequence[object], run: tuple[Path, str], tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", "4", "--master-addr", "127.0.0.1"]
    command = [*map(str, (*small, *LAYOUT)), "--out", str(tmp_path / "run")]
    argv = [sys.executable, *launcher, "--master-port", str(port), "-m", "plait", *command]
    ended = subprocess.run(argv, env=plait.env, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert losses(tmp_path / "run") == pytest.approx(losses(run[0]), abs=1e-6)
    assert ended.stdout.count("step 1/3") == 1


def test_p109_mpirun_s_variables_are_read(
    plait: Driver, small: Sequence[object], run: tuple[Path, str], tmp_path: Path
) -> None:
    """As `mpirun -n 4 -x MASTER_ADDR=127.0.0.1 -x MASTER_PORT=... plait train ...` starts its processes."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    ranks = []
    for rank in map(str, range(4)):
        env = {"OMPI_COMM_WORLD_RANK": rank, "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": rank}
        env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        ranks.append(plait.start(*small, *LAYOUT, "--out", tmp_path / "run", env=env))
    ended = [rank.ended() for rank in ranks]
    assert [rank.code for rank in ended] == [0] * 4, [rank.err for rank in ended]
    assert losses(tmp_path / "run") == pytest.approx(losses(run[0]), abs=1e-6)


def test_a_rank_of_a_launcher_that_fails_says_so_itself(plait: Driver, small: Sequence[object], tmp_path: Path) -> None:
    """No parent watches here: rank 0 says what ended the run, and so does the rank that failed."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    before = (
        "from plait.runtime.training import step\n"
        "def broken(run, *given, **named): raise ValueError('broken')\n"
        "if __import__('os').environ['RANK'] == '1': step.Run.step = broken"
    )
    ranks = []
    for rank in "01":
        env = {"RANK": rank, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        ranks.append(plait.start(*small, "--dp", 2, "--out", tmp_path / "run", env=env, before=before))
    first, second = (rank.ended() for rank in ranks)
    assert (second.code, second.sentence) == (3, "Rank 1 failed: ValueError: broken")
    assert (first.code, first.sentence) == (3, "Rank 1 failed: ValueError: broken")


def test_numbers_that_go_bad_under_a_launcher(plait: Driver, small: Sequence[object], tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    env = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    more = ("--lr", "1e30", "--clip", 0, "--steps", 20, "--out", tmp_path / "run")
    assert plait.run(*small, *more, env=env).code == 7


def test_a_configuration_is_the_same_run_as_its_flags(
    plait: Driver, text: Path, run: tuple[Path, str], tmp_path: Path
) -> None:
    (tmp_path / "run.toml").write_text(
        f'model = "llama-tiny"\ndata = "{text}"\ntokenizer = "bytes"\nseq = 32\nbatch = 4\nsteps = 3\ndp = 1\npp = 2\n'
    )
    command = ("train", "--config", "run.toml", "--dp", 2, "--sample", 0, "--out", "run")
    assert plait.run(*command, cwd=tmp_path).code == 0
    assert losses(tmp_path / "run") == losses(run[0])


def test_two_runs_at_once_into_one_folder(plait: Driver, small: Sequence[object], tmp_path: Path) -> None:
    """One is refused, and the other is whole."""
    commands = [plait.start(*small, "--out", tmp_path / "run") for _ in range(2)]
    ended = sorted((command.ended() for command in commands), key=lambda one: one.code)
    assert [one.code for one in ended] == [0, 2]
    ended[1].refused("already holds a run")
    assert len(losses(tmp_path / "run")) == 3


def test_a_proof_and_a_sample(plait: Driver, small: Sequence[object], tmp_path: Path) -> None:
    more = ("--tp", 2, "--steps", 1, "--prove", 1, "--sample", 4, "--prompt", "", "--out", tmp_path / "run")
    ended = plait.run(*small, *more)
    assert ended.code == 0, ended.err
    assert "proof: equal to one process in the same 1 step (fp64" in ended.out


NAMES = ["a b", "ü", "[/red] [bold]", ":smile:", "\udcff"]


@pytest.mark.parametrize("name", NAMES)
def test_odd_names(plait: Driver, text: Path, tmp_path: Path, name: str) -> None:
    """Of the model, the data and the run, all relative, from a terminal of forty columns that knows little."""
    folder = tmp_path / name
    folder.mkdir(parents=True)
    model = Path(__file__).parents[2] / "src" / "plait" / "runtime" / "hf" / "presets" / "llama-tiny.json"
    (folder / "config.json").write_bytes(model.read_bytes())
    (folder / "text.txt").write_bytes(text.read_bytes())
    sizes = ("--tokenizer", "bytes", "--seq", 32, "--batch", 4, "--steps", 1, "--sample", 2)
    env: dict[str, str | None] = {"COLUMNS": "40", "TERM": "dumb", "PYTHONIOENCODING": None, "LC_ALL": "C"}
    command = ("train", name, "--data", f"{name}/text.txt", *sizes, "--out", f"{name}/run")
    ended = plait.run(*command, cwd=tmp_path, env=env)
    assert ended.code == 0, ended.err
    assert losses(folder / "run")


def test_a_text_of_one_letter(plait: Driver, small: Sequence[object], tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a")
    ended = plait.run(*small, "--dp", 2, "--data", tmp_path / "a.txt", "--out", tmp_path / "run")
    assert ended.code == 0, ended.err


def test_closed_standard_files(plait: Driver, small: Sequence[object], tmp_path: Path) -> None:
    """`plait train ... <&- >&- 2>&-`: no pipe or socket of ours takes their places."""
    command = plait.start(*small, "--dp", 2, "--out", tmp_path / "run", stdin=None, stdout=None, stderr=None)
    assert command.ended().code == 0
    assert len(losses(tmp_path / "run")) == 3


def test_threads_that_the_environment_asks_for(plait: Driver, tmp_path: Path) -> None:
    """numpy and torch start none that would forbid to fork. For real: they read this when they are imported."""
    env = {**plait.env, "OMP_NUM_THREADS": "4", "OPENBLAS_NUM_THREADS": "4", "MKL_NUM_THREADS": "4"}
    argv = [sys.executable, "-m", "plait", "check", "llama-tiny", "--dp", "2"]
    ended = subprocess.run(argv, env=env, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, ""), ended.stderr
    assert "equals one process" in ended.stdout


# --- on a terminal


def on_a_terminal(plait: Driver, *argv: object, env: dict[str, str | None]) -> tuple[int, str]:
    """The exit code and what came out on a pseudo-terminal."""
    control, terminal = pty.openpty()
    said = bytearray()

    def listen() -> None:
        while True:
            try:
                data = os.read(control, 1 << 16)
            except OSError:  # Linux's way to say that the last writer is gone
                return
            if not data:
                return
            said.extend(data)

    listener = threading.Thread(target=listen)
    listener.start()
    command = plait.start(*argv, env=env, stdout=os.ttyname(terminal))
    until(lambda: said or not command.processes())
    ended = command.ended()
    os.close(terminal)
    listener.join(PATIENCE_S)
    os.close(control)
    return ended.code, said.decode()


def test_on_a_terminal_a_bar_moves(plait: Driver, small: Sequence[object], tmp_path: Path) -> None:
    env: dict[str, str | None] = {"TERM": "xterm-256color", "COLUMNS": "100"}
    code, said = on_a_terminal(plait, *small, "--out", tmp_path / "run", env=env)
    assert code == 0
    assert "3/3" in said
    assert COLOUR.search(said)
    assert said.rindex("\x1b[?25h") > said.rindex("\x1b[?25l"), "the cursor is left hidden"


def test_no_color(plait: Driver) -> None:
    env: dict[str, str | None] = {"TERM": "xterm-256color", "NO_COLOR": "1"}
    code, said = on_a_terminal(plait, "schedule", "1f1b", env=env)
    assert code == 0
    assert not re.search(r"\x1b\[[\d;]*[349]\d[;m]", said), "a colour"
    code, said = on_a_terminal(plait, "schedule", "1f1b", env=env | {"NO_COLOR": None})
    assert re.search(r"\x1b\[[\d;]*[349]\d[;m]", said)


# --- check


def test_check_of_a_good_layout(plait: Driver) -> None:
    ended = plait.run("check", "llama-tiny", "--tp", 2, "--seq", 16)
    assert (ended.code, ended.err) == (0, "")
    assert "llama-tiny over pp 1 x dp 1 x tp 2 with sp, 1f1b, 1 microbatch equals one process" in ended.out
    assert "DIFFERS" not in ended.out


FAULTS = {
    "the tp sum left out": (
        ("--tp", 2),
        "import plait.runtime.comm.differentiable as d\nd.sum = lambda x, group, *, why: x",
        "step 1, microbatch 0: the output of model.embed_tokens",
    ),
    "the dp sum left out": (
        ("--dp", 2),
        "import plait.runtime.parallel.data as d\n"
        "from plait.runtime.comm.collectives import DONE\n"
        "d.all_reduce = lambda *given, **named: DONE",
        "step 1: the reduced gradient of lm_head.weight",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_check_of_a_bad_layout_names_the_place(plait: Driver, fault: str) -> None:
    degrees, before, place = FAULTS[fault]
    ended = plait.run("check", "llama-tiny", *degrees, "--seq", 16, before=before, env={"COLUMNS": "120"})
    assert (ended.code, ended.err) == (1, "")
    assert "DIFFERS from one process" in ended.out
    listed = ended.out.partition("depart, in this order:\n")[2].splitlines()
    assert listed[0].strip() == place, "the first comes first"
    assert re.match(r"  and \d+ more", listed[8])
    assert f"first departure (module): {place}" in ended.out
    axis = degrees[0].removeprefix("--")
    assert f"likely: the sum over {axis} is missing" in ended.out


def test_a_proof_that_fails_ends_before_the_training(plait: Driver, small: Sequence[object], tmp_path: Path) -> None:
    degrees, before, _ = FAULTS["the dp sum left out"]
    ended = plait.run(*small, *degrees, "--prove", 1, "--out", tmp_path / "run", before=before)
    assert (ended.code, ended.err) == (1, "")
    assert "proof: NOT equal to one process" in ended.out
    assert not (tmp_path / "run").exists()


# --- the others


def test_version_and_help(plait: Driver) -> None:
    assert plait.run("--version").out == "plait 0.1.0\n"
    assert "Train MODEL" in plait.run("train", "--help").out
    for argv in ((), ("config",)):
        ended = plait.run(*argv)
        assert ended.code == 2
        assert ended.err.startswith("Usage: plait")


def test_config_show_says_where_values_come_from(plait: Driver, tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text("dp = 2\nlr = 1\n")
    ended = plait.run("config", "show", "--config", "a.toml", "--dp", 4, cwd=tmp_path)
    assert (ended.code, ended.err) == (0, "")
    rows = {words[0]: words[1:] for line in ended.out.splitlines() if (words := line.split())}
    assert rows["dp"] == ["4", "flag"]
    assert rows["lr"] == ["1.0", "a.toml"]
    assert rows["tp"] == ["1", "default"]
    assert rows["model"] == ["llama-tiny", "default"]


@pytest.mark.parametrize(
    ("name", "microbatches", "bubble"), [("naive", 1, "75.0%"), ("gpipe", 8, "27.3%"), ("1f1b", 8, "27.3%")]
)
def test_schedules_are_drawn(plait: Driver, tmp_path: Path, name: str, microbatches: int, bubble: str) -> None:
    svg = tmp_path / "a b.svg"
    for columns in ("20", "40", "200"):
        command = ("schedule", name, "--microbatches", microbatches, "--svg", svg)
        ended = plait.run(*command, env={"COLUMNS": columns, "TERM": "dumb", "PYTHONIOENCODING": "ascii"})
        assert (ended.code, ended.err) == (0, "")
        assert f"bubble {bubble}" in ended.out.replace("\n", " ")
    assert svg.read_text().startswith("<svg")


def test_all_schedules_are_compared_and_drawn(plait: Driver, tmp_path: Path) -> None:
    command = ("schedule", "all", "--pp", 2, "--microbatches", 4)
    ended = plait.run(*command, "--svg", tmp_path / "all.svg", env={"COLUMNS": "80"})
    assert (ended.code, ended.err) == (0, "")
    rows = {words[0]: words[1:] for line in ended.out.splitlines() if (words := line.split())}
    assert rows["1f1b"][:6] == ["1", "20.0%", "15", "F", "2", "1.00"]
    assert rows["naive"][:4] == ["The", "schedule", "naive", "takes"]
    for name in METHODS:
        assert f"{name}, 2 ranks" in ended.out or rows[name][0] == "The", name
    assert "1f1b, 2 ranks, 4 microbatches: bubble 20.0%, 15 F" in (tmp_path / "all.svg").read_text()
    ended = plait.run(*command, "--json")
    found = {one["schedule"]: one for one in map(json.loads, ended.out.splitlines())}
    assert list(found) == list(METHODS)
    assert found["1f1b"]["live"] == [2, 1]
    assert "refused" in found["naive"]


def test_doctor(plait: Driver) -> None:
    ended = plait.run("doctor")
    assert (ended.code, ended.err) == (0, "")
    assert re.search(r"^2 ranks, Gloo +ok *$", ended.out, re.MULTILINE)
    assert re.search(r"^2 ranks, shared memory +ok *$", ended.out, re.MULTILINE)


# --- where the ranks run

GPUS = (
    "import torch, torch.distributed\n"
    "torch.cuda.is_available = torch.distributed.is_nccl_available = lambda: True\n"
    "torch.cuda.device_count = lambda: 1"
)


def test_more_local_ranks_than_gpus_run_on_the_cpus(
    plait: Driver, small: Sequence[object], run: tuple[Path, str], tmp_path: Path
) -> None:
    ended = plait.run(*small, *LAYOUT, "--out", tmp_path / "run", before=GPUS)
    assert (ended.code, ended.sentence) == (0, "4 ranks, 1 GPUs: the ranks run on the CPUs.")
    assert losses(tmp_path / "run") == losses(run[0])


def test_a_launcher_with_more_ranks_than_gpus(plait: Driver, small: Sequence[object], tmp_path: Path) -> None:
    env = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    ended = plait.run(*small, "--dp", 2, "--out", tmp_path / "run", before=GPUS, env=env)
    ended.refused("Rank 1 wants GPU 1, but this machine has 1: start 1 ranks here")
