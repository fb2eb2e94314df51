"""Processes and collectives: pairs of differentiable collectives against one process, the nursery, the world."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from plait.design.errors import PlanError
from plait.design.mesh import Mesh
from plait.design.styles import STYLES
from plait.runtime.comm import differentiable
from plait.runtime.comm.collectives import barrier
from plait.runtime.comm.nursery import BadNumbersError, RankError, launch
from plait.runtime.comm.world import Rendezvous, World
from plait.runtime.parallel import tensor
from tests.nursery import Nursery

TP2 = Mesh((("pp", 1), ("dp", 1), ("tp", 2)))
TP4 = Mesh((("pp", 1), ("dp", 1), ("tp", 4)))


def two_layers(style: str) -> Any:
    """Gradients and output of x -> column layer -> row layer (or gathered columns), cut over 4 ranks, against whole."""

    def main(meeting: Rendezvous) -> Any:
        with World(meeting, TP4) as world:
            group = world.group("tp")
            generator = torch.Generator().manual_seed(5)
            x, up, down, bias_up, bias_down, weight = (
                torch.randn(shape, generator=generator, dtype=torch.float64)
                for shape in ((3, 6), (8, 6), (6, 8), (8,), (6,), (3, 6 if style == "rowwise" else 8))
            )
            whole_x = x.clone().requires_grad_(True)
            whole = [p.clone().requires_grad_(True) for p in (up, bias_up, down, bias_down)]
            y = torch.nn.functional.linear(whole_x, whole[0], whole[1])
            if style == "rowwise":
                y = torch.nn.functional.linear(y.tanh(), whole[2], whole[3])
            (y * weight).sum().backward()

            own = slice(2 * group.index, 2 * group.index + 2)
            first = torch.nn.Linear(6, 2, dtype=torch.float64)
            second = torch.nn.Linear(2, 6, dtype=torch.float64)
            with torch.no_grad():
                first.weight.copy_(up[own])
                first.bias.copy_(bias_up[own])
                second.weight.copy_(down[:, own])
                second.bias.copy_(bias_down)
            shared = tensor.SharedInput(group)
            into = STYLES["colwise" if style == "rowwise" else style]
            how: dict[str, Any] = {
                "enter": shared, "add": None, "start": 0, "transposed": False, "multiply": tensor.product,
            }  # fmt: skip
            tensor.split(first, into, group, sizes=[2] * 4, **how)
            tensor.split(second, STYLES["rowwise"], group, sizes=None, **how)
            mine_x = x.clone().requires_grad_(True)
            mine = first(mine_x)
            if style == "rowwise":
                mine = second(mine.tanh())
            (mine * weight).sum().backward()

            pairs = [(mine, y), (mine_x.grad, whole_x.grad), (first.weight.grad, whole[0].grad[own])]
            pairs.append((first.bias.grad, whole[1].grad[own]))
            if style == "rowwise":
                pairs += [(second.weight.grad, whole[2].grad[:, own]), (second.bias.grad, whole[3].grad)]
            return [float((a - b).abs().max()) for a, b in pairs]

    return launch(main, 4)


@pytest.mark.parametrize("style", ["rowwise", "colwise_gather_output"])
def test_cut_layers_equal_whole_ones(nursery: Nursery, style: str) -> None:
    """Column layer into row layer, and column layer with its output gathered: outputs, inputs' and weights' gradients."""
    for rank in nursery(two_layers, style):
        assert max(rank) < 1e-13


def shared_inputs(_: str) -> Any:
    """How often the input gradient is summed when q, k, v read one tensor, and when they read three."""

    def main(meeting: Rendezvous) -> Any:
        with World(meeting, TP2) as world:
            shared = tensor.SharedInput(world.group("tp"))
            counts = []
            for same in (True, False):
                x = torch.ones(2, 3, requires_grad=True)
                inputs = [x] * 3 if same else [x * 1 for _ in range(3)]
                world.ledger.clear()
                sum(shared(one).sum() for one in inputs).backward()
                counts.append([row.calls for row in world.ledger.rows(0)])
                counts.append(x.grad.tolist())
            changed = torch.ones(2)
            one = shared(changed)
            changed.add_(1)  # another value under the same name
            counts.append(shared(changed).tolist() if shared(changed) is not one else "stale")
            return counts

    return launch(main, 2)[0]


def test_one_input_is_summed_once(nursery: Nursery) -> None:
    once, gradient, thrice, other, changed = nursery(shared_inputs, "")
    assert once == [1]
    assert thrice == [3]
    assert gradient == other == [[6.0] * 3] * 2
    assert changed == [2.0, 2.0]


def test_a_group_of_one_moves_nothing() -> None:
    from plait.runtime.comm.ledger import Ledger
    from plait.runtime.comm.world import Group

    alone = Group("tp", (0,), 0, Ledger(), None)
    x = torch.ones(2)
    assert differentiable.copy(x, alone, why="-") is x
    assert differentiable.sum(x, alone, why="-") is x
    assert differentiable.gather(x, alone, [2], why="-") is x
    assert alone.ledger.rows(0) == []


def how_it_ends(kind: str) -> Any:
    """What the launch of 4 ranks raises when rank 2 goes wrong: type, code, message."""

    def main(meeting: Rendezvous) -> Any:
        with World(meeting, TP4) as world:
            if meeting.rank == 2:
                if kind == "memory":
                    raise MemoryError("no more")
                if kind == "plan":
                    raise PlanError("this cannot be")
                if kind == "numbers":
                    raise BadNumbersError("loss nan")
                if kind == "killed":
                    os.kill(os.getpid(), 9)
                if kind == "exit":
                    os._exit(5)
            barrier(world)
        return 0

    try:
        return ["returned", 0, str(launch(main, 4))]
    except RankError as error:
        return ["RankError", error.code, str(error)]
    except PlanError as error:
        return ["PlanError", 2, str(error)]


@pytest.mark.timeout(30)
@pytest.mark.parametrize(
    ("kind", "code", "words"),
    [
        ("memory", 3, "Rank 2 failed: MemoryError: no more"),
        ("plan", 2, "this cannot be"),
        ("numbers", 7, "loss nan"),
        ("killed", 3, "Rank 2 was ended by signal 9 (SIGKILL)"),
        ("exit", 3, "Rank 2 ended with code 5"),
    ],
)
def test_p097_the_first_failure_is_named(nursery: Nursery, kind: str, code: int, words: str) -> None:
    _, found, message = nursery(how_it_ends, kind)
    assert found == code
    assert words in message


def test_half_an_environment_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    assert Rendezvous.from_environment() is None
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(PlanError, match=r"sets RANK but not WORLD_SIZE, MASTER_ADDR, MASTER_PORT"):
        Rendezvous.from_environment()
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29400")
    found = Rendezvous.from_environment()
    assert found is not None
    assert (found.rank, found.size, found.local) == (0, 2, False)
    monkeypatch.setenv("RANK", "2")
    with pytest.raises(PlanError, match="RANK 2 is not in a world of WORLD_SIZE 2"):
        Rendezvous.from_environment()
