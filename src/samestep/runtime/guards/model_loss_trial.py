"""A trial that finds out by what a forward divides the loss that it returns: forwards on parts of the first batch.

Let A and B be a few samples of the batch, and AB both together. Of the rules of `building/model_loss.py` one is left for which

    c(A) L(A) + c(B) L(B) = c(AB) L(AB)            or for a sum  L(A) + L(B) = L(AB)

on these samples, and on the same with some labels masked, which tells a mean over samples from one over labels. A forward that takes
`num_items_in_batch` is run with 1 and with 2: where it returns half as much, it divides its sum by that, and otherwise by labels. Those
at the first place count unless it shifts them, which two more forwards show. Each forward runs as in training, with the masks that the
step draws, and what it writes is put back. All ranks run as many.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from samestep.building.loss import IGNORED_LABEL
from samestep.building.model import loss_within
from samestep.building.model_loss import ModelLoss, Rule, labels_of, returned_loss
from samestep.building.own_loss import moves_labels
from samestep.runtime.assembly import Assembly
from samestep.runtime.axes import precision
from samestep.runtime.guards.repeat import Repeat
from samestep.runtime.ledger import outside_step
from samestep.runtime.microbatches import StepBatch
from samestep.runtime.processes.messages import gather_values
from samestep.runtime.step_observer import Indices
from samestep.trees import tree_map_only

_ALLOWED = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 3e-2}
"""The largest difference of the two sides, relative to the larger, by the dtype of the forward."""


@dataclass(frozen=True, slots=True)
class _Part:
    """The forward of some samples."""

    loss: float
    counts: dict[Rule, float]


_Variant = tuple[_Part, _Part, _Part]
"""The forwards of A, of B, and of both."""
_Found = tuple[bool, list[str], str]
"""Whether the forward returns its sum, the rules that fit, the likeliest first, and why none does."""


@dataclass(frozen=True, slots=True)
class _Trial:
    """The forwards of a few samples of one rank."""

    loss: ModelLoss
    held: Assembly
    again: Repeat
    indices: Indices

    def run(self, indices: Indices, samples: Any, items: int = 1) -> _Part | None:
        """Run the forward of some samples; return None on other stages than the last."""
        with loss_within(self.held.model.module).given(items), precision.raise_islands(self.held.parallel.program):
            outputs, _ = self.again.run(indices, samples)
        if outputs is None:
            return None
        loss, own = returned_loss(outputs)
        rules = [rule for rule in Rule if _applies(rule, self.loss, own, samples)]
        counts = {rule: float(self.loss.counted(rule, samples, own, loss.device)) for rule in rules}
        return _Part(float(loss), counts)

    def variant(self, samples: Any, first: int) -> _Variant | None:
        """Run the forwards of the `first` samples, of the others, and of all; None on other stages than the last."""
        number = len(self.indices)
        rows = (slice(0, first), slice(first, None), slice(None))
        parts = [self.run(self.indices[part], _rows(samples, part, number)) for part in rows]
        found = [part for part in parts if part is not None]
        return (found[0], found[1], found[2]) if len(found) == 3 else None

    def divides_by_items(self, samples: Any) -> bool:
        """Return whether the forward divides by the number that it is given."""
        one, half = self.run(self.indices, samples), self.run(self.indices, samples, items=2)
        if one is None or half is None or not math.isfinite(one.loss):
            return False
        return abs(one.loss - 2 * half.loss) <= self.allowed * abs(one.loss)

    def first_labels_count(self, samples: Any) -> bool:
        """Return whether a label at the first place changes the loss, which it does not where the forward shifts labels."""
        labels = labels_of(samples)
        assert labels is not None
        some = labels.clamp(min=0).amax()
        one, other = (self.run(self.indices, _with_first_labels(samples, value)) for value in (some, IGNORED_LABEL))
        return one is not None and other is not None and abs(one.loss - other.loss) > self.allowed * abs(one.loss)

    @property
    def allowed(self) -> float:
        """Return the largest difference between two sides that counts as rounding, relative to the larger one."""
        return _ALLOWED[precision.DTYPES[self.held.parallel.program.step.compute_dtype]]


def find_rule(loss: ModelLoss, held: Assembly, batch: StepBatch, seed: int) -> str:
    """Find out what the loss of a forward is divided by; return why nothing fits, or an empty text.

    Collective over the world, see [Note: collective calls].
    """
    mesh = held.parallel.mesh
    mine = batch.shares(mesh.index("dp"), held.parallel.program.step.layout.dp, 1)[0]
    few = mine[:3] if len(mine) else batch.shares(0, 1, 1)[0][:1]  # what an empty rank runs counts nothing
    first = max(1, len(few) - 1)
    indices = few if len(few) > 1 else np.concatenate([few, few])
    trial = _Trial(loss, held, Repeat(held, batch, loss, seed, lambda: None), indices)
    with outside_step():
        found = _findings(trial, first)
        everyone = gather_values(found if len(mine) else None, mesh.size("world"))
    held.weights.store.end_forward_only()
    known = [one for one in everyone if one is not None]
    if not known:  # there is nothing to see, as where all samples are masked
        return ""
    common = [Rule(word) for word in known[0][1] if all(word in one[1] for one in known)]
    if not common:
        return known[0][2]
    loss.rule, loss.returns_sum = common[0], known[0][0]
    return ""


def _findings(trial: _Trial, first: int) -> _Found | None:
    """Run the forwards that distinguish the rules, as many on each rank; None where nothing can be seen."""
    held = trial.held
    samples = trial.again.read(trial.indices)
    labels, call = labels_of(samples), loss_within(held.model.module)
    if call.takes_items and labels is not None:
        divides = any(gather_values(trial.divides_by_items(samples), held.parallel.mesh.size("world")))
        if divides and labels.dim() < 2:
            return True, [str(Rule.LABELS)], ""
        if divides:
            counts = any(gather_values(trial.first_labels_count(samples), held.parallel.mesh.size("world")))
            return True, [str(Rule.LABELS if counts else Rule.NEXT_LABELS)], ""
    has_ignored = labels is not None and bool((labels == IGNORED_LABEL).any())
    may_mask = labels is not None and any(
        gather_values(has_ignored or call.takes_items, held.parallel.mesh.size("world"))
    )
    given = [samples, *([_masked(samples, first)] if may_mask else [])]
    variants = [variant for one in given if (variant := trial.variant(one, first)) is not None]
    return _fitting(variants, trial) if variants else None


def _rows(samples: Any, rows: slice, num_samples: int) -> Any:
    return tree_map_only(Tensor, lambda leaf: leaf[rows] if leaf.dim() and len(leaf) == num_samples else leaf, samples)


def _masked(samples: Any, first: int) -> Any:
    """Return samples of which the first ones have some more labels masked: half of each, or the first one's only label."""
    labels = labels_of(samples)
    assert labels is not None
    changed = labels.clone()
    if labels.dim() > 1:
        changed[:first, labels.shape[1] // 2 :] = IGNORED_LABEL
    elif first > 1:
        changed[0] = IGNORED_LABEL
    return tree_map_only(Tensor, lambda leaf: changed if leaf is labels else leaf, samples)


def _with_first_labels(samples: Any, value: Any) -> Any:
    labels = labels_of(samples)
    assert labels is not None
    changed = labels.clone()
    changed[:, 0] = value
    return tree_map_only(Tensor, lambda leaf: changed if leaf is labels else leaf, samples)


def _applies(rule: Rule, loss: ModelLoss, own: Any, samples: Any) -> bool:
    if loss.count is not None:
        return rule is Rule.COUNT
    if rule is Rule.COUNT or (own is not None) != (rule is Rule.RETURNED):
        return False
    labels = labels_of(samples)
    if rule is Rule.NEXT_LABELS:
        return labels is not None and labels.dim() > 1 and labels.shape[-1] > 1
    return rule is not Rule.LABELS or labels is not None


def _fitting(variants: Sequence[_Variant], trial: _Trial) -> _Found | None:
    """Return the rules that fit, the likeliest first; None where no loss is finite."""
    seen = [one for one in variants if all(math.isfinite(part.loss) for part in one)]
    if not seen or not any(part.loss for one in seen for part in one):
        return None
    moves = moves_labels(trial.held.model.module)
    order = sorted(seen[0][0].counts, key=lambda rule: rule is Rule.NEXT_LABELS and not moves)
    errors = {rule: max(_error(rule, one) for one in seen) for rule in order}
    limit = max(4 * min(errors.values()), 1e-2 * trial.allowed)
    fits = [str(rule) for rule in order if errors[rule] <= min(limit, trial.allowed)]
    a, b, both = (part.loss for part in seen[0])
    return (
        False,
        fits,
        f'loss = "model": the forward returns {both:.9g} for {len(trial.indices)} samples, and {a:.9g} and {b:.9g} for two parts of '
        "them, which is neither their sum nor their mean over samples or over labels that are not -100: loss = "
        "samestep.model_loss(count=...) with what it divides by works, and so does a loss function (outputs, batch) -> (sum, count), or "
        "one rank with the whole batch as its micro-batch",
    )


def _error(rule: Rule, variant: _Variant) -> float:
    """Return by how much the forwards miss a rule, relative to what they return."""
    adds_up = rule in (Rule.SUM, Rule.RETURNED)
    first, second, both = (part.loss if adds_up else part.loss * part.counts[rule] for part in variant)
    a, b, ab = (part.counts[rule] for part in variant)
    if rule is Rule.RETURNED and a + b != ab:
        return math.inf
    return abs(first + second - both) / max(abs(first), abs(second), abs(both), 1e-30)
