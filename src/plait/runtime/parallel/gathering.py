"""Gathering: with ZeRO-3 a unit's weights are whole only while they are at work.

    forward    block 0   block 1   block 2   block 3        slots    a: 0 . 2 .     gathered one ahead: while block 1
               slot a    slot b    slot a    slot b                  b: . 1 . 3     computes in b, block 2 comes to a
    backward   block 3 and 2 are still there; 1 and 0 come again

Parameters are views of their slot for good. A block, or a module outside of all blocks, that is about to run, forward or
backward, has its unit gathered; the first step records the order, and later ones gather the next unit of it in advance,
and the first two when the step begins. Rajbhandari et al., "ZeRO", 2019,
section 5.3; Zhao et al., "PyTorch FSDP", VLDB 2023, section 3.3.2.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from ...design.unit import Slot, Unit, slot_sizes
from ..comm.collectives import Handle, gather_shares
from ..comm.world import Group


class Gathering:
    """The slots of one rank, which hold whole `units`; `group` shares them. With `kept` each has a slot of its own."""

    def __init__(
        self, units: Sequence[Unit], group: Group, dtype: torch.dtype, device: torch.device, *, kept: bool
    ) -> None:  # fmt: skip
        self._group, self._kept = group, kept
        self._slots = {
            slot: torch.zeros(size, dtype=dtype, device=device) for slot, size in slot_sizes(units, kept=kept).items()
        }
        self.passed: Callable[[Unit], None] = _nobody
        """Told when backward comes to what a unit gave, before anything is gathered for it."""
        self._shares: dict[Unit, Tensor] = {}
        self._in: dict[Slot, Unit] = {}
        self._arriving: dict[Slot, Handle] = {}
        # The unit that was asked for last, and those that are at work with it: of one place.
        self._now: Unit | None = None
        self._here: set[Unit] = set()
        # The order of a step: as the last one had it, None where nothing is known, and as this one has it so far.
        self._known: list[Unit] | None = None
        self._order: list[Unit] = []
        self._training = False

    @property
    def holds(self) -> dict[str, list[Tensor]]:
        """Tensors that it holds from step to step."""
        return {"units": list(self._slots.values())}

    def place(self, unit: Unit) -> Tensor:
        """Where a unit is whole, [padded]: what stands there is another's, at times."""
        return self._slots[self._slot(unit)][: unit.padded]

    def _slot(self, unit: Unit) -> Slot:
        return unit.slot(kept=self._kept)

    def attach(self, unit: Unit, share: Tensor, modules: Sequence[nn.Module]) -> None:
        """Has a unit, of which `share` is this rank's, gathered whenever one of `modules` is about to run."""
        self._shares[unit] = share

        def before(module: nn.Module, args: object) -> None:
            self.need(unit)

        def back(gradient: Tensor) -> None:
            self.passed(unit)
            self.need(unit)

        def behind(module: nn.Module, args: object, output: object) -> None:
            first = output[0] if isinstance(output, tuple) else output
            if isinstance(first, Tensor) and first.requires_grad:
                first.register_hook(back)

        for module in modules:
            module.register_forward_pre_hook(before)
            # An embedding's backward asks for rows, and not for the weight.
            if unit.block is not None or not isinstance(module, nn.Embedding):
                module.register_forward_hook(behind)

    def begin(self) -> None:
        """A step begins; its order is that of the one before."""
        self._known, self._order = self._order or None, []
        self._forget()
        self._training = True
        for unit in (self._known or ())[:2]:
            if self._slot(unit) not in self._in:
                self._gather(unit)

    def end(self) -> None:
        """Weights are about to change: what is whole is no longer true."""
        self._forget()
        self._training = False

    def _forget(self) -> None:
        for handle in self._arriving.values():
            handle.wait()
        self._arriving.clear()
        self._in.clear()
        self._now = None
        self._here.clear()

    def need(self, unit: Unit) -> None:
        """Returns when the unit is whole, and starts gathering what is needed next: the others of its place, and those of
        the next place in the order."""
        if unit is self._now:
            return
        if self._now is None or not _together(unit, self._now):
            self._here.clear()
        self._now = unit
        if unit in self._here:
            return
        self._here.add(unit)
        slot = self._slot(unit)
        self._gather(unit)
        if slot in self._arriving:
            self._arriving.pop(slot).wait()
        if not self._training:
            return
        self._order.append(unit)
        done = len(self._order)
        if self._known is None or done >= len(self._known):
            return
        if self._known[done - 1] is not unit:
            self._known = None
            return
        next_place: Unit | None = None
        for ahead in self._known[done:]:
            if not _together(ahead, unit):
                next_place = next_place or ahead
                held = self._in.get(self._slot(ahead))
                if not _together(ahead, next_place) or (held is not None and held != ahead and _together(held, unit)):
                    return
            self._gather(ahead)

    def _gather(self, unit: Unit) -> None:
        """Starts gathering a unit that is not in its slot."""
        slot = self._slot(unit)
        if self._in.get(slot) is unit:
            return
        if slot in self._arriving:
            self._arriving.pop(slot).wait()
        self._in[slot] = unit
        # As a tensor of its own: autograd is not to take the next unit for a change of this one's weights.
        self._arriving[slot] = gather_shares(self.place(unit).data, self._shares[unit], self._group, why="weights")


def _nobody(unit: Unit) -> None: ...


def _together(one: Unit, other: Unit) -> bool:
    """Whether two units are at work at the same time: what is trained and what is frozen of a block, say."""
    return (one.stage, one.place) == (other.stage, other.place)
