"""AdamW over the slices that this rank holds, and the learning rate of each step.

The state is fp32 (fp64 in a wide check). Where compute is narrower the fp32 weights are kept here and published to the
compute weights after each update. Gradients that are kept in less than fp32 are made wide a tensor at a time. No decay on
norms and biases.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy
import torch
from torch import Tensor, nn

from ...design.part import Parameter
from ...design.plan import Plan


def learning_rate(plan: Plan, step: int, steps: int) -> float:
    """The rate of update `step` (from 0) of `steps`: a linear warm-up that ends at the peak, then the plan's decay to
    lr x lr_floor at the last step, and stays there. It depends on nothing but these."""
    if step < plan.warmup:
        return plan.lr * (step + 1) / plan.warmup
    if plan.lr_schedule == "constant" or steps - 1 <= plan.warmup:
        return plan.lr
    share = min(1.0, (step - plan.warmup) / (steps - 1 - plan.warmup))
    fall = 0.5 * (1 + math.cos(math.pi * share)) if plan.lr_schedule == "cosine" else 1 - share
    return plan.lr * (plan.lr_floor + (1 - plan.lr_floor) * fall)


class Optimizer:
    """`step(lr)` updates from the gradients' buffers and publishes the new weights; where `overflow` is true (on the
    device) weights and state stay as they are, to the bit, and no update is counted."""

    def __init__(
        self,
        plan: Plan,
        held: tuple[Parameter, ...],
        parameters: Mapping[str, nn.Parameter],
        gradients: Mapping[str, Tensor],
    ) -> None:
        self._published: list[tuple[nn.Parameter, Tensor]] = []
        self.weights: dict[str, nn.Parameter] = {}
        self._overflow = torch.from_numpy(numpy.zeros((), numpy.float32))
        """What torch's fused update reads, of fp32 whatever it updates (a check would make any other way to it wide)."""
        together: list[Parameter] = []
        self._narrow: list[tuple[torch.optim.AdamW, Tensor, Tensor]] = []
        """What is updated by itself, from a gradient that is not as wide as the weight."""
        for one in held:
            parameter, gradient = parameters[one.name], gradients[one.name]
            weight, wide = parameter, torch.promote_types(parameter.dtype, torch.float32)
            if parameter.dtype != wide:
                weight = nn.Parameter(parameter.detach().to(wide))
                self._published.append((parameter, weight))
            self.weights[one.name] = weight
            self._overflow = self._overflow.to(weight.device)
            if gradient.dtype is wide:
                weight.grad = gradient
                together.append(one)
            else:
                self._narrow.append((self._made(plan, [one]), weight, gradient))
        at_once = [self._made(plan, together)] if together or not self._narrow else []
        self._all = [*at_once, *(adamw for adamw, _, _ in self._narrow)]

    def _made(self, plan: Plan, held: list[Parameter]) -> torch.optim.AdamW:
        decays = [self.weights[one.name] for one in held if one.first.decays]
        others = [self.weights[one.name] for one in held if not one.first.decays]
        groups = [{"params": decays, "weight_decay": plan.weight_decay}, {"params": others, "weight_decay": 0.0}]
        return torch.optim.AdamW(
            # Where all that a rank holds is frozen there is an empty group.
            [group for group in groups if group["params"]] or groups[:1],
            lr=plan.lr,
            betas=(plan.beta1, plan.beta2),
            eps=1e-8,
            fused=True,
        )

    def step(self, lr: float, overflow: Tensor | None = None) -> None:
        if overflow is not None:
            self._overflow.copy_(overflow)
        for adamw in self._all:
            for group in adamw.param_groups:
                group["lr"] = lr
            if overflow is not None:
                adamw.found_inf = self._overflow  # type: ignore[attr-defined]  # as torch's GradScaler does
        for adamw in self._all[: len(self._all) - len(self._narrow)]:
            adamw.step()
        for adamw, weight, gradient in self._narrow:
            weight.grad = gradient.to(weight.dtype)
            adamw.step()
            weight.grad = None
        with torch.no_grad():
            for parameter, weight in self._published:
                parameter.copy_(weight)

    @property
    def rate(self) -> float:
        """The learning rate of the last update."""
        return float(self._all[0].param_groups[0]["lr"])

    @property
    def holds(self) -> dict[str, list[Tensor]]:
        """Tensors that it holds from step to step: its own weights, where compute is narrower than they, and AdamW's."""
        states = [values for adamw in self._all for values in adamw.state.values()]
        state = [value for values in states for value in values.values()]
        return {"master_weights": [weight for _, weight in self._published], "state": state}

    def begin(self, updates: int) -> None:
        """Has the state of every weight, as after so many updates, for a checkpoint to fill: moments are zero where there
        were none."""
        for adamw in self._all:
            for group in adamw.param_groups:
                for weight in group["params"]:
                    if weight in adamw.state:
                        adamw.state[weight]["step"].fill_(updates)
                        continue
                    adamw.state[weight] = {
                        # As torch makes it where updates are fused.
                        "step": torch.full((), updates, dtype=self._overflow.dtype, device=weight.device),
                        "exp_avg": torch.zeros_like(weight, memory_format=torch.preserve_format),
                        "exp_avg_sq": torch.zeros_like(weight, memory_format=torch.preserve_format),
                    }

    @property
    def begun(self) -> bool:
        """Whether it has a state."""
        return any(adamw.state for adamw in self._all)

    def moments(self, name: str) -> tuple[Tensor, Tensor]:
        weight = self.weights[name]
        state = next(adamw.state[weight] for adamw in self._all if weight in adamw.state)
        return state["exp_avg"], state["exp_avg_sq"]
