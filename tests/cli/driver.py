"""Runs `plait` command lines, each in a fork of this process, which has imported what they need.

Importing torch and transformers takes seconds and forking takes milliseconds, so dozens of real runs of the command, with
processes, signals and exit codes of their own, fit in the time of a few. One JSON object a line comes in on standard
input and is answered by one on standard output:

    {"argv": [...], "cwd": "...", "env": {...}, "stdin": path, "stdout": path, "stderr": path, "before": code}  ->  pid
    {"wait": pid, "timeout": seconds}  ->  exit code as a shell sees it, or null when it still runs

`before` is Python run in the fork before the command: the way to plant a fault.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time

import plait.check.reference
import plait.cli.app
import plait.cli.finish
import plait.cli.rank
import plait.cli.view
import plait.runtime.training.launch


def wait(pid: int, timeout: float) -> int | None:
    deadline = time.monotonic() + timeout
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            code = os.waitstatus_to_exitcode(status)
            return 128 - code if code < 0 else code
        if time.monotonic() > deadline:
            return None
        time.sleep(0.02)


def become(job: dict) -> None:
    """The fork becomes a process as a shell would start it: its own session, files, directory and environment."""
    os.setsid()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)  # as Python starts
    for fd, name in enumerate(("stdin", "stdout", "stderr")):
        if job[name] is None:
            os.close(fd)
            setattr(sys, name, None)
            continue
        flags = os.O_RDONLY if fd == 0 else os.O_WRONLY | os.O_CREAT | os.O_APPEND
        new = os.open(job[name], flags | os.O_NOCTTY, 0o644)
        os.dup2(new, fd)
        os.close(new)
    os.chdir(job["cwd"])
    for name, value in job["env"].items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    sys.argv = ["plait", *job["argv"]]


def serve() -> dict:
    """Answers requests until there are no more, and returns only in a fork, with its job."""
    asked = os.fdopen(os.dup(0), encoding="utf-8")
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    while line := asked.readline():
        job = json.loads(line)
        if "wait" in job:
            answer = wait(job["wait"], job["timeout"])
        else:
            answer = os.fork()
            if answer == 0:
                os.close(asked.fileno())
                os.close(answers.fileno())
                return job
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
    sys.exit()


if __name__ == "__main__":
    job = serve()
    become(job)
    exec(job["before"])
    plait.cli.app.main()
