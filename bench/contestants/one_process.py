"""The whole model in one process: transformers and torch, nothing else."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from ..work import Work, adamw, model, tokens
from .contestant import Seat, Step


def plain_step(net: Module, rows: Tensor, optimizer: Optimizer) -> Step:
    """Forward, backward and update, whatever `net` does to be on several ranks."""

    def step() -> float:
        optimizer.zero_grad()
        loss = net(input_ids=rows, labels=rows).loss
        loss.backward()
        optimizer.step()
        return float(loss)

    return step


def whole_model_step(work: Work, rank: int, ranks: int) -> Step:
    """The plain step of one process on its share of the rows."""
    net, rows = model(work), tokens(work).chunk(ranks)[rank]
    return plain_step(net, rows, adamw(work, net.parameters()))


def race_in_microbatches(work: Work, seat: Seat) -> None:
    """The plain loop of gradient accumulation."""
    net, rows = model(work), tokens(work)
    optimizer = adamw(work, net.parameters())

    def step() -> float:
        optimizer.zero_grad()
        total = torch.zeros(())
        for part in rows.chunk(work.microbatches):
            loss = net(input_ids=part, labels=part).loss / work.microbatches
            loss.backward()
            total += loss.detach()
        optimizer.step()
        return float(total)

    seat.serve(step)


def race(work: Work, seat: Seat) -> None:
    seat.serve(whole_model_step(work, 0, 1))
