"""`plait doctor`: what this machine has, and whether ranks can talk on it."""

from __future__ import annotations

import os
import platform
from importlib import metadata

import typer
from rich.table import Table

from .terminal import Terminal


def doctor() -> int:
    """Show versions, back ends and GPUs, and send a message between two local ranks."""
    import torch

    from ..design.mesh import Mesh
    from ..runtime.comm.collectives import all_reduce
    from ..runtime.comm.nursery import launch
    from ..runtime.comm.world import Rendezvous, World, backends

    mesh = Mesh((("pp", 1), ("dp", 2), ("tp", 1)))

    def main(rendezvous: Rendezvous) -> bool:
        with World(rendezvous, mesh, device="cpu") as world:
            x = torch.ones(1) * (world.rank + 1)
            all_reduce(x, world.everyone, why="doctor")
            return x.item() == 3

    try:
        loopback = "ok" if all(launch(main, mesh.size)) else "wrong numbers"
    except Exception as error:
        loopback = f"failed: {error}"
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
        "loopback (2 ranks, gloo)": loopback,
    }.items():
        table.add_row(name, value)
    Terminal().print(table)
    return 0 if loopback == "ok" else 1


def add_to(app: typer.Typer) -> None:
    app.command("doctor")(doctor)
