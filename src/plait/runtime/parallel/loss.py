"""Cross entropy over a vocabulary that is cut over tp: logits are never gathered.

    x [n, V/t] own logits        m = max over the vocabulary      first reduction over tp, n numbers
                                 z = sum exp(x - m), own target   second reduction, 2 n numbers
    loss = sum of (log z + m - target's logit) over trained targets, times 1 / (target tokens of the whole step)

With label smoothing e a token's loss is log z + m - (1 - e) target's logit - e mean of all logits, one number a token
more in the second reduction (Szegedy et al., "Rethinking the Inception Architecture", 2016, section 7); the z-loss adds
c (log z + m)^2, which sends nothing (Chowdhery et al., "PaLM", 2022, section 5). Both are training's: without gradients
the loss is the cross entropy alone.

Log-softmax and loss are fp32 whatever the logits are (fp64 stays fp64). With the weight inside, every later reduction of
the loss and of every gradient, on every axis, is a plain sum. Shoeybi et al., "Megatron-LM", 2019, section 3.

In chunks the logits of a microbatch are never there together. Its forward ends before the head; its backward has the
head, the loss and both their gradients, some tokens at a time:

    forward    h [n, hidden] is kept, the loss is not known yet
    backward   each chunk c of h:   x = c Wᵀ -> loss, dx        dh[c] = dx W       dW += dxᵀ c       x is overwritten

The loss of a step is read when its backwards are done, so nothing waits for it, and nothing is computed twice. dW is
added where gradients accumulate, in their type. A pass without gradients (evaluation) makes the chunks in forward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional as F

from ..batch import IGNORE, Batch
from ..comm.collectives import all_reduce
from ..comm.world import Group


@dataclass(frozen=True)
class Terms:
    """What a token's loss has besides its cross entropy: `smoothing` is spread over a `vocabulary` of so many rows in
    all, `z` multiplies the square of the logarithm of the soft-max's sum."""

    smoothing: float = 0.0
    z: float = 0.0
    vocabulary: int = 0

    @property
    def here(self) -> Terms:
        """Those that count: in a pass without gradients none do."""
        return self if torch.is_grad_enabled() else PLAIN


PLAIN = Terms()


@dataclass
class _Read:
    """What the gradient of n tokens needs: `exponentials` [n, V/t] of the logits, the `total` of the whole vocabulary's,
    where the target is among the own rows (`local`, or `elsewhere`), whether it is `trained`, and for a z-loss the
    `logarithm` of the sum of all exponentials."""

    exponentials: Tensor
    total: Tensor
    local: Tensor
    elsewhere: Tensor
    trained: Tensor
    logarithm: Tensor | None = None

    def gradient(self, scale: Tensor, terms: Terms) -> Tensor:
        """Of the logits, times `scale`; it is made where the exponentials were."""
        weight = (self.trained * scale).to(self.total.dtype)
        of_sum = weight if self.logarithm is None else weight * (1 + 2 * terms.z * self.logarithm)
        gradient = self.exponentials.mul_((of_sum / self.total).unsqueeze(-1))
        if terms.smoothing:
            gradient.sub_((weight * (terms.smoothing / terms.vocabulary)).unsqueeze(-1))
        of_target = (-weight * (1 - terms.smoothing)).masked_fill(self.elsewhere, 0)
        return gradient.scatter_add_(-1, self.local, of_target.unsqueeze(-1))


def _read(
    wide: Tensor, targets: Tensor, start: int, group: Group, terms: Terms, out: Tensor | None = None
) -> tuple[_Read, Tensor]:
    """Of logits [n, V/t] in fp32 or wider, and the sum of their loss. `out`, for the exponentials, may be the logits."""
    local = targets - start
    elsewhere = (local < 0) | (local >= wide.shape[-1])
    local = local.masked_fill(elsewhere, 0).unsqueeze(-1)
    highest = wide.amax(-1)
    all_reduce(highest, group, why="loss: maximum", op="max")
    targeted = (wide.gather(-1, local).squeeze(-1) - highest).masked_fill(elsewhere, 0)
    spread = [(wide.sum(-1) - wide.shape[-1] * highest) / terms.vocabulary] if terms.smoothing else []
    exponentials = torch.sub(wide, highest.unsqueeze(-1), out=out).exp_()
    sums = torch.stack((exponentials.sum(-1), targeted, *spread))
    all_reduce(sums, group, why="loss: sums")
    trained, logarithm = targets != IGNORE, sums[0].log()
    loss = logarithm - (1 - terms.smoothing) * sums[1]
    if terms.smoothing:
        loss = loss - terms.smoothing * sums[2]
    read = _Read(exponentials, sums[0], local, elsewhere, trained)
    if terms.z:
        read.logarithm = logarithm + highest
        loss = loss + terms.z * read.logarithm.square()
    return read, (loss * trained).sum()


def _wider(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


class _CrossEntropy(Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, start: int, group: Group, terms: Terms) -> Tensor:
        read, loss = _read(logits.to(_wider(logits.dtype)), targets, start, group, terms)
        ctx.save_for_backward(read.exponentials, read.total, read.local, read.elsewhere, read.trained, read.logarithm)
        ctx.dtype, ctx.spent, ctx.terms = logits.dtype, False, terms
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        assert not ctx.spent, "a loss goes backward once: its gradient is made where its exponentials were"
        ctx.spent = True
        gradient = _Read(*ctx.saved_tensors).gradient(grads[0], ctx.terms).to(ctx.dtype)
        return gradient, None, None, None, None


def only(batch: Batch, received: Tensor | None) -> Tensor:
    """The body of a stage that has nothing but the loss: the logits as they came."""
    assert received is not None
    return received


def cross_entropy(logits: Tensor, targets: Tensor, group: Group, *, start: int, terms: Terms = PLAIN) -> Tensor:
    """Sum of the loss of the trained targets, their cross entropy and what `terms` add to it: logits [..., V/t] hold
    vocabulary rows from `start`, targets [...] count in the whole vocabulary and may be IGNORE. The same scalar on every
    rank of the group."""
    flat = logits.flatten(0, -2), targets.flatten()
    return _CrossEntropy.apply(*flat, start, group, terms.here)  # type: ignore[no-any-return]


class WholeLoss:
    """The loss of logits that are all there. Those of this rank are the vocabulary's from row `start`; `group` has the
    rest."""

    def __init__(self, group: Group, start: int, terms: Terms = PLAIN) -> None:
        self._group, self._start, self._terms = group, start, terms

    def logits(self, output: Tensor) -> Tensor:
        """Of what the last stage's body gives."""
        return output

    def share(self, output: Tensor, batch: Batch, inverse_weight: Tensor) -> Tensor:
        """A microbatch's share of the step's mean loss."""
        total = cross_entropy(output, batch.targets, self._group, start=self._start, terms=self._terms)
        return total * inverse_weight.to(total.dtype)


class ChunkedLoss:
    """The loss of what `head`, a linear layer with this rank's rows, would read. `at_once` says how many of so many
    tokens each chunk has; `after` is what the model does with each logit after the head (None: nothing); `enter` is asked
    for what the head reads, so that its gradient is summed over tp. The head's gradients are added by hand."""

    def __init__(
        self, head: nn.Module, group: Group, start: int, *, at_once: Callable[[int], Sequence[int]],
        after: Callable[[Tensor], Tensor] | None, enter: Callable[[Tensor], Tensor], terms: Terms = PLAIN,
    ) -> None:  # fmt: skip
        self._head, self._group, self._start, self._terms = head, group, start, terms
        self._at_once, self._after, self._enter = at_once, after, enter
        self._open: Callable[[nn.Parameter], Tensor] = _nowhere
        self._ready: Callable[[nn.Parameter], None] = _nobody
        self.need: Callable[[], None] = _no_one
        """Called before the head's weight is read in backward."""
        self.note: Callable[[Tensor], object] = _nobody
        """Asked for the space of a chunk's logits, for whoever counts what is kept."""
        self.watch: Callable[[Batch, str, Tensor], None] = _unseen
        """Shown each chunk's output of the head, and its gradient, in order."""

    def adopt(self, place: Callable[[nn.Parameter], Tensor], ready: Callable[[nn.Parameter], None]) -> None:
        """The place that a gradient is added to, and who is told that it has all that a microbatch brings from here."""
        self._open, self._ready = place, ready

    @property
    def _parameters(self) -> tuple[nn.Parameter, nn.Parameter | None]:
        return self._head.weight, self._head.bias  # type: ignore[return-value]

    def logits(self, output: Tensor) -> Tensor:
        """All of them at once: [..., hidden] -> [..., V/t]."""
        logits = F.linear(output, *self._parameters)
        return logits if self._after is None else self._after(logits)

    def share(self, output: Tensor, batch: Batch, inverse_weight: Tensor) -> Tensor:
        """A microbatch's share of the step's mean loss. Where gradients are taken, backward fills it in."""
        if not torch.is_grad_enabled():
            return self.over(output, batch, inverse_weight, None)
        if not output.requires_grad:  # all that comes before the head is frozen
            output = output.detach().requires_grad_()
        return _Later.apply(self._enter(output), self, batch, inverse_weight)  # type: ignore[no-any-return]

    def over(self, hidden: Tensor, batch: Batch, scale: Tensor, gradient: Tensor | None) -> Tensor:
        """The sum of the loss over all chunks of `hidden` [..., hidden], times `scale`. With `gradient` it makes that of
        `hidden` in there, and adds the head's to theirs."""
        x, goals = hidden.flatten(0, -2), batch.targets.flatten()
        sizes, wider = list(self._at_once(len(x))), _wider(x.dtype)
        narrow = x.new_empty(sizes[0], len(self._parameters[0]))
        wide = narrow if self._after is None and wider == x.dtype else torch.empty_like(narrow, dtype=wider)
        notes = [self.note(space) for space in dict.fromkeys((narrow, wide))] if gradient is not None else []
        total, scale = x.new_zeros((), dtype=wider), scale.to(wider)
        into = [None] * len(sizes) if gradient is None else gradient.flatten(0, -2).split(sizes)
        for rows, targets, made in zip(x.split(sizes), goals.split(sizes), into, strict=True):
            spaces = narrow[: len(rows)], wide[: len(rows)]
            total += self._of_chunk(rows, targets, spaces, batch, scale, made)
        if gradient is not None:
            for parameter in self._parameters:
                if parameter is not None and parameter.requires_grad:
                    self._ready(parameter)
        notes.clear()
        return total * scale

    def _of_chunk(
        self, rows: Tensor, targets: Tensor, spaces: tuple[Tensor, Tensor], batch: Batch, scale: Tensor,
        made: Tensor | None,
    ) -> Tensor:  # fmt: skip
        """The loss of a chunk, whose logits are made in `spaces`, in the type of compute and wider. With `made` also the
        gradients: of `rows` in there."""
        weight, bias = self._parameters
        logits = torch.mm(rows, weight.detach().t(), out=spaces[0])
        if bias is not None:
            logits += bias.detach()
        if made is None:
            finished = logits if self._after is None else self._after(logits)
            return self._read(finished, targets, spaces[1], PLAIN)[1]
        self.watch(batch, "output", logits)
        finished, back = self._finished(logits)
        read, loss = self._read(finished, targets, spaces[1], self._terms)
        gradient = back(read.gradient(scale, self._terms))
        self.watch(batch, "output gradient", gradient)
        self._learn(gradient, rows)
        torch.mm(gradient, weight.detach(), out=made)
        return loss

    def _finished(self, logits: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """What the model makes of the head's output, and the way back for its gradient, in the type of compute."""
        if self._after is None:
            return logits, lambda gradient: gradient if gradient.dtype == logits.dtype else logits.copy_(gradient)
        with torch.enable_grad():
            leaf = logits.detach().requires_grad_()
            finished = self._after(leaf)
        return finished.detach(), lambda gradient: torch.autograd.grad(finished, leaf, gradient.to(finished.dtype))[0]

    def _read(self, logits: Tensor, targets: Tensor, wide: Tensor, terms: Terms) -> tuple[_Read, Tensor]:
        if wide.data_ptr() != logits.data_ptr():
            wide.copy_(logits)
        return _read(wide, targets, self._start, self._group, terms, out=wide)

    def _learn(self, gradient: Tensor, rows: Tensor) -> None:
        """Adds a chunk's part to the head's gradients, in the type in which they accumulate."""
        weight, bias = self._parameters
        if weight.requires_grad:
            into = self._open(weight)
            if into.dtype == gradient.dtype:
                into.addmm_(gradient.t(), rows)
            else:
                into.add_(gradient.t() @ rows)
        if bias is not None and bias.requires_grad:
            self._open(bias).add_(gradient.sum(0))


class _Later(Function):
    """The loss of a chunked microbatch: what backward makes is put into what forward gave."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, loss: ChunkedLoss, batch: Batch, inverse_weight: Tensor) -> Tensor:
        ctx.save_for_backward(hidden)
        ctx.loss, ctx.batch, ctx.inverse_weight = loss, batch, inverse_weight
        share = hidden.new_zeros((), dtype=_wider(hidden.dtype))
        ctx.share = share.detach()
        return share

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        (hidden,) = ctx.saved_tensors
        ctx.loss.need()
        gradient = torch.empty_like(hidden, memory_format=torch.contiguous_format)
        # What a backward begins with, fp16's scale, is in the gradients and not in the loss.
        ctx.share.copy_(ctx.loss.over(hidden, ctx.batch, ctx.inverse_weight * grads[0], gradient) / grads[0])
        return gradient, None, None, None


def _nobody(tensor: Tensor) -> None: ...


def _no_one() -> None: ...


def _unseen(batch: Batch, quantity: str, tensor: Tensor) -> None: ...


def _nowhere(parameter: nn.Parameter) -> Tensor:
    raise RuntimeError("no place for gradients has been given")
