"""Data parallelism: gradients summed over dp in buckets, while backward goes on.

    buffers   [ head | norm | block 7 ][ block 6 | block 5 ] ...     in the order in which backward finishes them
    backward of the last microbatch:  ready ready ready -> sum of bucket 0 starts, backward goes on into block 6

Each gradient is a view of its bucket, so nothing is copied (but bf16 gradients are added to their fp32 view). Buckets
leave in one fixed order, the same on every rank, so that collectives always meet; a parameter that got no gradient counts
as zero when its stage ends. Which parameters share a bucket is decided in design/sharding.py. Li et al., "PyTorch
Distributed", VLDB 2020, section 3.2.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from ...design.sharding import Parameter
from ..comm.collectives import Handle, all_reduce
from ..comm.world import Group


class Buckets:
    """The `GradSink` of data parallelism. Gradients accumulate in `dtype`, whatever the parameters compute in. `stages`
    say of which stage each bucket is; `parts` in how many parts a parameter's gradient comes from one microbatch (1 when
    not named): by autograd, and from what put off a product; once for each stage that uses it here."""

    def __init__(
        self, buckets: Sequence[tuple[Parameter, ...]], stages: Sequence[int], parameters: Mapping[str, nn.Parameter],
        groups: Mapping[tuple[str, ...], Group], dtype: torch.dtype, parts: Mapping[str, int],
    ) -> None:  # fmt: skip
        self.gradients: dict[str, Tensor] = {}
        self.final = False
        self._buffers: list[Tensor] = []
        self._stages = list(stages)
        self._groups = [groups[bucket[0].first.summed_over] for bucket in buckets]
        self._sizes = [sum(parts.get(held.name, 1) for held in bucket) for bucket in buckets]
        self._bucket_of: dict[nn.Parameter, int] = {}
        for number, bucket in enumerate(buckets):
            own = [parameters[held.name] for held in bucket]
            buffer = torch.zeros(sum(p.numel() for p in own), dtype=dtype, device=own[0].device)
            self._buffers.append(buffer)
            views = buffer.split([p.numel() for p in own])
            for held, parameter, view in zip(bucket, own, views, strict=True):
                self._adopt(held.name, parameter, view.view_as(parameter), number)
        self.begin()

    def _adopt(self, name: str, parameter: nn.Parameter, view: Tensor, bucket: int) -> None:
        self.gradients[name] = view
        self._bucket_of[parameter] = bucket
        same = parameter.dtype == view.dtype
        if same:
            parameter.grad = view

        def accumulated(p: Tensor) -> None:
            if not same:
                assert p.grad is not None
                view.add_(p.grad)
                p.grad = None
            self.ready(parameter)

        parameter.register_post_accumulate_grad_hook(accumulated)

    @property
    def buffers(self) -> list[Tensor]:
        """Every bucket, flat: for what is done to all gradients alike."""
        return self._buffers

    def begin(self) -> None:
        """A step begins: all gradients are zero."""
        for buffer in self._buffers:
            buffer.zero_()
        self._missing = list(self._sizes)
        self._handles: list[Handle] = []
        self.final = False

    def ready(self, parameter: nn.Parameter) -> None:
        """A part of this gradient is complete for this microbatch; on a stage's last one the bucket may leave."""
        if not self.final:
            return
        self._missing[self._bucket_of[parameter]] -= 1
        while len(self._handles) < len(self._buffers) and self._missing[len(self._handles)] == 0:
            self._start()

    def _start(self) -> None:
        number = len(self._handles)
        self._handles.append(all_reduce(self._buffers[number], self._groups[number], why="gradients", wait=False))

    def finish(self, stage: int) -> None:
        """Returns when the gradients of `stage` are summed; the stages after it on this rank must be done."""
        for number, of in enumerate(self._stages):
            if of >= stage:
                while len(self._handles) <= number:
                    self._start()
                self._handles[number].wait()
