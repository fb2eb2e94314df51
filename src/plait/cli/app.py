"""`plait`: the commands, and what their ends mean. docs/exit-codes.md is the table of exit codes."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from typing import Any, NoReturn

import typer

from .. import __version__
from ..design.errors import PlanError
from . import check, checkpoint, config, demo, doctor, report, schedule, train

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
report.add_to(app)
checkpoint.add_to(app)
check.add_to(app)
schedule.add_to(app)
config.add_to(app)
demo.add_to(app)
doctor.add_to(app)


def main() -> None:
    """Runs a command and turns however it ended into one sentence and an exit code."""
    # One thread a rank: local ranks are forked, and share the cores among themselves. numpy's OpenBLAS would start its
    # threads when imported, whatever a rank may use later.
    os.environ["OPENBLAS_NUM_THREADS"] = "1"
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("MKL_NUM_THREADS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    # When one rank ends early, torch's store would warn from every other with pages of addresses.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    _have_standard_files()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # What was ignored stays so: a hang-up under nohup, Ctrl-C in a shell's background job.
        if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
            signal.signal(number, _end_at_once)
    code = _close_output(_run())
    if "torch" in sys.modules:
        # torch takes the better part of a second to be taken down, and a launcher's rank that failed has threads that
        # still talk to the others, for which the interpreter would wait.
        with contextlib.suppress(OSError):
            sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def _end_at_once(number: int, frame: object) -> NoReturn:
    """Until ranks run there is nothing to clean up, and an exception raised here may be swallowed by the import that it
    interrupts. While they run, comm/nursery.py ends them first."""
    with contextlib.suppress(OSError):
        os.write(2, f"plait: ended by {signal.Signals(number).name}.\n".encode())
    os._exit(128 + number)


def _have_standard_files() -> None:
    """Opens what was started closed, or the next pipe or socket would be taken for it; makes every character
    printable."""
    for fd, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest free number, which is this one
            setattr(sys, name, open(fd, "w" if fd else "r", closefd=False))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def _run() -> int:
    try:
        os.getcwd()
    except OSError:
        return _end("the current directory is gone: change to one that is there.", 2)
    try:
        # The command object keeps typer's own errors (unknown option, missing argument) readable and with suggestions.
        result: Any = app(standalone_mode=False)
        return result if isinstance(result, int) else 0
    except PlanError as error:
        return _end(str(error), 2)
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 70
        if code > 128:
            return _end(f"ended by {signal.Signals(code - 128).name}; all ranks are ended.", code)
        return code
    except BrokenPipeError:
        return 128 + signal.SIGPIPE
    except Exception as error:
        return _unexpected(error)


def _unexpected(error: Exception) -> int:
    if hasattr(error, "exit_code") and hasattr(error, "format_message"):
        context = getattr(error, "ctx", None)
        if type(error).__name__ == "NoArgsIsHelpError":
            print(error.format_message(), file=sys.stderr)
            return int(error.exit_code)
        usage = f" See: {context.command_path} --help" if context is not None else ""
        return _end(f"{error.format_message().rstrip('.')}.{usage}", error.exit_code)
    if type(error).__name__ == "RankError":
        _trace(getattr(error, "trace", ""))
        return _end(str(error), getattr(error, "code", 3), getattr(error, "details", ()))
    _trace(traceback.format_exc())
    first = next(iter(str(error).splitlines()), "")
    return _end(f"internal error: {type(error).__name__}: {first} (PLAIT_DEBUG=1 shows where)", 70)


def _trace(text: str) -> None:
    if text and os.environ.get("PLAIT_DEBUG"):
        print(text, file=sys.stderr)


def _end(sentence: str, code: int, details: Sequence[str] = ()) -> int:
    """Says how it ended: what there is to know of each rank, and one sentence."""
    lines = [f"  {_printable(line)}" for line in details] + [f"plait: {_printable(sentence)}"]
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    with contextlib.suppress(OSError):
        if sys.stderr.isatty():
            sys.stderr.write("\x1b[?25h")  # a rank that died may have left the cursor hidden
        print("\n".join(lines), file=sys.stderr)
    return code


def _printable(text: str) -> str:
    """A path may hold a newline, or the codes that make a terminal misbehave."""
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text)


def _close_output(code: int) -> int:
    """Writes out what is left. When that fails nobody must try again: the interpreter would, and end with 120."""
    try:
        sys.stdout.flush()
        return code
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if code:
            return code
        if isinstance(error, BrokenPipeError):
            return 128 + signal.SIGPIPE
        return _end(f"the output cannot be written: {(error.strerror or 'unknown error').lower()}.", 2)


if __name__ == "__main__":
    main()
