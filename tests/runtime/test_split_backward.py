"""Weight gradients that are put off are the ones that autograd makes, bit for bit where it adds in the same order."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from plait.runtime.parallel.split_backward import WeightGradients

MICROBATCHES = 3


def layer(kind: str, *, bias: bool = True, dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    module = Conv1D(6, 4) if kind == "Conv1D" else nn.Linear(4, 6, bias=bias)
    for parameter in module.parameters():
        parameter.data = torch.randn_like(parameter).to(dtype)
    return module


def inputs(dtype: torch.dtype = torch.float64) -> list[Tensor]:
    torch.manual_seed(1)
    return [torch.randn(2, 5, 4).to(dtype).requires_grad_() for _ in range(MICROBATCHES)]


def loss(y: Tensor) -> Tensor:
    return (y.float().sin() if y.dtype is torch.bfloat16 else y.sin()).sum()


class Put:
    """A layer whose gradients are put off, into fp32 where it computes in less; `ready` lists who was told to be."""

    def __init__(self, module: nn.Module, *, transposed: bool) -> None:
        self.module, self.owed, self.ready = module, WeightGradients(), list[str]()
        self.owed.put_off(module, transposed=transposed)
        self.names = {parameter: name for name, parameter in module.named_parameters()}
        self.gradients = {
            parameter: torch.zeros_like(parameter, dtype=torch.promote_types(parameter.dtype, torch.float32))
            for parameter in self.names
        }
        self.owed.adopt(self.gradients.__getitem__, lambda parameter: self.ready.append(self.names[parameter]))

    def backward(self, microbatch: int, x: Tensor) -> None:
        loss(self.module(x)).backward()
        self.owed.keep(microbatch)

    def gradient(self, name: str) -> Tensor:
        return next(value for parameter, value in self.gradients.items() if self.names[parameter] == name)


@pytest.mark.parametrize("kind", ["Linear", "Conv1D"])
def test_the_same_gradients_as_autograd(kind: str) -> None:
    whole, put = layer(kind), Put(layer(kind), transposed=kind == "Conv1D")
    ours, theirs = inputs(), inputs()
    for m in range(MICROBATCHES):
        loss(whole(theirs[m])).backward()
        put.backward(m, ours[m])
        assert torch.equal(ours[m].grad, theirs[m].grad)  # type: ignore[arg-type]
    assert all(not gradient.any() for gradient in put.gradients.values()), "nothing is added before the second half"
    assert all(parameter.grad is None for parameter in put.module.parameters())
    for m in range(MICROBATCHES):
        put.owed.settle(m)
    for name, parameter in whole.named_parameters():
        assert torch.allclose(put.gradient(name), parameter.grad, rtol=1e-14, atol=1e-14)  # type: ignore[arg-type]


def test_each_microbatch_gives_its_own_in_any_order() -> None:
    put, xs = Put(layer("Linear"), transposed=False), inputs()
    for m in range(MICROBATCHES):
        put.backward(m, xs[m])
    for m in (1, 2, 0):
        before = put.gradient("weight").clone()
        put.owed.settle(m)
        alone = layer("Linear")
        loss(alone(inputs()[m])).backward()
        assert torch.allclose(put.gradient("weight") - before, alone.weight.grad, rtol=1e-12, atol=1e-12)
        with pytest.raises(KeyError):
            put.owed.settle(m)


def test_products_in_bf16_are_added_in_fp32() -> None:
    """As an ordinary backward is: each microbatch's gradient is bf16, and their sum is not."""
    put, xs = Put(layer("Linear", dtype=torch.bfloat16), transposed=False), inputs(torch.bfloat16)
    expected = torch.zeros(6, 4)
    for m in range(MICROBATCHES):
        put.backward(m, xs[m])
        put.owed.settle(m)
        alone = layer("Linear", dtype=torch.bfloat16)
        loss(alone(inputs(torch.bfloat16)[m])).backward()
        expected += alone.weight.grad.float()  # type: ignore[union-attr]
    assert put.gradient("weight").dtype is torch.float32
    assert torch.equal(put.gradient("weight"), expected)
    assert not torch.equal(expected, expected.bfloat16().float())


def test_who_is_ready_when() -> None:
    """Once a microbatch, weight before bias; a layer that runs twice in a microbatch after its second product."""
    put, (x, *_) = Put(layer("Linear"), transposed=False), inputs()
    loss(put.module(x) + put.module(x * 2)).backward()
    put.owed.keep(0)
    assert put.ready == []
    put.owed.settle(0)
    assert put.ready == ["weight", "bias"]
    alone = layer("Linear")
    loss(alone(x.detach()) + alone(x.detach() * 2)).backward()
    assert torch.allclose(put.gradient("weight"), alone.weight.grad, rtol=1e-13, atol=1e-13)


def test_what_does_not_learn_gets_nothing() -> None:
    module = layer("Linear")
    module.weight.requires_grad_(False)
    put, (x, *_) = Put(module, transposed=False), inputs()
    put.backward(0, x)
    put.owed.settle(0)
    assert put.ready == []  # autograd gives the bias its own: nothing is owed to a frozen weight
    alone = layer("Linear")
    loss(alone(x.detach())).backward()
    assert torch.equal(module.bias.grad, alone.bias.grad)  # type: ignore[arg-type]
    assert not put.gradient("weight").any()


def test_an_input_that_wants_no_gradient() -> None:
    """The first layer of a model of plain modules: its weight learns all the same."""
    put, alone = Put(layer("Linear"), transposed=False), layer("Linear")
    x = inputs()[0].detach()
    put.backward(0, x)
    put.owed.settle(0)
    loss(alone(x)).backward()
    assert torch.allclose(put.gradient("weight"), alone.weight.grad, rtol=1e-13, atol=1e-13)


def test_without_gradients_nothing_is_kept() -> None:
    put, (x, *_) = Put(layer("Linear", bias=False), transposed=False), inputs()
    with torch.no_grad():
        assert torch.equal(put.module(x), layer("Linear", bias=False)(x))
    put.owed.keep(0)
    put.owed.settle(0)
    assert put.ready == []


def test_what_is_kept_between_the_halves_is_noted_and_let_go() -> None:
    class Note:
        alive = 0

        def __init__(self, tensor: Tensor) -> None:
            Note.alive += 1

        def __del__(self) -> None:
            Note.alive -= 1

    put, (x, *_) = Put(layer("Linear"), transposed=False), inputs()
    put.owed.note = Note
    put.backward(0, x)
    assert Note.alive == 2
    put.owed.settle(0)
    assert Note.alive == 0
