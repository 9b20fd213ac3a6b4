"""A trial that finds out by what a forward divides the loss that it returns: forwards on parts of the first batch.

Let A and B be a few samples of the batch, and AB both together. Of the rules of `building/model_loss.py` one is left for which

    c(A) L(A) + c(B) L(B) = c(AB) L(AB)            or for a sum  L(A) + L(B) = L(AB)

in each of these variants:

| variant | what it shows |
| --- | --- |
| the samples as they are | whether a rule fits at all |
| some labels are masked, of each head that shows its labels | a mean over samples, or over labels |
| all labels of a part are masked, if the forward returns a count | a count behind a guard against zero |
| some ones of a tensor of zeros and ones are left out | a mask whose ones, or zeros, the forward counts, if no other rule fits |
| more samples than a rank or a micro-batch has | a factor or a count that their number selects |
| other values of what the forward detaches | a loss such as `s / s.detach()`, which adds up in its values alone |

A forward that takes `num_items_in_batch` is run with 1 and with 2: where it returns half as much, it divides its sum by that, and otherwise by
labels. Those at the first place count unless it shifts them, which two more forwards show. Each forward runs as in training, with the masks
that the step draws, and what it writes is put back. All ranks run as many.

A forward that calls `cross_entropy` or `nll_loss` shows there which tensor its labels are, or are made of, and which label does not count
(`ignore_index`). More labels may be masked in a trial where the forward looks up nothing by them, as an embedding of the same tensor does.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from samestep.building.loss_result import LEAST, UNNAMED
from samestep.building.model import loss_within
from samestep.building.model_loss import Labels, ModelLoss, Rule, labels_of, moves_labels, name_in, returned_loss
from samestep.datasets.values import rows_of
from samestep.independence.roundings import limit_of_values
from samestep.runtime.assembly import Assembly
from samestep.runtime.axes import precision
from samestep.runtime.guards.repeat import Repeat
from samestep.runtime.ledger import outside_step
from samestep.runtime.loss_watch import LossWatch
from samestep.runtime.processes.messages import gather_values
from samestep.runtime.step_observer import Indices
from samestep.trees import map_tensors, tensors_in

_FEW = 8
"""Samples among which those of a trial are chosen."""
_FEW_ROWS = 3
"""Of these a trial takes so many."""
_Divisor = tuple[Rule, Labels]
"""What may divide a loss: a rule, and where it counts labels, which ones."""


class _Part(NamedTuple):
    """The forward of some samples."""

    loss: float
    counts: dict[_Divisor, float]


class _Variant(NamedTuple):
    """Samples of which the `first` ones are A, and the others B."""

    indices: Indices
    samples: Any
    first: int
    detaches_others: bool = False

    def rows(self, rows: slice) -> Any:
        """Return some of the samples."""
        number = len(self.indices)
        return rows_of(self.samples, range(number)[rows], number)


class _Shown(NamedTuple):
    """What the forwards of one rank show."""

    returns_sum: bool
    divisors: list[Any]
    """Those that fit, as plain values, the likeliest first."""
    reason: str
    """Why none does."""


@dataclass(frozen=True, slots=True)
class _Trial:
    """The forwards of a few samples of one rank."""

    loss: ModelLoss
    again: Repeat
    masks: list[Labels] = field(default_factory=list)
    """The masks whose ones, or zeros, the forward may count."""

    @property
    def assembly(self) -> Assembly:
        """The assembly whose forwards run."""
        return self.again.assembly

    def run(self, indices: Indices, samples: Any, items: int = 1, *, detaches_others: bool = False) -> _Part | None:
        """Run the forward of some samples; return None on other stages than the last."""
        within = loss_within(self.assembly.model.module).given(items)
        around = OtherDetached() if detaches_others else nullcontext()
        with within, self.assembly.parallel.precise.of_forward(), around:
            outputs, _ = self.again.run(indices, samples)
        if outputs is None:
            return None
        loss, count = returned_loss(outputs)
        tried = [(rule, self.loss.labels) for rule in Rule]
        if self.loss.count is None and count is None:
            tried += [(rule, mask) for mask in self.masks for rule in (Rule.LABELS, Rule.NEXT_LABELS)]
        if isinstance(count, Tensor) and LEAST in vars(count):
            self.assembly.objective.watch.least[UNNAMED] = vars(count)[LEAST][1]
        counts = {
            (rule, labels): float(self.loss.counted(rule, samples, count, loss.device, labels))
            for rule, labels in tried
            if _applies(rule, self.loss, count, labels.of(samples))
        }
        return _Part(float(loss), counts)

    def everyone(self, value: Any) -> list[Any]:
        """Return the values of all ranks."""
        return gather_values(value, self.again.world_size)

    def parts(self, variant: _Variant) -> list[_Part]:
        """Run the forwards of A, of B, and of both; return none on other stages than the last."""
        others = variant.detaches_others
        rows = (slice(variant.first), slice(variant.first, None), slice(None))
        parts = [self.run(variant.indices[some], variant.rows(some), detaches_others=others) for some in rows]
        return [part for part in parts if part is not None]

    def differ(self, part: _Part | None, other: _Part | None, times: int = 1) -> bool:
        """Return whether a loss is not so many times another one, up to roundings; not where there is none."""
        if part is None or other is None:
            return False
        return not abs(part.loss - times * other.loss) <= self.allowed * abs(part.loss)

    @property
    def allowed(self) -> float:
        """Return the largest difference between two sides that counts as rounding, relative to the larger one."""
        return limit_of_values(precision.DTYPES[self.assembly.parallel.program.step.compute_dtype])


def find_rule(loss: ModelLoss, again: Repeat) -> str:
    """Find out what the loss of a forward is divided by; return why nothing fits, or an empty text. A rule that it has stays if it fits.

    Collective over the world, see [Note: collective calls].
    """
    assembly, known = again.assembly, loss.labels
    present = [] if loss.rule is None else _plain((loss.rule, known))
    trial = _Trial(loss, again, [known] if loss.rule in (Rule.LABELS, Rule.NEXT_LABELS) else [])
    call = loss_within(assembly.model.module)
    call.watch = LossWatch()
    with outside_step():
        shown_here = _shown(trial)
        everyone = trial.everyone(tuple(shown_here) if shown_here is not None and len(again.mine) else None)
        shown = [_Shown(*values) for values in everyone if values]
        if not any(trial.everyone(bool(assembly.objective.watch.least))):
            call.watch = None
    assembly.weights.store.end_forward_only()
    if not shown:  # there is nothing to see, as where all samples are masked
        loss.labels = known
        return ""
    common = [key for key in shown[0].divisors if all(key in other.divisors for other in shown)]
    loss.returns_sum = shown[0].returns_sum
    if not common:
        return shown[0].reason
    word, place, ignored = present if present in common else common[0]
    loss.rule, loss.labels = Rule(word), Labels(place, ignored)
    return ""


def _shown(trial: _Trial) -> _Shown | None:
    """Run the forwards that distinguish the rules, as many on each rank; None where nothing can be seen."""
    again, loss = trial.again, trial.loss
    indices = again.few(_FEW)
    samples = again.read(indices)
    with LabelWatch() as watch:
        part = trial.run(indices, samples)
    counts = part is not None and any(rule is Rule.RETURNED for rule, _ in part.counts)
    everyone = trial.everyone((watch.shown(samples), counts, watch.detaches))
    shown = next((shown for shown, *_ in everyone if shown), [(None, Labels().ignored, False)])
    heads = [Labels(place, ignored) for place, ignored, _ in shown]
    rows = telling_rows(heads, samples, len(indices))
    indices, loss.labels = indices[rows], heads[0]
    samples = again.read(indices)
    labels, takes_items = loss.labels.of(samples), loss_within(trial.assembly.model.module).takes_items
    if takes_items and labels is not None:
        halved = trial.run(indices, samples), trial.run(indices, samples, items=2)
        divides = halved[0] is not None and math.isfinite(halved[0].loss) and not trial.differ(*halved, times=2)
        if any(trial.everyone(divides)):
            return _Shown(True, [_plain((_rule_of_items(trial, indices, samples, labels), loss.labels))], "")
    has_ignored = labels is not None and bool((labels == loss.labels.ignored).any())
    may_mask = any(trial.everyone(labels is not None and (has_ignored or shown[0][2] or takes_items)))
    trial.masks.extend(Labels(*mask) for mask in trial.everyone(masks_of(samples, labels))[0])
    masked = [loss.labels] * (may_mask and labels is not None)
    masked += [head for head, (_, _, is_free) in zip(heads[1:], shown[1:], strict=True) if is_free]
    masked += [mask for mask in trial.masks if not mask.ignored]
    first = len(rows) - 1
    ways = (False, True) if any(gives_count for _, gives_count, _ in everyone) else (False,)
    variants = [_Variant(indices, samples, first)]
    variants += [
        _Variant(indices, masked_in(samples, head, first, entirely=way), first) for way in ways for head in masked
    ]
    if any(detaches for *_, detaches in everyone):
        variants.append(_Variant(indices, samples, first, detaches_others=True))
    step = trial.assembly.parallel.program.step
    for size in (2 * step.microbatch_samples, 4 * step.microbatch_samples):
        if len(again.everyone) >= size > _FEW_ROWS:
            more = again.few(size)
            variants.append(_Variant(more, again.read(more), len(more) // 2))
    parts = [parts for variant in variants if (parts := trial.parts(variant))]
    result = _fitting(parts, trial, len(rows)) if parts else None
    if result is None or len(heads) < 2:
        return result
    names = [name_in(samples, head.of(samples)) or f"head_{number}" for number, head in enumerate(heads, 1)]
    return result._replace(reason=_unlike(names))


def _rule_of_items(trial: _Trial, indices: Indices, samples: Any, labels: Tensor) -> Rule:
    """Return which labels a forward sums over: a label at the first place changes the loss unless the forward shifts labels."""
    if labels.dim() < 2:
        return Rule.LABELS
    parts = []
    for value in (labels.clamp(min=0).amax(), trial.loss.labels.ignored):
        changed = labels.clone()
        changed[:, 0] = value
        parts.append(trial.run(indices, _replaced(samples, labels, changed)))
    return Rule.LABELS if any(trial.everyone(trial.differ(parts[0], parts[1]))) else Rule.NEXT_LABELS


def _unlike(names: Sequence[str]) -> str:
    """Return why the loss of a forward with several heads, whose labels have these names, is refused where no rule fits."""
    terms = ", ".join(f'"{name}": (sum, count)' for name in names)
    return (
        f'loss = "model": the forward adds up a mean over the labels of each of {", ".join(names)}, with a count of its own, so that its '
        f"scalar does not say how parts of a batch add up. Use a loss function (outputs, batch) -> {{{terms}}}, or one rank "
        "with the whole batch as its micro-batch"
    )


_NO_COUNT = (
    'loss = "model": the forward returns a sum and a count, and the loss of parts of a batch is not theirs added up. Either the count is more '
    "for a part with few labels that count, or none, or the sum's gradient reads a statistic of the batch. Use a plain sum and count, also "
    "after n.clamp(min=1), or one rank with the whole batch as its micro-batch"
)


def _plain(divisor: _Divisor) -> list[Any]:
    rule, labels = divisor
    return [str(rule), labels.place, labels.ignored]


def _applies(rule: Rule, loss: ModelLoss, count: Any, labels: Tensor | None) -> bool:
    if loss.count is not None:
        return rule is Rule.COUNT
    if rule in (Rule.COUNT, Rule.SLICE) or (count is not None) != (rule is Rule.RETURNED) or not loss.may_be(rule):
        return False
    if rule is Rule.NEXT_LABELS:
        return labels is not None and labels.dim() > 1 and labels.shape[-1] > 1
    return rule is not Rule.LABELS or labels is not None


def _fitting(variants: Sequence[Sequence[_Part]], trial: _Trial, num_samples: int) -> _Shown | None:
    """Return the rules that fit, the likeliest first; None where no loss is finite."""
    finite = [parts for parts in variants if all(math.isfinite(part.loss) for part in parts)]
    if not finite or not any(part.loss for parts in finite for part in parts):
        return None
    moves = moves_labels(trial.assembly.model.module)
    divisors = list(finite[0][0].counts)
    order = sorted(divisors, key=lambda key: (key[1] in trial.masks, key[0] is Rule.NEXT_LABELS and not moves))
    errors = {key: max(_error(key, parts) for parts in finite) for key in order}
    limit = min(max(4 * min(errors.values(), default=0.0), 1e-2 * trial.allowed), trial.allowed)
    fits = [_plain(key) for key in order if errors[key] <= limit]
    a, b, both = (part.loss for part in finite[0])
    if divisors and divisors[0][0] is Rule.RETURNED and _off(a, b, both) <= trial.allowed:
        return _Shown(True, fits, _NO_COUNT)
    return _Shown(
        False,
        fits,
        f'loss = "model": the forward returns {both:.9g} for {num_samples} samples, and {a:.9g} and {b:.9g} for two parts of '
        "them, which is neither their sum nor their mean over samples, over labels that count, or over the ones of a mask. Set loss = "
        "samestep.model_loss(count=...) with the number that it divides by, or a loss function (outputs, batch) -> (sum, count), or "
        "one rank with the whole batch as its micro-batch",
    )


def _error(divisor: _Divisor, parts: Sequence[_Part]) -> float:
    """Return by how much the forwards of A, B and both miss a rule, relative to what they return."""
    rule, (a, b, both) = divisor[0], (part.counts[divisor] for part in parts)
    is_more = rule is Rule.RETURNED and a + b != both
    is_of_none = rule in (Rule.LABELS, Rule.NEXT_LABELS) and any(
        part.loss and not part.counts[divisor] for part in parts
    )
    if is_more or is_of_none:
        return math.inf
    return _off(*(part.loss * (1 if rule in (Rule.SUM, Rule.RETURNED) else part.counts[divisor]) for part in parts))


def _off(a: float, b: float, both: float) -> float:
    return abs(a + b - both) / max(abs(a), abs(b), abs(both), 1e-30)


# -- samples of which other labels count -----------------------------------------------------------


def telling_rows(heads: Sequence[Labels], samples: Any, number: int) -> list[int]:
    """Return the rows of a few samples that a trial compares: the first ones and the last count a label of each head, so that no mean
    is over nothing, and one between them does not, if there is such a row.
    """
    counts = torch.ones(number, dtype=torch.bool)
    for head in heads:
        labels = head.of(samples)
        if labels is not None:
            counts &= labels.ne(head.ignored).reshape(number, -1).any(1).cpu()
    full, others = counts.nonzero().flatten().tolist(), (~counts).nonzero().flatten().tolist()
    if len(full) < 2:
        return list(range(min(_FEW_ROWS, number)))
    return [*full[: min(2, len(full) - 1)], *others[:1], full[-1]]


def masks_of(samples: Any, labels: Tensor | None) -> list[tuple[int, int]]:
    """Return the places of tensors of zeros and ones, each with 0 and with 1 as what does not count."""
    places = [
        place
        for place, leaf in enumerate(tensors_in(samples))
        if leaf.dim() and leaf is not labels and bool(((leaf == 0) | (leaf == 1)).all())
        if leaf.dtype is torch.bool or bool((leaf == 1).any())  # no number of which ones may be none, as one of a class
    ]
    return [(place, ignored) for place in places for ignored in (0, 1)]


def masked_in(samples: Any, head: Labels, first: int, *, entirely: bool) -> Any:
    """Return samples of which the first ones have the later half of their labels masked, or the first one its only label; or all `entirely`.

    A mask has ones in all other places, so that no part has as few as a sum would show.
    """
    labels = head.of(samples)
    assert labels is not None
    changed = torch.ones_like(labels) if head.ignored == 0 else labels.clone()
    rows = changed[:first].flatten(1) if labels.dim() > 1 else changed[:first, None]
    place = rows.ne(head.ignored).cumsum(1)
    left = place > (place[:, -1:] + 1) // 2
    if not left.any() and first > 1:
        left[0] = True
    changed[:first] = rows.masked_fill(left | entirely, head.ignored).view_as(changed[:first])
    return _replaced(samples, labels, changed)


def _replaced(samples: Any, leaf: Tensor, changed: Tensor) -> Any:
    return map_tensors(samples, lambda tensor: changed if tensor is leaf else tensor)


# -- what a forward shows of its labels ------------------------------------------------------------

_LOOKS_UP = (
    F.embedding, F.one_hot, torch.gather, Tensor.gather, torch.index_select, Tensor.index_select, Tensor.__getitem__,
)  # fmt: skip
_DETACHES = (Tensor.detach, torch.detach, Tensor.data.__get__)  # type: ignore[attr-defined]  # of C


class _Detaching:
    """Knows what code of the user's detaches: by a function, or by what it computes under `no_grad`."""

    def __init__(self) -> None:
        super().__init__()
        self._without_gradients: list[bool] = []
        """Whether gradients are off in each context of the user's that is entered; a trial runs without any."""

    def _is_detached(self, func: Callable[..., Any], args: Any, frame: FrameType) -> bool:
        """Return whether the result of a function, which a frame calls, is one that the user's code has detached."""
        while frame.f_back is not None and (
            _is_of_mode(frame) or _is_of_mode(frame.f_back)
        ):  # of another mode, and what it calls
            frame = frame.f_back
        if getattr(func, "__name__", "") == "_set_grad_enabled":  # of a class that __enter__ and __exit__ make
            self._enter(frame if frame.f_code.co_name != "__init__" else frame.f_back, is_off=not args[0])
            return False
        is_of_user = _package_of(frame) not in ("torch", "samestep")
        return (func in _DETACHES or any(self._without_gradients[-1:])) and is_of_user

    def _enter(self, frame: FrameType | None, *, is_off: bool) -> None:
        name, user = (frame.f_code.co_name, frame.f_back) if frame is not None else ("", None)
        if name == "__enter__" and user is not None:
            self._without_gradients.append(is_off and _package_of(user) != "samestep")
        elif name == "__exit__" and self._without_gradients:
            self._without_gradients.pop()


def _is_of_mode(frame: FrameType) -> bool:
    return frame.f_code.co_name == "__torch_function__"


def _package_of(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "").partition(".")[0])


class OtherDetached(_Detaching, TorchFunctionMode):
    """Gives code of the user's other values for what it detaches, each element the same function of its own: where a statistic of the
    batch is behind it, as in `s / s.detach()`, the loss of parts no longer adds up.
    """

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not self._is_detached(func, args, sys._getframe(1)):
            return result
        is_several = isinstance(result, tuple) and type(result).__module__ in ("builtins", "torch.return_types")
        return type(result)([_other(leaf) for leaf in result]) if is_several else _other(result)


def _other(value: Any) -> Any:
    return value + 0.1 * (1.0 + value.sin()) if isinstance(value, Tensor) and value.is_floating_point() else value


class LabelWatch(_Detaching, TorchFunctionMode):
    """Notes the labels that a forward gives to its loss, and the numbers by which it looks something up."""

    def __init__(self) -> None:
        super().__init__()
        self._losses: list[tuple[Tensor, int]] = []
        self._looked_up: list[Tensor] = []
        self.detaches = False
        """Whether the forward detaches something."""

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.detaches |= self._is_detached(func, args, sys._getframe(1))
        if func in (F.cross_entropy, F.nll_loss):
            target = args[1] if len(args) > 1 else kwargs.get("target")
            if isinstance(target, Tensor) and not target.is_floating_point() and not target.is_meta:
                ignored = args[4] if len(args) > 4 else kwargs.get("ignore_index", -100)
                self._losses.append((target.detach().clone(), int(ignored)))
        elif func in _LOOKS_UP:
            self._looked_up += [leaf for leaf in tensors_in((args[1:], args[:1], kwargs)) if _is_whole(leaf)]
        return func(*args, **kwargs)

    def shown(self, samples: Any) -> list[tuple[int | None, int, bool]]:
        """Return each tensor of labels that the forward has shown: its place among the tensors of the batch, None for those that it names
        so, the label that does not count, and whether more may be masked.
        """
        heads: dict[int, tuple[int | None, int, bool]] = {}
        for target, ignored in self._losses:
            for place, leaf in enumerate(tensors_in(samples)):
                label = _ignored_in(leaf, target, ignored) if _is_whole(leaf) else None
                if label is not None:
                    is_free = not any(_same(leaf, numbers) for numbers in self._looked_up)
                    heads.setdefault(place, (None if leaf is labels_of(samples) else place, label, is_free))
                    break
        return list(heads.values())


def _is_whole(value: Tensor) -> bool:
    return not value.is_floating_point() and not value.is_complex() and value.dtype != torch.bool and value.dim() > 0


def _aligned_parts(leaf: Tensor, *, shifted: bool) -> Iterator[Tensor]:
    """Yield the numbers of a tensor, those without the first of each row, and unless they are `shifted` labels those without the last."""
    yield leaf.reshape(-1)
    if leaf.dim() > 1:
        yield leaf[..., 1:].reshape(-1)
        if not shifted:
            yield leaf[..., :-1].reshape(-1)


def _same(leaf: Tensor, other: Tensor) -> bool:
    flat = other.reshape(-1).to(leaf.device, leaf.dtype)
    return any(torch.equal(part, flat) for part in _aligned_parts(leaf, shifted=False))


def _ignored_in(leaf: Tensor, target: Tensor, ignored: int) -> int | None:
    """Return the value that does not count in a tensor of the batch, if a loss takes its labels from that tensor."""
    flat = target.reshape(-1).to(leaf.device, leaf.dtype)
    for part in _aligned_parts(leaf, shifted=True):
        if part.shape != flat.shape:
            continue
        if torch.equal(part, flat):
            return ignored
        left_out = flat == ignored
        values = part[left_out].unique()
        if len(values) == 1 and torch.equal(part == values[0], left_out):
            return int(values[0])
    return None
