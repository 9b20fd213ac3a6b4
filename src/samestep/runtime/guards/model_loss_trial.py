"""A trial that finds out by what a forward divides the loss that it returns: forwards on parts of the first batch.

Let A and B be a few samples of the batch, and AB both together. Of the rules of `building/model_loss.py` one is left for which

    c(A) L(A) + c(B) L(B) = c(AB) L(AB)            or for a sum  L(A) + L(B) = L(AB)

on these samples, and on the same with some labels masked, which tells a mean over samples from one over labels. A forward that takes
`num_items_in_batch` is run with 1 and with 2: where it returns half as much, it divides its sum by that, and otherwise by labels. Those
at the first place count unless it shifts them, which two more forwards show. Which tensor holds the labels, and which label does not count,
is read off the forward's call of `cross_entropy` (`counted_labels.py`). Tensors of zeros and ones may be masks whose ones, or zeros, the forward
counts: some ones are left out too, and where no other rule fits, that one is left. Each forward runs as in training, with the masks that the step draws, and what
it writes is put back. All ranks run as many.

More samples than a rank or a micro-batch has follow, since their number may select a factor or a count.
A count behind a guard against zero is taken before it; all labels of a part are masked for such a count. And what the forward detaches gets
other values in one more trial, since a loss such as `s / s.detach()` adds up in its values alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from samestep.building.loss_result import LEAST, UNNAMED
from samestep.building.model import loss_within
from samestep.building.model_loss import Labels, ModelLoss, Rule, moves_labels, name_in, returned_loss
from samestep.independence.roundings import limit_of_values
from samestep.runtime.assembly import Assembly
from samestep.runtime.axes import precision
from samestep.runtime.guards import counted_labels
from samestep.runtime.guards.counted_labels import GivenLabels, OtherDetached
from samestep.runtime.guards.repeat import Repeat
from samestep.runtime.ledger import outside_step
from samestep.runtime.loss_watch import LossWatch
from samestep.runtime.processes.messages import gather_values
from samestep.runtime.step_observer import Indices, StepBatch
from samestep.trees import map_tensors

_FEW = 8
"""Samples among which those of a trial are chosen."""
_FEW_ROWS = 3
"""Of these a trial takes so many."""
_Divisor = tuple[Rule, Labels]
"""What may divide a loss: a rule, and where it counts labels, which ones."""


@dataclass(frozen=True, slots=True)
class _Part:
    """The forward of some samples."""

    loss: float
    counts: dict[_Divisor, float]


_Variant = tuple[_Part, _Part, _Part]
"""The forwards of A, of B, and of both."""
_Found = tuple[bool, list[Any], str]
"""Whether the forward returns its sum, the divisors that fit, as plain values, the likeliest first, and why none does."""


@dataclass(frozen=True, slots=True)
class _Trial:
    """The forwards of a few samples of one rank."""

    loss: ModelLoss
    held: Assembly
    again: Repeat
    indices: Indices
    masks: list[Labels]
    """The masks whose ones, or zeros, the forward may count."""
    detaches_others: bool = False
    """Whether it runs with other values of what it detaches."""

    def run(self, indices: Indices, samples: Any, items: int = 1) -> _Part | None:
        """Run the forward of some samples; return None on other stages than the last."""
        around = OtherDetached() if self.detaches_others else nullcontext()
        with loss_within(self.held.model.module).given(items), self.held.parallel.precise.of_forward(), around:
            outputs, _ = self.again.run(indices, samples)
        if outputs is None:
            return None
        loss, own = returned_loss(outputs)
        labels = self.loss.labels
        known = [(rule, labels) for rule in Rule if _applies(rule, self.loss, own, labels.of(samples))]
        if self.loss.count is None and own is None:
            by_labels = (Rule.LABELS, Rule.NEXT_LABELS)
            known += [
                (rule, m) for m in self.masks for rule in by_labels if _applies(rule, self.loss, own, m.of(samples))
            ]
        if isinstance(own, Tensor) and LEAST in vars(own):
            self.held.objective.watch.least[UNNAMED] = vars(own)[LEAST][1]
        counts = {key: float(self.loss.counted(key[0], samples, own, loss.device, key[1])) for key in known}
        return _Part(float(loss), counts)

    def given_labels(self, samples: Any) -> tuple[list[tuple[Labels, bool]], bool, bool]:
        """Return the labels that the forward gives its losses, a tensor for each head, and whether more of them may be masked; whether
        it returns a count; and whether it detaches something; alike on all ranks.
        """
        with GivenLabels() as given:
            part = self.run(self.indices, samples)
        counts = part is not None and any(rule is Rule.RETURNED for rule, _ in part.counts)
        everyone = gather_values((given.found(samples), counts, given.detaches), self.held.parallel.mesh.size("world"))
        found = next((one for one, *_ in everyone if one), [(None, Labels().ignored, False)])
        heads = [(Labels(place, ignored), may_mask) for place, ignored, may_mask in found]
        return heads, any(one for _, one, _ in everyone), any(one for *_, one in everyone)

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
        labels = self.loss.labels.of(samples)
        assert labels is not None
        ignored = self.loss.labels.ignored
        some = labels.clamp(min=0).amax()
        changed = [counted_labels.with_first(samples, labels, value) for value in (some, ignored)]
        one, other = (self.run(self.indices, each) for each in changed)
        return one is not None and other is not None and abs(one.loss - other.loss) > self.allowed * abs(one.loss)

    def more(self) -> list[Indices]:
        """Return more samples than a rank or micro-batch has, twice and four times as many, up to those of the step: a number of samples may
        select what the forward computes.
        """
        step = self.held.parallel.program.step
        sizes = [times * step.microbatch_samples for times in (2, 4)]
        return [self.again.few(size) for size in sizes if len(self.again.everyone) >= size > _FEW_ROWS]

    @property
    def allowed(self) -> float:
        """Return the largest difference between two sides that counts as rounding, relative to the larger one."""
        return limit_of_values(precision.DTYPES[self.held.parallel.program.step.compute_dtype])


def find_rule(loss: ModelLoss, held: Assembly, batch: StepBatch, seed: int) -> str:
    """Find out what the loss of a forward is divided by; return why nothing fits, or an empty text.

    Collective over the world, see [Note: collective calls].
    """
    mesh = held.parallel.mesh
    mine = batch.shares(*mesh.data_share, 1)[0]
    again = Repeat(held, batch, loss, seed, lambda: None)
    call = loss_within(held.model.module)
    call.watch = LossWatch()
    with outside_step():
        found = _findings(_Trial(loss, held, again, again.few(_FEW), []))
        everyone = gather_values(found if len(mine) else None, mesh.size("world"))
        if not any(gather_values(bool(held.objective.watch.least), mesh.size("world"))):
            call.watch = None
    held.weights.store.calls.end_forward_only()
    known = [one for one in everyone if one is not None]
    if not known:  # there is nothing to see, as where all samples are masked
        return ""
    common = [key for key in known[0][1] if all(key in one[1] for one in known)]
    if not common:
        loss.returns_sum = known[0][0]
        return known[0][2]
    present = [] if loss.rule is None else _plain(loss.rule, loss.labels)
    word, place, ignored = present if present in common else common[0]
    loss.rule, loss.labels, loss.returns_sum = Rule(word), Labels(place, ignored), known[0][0]
    return ""


def _findings(trial: _Trial) -> _Found | None:
    """Run the forwards that distinguish the rules, as many on each rank; None where nothing can be seen."""
    held, world_size = trial.held, trial.held.parallel.mesh.size("world")
    samples = trial.again.read(trial.indices)
    heads, gives_count, detaches = trial.given_labels(samples)
    rows = counted_labels.telling_rows([head for head, _ in heads], samples, len(trial.indices))
    trial = replace(trial, indices=trial.indices[rows])
    samples, first = trial.again.read(trial.indices), len(rows) - 1
    which, may_mask = heads[0]
    trial.loss.labels = which
    labels, call = which.of(samples), loss_within(held.model.module)
    if call.takes_items and labels is not None:
        divides = any(gather_values(trial.divides_by_items(samples), world_size))
        if divides and labels.dim() < 2:
            return True, [_plain(Rule.LABELS, which)], ""
        if divides:
            counts = any(gather_values(trial.first_labels_count(samples), world_size))
            return True, [_plain(Rule.LABELS if counts else Rule.NEXT_LABELS, which)], ""
    has_ignored = labels is not None and bool((labels == which.ignored).any())
    may_mask = labels is not None and any(gather_values(has_ignored or may_mask or call.takes_items, world_size))
    trial.masks.extend(Labels(*one) for one in gather_values(counted_labels.masks_of(samples, labels), world_size)[0])
    masked = [which] * (may_mask and labels is not None) + [head for head, is_free in heads[1:] if is_free]
    masked += [one for one in trial.masks if not one.ignored]
    given = [samples, *(counted_labels.masked(samples, one.of(samples), one.ignored, first) for one in masked)]
    if gives_count:
        given += [counted_labels.masked(samples, one.of(samples), one.ignored, first, entirely=True) for one in masked]
    trials = [trial] * len(given)
    if detaches:
        given, trials = [*given, samples], [*trials, replace(trial, detaches_others=True)]
    firsts = [first] * len(given)
    for indices in trial.more():
        given, trials = [*given, trial.again.read(indices)], [*trials, replace(trial, indices=indices)]
        firsts.append(len(indices) // 2)
    cases = zip(given, trials, firsts, strict=True)
    variants = [variant for one, each, number in cases if (variant := each.variant(one, number)) is not None]
    found = _fitting(variants, trial) if variants else None
    if found is None or len(heads) < 2:
        return found
    names = [name_in(samples, head.of(samples)) or f"head_{number}" for number, (head, _) in enumerate(heads, 1)]
    return found[0], found[1], _unlike(names)


def _unlike(names: Sequence[str]) -> str:
    """Return why the loss of a forward with several heads, whose labels have these names, is refused where no rule fits."""
    terms = ", ".join(f'"{name}": (sum, count)' for name in names)
    return (
        f'loss = "model": the forward adds up a mean over the labels of each of {", ".join(names)}, with a count of its own, so that its '
        f"scalar does not say how parts of a batch add up. Use a loss function (outputs, batch) -> {{{terms}}}, or one rank "
        "with the whole batch as its micro-batch"
    )


_NO_COUNT = (
    'loss = "model": the forward returns a sum and a count, and the loss of parts of a batch is not theirs added up: the count is more for '
    "a part in which little or nothing counts, or the sum's gradient reads a statistic of the batch. Use a plain sum and count, also "
    "behind n.clamp(min=1), or one rank with the whole batch as its micro-batch"
)


def _plain(rule: Rule, labels: Labels) -> list[Any]:
    return [str(rule), labels.place, labels.ignored]


def _rows(samples: Any, rows: slice, num_samples: int) -> Any:
    return map_tensors(samples, lambda leaf: leaf[rows] if leaf.dim() and len(leaf) == num_samples else leaf)


def _applies(rule: Rule, loss: ModelLoss, own: Any, labels: Tensor | None) -> bool:
    if loss.count is not None:
        return rule is Rule.COUNT
    if rule is Rule.COUNT or (own is not None) != (rule is Rule.RETURNED) or not loss.may_be(rule):
        return False
    if rule is Rule.NEXT_LABELS:
        return labels is not None and labels.dim() > 1 and labels.shape[-1] > 1
    return rule is not Rule.LABELS or labels is not None


def _fitting(variants: Sequence[_Variant], trial: _Trial) -> _Found | None:
    """Return the rules that fit, the likeliest first; None where no loss is finite."""
    seen = [one for one in variants if all(math.isfinite(part.loss) for part in one)]
    if not seen or not any(part.loss for one in seen for part in one):
        return None
    moves = moves_labels(trial.held.model.module)
    known = list(seen[0][0].counts)
    order = sorted(known, key=lambda key: (key[1] in trial.masks, key[0] is Rule.NEXT_LABELS and not moves))
    errors = {key: max(_error(key, one) for one in seen) for key in order}
    limit = max(4 * min(errors.values(), default=0.0), 1e-2 * trial.allowed)
    fits = [_plain(*key) for key in order if errors[key] <= min(limit, trial.allowed)]
    a, b, both = (part.loss for part in seen[0])
    if known and known[0][0] is Rule.RETURNED and abs(a + b - both) <= trial.allowed * max(abs(a), abs(b), abs(both)):
        return True, fits, _NO_COUNT
    return (
        False,
        fits,
        f'loss = "model": the forward returns {both:.9g} for {len(trial.indices)} samples, and {a:.9g} and {b:.9g} for two parts of '
        "them, which is neither their sum nor their mean over samples, over labels that count, or over the ones of a mask. Set loss = "
        "samestep.model_loss(count=...) with what it divides by, or a loss function (outputs, batch) -> (sum, count), or "
        "one rank with the whole batch as its micro-batch",
    )


def _error(key: _Divisor, variant: _Variant) -> float:
    """Return by how much the forwards miss a rule, relative to what they return."""
    rule, adds_up = key[0], key[0] in (Rule.SUM, Rule.RETURNED)
    first, second, both = (part.loss if adds_up else part.loss * part.counts[key] for part in variant)
    a, b, ab = (part.counts[key] for part in variant)
    if rule is Rule.RETURNED and a + b != ab:
        return math.inf
    return abs(first + second - both) / max(abs(first), abs(second), abs(both), 1e-30)
