"""What a class's own attention is given in the place of what its model made for it.

    masks   some models make theirs without the positions: a token would see the documents before its own
    heads   some make numbers for every head (ALiBi's biases), and a tp rank has some of the heads only

ALiBi adds slope x distance to the scores. The classes add slope x place of the key, which differs by a number of the row
alone, and softmax does not see that; so a packed row needs its documents' mask and nothing else. Press et al., "Train
Short, Test Long", 2022, section 3. Both are hooks on named arguments, and what they have made they leave as it is, since
attention that backward runs again is called with it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .attention import Sight
from .tensor_plan import TensorPlan

Heads = tuple[int, int, int]
"""(start, stop) of a rank's heads, of how many."""


def give_masks(model: nn.Module, plan: TensorPlan) -> Sight | None:
    """Has the attentions of `model` see what the documents let them; the result is told the batch at hand. None where the
    family's masks follow from the positions."""
    sight = Sight()
    named = [(module, kind) for name, module in model.named_modules() if (kind := plan.mask_of(name))]
    for module, kind in named:
        module.register_forward_pre_hook(_masking(sight, kind), with_kwargs=True)
    return sight if named else None


def _masking(sight: Sight, kind: str) -> Any:
    def hook(module: nn.Module, args: Any, named: dict[str, Any]) -> Any:
        may = sight.mask(getattr(module, "sliding_window", None))
        if may is None:  # what the model made is right
            return None
        if kind == "hidden":
            return args, {**named, "attention_mask": ~may}
        x: Tensor = args[0] if args else named["hidden_states"]
        return args, {**named, "attention_mask": torch.zeros_like(may, dtype=x.dtype).masked_fill(~may, _least(x))}

    return hook


def _least(x: Tensor) -> float:
    return float(torch.finfo(x.dtype).min)


def give_own_heads(module: nn.Module, arguments: dict[str, str], own: Heads) -> None:
    """Has `module` get its own heads' share of `arguments`: by name, in which dim of each the heads are ("h" the first,
    "b h" the second, "b*h" the first, inside the rows of the batch)."""

    def hook(module: nn.Module, args: Any, named: dict[str, Any]) -> Any:
        given = {name: named[name] for name in arguments if isinstance(named.get(name), Tensor)}
        rows = len(args[0] if args else named["hidden_states"])
        return args, named | {name: own_heads(value, arguments[name], rows, own) for name, value in given.items()}

    module.register_forward_pre_hook(hook, with_kwargs=True)


def own_heads(value: Tensor, where: str, rows: int, own: Heads) -> Tensor:
    """The share of a rank's `own` heads of something that is made for all of them, or has none; else `value`."""
    start, stop, heads = own
    if where == "b*h":
        return value.unflatten(0, (rows, heads))[:, start:stop].flatten(0, 1) if len(value) == rows * heads else value
    dim = ("h", "b h").index(where)
    return value.narrow(dim, start, stop - start) if value.shape[dim] == heads else value
