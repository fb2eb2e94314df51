"""The processes of a run: who am I, on which device, and which groups am I in.

A `World` is joined once, closed once, and owns everything that torch.distributed made for it; nothing keeps a `Group`
past its world's close. The two ways in are `Rendezvous.from_environment()` (torchrun, or any launcher that sets RANK,
WORLD_SIZE, MASTER_ADDR and MASTER_PORT) and comm/nursery.py, which forks local ranks. Branches between CPU with Gloo and
GPU with NCCL are here and in parallel/clock.py only.
"""

from __future__ import annotations

import os
import sys
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
        given = [name for name in VARIABLES if name in os.environ]
        if "RANK" not in given and "WORLD_SIZE" not in given:
            return None
        missing = [name for name in VARIABLES if name not in given]
        if missing:
            raise PlanError(
                f"The environment sets {', '.join(given)} but not {', '.join(missing)}: start with torchrun, "
                f"set all four, or unset them and use -n for local ranks."
            )
        try:
            rank, size, port = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
            local_rank = int(os.environ.get("LOCAL_RANK", rank))
        except ValueError:
            raise PlanError("RANK, WORLD_SIZE, LOCAL_RANK and MASTER_PORT must be whole numbers.") from None
        if not 0 <= rank < size:
            raise PlanError(f"RANK {rank} is not in a world of WORLD_SIZE {size}: ranks count from 0 to {size - 1}.")
        return cls(rank, size, os.environ["MASTER_ADDR"], port, local_rank, local=False)


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
        if device == "auto" and torch.cuda.is_available() and dist.is_nccl_available():
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
        """The ranks that differ from this one on `axes` only."""
        if axes not in self._groups:
            raise ValueError(f"this world has no group over {axes}, only over {sorted(self._groups)}")
        return self._groups[axes]

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


def _store(rendezvous: Rendezvous, timeout: timedelta) -> Any:
    hosts_store = rendezvous.rank == 0 and "TORCHELASTIC_USE_AGENT_STORE" not in os.environ
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
