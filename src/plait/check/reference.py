"""What one process computes: the whole unmodified model, a plain loop, torch's own loss, clip and AdamW.

It shares with the layout what both start from (initial weights, batches, learning rates) and nothing of how a layout
computes, so that agreement means something. Every step is one file (safetensors): each place's tensor, and in the
metadata the order of the places with the scale of each and the bound within which a layout must stay.

The bounds are rounding.py's: a number wide, and as shipped what a few disturbed runs of the same loop show.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import cast

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from ..design.plan import Plan
from ..runtime.batch import IGNORE, Batch
from ..runtime.hf.read import Model, find_blocks
from ..runtime.hf.stage_model import transposed
from ..runtime.hf.whole import WholeModel
from ..runtime.training.optimizer import learning_rate
from .bill import MOST_INSIDE, each_microbatch, looks_inside
from .places import Place
from .record import Recorder, watched
from .rounding import DISTURBED, Rounding, disturb, largest, wide_bounds, wide_slack
from .wide import wide

TYPES = {"wide": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


CHECKED_SCALE = 2.0**10
"""The loss scale of a check where a run would look for one: small numbers are saved by it, and no step overflows."""


def of_pass(plan: Plan, numerics: str) -> Plan:
    """The plan as a pass runs it."""
    changes: dict[str, object] = {"initial_loss_scale": CHECKED_SCALE} if plan.scales_dynamically else {}
    if numerics not in ("wide", plan.compute):  # another type, which sums and scales as it would by itself
        changes = {"compute": numerics}
        changes |= {name: Plan.model_fields[name].default for name in OF_A_TYPE}
    return plan.model_copy(update=changes)


OF_A_TYPE = ("accumulate", "reduce", "loss_scale", "initial_loss_scale", "loss_scale_window", "max_skips")


def computing(numerics: str) -> AbstractContextManager[object]:
    """The context in which a pass computes: "wide", or a compute type as shipped."""
    return wide() if numerics == "wide" else nullcontext()


def step_file(folder: Path, numerics: str, step: int) -> Path:
    return folder / f"{numerics}-{step}.safetensors"


def reference(plan: Plan, model: Model, batches: list[Batch], folder: Path, numerics: str = "wide") -> None:
    """Takes a step on each of the global `batches` and writes a file for each, and one (step 0) for the initial weights,
    each published by a rename."""
    plan, inside = of_pass(plan, numerics), looks_inside(plan, model.facts)
    steps = _steps(plan, model, batches, numerics, inside, None)
    if numerics == "wide":
        slack: dict[str, Tensor] = {}
        for step, record in enumerate(steps):
            bounds, slack = wide_bounds(record, slack), wide_slack(record, slack)
            _publish(record, bounds, slack, step_file(folder, numerics, step))
        return
    records = list(steps)
    roundings = [Rounding(record) for record in records]
    for run in range(DISTURBED):
        for rounding, disturbed in zip(roundings, _steps(plan, model, batches, numerics, inside, run), strict=True):
            rounding.learn(disturbed)
    for step, (record, rounding) in enumerate(zip(records, roundings, strict=True)):
        _publish(record, *rounding.bounds(), step_file(folder, numerics, step))


def slack_key(part: str) -> str:
    """Where a step's file holds the slack of a part's weight; it does not where all of it is zero."""
    return Place(0, "slack", part).key


def _publish(record: dict[str, Tensor], bounds: dict[str, float], slack: dict[str, Tensor], file: Path) -> None:
    order = [[key, largest(record[key]), bound] for key, bound in bounds.items()]
    held = record | {slack_key(part): value for part, value in slack.items() if value.any()}
    draft = file.with_suffix(".draft")
    save_file({key: value.contiguous() for key, value in held.items()}, draft, {"order": json.dumps(order)})
    os.replace(draft, file)


def _steps(
    plan: Plan, model: Model, batches: list[Batch], numerics: str, inside: bool, disturbed: int | None
) -> Iterator[dict[str, Tensor]]:
    """The record of the initial weights, then that of each step."""
    dtype = TYPES[numerics]
    with computing(numerics):
        running = WholeModel(model, plan.seed, dtype)
    whole = running.module
    types = [torch.float64 if numerics == "wide" else TYPES[name] for name in (plan.accumulates, plan.reduces)]
    added: Callable[[Tensor], Tensor] = _as_it_is
    if disturbed is not None:
        added = disturb(whole, dtype, disturbed, sums=min(types, key=lambda each: -torch.finfo(each).eps))
    computed = dict(whole.named_parameters())
    held, masters = torch.promote_types(dtype, torch.float32), {}
    for name, parameter in computed.items():
        if plan.trains(model.facts.by_name[name]):
            masters[name] = parameter.detach().to(held).clone()
        else:
            parameter.requires_grad_(False)
    decayed = [value for value in masters.values() if value.dim() > 1]
    others = [value for value in masters.values() if value.dim() <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": plan.weight_decay}, {"params": others, "weight_decay": 0.0}],
        lr=plan.lr, betas=(plan.beta1, plan.beta2), eps=1e-8,
    )  # fmt: skip
    list_name, blocks = find_blocks(whole)
    names = {f"{list_name}.{number}" for number in range(len(blocks))}
    recorder = Recorder()
    recorder.attach(watched(whole, names, inside=inside), names)
    if inside and numerics == "wide":
        recorder.attach_factors({name: m for name, m in whole.named_modules() if transposed(m) is not None})
    yield {
        Place(0, "initial weight", name).key: value.detach().clone() for name, value in {**computed, **masters}.items()
    }
    for step, batch in enumerate(batches):
        recorder.seen = {}
        gradients = {name: torch.zeros_like(value, dtype=types[0]) for name, value in masters.items()}
        running.step = step
        with computing(numerics):
            _accumulate(plan, running, batch, gradients, recorder, added)
            _update(plan, step, masters, gradients, optimizer, recorder)
        with torch.no_grad():
            for name, parameter in computed.items():
                if name in masters:
                    parameter.copy_(masters[name])
                recorder.add("published weight", parameter, name)
        yield recorder.seen


def _as_it_is(gradient: Tensor) -> Tensor:
    return gradient


def _accumulate(
    plan: Plan, whole: WholeModel, batch: Batch, gradients: dict[str, Tensor], recorder: Recorder,
    added: Callable[[Tensor], Tensor],
) -> None:  # fmt: skip
    """Forward and backward of every microbatch; `gradients` gain theirs, as `added` has them. What each gives is kept as
    well where that is little, wide: no place of a layout, but what a wrong gradient is taken apart with."""
    wide_ = sum(value.numel() for value in gradients.values() if value.dtype is torch.float64)
    scale, apart = plan.first_loss_scale, 0 < each_microbatch(plan, wide_) <= MOST_INSIDE
    tokens = int((batch.targets != IGNORE).sum())
    loss = torch.zeros((), dtype=torch.float64)
    # Each dp rank's rows by themselves, as they need not divide by the microbatches.
    microbatches = [part for share in batch.split(plan.dp) for part in share.split(plan.microbatches)]
    for number, microbatch in enumerate(microbatches):
        record_batch(recorder, microbatch, number)
        recorder.microbatch = number
        logits = whole.forward(microbatch)
        flat = logits.flatten(0, 1).to(torch.promote_types(logits.dtype, torch.float32))
        share = _loss(plan, flat, microbatch.targets.flatten()) / max(tokens, 1)
        recorder.add("share", share, microbatch=number)
        (share * scale).backward()
        recorder.microbatch = None
        loss += share.detach()
        for name, parameter in whole.module.named_parameters():
            if parameter.grad is not None:
                gradients[name] += added(parameter.grad)
                if apart:
                    own = parameter.grad.to(torch.promote_types(parameter.grad.dtype, torch.float32))
                    recorder.add("microbatch gradient", own / scale, name, number)
                parameter.grad = None
    for gradient in gradients.values():
        gradient /= scale
    for name in reversed(gradients):  # the order in which backward finishes them
        recorder.add("gradient", gradients[name], name)
    recorder.add("tokens", torch.tensor(tokens))
    recorder.add("loss", loss)


def _loss(plan: Plan, logits: Tensor, targets: Tensor) -> Tensor:
    """Of logits [n, V], summed over the trained targets, with what the plan adds to the cross entropy."""
    loss = F.cross_entropy(logits, targets, ignore_index=IGNORE, reduction="sum", label_smoothing=plan.label_smoothing)
    if plan.z_loss:
        loss = loss + plan.z_loss * (logits.logsumexp(-1).square() * (targets != IGNORE)).sum()
    return loss


def _update(
    plan: Plan, step: int, masters: dict[str, Tensor], gradients: dict[str, Tensor], optimizer: torch.optim.Optimizer,
    recorder: Recorder,
) -> None:  # fmt: skip
    norm = torch.sqrt(cast(Tensor, sum(gradient.double().square().sum() for gradient in gradients.values())))
    recorder.add("norm", norm)
    factor = min(1.0, plan.clip / (float(norm) + 1e-6)) if plan.clip else 1.0
    narrow = next(iter(gradients.values())).dtype
    # A rank's is read off its gradients, and no better than they are.
    recorder.add("clip", torch.tensor(factor, dtype=torch.float64 if narrow is torch.float32 else narrow))
    for name, master in masters.items():
        clipped = (gradients[name].to(master.dtype) * factor).to(narrow)
        recorder.add("clipped gradient", clipped, name)
        master.grad = clipped.to(master.dtype)
    lr = learning_rate(plan, step, plan.steps)
    recorder.add("lr", torch.tensor(lr, dtype=torch.float64))
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.step()
    for name, master in masters.items():
        recorder.add("first moment", optimizer.state[master]["exp_avg"], name)
        recorder.add("second moment", optimizer.state[master]["exp_avg_sq"], name)
        recorder.add("weight", master, name)


def record_batch(recorder: Recorder, batch: Batch, microbatch: int) -> None:
    for field in ("sample_ids", "tokens", "targets", "positions", "document_ids"):
        recorder.add("batch", getattr(batch, field), field, microbatch)
