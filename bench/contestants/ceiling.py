"""The ceiling of data parallelism: every rank trains on its own rows, and nothing is communicated.

Its ranks drift apart after the first step, so only its first loss is that of one process. They are joined for the
meetings before and after a turn alone.
"""

from __future__ import annotations

import torch.distributed as dist

from ..work import Work
from .contestant import Seat
from .one_process import whole_model_step


def race(work: Work, seat: Seat) -> None:
    dist.init_process_group("gloo")
    seat.serve(whole_model_step(work, seat.rank, seat.ranks))
    dist.destroy_process_group()
