"""What one process computes: the whole unmodified model, a plain loop, torch's own loss, clip and AdamW.

It shares with the layout what both start from (initial weights, batches, learning rates) and nothing of how a layout
computes, so that agreement means something.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import cast

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from ..design.plan import Plan
from ..runtime.batch import IGNORE, Batch
from ..runtime.hf.read import Model
from ..runtime.hf.stage_model import attention_mask, build_whole
from ..runtime.training.optimizer import learning_rate
from .wide import wide


def reference(plan: Plan, model: Model, batches: list[Batch], file: Path) -> None:
    """Takes a step on each of the global `batches`, wide, and writes to `file` (safetensors, published by a rename):
    loss and norm by step, every gradient of the first step as reduced, before clipping, and every weight after the last
    step."""
    with wide():
        whole = build_whole(model, plan.seed, torch.float64)
        record = _train(plan, whole, batches)
    draft = file.with_suffix(".draft")
    save_file(record, draft)
    os.replace(draft, file)


def _train(plan: Plan, whole: nn.Module, batches: list[Batch]) -> dict[str, Tensor]:
    parameters = dict(whole.named_parameters())
    matrices = [p for p in parameters.values() if p.dim() > 1]
    others = [p for p in parameters.values() if p.dim() <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": plan.weight_decay}, {"params": others, "weight_decay": 0.0}],
        lr=plan.lr,
        betas=(plan.beta1, plan.beta2),
        eps=1e-8,
    )
    record: dict[str, Tensor] = {}
    losses, norms = [], []
    for step, batch in enumerate(batches):
        optimizer.zero_grad(set_to_none=False)
        tokens = int((batch.targets != IGNORE).sum())
        loss = torch.zeros((), dtype=torch.float64)
        for microbatch in batch.split(plan.dp * plan.microbatches):
            logits = whole(
                input_ids=microbatch.tokens,
                attention_mask=attention_mask(microbatch),
                position_ids=microbatch.positions,
                use_cache=False,
            ).logits
            summed = F.cross_entropy(
                logits.flatten(0, 1), microbatch.targets.flatten(), ignore_index=IGNORE, reduction="sum"
            )
            share = summed / max(tokens, 1)
            share.backward()
            loss += share.detach()
        if step == 0:
            record |= {f"gradient/{n}": _gradient(p).clone() for n, p in parameters.items()}
        gradients = [_gradient(p) for p in parameters.values()]
        norm = torch.sqrt(cast(Tensor, sum(gradient.square().sum() for gradient in gradients)))
        if plan.clip:
            torch.nn.utils.clip_grad_norm_(parameters.values(), plan.clip)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(plan, step, plan.steps)
        optimizer.step()
        losses.append(loss)
        norms.append(norm)
    record |= {f"weight/{n}": p.detach().clone() for n, p in parameters.items()}
    return record | {"loss": torch.stack(losses), "norm": torch.stack(norms)}


def _gradient(parameter: nn.Parameter) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
