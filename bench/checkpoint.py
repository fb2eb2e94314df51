"""python -m bench.checkpoint: what a checkpoint costs beside a plain write, read and copy of the same bytes, and beside
torch.distributed.checkpoint.

All in the same ranks, turn by turn, in orders in which each thing follows every other one equally often, since what one
leaves in memory and on the disk is the next one's; each number is the median over the turns of the slowest rank. The
plain write is one file a rank from one buffer, with the syncs and the rename of a checkpoint and the same barriers; the
plain read fills one buffer with the same files; the plain copy copies what a rank writes, in one piece, to memory that
was touched before. Files are read from the disk: the system is told to forget them before. torch saves the same tensors,
of which dp ranks have copies and share the work too.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from . import environment

CONFIG = {
    "model_type": "llama", "hidden_size": 512, "intermediate_size": 1376, "num_hidden_layers": 8, "vocab_size": 4096,
    "num_attention_heads": 8, "num_key_value_heads": 8, "max_position_embeddings": 64,
}  # fmt: skip
TIMES = 2
"""How often each order is taken."""
LAYOUTS: tuple[dict[str, Any], ...] = ({}, {"dp": 2}, {"dp": 2, "zero": 3})


def theirs() -> Any:
    """torch's own."""
    import torch.distributed.checkpoint

    return torch.distributed.checkpoint


def raw(tensor: Any) -> memoryview:
    return memoryview(tensor.numpy())


def measured(layout: dict[str, Any], root: str) -> dict[str, list[float]]:
    """Seconds of each thing, turn by turn, of the slowest rank."""
    from plait.design.plan import Plan
    from plait.runtime.comm.nursery import launch
    from plait.runtime.comm.world import Rendezvous, World

    (Path(root) / "config.json").write_text(json.dumps(CONFIG))
    plan = Plan(model=root, batch=2, seq=16, **layout)

    def main(meeting: Rendezvous) -> dict[str, list[float]]:
        from plait.runtime.checkpoint.writer import Writer

        writer = Writer()
        with World(meeting, plan.mesh, device="cpu") as world:
            found = Turns(world, plan, Path(root), writer).taken()
            writer.close()
            return found

    ranks = launch(main, plan.world, local_transport="torch")
    return {name: [max(row) for row in zip(*(rank[name] for rank in ranks), strict=True)] for name in ranks[0]}


class Turns:
    """The bench on one rank."""

    def __init__(self, world: Any, plan: Any, root: Path, writer: Any) -> None:
        import torch

        from plait.runtime.batch import Batch
        from plait.runtime.training.assemble import build
        from plait.runtime.training.checkpoints import Checkpoints

        self.world, self.root = world, root
        self.future: Any = None
        self.run = build(plan, world)
        rows = torch.randint(0, 512, (plan.batch // plan.dp, plan.seq + 1))
        self.run.step(Batch.of(rows))
        self.sync = Checkpoints(self.run, Nowhere(), root / "sync")
        self.beside = Checkpoints(self.run, Nowhere(), root / "async", writer=writer)
        layout = self.sync.contents.file(world.rank)
        self.size = 0 if layout is None else layout.size
        self.copied = torch.ones(self.size, dtype=torch.uint8)
        self.into = torch.zeros(self.size, dtype=torch.uint8)
        self.found = torch.zeros(self.size if self.run.sharding.zero else self.size * plan.world, dtype=torch.uint8)
        self.state = {
            f"{name}.{quantity}": self.sync.tensor(name, quantity)
            for name in self.run.optimizer.weights
            for quantity in ("weight", "exp_avg", "exp_avg_sq")
        }

    def taken(self) -> dict[str, list[float]]:
        found: dict[str, list[float]] = {}
        self.keep()
        things = list(self.things().items())
        orders = balanced(len(things)) * TIMES
        for turn, order in enumerate([orders[0], *orders]):
            for name, do in (things[place] for place in order):
                seconds = self.timed(do)
                if turn:  # the first warms up
                    found.setdefault(name, []).append(seconds)
            self.beside.finished(wait=True)
        found["bytes"] = [float(self.size)]
        return found

    def keep(self) -> None:
        """What loads read."""
        from plait.runtime.comm.collectives import barrier

        (place,) = self.sync.save()
        self.kept = self.root / place.name
        barrier(self.world)
        if self.world.rank == 0:
            place.rename(self.kept)
        barrier(self.world)
        theirs().save(self._mine(), checkpoint_id=self.root / "kept")

    def things(self) -> dict[str, Callable[[], object]]:
        return {
            "plain write": self.plain_write, "save": self.sync.save, "torch save": self.torch_save,
            "plain read": self.plain_read, "load": self.load, "torch load": self.torch_load,
            "plain copy": lambda: self.into.copy_(self.copied), "stall": self.beside.save,
            "torch stall": self.torch_stall,
        }  # fmt: skip

    def timed(self, do: Callable[[], object]) -> float:
        from plait.runtime.comm.collectives import barrier

        self.beside.finished(wait=True)
        if self.world.rank == 0:
            for left in ("plain", "torch", "torch-async", "sync", "async"):
                shutil.rmtree(self.root / left, ignore_errors=True)
            os.sync()
            for file in (*self.kept.glob("*"), *(self.root / "kept").glob("*")):
                fd = os.open(file, os.O_RDONLY)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(fd)
        barrier(self.world)
        began = time.perf_counter()
        do()
        seconds = time.perf_counter() - began
        self.settle()
        return seconds

    def settle(self) -> None:
        """Waits for what torch began."""
        if self.future is not None:
            self.future.result()
            self.future = None

    def plain_write(self) -> None:
        from plait.runtime.comm.collectives import barrier

        place = self.root / "plain"
        partial, first = place.with_suffix(".partial"), self.world.rank == 0
        if first:
            partial.mkdir()
        barrier(self.world)
        self._file(partial / f"rank-{self.world.rank}", raw(self.copied))
        barrier(self.world)
        if first:
            self._file(partial / "index", memoryview(b"0" * 20000))
            self._sync(partial)
            partial.rename(place)
            self._sync(self.root)
            self._file(place / "latest", memoryview(b"latest"))
            self._sync(self.root)
        barrier(self.world)

    def _file(self, path: Path, view: memoryview) -> None:
        with open(path, "wb", buffering=0) as file:
            while view:
                view = view[file.write(view) :]
            os.fsync(file.fileno())

    def _sync(self, path: Path) -> None:
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)

    def plain_read(self) -> None:
        """All files where a rank has all of the model, else its own."""
        whole, left = not self.run.sharding.zero, raw(self.found)
        for file in sorted(self.kept.glob("rank-*")):
            if whole or file.name == f"rank-{self.world.rank:05}.safetensors":
                with open(file, "rb", buffering=0) as source:
                    left = left[source.readinto(left) :]

    def load(self) -> None:
        from plait.runtime.checkpoint import folders

        self.sync.load([(self.kept, folders.opened(self.kept))])

    def torch_save(self) -> None:
        theirs().save(self._mine(), checkpoint_id=self.root / "torch")

    def torch_load(self) -> None:
        """Of what it has just saved."""
        theirs().load(self._mine(), checkpoint_id=self.root / "kept")

    def torch_stall(self) -> None:
        self.future = theirs().async_save(self._mine(), checkpoint_id=self.root / "torch-async")

    def _mine(self) -> dict[str, Any]:
        """With ZeRO the shares, under names of their own."""
        mark = f"{self.world.rank}." if self.run.sharding.zero else ""
        return {mark + name: tensor for name, tensor in self.state.items()}


def balanced(count: int) -> list[list[int]]:
    """Orders of `count` things in which each stands everywhere, and right after each other one, equally often.
    Williams, "Experimental designs balanced for the estimation of residual effects of treatments", 1949."""
    steps = [(place + 1) // 2 if place % 2 else -(place // 2) for place in range(count)]
    orders = [[(step + shift) % count for step in steps] for shift in range(count)]
    return orders + [order[::-1] for order in orders] if count % 2 else orders


class Nowhere:
    """A place in no data."""

    @property
    def state(self) -> dict[str, int]:
        return {}

    def restore(self, state: Any) -> None: ...


def shown(layout: dict[str, Any], found: dict[str, list[float]]) -> str:
    middle = {name: statistics.median(times) for name, times in found.items()}
    name = " ".join(f"{key} {value}" for key, value in layout.items()) or "one rank"
    cells = [
        f"{middle[ours]:.3f} / {middle[plain]:.3f} = {middle[ours] / middle[plain]:.2f} | "
        f"{middle[others]:.3f} = {middle[others] / middle[ours]:.2f}"
        for ours, plain, others in (
            ("save", "plain write", "torch save"), ("load", "plain read", "torch load"),
            ("stall", "plain copy", "torch stall"),
        )
    ]  # fmt: skip
    return f"| {name} | {middle['bytes'] / 1e6:.0f} | {' | '.join(cells)} |"


def main() -> int:
    rows = []
    for layout in LAYOUTS:
        root = tempfile.mkdtemp(prefix="bench-checkpoint-", dir=sys.argv[2] if len(sys.argv) > 2 else None)
        try:
            found = measured(layout, root)
        finally:
            shutil.rmtree(root)
        rows.append({"layout": layout, "seconds": found})
        print(shown(layout, found), flush=True)
    if len(sys.argv) > 1:
        with open(sys.argv[1], "w") as file:
            json.dump(rows, file)
    return 0


if __name__ == "__main__":
    environment.settle()
    raise SystemExit(main())
