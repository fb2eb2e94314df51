"""Records what modules make of each microbatch: outputs going forward, their gradients coming back, in order.

The same recorder watches the whole model of the reference and the stage of a rank; it changes nothing that it sees.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from .places import Place


class Recorder:
    """`seen` holds what was recorded, by `Place.key`, in the order in which it came; `microbatch` is the one at hand."""

    def __init__(self) -> None:
        self.seen: dict[str, Tensor] = {}
        self.microbatch: int | None = None
        self._handles: list[Any] = []

    def add(self, quantity: str, value: Tensor, name: str = "", microbatch: int | None = None) -> None:
        self.seen[Place(0, quantity, name, microbatch).key] = value.detach().clone()

    def attach(self, modules: dict[str, nn.Module], blocks: set[str]) -> None:
        """From now on records the outputs of `modules`, and the inputs too of those that are `blocks`."""
        for name, module in modules.items():
            if name in blocks:
                self._handles.append(module.register_forward_pre_hook(self._input(name), with_kwargs=True))
            self._handles.append(module.register_forward_hook(self._output(name)))

    def attach_factors(self, modules: dict[str, nn.Module]) -> None:
        """From now on records what `modules` multiply by their weights: no place, but a factor of gradients."""
        for name, module in modules.items():
            self._handles.append(module.register_forward_pre_hook(self._factor(name)))

    def detach(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _input(self, name: str) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._pass("input", name, args[0] if args else kwargs["hidden_states"])

        return hook

    def _factor(self, name: str) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
            if self.microbatch is not None:
                self.add("factor", args[0], name, self.microbatch)

        return hook

    def _output(self, name: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            self._pass("output", name, output[0] if isinstance(output, tuple) else output)

        return hook

    def _pass(self, quantity: str, name: str, value: Tensor) -> None:
        microbatch = self.microbatch
        if microbatch is None:
            return
        self.add(quantity, value, name, microbatch)
        if value.requires_grad:
            value.register_hook(lambda gradient: self.add(f"{quantity} gradient", gradient, name, microbatch))


def watched(whole: nn.Module, blocks: set[str], *, inside: bool) -> dict[str, nn.Module]:
    """The modules whose outputs are compared: the blocks, and with `inside` every module that has parameters of its own
    (without: those outside of the blocks only)."""
    found = {}
    for name, module in whole.named_modules():
        within = any(name.startswith(f"{block}.") for block in blocks)
        own = next(module.parameters(recurse=False), None) is not None
        if name in blocks or (own and (inside or not within)):
            found[name] = module
    return found
