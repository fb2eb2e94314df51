"""Bad input is refused before any rank starts: code 2, one sentence with the numbers and a way out, nothing written."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from tests.cli.commands import Driver, Ended

TINY: dict[str, Any] = json.loads(resources.files("plait.runtime.hf").joinpath("presets/llama-tiny.json").read_text())
MOST_S = 15


class Refusals:
    """Runs what must be refused, and sees that nothing is left of it."""

    def __init__(self, plait: Driver, small: Sequence[object], folder: Path) -> None:
        self.plait, self.small, self.folder = plait, small, folder
        self.out = folder / "new" / "run"

    def __call__(self, *argv: object, **how: Any) -> Ended:
        ended = self.plait.run(*argv, "--out", self.out, cwd=self.folder, **how)
        assert not self.out.parent.exists(), "something was written"
        assert ended.seconds < MOST_S
        assert ended.code == 2, (ended.code, ended.out, ended.err)
        assert ended.sentence.endswith((".", "?", "--help")), ended.sentence
        return ended

    def flags(self, *argv: object, **how: Any) -> str:
        """The sentence that refuses a small run with these flags more."""
        return self(*self.small, *argv, **how).refused()

    def toml(self, text: str | bytes) -> str:
        file = self.folder / "run.toml"
        file.write_bytes(text if isinstance(text, bytes) else text.encode())
        return self("train", "llama-tiny", "--config", file).refused()

    def model(self, config: str | bytes | dict[str, Any]) -> str:
        """The sentence that refuses a directory with this config.json; a dict holds what differs from llama-tiny's."""
        folder = self.folder / "model"
        folder.mkdir(exist_ok=True)
        text = json.dumps({**TINY, **config}) if isinstance(config, dict) else config
        (folder / "config.json").write_bytes(text if isinstance(text, bytes) else text.encode())
        return self("train", folder, *self.small[2:]).refused()


@pytest.fixture
def refused(plait: Driver, small: Sequence[object], tmp_path: Path) -> Iterator[Refusals]:
    return Refusals(plait, small, tmp_path)


# --- flags


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("-n 4 --tp 3", "dp 1 x tp 3 x pp 1 = 3 ranks are described, but 4 are asked for: start 3 ranks, or choose"),
        ("-n 6 --tp 2", "2 ranks are described, but 6 are asked for: set dp 3, or start 2 ranks."),
        ("--tp 5", "this model takes tp 1, 2, 3, 4 or 8."),
        ("--tp 12", "tp 12 is more than the 8 heads that read the 4 KV heads (8 heads in groups of 2)"),
        ("--tp 2 --sp --seq 1", "sp deals the 1 tokens of a row to 2 ranks: set sp false, or seq 2 or more."),
        ("--sp", "sp deals the tokens of a row to tp ranks, and tp is 1: set sp false, or tp 2 or more."),
        ("--pp 5", "the model has 4 blocks: set pp 4 or less."),
        ("--dp 3", "batch 4 does not divide into dp 3 equal parts: set batch 6."),
        ("--microbatches 5", "set batch 5, or microbatches 4 or less."),
        ("--batch 1 --dp 2", "batch 1 < dp 2 x microbatches 1 = 2: set batch 2."),
        ("--schedule naive --microbatches 4", "microbatches is 4. Set microbatches 1, or use gpipe or 1f1b."),
        ("--schedule 1f1B", "Did you mean '1f1b'?"),
        ("--seq 513", "seq 513 is longer than the 512 positions of this model: set seq 512 or less."),
        ("--dpp 2", "No such option: --dpp"),
        ("--lr_floor 0", "Possible options: --lr-floor"),
        ("--lr abc", "'--lr'"),
        ("--lr nan", "lr cannot be nan"),
        ("--lr inf", "lr cannot be inf"),
        ("--lr 0", "lr cannot be 0.0"),
        ("--steps 0", "steps cannot be 0"),
        ("--steps -1", "steps cannot be -1"),
        ("--steps 1.5", "'--steps'"),
        ("--seq 0", "seq cannot be 0"),
        ("--dp 0", "dp cannot be 0"),
        ("--compute fp8", "'fp32', 'bf16' or 'fp16'"),
        ("--sample -1", "'--sample'"),
        ("--prove -1", "'--prove'"),
        ("again", "unexpected extra argument"),
    ],
)
def test_a_flag(refused: Refusals, flags: str, words: str) -> None:
    assert words in refused.flags(*flags.split())


@pytest.mark.parametrize(
    "flags",
    [
        "-n 512 --dp 512 --batch 512",
        "--dp 65 --batch 65",
        "-n 1000000007 --tp 2",
        "--microbatches 1000000000 --batch 1000000000",
        "--microbatches 40000 --batch 40000",
        "--pp 100000000",
        "--batch 1000000000000",
        "--dp 100000000000000000000",
        "--seed 100000000000000000000",
        f"--steps {10**30}",
    ],
)
def test_numbers_that_would_eat_the_machine(refused: Refusals, flags: str) -> None:
    assert re.search(r"the most is [\d,]+", refused.flags(*flags.split()))


def test_the_advice_is_good(plait: Driver, small: Sequence[object], refused: Refusals, tmp_path: Path) -> None:
    way = re.search(r"set dp (\d+)", refused.flags("-n", 4, "--pp", 2))
    assert way is not None
    ended = plait.run(*small, "-n", 4, "--pp", 2, "--dp", way[1], "--out", tmp_path / "run")
    assert ended.code == 0, ended.err
    assert "over 4 ranks" in ended.out


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("train", "llama-tin"), "Did you mean 'llama-tiny'? Presets: bloom-tiny, "),
        (("train",), "plait train needs a MODEL: a preset"),
        (("train", "no/such/folder"), "There is no preset or directory 'no/such/folder'."),
        (("train", "x" * 300), "file name too long"),
        (("train", "llama-tiny", "--config", "none.toml"), "none.toml cannot be read: no such file or directory."),
        (("train", "llama-tiny", "--config", "/"), "/ cannot be read: is a directory."),
    ],
)
def test_a_name(refused: Refusals, argv: tuple[str, ...], words: str) -> None:
    assert words in refused(*argv).refused()


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("trian",), "Did you mean 'train'?"),
        (("check",), "plait check needs a MODEL"),
        (("check", "llama-tiny", "--dp", "200", "--batch", "200"), "200 local ranks"),
        (("schedule", "1f1c"), "Did you mean '1f1b'?"),
        (("schedule", "1f1b", "--pp", "0"), "at least 1 stage"),
        (("schedule", "naive", "--microbatches", "2"), "Set microbatches 1"),
        (
            ("schedule", "interleaved", "--chunks", "1"),
            "puts 2 or more stages on a rank, but chunks is 1. Set chunks 2.",
        ),
        (("schedule", "zb-h1", "--chunks", "3"), "but chunks is 3. Set chunks 1."),
        (("schedule", "all", "--pp", "0"), "at least 1 stage"),
        (("schedule", "all", "--pp", "100000", "--microbatches", "100000"), "the most is 32,768"),
        (("schedule", "gpipe", "--pp", "100000", "--microbatches", "100000"), "the most is 32,768"),
        (("schedule", "1f1b", "--svg", "/no/such/place.svg"), "cannot be written: no such file or directory."),
        (("schedule", "1f1b", "--svg", "/"), "cannot be written: is a directory."),
        (("config", "show", "--tp", "x"), "'--tp'"),
        (("demo", "--out", "/dev/null/x"), "/dev/null is not a directory"),
    ],
)
def test_other_commands(plait: Driver, argv: tuple[str, ...], words: str) -> None:
    ended = plait.run(*argv)
    assert ended.code == 2, (ended.out, ended.err)
    assert words in ended.sentence


def test_a_hub_name_without_a_network_is_refused_at_once(refused: Refusals) -> None:
    """The hub's own client would try for half a minute."""
    env = {"HF_ENDPOINT": "http://no-such-host.invalid", "HTTP_PROXY": None, "HTTPS_PROXY": None, "ALL_PROXY": None}
    env |= {name.lower(): None for name in env if "PROXY" in name}
    before = (
        "from huggingface_hub import constants; constants.ENDPOINT = 'http://no-such-host.invalid'; "
        "constants.HF_HUB_OFFLINE = False"
    )
    sentence = refused("train", "somebody/something", env=env, before=before).refused()
    assert "no-such-host.invalid cannot be reached" in sentence
    assert "llama-10m, llama-tiny" in sentence.partition("Presets that need no hub: ")[2]


def test_a_prompt_that_is_no_text(refused: Refusals) -> None:
    assert "is not text in UTF-8" in refused.flags("--prompt", "\udcff")


def test_the_real_command_says_it_alone(plait: Driver, tmp_path: Path) -> None:
    """Once without the driver: nothing that is imported adds a line."""
    argv = [sys.executable, "-m", "plait", "train", "llama-tiny", "--tp", "5", "--out", "run"]
    ended = subprocess.run(argv, env=plait.env, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert re.fullmatch(r"plait: tp 5 is more than .*\n", ended.stderr)
    assert not list(tmp_path.iterdir())


# --- the configuration file


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("lr = ", "is not valid TOML"),
        (b"\xff\xfe", "is not valid TOML"),
        ("a = " + "[" * 100_000, "is not valid TOML"),
        ("warmupp = 1", "unknown key 'warmupp'. Did you mean 'warmup'?"),
        ("lr-floor = 0.1", "unknown key 'lr-floor'. Did you mean 'lr_floor'?"),
        ("[train]\ndp = 2", "unknown key 'train'"),
        ("dp = '2'", "dp cannot be '2'"),
        ("dp = 2.0", "dp cannot be 2.0"),
        ("dp = true", "dp cannot be True"),
        ("dp = [2]", "dp cannot be [2]"),
        ("lr = '1e-3'", "lr cannot be '1e-3'"),
        ("lr = inf", "lr cannot be inf"),
        ("data = 3", "data cannot be 3"),
        ("steps = 0", "steps cannot be 0"),
        ("schedule = 'zb'", "There is no schedule 'zb'"),
        (f"dp = {10**30}", "the most is"),
    ],
)
def test_the_configuration(refused: Refusals, content: str | bytes, words: str) -> None:
    sentence = refused.toml(content)
    assert words in sentence
    assert "run.toml" in sentence or words.startswith(("the most", "There is no"))


def test_a_bad_value_in_the_file_is_blamed_on_the_file_even_when_a_flag_mends_it(refused: Refusals) -> None:
    (refused.folder / "run.toml").write_text("dp = 0")
    assert refused("train", "llama-tiny", "--config", "run.toml", "--dp", 1).sentence.startswith("run.toml: dp")


# --- the data


def test_data_that_is_not_there(refused: Refusals) -> None:
    assert "There is no file or directory nowhere.txt." in refused.flags("--data", "nowhere.txt")
    assert "Did you mean 'stdlib'?" in refused.flags("--data", "stdlb")


@pytest.mark.parametrize("content", [b"", b" \n\n ", b"a\0b"])
def test_data_without_text(refused: Refusals, content: bytes) -> None:
    (refused.folder / "a.txt").write_bytes(content)
    assert "a.txt" in refused.flags("--data", "a.txt")


def test_a_folder_without_text(refused: Refusals) -> None:
    (refused.folder / "empty").mkdir()
    assert "has no text" in refused.flags("--data", "empty")


def test_a_name_with_a_newline_stays_in_one_line(refused: Refusals) -> None:
    assert r"a\nb\x1b[31m.txt" in refused.flags("--data", "a\nb\x1b[31m.txt")


# --- the model


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ("{", "config.json is not readable JSON"),
        (b"\xff", "config.json is not readable JSON"),
        ("[" * 100_000, "config.json is not readable JSON"),
        ('{"model_type": "llama", "rms_norm_eps": NaN}', "NaN is not a number of JSON"),
        ("[]", "must hold a JSON object, not a list."),
        ("{}", "has no model_type"),
        ({"model_type": None}, "has no model_type"),
        ({"model_type": "lama"}, "Did you mean 'llama'?"),
        ({"model_type": "nothing"}, "model_type 'nothing'; this version has proven arcee, "),
        ({"model_type": "persimmon"}, "model_type 'persimmon'; this version has proven arcee, "),
        ({"model_type": "mamba"}, "model_type 'mamba', which carries a state through a row, across the documents"),
        ({"model_type": "doge"}, "this version does not lay it out"),
        ({"hidden_size": -1}, "has hidden_size -1; it must be a whole number from 1"),
        ({"hidden_size": 0}, "has hidden_size 0"),
        ({"hidden_size": "64"}, "has hidden_size '64'"),
        ({"hidden_size": 64.5}, "has hidden_size 64.5"),
        ({"num_hidden_layers": True}, "has num_hidden_layers True"),
        ({"hidden_size": 10**12}, "has hidden_size 1000000000000"),
        ({"num_hidden_layers": 10**6}, "has num_hidden_layers 1000000; the most is 10000."),
        ({"hidden_size": 2**20, "intermediate_size": 2**20}, "and this machine has"),
        ({"vocab_size": 2**31 - 1}, "and this machine has"),
        ({"hidden_size": 2**31 - 16}, "cannot build"),
        ({"vocab_size": 200}, "choose a model with 257 or more."),
        ({"hidden_size": 65}, "The hidden size (65) is not a multiple of the number of attention heads (8)"),
        ({"num_key_value_heads": 3}, "set num_key_value_heads to 1, 2, 4 or 8."),
        ({"head_dim": 7}, "even"),
        ({"rope_scaling": {"rope_type": "spiral"}}, "'spiral'"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor"),
        ({"rope_scaling": {"rope_type": "linear", "factor": -1}}, "factor"),
        ({"rope_scaling": 3}, "rope"),
        ({"rope_theta": "big"}, "rope_theta 'big'"),
        ({"rope_theta": 0}, "rope_theta 0"),
        ({"hidden_act": "sillu"}, "Did you mean 'silu'?"),
        ({"hidden_act": "prelu"}, "which has parameters of its own (weight) that no rule of the model draws"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps"),
        ({"dtype": "float99"}, "float99"),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, "remove quantization_config"),
        ({"return_dict": False}, "remove it from its config.json."),
        ({"output_hidden_states": True}, "remove it from its config.json."),
    ],
)
def test_a_config_json(refused: Refusals, config: str | bytes | dict[str, Any], words: str) -> None:
    assert words in refused.model(config)


def test_a_check_that_the_machine_has_no_room_for(plait: Driver, refused: Refusals, tmp_path: Path) -> None:
    """Memory for the model as it is, and files of a proof that is longer than any disk."""
    large = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "vocab_size": 32000}
    (tmp_path / "large").mkdir()
    (tmp_path / "large" / "config.json").write_text(json.dumps({**TINY, **large}))
    said = plait.run("check", tmp_path / "large", "--full", "--pp", 2).refused("GiB for 2 ranks", "leave --full out")
    millions, reference, ranks, have = map(number, re.findall(r"([\d,.]+) (?:M|GiB)", said))
    assert reference > millions * 1e6 * 160 / 2**30 > ranks > have
    said = refused.flags("--prove", 10**7, "--steps", 10**7)
    assert re.search(r"takes [\d,.]+ GiB of files in \S+, which has [\d,.]+ GiB free: set TMPDIR", said)


def number(text: str) -> float:
    return float(text.replace(",", ""))


def test_a_folder_with_weights_that_cannot_be_read(refused: Refusals) -> None:
    refused.model("[]")
    (refused.folder / "model" / "model-00001-of-00002.safetensors").touch()
    assert "has model-00001-of-00002.safetensors, but weights are read from" in refused.model({})


def test_a_folder_without_a_config(refused: Refusals) -> None:
    assert "has no config.json." in refused("train", refused.folder).refused()


# --- where the run is written


@pytest.fixture(scope="module")
def run(plait: Driver, small: Sequence[object], tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "run"
    assert plait.run(*small, "--out", out).code == 0
    return out


def test_a_folder_that_holds_a_run(plait: Driver, small: Sequence[object], run: Path, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(run)
    before = (run / "metrics.jsonl").read_bytes()
    for out in (run, link):
        sentence = plait.run(*small, "--out", out).refused()
        assert sentence.endswith("already holds a run: choose another --out, or replace it with --overwrite.")
    # Nor does a run that cannot begin replace it.
    assert plait.run(*small, "--out", run, "--overwrite", "--data", "nowhere").code == 2
    assert (run / "metrics.jsonl").read_bytes() == before
    assert plait.run(*small, "--out", run, "--overwrite", "--steps", 1).code == 0
    assert len((run / "metrics.jsonl").read_text().splitlines()) == 1


def test_a_place_that_cannot_be(plait: Driver, small: Sequence[object], tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    dangling = tmp_path / "dangling"
    dangling.symlink_to(tmp_path / "nowhere")
    for out in (file, file / "below", dangling):
        assert "is not a directory. Name another." in plait.run(*small, "--out", out).refused()
    assert "file name too long." in plait.run(*small, "--out", tmp_path / "a" / ("y" * 300)).refused()
    assert not (tmp_path / "a").exists()
    if Path("/proc/self").exists():
        plait.run(*small, "--out", "/proc/nowhere/run").refused("cannot be written")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_place_without_permission(plait: Driver, small: Sequence[object], tmp_path: Path) -> None:
    (tmp_path / "locked").mkdir(mode=0o500)
    plait.run(*small, "--out", tmp_path / "locked" / "run").refused("permission denied")


def test_a_directory_that_is_gone(plait: Driver, small: Sequence[object], tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    before = f"import os; os.rmdir({str(gone)!r})"
    plait.run(*small, "--out", "run", cwd=gone, before=before).refused("the current directory is gone")


# --- launchers


ONE = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("env", "words"),
    [
        ({"RANK": "0"}, "The environment sets RANK but not WORLD_SIZE, MASTER_ADDR, MASTER_PORT"),
        ({"WORLD_SIZE": "2"}, "The environment sets WORLD_SIZE but not RANK, MASTER_ADDR, MASTER_PORT"),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "sets OMPI_COMM_WORLD_SIZE but not RANK, MASTER_ADDR, MASTER_PORT"),
        ({"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1"}, "set MASTER_ADDR, MASTER_PORT too (mpirun -x"),
        ({**ONE, "RANK": "one"}, "RANK is 'one'; it must be a whole number."),
        ({**ONE, "RANK": "1"}, "RANK 1 is not in a world of WORLD_SIZE 1"),
        ({**ONE, "MASTER_PORT": "http"}, "MASTER_PORT is 'http'"),
        ({**ONE, "MASTER_PORT": "99999"}, "MASTER_PORT 99999 is not a port"),
        ({**ONE, "MASTER_ADDR": "no-such-host.invalid"}, "MASTER_ADDR 'no-such-host.invalid' is not a host"),
        ({**ONE, "WORLD_SIZE": "3"}, "dp 2 x tp 1 x pp 1 = 2 ranks are described, but 3 are asked for"),
        ({**ONE, "WORLD_SIZE": "4"}, "set dp 4, or start 2 ranks"),
    ],
)
def test_a_launcher(refused: Refusals, env: dict[str, str], words: str) -> None:
    assert words in refused.flags("--dp", 2, env=env)


def test_a_launcher_and_what_it_cannot_do(plait: Driver, refused: Refusals) -> None:
    assert "leave -n out" in refused.flags("-n", 2, env=ONE)
    assert "run plait check first" in refused.flags("--prove", 1, env=ONE)
    plait.run("check", "llama-tiny", env=ONE).refused("run it without")


def test_a_port_in_use(refused: Refusals) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        sentence = refused.flags(env={**ONE, "MASTER_PORT": str(port)})
    assert sentence == f"Port {port} on 127.0.0.1 is in use: set MASTER_PORT to a free port."


def test_an_open_file_limit(refused: Refusals) -> None:
    before = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (24, 24))"
    assert "allows 24 open files" in refused.flags("--dp", 32, "--batch", 32, before=before)
