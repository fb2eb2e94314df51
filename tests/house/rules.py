"""The rules of the architecture, each a function from the package's directory to its complaints, "file:line: sentence".

They read the source as syntax trees and import nothing of it, so they hold for files that are not written yet.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

LONGEST = 400

Rule = Callable[[Path], list[str]]

LEVELS = {
    "design": 0,
    "design.cost": 1,
    "design.planner": 2,
    "report": 3,
    "runtime": 4,  # runtime/batch.py and whatever else stands outside the rooms
    "runtime.comm": 5,
    "runtime.hf": 5,
    "runtime.parallel": 6,
    "runtime.data": 7,
    "runtime.checkpoint": 7,
    "runtime.training": 8,
    "runtime.inference": 8,
    "check": 9,
    "cli": 10,
}
"""A room imports rooms below it, never one on its own level or above."""

NEVER = {
    ("runtime", "report"),
    ("runtime", "design.cost"),
    ("runtime", "design.planner"),
    ("runtime.parallel", "runtime.hf"),
}
"""Pairs that the levels alone would allow: (no file in here, imports anything in there)."""


# --- reading a package


@dataclass(frozen=True)
class Import:
    line: int
    target: str
    """What is imported, dotted; 'from a import b' is 'a.b', whether b is a module or a name."""
    lazy: bool


@dataclass(frozen=True)
class File:
    path: Path
    module: str
    """Dotted, from 'plait'."""
    text: str
    tree: ast.Module

    @property
    def room(self) -> str:
        """The longest known room that holds it, '' for the package's own front door."""
        return room_of(self.module)

    def says(self, line: int, sentence: str) -> str:
        return f"{self.path}:{line}: {sentence}"

    @cached_property
    def imports(self) -> list[Import]:
        package = self.module.split(".") if self.path.name == "__init__.py" else self.module.split(".")[:-1]
        lazy = {
            id(node)
            for function in ast.walk(self.tree)
            if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            for node in ast.walk(function)
        }
        found = []
        for node in ast.walk(self.tree):
            targets: list[str] = []
            if isinstance(node, ast.Import):
                targets = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                start = ".".join(package[: len(package) + 1 - node.level]) if node.level else ""
                source = ".".join(filter(None, (start, node.module)))
                targets = [f"{source}.{alias.name}" for alias in node.names]
            elif isinstance(node, ast.Call) and dotted(node.func) in (
                "importlib.import_module",
                "import_module",
                "__import__",
            ):
                targets = [a.value for a in node.args[:1] if isinstance(a, ast.Constant) and isinstance(a.value, str)]
            line = getattr(node, "lineno", 0)
            found += [Import(line, target, id(node) in lazy) for target in targets]
        return found


def room_of(module: str) -> str:
    inside = module.removeprefix("plait").removeprefix(".")
    rooms = [room for room in LEVELS if inside == room or inside.startswith(room + ".")]
    return max(rooms, key=len, default="")


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def dotted(node: ast.AST) -> str:
    """'a.b.c' of a chain of attributes, '' for anything else."""
    if isinstance(node, ast.Attribute):
        value = dotted(node.value)
        return f"{value}.{node.attr}" if value else ""
    return node.id if isinstance(node, ast.Name) else ""


def read(root: Path) -> list[File]:
    found = []
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root.parent).with_suffix("").parts
        found.append(_file(path, ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path.read_text()))
    return found


@cache
def _file(path: Path, module: str, text: str) -> File:
    return File(path, module, text, ast.parse(text, str(path)))


def edges(files: list[File]) -> Iterator[tuple[File, Import, str]]:
    """Every import of one module of the package by another: (file, import, the module it reaches)."""
    modules = {file.module for file in files}
    for file in files:
        for found in file.imports:
            target = found.target.removesuffix(".*")
            if within(target, "plait"):
                while target not in modules and "." in target and target.rpartition(".")[0] in modules:
                    target = target.rpartition(".")[0]
                yield file, found, target


# --- the rules


def direction(root: Path) -> list[str]:
    """Imports go down: a room imports rooms of lower levels and itself. The cli may import anything."""
    complaints = []
    for file, found, target in edges(read(root)):
        here, there = file.room, room_of(target)
        if here in ("", "cli") or here == there:
            continue
        if not there or LEVELS[there] >= LEVELS[here]:
            complaints.append(file.says(found.line, f"{here} imports {target}, which is not below it"))
        elif any(within(here, one) and within(there, other) for one, other in NEVER):
            complaints.append(file.says(found.line, f"{here} never imports {there}"))
    return complaints


def known_rooms(root: Path) -> list[str]:
    """Every file stands in a room that has a level, or is the package's front door."""
    front = {"plait", "plait.__main__", "plait._version"}
    return [file.says(1, "stands in no room") for file in read(root) if not file.room and file.module not in front]


def circles(root: Path) -> list[str]:
    """No module imports itself by way of others. Imports inside functions count, except in the cli."""
    reaches: dict[str, set[str]] = {}
    for file, found, target in edges(read(root)):
        if target != file.module and not (found.lazy and file.room == "cli"):
            reaches.setdefault(file.module, set()).add(target)
    complaints: list[str] = []
    done: set[str] = set()

    def visit(module: str, way: tuple[str, ...]) -> None:
        if module in way:
            complaints.append(f"a circle: {' -> '.join((*way[way.index(module) :], module))}")
        elif module not in done:
            for target in sorted(reaches.get(module, ())):
                visit(target, (*way, module))
            done.add(module)

    for module in sorted(reaches):
        visit(module, ())
    return complaints


def no_torch_on_paper(root: Path) -> list[str]:
    """design and report read and draw; neither knows a tensor."""
    return [
        file.says(found.line, f"{file.room} imports {found.target}")
        for file in read(root)
        if within(file.room, "design") or within(file.room, "report")
        for found in file.imports
        if found.target.split(".")[0] in ("torch", "transformers", "safetensors", "tokenizers")
    ]


def _only_in(root: Path, library: str, allowed: Callable[[File], bool]) -> list[str]:
    """`library` is imported, or reached as an attribute, only in files that are allowed to."""
    complaints = []
    for file in read(root):
        if allowed(file):
            continue
        uses = [found.line for found in file.imports if within(found.target, library)]
        uses += [
            node.lineno for node in ast.walk(file.tree) if isinstance(node, ast.Attribute) and dotted(node) == library
        ]
        complaints += [file.says(line, f"uses {library}") for line in sorted(set(uses))]
    return complaints


def distributed_only_in_comm(root: Path) -> list[str]:
    return _only_in(root, "torch.distributed", lambda file: file.room == "runtime.comm")


def transformers_only_in_hf(root: Path) -> list[str]:
    return _only_in(root, "transformers", lambda file: file.room == "runtime.hf")


def environment_only_at_the_door(root: Path) -> list[str]:
    """Only the world (torchrun's variables) and the command line read the environment."""

    def allowed(file: File) -> bool:
        return file.room == "cli" or file.module == "plait.runtime.comm.world"

    names = ("os.environ", "os.environb", "os.getenv", "os.putenv", "os.unsetenv")
    return [complaint for name in names for complaint in _only_in(root, name, allowed)]


def siblings_apart(root: Path) -> list[str]:
    """A file in runtime/parallel is one method, which can be read alone."""
    room = "plait.runtime.parallel"
    return [
        file.says(found.line, f"{file.module} imports its sibling {target}")
        for file, found, target in edges(read(root))
        if within(file.module, room) and file.module != room and within(target, room)
    ]


def no_global(root: Path) -> list[str]:
    return [
        file.says(node.lineno, f"global {', '.join(node.names)}")
        for file in read(root)
        for node in ast.walk(file.tree)
        if isinstance(node, ast.Global)
    ]


MUTABLE_CALLS = {"list", "dict", "set", "bytearray", "defaultdict", "deque", "Counter", "OrderedDict", "ChainMap",
                 "WeakKeyDictionary", "WeakValueDictionary", "WeakSet"}  # fmt: skip
MUTATORS = {"append", "extend", "insert", "remove", "pop", "popitem", "clear", "add", "discard", "update", "setdefault",
            "sort", "reverse", "appendleft", "popleft", "difference_update", "intersection_update"}  # fmt: skip


def _is_mutable(value: ast.expr | None) -> bool:
    if isinstance(value, ast.Call):
        return dotted(value.func).rpartition(".")[2] in MUTABLE_CALLS
    return isinstance(value, ast.List | ast.Dict | ast.Set | ast.ListComp | ast.DictComp | ast.SetComp)


def _is_constant(name: str) -> bool:
    return name.isupper() or (name.startswith("__") and name.endswith("__"))


def _top_level(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements that run at import, those inside if, try, for and with included."""
    for node in body:
        yield node
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            for field in ("body", "orelse", "finalbody"):
                yield from _top_level(getattr(node, field, []))
            for handler in getattr(node, "handlers", []):
                yield from _top_level(handler.body)


def _assigned(node: ast.stmt) -> Iterator[tuple[str, ast.expr | None]]:
    """(name, value) of an assignment; pairs of a tuple are taken apart."""
    if isinstance(node, ast.Assign):
        for target in node.targets:
            pairs = [(target, node.value)]
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                pairs = list(zip(target.elts, node.value.elts, strict=False))
            yield from ((name.id, value) for name, value in pairs if isinstance(name, ast.Name))
    elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        yield node.target.id, node.value


def _changes(node: ast.AST) -> Iterator[ast.expr]:
    """What this node changes in place: x in x[0] = 1, del x[0], x += y, x.append(y)."""
    if isinstance(node, ast.Assign | ast.Delete):
        yield from (t.value for t in node.targets if isinstance(t, ast.Subscript))
    elif isinstance(node, ast.AugAssign | ast.AnnAssign):
        if isinstance(node.target, ast.Subscript):
            yield node.target.value
        elif isinstance(node, ast.AugAssign):
            yield node.target
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in MUTATORS:
        yield node.func.value


def no_module_state(root: Path) -> list[str]:
    """No list, dict or set with a lower-case name at module level; none with an upper-case name is ever changed."""
    complaints = []
    for file in read(root):
        shared = {alias.asname or alias.name.split(".")[0] for node in ast.walk(file.tree)
                  if isinstance(node, ast.Import | ast.ImportFrom) for alias in node.names}  # fmt: skip
        for node in _top_level(file.tree.body):
            for name, value in _assigned(node):
                shared.add(name)
                if _is_mutable(value) and not _is_constant(name):
                    complaints.append(file.says(node.lineno, f"{name} is mutable state of the module"))
        complaints += [file.says(line, f"changes the constant {name}") for line, name in _changed(file.tree, shared)]
    return complaints


def _changed(scope: ast.AST, shared: set[str]) -> Iterator[tuple[int, str]]:
    """Every change of an upper-case name that the module assigns or imports, unless a function has its own."""
    for node in ast.iter_child_nodes(scope):
        visible = shared
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            own = {a.arg for a in ast.walk(node.args) if isinstance(a, ast.arg)}
            own |= {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
            visible = shared - own
        for changed in _changes(node):
            name = dotted(changed)
            if name.rpartition(".")[2].isupper() and name.split(".")[0] in visible:
                yield getattr(node, "lineno", 0), name
        yield from _changed(node, visible)


def short_files(root: Path) -> list[str]:
    return [
        file.says(1, f"{lines} lines, the most is {LONGEST}")
        for file in read(root)
        if (lines := len(file.text.splitlines())) > LONGEST
    ]


def nothing_left_to_do(root: Path) -> list[str]:
    return [
        file.says(number, line.strip())
        for file in read(root)
        for number, line in enumerate(file.text.splitlines(), 1)
        if re.search(r"\b(TODO|FIXME)\b", line)
    ]


RULES: tuple[Rule, ...] = (
    known_rooms, direction, circles, no_torch_on_paper, distributed_only_in_comm, transformers_only_in_hf,
    environment_only_at_the_door, siblings_apart, no_global, no_module_state, short_files, nothing_left_to_do,
)  # fmt: skip
