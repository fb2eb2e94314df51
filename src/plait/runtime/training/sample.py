"""Text from the training stages: each new token is one full-prefix forward pass, with no cache and no gather of weights.

Good for looking at a model while it trains; a cache comes with inference.
"""

from __future__ import annotations

from hashlib import blake2b

import torch
from torch import Tensor

from ..batch import Batch
from ..comm.collectives import all_gather_slices, all_reduce
from ..comm.nursery import BadNumbersError
from .step import Run

NOTHING = -1
"""In the place of a token, where there is none to draw."""


@torch.no_grad()
def sample(run: Run, prompt: list[int], count: int, *, temperature: float = 0.7) -> list[int]:
    """`count` tokens after `prompt`, the same on every rank (all must call). They are drawn by the run's seed, the number
    of its steps and the prompt; temperature 0 takes the likeliest. Costs count forward passes of up to len(prompt) +
    count tokens. A `BadNumbersError` on all ranks when the logits are not finite."""
    with run.world.ledger.aside():
        return _drawn(run, prompt, count, temperature)


def _drawn(run: Run, prompt: list[int], count: int, temperature: float) -> list[int]:
    world, limit = run.world, run.model.facts.positions
    digest = blake2b(f"{run.plan.seed}/{run.done}/{prompt}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
    tokens = list(prompt)
    for _ in range(count):
        window = torch.tensor([tokens[-limit:]])
        rows = torch.cat((window, window[:, -1:]), dim=1)  # the last target is not used
        pipeline = run.forward_pipeline
        pipeline.clock.start()
        pipeline.run([Batch.of(rows).to(world.device)], None)
        chosen = torch.zeros((), dtype=torch.int64, device=world.device)
        if run.has_loss:
            logits = pipeline.logits[0][0, -1].contiguous()
            if run.plan.tp > 1 and (head := run.model.facts.head_weight).cut is not None:
                logits = all_gather_slices(logits, world.group("tp"), run.sharding.slices(head.name), why="sample")
            token = _draw(logits.double().cpu(), temperature, generator)
            chosen.fill_(token if world.coordinate["tp"] == 0 else 0)
        # One rank of each replica knows it; the sum over its pipeline and tp ranks tells the others.
        for axis in ("tp", "pp"):
            all_reduce(chosen, world.group(axis), why="sample")
        if int(chosen) == NOTHING:
            raise BadNumbersError(
                f"the logits of a sample after step {run.done} are not finite: lower lr ({run.plan.lr})."
            )
        tokens.append(int(chosen))
    return tokens[len(prompt) :]


def _draw(logits: Tensor, temperature: float, generator: torch.Generator) -> int:
    if not logits.isfinite().all():
        return NOTHING
    if temperature == 0:
        return int(logits.argmax())
    return int(torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator))
