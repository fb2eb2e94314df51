"""The processes of a run: who am I, on which device, and which groups am I in.

A `World` is joined once, closed once, and owns everything that torch.distributed made for it; nothing keeps a `Group`
past its world's close. The two ways in are `Rendezvous.from_environment()` (torchrun, or any launcher that sets RANK,
WORLD_SIZE, MASTER_ADDR and MASTER_PORT) and comm/nursery.py, which forks local ranks. How ranks meet is in comm/join.py.
Branches between CPU with Gloo and GPU with NCCL are here and in parallel/clock.py only.
"""

from __future__ import annotations

import mmap
import os
import socket
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from types import TracebackType

import torch
import torch.distributed as dist

from ...design.errors import PlanError
from ...design.mesh import Mesh
from ...design.plan import LocalTransport, Plan
from ...design.records import WORLD
from . import address
from .agree import Agreement, Peers, Shared
from .board import ENDED, JOINING, RUNNING, Board, Channel
from .join import Store, all_here, file_store, plans_agree, server_or_client
from .ledger import Ledger
from .remote import Remote
from .segment import Neighbours, meet, unsupported
from .shared import SharedMemory
from .transport import Distributed, Transport

MARGIN_S = 60.0
"""How much longer than the watchdog torch's own limit is: the watchdog speaks first, and knows more."""
VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
MPI = {
    "RANK": ("OMPI_COMM_WORLD_RANK", "PMI_RANK"),
    "WORLD_SIZE": ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE"),
    "LOCAL_RANK": ("OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID"),
    "LOCAL_WORLD_SIZE": ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS"),
}
"""What mpirun (Open MPI, MPICH and their kin) calls the same. It says nothing of where rank 0 is."""


@dataclass(frozen=True)
class Rendezvous:
    """Where the ranks of a run meet, and how long they wait for each other then: at `host` and `port`, or, when a parent
    forked them all, in a `file` and on a `board` that it made."""

    rank: int
    size: int
    host: str = ""
    port: int = 0
    local_rank: int = 0
    local_size: int | None = None
    board: mmap.mmap | None = None
    file: str = ""
    secret: str = ""
    agent_hosts_store: bool = False
    hang_timeout: float = 600
    comm_check: bool = False
    local_transport: LocalTransport = "auto"
    plan: Plan | None = None

    @property
    def local(self) -> bool:
        return self.board is not None

    def of(self, plan: Plan) -> Rendezvous:
        """The same for the ranks of a plan, which must be every rank's."""
        return replace(
            self, hang_timeout=plan.hang_timeout, comm_check=plan.comm_check, local_transport=plan.local_transport,
            plan=plan,
        )  # fmt: skip

    @classmethod
    def from_environment(cls) -> Rendezvous | None:
        """The launcher's word, or None when there is no launcher; half a word is refused."""
        said = _launcher_variables()
        if "RANK" not in said and "WORLD_SIZE" not in said:
            return None
        missing = [name for name in VARIABLES if name not in said]
        if missing:
            given, lacking = ", ".join(said[name][0] for name in VARIABLES if name in said), ", ".join(missing)
            raise PlanError(
                f"The environment sets {given} but not {lacking}: start with torchrun, set {lacking} too (mpirun -x "
                f"{missing[-1]}=... does), or unset {given} and use -n for local ranks."
            )
        rank, size, port = (_whole(*said[name]) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
        local_rank = _whole(*said["LOCAL_RANK"]) if "LOCAL_RANK" in said else rank
        if not 0 <= rank < size:
            raise PlanError(f"RANK {rank} is not in a world of WORLD_SIZE {size}: ranks count from 0 to {size - 1}.")
        if not 0 < port < 1 << 16:
            raise PlanError(f"MASTER_PORT {port} is not a port: choose a free one from 1024 to 65535.")
        host = said["MASTER_ADDR"][1]
        try:
            # Asked here because torch's store asks again and again for ten minutes.
            socket.getaddrinfo(host, port)
        except (OSError, UnicodeError):
            raise PlanError(f"MASTER_ADDR '{host}' is not a host that this machine can find; name rank 0's.") from None
        local_size = _whole(*said["LOCAL_WORLD_SIZE"]) if "LOCAL_WORLD_SIZE" in said else None
        if local_size is not None:
            address.refuse_loopback(host, port, local_size=local_size, size=size)
        return cls(
            rank, size, host, port, local_rank, local_size, secret=os.environ.get("PLAIT_SECRET", ""),
            agent_hosts_store=os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        )  # fmt: skip


def _launcher_variables() -> Mapping[str, tuple[str, str]]:
    """torchrun's name of each variable -> (the name it was set under, its value). mpirun's count only when it started
    more than one process: a shell inside a job may have inherited them."""
    names = (*VARIABLES, "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    said = {name: (name, os.environ[name]) for name in names if name in os.environ}
    if "RANK" in said or "WORLD_SIZE" in said:
        return said
    mpi = {name: (their, os.environ[their]) for name, theirs in MPI.items() for their in theirs if their in os.environ}
    return said if mpi.get("WORLD_SIZE", ("", "1"))[1] == "1" else said | mpi


def _whole(name: str, value: str) -> int:
    try:
        return int(value)
    except ValueError:
        raise PlanError(f"{name} is '{value}'; it must be a whole number.") from None


def _choose_interface(here: Rendezvous) -> None:
    """Decides over which interface Gloo talks when nobody has said: otherwise it takes the address that the machine's
    own name has, which may be one that nobody else can reach, or one that everybody can."""
    if "GLOO_SOCKET_IFNAME" in os.environ:
        return
    if here.local:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo0" if sys.platform == "darwin" else "lo"
        return
    interface = address.choose(here.host, here.port)
    if interface is None:
        return
    os.environ["GLOO_SOCKET_IFNAME"] = interface.name
    if here.local_size is not None and here.local_size < here.size and here.local_rank == 0:
        print(
            f"plait: rank {here.rank} talks to the other nodes over {interface.name} ({interface.address}), which leads "
            f"to MASTER_ADDR {here.host}; GLOO_SOCKET_IFNAME names another.",
            file=sys.stderr,
        )


@dataclass(frozen=True)
class Group:
    """Some ranks that talk: `index` is this rank's place among `ranks`. `transport` is None when it is alone, and so are
    its place on the board and what holds its calls against the others' (with --comm-check)."""

    axis: str
    ranks: tuple[int, ...]
    index: int
    ledger: Ledger
    transport: Transport | None
    board: Board | None = None
    channel: Channel | None = None
    checked: Agreement | None = None

    @property
    def size(self) -> int:
        return len(self.ranks)


class World:
    """The ranks of one run over the mesh of one plan; use as a context manager."""

    def __init__(self, rendezvous: Rendezvous, mesh: Mesh, *, device: str = "auto") -> None:
        if rendezvous.size != mesh.size:
            raise PlanError(f"The mesh {mesh} has {mesh.size} ranks, but {rendezvous.size} were started.")
        self.mesh = mesh
        self.rank = rendezvous.rank
        self.coordinate = mesh.coordinate(self.rank)
        self.ledger = Ledger()
        self.device = torch.device("cpu")
        backend = "gloo"
        if device == "auto" and _has_gpu(rendezvous):
            self.device = torch.device("cuda", rendezvous.local_rank)
            torch.cuda.set_device(self.device)
            backend = "nccl"
        _choose_interface(rendezvous)
        limit_s = rendezvous.hang_timeout + MARGIN_S
        store, peers = self._join(rendezvous)
        self._peers = peers
        self._agreement = Agreement(self.board, peers, self.rank, mesh.size, limit_s)
        self._checked = self._agreement if rendezvous.comm_check else None
        self._step = 0
        self._timeout = timedelta(seconds=limit_s)
        self._near = self._neighbours(rendezvous, store, limit_s)
        self._transports: dict[tuple[int, ...], Transport] = {}
        if self._near is None or self._near.size < mesh.size:
            dist.init_process_group(
                backend,
                store=store,
                rank=self.rank,
                world_size=mesh.size,
                timeout=self._timeout,
                device_id=self.device if backend == "nccl" else None,
            )
        self._groups: dict[tuple[str, ...], Group] = {}
        for axes in (("pp",), ("dp",), ("tp",)):
            self._groups[axes] = self._made(axes)
        self.board.enter(RUNNING)

    def _join(self, rendezvous: Rendezvous) -> tuple[Store, Peers]:
        """Waits until all ranks are here, which has a limit of its own: what a rank prepares may take long."""
        self._remote: Remote | None = None
        if rendezvous.board is not None:
            self.board = Board(rendezvous.board, self.rank)
            self.board.enter(JOINING)
            all_here(rendezvous.board, rendezvous.size)
            return file_store(rendezvous.file), Shared(self.board, rendezvous.size)
        self.board = Board.private()
        self.board.enter(JOINING)
        store, own = server_or_client(
            rendezvous.host, rendezvous.port, rendezvous.rank, rendezvous.size, rendezvous.secret,
            hosts=rendezvous.rank == 0 and not rendezvous.agent_hosts_store, speaks=rendezvous.local_rank <= 1,
        )  # fmt: skip
        plans_agree(store, rendezvous.plan, rendezvous.rank, rendezvous.size)
        self._remote = Remote(self.board, store, own, rendezvous.rank, rendezvous.size, rendezvous.hang_timeout)
        return store, self._remote

    def _neighbours(self, rendezvous: Rendezvous, store: Store, limit_s: float) -> Neighbours | None:
        """Those of the other ranks that this one shares memory with."""
        if self.mesh.size == 1 or rendezvous.local_transport == "torch":
            return None
        why = unsupported() or ("is for CPUs, and the ranks run on GPUs" if self.device.type != "cpu" else None)
        near = None if why else meet(store, self.rank, self.mesh.size, limit_s)
        if rendezvous.local_transport == "shared" and (near is None or near.size < self.mesh.size):
            why = why or "needs ranks on one host that can open each other's files in /proc"
            raise PlanError(f"local_transport shared {why}: set local_transport auto.")
        return near

    def _made(self, axes: tuple[str, ...]) -> Group:
        return self._over(".".join(axes), self.mesh.group(self.rank, *axes))

    def _over(self, axis: str, ranks: tuple[int, ...]) -> Group:
        # Two names for the same ranks are one channel: their calls meet on one transport.
        transport = channel = None
        if len(ranks) > 1:
            channel = self.board.channel(("group", ranks))
            transport = self._transports.get(ranks) or self._transport(ranks)
            self._transports[ranks] = transport
        return Group(axis, ranks, ranks.index(self.rank), self.ledger, transport, self.board, channel, self._checked)

    def _transport(self, ranks: tuple[int, ...]) -> Transport:
        if self._near is not None and self._near.has(ranks):
            return SharedMemory(self._near, ranks)
        if len(ranks) == self.mesh.size:
            assert dist.group.WORLD is not None
            return Distributed(dist.group.WORLD, ranks)
        handle = dist.new_group(list(ranks), timeout=self._timeout, use_local_synchronization=True)
        return Distributed(handle, ranks)

    def group(self, *axes: str) -> Group:
        """The ranks that differ from this one on `axes` (or factors of axes) only. One over several, or over a factor, is
        made when it is first asked for, by all of its ranks."""
        if axes not in self._groups:
            self._groups[axes] = self._made(axes)
        return self._groups[axes]

    @property
    def shared_bytes(self) -> int:
        """The most that this rank has had at a time in memory that it shares with others of its host."""
        return 0 if self._near is None else self._near.used

    @property
    def alone(self) -> Group:
        """This rank by itself."""
        return Group("none", (self.rank,), 0, self.ledger, None)

    @property
    def everyone(self) -> Group:
        return self._over(WORLD, tuple(range(self.mesh.size)))

    def begin(self, step: int) -> None:
        """A step begins. The ledger holds one step at a time, and the board says which."""
        self.ledger.clear()
        self._step = step
        self.board.at_step(step)

    def seal(self) -> None:
        """Keeps what this rank has called so far; to be followed by a collective over everyone, and by `agree`."""
        if self.mesh.size > 1:
            self._peers.seal(self._step)

    def agree(self) -> None:
        """Returns when all ranks have made the same calls up to their seal; raises a `MismatchError` otherwise."""
        if self.mesh.size > 1:
            self._agreement.on_step(self._step)

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Says on the board that this rank waits for something that is no call: on a GPU the host comes to a stand where
        it reads a number."""
        self.board.pause(what)
        yield
        self.board.go_on()

    def close(self) -> None:
        self._groups.clear()
        self._transports.clear()
        self._near = None
        self.board.enter(ENDED)
        if self._remote is not None:
            self._remote.leave()
        if dist.is_initialized():
            dist.destroy_process_group()

    def __enter__(self) -> World:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # After an error the others may be gone; waiting for them to say goodbye would hide the error.
        if error is None:
            self.close()
        elif self._remote is not None:
            self._remote.failed(error)


def _has_gpu(rendezvous: Rendezvous) -> bool:
    """Whether each rank here has a GPU of its own. Local ranks go to the CPUs together when there are too few; a
    launcher was told how many to start, so too few is an error."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() and dist.is_nccl_available() else 0
    if not rendezvous.local and gpus and rendezvous.local_rank >= gpus:
        raise PlanError(
            f"Rank {rendezvous.rank} wants GPU {rendezvous.local_rank}, but this machine has {gpus}: start {gpus} ranks "
            f"here, or set CUDA_VISIBLE_DEVICES='' to run on the CPUs."
        )
    if rendezvous.local and 0 < gpus < rendezvous.size and rendezvous.rank == 0:
        print(f"plait: {rendezvous.size} ranks, {gpus} GPUs: the ranks run on the CPUs.", file=sys.stderr)
    return gpus >= rendezvous.size if rendezvous.local else gpus > 0


def backends() -> list[str]:
    """The back ends that this torch build has."""
    known = {"gloo": dist.is_gloo_available, "nccl": dist.is_nccl_available, "mpi": dist.is_mpi_available}
    return [name for name, available in known.items() if available()]
