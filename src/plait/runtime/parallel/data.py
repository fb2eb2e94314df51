"""Data parallelism: gradients summed over dp in buckets, while backward goes on.

    buffers   [ head | norm | block 7 ][ block 6 | block 5 ] ...     in the order in which backward finishes them
    backward of the last microbatch:  ready ready ready -> sum of bucket 0 starts, backward goes on into block 6

Each gradient is a view of its bucket, so nothing is copied (but bf16 gradients are added to their fp32 view). Buckets
leave in one fixed order, the same on every rank, so that collectives always meet; a parameter that got no gradient counts
as zero when the step ends. Which parameters share a bucket is decided in design/sharding.py. Li et al., "PyTorch
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
    """The `GradSink` of data parallelism. Gradients accumulate in `dtype`, whatever the parameters compute in."""

    def __init__(
        self, buckets: Sequence[tuple[Parameter, ...]], parameters: Mapping[str, nn.Parameter],
        groups: Mapping[tuple[str, ...], Group], dtype: torch.dtype,
    ) -> None:  # fmt: skip
        self.gradients: dict[str, Tensor] = {}
        self._buffers: list[Tensor] = []
        self._groups = [groups[bucket[0].first.summed_over] for bucket in buckets]
        self._sizes = [len(bucket) for bucket in buckets]
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
        same = parameter.dtype == view.dtype
        if same:
            parameter.grad = view

        def ready(p: Tensor) -> None:
            if not same:
                assert p.grad is not None
                view.add_(p.grad)
                p.grad = None
            self.ready(bucket)

        parameter.register_post_accumulate_grad_hook(ready)

    @property
    def buffers(self) -> list[Tensor]:
        """Every bucket, flat: for what is done to all gradients alike."""
        return self._buffers

    def begin(self) -> None:
        """A step begins: all gradients are zero."""
        for buffer in self._buffers:
            buffer.zero_()
        self._missing = list(self._sizes)
        self._started = 0
        self._handles: list[Handle] = []
        self._last = False

    def last_backward(self) -> None:
        self._last = True

    def ready(self, bucket: int) -> None:
        """One gradient of `bucket` is complete for this microbatch; on the last one it may leave."""
        if not self._last:
            return
        self._missing[bucket] -= 1
        while self._started < len(self._buffers) and self._missing[self._started] == 0:
            self._start()

    def _start(self) -> None:
        buffer, group = self._buffers[self._started], self._groups[self._started]
        self._handles.append(all_reduce(buffer, group, why="gradients", wait=False))
        self._started += 1

    def finish(self) -> None:
        while self._started < len(self._buffers):
            self._start()
        for handle in self._handles:
            handle.wait()
