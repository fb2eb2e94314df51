"""`plait checkpoint show | verify` and `plait export`: what is kept of a run, whether it is whole, and out with it."""

from __future__ import annotations

from pathlib import Path

import typer

from ..design.errors import PlanError
from ..report import sharding as sharding_report
from ..report.words import counted, size

TYPES = ("fp32", "bf16", "fp16")


def show(
    run: Path = typer.Argument(
        help="A directory that plait train --save-every has written, or one of its checkpoints."
    ),
) -> None:
    """Say what a run's checkpoints hold."""
    from ..runtime.checkpoint import folders
    from ..runtime.checkpoint.index import DamagedError

    found = folders.at_hand(run)
    if not found:
        raise folders.none_left(run, [])
    for folder in found:
        try:
            index = folders.opened(folder)
        except DamagedError as error:
            typer.echo(f"{folder.name}  {error}")
            continue
        progress = index.progress
        elements = sum(_elements(tensor.shape) for tensor in index.tensors)
        typer.echo(
            f"{folder.name}  step {progress.step} of {progress.steps}, {index.plan.model}, {elements / 1e6:.1f} M "
            f"parameters, {size(float(index.size))} in {counted(len(index.files), 'file')}, written over "
            f"{sharding_report.work(index.plan, sp=index.plan.sp is True)}"
        )
        if len(found) == 1:
            place = ", ".join(f"{name} {value}" for name, value in progress.data.items())
            typer.echo(f"  updates {progress.updates}, data at {place}, loss scale {progress.loss_scale['value']:g}")
            typer.echo(f"  made with {', '.join(f'{name} {value}' for name, value in index.versions.items())}")
            frozen = sum(not tensor.trains for tensor in index.tensors)
            typer.echo(f"  {counted(len(index.tensors), 'tensor')}, {frozen} of them frozen")


def _elements(shape: tuple[int, ...]) -> int:
    found = 1
    for side in shape:
        found *= side
    return found


def verify(
    run: Path = typer.Argument(
        help="A directory that plait train --save-every has written, or one of its checkpoints."
    ),
) -> int:
    """Read every byte of a run's checkpoints, and say which are as they were written."""
    from ..runtime.checkpoint import folders
    from ..runtime.checkpoint.index import DamagedError
    from ..runtime.checkpoint.load import verify as read_all

    found, code = folders.at_hand(run), 0
    if not found:
        raise folders.none_left(run, [])
    for folder in found:
        try:
            index = folders.opened(folder)
            read_all(folder, index)
        except DamagedError as error:
            typer.echo(f"{folder.name}  DAMAGED: {error}")
            code = 1
        else:
            total = size(float(sum(file.size for file in index.files)))
            typer.echo(f"{folder.name}  whole: {total} in {counted(len(index.files), 'file')}")
    return code


def export(
    run: Path = typer.Argument(
        help="A directory that plait train --save-every has written, or one of its checkpoints."
    ),
    directory: Path = typer.Argument(help="The directory that is made, for transformers and whatever reads its files."),
    dtype: str = typer.Option(
        "", help="Type of the weights: fp32, bf16, fp16. [default: the run's compute]", show_default=False
    ),
    shard_gb: float = typer.Option(5.0, min=0.001, help="Gigabytes of a file of weights, at most."),
) -> None:
    """Write the weights of a run's newest checkpoint as a Hugging Face model directory."""
    from ..runtime.checkpoint import folders
    from ..runtime.checkpoint.export import export as write

    if dtype not in ("", *TYPES):
        raise PlanError(f"--dtype cannot be '{dtype}': use {', '.join(TYPES)}.")
    found, damaged = folders.whole(run)
    for error in damaged:
        typer.echo(f"left out: {error}")
    if not found:
        raise folders.none_left(run, damaged)
    folder, index = found[0]
    files = write(folder, index, directory, dtype=dtype, most=int(shard_gb * 1e9))
    typer.echo(f"{folder} as {dtype or index.plan.compute}: {', '.join(file.name for file in files)}")
    typer.echo(f"serve it with: vllm serve {directory}")


def add_to(app: typer.Typer) -> None:
    group = typer.Typer(no_args_is_help=True, help="What is kept of a run, and whether it is whole.")
    group.command("show")(show)
    group.command("verify")(verify)
    app.add_typer(group, name="checkpoint")
    app.command("export")(export)
