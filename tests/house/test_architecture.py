"""The architecture holds: who may import whom, where state may live, how long a file may be.

Each rule of rules.py is shown to complain about small packages that break it, and to be silent about the real one.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.house.rules import (
    LONGEST,
    RULES,
    Rule,
    circles,
    direction,
    distributed_only_in_comm,
    environment_only_at_the_door,
    known_rooms,
    no_global,
    no_module_state,
    no_torch_on_paper,
    nothing_left_to_do,
    read,
    short_files,
    siblings_apart,
    transformers_only_in_hf,
)  # fmt: skip

SOURCE = Path(__file__).parents[2] / "src" / "plait"
BENCH = Path(__file__).parents[2] / "bench"


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_house_stands(rule: Rule) -> None:
    assert read(SOURCE)
    assert rule(SOURCE) == []


@pytest.mark.parametrize(
    "rule", [no_global, no_module_state, short_files, nothing_left_to_do], ids=lambda r: r.__name__
)
def test_the_bench_keeps_the_rules_that_are_no_matter_of_rooms(rule: Rule) -> None:
    assert read(BENCH)
    assert rule(BENCH) == []


def test_paper_needs_no_torch() -> None:
    """Said by the interpreter itself: with all of design and report loaded, torch is not."""
    modules = [file.module for file in read(SOURCE) if file.room.split(".")[0] in ("design", "report")]
    assert "plait.design.schedule.check" in modules
    loads = f"import sys, importlib; [importlib.import_module(m) for m in {modules}]; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", loads], capture_output=True, text=True, cwd=SOURCE.parent, check=True)
    assert done.stdout == "False\n"


# --- each rule on packages that break it, and on near misses that do not

BAD: list[tuple[Rule, dict[str, str]]] = [
    (known_rooms, {"helpers/text.py": ""}),
    (direction, {"design/mesh.py": "from ..runtime import batch", "runtime/batch.py": ""}),
    (direction, {"design/plan.py": "from .cost import traffic", "design/cost/traffic.py": ""}),
    (direction, {"design/cost/memory.py": "from plait.design.planner.search import best"}),
    (direction, {"report/timeline.py": "import plait.runtime.batch"}),
    (direction, {"runtime/batch.py": "from .comm.world import Group"}),
    (direction, {"runtime/comm/world.py": "from ..parallel import tensor"}),
    (direction, {"runtime/comm/world.py": "from ..hf import read"}),
    (direction, {"runtime/hf/read.py": "def f():\n    from ..parallel import tensor"}),
    (direction, {"runtime/parallel/tensor.py": "from ..hf.read import Model"}),
    (direction, {"runtime/parallel/tensor.py": "from ..data.batches import rows"}),
    (direction, {"runtime/data/batches.py": "from plait.runtime.training import step"}),
    (direction, {"runtime/checkpoint/save.py": "from ..data import batches"}),
    (direction, {"runtime/training/loop.py": "from ...check import compare"}),
    (direction, {"runtime/training/loop.py": "from plait import report", "report/__init__.py": ""}),
    (direction, {"runtime/training/loop.py": "from ...design.cost.traffic import traffic"}),
    (direction, {"runtime/training/loop.py": "import plait.design.planner.search"}),
    (direction, {"runtime/training/loop.py": "from plait import __version__", "__init__.py": "__version__ = '1'"}),
    (direction, {"check/compare.py": "from importlib import import_module\nimport_module('plait.cli.app')"}),
    (circles, {"design/a.py": "from .b import x", "design/b.py": "from . import c", "design/c.py": "from .a import y"}),
    (circles, {"design/a.py": "from .b import x", "design/b.py": "def f():\n    from .a import y"}),
    (circles, {"design/s/__init__.py": "from .check import check", "design/s/check.py": "from . import Action"}),
    (circles, {"cli/app.py": "from . import train", "cli/train.py": "from .app import app"}),
    (no_torch_on_paper, {"design/mesh.py": "import torch"}),
    (no_torch_on_paper, {"design/cost/x.py": "def f():\n    from torch import Tensor"}),
    (no_torch_on_paper, {"report/x.py": "import torch.nn.functional as F"}),
    (distributed_only_in_comm, {"runtime/parallel/tensor.py": "import torch.distributed as dist"}),
    (distributed_only_in_comm, {"runtime/parallel/tensor.py": "from torch import distributed"}),
    (distributed_only_in_comm, {"cli/train.py": "def f():\n    from torch.distributed import TCPStore"}),
    (distributed_only_in_comm, {"runtime/training/step.py": "import torch\ntorch.distributed.barrier()"}),
    (distributed_only_in_comm, {"check/x.py": "import importlib\nimportlib.import_module('torch.distributed')"}),
    (transformers_only_in_hf, {"runtime/parallel/tensor.py": "from transformers.models import llama"}),
    (transformers_only_in_hf, {"check/reference.py": "import transformers"}),
    (environment_only_at_the_door, {"runtime/comm/nursery.py": "import os\nx = os.environ['RANK']"}),
    (environment_only_at_the_door, {"runtime/data/tokens.py": "from os import environ"}),
    (environment_only_at_the_door, {"check/x.py": "import os\nx = os.getenv('HOME')"}),
    (siblings_apart, {"runtime/parallel/zero.py": "from .data import Buckets", "runtime/parallel/data.py": ""}),
    (siblings_apart, {"runtime/parallel/zero.py": "from . import data", "runtime/parallel/data.py": ""}),
    (siblings_apart, {"runtime/parallel/zero.py": "from plait.runtime.parallel import data"}),
    (no_global, {"runtime/x.py": "n = 0\ndef f():\n    global n\n    n += 1"}),
    (no_module_state, {"runtime/x.py": "cache = {}"}),
    (no_module_state, {"runtime/x.py": "cache: dict[str, int] = dict()"}),
    (no_module_state, {"runtime/x.py": "import weakref\n_seen = weakref.WeakSet()"}),
    (no_module_state, {"runtime/x.py": "try:\n    names = [n for n in 'ab']\nexcept ValueError:\n    pass"}),
    (no_module_state, {"runtime/x.py": "a, b = 1, set()"}),
    (no_module_state, {"runtime/x.py": "NAMES = []\ndef f():\n    NAMES.append(1)"}),
    (no_module_state, {"runtime/x.py": "_TABLE = {}\ndef f():\n    _TABLE['a'] = 1"}),
    (no_module_state, {"runtime/x.py": "TABLE = {}\ndef f():\n    del TABLE['a']"}),
    (no_module_state, {"runtime/x.py": "NAMES = [1]\nNAMES += [2]"}),
    (no_module_state, {"runtime/x.py": "from .y import TABLE\nclass A:\n    def f(self):\n        TABLE.update(a=1)"}),
    (no_module_state, {"runtime/x.py": "from . import y\ny.TABLE['a'] = 1"}),
    (short_files, {"runtime/x.py": "x = 1\n" * (LONGEST + 1)}),
    (nothing_left_to_do, {"runtime/x.py": "x = 1  # TO" + "DO: more"}),
    (nothing_left_to_do, {"runtime/x.py": '"""FIX' + 'ME"""'}),
]  # fmt: skip

GOOD: list[dict[str, str]] = [
    {"__init__.py": "from .design.plan import Plan", "design/plan.py": "Plan = 1"},
    {"design/planner/search.py": "from ..cost import traffic\nfrom ..mesh import Mesh", "design/mesh.py": ""},
    {"report/x.py": "from ..design.cost.traffic import traffic"},
    {"runtime/hf/read.py": "import transformers\nfrom ...design.facts import ModelFacts\nfrom ..batch import Batch"},
    {"runtime/comm/world.py": "import os\nimport torch.distributed as dist\nx = os.environ.get('RANK')"},
    {"runtime/parallel/tensor.py": "import torch\nfrom ..comm import collectives\nfrom ..batch import Batch"},
    {"runtime/training/assemble.py": "from ..hf import read\nfrom ..parallel import tensor, data"},
    {"check/x.py": "from ..runtime.training import step\nfrom ..report import timeline"},
    {
        "cli/app.py": "def f():\n    from . import train",
        "cli/train.py": "from .app import f\nfrom .. import __version__",
    },
    {"runtime/x.py": "__all__ = ['a']\nA = {'a': 1}\na = ('a',)\ndef f(B):\n    B[0] = 1\n    x = []\n    x.append(A)"},
    {"runtime/x.py": "T = 1\ndef f(n):\n    T = [n]\n    T.append(n)\n    def g():\n        nonlocal n"},
    {
        "design/s/__init__.py": "from .check import check",
        "design/s/check.py": "from .action import Action",
        "design/s/action.py": "",
    },
    {"runtime/x.py": "x = 1\n" * LONGEST},
]


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / "plait" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root / "plait"


@pytest.mark.parametrize(("rule", "files"), BAD)
def test_a_broken_rule_is_seen(rule: Rule, files: dict[str, str], tmp_path: Path) -> None:
    assert rule(write(tmp_path, files))


@pytest.mark.parametrize("files", GOOD)
def test_what_is_allowed_passes_every_rule(files: dict[str, str], tmp_path: Path) -> None:
    root = write(tmp_path, files)
    assert {rule.__name__: found for rule in RULES if (found := rule(root))} == {}


def test_every_rule_has_been_broken() -> None:
    assert {rule for rule, _ in BAD} == set(RULES)


def test_a_complaint_says_where_and_what(tmp_path: Path) -> None:
    root = write(tmp_path, {"runtime/batch.py": "x = 1\nfrom .comm.world import Group\n"})
    assert direction(root) == [
        f"{root}/runtime/batch.py:2: runtime imports plait.runtime.comm.world.Group, which is not below it"
    ]
    root = write(tmp_path, {"design/a.py": "from .b import x", "design/b.py": "from .a import y"})
    assert circles(root) == ["a circle: plait.design.a -> plait.design.b -> plait.design.a"]
