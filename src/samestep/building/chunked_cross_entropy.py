"""Cross entropy of a linear head, in chunks of tokens: its logits never exist whole (twin of `strategies/chunked_loss.py`).

A head W [V, D] makes of hidden states h [N, D] the logits x = f(h W' + b) [N, V], f being elementwise: a cast, a scale, a
softcap. A loss needs of them two numbers a row, and for smoothed labels a third one:

    m = max_j x_j     lse = m + log sum_j exp(x_j - m)     loss = lse - (1 - e) x_label - (e / V) sum_j x_j

and for the entropy lse - mean another one, mean = sum_j exp(x_j - lse) x_j. So the forward makes the logits of some tokens, keeps
lse, 4 bytes a token, and drops them. The backward makes them once
more, and has in each chunk, with a, c and d the gradients of loss, lse and mean of a row:

    p  = exp(x - lse)                                        probabilities, already divided by their sum
    dx = (a + c + d (1 + x - mean)) p - a (1 - e) [j = label] - a e / V         gradient of the logits
    dh = (f'(x) dx) W          of these rows alone
    dW += (f'(x) dx)' h        added up over the chunks in float32 at least

The product is computed three times instead of twice in a backward, and one chunk of logits is all that is ever alive. To
recompute logits instead of keeping them: Wijmans et al. 2024, arXiv:2411.09009; in chunks: Hsu et al. 2024,
arXiv:2410.10989, whose gradients are computed in the forward, where their scale is not known.

Where `tp` cuts the vocabulary a rank has V / tp of the columns: m is the largest over the ranks, and the sums are summed
over them, in two all_reduces for all tokens, as without chunks; the backward needs none.

Legend: N tokens of a micro-batch, D features, V classes, of a rank where they are cut.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from samestep.building.loss import RunFunction, run_uncompiled
from samestep.building.torch_seams import DisableTorchFunction
from samestep.trees import tree_map


class Place(NamedTuple):
    """The place of a tensor among the arguments of an elementwise function."""

    number: int
    """Index among the further tensors; -1 for the logits."""


LOGITS = Place(-1)
"""The place of the logits themselves."""
_CASTS = (Tensor.float, Tensor.double, Tensor.half, Tensor.bfloat16, Tensor.to, Tensor.type)


@dataclass(frozen=True, slots=True)
class Elementwise:
    """An elementwise function of the logits, as the model's code calls it."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    """Positional arguments, with a `Place` for every tensor."""
    kwargs: dict[str, Any]
    writes: bool
    """Whether it writes into the logits in place."""

    def of(self, logits: Tensor, others: Sequence[Tensor]) -> Tensor:
        """Return the function's result for a chunk of logits, [n, V]."""
        logits = logits.clone() if self.writes else logits

        def tensor_at(place: Any) -> Any:
            return (logits if place is LOGITS else others[place.number]) if isinstance(place, Place) else place

        args, kwargs = tree_map(tensor_at, (self.args, self.kwargs), is_leaf=lambda leaf: isinstance(leaf, Place))
        with DisableTorchFunction():  # the model's modes have seen the call already
            result: Tensor = self.function(*args, **kwargs)
        return result


Reduce = Callable[[Tensor, str], object]
"""Reduces a tensor over ranks in place; the text says how: the "largest" of each element, or "sums"."""


@dataclass(frozen=True, slots=True)
class Chunking:
    """The division of a micro-batch's logits into chunks of tokens, as a rank works through them."""

    tokens: int
    """Tokens of a chunk."""
    num_ranks: int = 1
    """Ranks among which the vocabulary is cut."""
    rank: int = 0
    """Number of this rank among them."""
    reduce: Reduce | None = None
    """Reduces a tensor over these ranks in its place; None where a rank has the whole vocabulary."""
    run: RunFunction = run_uncompiled
    """Calls the functions of a chunk's logits, where gradients are taken of what they return."""

    def first_class(self, size: int) -> int:
        """Return the first class of this rank, which has `size` of them."""
        return self.rank * size

    def chunks(self, rows: int) -> Iterator[slice]:
        """Yield the rows of each chunk; without rows there is one, so that dtypes are known."""
        for start in range(0, max(rows, 1), self.tokens):
            yield slice(start, min(start + self.tokens, rows))


@dataclass(frozen=True, slots=True)
class Head:
    """The linear layer that makes logits of hidden states, without its tensors."""

    chunking: Chunking
    functions: tuple[Elementwise, ...] = ()

    @property
    def only_casts(self) -> bool:
        """Whether the logits are the product in another dtype, at most."""
        return all(call.function in _CASTS for call in self.functions)

    def given(
        self, product: Tensor, others: Sequence[Tensor], run: RunFunction
    ) -> tuple[Tensor, tuple[torch.dtype, ...]]:
        """Return what functions of logits are given, and the casts that are left to them: all, in a graph, of a product that is only cast."""
        if run is run_uncompiled or not self.only_casts:
            return self.after(product, others), ()
        like, casts = product.new_empty(0), []
        for function in self.functions:
            like = function.of(like, others)
            casts.append(like.dtype)
        return product, tuple(casts)

    def after(self, product: Tensor, others: Sequence[Tensor]) -> Tensor:
        """Return logits, given the product with the head's weight."""
        for function in self.functions:
            product = function.of(product, others)
        return product


def row_losses(
    head: Head,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    others: Sequence[Tensor],
    labels: Tensor | None,
    smoothing: float = 0.0,
    *,
    has_means: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the cross entropy, the log-sum-exp and with `has_means` the expected logit of each row of the logits, [N] each.

    hidden [N, D], weight [V, D], bias [V], labels int64 [N], numbers of classes of the whole vocabulary; a row whose label
    is none of them has no meaning. Without labels the first result has none, nor the
    last one without `has_means`. Gradients flow to hidden, weight, bias and
    `others`, once.

    Collective over the ranks of the chunking: every one calls it; if one does not, the others wait until the time limit.
    """
    run = head.chunking.run if torch.is_grad_enabled() else run_uncompiled
    losses, log_sums, means = _RowLosses.apply(hidden, labels, (head, run), smoothing, has_means, weight, bias, *others)
    return losses, log_sums, means


class _RowLosses(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        labels: Tensor | None,
        how: tuple[Head, RunFunction],
        smoothing: float,
        has_means: bool,
        weight: Tensor,
        bias: Tensor | None,
        *others: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        head, run = how
        columns = None if labels is None else _own_columns(labels, weight.shape[0], head.chunking)
        parts: list[tuple[Tensor, ...]] = []
        for rows in head.chunking.chunks(hidden.shape[0]):
            product = torch.nn.functional.linear(hidden[rows], weight, bias)
            logits, casts = head.given(product, others, run)
            del product
            parts.append(run(_numbers_of_rows, logits, casts, _at(columns, rows), bool(smoothing), has_means))
            del logits
        sums = _Sums(*(torch.cat(part) for part in zip(*parts, strict=True)))
        if head.chunking.reduce is not None:
            sums = _over_ranks(sums, head.chunking.reduce, bool(smoothing), has_means)
        largest, powers, right, total, weighted = sums
        logs = powers.log()
        num_classes = weight.shape[0] * head.chunking.num_ranks
        log_sums = largest + logs
        losses = logs - (right - largest) * (1 - smoothing)
        if smoothing:
            losses = losses - (total / num_classes - largest) * smoothing
        ctx.head, ctx.run, ctx.smoothing, ctx.num_classes = head, run, smoothing, num_classes
        means = largest + weighted / powers
        ctx.columns = columns
        ctx.save_for_backward(hidden, weight, bias, log_sums, means, *others)
        ctx.set_materialize_grads(False)
        return losses, log_sums, means

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *of_results: Tensor | None) -> Any:
        hidden, weight, bias, log_sums, means, *others = ctx.saved_tensors
        head, zeros = ctx.head, torch.zeros_like(log_sums)
        of_losses, of_log_sums = (zeros if gradient is None else gradient for gradient in of_results[:2])
        of_means = of_results[2]
        needs = ctx.needs_input_grad
        gradients = _Gradients(hidden, weight, bias, others, (needs[0], *needs[5:]), head)
        for rows in head.chunking.chunks(hidden.shape[0]):
            product, logits, casts = gradients.logits(rows, ctx.run)
            # Where the gradient of the product is that of the logits, in another dtype, nothing else reads them.
            scores = logits if product is None else logits.detach().clone()
            of_means_here = None if of_means is None else (of_means[rows], means[rows])
            powers = ctx.run(
                _gradient_of_rows, scores, casts, _at(ctx.columns, rows),
                (of_losses[rows], of_log_sums[rows], log_sums[rows], of_means_here), (ctx.smoothing, ctx.num_classes),
            )  # fmt: skip
            gradients.add(rows, product, logits, powers)
            del product, logits, scores, powers
        of_hidden, of_weight, of_bias, *of_others = gradients.results()
        return of_hidden, None, None, None, None, of_weight, of_bias, *of_others


class _Columns(NamedTuple):
    """The column of each row's label among the classes of this rank."""

    own: Tensor
    elsewhere: Tensor
    """Whether the label is not among this rank's classes."""


def _own_columns(labels: Tensor, size: int, chunking: Chunking) -> _Columns:
    columns = labels - chunking.first_class(size)
    elsewhere = (columns < 0) | (columns >= size)
    return _Columns(columns.masked_fill(elsewhere, 0), elsewhere)


_Rows = tuple[Tensor, Tensor] | None
"""The own columns of some rows, and which of their labels are elsewhere; None without labels."""


def _at(columns: _Columns | None, rows: slice) -> _Rows:
    return None if columns is None else (columns.own[rows], columns.elsewhere[rows])


def _logits(product: Tensor, casts: Sequence[torch.dtype]) -> Tensor:
    """Return logits that may be written: the product after its casts, which in a graph is never in memory."""
    for dtype in casts:
        product = product.to(dtype)
    return product.clone() if torch.compiler.is_compiling() else product


def _numbers_of_rows(
    product: Tensor, casts: Sequence[torch.dtype], columns: _Rows, has_total: bool, has_means: bool
) -> tuple[Tensor, ...]:
    """Return the `_Sums` of some rows, of which uncompiled nothing is left in the product."""
    logits = _logits(product, casts)
    largest = logits.amax(dim=-1)
    right = torch.zeros_like(largest)
    if columns is not None:
        right = logits.gather(-1, columns[0][:, None])[:, 0].masked_fill(columns[1], 0.0)
    total = logits.sum(dim=-1) if has_total else torch.zeros_like(largest)
    logits.sub_(largest[:, None])
    weighted = (logits.exp() * logits).sum(dim=-1) if has_means else torch.zeros_like(largest)
    return largest, logits.exp_().sum(dim=-1), right, total, weighted


def _gradient_of_rows(
    product: Tensor,
    casts: Sequence[torch.dtype],
    columns: _Rows,
    sums: tuple[Tensor, Tensor, Tensor, tuple[Tensor, Tensor] | None],
    smoothed: tuple[float, int],
) -> Tensor:
    """Return the gradient of the product of some rows, in which uncompiled nothing is left of it.

    `sums` are the gradients of losses and log-sum-exps, the latter themselves, and the gradients and values of expected logits.
    """
    of_losses, of_log_sums, log_sums, of_means = sums
    smoothing, num_classes = smoothed
    shifted = _logits(product, casts).sub_(log_sums[:, None])
    factor = (of_losses + of_log_sums)[:, None]
    if of_means is not None:
        factor = factor + of_means[0][:, None] * (shifted + (1 + log_sums - of_means[1])[:, None])
    powers = shifted.exp_().mul_(factor)
    if columns is not None:
        at_label = of_losses.masked_fill(columns[1], 0.0) * (smoothing - 1)
        powers.scatter_add_(-1, columns[0][:, None], at_label[:, None].to(powers.dtype))
    if smoothing:
        powers.sub_((of_losses * (smoothing / num_classes))[:, None])
    return powers.to(product.dtype)


class _Sums(NamedTuple):
    """The numbers of each row, of this rank's classes or of all: the sums are those of powers exp(x - largest)."""

    largest: Tensor
    powers: Tensor
    right: Tensor
    """The logit of the label."""
    total: Tensor
    """The sum of all logits."""
    weighted: Tensor
    """The sum of the powers times x - largest."""


def _over_ranks(own: _Sums, reduce: Reduce, has_total: bool, has_means: bool) -> _Sums:
    """Combine each rank's numbers of the rows into those of the whole vocabulary."""
    most = own.largest.clone()
    reduce(most, "largest")
    below = own.largest - most
    parts = [own.powers * below.exp(), own.right]
    parts += [own.total] if has_total else []
    parts += [(own.weighted + own.powers * below) * below.exp()] if has_means else []
    sums = torch.stack(parts)
    reduce(sums, "sums")
    return _Sums(most, sums[0], sums[1], sums[2] if has_total else own.total, sums[-1] if has_means else own.weighted)


class _Gradients:
    """The gradients of a backward, added up chunk by chunk."""

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        others: Sequence[Tensor],
        needed: tuple[bool, ...],
        head: Head,
    ) -> None:
        self._hidden, self._weight, self._bias, self._head = hidden, weight, bias, head
        self._others = [other.detach().requires_grad_(wanted) for other, wanted in zip(others, needed[3:], strict=True)]
        self._single = hidden.shape[0] <= head.chunking.tokens
        self._of_hidden = torch.empty_like(hidden) if needed[0] else None
        self._of_weight = self._zeros(weight) if needed[1] else None
        self._of_bias = self._zeros(bias) if needed[2] and bias is not None else None
        self._of_others = [torch.zeros_like(tensor) if tensor.requires_grad else None for tensor in self._others]

    def _zeros(self, param: Tensor) -> Tensor:
        """Return a sum of several chunks' gradients, in float32 at least, or of one chunk's in the weight's dtype."""
        is_half = param.dtype in (torch.float16, torch.bfloat16) and not self._single
        return torch.zeros_like(param, dtype=torch.float32 if is_half else param.dtype)

    def logits(self, rows: slice, run: RunFunction) -> tuple[Tensor | None, Tensor, tuple[torch.dtype, ...]]:
        """Return the product of some rows with the head's weight, and the logits computed from it, with their autograd
        graph; and the casts that are left.

        Where only casts stand between them, there is no graph, and nothing keeps the product.
        """
        product = torch.nn.functional.linear(self._hidden[rows], self._weight, self._bias)
        if self._head.only_casts:
            return None, *self._head.given(product, self._others, run)
        with torch.enable_grad():
            product.requires_grad_()
            return product, self._head.after(product, self._others), ()

    def add(self, rows: slice, product: Tensor | None, logits: Tensor, of_logits: Tensor) -> None:
        """Add the gradients that the logits of some rows bring."""
        of_product = of_logits
        if product is not None:
            wanted = [product, *(tensor for tensor in self._others if tensor.requires_grad)]
            of_product, *more = torch.autograd.grad(logits, wanted, of_logits, allow_unused=True)
            places = [index for index, tensor in enumerate(self._others) if tensor.requires_grad]
            for index, gradient in zip(places, more, strict=True):
                total = self._of_others[index]
                if gradient is not None and total is not None:
                    total += gradient
        of_product = of_product.to(self._weight.dtype)
        if self._of_hidden is not None:
            torch.mm(of_product, self._weight, out=self._of_hidden[rows])
        if self._of_weight is not None:
            if self._of_weight.dtype == of_product.dtype:
                self._of_weight.addmm_(of_product.T, self._hidden[rows])
            else:
                self._of_weight += of_product.T @ self._hidden[rows]
        if self._of_bias is not None:
            self._of_bias += of_product.sum(dim=0)

    def results(self) -> list[Tensor | None]:
        """Return the gradients of hidden states, weight, bias and further tensors; None where none is needed."""
        of_weight = None if self._of_weight is None else self._of_weight.to(self._weight.dtype)
        of_bias = None if self._of_bias is None or self._bias is None else self._of_bias.to(self._bias.dtype)
        return [self._of_hidden, of_weight, of_bias, *self._of_others]
