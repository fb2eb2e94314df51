"""torch.distributed.pipelining: its schedules over a Llama that is cut by hand into stages of as many blocks, one a rank,
or two where the schedule wants two."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleZBVZeroBubble,
)

from ..work import Work, adamw, model, next_token_loss, tokens
from .contestant import Race, Seat

ONE_STAGE = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
LOOP = {"interleaved": ScheduleInterleaved1F1B}
VEE = {"zb-v": ScheduleZBVZeroBubble, "dualpipe-v": ScheduleDualPipeV}
"""Its schedules by plait's names: one stage a rank, two in a loop, two in a V."""


def places(schedule: str, rank: int, ranks: int) -> list[int]:
    """The stages of a rank."""
    if schedule in ONE_STAGE:
        return [rank]
    return [rank, 2 * ranks - 1 - rank] if schedule in VEE else [rank, ranks + rank]


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
        mine = places(schedule, rank, ranks)
        count, llama, rows = len(mine) * ranks, model(work), tokens(work)
        blocks = [Blocks(llama, place, count) for place in mine]
        del llama
        stages = [
            PipelineStage(one, place, count, torch.device("cpu")) for one, place in zip(blocks, mine, strict=True)
        ]
        kind = (ONE_STAGE | LOOP | VEE)[schedule]
        table = kind(stages if len(mine) > 1 else stages[0], work.microbatches, loss_fn=next_token_loss)  # type: ignore[arg-type]
        optimizer = adamw(work, (p for one in blocks for p in one.parameters()))
        first, last = 0 in mine, count - 1 in mine

        def step() -> float | None:
            optimizer.zero_grad()
            losses: list[Tensor] = []
            given = (rows,) if first else ()
            if last:
                table.step(*given, target=rows, losses=losses)
            else:
                table.step(*given)
            optimizer.step()
            return float(torch.stack(losses).mean()) if losses else None

        seat.serve(step)
        dist.destroy_process_group()

    return race
