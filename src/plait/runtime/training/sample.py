"""Text from the training stages: each new token is one full-prefix forward pass, with no cache and no gather of weights.

Good for looking at a model while it trains; a cache comes with inference.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..batch import Batch
from ..comm.collectives import all_gather, all_reduce
from .step import Run


@torch.no_grad()
def sample(run: Run, prompt: list[int], count: int, *, temperature: float = 0.7) -> list[int]:
    """`count` tokens after `prompt`, the same on every rank (all must call). Drawn from the run's seed; temperature 0
    takes the likeliest. Costs count forward passes of up to len(prompt) + count tokens."""
    world, limit = run.world, run.model.facts.positions
    generator = torch.Generator().manual_seed(run.plan.seed)
    tokens = list(prompt)
    for _ in range(count):
        window = torch.tensor([tokens[-limit:]])
        rows = torch.cat((window, window[:, -1:]), dim=1)  # the last target is not used
        pipeline = run.forward_pipeline
        pipeline.clock.start()
        pipeline.run([Batch.of(rows).to(world.device)], None)
        chosen = torch.zeros((), dtype=torch.int64, device=world.device)
        if world.coordinate["pp"] == run.plan.pp - 1:
            slices = all_gather(pipeline.outputs[0][0, -1].contiguous(), world.group("tp"), why="sample")
            token = _draw(slices.flatten().double().cpu(), temperature, generator)
            chosen.fill_(token if world.coordinate["tp"] == 0 else 0)
        # One rank of each replica knows it; the sum over its pipeline and tp ranks tells the others.
        for axis in ("tp", "pp"):
            all_reduce(chosen, world.group(axis), why="sample")
        tokens.append(int(chosen))
    return tokens[len(prompt) :]


def _draw(logits: Tensor, temperature: float, generator: torch.Generator) -> int:
    if temperature == 0:
        return int(logits.argmax())
    return int(torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator))
