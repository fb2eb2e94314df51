"""torch's DistributedDataParallel, as it comes (buckets of 25 MB); and with its ZeroRedundancyOptimizer, which shares out
the optimizer's state parameter by parameter."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from ..work import BETAS, EPSILON, LEARNING_RATE, Work, adamw, decayed_apart, model, tokens
from .contestant import Seat
from .one_process import plain_step


def race(work: Work, seat: Seat) -> None:
    dist.init_process_group("gloo")
    net, rows = DistributedDataParallel(model(work)), tokens(work).chunk(seat.ranks)[seat.rank]
    optimizer = adamw(work, net.parameters())
    seat.serve(plain_step(net, rows, optimizer))
    dist.destroy_process_group()


def race_zero(work: Work, seat: Seat) -> None:
    dist.init_process_group("gloo")
    net, rows = DistributedDataParallel(model(work)), tokens(work).chunk(seat.ranks)[seat.rank]
    optimizer = ZeroRedundancyOptimizer(
        decayed_apart(net.parameters()), torch.optim.AdamW, lr=LEARNING_RATE, betas=BETAS, eps=EPSILON,
        fused=work.fused,
    )  # fmt: skip
    seat.serve(plain_step(net, rows, optimizer))
    dist.destroy_process_group()
