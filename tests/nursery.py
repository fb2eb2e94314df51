"""A process that only imports, from which tests fork their ranks.

Importing torch and transformers takes seconds and forking milliseconds, but what forks must never have computed on
several threads, and a test process soon has. So one clean process serves the whole session: `nursery(function, *args)`
runs a module-level function of a test file in a fork of it and returns its result (JSON values both ways).
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from typing import Any, NoReturn


class CallError(AssertionError):
    """What the function raised, as text: 'Type: message' and its trace."""


class Nursery:
    def __init__(self) -> None:
        self._mine, theirs = socket.socketpair()
        self.pid = os.fork()
        if self.pid == 0:
            self._mine.close()
            _serve(theirs)
        theirs.close()
        self._lines = self._mine.makefile("r")

    def __call__(self, function: Callable[..., Any], *args: Any) -> Any:
        request = {"file": function.__code__.co_filename, "name": function.__name__, "args": args}
        self._mine.sendall((json.dumps(request) + "\n").encode())
        reply = json.loads(self._lines.readline())
        if "error" in reply:
            raise CallError(reply["error"])
        return reply["result"]

    def close(self) -> None:
        self._mine.close()
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)


def _serve(peer: socket.socket) -> NoReturn:
    import transformers.models.llama.modeling_llama  # noqa: F401 (what every rank needs, imported once)

    import plait.check.proof  # noqa: F401

    with peer.makefile("r") as lines:
        for line in lines:
            child = os.fork()
            if child == 0:
                _answer(json.loads(line), peer)
            os.waitpid(child, 0)
    os._exit(0)


def _answer(request: dict[str, Any], peer: socket.socket) -> NoReturn:
    try:
        spec = importlib.util.spec_from_file_location("nursery_call", request["file"])
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules["nursery_call"] = module
        spec.loader.exec_module(module)
        reply = {"result": getattr(module, request["name"])(*request["args"])}
    except BaseException as error:
        trace = getattr(error, "trace", "") or traceback.format_exc()
        reply = {"error": f"{type(error).__name__}: {error}\n{trace}"}
    # A test that gave up waiting has closed its end.
    with contextlib.suppress(OSError):
        peer.sendall((json.dumps(reply) + "\n").encode())
    os._exit(0)
