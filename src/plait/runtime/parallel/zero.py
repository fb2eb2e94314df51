"""ZeRO: dp ranks share out what they would hold copies of.

    ZeRO-1   weights whole   gradients whole, each rank gets the sum of its share    state of the share
    ZeRO-2   weights whole   gradients of two blocks at a time, then the share       state of the share
    ZeRO-3   the share, two blocks whole at a time              as ZeRO-2            state of the share

What is moved is a unit (design/unit.py): a flat buffer with the parameters of a block. Backward fills the unit's
gradients; when the last is there their sum starts, each rank getting its share of it, while backward goes on. The
optimizer updates shares; the units are gathered again when it has (ZeRO-1, -2), or when a forward or backward needs
them (ZeRO-3: gathering.py). What is frozen has weights alone: shares with ZeRO-3, else no part in this. Buffers are made
once and used again.
Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2019, section 5.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from ...design.unit import IN_FLIGHT, Slot, Unit, slot_sizes
from ..comm.collectives import Handle, all_reduce, gather_shares, reduce_scatter, room
from ..comm.world import Group


@dataclass(eq=False)
class _Held:
    """One unit here: its weights and gradients, and how far the sum of these is."""

    unit: Unit
    number: int
    former: _Held | None
    """Whose gradients were in the same place before, in this backward."""
    weights: Tensor
    """Whole, or with ZeRO-3 this rank's share."""
    summed: Tensor
    """This rank's share of the gradients, and of what they are summed into."""
    full: Tensor
    """Where backward leaves the gradients: the unit's own, or a slot's."""
    missing: int = 0
    parameters: dict[nn.Parameter, Tensor] = field(default_factory=dict)
    """With the views of their gradients."""
    any_summed: bool = False
    handle: Handle | None = None


class Shares:
    """The `GradSink` of ZeRO, and the home of the weights. `units` are this rank's, in the order in which backward
    finishes them, frozen ones among them; `group` are those that share, `rest` what gradients of shares are summed over
    besides; `types` those of weights, of gradients, and of their sums over ranks. `parts` are as for data parallelism.
    `splits` says that backwards come in halves. With `each` gradients are summed after every microbatch. `whole` says
    where a unit is whole when it is (ZeRO-3); None: here, and always."""

    def __init__(
        self, units: Sequence[Unit], group: Group, rest: Mapping[tuple[str, ...], Group],
        types: tuple[torch.dtype, torch.dtype, torch.dtype], device: torch.device, parts: Mapping[str, int], *,
        splits: bool, each: bool, whole: Callable[[Unit], Tensor] | None,
    ) -> None:  # fmt: skip
        compute, accumulate, reduce = types
        self._group, self._rest, self._whole = group, rest, whole
        self._parts, self._splits, self._each = parts, splits, each
        trained = [unit for unit in units if unit.trains]
        largest = max((unit.padded for unit in trained), default=0)
        self._space = [torch.empty(largest, dtype=reduce, device=device) for _ in trained[:IN_FLIGHT]]
        self._through = [torch.empty_like(space) for space in self._space] if reduce != accumulate else []
        """Where gradients leave that are not kept in the type of their sums."""
        self.leaves: Callable[[str, Tensor], None] | None = None
        """Shown every gradient of a backward, by name, before its sum over ranks begins."""
        self._gradient_slots: dict[Slot, Tensor] = {}
        if each:
            for slot, size in slot_sizes(trained, kept=False).items():
                self._gradient_slots[slot] = torch.zeros(size, dtype=accumulate, device=device)
        self._stored = {
            unit: room(unit.padded if whole is None else unit.share, group, compute, device) for unit in units
        }
        self._of = {name: unit for unit in units for name in unit.names}
        self._held: list[_Held] = []
        for unit in trained:
            self._held.append(self._made(unit, accumulate, device))
        # How many finish before the place of each unit.
        self._before: dict[Unit, int] = {}
        for unit in units:
            earlier = trained[: sum(other.trains for other in units[: units.index(unit)])]
            self._before[unit] = sum((other.stage, other.place) != (unit.stage, unit.place) for other in earlier)
        self._mine: dict[nn.Parameter, _Held] = {}
        self.gradients: dict[str, Tensor] = {}
        """This rank's stretch of the sum of every gradient, flat."""
        self.weights: dict[str, nn.Parameter] = {}
        """This rank's stretch of every weight, flat: what the optimizer updates."""
        self.frozen: dict[str, Tensor] = {}
        """The same of what it does not."""
        for held in self._held:
            for name in held.unit.names:
                start, stop = self._place(held.unit, name)
                self.gradients[name] = held.summed[start:stop]
                self.weights[name] = nn.Parameter(self._share(held.unit)[start:stop])
        for unit in units:
            for name in unit.names if not unit.trains else ():
                start, stop = self._place(unit, name)
                self.frozen[name] = self._share(unit)[start:stop]
        self._untouched: set[nn.Parameter] = set()
        self._final = False

    def _made(self, unit: Unit, accumulate: torch.dtype, device: torch.device) -> _Held:
        share = unit.share
        if self._each:
            full = self._gradient_slots[unit.slot(kept=False)][: unit.padded]
            summed = torch.zeros(share, dtype=accumulate, device=device)
        else:
            in_place = not self._through
            full = (
                room(unit.padded, self._group, accumulate, device) if in_place
                else torch.zeros(unit.padded, dtype=accumulate, device=device)
            )  # fmt: skip
            summed = full[self._group.index * share :][:share]
        shared = [other for other in self._held if self._each and other.unit.slot(kept=False) == unit.slot(kept=False)]
        return _Held(unit, len(self._held), shared[-1] if shared else None, self._stored[unit], summed, full)

    def _share(self, unit: Unit) -> Tensor:
        stored, share = self._stored[unit], unit.share
        return stored if self._whole is not None else stored[self._group.index * share :][:share]

    def _place(self, unit: Unit, name: str) -> tuple[int, int]:
        """Where this rank's stretch of a parameter stands in its share."""
        first, _ = unit.spans[name]
        start, stop = unit.stretch(name, self._group.index)
        offset = first - self._group.index * unit.share
        return (start + offset, stop + offset) if start < stop else (0, 0)

    # --- weights

    def home(self, name: str, whole: Tensor) -> Tensor:
        """Where a parameter lives that is `whole` [local shape] now: a view of its unit. With ZeRO-3 only this rank's
        stretch of it stays; without, what is frozen lives by itself."""
        if name not in self._of:
            return whole.clone()
        unit = self._of[name]
        first, last = unit.spans[name]
        if self._whole is None:
            view = self._stored[unit][first:last].view(whole.shape)
            return view.copy_(whole)
        start, stop = unit.stretch(name, self._group.index)
        into, end = self._place(unit, name)
        self._stored[unit][into:end].copy_(whole.flatten()[start:stop])
        return self._whole(unit)[first:last].view(whole.shape)

    def adopt(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """The parameters, once they are at home."""
        for held in self._held:
            for name in held.unit.names:
                parameter = parameters[name]
                first, last = held.unit.spans[name]
                view = held.full[first:last].view(parameter.shape)
                held.parameters[parameter] = view
                self._mine[parameter] = held
                self._hook(held, parameter, view)
        self.begin()

    def publish(self) -> None:
        """Updated shares become whole weights again; with ZeRO-3 not before they are needed."""
        if self._whole is not None:
            return
        handles = [
            gather_shares(held.weights, self._share(held.unit), self._group, why="weights") for held in self._held
        ]
        for handle in handles:
            handle.wait()

    @property
    def stored(self) -> list[tuple[Unit, Tensor]]:
        """What this rank keeps of the weights of every unit."""
        return list(self._stored.items())

    # --- gradients

    @property
    def holds(self) -> dict[str, list[Tensor]]:
        """Tensors that it holds from step to step: of gradients whole ones and shares; as units what others' come to."""
        return {
            "weights": list(self._stored.values()),
            "gradients": [tensor for held in self._held for tensor in (held.full, held.summed)],
            "units": [*self._space, *self._through],
        }

    @property
    def buffers(self) -> list[Tensor]:
        """This rank's shares of the sums, flat: for what is done to all gradients alike."""
        return [held.summed for held in self._held]

    @property
    def final(self) -> bool:
        return self._final

    @final.setter
    def final(self, last: bool) -> None:
        """A backward begins, whose gradients are the last of the step for its stage if `last`."""
        if self._each:
            self._round()
        self._final = last

    def begin(self) -> None:
        """A step begins, and what the last one left is nobody's."""
        for held in self._held:
            held.any_summed = False
            held.missing = sum(self._parts.get(name, 1) for name in held.unit.names)
            self._clear(held)
        self._open: deque[_Held] = deque()
        self._next = 0
        self._begun = False
        self._final = False

    def _clear(self, held: _Held) -> None:
        self._untouched.update(held.parameters)
        for parameter in held.parameters:
            parameter.grad = None

    def _hook(self, held: _Held, parameter: nn.Parameter, view: Tensor) -> None:
        same = parameter.dtype == view.dtype

        def accumulated(p: Tensor) -> None:
            first = parameter in self._untouched
            if first or not same:
                assert p.grad is not None
                if first:
                    self._claim(held)
                (view.copy_ if first else view.add_)(p.grad)
                p.grad = view if same else None
            self.ready(parameter)

        parameter.register_post_accumulate_grad_hook(accumulated)

    def _claim(self, held: _Held) -> None:
        """Returns when nobody else's gradients are in the unit's place any more. Whoever had it before has all that it
        gets: what is missing there counts as zero."""
        former = held.former
        while former is not None and self._next <= former.number:
            self._start()
        while former is not None and former.handle is not None:
            self._close()

    def open(self, parameter: nn.Parameter) -> Tensor:
        """Where a part of this gradient is added from outside of autograd: zero before the first."""
        held = self._mine[parameter]
        view = held.parameters[parameter]
        if parameter in self._untouched:
            self._claim(held)
            view.zero_()
            parameter.grad = view if parameter.dtype == view.dtype else None
            self._untouched.discard(parameter)
        return view

    def ready(self, parameter: nn.Parameter) -> None:
        """A part of this gradient is complete for this microbatch; when all of a unit's are, their sum may start."""
        self._untouched.discard(parameter)
        self._begun = True
        if not (self._final or self._each):
            return
        self._mine[parameter].missing -= 1
        while self._next < len(self._held) and self._held[self._next].missing == 0:
            self._start()

    # A weight that gets no gradient on one rank makes that rank's unit wait, and the others' sums must not be called at
    # another place among the gathers of weights: so a unit leaves, ready or not, before the first gather that follows.

    def passed(self, unit: Unit) -> None:
        """Backward has come to what `unit` gave: those that it finishes earlier get no more in this microbatch."""
        if self._splits or unit.alone or not (self._final or self._each):
            return
        while self._next < self._before[unit] and self._held[self._next].unit.stage == unit.stage:
            self._start()

    def done(self, stage: int) -> None:
        """A backward of the stage is over."""
        if not (self._final or self._each):
            return
        while self._next < len(self._held) and self._held[self._next].unit.stage == stage:
            self._start()

    def _start(self) -> None:
        held = self._held[self._next]
        for parameter in self._untouched & held.parameters.keys():
            self._claim(held)
            held.parameters[parameter].zero_()
        self._untouched -= held.parameters.keys()
        if len(self._open) == len(self._space):
            self._close()
        if self.leaves is not None:
            for name, view in zip(held.unit.names, held.parameters.values(), strict=True):
                self.leaves(name, view)
        place, padded = self._next % len(self._space), held.unit.padded
        space, through = self._space[place][:padded], self._through[place][:padded] if self._through else None
        add = self._each and held.any_summed
        held.handle = reduce_scatter(
            held.full, held.summed, self._group, space, why="gradients", add=add, through=through
        )  # fmt: skip
        held.any_summed = True
        self._open.append(held)
        self._next += 1

    def _close(self) -> None:
        """Waits for the oldest sum that is under way."""
        held = self._open.popleft()
        assert held.handle is not None
        held.handle.wait()
        held.handle = None
        if held.unit.rest and (self._final or not self._each):
            # Its place is free of its sum, and not yet another's.
            through = self._through[held.number % len(self._space)][: held.unit.share] if self._through else None
            all_reduce(held.summed, self._rest[held.unit.rest], why="gradients", through=through)

    def _round(self) -> None:
        """Ends the sums of a microbatch, and makes ready for the next one's."""
        if self._begun:
            self._finish_all()
        for held in self._held:
            held.missing = sum(self._parts.get(name, 1) for name in held.unit.names)
            self._clear(held)
        self._next, self._begun = 0, False

    def _finish_all(self) -> None:
        while self._next < len(self._held):
            self._start()
        while self._open:
            self._close()

    def finish(self, stage: int) -> None:
        """Returns when the gradients of `stage` are summed; the stages after it on this rank must be done."""
        last = max((number for number, held in enumerate(self._held) if held.unit.stage >= stage), default=-1)
        while self._next <= last:
            self._start()
        while any(held.unit.stage >= stage for held in self._open):
            self._close()
