"""`plait doctor`: what this machine has, and whether ranks can talk on it."""

from __future__ import annotations

import os
import platform
from importlib import metadata

import typer
from rich.table import Table

from ..design.plan import LocalTransport
from .terminal import Terminal


def doctor() -> int:
    """Show versions, back ends and GPUs, and send a message between two local ranks."""
    import torch

    from ..design.mesh import Mesh
    from ..runtime.comm.collectives import all_reduce
    from ..runtime.comm.nursery import launch
    from ..runtime.comm.segment import unsupported
    from ..runtime.comm.world import Rendezvous, World, backends

    mesh = Mesh((("pp", 1), ("dp", 2), ("tp", 1)))

    def main(rendezvous: Rendezvous) -> bool:
        with World(rendezvous, mesh, device="cpu") as world:
            x = torch.ones(1) * (world.rank + 1)
            all_reduce(x, world.everyone, why="doctor")
            return x.item() == 3

    def said(transport: LocalTransport) -> str:
        try:
            return "ok" if all(launch(main, mesh.size, local_transport=transport)) else "wrong numbers"
        except Exception as error:
            return f"failed: {error}"

    talk = {"2 ranks, Gloo": said("torch")}
    if not (why := unsupported()):
        talk["2 ranks, shared memory"] = said("shared")
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    table = Table(box=None, show_header=False, pad_edge=False)
    for name, value in {
        "plait": metadata.version("plait"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": metadata.version("transformers"),
        "back ends": ", ".join(backends()) or "none",
        "GPUs": ", ".join(gpus) or "none",
        "cores": str(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()),
        **talk,
        **({"shared memory": f"no: it {why}"} if why else {}),
    }.items():
        table.add_row(name, value)
    Terminal().print(table)
    return 0 if all(word == "ok" for word in talk.values()) else 1


def add_to(app: typer.Typer) -> None:
    app.command("doctor")(doctor)
