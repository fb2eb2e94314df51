"""What each style of a model's tensor plan means: how it cuts the weights, and what happens to what enters and leaves.

A style is a row: which dim of the weight and of the bias is cut over tp, what is done with the input on the way in
(`enter`) and with the output on the way out (`leave`). The names are those that transformers' tensor plans use.

    enter  none   the module reads what it needs
           copy   the input is whole on every rank: identity forward, sum of its gradients over tp backward
    leave  none   the output stays cut
           sum    the output is a partial sum: sum over tp forward, identity backward (the bias is added after the sum)
           gather the output is cut in its last dim: gather forward, own slice backward

Shoeybi et al., "Megatron-LM", 2019, section 3 (their f is `copy`, their g is `sum`).
"""

from __future__ import annotations

from dataclasses import dataclass

from .errors import PlanError, nearest


@dataclass(frozen=True)
class Style:
    name: str
    weight_dim: int
    bias_dim: int | None
    enter: str
    leave: str

    def cut_dim(self, tensor: str) -> int | None:
        """The dim of the module's `weight` or `bias` that tp cuts; None when every rank holds it whole."""
        return {"weight": self.weight_dim, "bias": self.bias_dim}[tensor]


STYLES: dict[str, Style] = {
    style.name: style
    for style in (
        Style("colwise", weight_dim=0, bias_dim=0, enter="copy", leave="none"),
        Style("rowwise", weight_dim=1, bias_dim=None, enter="none", leave="sum"),
        Style("colwise_gather_output", weight_dim=0, bias_dim=0, enter="copy", leave="gather"),
        Style("embedding_rowwise", weight_dim=0, bias_dim=None, enter="none", leave="sum"),
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
