"""torch's DTensor tensor parallelism: Megatron's cuts as a table of styles over transformers' Llama."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from ..work import Work, adamw, model, next_token_loss, tokens
from .contestant import Seat

COLUMNS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
ROWS = ("self_attn.o_proj", "mlp.down_proj")


def race(work: Work, seat: Seat) -> None:
    dist.init_process_group("gloo")
    net, rows = model(work), tokens(work)
    table: dict[str, ParallelStyle] = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
        "lm_head": ColwiseParallel(output_layouts=Replicate()),
    }
    table |= {f"model.layers.*.{name}": ColwiseParallel() for name in COLUMNS}
    table |= {f"model.layers.*.{name}": RowwiseParallel() for name in ROWS}
    parallelize_module(net, init_device_mesh("cpu", (seat.ranks,)), table)
    optimizer = adamw(work, net.parameters(), foreach=False)

    def step() -> float:
        optimizer.zero_grad()
        loss = next_token_loss(net(input_ids=rows).logits, rows)
        loss.backward()
        optimizer.step()
        return float(loss)

    seat.serve(step)
    dist.destroy_process_group()
