"""What may change when a run goes on from a checkpoint, and what may not.

Whatever says how the work is laid out and carried out may: degrees, ZeRO, schedule, microbatches, recompute, types. The
model's config, the names and shapes of its tensors, and the text are compared themselves, not by the words that named
them. What decides which rows are read when is everybody's, and stays.
"""

from __future__ import annotations

from .errors import PlanError
from .plan import Plan

STAY = {
    "batch": "the rows of a step",
    "seq": "the rows themselves",
    "packing": "the rows themselves",
    "data_order": "which rows a step reads",
    "seed": "the order of the rows and every dropout",
}
"""Fields that stay, each with what would be another in the middle of the run."""
TRAINING = (
    "steps", "epochs", "lr", "lr_schedule", "warmup", "lr_floor", "weight_decay", "beta1", "beta2", "clip",
    "label_smoothing", "z_loss", "compute", "accumulate", "reduce", "loss_scale", "attention",
)  # fmt: skip
"""Fields that may change and change the numbers of the steps to come: a run says so."""


def refuse_changes(saved: Plan, plan: Plan) -> None:
    """Raises a `PlanError` where `plan` cannot go on from what `saved` has left."""
    for name, what in STAY.items():
        was, now = getattr(saved, name), getattr(plan, name)
        if was != now:
            raise PlanError(
                f"{name} {now} would change {what} in the middle of the run, which began with {was}: leave it out, or "
                f"begin another run."
            )
    if saved.held_out != plan.held_out:
        was, now = (
            f"{share:g} of the documents" if share else "no document" for share in (saved.held_out, plan.held_out)
        )
        raise PlanError(
            f"The run holds out {was} for evaluation, and this would be {now}, which changes what is trained on: leave "
            f"eval_every, eval_share and eval_data as they were."
        )
    if plan.data_order == "own" and saved.dp != plan.dp:
        raise PlanError(
            f"With data_order own each of the {saved.dp} dp ranks is at a place of its own order: resume with dp "
            f"{saved.dp}, not {plan.dp}."
        )


def changed(saved: Plan, plan: Plan) -> list[str]:
    """What changes the numbers of the steps to come, each as "lr 0.001 -> 0.0005"."""
    return [
        f"{name} {getattr(saved, name)} -> {getattr(plan, name)}"
        for name in TRAINING
        if getattr(saved, name) != getattr(plan, name)
    ]
