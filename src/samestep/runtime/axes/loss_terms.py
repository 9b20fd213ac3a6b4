"""Losses of several terms on real tensors (twin of `strategies/loss_terms.py`): one sum and one count that stand for all terms.

With N the number of samples of the step, and C_k the count of term k over all of them, a micro-batch of n samples returns

    sum = sum over k of S_k N / C_k      count = n            so that the step's sum over its count is sum over k of S_k / C_k

and everything after it is as for a loss of one term. A term that counts nothing in the whole step adds nothing.

The counts of later micro-batches are needed behind the first forward. A count that follows from the batch alone is what the loss
returns with any outputs of fitting shapes: those of the first micro-batch, whose sizes are changed as those of the batch are. What
it returned there is held against what it returns on the real outputs; a count that outputs decide is refused, unless every rank has
one micro-batch, whose real count is exchanged.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from samestep.building.loss import IGNORED_LABEL
from samestep.building.loss_result import Amount, Loss, LossResult, as_number, is_plain_sum, is_same_count, loss_result
from samestep.building.torch_seams import disable_current_modes
from samestep.errors import JobError
from samestep.models.spec import LossNames
from samestep.program.program import Program
from samestep.runtime.ledger import owned
from samestep.runtime.loss_watch import LossWatch
from samestep.runtime.processes.mesh import Mesh
from samestep.state.snapshot import preserve_function
from samestep.strategies.loss_terms import OWNER, axis_of
from samestep.tracing.pending_logits import PendingLogits, detach_logits
from samestep.trees import map_tensors, tensors_in

Other = tuple[Any, float]
"""This rank's part of a later micro-batch, and its number of samples."""


Indices = np.ndarray[Any, np.dtype[np.int64]]
Shares = Callable[[int, int, int], Sequence[Indices]]
"""Returns the samples of each micro-batch of a rank, among so many ranks with so many micro-batches."""


class OwnSamples:
    """The loss that is a sum over samples: a micro-batch needs no other. `WholeBatch` is its counterpart for one over the batch."""

    is_whole: ClassVar[bool] = False
    """Whether the loss sees all samples of the step at once."""
    reads_ahead: ClassVar[bool] = False
    """Whether later micro-batches are read before their forward."""
    moved: str = ""
    """The name of a term whose count is another than its batch has shown; empty if there is none."""

    def begin_step(self, shares: Shares) -> None:
        """Do nothing: nothing is held of a step."""

    def result(self, microbatch: int, outputs: Any, part: Any, loss: Loss) -> LossResult:
        """Return the result of the loss of a micro-batch."""
        return loss_result(loss(outputs, part))

    def summed(self, result: LossResult, outputs: Any, part: Other, others: Callable[[], Iterable[Other]]) -> Amount:
        """Return the sum and the count that stand for all terms of a micro-batch.

        `part` is this rank's part of it; `others` returns those of the later micro-batches.
        """
        raise NotImplementedError

    def ends(self, number: int, at_once: int) -> list[int]:
        """Return where the parts end in which so many samples are evaluated; there is at least one."""
        return [*range(at_once, number, at_once), number]

    def begin_evaluation(self, parts: Sequence[Sequence[Indices]]) -> None:
        """Do nothing, as `begin_step` does."""


class OneTerm(OwnSamples):
    """The loss of one term: a sum that a step divides at its end by its count."""

    def __init__(self, names: LossNames) -> None:
        self._names = names

    def summed(self, result: LossResult, outputs: Any, part: Other, others: Callable[[], Iterable[Other]]) -> Amount:
        """Return the sum and the count of the only term.

        Raises:
            JobError: the loss has returned several, of which the trace has seen none.
        """
        return result.only if len(result.terms) == 1 else result.checked(self._names).only


class PerhapsPlainSum(OneTerm):
    """The loss of one term that may be a plain sum, which a step divides by nothing: multiplied by the samples, by which it divides."""

    def __init__(self, loss: Loss, names: LossNames) -> None:
        super().__init__(names)
        self._loss, self._num_samples = loss, 1

    def begin_step(self, shares: Shares) -> None:
        """Note the number of samples of the step."""
        self._num_samples = len(shares(0, 1, 1)[0])

    def summed(self, result: LossResult, outputs: Any, part: Other, others: Callable[[], Iterable[Other]]) -> Amount:
        """Return the sum and the count of the only term, as `OneTerm` does."""
        total, count = super().summed(result, outputs, part, others)
        return (total * self._num_samples, count) if is_plain_sum(self._loss) else (total, count)


def sums_of(loss: Loss, program: Program, mesh: Mesh, watch: LossWatch, names: LossNames | None = None) -> OwnSamples:
    """Return what sums a loss over samples in a layout, with the `watch` over it; the `names` are by default those of the loss that was traced.

    Raises:
        JobError: a loss that was not traced has several terms, and the layout has no group of the ranks that add up counts.
    """
    traced, layout = program.step.model.loss_names, program.step.layout
    if len((names or traced).terms) < 2:
        return PerhapsPlainSum(loss, names or traced) if hasattr(loss, "is_plain_sum") else OneTerm(names or traced)
    axis = axis_of(program.step)
    if names is None:
        return SeveralTerms(loss, watch, traced, mesh.groups[axis] if axis else None, layout.cp)
    everyone = "world" if layout.world_size == layout.dp_cp_size else ""
    group = mesh.groups.get(axis or everyone)
    if group is None and layout.dp_cp_size > 1:
        raise JobError(
            "loss-names-change",
            f"a loss of the terms {', '.join(names.terms)} for one backward: in a layout with tp or pp the loss of the run must have "
            "several terms too. Use several backwards, with means that add up",
        )
    return SeveralTerms(loss, watch, names, group, layout.cp)


@dataclass(slots=True)
class SeveralTerms(OwnSamples):
    """The terms of a loss in one step after the other, on one rank."""

    reads_ahead: ClassVar[bool] = True
    loss: Loss
    watch: LossWatch
    names: LossNames
    group: dist.ProcessGroup | None
    """The ranks whose counts are summed; None for a single one."""
    copies: int
    """Number of ranks that each have a part of the tokens of the same samples."""
    _factors: Tensor | None = field(default=None, init=False)
    """N / C_k of each term, 0 where C_k is (float64)."""
    _counts_any: Tensor | None = field(default=None, init=False)
    """1 if any term counts something in the step, else 0."""
    _expected: list[Tensor] = field(default_factory=list, init=False)
    """The counts of the micro-batches to come, as they follow from their batch."""
    moved: str = field(default="", init=False)
    """The name of a term whose count on the real outputs is another than that which followed from the batch."""

    def begin_step(self, shares: Shares) -> None:
        """Forget the counts of the step before."""
        self._factors, self._expected, self.moved = None, [], ""

    def summed(self, result: LossResult, outputs: Any, sized: Other, others: Callable[[], Iterable[Other]]) -> Amount:
        """Return the sum and the count that stand for all terms of a micro-batch.

        `sized` is this rank's part of it; `others` returns those of the later micro-batches, of which the first call of a step asks.

        Collective over the ranks of `dp_cp` in the first call of a step, see [Note: collective calls].
        """
        part, size = sized
        counts = self._counts_of(result)
        if self._factors is None or self._counts_any is None:
            self._exchange(counts, outputs, part, size, others)
        else:
            self._compare(counts)
        assert self._factors is not None
        assert self._counts_any is not None
        factors = dict(zip(self.names.terms, self._factors, strict=True))
        parts = [total * factors[name] for name, (total, _) in result.terms.items()]
        return torch.stack(parts).sum(), self._counts_any * (size / self.copies)

    def _exchange(
        self, counts: Tensor, outputs: Any, part: Any, size: float, others: Callable[[], Iterable[Other]]
    ) -> None:
        samples = counts.new_full((1,), size / self.copies)
        totals = torch.cat([counts * (size > 0), samples])
        for other, num_samples in others():
            if num_samples:
                self._expected.append(self._counts_on(fitted(outputs, part, other), other, outputs, part))
                totals = totals + torch.cat([self._expected[-1], counts.new_full((1,), num_samples / self.copies)])
        if self.group is not None:
            with owned(OWNER):
                dist.all_reduce(totals, group=self.group)
        counted, everyone = totals[:-1], totals[-1]
        if least := self.watch.least:  # all ranks know it, or some rank has counted enough
            counted = counted.maximum(counted.new_tensor([least.get(name, 0.0) for name in self.names.terms]))
        self._factors = torch.where(counted > 0, everyone / counted.clamp(min=1e-300), 0.0)
        self._counts_any = (counted.sum() > 0).double()

    def _counts_of(self, result: LossResult) -> Tensor:
        amounts = result.checked(self.names).terms
        like = torch.zeros((), dtype=torch.float64, device=result.sums.device)
        return torch.stack([as_number(amounts[name][1] if name in amounts else 0.0, like) for name in self.names.terms])

    def _counts_on(self, outputs: Any, part: Any, first_outputs: Any, first: Any) -> Tensor:
        """Return the counts of the loss on outputs that stand in for those of a micro-batch.

        Raises:
            JobError: the loss fails on them.
        """
        errors: list[Exception] = []
        for values in (outputs, fitted(first_outputs, first, part, picks=True)):
            try:
                with torch.no_grad(), disable_current_modes(), preserve_function(self.loss):
                    return self._counts_of(self.watch.result(self.loss, functools.partial(self.loss, values, part)))
            except Exception as error:  # of the user's own code, which may raise anything
                errors.append(error)
        words = str(errors[0]).strip().partition("\n")[0]
        raise JobError(
            "loss-count-from-outputs",
            f"the counts of the terms {', '.join(self.names.terms)} of a later micro-batch do not follow from its batch alone: the loss "
            f"fails on outputs of another micro-batch ({type(errors[0]).__name__}: {words}). Use one micro-batch a rank",
        ) from errors[0]

    def _compare(self, counts: Tensor) -> None:
        """Hold the counts of a micro-batch against what followed from its batch; on a GPU the host would wait for them."""
        if not self._expected or counts.device.type != "cpu":
            return
        expected = self._expected.pop(0)
        pairs = zip(self.names.terms, expected.tolist(), counts.tolist(), strict=True)
        others = (name for name, first, now in pairs if not is_same_count(first, now))
        self.moved = self.moved or next(others, "")


def fitted(outputs: Any, batch: Any, other: Any, *, picks: bool = False) -> Any:
    """Return detached outputs of a batch with the sizes that those of another batch have, as far as the batches show them.

    A size that both batches have in one place stays; one that differs there is replaced wherever outputs have it, and so is a
    product of neighbouring sizes, as that of flattened tokens. With `picks` so is the number of places that masks or labels pick.
    """
    pairs = list(zip(tensors_in(batch), tensors_in(other), strict=False))
    in_place: dict[tuple[int, int], int] = {}
    anywhere: dict[int, int] = {}
    for old, another in pairs:
        if picks and not old.is_floating_point() and not old.is_complex():
            for left_out in (0, IGNORED_LABEL):
                anywhere[int((old != left_out).sum())] = int((another != left_out).sum())
        for width, dim in itertools.product((1, 2), range(min(old.dim(), another.dim()))):
            size_before, after = (math.prod(leaf.shape[dim : dim + width]) for leaf in (old, another))
            in_place.setdefault((dim, size_before), after)
            anywhere.setdefault(size_before, after)

    def fit(leaf: Tensor) -> Tensor:
        if isinstance(leaf, PendingLogits):
            return detach_logits(leaf).with_hidden(fit(leaf.made.hidden))
        leaf = leaf.detach()
        for dim, size in enumerate(leaf.shape):
            wanted = in_place.get((dim, size), anywhere.get(size, size)) if not picks else anywhere.get(size, size)
            if wanted != size and size:
                leaf = leaf.index_select(dim, torch.arange(wanted, device=leaf.device) % size)
        return leaf

    return map_tensors(outputs, fit)
