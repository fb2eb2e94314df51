"""torch's DistributedDataParallel, as it comes (buckets of 25 MB)."""

from __future__ import annotations

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ..work import Work, adamw, model, tokens
from .contestant import Seat
from .one_process import plain_step


def race(work: Work, seat: Seat) -> None:
    dist.init_process_group("gloo")
    net, rows = DistributedDataParallel(model(work)), tokens(work).chunk(seat.ranks)[seat.rank]
    optimizer = adamw(work, net.parameters())
    seat.serve(plain_step(net, rows, optimizer))
    dist.destroy_process_group()
