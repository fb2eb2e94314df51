"""The processes of a run: who am I, on which device, and which groups am I in.

A `World` is joined once, closed once, and owns everything that torch.distributed made for it; nothing keeps a `Group`
past its world's close. The two ways in are `Rendezvous.from_environment()` (torchrun, or any launcher that sets RANK,
WORLD_SIZE, MASTER_ADDR and MASTER_PORT) and comm/nursery.py, which forks local ranks. Branches between CPU with Gloo and
GPU with NCCL are here and in parallel/clock.py only.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from ...design.errors import PlanError
from ...design.mesh import Mesh
from ...design.records import WORLD
from .ledger import Ledger

LOOPBACK = "127.0.0.1"
VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
MPI = {
    "RANK": ("OMPI_COMM_WORLD_RANK", "PMI_RANK"),
    "WORLD_SIZE": ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE"),
    "LOCAL_RANK": ("OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID"),
}
"""What mpirun (Open MPI, MPICH and their kin) calls the same. It says nothing of where rank 0 is."""


@dataclass(frozen=True)
class Rendezvous:
    """Where the ranks of a run meet. `listener` is rank 0's already listening socket, when its parent opened one."""

    rank: int
    size: int
    host: str
    port: int
    local_rank: int
    local: bool
    listener: int | None = None

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
        return cls(rank, size, host, port, local_rank, local=False)


def _launcher_variables() -> Mapping[str, tuple[str, str]]:
    """torchrun's name of each variable -> (the name it was set under, its value). mpirun's count only when it started
    more than one process: a shell inside a job may have inherited them."""
    said = {name: (name, os.environ[name]) for name in (*VARIABLES, "LOCAL_RANK") if name in os.environ}
    if "RANK" in said or "WORLD_SIZE" in said:
        return said
    mpi = {name: (their, os.environ[their]) for name, theirs in MPI.items() for their in theirs if their in os.environ}
    return said if mpi.get("WORLD_SIZE", ("", "1"))[1] == "1" else said | mpi


def _whole(name: str, value: str) -> int:
    try:
        return int(value)
    except ValueError:
        raise PlanError(f"{name} is '{value}'; it must be a whole number.") from None


@dataclass(frozen=True)
class Group:
    """Some ranks that talk: `index` is this rank's place among `ranks`. `handle` is None when it is alone."""

    axis: str
    ranks: tuple[int, ...]
    index: int
    ledger: Ledger
    handle: dist.ProcessGroup | None

    @property
    def size(self) -> int:
        return len(self.ranks)


class World:
    """The ranks of one run over the mesh of one plan; use as a context manager."""

    def __init__(self, rendezvous: Rendezvous, mesh: Mesh, *, timeout_s: float = 600, device: str = "auto") -> None:
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
        if rendezvous.local:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
        timeout = timedelta(seconds=timeout_s)
        dist.init_process_group(
            backend,
            store=_store(rendezvous, timeout),
            rank=self.rank,
            world_size=mesh.size,
            timeout=timeout,
            device_id=self.device if backend == "nccl" else None,
        )
        self._timeout = timeout
        self._groups: dict[tuple[str, ...], Group] = {}
        for axes in (("pp",), ("dp",), ("tp",)):
            self._make_group(axes, timeout)

    def _make_group(self, axes: tuple[str, ...], timeout: timedelta) -> None:
        ranks = self.mesh.group(self.rank, *axes)
        handle = None
        if len(ranks) == self.mesh.size > 1:
            handle = dist.group.WORLD
        elif len(ranks) > 1:
            handle = dist.new_group(list(ranks), timeout=timeout, use_local_synchronization=True)
        self._groups[axes] = Group(".".join(axes), ranks, ranks.index(self.rank), self.ledger, handle)

    def group(self, *axes: str) -> Group:
        """The ranks that differ from this one on `axes` only. One over several axes is made when it is first asked for,
        by all of its ranks."""
        unknown = [axis for axis in axes if axis not in self.mesh.names]
        if unknown:
            raise ValueError(f"this world has no axis {unknown}, only {self.mesh.names}")
        if axes not in self._groups:
            self._make_group(axes, self._timeout)
        return self._groups[axes]

    @property
    def alone(self) -> Group:
        """This rank by itself."""
        return Group("none", (self.rank,), 0, self.ledger, None)

    @property
    def everyone(self) -> Group:
        ranks = tuple(range(self.mesh.size))
        return Group(WORLD, ranks, self.rank, self.ledger, dist.group.WORLD if len(ranks) > 1 else None)

    def close(self) -> None:
        self._groups.clear()
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


def _store(rendezvous: Rendezvous, timeout: timedelta) -> Any:
    hosts_store = rendezvous.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    if rendezvous.local:
        hosts_store = rendezvous.rank == 0
    try:
        return dist.TCPStore(  # type: ignore[attr-defined]
            rendezvous.host,
            rendezvous.port,
            world_size=rendezvous.size,
            is_master=hosts_store,
            timeout=timeout,
            wait_for_workers=False,
            master_listen_fd=rendezvous.listener if hosts_store else None,
            use_libuv=rendezvous.listener is None,
        )
    except dist.DistNetworkError as error:
        if "EADDRINUSE" in str(error) or "already in use" in str(error):
            raise PlanError(
                f"Port {rendezvous.port} on {rendezvous.host} is in use: set MASTER_PORT to a free port."
            ) from None
        raise PlanError(
            f"Rank {rendezvous.rank} cannot reach {rendezvous.host}:{rendezvous.port}: check MASTER_ADDR and MASTER_PORT."
        ) from None


def backends() -> list[str]:
    """The back ends that this torch build has."""
    known = {"gloo": dist.is_gloo_available, "nccl": dist.is_nccl_available, "mpi": dist.is_mpi_available}
    return [name for name, available in known.items() if available()]
