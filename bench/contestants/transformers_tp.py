"""transformers' own tensor parallelism: `from_pretrained(..., tp_plan="auto")`."""

from __future__ import annotations

import torch.distributed as dist

from ..work import Work, adamw, model, tokens
from .contestant import Seat
from .one_process import plain_step


def race(work: Work, seat: Seat) -> None:
    dist.init_process_group("gloo")
    net, rows = model(work, tp_plan="auto"), tokens(work)
    optimizer = adamw(work, net.parameters(), foreach=False)
    seat.serve(plain_step(net, rows, optimizer))
    dist.destroy_process_group()
