"""torch.distributed.pipelining: its GPipe and 1F1B over a Llama that is cut by hand into stages of as many blocks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from ..work import Work, adamw, model, next_token_loss, tokens
from .contestant import Race, Seat

SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}


class Blocks(nn.Module):
    """Stage `place` of `stages`: its blocks, with the embedding before the first and the head behind the last."""

    def __init__(self, llama: Any, place: int, stages: int) -> None:
        super().__init__()
        inner, head = llama.model, llama.lm_head
        share = len(inner.layers) // stages
        self.before = inner.embed_tokens if place == 0 else nn.Identity()
        self.blocks = nn.ModuleList(inner.layers[place * share : (place + 1) * share])
        self.behind = nn.Sequential(inner.norm, head) if place == stages - 1 else nn.Identity()
        self.rotary = inner.rotary_emb

    def forward(self, x: Tensor) -> Tensor:
        """Tokens [b, s] or hidden state [b, s, h] -> hidden state or logits [b, s, V]."""
        hidden = self.before(x)
        positions = torch.arange(hidden.shape[1]).unsqueeze(0)
        angles = self.rotary(hidden, positions)
        for block in self.blocks:
            hidden = block(hidden, attention_mask=None, position_ids=positions, position_embeddings=angles)
        out: Tensor = self.behind(hidden)
        return out


def pipelining(schedule: str) -> Race:
    def race(work: Work, seat: Seat) -> None:
        rank, ranks = seat.rank, seat.ranks
        dist.init_process_group("gloo")
        blocks, rows = Blocks(model(work), rank, ranks), tokens(work)
        stage = PipelineStage(blocks, rank, ranks, torch.device("cpu"))
        table = SCHEDULES[schedule](stage, work.microbatches, loss_fn=next_token_loss)
        optimizer = adamw(work, blocks.parameters())

        def step() -> float | None:
            optimizer.zero_grad()
            losses: list[Tensor] = []
            given = (rows,) if rank == 0 else ()
            if rank == ranks - 1:
                table.step(*given, target=rows, losses=losses)
            else:
                table.step(*given)
            optimizer.step()
            return float(torch.stack(losses).mean()) if losses else None

        seat.serve(step)
        dist.destroy_process_group()

    return race
