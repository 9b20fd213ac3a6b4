"""Whether a loss is a sum over samples: the loss of a few real samples against that of their halves.

A step adds the sums and counts of all micro-batches and ranks, so a loss must be a sum over samples. Samples AB are run as one and as two
halves A and B (`repeat.py`). Both losses are then computed in float64, in every precision of the run, on the outputs of AB and on slices of
them, so that no rounding of a forward matters:

    loss(AB) = loss(A) + loss(B)        sums and counts of each term, and the gradients of each sum by the outputs, to 1e-9

Where an output or a tensor of the batch has its samples is not guessed: it is the dimension in which A and B add up to AB. A tensor that
is the same in all three, such as a table of classes, belongs to all samples (`divided_samples.py`).

| what is changed | what it shows |
| --- | --- |
| nothing, twice | a loss that keeps something between its calls |
| outputs moved a little, and far | what couples samples where outputs are equal, as behind a head of zeros; limits of sums |
| the labels, masks or values of one half | a count or sum that is guarded: a part in which nothing counts; a factor that a value selects |
| as many samples as one device has, which are these repeated | a factor or count that a number of samples selects |
| other outputs before | a loss with a running mean |

A count that is guarded against zero counts what it was before (`loss_watch.py`). Outputs or batches that cannot be divided so are no
reason to reject: then each half's loss is that of its own forward (`Repeat.excess_of_halves`). Under cp each rank has a slice of the
tokens, and the parts are halves along the tokens too.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from samestep.building.loss_result import UNNAMED, VALUES, Loss, is_same_count
from samestep.building.over_samples import Keeping, within
from samestep.independence.kept_state import acts_by_calls
from samestep.independence.roundings import EXACT, LEAST_MEAN
from samestep.runtime.guards.divided_samples import PARTS, WHOLE, DividedSamples, Samples, along_tokens, divisions
from samestep.runtime.guards.evaluated_loss import RAISED, EvaluatedLoss, LossValue, evaluate_alone
from samestep.state.snapshot import KeptValues, preserve_function

_MOVED, _FAR, _FURTHEST = 0.01, 3.0, 1000.0
"""By so much of their mean size outputs are moved."""
_NUMBERS = 16
"""Around so many numbers of the loss's code values are tried."""
_OTHERS = 8
"""So many times a loss is called on other outputs before it is called again on the first ones: a running mean of it has moved by half."""
_KEEPS = (
    "its {} is {:.9g} at first and {:.9g} when it is called again on the same{}, so it keeps something between calls"
)
_KEEPS_OF_PART = (
    "samestep.after_step gives a buffer a value that a part of the samples decides, and each rank and micro-batch has others. Use "
    "one of samestep.batch_mean or batch_sum, or samestep.whole_batch(loss)"
)
_MOST_ELEMENTS = 2**21
"""Samples with more elements are not repeated."""
_GOES_BACK = "it calls backward() by itself, and so adds a gradient of its own for each part of a batch"


@dataclass(frozen=True, slots=True)
class LossTrial:
    """The outcome of a trial."""

    reason: str = ""
    """Why the loss is not a sum over what was cut; empty if it is."""
    judged: bool = True
    """Whether there was something to judge: a finite sum that counts something."""
    is_zero: bool = False
    """Whether the sums of the whole and of the halves are all zero."""
    is_indivisible: bool = False
    """Whether outputs, batch or loss cannot be divided, so that only forwards of the halves show what the loss is."""
    of_tokens: bool = False
    """Whether the parts were those of the tokens."""
    moving: str = ""
    """The name of a term whose count is another on outputs that are moved; empty if there is none."""
    keeps: str = ""
    """The name of something that the loss keeps of its samples, and does not read; empty if it keeps nothing."""
    acts_by_calls: bool = False
    """Whether its sum is another one after a number of calls."""
    counts: dict[str, float] = field(default_factory=dict, compare=False)
    """The count of each term of the whole."""


def judge(
    loss: Loss,
    together: Samples,
    halves: tuple[Samples, Samples],
    graded: Sequence[bool] | None = None,
    keeping: Loss | None = None,
    *,
    is_new: bool = True,
    num_samples: int = 0,
    began: KeptValues | None = None,
) -> LossTrial:
    """Return whether a loss is a sum over samples, of some that were run as one and as two halves.

    `graded` says through which tensors of the outputs a backward goes; by default through all but weights. What the loss keeps
    between calls, or the function `keeping` of the user's that it calls, is as before afterwards. Every rank of a tensor cut calls it
    alike, since the loss may communicate over the cut. Values around the numbers in the code of a loss are tried if it `is_new`.
    One device computes the loss of `num_samples` at once: so many are tried too, of these repeated, if they are few elements.
    `began` is what the loss kept before the step.
    """
    ways = divisions(together, halves, graded)
    if not ways:
        return LossTrial("no dimension of its outputs holds the samples", is_indivisible=True)
    outcome = _first_that_passes(loss, ways, keeping or loss, _NUMBERS if is_new else 0, num_samples)
    if began is not None and not (outcome.reason or outcome.keeps or outcome.acts_by_calls):
        outcome = replace(outcome, acts_by_calls=_began_otherwise(loss, ways[0], keeping or loss, began))
    has_own = None in ways[0].places[: ways[0].num_outputs]  # which differs by roundings
    return replace(outcome, is_indivisible=True) if outcome.reason and has_own else outcome


def judge_tokens(loss: Loss, samples: Samples, length: int, keeping: Loss | None = None) -> LossTrial:
    """Return whether a loss is a sum over tokens, of samples with so many on this rank."""
    outcome = _first_that_passes(loss, [along_tokens(samples, length)], keeping or loss, None)
    return replace(outcome, of_tokens=True)


def _first_that_passes(
    loss: Loss, ways: Sequence[DividedSamples], keeping: Loss, num_numbers: int | None, num_samples: int = 0
) -> LossTrial:
    """Return the first outcome without a reason; `num_numbers` is None if the parts are those of tokens."""
    outcomes = []
    try:
        for some in ways:
            outcomes.append(_judge_division(loss, some, keeping, num_numbers, num_samples))
            if not outcomes[-1].reason:
                return outcomes[-1]
    except torch.OutOfMemoryError:
        return LossTrial(judged=False)
    return outcomes[0]


def _judge_division(
    loss: Loss, some: DividedSamples, keeping: Loss, num_numbers: int | None, num_samples: int
) -> LossTrial:
    memory = _memory(loss, some, keeping)
    if memory.reason:
        return memory
    with preserve_function(keeping) as snapshot:
        tried = functools.partial(EvaluatedLoss, loss, snapshot)  # each call begins from what the loss has kept
        outcome = _compare_sums(tried, some)
        if outcome.judged and not outcome.reason:
            outcome = _try_moved(tried, some, outcome)
        if outcome.judged and not outcome.reason and num_numbers is not None:
            numbers = sorted(snapshot.before.numbers, key=abs)[:num_numbers]
            reason = _try_other_half(tried, some, numbers) or _try_more(tried, some, numbers, num_samples)
            outcome = replace(outcome, reason=reason)
    return replace(outcome, keeps=memory.keeps, acts_by_calls=memory.acts_by_calls)


# -- sums, counts and gradients --------------------------------------------------------------------


def _compare_sums(tried: Callable[[], EvaluatedLoss], some: DividedSamples) -> LossTrial:
    """Evaluate the loss on all samples, twice, and on the halves, in float64 if it can be, and compare."""
    error: Exception | None = None
    for raised in RAISED:
        values = tried()
        try:
            with within(values), Keeping(values):
                together, again, *halves = [values.evaluate(some, part, raised=raised) for part in (WHOLE, *PARTS)]
        except torch.OutOfMemoryError:
            raise
        except Exception as caught:  # of the user's own code, which may raise anything
            error = error or caught
            continue
        return _outcome(together, again, halves, values)
    cause = error.__cause__ if error is not None and error.__cause__ is not None else error
    words = str(cause).strip().partition("\n")[0]
    text = (
        f"it cannot be evaluated on a part of a micro-batch ({type(cause).__name__}: {words}), where a tensor of all samples, as a table of "
        "classes, works as one that the loss or the model holds"
    )
    return LossTrial(text, is_indivisible=True)


def _outcome(together: LossValue, again: LossValue, halves: list[LossValue], values: EvaluatedLoss) -> LossTrial:
    if together.went_back:
        return LossTrial(_GOES_BACK)
    if reason := _another_sum(together, again):
        return LossTrial(reason)
    if values.parts_differ():
        return LossTrial(_KEEPS_OF_PART)
    outcome = _compare_halves(together, halves)
    if outcome.judged and not outcome.reason:  # what the whole has found over all samples is a constant the second time
        outcome = replace(outcome, reason=_compare_gradients(again, halves))
    return replace(
        outcome, counts={name: count for name, (_, count) in together.amounts.items() if not name.startswith(VALUES)}
    )


def _compare_halves(together: LossValue, halves: list[LossValue]) -> LossTrial:
    judged = {name: together.amounts[name] for name in together.amounts if together.counts(name)}
    of_parts = {name: amount for name, amount in judged.items() if not _is_of_no_sample(name, amount, halves)}
    if not judged or (len(judged) < len(together.amounts) and not of_parts):
        return LossTrial(judged=False)
    for index, word in ((1, "count"), (0, "sum")):
        for name, amount in (of_parts or judged).items():
            total, both = amount[index], [half.amounts.get(name, (0.0, 0.0))[index] for half in halves]
            least = 0.0 if index else LEAST_MEAN * abs(amount[1])
            if not abs(total - sum(both)) <= together.limit * max(least, abs(total), *map(abs, both)):
                text = f"its {word}{_of(name)} is {total:.9g} for the whole and {both[0]:.9g} and {both[1]:.9g} for the halves"
                rounds = f", and it is rounded to {together.rounded_to}. Use a loss that computes it in float32"
                return LossTrial(text + rounds if together.rounded_to and not index else text)
    return LossTrial(is_zero=not any(total for value in (together, *halves) for total, _ in value.amounts.values()))


def _compare_gradients(together: LossValue, halves: list[LossValue]) -> str:
    """Return the reason against a loss whose gradients by the outputs are not those of the halves added up."""
    for name, of_whole in together.gradients.items():
        if _is_of_no_sample(name, together.amounts[name], halves):
            continue
        none: list[Tensor | None] = [None] * len(of_whole)
        for gradient, *both in zip(of_whole, *(half.gradients.get(name, none) for half in halves), strict=True):
            if gradient is None:
                continue
            parts = [part for part in both if part is not None]
            total = sum(parts, torch.zeros_like(gradient))
            size = max([LEAST_MEAN, *(float(part.abs().max()) for part in (gradient, *parts) if part.numel())])
            off = float((gradient - total).abs().max()) if gradient.numel() else 0.0
            if math.isfinite(size) and off > together.limit * size:
                return (
                    f"its gradient{_of(name)} by the outputs of a half is off by {off / size:.1e} when the half is alone, though its values add up. "
                    "A statistic of the batch within detach() does this, or a hook on a gradient"
                )
    return ""


def _is_of_no_sample(name: str, together: tuple[float, float], halves: Sequence[LossValue]) -> bool:
    """Return whether a named term is the same for any samples, as a penalty on weights is: its mean is then right for any parts."""
    of_halves = [half.amounts.get(name) for half in halves]
    return (
        name != UNNAMED
        and all(amount is not None and amount[1] == together[1] for amount in of_halves)
        and all(amount is not None and abs(amount[0] - together[0]) <= EXACT * abs(together[0]) for amount in of_halves)
    )


def _of(name: str) -> str:
    return f" of {name}" if name != UNNAMED else ""


# -- what is changed -------------------------------------------------------------------------------


def _try_moved(tried: Callable[[], EvaluatedLoss], some: DividedSamples, outcome: LossTrial) -> LossTrial:
    """Try outputs that are moved a little, and far; a loss that is not defined for them was tried on the real ones.

    A loss that is zero everywhere, as one with a margin may be, has shown nothing yet.
    """
    is_zero, counts, moving = outcome.is_zero, outcome.counts, ""
    for by in (_MOVED, _FAR, _FURTHEST):
        outcome = _compare_sums(tried, some.moved(by))
        if outcome.reason.startswith("its "):
            return outcome
        is_zero &= not outcome.judged or outcome.is_zero
        moved_counts = outcome.counts if by < _FURTHEST else {}
        moving = moving or next(
            (name for name in moved_counts if not is_same_count(counts.get(name, 0.0), moved_counts[name])), ""
        )
    return LossTrial(judged=not is_zero, moving=moving)


def _try_other_half(tried: Callable[[], EvaluatedLoss], some: DividedSamples, numbers: Sequence[float]) -> str:
    """Return the reason against a loss that does not add up where a half has other labels or values."""
    second: LossValue | None = None  # of the values that it has, unless it reads those of all samples
    for changed, has_other_second in some.with_other_half(numbers):
        try:
            # Of sums and counts alone, since a backward takes as long as the loss.
            with within(values := tried()), Keeping(values):
                parts = (values.evaluate(changed, part, raised=True, gradients=False) for part in PARTS)
                together, first = next(parts), next(parts)
                other = next(parts) if second is None or has_other_second or not values.is_unread else second
        except torch.OutOfMemoryError:
            raise
        except Exception:  # of the user's own code, which need not be defined for such values
            continue
        second = second if has_other_second or not values.is_unread else other
        halves = [first, other]
        if reason := _compare_halves(together, halves).reason:
            if any(math.isnan(total) for half in halves for total, _ in half.amounts.values()):
                return (
                    f"{reason}, one with other labels: it is a mean over the labels that count, or has such a part. Use "
                    "samestep.mean_over('tokens', loss), or a named term for each part"
                )
            return (
                f"{reason}, one with other labels or values, so a part with few labels that count, or none, would count otherwise, or a value of "
                "all samples selects a number. Use a plain sum and count, also after n.clamp(min=1), which is the count of the whole "
                "step then, a named term for each count, or samestep.whole_batch(loss)"
            )
    return ""


def _try_more(
    tried: Callable[[], EvaluatedLoss], some: DividedSamples, numbers: Sequence[float], num_samples: int
) -> str:
    """Return the reason against a loss that does not add up over more samples than were run, as one that a count of them changes; up to
    `num_samples`. A loss that is not defined for them was tried on fewer.
    """
    while sum(some.sizes) < num_samples and some.num_elements <= _MOST_ELEMENTS:
        outcomes = ((twice, _compare_sums(tried, twice)) for twice in some.doubled())
        defined = next(((twice, outcome) for twice, outcome in outcomes if not outcome.is_indivisible), None)
        if defined is None:
            return ""
        some, outcome = defined
        if outcome.reason:
            return (
                f"{outcome.reason}, for {sum(some.sizes)} samples. A layout gives each rank or micro-batch a part of them, so the number of "
                "samples, or of those that count, selects a number: samestep.whole_batch(loss) is given all samples at once"
            )
        if some.is_small and (reason := _try_other_half(tried, some, numbers)):
            return reason
    return ""


def _memory(loss: Loss, some: DividedSamples, keeping: Loss) -> LossTrial:
    """Return what the loss keeps between its calls: a reason where its sum is another once it was called on other outputs.

    Of the other outputs those count first on which it is defined.
    """
    for moved, raised in itertools.product(map(some.moved, (_FURTHEST, _FAR)), RAISED):
        alone = functools.partial(evaluate_alone, loss, raised=raised)
        try:
            with preserve_function(keeping) as snapshot:
                first = alone(some)
                later_state = KeptValues(keeping) if snapshot.changed() else None
            with preserve_function(keeping):
                alone(some, PARTS[1])
                keeps = later_state.changed() if later_state is not None else ""
            if later_state is not None and not keeps:  # the number of its calls
                with preserve_function(keeping):
                    is_alike = functools.partial(_is_alike, first, functools.partial(alone, some))
                    return LossTrial(acts_by_calls=acts_by_calls(keeping, is_alike))
            with preserve_function(keeping):
                for _ in range(_OTHERS):
                    alone(moved)
                reason = _another_sum(first, alone(some), " after others")
            return LossTrial(reason, keeps=keeps)
        except torch.OutOfMemoryError:
            raise
        except Exception:  # of the user's own code, which may not be defined for other outputs
            continue
    return LossTrial()


def _began_otherwise(loss: Loss, some: DividedSamples, keeping: Loss, began: KeptValues) -> bool:
    """Return whether the sum of a loss is another one in the state in which the step has found it."""
    try:
        with preserve_function(keeping):
            now = evaluate_alone(loss, some, raised=False)
        with preserve_function(keeping):
            began.restore(generators=False)
            return bool(_another_sum(evaluate_alone(loss, some, raised=False), now))
    except Exception:  # of the user's own code
        return False


def _is_alike(first: LossValue, evaluate: Callable[[], LossValue]) -> bool:
    return not _another_sum(first, evaluate())


def _another_sum(first: LossValue, again: LossValue, words: str = "") -> str:
    """Return how the sums of a loss differ that was called twice, with `words` on what was called in between; empty if they are the same."""
    for name, (total, _) in first.amounts.items():
        last = again.amounts.get(name, (math.nan, 0.0))[0]
        if math.isfinite(total) and not abs(last - total) <= EXACT * abs(total):
            return _KEEPS.format(f"sum{_of(name)}", total, last, words)
    return ""
