"""Ranks that a launcher started, each a process of its own: no parent sees them, they see each other through a store."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from plait.design.errors import PlanError
from plait.runtime.comm import address
from tests.cli.commands import PATIENCE_S, Command, Driver, until
from tests.cli.ports import attack, listening, nobody_listens
from tests.cli.test_failures import LONG, SAID_S, SEEN_S, SOON_S
from tests.cli.test_watchdog import OTHERWISE, last_sentence


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


class Launch:
    """Starts `size` ranks of one run, as torchrun would."""

    def __init__(self, plait: Driver, small: Sequence[object], out: Path) -> None:
        self.plait, self.small, self.out = plait, small, out
        self.port = free_port()
        self.metrics = out / "metrics.jsonl"

    def __call__(
        self, size: int, *more: object, each: Callable[[int], Sequence[object]] = lambda rank: (), before: str = "",
        **env: str,
    ) -> list[Command]:  # fmt: skip
        started = []
        for rank in range(size):
            own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
            own |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": self.port}
            words = {name: str(value) for name, value in (own | env).items()}
            argv = (*self.small, *more, *each(rank), "--out", self.out)
            started.append(self.plait.start(*argv, env=words, before=before))
        return started


@pytest.fixture
def launch(plait: Driver, small: Sequence[object], tmp_path: Path) -> Launch:
    return Launch(plait, small, tmp_path / "run")


def no_process_left(commands: Sequence[Command]) -> None:
    begun = time.monotonic()
    until(lambda: not any(command.processes() for command in commands))
    assert time.monotonic() - begun < SOON_S


@pytest.mark.parametrize("rank", [0, 2])
def test_p110_a_rank_that_is_killed(launch: Launch, rank: int) -> None:
    """Rank 0 tells of another's death and where everyone was; when rank 0 dies, the others tell."""
    commands = launch(4, "--dp", 2, "--tp", 2, *LONG)
    commands[0].stepping(launch.metrics)
    ports = listening([pid for command in commands for pid in command.processes()])
    assert ("127.0.0.1", launch.port) in ports
    begun = time.monotonic()
    os.kill(commands[rank].pid, signal.SIGKILL)
    assert commands[rank].ended().code == 128 + signal.SIGKILL
    ended = {other: commands[other].ended() for other in range(4) if other != rank}
    assert time.monotonic() - begun < SEEN_S + SAID_S
    assert [one.code for one in ended.values()] == [3, 3, 3], [one.err for one in ended.values()]
    if rank:
        assert ended[0].sentence == "Rank 2 died: nothing was heard of it for 3 s, or its process is gone."
        assert any(line.startswith("rank 2: dead; ") for line in ended[0].ranks)
        assert any(re.match(r"ranks? .*: waiting for ranks? .*2.* in .*, step \d+$", line) for line in ended[0].ranks)
        assert ended[1].err == ended[3].err == ""
    else:
        assert ended[1].sentence == "Rank 1 has lost the store of rank 0: rank 0, or what keeps the store, is gone."
        assert ended[1].ranks[0].startswith("rank 1: waiting in ")
    no_process_left(commands)
    nobody_listens(ports)


def test_p110_an_agent_that_is_killed(plait: Driver, small: Sequence[object], tmp_path: Path) -> None:
    """torchrun itself: its ranks end with the store that it kept."""
    out = tmp_path / "run"
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-addr", "127.0.0.1"]
    command = [*map(str, (*small, "--dp", 2, *LONG)), "--out", str(out)]
    argv = [sys.executable, *launcher, "--master-port", str(free_port()), "-m", "plait", *command]
    with (tmp_path / "err").open("w") as err:
        agent = subprocess.Popen(argv, env=plait.env, stdout=subprocess.DEVNULL, stderr=err, start_new_session=True)
    run = Command(plait, agent.pid, tmp_path)
    run.stepping(out / "metrics.jsonl")
    # torchrun gives each rank a session of its own.
    ranks = [pid for pid in children(agent.pid) if pid != agent.pid]
    assert len(ranks) >= 2
    agent.kill()
    agent.wait(PATIENCE_S)
    begun = time.monotonic()
    until(lambda: not any(alive(pid) for pid in ranks))
    assert time.monotonic() - begun < SOON_S
    assert "has lost the store of rank 0" in (tmp_path / "err").read_text()


def children(parent: int) -> list[int]:
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            if int(stat.read_text().rpartition(")")[2].split()[1]) == parent:
                found.append(int(stat.parent.name))
        except OSError:
            continue
    return found


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_a_rank_that_is_stopped(launch: Launch) -> None:
    commands = launch(2, "--dp", 2, "--hang-timeout", 2, *LONG)
    commands[0].stepping(launch.metrics)
    os.kill(commands[1].pid, signal.SIGSTOP)
    begun = time.monotonic()
    ended = commands[0].ended()
    assert time.monotonic() - begun < 2 + SAID_S
    os.kill(commands[1].pid, signal.SIGCONT)  # it finds the store gone
    assert commands[1].ended().code in (3, 4)
    assert ended.code == 4, ended.err
    assert re.match(
        rf"Rank 1 never came \(stopped: kill -CONT {commands[1].pid} lets it go on\): rank 0 has waited", ended.sentence
    )
    no_process_left(commands)


def test_a_rank_that_is_stopped_for_a_moment_is_not_dead(launch: Launch) -> None:
    """Longer than what makes a rank dead of which nothing is heard: on one machine the system knows better."""
    commands = launch(2, "--dp", 2, "--steps", 40)
    commands[0].stepping(launch.metrics)
    os.kill(commands[1].pid, signal.SIGSTOP)
    time.sleep(SEEN_S + 1)
    os.kill(commands[1].pid, signal.SIGCONT)
    assert [(one.code, one.err) for one in (command.ended() for command in commands)] == [(0, "")] * 2


def test_calls_that_do_not_go_together(launch: Launch) -> None:
    """Gloo ends the process whose collective meets one of another size; it still comes out as what it is."""
    commands = launch(2, "--tp", 2, "--no-sp", before=OTHERWISE.format(call=5, action="x = x.double()"))
    ended = [command.ended() for command in commands]
    assert [one.code for one in ended] == [4, 4], [one.err for one in ended]
    assert "rank 0 called all_reduce float32 [4, 32, 64]" in last_sentence(ended[0].err)
    assert "but rank 1 called all_reduce float64 [4, 32, 64]" in last_sentence(ended[0].err)


def test_calls_of_one_size_but_not_one_meaning(launch: Launch) -> None:
    commands = launch(2, "--tp", 2, "--no-sp", before=OTHERWISE.format(call=5, action="how['op'] = 'max'"))
    ended = [command.ended() for command in commands]
    assert [one.code for one in ended] == [4, 4], [one.err for one in ended]
    assert ended[0].sentence.endswith("No rank takes step 1.")


def test_the_comm_check_of_a_good_run(launch: Launch) -> None:
    commands = launch(4, "--pp", 2, "--tp", 2, "--microbatches", 2, "--comm-check")
    assert [(one.code, one.err) for one in (command.ended() for command in commands)] == [(0, "")] * 4


def test_ranks_with_different_plans_are_refused(launch: Launch) -> None:
    commands = launch(2, "--dp", 2, each=lambda rank: ("--seed", 7 + rank))
    for command in commands:
        ended = command.ended()
        assert (ended.code, ended.sentence) == (
            2,
            "Rank 1 was started with seed 8 and rank 0 with seed 7: give every rank the same flags and the same "
            "configuration.",
        )


def test_p102_what_a_rank_prepares_has_no_limit(launch: Launch) -> None:
    """Rank 0, which keeps the store, comes 12 seconds late, which is four times the limit of a hang."""
    late = (
        "import os, time\nimport plait.runtime.comm.world as w\njoined = w.World.__init__\n"
        "def init(self, *given, **named):\n"
        "    time.sleep(12 if os.environ['RANK'] == '0' else 0)\n"
        "    joined(self, *given, **named)\n"
        "w.World.__init__ = init"
    )
    first, second = (command.ended() for command in launch(2, "--dp", 2, "--hang-timeout", 3, before=late))
    assert (first.code, first.err) == (0, "")
    assert second.code == 0
    assert second.sentence == f"rank 0 has not joined yet at 127.0.0.1:{launch.port}; rank 1 has waited 10 s."


def test_p147_ports_take_nothing_from_strangers(launch: Launch, tmp_path: Path) -> None:
    commands = launch(2, "--dp", 2, "--steps", 60, PLAIT_SECRET="a word of this job")
    commands[0].stepping(launch.metrics)
    ports = listening([pid for command in commands for pid in command.processes()])
    assert ("127.0.0.1", launch.port) in ports
    assert {place for place, _ in ports} == {"127.0.0.1"}
    attack(ports, tmp_path / "marker")
    assert len(launch.metrics.read_text().splitlines()) < 60  # it was still under way
    assert [(one.code, one.err) for one in (command.ended() for command in commands)] == [(0, "")] * 2
    assert not (tmp_path / "marker").exists()


# --- addresses


def at(found: str) -> Any:
    def getaddrinfo(host: str, port: int, *given: Any, **named: Any) -> list[Any]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (found, port))]

    return getaddrinfo


@pytest.mark.parametrize(
    ("found", "local", "refused"),
    [("127.0.1.1", 1, True), ("127.0.0.1", 2, True), ("10.7.0.1", 1, False), ("127.0.1.1", 4, False)],
)
def test_p107_several_nodes_do_not_meet_at_a_loopback_address(
    monkeypatch: pytest.MonkeyPatch, found: str, local: int, refused: bool
) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", at(found))
    if not refused:
        address.refuse_loopback("node-1", 29500, local_size=local, size=4)
        return
    with pytest.raises(PlanError) as caught:
        address.refuse_loopback("node-1", 29500, local_size=local, size=4)
    assert str(caught.value) == (
        f"MASTER_ADDR 'node-1' is {found} here, which no other node can reach, but {local} of 4 ranks are on this node: "
        f"set MASTER_ADDR to an address of rank 0's machine on the network between the nodes (ip addr shows them), or "
        f"correct 'node-1' in /etc/hosts."
    )


def test_p107_a_loopback_address_is_refused_by_the_command(plait: Driver, small: Sequence[object]) -> None:
    env = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    ended = plait.run(*small, "--dp", 2, env=env)
    ended.refused("MASTER_ADDR 'localhost' is ", "1 of 2 ranks are on this node", "set MASTER_ADDR to an address")
    assert ended.seconds < SOON_S


def test_p107_the_interface_that_leads_there(monkeypatch: pytest.MonkeyPatch) -> None:
    assert address.choose("127.0.0.1", 29500) == address.Interface("lo", "127.0.0.1")
    monkeypatch.setattr(address, "_names", lambda: ["lo", "eth7"])
    monkeypatch.setattr(address, "_addresses", lambda name: {"lo": ["127.0.0.1"], "eth7": ["127.0.0.5"]}[name])
    monkeypatch.setattr(address, "is_loopback", lambda found: False)
    monkeypatch.setattr(socket, "getaddrinfo", at("127.0.0.1"))
    assert address.choose("node-1", 29500) == address.Interface("lo", "127.0.0.1")
    monkeypatch.setattr(address, "_addresses", lambda name: [])
    assert address.choose("node-1", 29500) is None


NAMESPACES = """
mount --bind "$1/hosts" /etc/hosts
unshare -n sleep 100 & other=$!
trap 'kill $other' EXIT
while [ "$(readlink /proc/$other/ns/net)" = "$(readlink /proc/self/ns/net)" ]; do sleep 0.02; done
there="nsenter -t $other -n"
hostname node
ip link set lo up
ip link add veth-a type veth peer name veth-b netns $other
ip addr add 10.77.0.1/24 dev veth-a
ip link set veth-a up
$there ip link set lo up
$there ip addr add 10.77.0.2/24 dev veth-b
$there ip link set veth-b up
shift
export WORLD_SIZE=2 LOCAL_WORLD_SIZE=1 LOCAL_RANK=0 MASTER_ADDR=10.77.0.1 MASTER_PORT=29500
RANK=1 $there "$@" & second=$!
RANK=0 "$@"
first=$?
wait $second
exit $((first + $?))
"""
"""Two machines in a nutshell: two network namespaces on a wire, on both of which the machine's name is 127.0.1.1."""
UNSHARE = ["unshare", "--user", "--map-root-user", "--net", "--mount", "--uts"]
# Processes of their own too: all of them end, and with them the namespaces and the wire, when this one is killed.
UNSHARE += ["--pid", "--fork", "--kill-child", "--mount-proc"]


def may_unshare() -> bool:
    tools = all(shutil.which(tool) for tool in ("unshare", "nsenter", "ip", "mount"))
    probe = [*UNSHARE, "sh", "-c", "mount --bind /dev/null /etc/hosts && ip link add veth-a type veth peer name veth-b"]
    return tools and subprocess.run(probe, capture_output=True, check=False).returncode == 0


@pytest.mark.skipif(not may_unshare(), reason="needs to make network namespaces")
def test_p107_two_nodes_whose_name_is_a_loopback_address(
    plait: Driver, small: Sequence[object], tmp_path: Path
) -> None:
    (tmp_path / "hosts").write_text("127.0.0.1 localhost\n127.0.1.1 node\n")
    command = [sys.executable, "-m", "plait", *map(str, small), "--dp", "2", "--out", str(tmp_path / "run")]
    ended = subprocess.run(
        [*UNSHARE, "bash", "-c", NAMESPACES, "bash", str(tmp_path), *command],
        env=plait.env, capture_output=True, text=True, check=False, timeout=PATIENCE_S,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    for rank, end in enumerate("ab"):
        assert (
            f"plait: rank {rank} talks to the other nodes over veth-{end} (10.77.0.{rank + 1}), which leads to "
            f"MASTER_ADDR 10.77.0.1; GLOO_SOCKET_IFNAME names another." in ended.stderr
        )
    assert ended.stdout.count("step 3/3") == 1


def losses(folder: Path) -> list[float]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]


@pytest.mark.skipif(not may_unshare(), reason="needs ip (iproute2) and the right to make network namespaces")
@pytest.mark.parametrize(
    "layout",
    [("--dp", 4, "--zero", 3, "--replicas", 2),
     pytest.param(("--dp", 2, "--tp", 2, "--zero", 1), marks=pytest.mark.rest),
     pytest.param(("--dp", 2, "--pp", 2, "--zero", 3, "--microbatches", 2), marks=pytest.mark.rest)],
    ids=lambda words: "".join(map(str, words)),
)  # fmt: skip
def test_two_nodes_under_torchrun(
    plait: Driver, small: Sequence[object], tmp_path: Path, layout: tuple[object, ...]
) -> None:  # fmt: skip
    """An agent a node, two ranks each: a replica, the pieces of a layer, or a stage's copies. The losses are those of
    four ranks on one machine."""
    (tmp_path / "hosts").write_text("127.0.0.1 localhost\n127.0.1.1 node\n")
    agent = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "2"]
    agent += ["--master-addr", "10.77.0.1", "--master-port", "29501", "-m", "plait"]
    command = [*agent, *map(str, (*small, *layout)), "--out", str(tmp_path / "nodes")]
    node = 'first=$1; shift; exec "$first" "$1" "$2" --node-rank "$RANK" "${@:3}"'
    ended = subprocess.run(
        [*UNSHARE, "bash", "-c", NAMESPACES, "bash", str(tmp_path), "bash", "-c", node, "bash", *command],
        env=plait.env, capture_output=True, text=True, check=False, timeout=2 * PATIENCE_S,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert {end for end in "ab" if f"talks to the other nodes over veth-{end}" in ended.stderr} == {"a", "b"}
    alone = plait.run(*small, *layout, "--out", tmp_path / "one")
    assert (alone.code, alone.err) == (0, "")
    assert losses(tmp_path / "nodes") == losses(tmp_path / "one")
    assert len(losses(tmp_path / "one")) == 3
