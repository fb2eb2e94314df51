"""The whole model in one process: transformers and torch, nothing else."""

from __future__ import annotations

from ..work import Work, adamw, model, tokens
from .contestant import Seat, Step


def whole_model_step(work: Work, rank: int, ranks: int) -> Step:
    """The plain step of one process on its share of the rows."""
    net, rows = model(work), tokens(work).chunk(ranks)[rank]
    optimizer = adamw(work, net.parameters())

    def step() -> float:
        optimizer.zero_grad()
        loss = net(input_ids=rows, labels=rows).loss
        loss.backward()
        optimizer.step()
        return float(loss)

    return step


def race(work: Work, seat: Seat) -> None:
    seat.serve(whole_model_step(work, 0, 1))
