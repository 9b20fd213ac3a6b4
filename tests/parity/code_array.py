"""The covering array of code: rows in which every pair of features of models, losses, data, optimizers, loops and layouts occurs.

A feature is a factor of a few settings, of which the first is none of it. A row is begun with a pair that no row has yet, and each other
factor gets the setting that adds most new pairs, as in `tests/covering.py`. Pairs of `APART` contradict each other, or are refused: no row has them.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

FACTORS: dict[str, tuple[str, ...]] = {
    "layout": (
        "dp=1", "dp=1 microbatch=3", "dp=2", "dp=2 zero=1 microbatch=2", "dp=2 zero=2", "dp=2 zero=3", "tp=2", "pp=2", "pp=2 microbatch=4",
    ),
    "recompute": ("none", "full", "selective"),
    "offload": ("no", "optimizer"),
    "embedding": ("plain", "bag"),
    "norm": ("layer", "batch", "none"),
    "dropout": ("none", "module", "function", "noise"),
    "parametrization": ("none", "weight norm"),
    "checkpoint": ("none", "own"),
    "tied": ("none", "head", "blocks", "called twice"),
    "adapter": ("none", "low rank"),
    "buffer": ("none", "scale"),
    "frozen": ("none", "front", "in turn"),
    "unused": ("none", "head", "at times"),
    "hook": ("none", "of a weight", "of a tensor", "of a module"),
    "output": ("tensor", "dict", "record", "object", "named tuple", "distribution"),
    "loss": ("sum", "terms", "mean", "of the model", "over the batch"),
    "data": ("dict", "tuple", "record", "encoding"),
    "source": ("data set", "loader", "stream", "values", "values of rank 0", "own values"),
    "batch": ("8", "7"),
    "optimizer": ("momentum", "groups", "several", "instance", "instances"),
    "clip": ("none", "job"),
    "schedule": ("none", "linear"),
    "average": ("none", "ema"),
    "loop": ("steps", "parts", "two backwards", "clips"),
    "resume": ("no", "amid"),
    "between": ("nothing", "evaluates", "writes weights"),
    "watched": ("first step", "every second"),
}  # fmt: skip
"""Each factor with its settings."""
Row = dict[str, str]
Setting = tuple[str, str]
PLAIN: Row = {factor: settings[0] for factor, settings in FACTORS.items()}
"""The row without any feature."""
MICRO = ("dp=1 microbatch=3", "dp=2 zero=1 microbatch=2", "pp=2 microbatch=4")
_APART: list[tuple[str, tuple[str, ...], str, tuple[str, ...]]] = [
    ("data", ("record", "encoding"), "source", ("data set", "loader", "stream")),  # torch collates none of them
    ("data", ("record",), "loss", ("of the model",)),  # its forward takes two tensors
    ("norm", ("batch",), "layout", MICRO),  # norm-statistics
    ("source", ("own values",), "layout", ("tp=2", "pp=2", "pp=2 microbatch=4")),  # the ranks have the same samples
    ("data", ("record", "encoding"), "source", ("values of rank 0", "own values")),  # batch-type: no such class is sent
    ("data", ("record",), "loss", ("mean",)),  # it counts the labels of a dict or a tuple
    ("frozen", ("front",), "tied", ("called twice",)),  # no block would be trained
    (
        "unused",
        ("at times",),
        "layout",
        ("pp=2", "pp=2 microbatch=4"),
    ),  # the forward takes another way than the traced one
    ("frozen", ("in turn",), "resume", ("amid",)),  # a run is made, and loaded, with what it trains
    ("tied", ("called twice",), "layout", ("dp=2 zero=3",)),  # weights-order
    ("unused", ("head",), "loop", ("clips",)),  # another-stage, under pp
    ("norm", ("batch",), "loss", ("of the model",)),  # what a norm couples is no sum over samples
    ("output", tuple(FACTORS["output"][1:]), "loss", ("of the model",)),  # nothing reads them
]
APART = {
    ((factor, setting), (other, value))
    for factor, settings, other, values in _APART
    for setting in settings
    for value in values
}
"""Pairs that no row has."""
TOGETHER: tuple[Row, ...] = (
    {"parametrization": "weight norm", "tied": "head", "unused": "at times", "layout": "tp=2"},  # tp-uncuttable
    {"norm": "batch", "tied": "called twice", "layout": "pp=2"},  # one stage keeps the statistics of both calls
    {
        "parametrization": "weight norm",
        "tied": "blocks",
        "loss": "terms",
        "layout": "dp=2 zero=3",
        "norm": "none",
    },  # weights-order
)
"""Features that are refused together, of which no row has all."""
_ATTEMPTS = 8


def _is_apart(one: Setting, other: Setting) -> bool:
    return (one, other) in APART or (other, one) in APART


def pairs_of(row: Row) -> Iterator[tuple[Setting, Setting]]:
    """Return the pairs of settings that a row holds, in the order of the factors."""
    return itertools.combinations(row.items(), 2)


def every_pair() -> list[tuple[Setting, Setting]]:
    """Return the pairs of settings of two factors that may stand together."""
    settings = [(factor, setting) for factor, every in FACTORS.items() for setting in every]
    pairs = itertools.combinations(settings, 2)
    return [(one, other) for one, other in pairs if one[0] != other[0] and not _is_apart(one, other)]


@functools.cache
def rows() -> tuple[Row, ...]:
    """Return rows that hold every pair, always the same."""
    draw, missing = random.Random(1), dict.fromkeys(every_pair())
    chosen: list[Row] = []
    while missing:
        begin = next(iter(missing))
        fillings = [_filled(begin, missing, draw) for _ in range(_ATTEMPTS)]
        best = max(fillings, key=lambda row: sum(pair in missing for pair in pairs_of(row)))
        for pair in pairs_of(best):
            missing.pop(pair, None)
        chosen.append(best)
    return tuple(part for row in chosen for part in _without_refused(row))


def _without_refused(row: Row) -> list[Row]:
    """Return a row, or if it has features that are refused together those that each lack one of three of them: they hold the same pairs."""
    for refused in TOGETHER:
        if refused.items() <= row.items():
            parts = [{**row, factor: PLAIN[factor]} for factor in list(refused)[:3]]
            return [rest for part in parts for rest in _without_refused(part)]
    return [row]


def _filled(begin: tuple[Setting, Setting], missing: dict[tuple[Setting, Setting], None], draw: random.Random) -> Row:
    """Give every factor the setting that adds most pairs that are missing, in an order that is drawn."""
    row: Row = dict(begin)
    others = [factor for factor in FACTORS if factor not in row]
    draw.shuffle(others)
    for factor in others:
        able = [
            setting
            for setting in FACTORS[factor]
            if not any(_is_apart((factor, setting), pair) for pair in row.items())
        ]
        draw.shuffle(able)
        row[factor] = max(able, key=functools.partial(_num_new, row, missing, factor))
    return {factor: row[factor] for factor in FACTORS}


def _num_new(row: Row, missing: dict[tuple[Setting, Setting], None], factor: str, setting: str) -> int:
    new = (factor, setting)
    return sum((new, other) in missing or (other, new) in missing for other in row.items())


def features_of(row: Row) -> Row:
    """Return the settings of a row that the plain one has not."""
    return {factor: setting for factor, setting in row.items() if setting != PLAIN[factor]}


def smallest(row: Row, fails: Callable[[Row], bool]) -> Row:
    """Return the features of a failing row without which it does not fail: each is left out if the row fails without it."""
    left: dict[str, Any] = features_of(row)
    for factor in [*left]:
        without = {name: setting for name, setting in left.items() if name != factor}
        if fails({**PLAIN, **without}):
            left = without
    return left


def each_setting(rows: tuple[Row, ...]) -> set[int]:
    """Return the numbers of few rows that together have each setting of each factor."""
    missing = {setting for row in rows for setting in row.items()}
    chosen: set[int] = set()
    while missing:
        best = max(range(len(rows)), key=lambda number: len(missing & set(rows[number].items())))
        chosen.add(best)
        missing -= set(rows[best].items())
    return chosen
