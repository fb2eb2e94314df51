"""AdamW over the slices that this rank holds, and the learning rate of each step.

The state is fp32 (fp64 in a wide check). When compute is bf16 the fp32 weights are kept here and published to the
compute weights after each update. No decay on norms and biases.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

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
    """`step(lr)` updates from the gradients' buffers and publishes the new weights."""

    def __init__(
        self,
        plan: Plan,
        held: tuple[Parameter, ...],
        parameters: Mapping[str, nn.Parameter],
        gradients: Mapping[str, Tensor],
    ) -> None:
        self._published: list[tuple[nn.Parameter, Tensor]] = []
        self.weights: dict[str, nn.Parameter] = {}
        for one in held:
            parameter, gradient = parameters[one.name], gradients[one.name]
            weight = parameter
            if parameter.dtype != gradient.dtype:
                weight = nn.Parameter(parameter.detach().to(gradient.dtype))
                self._published.append((parameter, weight))
            weight.grad = gradient
            self.weights[one.name] = weight
        decays = [self.weights[one.name] for one in held if one.first.decays]
        others = [self.weights[one.name] for one in held if not one.first.decays]
        groups = [{"params": decays, "weight_decay": plan.weight_decay}, {"params": others, "weight_decay": 0.0}]
        self._adamw = torch.optim.AdamW(
            # Where all that a rank holds is frozen there is an empty group.
            [group for group in groups if group["params"]] or groups[:1],
            lr=plan.lr,
            betas=(plan.beta1, plan.beta2),
            eps=1e-8,
            fused=True,
        )

    def step(self, lr: float) -> None:
        for group in self._adamw.param_groups:
            group["lr"] = lr
        self._adamw.step()
        with torch.no_grad():
            for parameter, weight in self._published:
                parameter.copy_(weight)

    @property
    def rate(self) -> float:
        """The learning rate of the last update."""
        return float(self._adamw.param_groups[0]["lr"])

    @property
    def held(self) -> tuple[int, int]:
        """Bytes of its own weights, where compute is narrower than they, and of AdamW's state."""
        state = [value for values in self._adamw.state.values() for value in values.values()]
        return sum(weight.nbytes for _, weight in self._published), sum(value.nbytes for value in state)

    def moments(self, name: str) -> tuple[Tensor, Tensor]:
        state = self._adamw.state[self.weights[name]]
        return state["exp_avg"], state["exp_avg_sq"]
