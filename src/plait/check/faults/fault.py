"""What a planted fault is, and the two decorators with which one is written.

@planted("what goes wrong, in one sentence", kind=..., at=..., says=..., layout={"dp": 2})
def no_sum_dp() -> None:                             # the function becomes the fault 'no-sum-dp'
    @instead(collectives, "all_reduce")
    def wrong(right, x, group, *, why, **more):      # takes the place of the right function, and may call it
        ...
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Patch = Callable[[], None]


@dataclass(frozen=True)
class Fault:
    """`patch()` puts it into this process; `layout` are plan values that give it something to spoil.

    What the checker must say: `kind` is the kind of its first place, `at` are words of that place and `says` words of the
    likely cause. `stands_for` are faults that people met in other tools (ids of the list of reports).
    """

    name: str
    meaning: str
    kind: str
    at: str
    says: str
    layout: dict[str, Any]
    patch: Patch
    stands_for: tuple[str, ...] = ()


def planted(
    meaning: str, *, kind: str, at: str, says: str, layout: dict[str, Any], stands_for: tuple[str, ...] = ()
) -> Callable[[Patch], Fault]:
    """Makes a fault of the patch that it decorates, whose name it takes."""
    return lambda patch: Fault(patch.__name__.replace("_", "-"), meaning, kind, at, says, layout, patch, stands_for)


def instead(owner: Any, name: str) -> Callable[[Callable[..., Any]], None]:
    """Puts the function that it decorates in the place of `owner.name`, and gives it what was there as first argument. A
    function is replaced in every module of the runtime that knows it by that name; the checker's own keep the right one.
    """
    right = getattr(owner, name)

    def put(wrong: Callable[..., Any]) -> None:
        def patched(*args: Any, **more: Any) -> Any:
            return wrong(right, *args, **more)

        runtime = [module for key, module in sys.modules.items() if key.startswith("plait.runtime.")]
        for place in (owner, *(module for module in runtime if vars(module).get(name) is right)):
            setattr(place, name, patched)

    return put
