"""`plait`: the commands, and what their ends mean. docs/exit-codes.md is the table of exit codes."""

from __future__ import annotations

import os
import sys
import traceback
from typing import Any

import click
import typer

from .. import __version__
from ..design.errors import PlanError
from . import check, config, demo, doctor, schedule, train

app = typer.Typer(
    help="Lay a Hugging Face language model over devices, prove the layout, and train it.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


def _version(value: bool) -> None:
    if value:
        typer.echo(f"plait {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print the version."),
) -> None:
    """Lay a Hugging Face language model over devices, prove the layout, and train it."""


train.add_to(app)
check.add_to(app)
schedule.add_to(app)
config.add_to(app)
demo.add_to(app)
doctor.add_to(app)


def main() -> None:
    """Runs a command and turns however it ended into one sentence and an exit code."""
    # One thread a rank: local ranks are forked, and share the cores among themselves.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("MKL_NUM_THREADS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    sys.exit(_run())


def _run() -> int:
    try:
        # The command object keeps typer's own errors (unknown option, missing argument) readable and with suggestions.
        result: Any = app(standalone_mode=False)
        return result if isinstance(result, int) else 0
    except PlanError as error:
        return _end(str(error), 2)
    except (click.exceptions.Abort, KeyboardInterrupt):
        return _end("interrupted; all ranks are ended.", 130)
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else 1
    except BrokenPipeError:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 (whoever read the output is gone; end quietly)
        return 141
    except Exception as error:
        return _unexpected(error)


def _unexpected(error: Exception) -> int:
    if hasattr(error, "exit_code") and hasattr(error, "format_message"):
        context = getattr(error, "ctx", None)
        usage = f" See: {context.command_path} --help" if context is not None else ""
        return _end(f"{error.format_message()}{usage}", error.exit_code)
    if type(error).__name__ == "RankError":
        _trace(getattr(error, "trace", ""))
        return _end(str(error), getattr(error, "code", 3))
    _trace(traceback.format_exc())
    return _end(f"internal error: {type(error).__name__}: {error} (PLAIT_DEBUG=1 shows where)", 70)


def _trace(text: str) -> None:
    if text and os.environ.get("PLAIT_DEBUG"):
        print(text, file=sys.stderr)


def _end(sentence: str, code: int) -> int:
    sys.stdout.flush()
    if sys.stderr.isatty():
        sys.stderr.write("\x1b[?25h")  # a rank that died may have left the cursor hidden
    print(f"plait: {sentence}", file=sys.stderr)
    return code


if __name__ == "__main__":
    main()
