"""The pages state what is: commands and flags have their place, examples run, links lead somewhere, quotes are quotes."""

from __future__ import annotations

import ast
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import typer

from plait.cli.app import app
from plait.design.plan import Plan
from plait.design.schedule import METHODS, RUNS
from plait.design.styles import STYLES

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
SOURCE = ROOT / "src" / "plait"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.glob("*.md")), *sorted(DOCS.glob("cookbook/*.md"))]
CLI: Any = typer.main.get_command(app)


def text(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def blocks(page: Path, language: str) -> list[str]:
    """The fenced code blocks of a page in one language."""
    return re.findall(rf"^```{language}\n(.*?)^```", text(page), flags=re.DOTALL | re.MULTILINE)


README = ROOT / "README.md"
SHOWN = [block.partition("\n") for block in blocks(README, "console")]
"""(`$ command`, newline, output) of each example in the README."""
COMMANDS = [
    line.strip().removeprefix("$ ")
    for page in PAGES
    for language in ("sh", "console")
    for block in blocks(page, language)
    for line in block.replace("\\\n", " ").splitlines()
    if re.match(r"\s*(\$ )?(plait|torchrun .* -m plait) ", line)
]


# --- commands, flags, methods


def leaves(group: Any, name: str) -> dict[str, Any]:
    """'plait config show' -> its command, for every command that does something."""
    found: dict[str, Any] = {}
    for word, command in group.commands.items():
        full = f"{name} {word}"
        found |= leaves(command, full) if hasattr(command, "commands") else {full: command}
    return found


@pytest.mark.parametrize(("name", "command"), leaves(CLI, "plait").items())
def test_every_command_and_every_flag_has_its_place(name: str, command: Any) -> None:
    page = text(DOCS / "commands.md")
    assert f"\n## {name}\n" in page
    section = page.partition(f"\n## {name}\n")[2].partition("\n## ")[0]
    for parameter in command.params:
        if parameter.param_type_name == "option" and parameter.name not in Plan.model_fields | {"config": None}:
            for flag in (*parameter.opts, *parameter.secondary_opts):
                assert f"| `{flag}`" in section or f", `{flag}`" in section, f"{name} {flag}"
    if {"model", "lr"} <= {parameter.name for parameter in command.params}:
        assert "[MODEL] [flags of a run]" in section


def test_every_section_is_a_command() -> None:
    sections = set(re.findall(r"^## (plait .*)$", text(DOCS / "commands.md"), flags=re.MULTILINE))
    assert sections == set(leaves(CLI, "plait"))


def test_every_field_of_the_plan_is_a_flag_and_on_the_page() -> None:
    page = text(DOCS / "commands.md")
    train = {parameter.name: parameter for parameter in CLI.commands["train"].params}
    for name in Plan.model_fields:
        assert f"| `{name}` |" in page
        for flag in train[name].opts:
            assert f"`{'MODEL' if name == 'model' else flag}`" in page


def test_the_table_of_flags_is_up_to_date(commands: ModuleType) -> None:
    page = text(DOCS / "commands.md")
    assert commands.with_flags(page) == page, "run python docs/commands.py"


def test_every_schedule_and_style_has_a_methods_page() -> None:
    methods = {page.stem: text(page) for page in (DOCS / "methods").glob("*.md")}
    assert set(METHODS) <= set(methods)
    for name in STYLES:
        assert any(f"`{name}`" in page for page in methods.values()), name
    named = re.findall(r"[\w-]+", Plan.model_fields["schedule"].description or "")
    for name in METHODS:
        assert (name in named) == (name in RUNS)
        assert f"methods/{name}.md" in text(README)


# --- what the pages say of files


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    prose = re.sub(r"^```.*?^```", "", text(page), flags=re.DOTALL | re.MULTILINE)
    for target in re.findall(r"\]\(([^)#\s]+)\)", prose):
        assert "://" in target or (page.parent / target).exists(), target


ROOMS = "design|runtime|report|check|cli"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_are_named_exist(page: Path) -> None:
    """`tests/...` and `docs/...` from the root, `design/...` and the other rooms from the package."""
    for name in re.findall(rf"(?:`|python )((?:{ROOMS}|tests|docs|src)/[\w./]*)", text(page)):
        assert (ROOT / name).exists() or (SOURCE / name).exists(), name


def tree() -> set[str]:
    """The files that the tree of docs/architecture.md lists, from src/plait/ on."""
    listing = re.search(r"<!-- tree -->\n\n```text\n(.*?)```", text(DOCS / "architecture.md"), flags=re.DOTALL)
    assert listing is not None
    found: set[str] = set()
    folders: list[str] = []
    for line in listing[1].splitlines():
        depth = (len(line) - len(line.lstrip())) // 2
        name = line.split()[0]
        folders = folders[:depth]
        if name.endswith("/"):
            folders.append(name)
        else:
            assert len(line.split()) > 1, f"{name} is not explained"
            found.add("".join([*folders, name]).removeprefix("src/plait/"))
    return found


def test_the_tree_is_the_package() -> None:
    listed = tree()
    there = {
        path.relative_to(SOURCE).as_posix()
        for path in SOURCE.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert listed - there == set()
    for name in sorted(there - listed):
        assert name.endswith("__init__.py"), f"docs/architecture.md does not list {name}"
        code = ast.parse(text(SOURCE / name)).body
        assert all(isinstance(node, ast.Expr) for node in code), f"{name} does more than say what its room is"


def test_the_tour_quotes_the_code() -> None:
    quotes = blocks(DOCS / "tour.md", "python")
    names = [block.splitlines()[0].removeprefix("# ") for block in quotes]
    for name, block in zip(names, quotes, strict=True):
        lines = text(SOURCE / name).splitlines()
        place = -1
        for line in block.splitlines()[1:]:
            if line.strip() != "...":
                assert line in lines[place + 1 :], f"{name} has no line {line!r} after line {place + 1}"
                place = lines.index(line, place + 1)
    stations = re.findall(r"^## \d+\. ([\w/]+\.py):", text(DOCS / "tour.md"), flags=re.MULTILINE)
    assert stations == list(dict.fromkeys(names))
    assert len(stations) == 9


def test_every_exit_code_in_the_code_is_in_the_table() -> None:
    page = text(DOCS / "exit-codes.md")
    table = set(re.findall(r"^\| (\d+) \|", page, flags=re.MULTILINE))
    assert "| 128 + n |" in page
    comm = ("failure", "children", "remote")
    front = text(SOURCE / "cli" / "app.py") + "".join(text(SOURCE / "runtime" / "comm" / f"{name}.py") for name in comm)
    given = set(re.findall(r"\b(?:return|code =|code=|code, message =|_end\(.*,) ?(\d+)\b(?! \+)", front))
    assert {"2", "3", "4", "7", "70"} <= given
    assert {code for code in given if int(code) < 128} <= table


# --- what the README shows


def parsed(command: str) -> tuple[str, dict[str, Any]]:
    """A command of the pages as the command line reads it; an unknown flag or a wrong value raises."""
    words = shlex.split(command, comments=True)
    words = words[words.index("plait") + 1 :]
    place, name = CLI, "plait"
    while words and hasattr(place, "commands") and words[0] in place.commands:
        place, name, words = place.commands[words[0]], f"{name} {words[0]}", words[1:]
    return name, dict(place.make_context(name, words).params)


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_parse(command: str) -> None:
    _, values = parsed(command)
    Plan.read({key: value for key, value in values.items() if key in Plan.model_fields and value is not None})


def test_there_are_commands() -> None:
    assert {parsed(command)[0] for command in COMMANDS} >= {"plait train", "plait check", "plait schedule"}


def configuration() -> str:
    found = [block for block in blocks(README, "toml") if block.startswith("# run.toml")]
    assert len(found) == 1
    return found[0]


def test_the_configuration_is_a_plan() -> None:
    Plan.read(tomllib.loads(configuration()))


def run(words: list[str], folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    variables = {**os.environ, "COLUMNS": "80", "OMP_NUM_THREADS": "1", "HOME": str(folder), **environment}
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "NO_COLOR", "FORCE_COLOR"):
        variables.pop(name, None)
    return subprocess.run(
        [sys.executable, *words], cwd=folder, env=variables, capture_output=True, text=True, timeout=120
    )


QUICK = ("$ plait schedule ", "$ plait config show ", "$ plait check llama-tiny --tp 5")


@pytest.mark.parametrize(("command", "output"), [(c, o) for c, _, o in SHOWN if c.startswith(QUICK)])
def test_what_is_shown_is_what_is_printed(command: str, output: str, tmp_path: Path) -> None:
    """Those examples whose output does not depend on the machine; '...' at the end leaves lines out."""
    (tmp_path / "run.toml").write_text(configuration())
    done = run(["-m", *shlex.split(command)[1:]], tmp_path)
    printed = [line.rstrip() for line in (done.stdout + done.stderr).splitlines()]
    shown = output.splitlines()
    if shown[-1] == "...":
        shown = shown[:-1]
        printed = printed[: len(shown)]
    assert printed == shown


def test_the_quick_examples_are_there() -> None:
    assert all(any(command.startswith(start) for command, _, _ in SHOWN) for start in QUICK)


def what_the_program_prints(page: Path, folder: Path) -> str:
    """Of the one Python block of a page, as it stands, on a small text in the place of the standard library."""
    (block,) = blocks(page, "python")
    words = folder / "text.txt"
    words.write_text("".join(f"the {n}th line says that {n} x {n} is {n * n}.\n" for n in range(2000)))
    assert 'data="stdlib"' in block
    (folder / "program.py").write_text(block.replace('data="stdlib"', f"data={str(words)!r}"))
    done = run(["program.py"], folder)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_loop_of_the_readme_runs(tmp_path: Path) -> None:
    lines = what_the_program_prints(README, tmp_path).splitlines()
    assert [line.split(":")[0] for line in lines[:-1]] == [f"step {step}" for step in range(1, 11)]
    losses = ast.literal_eval(lines[-1])
    assert len(losses) == 8
    assert len(set(losses)) == 1
    first = float(lines[0].split()[-1])
    assert losses[0] < first - 0.3
