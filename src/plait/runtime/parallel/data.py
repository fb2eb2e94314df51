"""Data parallelism: gradients summed over dp in buckets, while backward goes on.

    buffers   [ head | norm | block 7 ][ block 6 | block 5 ] ...     in the order in which backward finishes them
    backward of the last microbatch:  ready ready ready -> sum of bucket 0 starts, backward goes on into block 6

Each gradient is a view of its bucket: the first of a step is copied there, further ones are added in place (those of a
narrower type to their view). Where sums over ranks are made in another type, a bucket is copied into one of that type
when it leaves, and back when it is summed. Buckets leave in one fixed order, the same on every rank, so that collectives
always meet; a parameter that got no gradient counts as zero when its bucket leaves. Which parameters share a bucket is
decided in design/sharding.py. Li et al., "PyTorch Distributed", VLDB 2020, section 3.2.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from ...design.part import Parameter
from ..comm.collectives import Handle, all_reduce, room
from ..comm.world import Group


class Buckets:
    """The `GradSink` of data parallelism. Gradients accumulate in `dtype`, whatever the parameters compute in, and are
    summed over ranks in `reduce`. `stages` say of which stage each bucket is; `parts` in how many parts a parameter's
    gradient comes from one microbatch (1 when not named): by autograd, and from outside of it; once for each stage that
    uses it here. `summed` starts the sum of a bucket, by its number, where it is not one over its group."""

    def __init__(
        self, buckets: Sequence[tuple[Parameter, ...]], stages: Sequence[int], parameters: Mapping[str, nn.Parameter],
        groups: Mapping[tuple[str, ...], Group], dtype: torch.dtype, reduce: torch.dtype, parts: Mapping[str, int],
        summed: Callable[[Tensor, int], Handle] | None = None,
    ) -> None:  # fmt: skip
        self.gradients: dict[str, Tensor] = {}
        self.weights = {held.name: parameters[held.name] for bucket in buckets for held in bucket}
        """What the optimizer updates: what is computed with."""
        self.final = False
        self.leaves: Callable[[str, Tensor], None] | None = None
        """Shown every gradient, by name, before its sum over ranks begins."""
        self._names = [[held.name for held in bucket] for bucket in buckets]
        self._buffers: list[Tensor] = []
        self._stages, self._summed = list(stages), summed
        self._groups = [groups[bucket[0].summed_over] for bucket in buckets]
        self._sizes = [sum(parts.get(held.name, 1) for held in bucket) for bucket in buckets]
        self._bucket_of: dict[nn.Parameter, int] = {}
        self._views: list[dict[nn.Parameter, Tensor]] = []
        self._untouched: set[nn.Parameter] = set()
        for number, bucket in enumerate(buckets):
            own = [parameters[held.name] for held in bucket]
            count, device, group = sum(p.numel() for p in own), own[0].device, self._groups[number]
            in_place = dtype == reduce and summed is None
            buffer = room(count, group, dtype, device) if in_place else torch.zeros(count, dtype=dtype, device=device)
            self._buffers.append(buffer)
            flat = buffer.split([p.numel() for p in own])
            views = {parameter: view.view_as(parameter) for parameter, view in zip(own, flat, strict=True)}
            self._views.append(views)
            for held, (parameter, view) in zip(bucket, views.items(), strict=True):
                self.gradients[held.name] = view
                self._adopt(parameter, view, number)
        self._through = [torch.empty_like(b, dtype=reduce) for b in self._buffers] if reduce != dtype else []
        """Where buckets are summed, if not where they are."""
        self.begin()

    def _adopt(self, parameter: nn.Parameter, view: Tensor, bucket: int) -> None:
        self._bucket_of[parameter] = bucket
        same = parameter.dtype == view.dtype

        def accumulated(p: Tensor) -> None:
            first = parameter in self._untouched
            if first or not same:
                assert p.grad is not None
                (view.copy_ if first else view.add_)(p.grad)
                p.grad = view if same else None
            self.ready(parameter)

        parameter.register_post_accumulate_grad_hook(accumulated)

    @property
    def buffers(self) -> list[Tensor]:
        """Every bucket, flat: for what is done to all gradients alike."""
        return self._buffers

    @property
    def holds(self) -> dict[str, list[Tensor]]:
        """Tensors that it holds from step to step: as units those in which gradients are summed, if not in place."""
        return {"weights": list(self.weights.values()), "gradients": self._buffers, "units": self._through}

    def publish(self) -> None:
        """Updated weights are whole already."""

    def begin(self) -> None:
        """A step begins, and what the last one left in the buckets is nobody's."""
        self._untouched = set(self._bucket_of)
        for parameter in self._untouched:
            parameter.grad = None
        self._missing = list(self._sizes)
        self._handles: list[Handle] = []
        self.final = False

    def open(self, parameter: nn.Parameter) -> Tensor:
        """Where a part of this gradient is added from outside of autograd: zero before the first of a step."""
        view = self._views[self._bucket_of[parameter]][parameter]
        if parameter in self._untouched:
            self._zero(parameter, view)
            self._untouched.discard(parameter)
        return view

    def _zero(self, parameter: nn.Parameter, view: Tensor) -> None:
        view.zero_()
        parameter.grad = view if parameter.dtype == view.dtype else None

    def ready(self, parameter: nn.Parameter) -> None:
        """A part of this gradient is complete for this microbatch; on a stage's last one the bucket may leave."""
        self._untouched.discard(parameter)
        if not self.final:
            return
        self._missing[self._bucket_of[parameter]] -= 1
        while len(self._handles) < len(self._buffers) and self._missing[len(self._handles)] == 0:
            self._start()

    def _start(self) -> None:
        number = len(self._handles)
        for parameter in self._untouched & self._views[number].keys():
            self._zero(parameter, self._views[number][parameter])
        self._untouched -= self._views[number].keys()
        if self.leaves is not None:
            for name in self._names[number]:
                self.leaves(name, self.gradients[name])
        through = self._through[number] if self._through else None
        if self._summed is not None:
            self._handles.append(self._summed(self._buffers[number], number))
            return
        group = self._groups[number]
        self._handles.append(all_reduce(self._buffers[number], group, why="gradients", wait=False, through=through))

    def done(self, stage: int) -> None:
        """Buckets wait for `finish`: their sums have an order among themselves, and nothing else comes between."""

    def finish(self, stage: int) -> None:
        """Returns when the gradients of `stage` are summed; the stages after it on this rank must be done."""
        for number, of in enumerate(self._stages):
            if of >= stage:
                while len(self._handles) <= number:
                    self._start()
                self._handles[number].wait()
