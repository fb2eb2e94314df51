"""torch's FSDP2: every block fully sharded by itself, and what is around the blocks together. With `reshard` a block's
weights are gathered for forward and again for backward, else they stay until backward is through with them."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from ..work import Work, adamw, model, tokens
from .contestant import Race, Seat
from .one_process import plain_step


def fsdp2(*, reshard: bool) -> Race:
    def race(work: Work, seat: Seat) -> None:
        dist.init_process_group("gloo")
        mesh = init_device_mesh("cpu", (seat.ranks,))
        net, rows = model(work), tokens(work).chunk(seat.ranks)[seat.rank]
        for block in net.model.layers:
            fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
        fully_shard(net, mesh=mesh, reshard_after_forward=reshard)
        seat.serve(plain_step(net, rows, adamw(work, net.parameters())))
        dist.destroy_process_group()

    return race
