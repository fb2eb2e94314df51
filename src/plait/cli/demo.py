"""`plait demo`: the main job, with nothing to choose."""

from __future__ import annotations

from pathlib import Path

import typer

from .train import train

PLAN = {
    "model": "llama-10m", "data": "stdlib", "tokenizer": "bytes", "ranks": 8, "dp": 2, "tp": 2, "pp": 2,
    "schedule": "1f1b", "microbatches": 4, "steps": 200, "seq": 128, "batch": 8, "lr": 3e-3, "warmup": 15, "seed": 7,
}  # fmt: skip


def demo(
    out: Path = typer.Option(Path("runs/demo"), help="Where the run is written; an earlier demo is replaced."),
) -> int:
    """Train llama-10m on Python's own sources over 8 local ranks, dp 2 x tp 2 x pp 2, and prove the layout first."""
    flags = " ".join(
        f"{'-n' if key == 'ranks' else '--' + key} {value}" for key, value in PLAN.items() if key != "model"
    )
    typer.echo(f"$ plait train {PLAN['model']} {flags} --prove 3 --out {out} --overwrite")
    return train(
        dict(PLAN), out=out, overwrite=True, prove=3, sample=32, prompt=["def "], track="none", resume="", stop_after=0,
        max_minutes=0,
    )  # fmt: skip


def add_to(app: typer.Typer) -> None:
    app.command("demo")(demo)
