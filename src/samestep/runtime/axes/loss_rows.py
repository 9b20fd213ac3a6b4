"""A loss over the whole batch that is a sum over rows: each rank computes the rows of its samples.

Let L = l_1 + ... + l_B, where l_i compares sample i with all others. A rank with the rows R computes the sum of l_i over i in R, on
the outputs z of all samples, with its gradient by all of them, and ranks sum these gradients:

    dL/dz = sum over ranks, sum over i of R,  dl_i/dz

So a matrix of pairs has |R| x B elements on a rank in place of B x B; the rows of one micro-batch are computed at a time. That a loss
is such a sum is tried on some rows: of all of them at once, and of their halves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from samestep.building.loss import with_graph
from samestep.building.loss_result import LossResult
from samestep.building.loss_scope import of_rows
from samestep.errors import JobError
from samestep.independence.roundings import limit_of_values

MOST_TRIED = 8
"""Rows on which a loss is tried."""


def computed(
    loss: Callable[[], LossResult], parts: Sequence[Tensor], roots: Sequence[Tensor], *, differentiates: bool
) -> tuple[LossResult, Tensor, list[Tensor | None]]:
    """Return the result of the rows in some parts, their sum, and its gradients by the roots, None of one that the loss does not use;
    a part without rows adds nothing.
    """
    total, gradients = torch.zeros(()), list[Tensor | None]([None] * len(roots))
    found: LossResult | None = None
    for part in parts if any(map(len, parts)) else parts[:1]:
        rows, factor = (part, 1.0) if len(part) else (part.new_zeros(1), 0.0)
        with of_rows(rows):
            result = loss()
        own = with_graph(result.only[0], result.counted, list(roots)) * factor
        if differentiates:
            new = torch.autograd.grad(own, roots, allow_unused=True)
            gradients = [a if b is None else b if a is None else a + b for a, b in zip(gradients, new, strict=True)]
        total = total.to(own) + own.detach()
        found = _added(found, result, factor)
    assert found is not None, "at least one part"
    return found, total, gradients


def tried(loss: Callable[[], LossResult], num_rows: int, roots: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Try whether a loss is a sum over rows: that of the first ones is that of their halves; return it with its graph, and the roots.

    Raises:
        JobError: it is none; all ranks raise it, since they try the same rows.
    """
    rows = torch.arange(min(num_rows, MOST_TRIED), device=roots[0].device)
    with of_rows(rows):
        whole = loss()
    if len(whole.terms) > 1:
        raise JobError(
            f"samestep.whole_batch(rows=True) marks one sum over rows, and the loss returned the terms {', '.join(whole.terms)}: (sum over "
            "the rows, their number) works, and so does rows=False"
        )
    if len(rows) > 1:
        _compare(whole, loss, rows)
    return with_graph(whole.only[0], whole.counted, list(roots)), [*roots]


def _compare(of_all: LossResult, loss: Callable[[], LossResult], rows: Tensor) -> None:
    found = [of_all]
    for some in (rows[: len(rows) // 2], rows[len(rows) // 2 :]):
        with of_rows(some), torch.no_grad():
            found.append(loss())
    for name, whole in found[0].amounts.items():
        halves = [one.amounts.get(name) for one in found[1:]]
        for index, what in enumerate(("sum", "count")):
            parts = [half[index].detach().double() for half in halves if half is not None]
            number = whole[index].detach().double()
            off = (sum(parts) - number).abs() if len(parts) == 2 else torch.ones(())
            limit = min(map(limit_of_values, (whole[index].dtype, torch.float32)))
            if off > limit * max(1.0, *(float(one.abs()) for one in (number, *parts))):
                raise JobError(
                    f"samestep.whole_batch(rows=True) marks a sum over rows, and the {what}{f' of {name}' if name else ''} of {len(rows)} rows "
                    f"is {float(number):.6g}, and of their halves {' and '.join(f'{float(one):.6g}' for one in parts) or 'missing'}: (sum over "
                    "the rows that the loss is given, their number) works, and so does rows=False"
                )


def _added(before: LossResult | None, one: LossResult, factor: float) -> LossResult:
    """Return the sums and counts of two results, the second one times a factor, without a graph."""
    terms, values = (
        {
            name: tuple(
                part.detach() * factor + (0.0 if known is None else known[name][index])
                for index, part in enumerate(pair)
            )
            for name, pair in new.items()
        }
        for new, known in (
            (one.terms, None if before is None else before.terms),
            (one.values, None if before is None else before.values),
        )
    )
    return LossResult(terms, values)  # type: ignore[arg-type]
