"""The form of a row: a piece of code that people write, in a layout, is equal to one device or refused by these words.

The code is an entry of `MODELS`, usually a `Code` of `laboratory.py`; `test_code.py` runs the rows of every module of this folder.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import pytest
from torch import nn

from samestep.errors import InputError, LayoutError, UnprovenError
from tests.laboratory import Code, job_of
from tests.models import MODELS, Tokens


@dataclass(frozen=True)
class Equal:
    """One device's losses, norms, gradients and weights in float64 to 1e-9, and the program's ledger."""

    layout: str
    code: str
    is_nightly: bool = False


@dataclass(frozen=True)
class Refused:
    """A refusal of which the text holds these words, and names this waiver where there is one."""

    layout: str
    code: str
    words: str
    error: type[InputError] = LayoutError
    waiver: str = ""
    is_nightly: bool = False


@dataclass(frozen=True)
class Remarked:
    """A run that says these words, since what would be refused is allowed or changes nothing; without words it says nothing."""

    layout: str
    code: str
    words: str
    is_nightly: bool = False


def equal(code: str, *layouts: str) -> list[Equal]:
    return [Equal(layout, code) for layout in layouts]


def refused(words: str, code: str, *layouts: str) -> list[Refused]:
    return [Refused(layout, code, words) for layout in layouts]


def unproven(words: str, waiver: str, code: str, *layouts: str) -> list[Refused]:
    return [Refused(layout, code, words, UnprovenError, waiver) for layout in layouts]


def parameter(row: Equal | Refused | Remarked) -> Any:
    """Return a row as a parameter of a test, which names its layout and its code: `trace_ahead` traces what it names."""
    more: tuple[Any, ...] = (row.words,) if isinstance(row, Remarked) else ()
    if isinstance(row, Refused):
        more = (row.words, row.error, row.waiver)
    marks = pytest.mark.nightly if row.is_nightly else ()
    return pytest.param(row.layout, row.code, *more, id=f"{row.code}-{row.layout}", marks=marks)


def entered(name: str, code: Code) -> str:
    """Enter code into `MODELS`, once, and return its name there."""
    assert MODELS.setdefault(name, code) == code, f"two models are called {name}"
    return name


def of_cases(prefix: str, cases: Iterable[Any]) -> list[Equal]:
    """Return rows of the parameters (layout, code) that `covering.daily` has chosen from; `prefix` begins the names in `MODELS`."""
    return [Equal(case.values[0], prefix + case.values[1], bool(case.marks)) for case in cases]


def learned(
    build: Callable[[], nn.Module],
    data: Callable[[], Any] = Tokens,
    loss: str = "cross_entropy",
    steps: int = 3,
    **tables: Any,
) -> Code:
    """Return a model that learns data by a loss of the job."""
    return Code(build, data, job=job_of("float64", steps, train={"loss": loss, "watch_every": 100}, **tables))
