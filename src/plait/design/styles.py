"""What each style of a model's tensor plan means: how it cuts the weights, and what happens to what enters and leaves.

A style is a row: which side of the weight is cut over tp, what is done with the input on the way in (`enter`) and with
the output on the way out (`leave`), and the region in which the module works. The names are those that transformers'
tensor plans use. Which dim of a tensor is its output side is the reader's to say (a Linear's first, a Conv1D's second).

    cuts   out     the weight's output side, and its bias      in      its input side      none   held whole
    enter  none    the module reads what it needs
           copy    the input is whole on every rank: identity forward, sum of its gradients over tp backward
           slice   the input is whole on every rank: own slice of its last dim forward, gather of its gradients backward
    leave  none    the output stays cut
           sum     the output is a partial sum: sum over tp forward, identity backward (the bias is added after the sum)
           gather  the output is cut in its last dim: gather forward, own slice backward
           turned  the output is whole; its last columns, the keys' part that positions turn and all heads share, are read
                   by each rank's own heads: identity forward, sum of their gradients over tp backward
    region full    every rank of a tp group does the same work there
           heads   each does the work of its own heads, so that a gradient of what is held whole is summed over tp
    packed         the cut dim is made of pieces, each cut by itself (where the plan names none, of two: gate and up)

Names of the same row are aliases, by which older versions call it. What transformers has a name for and plait does not
carry out is in `REFUSED`, with why.

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
    packed: bool = False


ROWS = (
    Style("colwise", cuts="out", enter="copy", leave="none"),
    Style("packed_colwise", cuts="out", enter="copy", leave="none", packed=True),
    Style("rowwise", cuts="in", enter="none", leave="sum"),
    # Of stacks that are stored as [experts, in, out], whose last dim is the output side.
    Style("packed_rowwise", cuts="in", enter="none", leave="sum", packed=True),
    Style("rowwise_split_input", cuts="in", enter="slice", leave="sum"),
    Style("colwise_gather_output", cuts="out", enter="copy", leave="gather"),
    Style("embedding_rowwise", cuts="out", enter="none", leave="sum"),
    Style("embedding_colwise", cuts="in", enter="none", leave="gather"),
    Style("replicated_with_grad_allreduce", cuts="none", enter="none", leave="none", region="heads"),
    Style("replicate", cuts="none", enter="none", leave="none"),
    # Whoever owns a bare parameter that has a style of its own: nothing is done around it.
    Style("local_params", cuts="none", enter="none", leave="none"),
    # The way into DeepSeek's latent attention: the latent part goes on to a layer that is cut by columns.
    Style("mla_kv_a_proj", cuts="none", enter="none", leave="turned"),
    # Every expert cut by width: the way in of each by columns (gate and up), the way out by rows.
    Style("moe_tp_experts", cuts="both", enter="copy", leave="sum"),
)
ALIASES = {"colwise_rep": "colwise_gather_output", "rowwise_rep": "rowwise_split_input"}
STYLES: dict[str, Style] = {
    name: row for row in ROWS for name in (row.name, *(alias for alias, of in ALIASES.items() if of == row.name))
}
REFUSED = {
    "all_reduce": "sums what a module gives, and leaves the gradient of what it reads a part on each rank",
    "moe_identity_expert": "is for experts that give what they read, which share a stack with others that are cut",
    "sequence_parallel": "is no plan's: transformers has the name, and nothing that carries it out",
    "grouped_gemm": "deals out whole experts, which is expert parallelism",
    "ep_dispatch_experts": "sends tokens to the ranks of their experts, which is expert parallelism",
}
"""What transformers has a name for, and why plait has no row for it."""


def style(name: str, module: str) -> Style:
    """The row for `name`; a style that plait does not carry out is refused by name."""
    if name not in STYLES:
        given = f"The tensor plan of this model gives {module} the style '{name}', which"
        if name in REFUSED:
            raise PlanError(f"{given} {REFUSED[name]}. This version of plait does not carry it out: use tp 1.")
        raise PlanError(
            f"{given} this version of plait does not carry out (it knows {', '.join(sorted(STYLES))})."
            f"{nearest(name, STYLES)} Use tp 1 for this model."
        )
    return STYLES[name]
