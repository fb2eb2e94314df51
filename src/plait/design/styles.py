"""What each style of a model's tensor plan means: how it cuts the weights, and what happens to what enters and leaves.

A style is a row: which side of the weight is cut over tp, what is done with the input on the way in (`enter`) and with
the output on the way out (`leave`), and the region in which the module works. The names are those that transformers'
tensor plans use. Which dim of a tensor is its output side is the reader's to say (a Linear's first, a Conv1D's second).

    cuts   out     the weight's output side, and its bias      in      its input side      none   held whole
    enter  none    the module reads what it needs
           copy    the input is whole on every rank: identity forward, sum of its gradients over tp backward
    leave  none    the output stays cut
           sum     the output is a partial sum: sum over tp forward, identity backward (the bias is added after the sum)
           gather  the output is cut in its last dim: gather forward, own slice backward
    region full    every rank of a tp group does the same work there
           heads   each does the work of its own heads, so that a gradient of what is held whole is summed over tp

Shoeybi et al., "Megatron-LM", 2019, section 3 (their f is `copy`, their g is `sum`).
"""

from __future__ import annotations

from dataclasses import dataclass

from .errors import PlanError, nearest


@dataclass(frozen=True)
class Style:
    name: str
    cuts: str
    enter: str
    leave: str
    region: str = "full"


STYLES: dict[str, Style] = {
    style.name: style
    for style in (
        Style("colwise", cuts="out", enter="copy", leave="none"),
        Style("packed_colwise", cuts="out", enter="copy", leave="none"),
        Style("rowwise", cuts="in", enter="none", leave="sum"),
        Style("colwise_gather_output", cuts="out", enter="copy", leave="gather"),
        Style("embedding_rowwise", cuts="out", enter="none", leave="sum"),
        Style("replicated_with_grad_allreduce", cuts="none", enter="none", leave="none", region="heads"),
        # Every expert cut by width: the way in of each by columns (gate and up), the way out by rows.
        Style("moe_tp_experts", cuts="both", enter="copy", leave="sum"),
    )
}


def style(name: str, module: str) -> Style:
    """The row for `name`; a style that plait does not know yet is refused by name."""
    if name not in STYLES:
        raise PlanError(
            f"The tensor plan of this model gives {module} the style '{name}', which this version of plait does not "
            f"carry out (it knows {', '.join(sorted(STYLES))}).{nearest(name, STYLES)} Use tp 1 for this model."
        )
    return STYLES[name]
