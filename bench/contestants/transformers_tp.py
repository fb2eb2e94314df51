"""transformers' own tensor parallelism: `from_pretrained(..., tp_plan="auto")`."""

from __future__ import annotations

import torch.distributed as dist

from ..work import Work, adamw, model, tokens
from .contestant import Seat


def race(work: Work, seat: Seat) -> None:
    dist.init_process_group("gloo")
    net, rows = model(work, tp_plan="auto"), tokens(work)
    optimizer = adamw(work, net.parameters(), foreach=False)

    def step() -> float:
        optimizer.zero_grad()
        loss = net(input_ids=rows, labels=rows).loss
        loss.backward()
        optimizer.step()
        return float(loss)

    seat.serve(step)
    dist.destroy_process_group()
