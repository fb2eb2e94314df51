"""The whole unmodified model in one process, with the attention of its own class: what layouts are compared with."""

from __future__ import annotations

import torch
from torch import Tensor

from ..batch import Batch
from .attention import told_apart
from .dropout import Dropping, begins, drops
from .given import give_masks
from .initial import fill, find_tied, start
from .read import Model, build_on_meta, find_blocks
from .tensor_plan import tensor_plan


class WholeModel:
    """`forward(batch)` gives the logits [b, s, V]. It starts from the same weights as every layout: the model's own, read
    whole, or those of the same seed."""

    def __init__(self, model: Model, seed: int, dtype: torch.dtype) -> None:
        self.module = build_on_meta(model.config, attention="own")
        self.step = 0
        tensors = start(self.module, model.weights, seed)
        fill(
            self.module, find_tied(self.module), tensors, lambda _, whole: whole[...].to(dtype, copy=True),
            torch.device("cpu"), {},
        )  # fmt: skip
        self._sight = give_masks(self.module, tensor_plan(self.module, model.config))
        self._dropping = Dropping(seed) if drops(self.module) else None
        if self._dropping is not None:
            for number, block in enumerate(find_blocks(self.module)[1]):
                block.register_forward_pre_hook(begins(self._dropping, number))

    def forward(self, batch: Batch) -> Tensor:
        if self._sight is not None:
            self._sight.look_at(batch)
        inputs = {"input_ids": batch.tokens, "position_ids": told_apart(batch), "use_cache": False}
        if self._dropping is None:
            logits: Tensor = self.module(**inputs).logits
            return logits
        self._dropping.at(self.step, batch.sample_ids)
        with self._dropping:
            dropped: Tensor = self.module(**inputs).logits
        return dropped
