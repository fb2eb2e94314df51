"""DeepSpeed's ZeRO as it comes, but for the clip at 1.0 that it has by default. It is imported in its own ranks alone, so
that it is in nobody else's; the package is optional."""

from __future__ import annotations

import importlib
import io
import logging
import os
from contextlib import redirect_stdout

import torch.distributed as dist

from ..work import Work, adamw, model, tokens
from .contestant import Race, Seat

PACKAGE = "deepspeed"


def deepspeed(*, stage: int) -> Race:
    def race(work: Work, seat: Seat) -> None:
        os.environ |= {"DS_ACCELERATOR": "cpu", "DS_BUILD_OPS": "0"}
        package = importlib.import_module(PACKAGE)
        logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
        seat.begin()
        dist.init_process_group("gloo")
        net, rows = model(work), tokens(work).chunk(seat.ranks)[seat.rank]
        given = {
            "train_batch_size": work.rows, "train_micro_batch_size_per_gpu": work.rows // seat.ranks,
            "gradient_clipping": 0.0, "zero_optimization": {"stage": stage}, "zero_allow_untested_optimizer": True,
        }  # fmt: skip
        with redirect_stdout(io.StringIO()):
            engine, *_ = package.initialize(model=net, optimizer=adamw(work, net.parameters()), config=given)

        def step() -> float:
            loss = engine(input_ids=rows, labels=rows).loss
            engine.backward(loss)
            engine.step()
            return float(loss)

        seat.serve(step)
        dist.destroy_process_group()

    return race
