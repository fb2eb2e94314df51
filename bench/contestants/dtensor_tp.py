"""torch's DTensor tensor parallelism: Megatron's cuts as a table of styles over transformers' Llama, on request with
sequence parallelism and with a loss over cut logits."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.distributed.tensor.placement_types import Placement

from ..work import Work, adamw, model, next_token_loss, tokens
from .contestant import Race, Seat

COLUMNS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
ROWS = ("self_attn.o_proj", "mlp.down_proj")
NORMS = ("input_layernorm", "post_attention_layernorm")


def dtensor(*, sp: bool = False, cut_loss: bool = False) -> Race:
    return partial(_race, sp=sp, cut_loss=cut_loss)


def _race(work: Work, seat: Seat, *, sp: bool, cut_loss: bool) -> None:
    dist.init_process_group("gloo")
    net, rows = model(work), tokens(work)
    _parallelise(net, init_device_mesh("cpu", (seat.ranks,)), sp=sp, cut_loss=cut_loss)
    optimizer = adamw(work, net.parameters(), foreach=False)
    # With sequence parallelism the model cannot read them off its hidden states.
    positions = torch.arange(work.seq).unsqueeze(0)

    def step() -> float:
        optimizer.zero_grad()
        scope: AbstractContextManager[object] = loss_parallel() if cut_loss else nullcontext()
        with scope:
            loss = next_token_loss(net(input_ids=rows, position_ids=positions).logits, rows)
            loss.backward()
        optimizer.step()
        return float(loss.full_tensor() if hasattr(loss, "full_tensor") else loss)

    seat.serve(step)
    dist.destroy_process_group()


def _parallelise(net: torch.nn.Module, mesh: DeviceMesh, *, sp: bool, cut_loss: bool) -> None:
    between: Placement = Shard(1) if sp else Replicate()
    logits: Placement = Shard(-1) if cut_loss else Replicate()
    table: dict[str, ParallelStyle] = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
        "lm_head": ColwiseParallel(input_layouts=between, output_layouts=logits, use_local_output=not cut_loss),
    }
    table |= {f"model.layers.*.{name}": ColwiseParallel() for name in COLUMNS}
    table |= {f"model.layers.*.{name}": RowwiseParallel(output_layouts=between) for name in ROWS}
    if sp:
        table["model.norm"] = SequenceParallel()
        table |= {f"model.layers.*.{name}": SequenceParallel() for name in NORMS}
        table["model.layers.*.self_attn"] = PrepareModuleInput(
            input_kwarg_layouts={"hidden_states": Shard(1)}, desired_input_kwarg_layouts={"hidden_states": Replicate()}
        )
        table["model.layers.*.mlp"] = PrepareModuleInput(
            input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
        )
    parallelize_module(net, mesh, table)
