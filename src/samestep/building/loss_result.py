"""The result of a loss in one form: terms, each a sum and a count, and values that are only reported.

    (sum, count)                                one term without a name
    (sum, count, values)
    {"name": (sum, count), ...}                 several terms
    ({"name": (sum, count), ...}, values)       values = {"accuracy": (correct, seen), ...}

With S_k and C_k the sum and the count of term k over all samples of a step, on all ranks and in all micro-batches,

    loss = sum over k of S_k / C_k              a term whose count is 0 adds nothing

and a reported value is S / C too. Nothing is ever a mean of means.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from samestep.errors import JobError
from samestep.models.spec import VALUES as VALUES
from samestep.models.spec import LossNames
from samestep.trees import fold

Amount = tuple[Tensor, Tensor]
"""A sum and a count, each a tensor of one number."""
Loss = Callable[[Any, Any], Any]
"""A function of (outputs, batch) that returns one of the forms above."""

IGNORED_LABEL = -100
"""The label value that losses do not count."""
UNNAMED = ""
"""The name of the only term of a loss that gives it none."""
LEAST, NUMBER, NONE = "samestep_least", "samestep_number", "samestep_none"
"""Attributes of a count: what it was before it was guarded, with the least that it may be; the number of Python that it is made of; of which
count it says whether that is none."""
OF_SLICE = "samestep_of_slice"
"""Attribute of a mean over a slice of the tokens: the logits [N, V] or [B, V, N], and the sum and the count over these tokens."""


@dataclass(frozen=True, slots=True)
class LossResult:
    """The result of a loss on some samples."""

    terms: Mapping[str, Amount]
    values: Mapping[str, Amount] = field(default_factory=dict)
    least: Mapping[str, float] = field(default_factory=dict)
    """The least that the count of a whole step may be, by name, where the loss guards it against zero (`loss_watch.py`)."""

    @property
    def names(self) -> LossNames:
        """The names of its terms and values."""
        return LossNames(tuple(name for name in self.terms if name != UNNAMED), tuple(self.values))

    @property
    def only(self) -> Amount:
        """The sum and the count of a loss with one term."""
        (amount,) = self.terms.values()
        return amount

    def __iter__(self) -> Iterator[Tensor]:
        """Return the sum and the count of a loss with one term: `total, count = result`."""
        return iter(self.only)

    @property
    def sums(self) -> Tensor:
        """The sum of the terms' sums, which depends on all that the loss depends on."""
        first, *others = (total for total, _ in self.terms.values())
        for total in others:
            first = first + total
        return first

    @property
    def counted(self) -> Tensor:
        """The sum of the terms' counts: whether anything counts."""
        counts = [count for _, count in self.terms.values()]
        return counts[0].double() if len(counts) == 1 else torch.stack([count.double() for count in counts]).sum()

    @property
    def amounts(self) -> dict[str, Amount]:
        """All sums and counts by a name for errors, each prefixed by its value's name."""
        return {**self.terms, **{f"{VALUES}{name}": amount for name, amount in self.values.items()}}

    def checked(self, names: LossNames) -> LossResult:
        """Return the result, whose names must be among those of the trace: ranks have agreed on places for these.

        Raises:
            JobError: the loss has returned another name.
        """
        for expected, amounts, what in ((names.terms, self.terms, "term"), (names.values, self.values, "value")):
            if unknown := [name for name in amounts if name not in expected and name != UNNAMED]:
                if names.failure:
                    raise JobError(
                        "loss-names-change",
                        f"the loss returned the {what} {unknown[0]!r}, which is not known from the trace, because the loss failed there ({names.failure}). "
                        "Use a loss that reads only outputs and batch; the forward can return values of the weights",
                    )
                raise JobError(
                    "loss-names-change",
                    f"the loss returned the {what} {unknown[0]!r}; when the model was traced, it returned {', '.join(map(repr, expected)) or 'none'}. "
                    "Use a loss that returns all its names in every step, with (0, 0) for a name without a value, and that reads only outputs and batch",
                )
        return self

    def numbers(self, names: LossNames, like: Tensor) -> list[Tensor]:
        """Return the sums and counts of named terms and values in the order of `names`, as `LossNames.means` takes them.

        What the loss has left out counts nothing. The scalars have the dtype and the device of `like`.

        Raises:
            JobError: the loss has returned a name that is not among them.
        """
        if not (names.terms or names.values or self.values) and [*self.terms] == [UNNAMED]:
            return []
        self.checked(names)
        pairs = [self.terms.get(name, (0.0, 0.0)) for name in names.terms]
        pairs += [self.values.get(name, (0.0, 0.0)) for name in names.values]
        return [as_number(n.detach() if isinstance(n, Tensor) else n, like) for pair in pairs for n in pair]


def loss_result(returned: Any, what: str = "the loss") -> LossResult:
    """Return what a loss has returned in the one form; `what` names the loss in the error.

    Raises:
        JobError: it is none of the forms of a loss's result.
    """
    if isinstance(returned, LossResult):
        return returned
    if type(returned) is tuple and (alone := _amount(returned)) is not None:  # most often
        return LossResult({UNNAMED: alone})
    terms, values = _split(returned)
    if isinstance(terms, Mapping):
        named = {name: _amount(amount) for name, amount in terms.items()}
    else:
        named = {UNNAMED: _amount(terms)}
    reported = {name: _amount(amount, is_term=False) for name, amount in values.items()}
    read = {name: amount for name, amount in named.items() if amount is not None}
    logged = {name: amount for name, amount in reported.items() if amount is not None}
    are_names = all(
        isinstance(name, str) and name for name in (*values, *(terms if isinstance(terms, Mapping) else ()))
    )
    if isinstance(returned, Tensor | float) and _is_number(returned, may_be_negative=True):
        raise JobError(
            "loss-not-a-pair",
            f'{what} returned one number: if it is a mean over samples, use samestep.mean_over("samples", loss); if it is a mean over '
            'tokens, use samestep.mean_over("tokens", loss). Otherwise return (sum, count)',
        )
    if not read or not are_names or len(read) + len(logged) < len(named) + len(reported):
        raise JobError(
            "loss-not-a-pair",
            f"{what} returned {describe_form(returned)}. Use (sum, count): a tensor of one number, and the number of tokens or samples "
            'in it. Several terms are {"name": (sum, count), ...}. Values to report come last: (sum, count, {"accuracy": (correct, seen)})',
        )
    return LossResult(read, logged)


def is_plain_sum(loss: Loss) -> bool:
    """Return whether a step divides the sum of a loss by nothing, since the loss of the full batch is a sum."""
    return bool(getattr(loss, "is_plain_sum", False))


def whole_loss(parts: Sequence[LossResult], num_samples: int) -> tuple[Tensor, float]:
    """Return the sum and the count of a whole batch of `num_samples` from the results of its parts; their quotient is the loss.

    Several terms are added up as means, times the number of samples, which is then the count.
    """
    totals: dict[str, Amount] = {}
    for part in parts:
        for name, (total, count) in part.terms.items():
            before = totals.get(name)
            totals[name] = (total, count) if before is None else (before[0] + total, before[1] + count)
    if len(totals) == 1:
        ((total, count),) = totals.values()
        return total, float(count)
    means = [total / count for total, count in totals.values() if count]
    zero = next(iter(totals.values()))[0] * 0.0
    return torch.stack([zero, *means]).sum() * num_samples, float(num_samples if means else 0)


def measured(named: Mapping[Any, Any], what: str) -> dict[str, Amount]:
    """Return what a measure has returned, {"name": (sum, count), ...}; `what` names the measure in the error.

    Raises:
        JobError: it is something else.
    """
    sums = {str(name): amount for name, pair in named.items() if (amount := _amount(pair, is_term=False)) is not None}
    if len(sums) < len(named):
        form = describe_form(named if len(named) > 1 else next(iter(named.values())))
        raise JobError(
            "loss-not-a-pair",
            f"{what} returned {form}. Use (sum, count): two numbers, the second is the number of the tokens or samples in the sum, or a dict of names and pairs of these",
        )
    return sums


def _split(returned: Any) -> tuple[Any, Mapping[Any, Any]]:
    """Return the terms, or the sum and count, and the values of a result."""
    if isinstance(returned, tuple | list):
        if len(returned) == 2 and isinstance(returned[0], Mapping) and isinstance(returned[1], Mapping):
            return returned[0], returned[1]
        if len(returned) == 3 and isinstance(returned[2], Mapping):
            return returned[:2], returned[2]
    return returned, {}


def _amount(pair: Any, *, is_term: bool = True) -> Amount | None:
    """Return a sum and a count as tensors; None for anything else. The sum of a term must be a tensor.

    Raises:
        JobError: the count of a term has a gradient, which a division by a number would leave out.
    """
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        return None
    total, count = pair
    is_sum = isinstance(total, Tensor) if is_term else True
    if not is_sum or not _is_number(total, may_be_negative=True) or not _is_number(count):
        return None
    if not isinstance(total, Tensor):
        device = count.device if isinstance(count, Tensor) else None
        total = torch.full((), total, dtype=torch.float64, device=device)
    if not isinstance(count, Tensor):
        number, count = float(count), total.new_full((), count, dtype=torch.float64)
        setattr(count, NUMBER, number)
    if is_term and count.requires_grad:
        raise JobError(
            "loss-count-from-outputs",
            "the count of the loss has a gradient, and a sum is divided by its count as by a number. Use count.detach() if the loss of one "
            "device does, or samestep.whole_batch(loss) for a ratio of two sums",
        )
    total, plain = scalar(total), scalar(count.detach() if count.requires_grad else count)
    if plain is not count:
        vars(plain).update({name: value for name, value in vars(count).items() if name in (LEAST, NUMBER)})
    return (total if is_term else total.detach()), plain


def scalar(value: Tensor) -> Tensor:
    """Return a tensor of one number without dimensions; most have none, and a view would be another call of torch."""
    return value.reshape(()) if value.dim() else value


def _is_number(value: Any, *, may_be_negative: bool = False) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1 and not value.is_complex()
    # A tensor's value is not looked at: the host would wait for its device.
    return isinstance(value, int | float | np.number) and bool(may_be_negative or value >= 0)


def describe_form(value: Any) -> str:
    """Return a text that describes the form of a value."""
    return str(fold(value, _describe_leaf, lambda items: f"({', '.join(items)})"))


def _describe_leaf(leaf: Any) -> str:
    if isinstance(leaf, Tensor):
        return f"a tensor {list(leaf.shape)}{' of complex numbers' * leaf.is_complex()}"
    if isinstance(leaf, Mapping):
        return f"{{{', '.join(f'{key!r}: {describe_form(item)}' for key, item in leaf.items())}}}"
    return "None" if leaf is None else f"a {type(leaf).__name__}"


def as_number(value: Tensor | int | float, like: Tensor) -> Tensor:
    """Return a sum or a count as a scalar with the dtype and on the device of `like`."""
    if isinstance(value, Tensor):
        return scalar(value.to(like.device, like.dtype))
    return like.new_full((), value)  # which is no copy from the host


def is_same_count(a: float, b: float) -> bool:
    """Return whether two counts are the same: whole numbers exactly, and others, such as sums of the weights of classes, up to roundings,
    since outputs that are matched with targets decide on their order."""
    return a == b or (not (a.is_integer() and b.is_integer()) and math.isclose(a, b, rel_tol=1e-6))
