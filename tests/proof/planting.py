"""How a deliberate wrong is entered into the list: its kind, where it shows, and what `verify` must call it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest
import torch.distributed.distributed_c10d as dist  # under whose name a step does not look who calls it
from torch import Tensor

from samestep.proof.verdict import Cause

Patch = pytest.MonkeyPatch


Kind = Literal["fault", "reverted", "resumed", "broken", "missed"]
"""A mistake in a right run, or a mend of the reviews that is taken away: `verify` names what comes of it, a resumed run has other
losses, the run ends in an error that is no refusal, or what was refused is accepted."""


@dataclass(frozen=True)
class Planted:
    """One wrong that is put into the runtime for the length of a run."""

    kind: Kind
    code: str
    """A model of `tests/models.py`, or the case of `reproductions.py` that shows a mend."""
    layout: str
    install: Callable[[Patch], None]
    cause: Cause | None = None
    """What `verify` must call it."""
    job: dict[str, Any] = field(default_factory=dict)
    own_precision: bool = False
    """It shows in the job's own precision alone."""
    mends: tuple[str, ...] = ()
    """The causes in the reviews that it mends."""
    text: str = ""
    """Words of the error or of the refusal."""
    one_device: bool = False
    """Whether it is taken away on the one device too, so that only the plain torch loop shows it."""
    is_refused: bool = False
    """Whether the layout is refused while the mend stands."""
    steps: int = 2
    allow: tuple[str, ...] = ()


PLANTED: dict[str, Planted] = {}


def planted(kind: Kind, code: str, layout: str, cause: Cause | None = None, name: str = "", **fields: Any) -> Any:
    """Enter a function into the list under its own name, or under another one where it is another wrong elsewhere."""

    def enter(install: Callable[[Patch], None]) -> Callable[[Patch], None]:
        called = name or install.__name__
        assert called not in PLANTED, f"two wrongs are called {called}"
        PLANTED[called] = Planted(kind, code, layout, install, cause, **fields)
        return install

    return enter


def of_kind(*kinds: Kind) -> dict[str, Planted]:
    """Return what is entered of some kinds so far, by name."""
    return {name: row for name, row in PLANTED.items() if row.kind in kinds}


def fault(
    cause: Cause, layout: str, model: str = "plain", *, name: str = "", own_precision: bool = False, **job: Any
) -> Any:
    """Enter a mistake in a right run."""
    return planted("fault", model, layout, cause, name, job=job, own_precision=own_precision)


def mend(kind: Kind, mends: str, case: str, layout: str, cause: Cause | None = None, **fields: Any) -> Any:
    """Enter a mend of causes in the reviews, without which a case is wrong."""
    return planted(kind, case, layout, cause, mends=tuple(mends.split()), **fields)


def around(patch: Patch, owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
    """Let `wrapper(original, *args)` stand in for a function."""
    original = getattr(owner, name)

    def stand_in(*args: Any, **kwargs: Any) -> Any:
        return wrapper(original, *args, **kwargs)

    stand_in.__wrapped__ = functools.partial(wrapper, original)  # type: ignore[attr-defined]  # whose signature it has
    patch.setattr(owner, name, stand_in)


class CheckedPatch(Patch):
    """Refuses a stand-in for a function that does not take what the function takes: a wrong that cannot be called proves nothing."""

    def setattr(self, owner: Any, name: Any, value: Any, raising: bool = True) -> None:
        """Put a stand-in in a function's place, or another value in an attribute's."""
        if inspect.isroutine(original := inspect.getattr_static(owner, name, None)):
            function = original.__func__ if isinstance(original, staticmethod | classmethod) else original
            every = inspect.signature(function).parameters.values()
            given = [one.name for one in every if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
            named = {one.name: one.default for one in every if one.kind is one.KEYWORD_ONLY}
            try:
                inspect.signature(value).bind(*given[isinstance(original, classmethod) :], **named)
            except TypeError as error:
                raise AssertionError(f"{owner.__name__}.{name}: its stand-in would fail: {error}") from None
        super().setattr(owner, name, value, raising)


def rank() -> int:
    return dist.get_rank()


def unless(axis: str) -> Callable[..., Any]:
    """Return a stand-in for the sending of gradients that sends nothing over an axis."""
    return lambda send, self, flat, op, whole: None if op.axis == axis else send(self, flat, op, whole)


_SUMS = ("loss_sum", "count", "norm_squared")


def changed(sums: Tensor, **values: float) -> Tensor:
    """Return the sums of a step with other values of some, named as in `StepScalars`."""
    sums = sums.clone()
    for name, value in values.items():
        sums[_SUMS.index(name)] = value
    return sums
