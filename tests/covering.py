"""Few cases that hold much: every pair, or triple, of features in `rows`, and each word of a list of cases in `daily`.

The rows are a covering array, found greedily among legal layouts.
A row is begun with a tuple of features that no row has yet, and filled up at random many times; the filling that covers
most new tuples for its cost is kept (Cohen et al. 1997, doi:10.1109/32.605761, AETG). The draws are seeded, so the rows are always the
same. A tuple of which no filling is legal is one that a strategy refuses, or that would have no effect.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import random
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import fields
from typing import Any

import pytest

from samestep.errors import LayoutError
from samestep.job import Job
from samestep.layout import Layout
from samestep.models import decoder_spec
from samestep.models.decoder import Decoder
from samestep.models.spec import ModelSpec
from samestep.program.step import StepSpec
from samestep.schedules import DEFAULT, SCHEDULES
from samestep.strategies import refusal_of

BATCH = 8
FEATURES: dict[str, tuple[Any, ...]] = {
    "model": ("deep_llama", "deep_tied", "deep_qwen3", "deep_gpt2", "parted", "deep_mixtral"),
    "dp_replicate": (1, 2),
    "dp_shard": (1, 2),
    "cp": (1, 2),
    "exchange": ("auto", "ring"),
    "tp": (1, 2),
    "pp": (1, 2),
    "ep": (1, 2),
    "zero": (0, 1, 2, 3),
    "sequence_parallel": (False, True),
    "schedule": (DEFAULT, *(name for name in SCHEDULES if name != DEFAULT)),
    "microbatch": (None, 2, 3),
    "recompute": ("none", "selective", "alternate", "full", "offload"),
    "accumulate": ("sharded", "full"),
    "reduce": ("ring", "root"),
    "offload": (False, True),
    "precision": ("float64", "bf16"),
}
OF_SEQUENCES: dict[str, tuple[Any, ...]] = {
    **{name: values[:1] for name, values in FEATURES.items()},
    "model": (
        "deep_llama", "deep_qwen3", "deep_gemma3", "deep_attentive", "dropping_llama", "packed_llama"
    ),
    "dp_shard": (1, 2),
    "cp": (2, 4),
    "exchange": ("heads", "ring", "hybrid"),
    "tp": (1, 2),
    "pp": (1, 2),
    "zero": (0, 1, 2, 3),
    "sequence_parallel": (False, True),
    "schedule": ("1f1b", "interleaved", "zero-bubble"),
    "microbatch": (None, 2),
    "recompute": FEATURES["recompute"],
}  # fmt: skip
"""What stands with ranks that share sequences: windows, dropout and packed documents are those of the models."""
TABLES = {"all": FEATURES, "sequences": OF_SEQUENCES}
ROUNDED = ("deep_llama", "deep_tied", "deep_gpt2")
"""Models that are run in bf16 too; what one device may deviate by is measured for each."""
_DRAWS = {2: (4, 400), 3: (3, 60)}
"""For each strength the seed, and how often a row is filled up: of 25 seeds the rows of the first are the cheapest."""

Row = dict[str, Any]


@functools.cache
def rows(
    strength: int, max_ranks: int, alone: tuple[str, ...] = (), table: str = "all"
) -> tuple[tuple[str, str, str], ...]:
    """Return layouts, models and precisions in which every feasible tuple of so many features of a table occurs.

    Of a feature that stands `alone` each value occurs, but not with each of every other one.
    """
    seed, attempts = _DRAWS[strength]
    draw, features = random.Random(seed), TABLES[table]
    missing = [one for one in _tuples(features, strength) if not any(name in alone for name, _ in one)]
    missing += [((name, value),) for name in alone for value in features[name]]
    found: list[Row] = []
    uncovered, wanted_ones = dict.fromkeys(missing), frozenset(missing)
    for wanted in missing:
        if wanted not in uncovered:
            continue
        fillings = [
            row for row in (_filled(features, wanted, draw) for _ in range(attempts)) if is_legal(row, max_ranks)
        ]
        if not fillings:
            del uncovered[wanted]
            continue
        best = max(fillings, key=lambda row: sum(one in uncovered for one in _held_by(row, strength)) / _cost(row))
        for one in _held_by(best, strength):
            uncovered.pop(one, None)
        found.append(best)
    wanted_of = {id(row): [one for one in _held_by(row, strength) if one in wanted_ones] for row in found}
    found = without_needless(found, lambda row: wanted_of[id(row)])
    return tuple((str(layout_of(row)), row["model"], row["precision"]) for row in found)


Tuple = tuple[tuple[str, Any], ...]


def _tuples(features: dict[str, tuple[Any, ...]], strength: int) -> Iterator[Tuple]:
    for names in itertools.combinations(features, strength):
        for values in itertools.product(*(features[name] for name in names)):
            yield tuple(zip(names, values, strict=True))


def _tuples_of(row: Row, strength: int) -> Iterator[Tuple]:
    for names in itertools.combinations(FEATURES, strength):
        yield tuple((name, row[name]) for name in names)


def _held_by(row: Row, strength: int) -> Iterator[Tuple]:
    yield from _tuples_of(row, strength)
    yield from _tuples_of(row, 1)


def _filled(features: dict[str, tuple[Any, ...]], wanted: Tuple, draw: random.Random) -> Row:
    """Give the other features values, most degrees 1, so that few ranks suffice, and switches that they allow."""
    row = dict(wanted)
    for name in ("dp_replicate", "dp_shard", "cp", "tp", "pp"):
        row.setdefault(name, features[name][-1 if draw.random() < 0.35 else 0])
    shards, replicas = row["dp_shard"] * row["cp"], row["dp_replicate"] * row["cp"]
    able = {
        "zero": shards > 1,
        "ep": row.get("model", "deep_mixtral") == "deep_mixtral" and row["dp_replicate"] * shards > 1,
        "schedule": row["pp"] > 1,
        "sequence_parallel": row["tp"] > 1,
        "exchange": row["cp"] > 1,
        "precision": row.get("model", ROUNDED[0]) in ROUNDED and draw.random() < 0.3,
    }
    row.setdefault("zero", draw.choice(features["zero"][row["dp_shard"] - 1 :]) if able["zero"] else 0)
    able |= {"accumulate": row["zero"] > 1, "reduce": row["zero"] == 0 and replicas > 1}
    for name, values in features.items():
        row.setdefault(name, draw.choice(values) if able.get(name, True) else values[0])
    return row


def layout_of(row: Row) -> Layout:
    """Return the layout of a row."""
    words = {name: value for name, value in row.items() if name not in ("model", "precision")}
    return Layout(**words, virtual_stages=2 if row["schedule"] == "interleaved" else 1)


def is_legal(row: Row, max_ranks: int) -> bool:
    """Whether every feature of a row has an effect, and no strategy refuses it."""
    if (row["schedule"] != "1f1b" and row["pp"] == 1) or (row["zero"] and row["dp_shard"] * row["cp"] == 1):
        return False
    if row["exchange"] != "auto" and row["cp"] == 1:
        return False
    if row["reduce"] != "ring" and row["dp_replicate"] * row["cp"] == 1:
        return False
    if row["precision"] == "bf16" and row["model"] not in ROUNDED:
        return False
    try:
        layout = layout_of(row)
    except LayoutError:
        return False
    if layout.world_size > max_ranks:
        return False
    return refusal_of(StepSpec.of(_spec(row["model"]), _job(row["precision"]), layout)) is None


@functools.cache
def _job(precision: str) -> Job:
    return Job(train={"global_batch": BATCH}, numerics={"precision": precision})


def without_needless(rows: Sequence[Any], held_by: Callable[[Any], Iterable[Hashable]]) -> list[Any]:
    """Return the rows without those of which all that they hold is held by others, looking at the last rows first."""
    times = Counter(one for row in rows for one in set(held_by(row)))
    kept = list(rows)
    for row in reversed(rows):
        held = set(held_by(row))
        if all(times[one] > 1 for one in held):
            times.subtract(held)
            kept.remove(row)
    return kept


def daily(cases: Iterable[Any], *, beside_products: bool = False) -> list[Any]:
    """Return cases as parameters of a test: the fewest and smallest that hold every word run in `make test`, the rest nightly.

    A case is what `pytest.mark.parametrize` takes. Its words are the settings of its layouts (a degree, a schedule, that there
    are micro-batches) and its other values, each in its column; with `beside_products` a setting that the rows of
    `test_products.py` hold with every other one is no word. Cases that have marks keep them, and hold nothing here.
    """
    params = [_param_of(case) for case in cases]
    free = [index for index, param in enumerate(params) if not param.marks]
    words = {index: set(_words_of(params[index], beside_products)) for index in free}
    chosen = fewest(words, {index: layouts_in(params[index].values) for index in free})
    return [
        param if param.marks or index in chosen else pytest.param(*param.values, id=param.id, marks=pytest.mark.nightly)
        for index, param in enumerate(params)
    ]


OF_MODELS = ("tp", "sequence_parallel", "pp", "cp", "exchange", "ep", "loss_chunk", "mlp_chunk")
"""Settings by which a layout cuts a model, or runs it in parts, in a way of the model's own."""
_AMOUNTS = ("microbatch", "loss_chunk", "mlp_chunk")
"""Settings of which it counts that there is one, whatever its size."""


def pairs_of(layout: Layout, model: str) -> set[Hashable]:
    """Return what a row of a layout and a model holds: its pairs of settings, its model with each setting that cuts it, its number of ranks."""
    default = Layout()
    settings = [
        (name, setting is not None if name in _AMOUNTS else setting)
        for name in (entry.name for entry in fields(layout) if entry.name != "virtual_stages")
        if (setting := getattr(layout, name)) != getattr(default, name)
    ]
    of_model = [(model, one) for one in settings if one[0] in OF_MODELS]
    return {model, layout.world_size, *settings, *itertools.combinations(settings, 2), *of_model}


def beyond_products(cases: Iterable[tuple[str, str]]) -> set[tuple[str, str]]:
    """Return the layouts and models that hold a pair which neither the rows of `test_products.py` nor others of these hold."""
    held = set[Hashable]().union(
        *(pairs_of(Layout(layout), model) for layout, model, _ in rows(2, 4, alone=("model",)))
    )
    by_ranks = sorted(set(cases), key=lambda case: (Layout(case[0]).world_size, case))
    return set(without_needless(by_ranks, lambda case: pairs_of(Layout(case[0]), case[1]) - held))


def fewest(words: dict[int, set[Hashable]], layouts: dict[int, list[Layout]]) -> list[int]:
    """Return the cases that together hold every word of all: greedily, those of most new words for their ranks.

    Of equal ones that with the layout which the fewest have is chosen. One rank proves less than two and costs little less, and the
    least is proven by one rank with a whole batch.
    """
    missing = set[Hashable]().union(*words.values())
    num_ranks = {index: max(2, sum(one.world_size for one in of_case)) for index, of_case in layouts.items()}
    num_ranks |= {index: 4 for index, of_case in layouts.items() if all(one == Layout() for one in of_case)}
    chosen: list[int] = []
    times = Counter[str]()
    while missing:
        best = max(
            words, key=lambda index: (len(words[index] & missing) / num_ranks[index], -times[str(layouts[index])])
        )
        chosen.append(best)
        missing -= words[best]
        times[str(layouts[best])] += 1
    return without_needless(chosen, words.__getitem__)


def needless(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Return the tests with a layout that `make test` leaves to the night: a file's others hold all that they hold.

    Held are each test function, each of its values other than a layout, and each setting of a layout that the file has, in any
    function. Tests with marks of their own (nightly, or every_row) keep them, and hold nothing here.
    """
    of_files: dict[str, list[pytest.Item]] = {}
    for item in items:
        if layouts_in(values_of(item).values()) and not any(map(item.get_closest_marker, ("nightly", "every_row"))):
            of_files.setdefault(item.nodeid.partition("::")[0], []).append(item)
    found: list[pytest.Item] = []
    for of_file in of_files.values():
        words = {index: {function_of(item), *cases_of(item), *settings_of(item)} for index, item in enumerate(of_file)}
        kept = set(fewest(words, {index: layouts_in(values_of(item).values()) for index, item in enumerate(of_file)}))
        found += [item for index, item in enumerate(of_file) if index not in kept]
    return found


def values_of(item: pytest.Item) -> dict[str, Any]:
    """Return the values of a test's parameters by name."""
    return dict(item.callspec.params) if hasattr(item, "callspec") else {}


def function_of(item: pytest.Item) -> str:
    """Return the name of a test's function, with its file."""
    return item.nodeid.partition("[")[0]


def cases_of(item: pytest.Item) -> list[tuple[tuple[str, str], Hashable]]:
    """Return the values of a test that are no layouts, each behind its function and the name of its parameter."""
    return [
        ((function_of(item), name), _hashable(value))
        for name, value in values_of(item).items()
        if _layout_in(value) is None
    ]


def settings_of(item: pytest.Item) -> list[Hashable]:
    """Return the settings of a test's layouts; of several layouts each behind the name of its parameter."""
    layouts = {name: layout for name, value in values_of(item).items() if (layout := _layout_in(value)) is not None}
    return [
        (name if len(layouts) > 1 else "", *setting)
        for name, layout in layouts.items()
        for setting in _settings(layout)
    ]


def settings_beyond_products(item: pytest.Item) -> list[Hashable]:
    """Return the settings of a test's layouts that no row of `test_products.py` has, by the name of the setting."""
    layouts = layouts_in(values_of(item).values())
    return [one for layout in layouts for one in _settings(layout) if not _is_of_products(layout, one[0])]


def _is_of_products(layout: Layout, name: str) -> bool:
    return getattr(layout, name) in FEATURES.get(name, ())


def _param_of(case: Any) -> Any:
    if hasattr(case, "marks"):
        return case
    return pytest.param(*case) if isinstance(case, tuple) else pytest.param(case)


def _words_of(param: Any, beside_products: bool) -> Iterator[Hashable]:
    for column, value in enumerate(param.values):
        layout = _layout_in(value)
        if layout is None:
            yield column, _hashable(value)
            continue
        for name, setting in _settings(layout):
            if not (beside_products and _is_of_products(layout, name)):
                yield column, name, setting


def _settings(layout: Layout) -> Iterator[tuple[str, Any]]:
    """Return the settings of a layout by name; of micro-batches only that there are some."""
    for entry in fields(layout):
        setting = getattr(layout, entry.name)
        yield entry.name, setting is not None if entry.name == "microbatch" else setting


def _hashable(value: Any) -> Hashable:
    try:
        hash(value)
    except TypeError:
        return repr(value)
    return value  # type: ignore[no-any-return]


def layouts_in(values: Iterable[Any]) -> list[Layout]:
    """Return the layouts among values, written as text or not."""
    return [layout for value in values if (layout := _layout_in(value)) is not None]


def _layout_in(value: Any) -> Layout | None:
    if isinstance(value, str):
        return _parsed(value)
    return value if isinstance(value, Layout) else None


@functools.cache
def _parsed(words: str) -> Layout | None:
    with contextlib.suppress(LayoutError):
        return Layout(words) if "=" in words else None
    return None


def _cost(row: Row) -> float:
    """Return what a row costs, in about a twentieth of a second of processor time: of fillings that cover as much a cheaper one is chosen."""
    layout = layout_of(row)
    num_microbatches = math.ceil(BATCH / layout.dp / layout.microbatch) if layout.microbatch else 1
    work = layout.world_size / layout.pp * num_microbatches * (1.0 if layout.recompute == "none" else 1.5)
    share = 1 + (row["model"] == "deep_mixtral") + (layout.tp > 1) + (layout.exchange == "ring")
    return layout.world_size * (5 if layout.zero == 3 else 2) + work * share


@functools.cache
def _spec(model: str) -> ModelSpec:
    """Return a decoder with the sizes of a model of `tests/models.py`, as far as rules look at them."""
    experts = {"experts": 4, "top_k": 2} if model == "deep_mixtral" else {}
    kv_heads = 0 if model in ("deep_gpt2", "parted", "deep_attentive") else 2
    heads = 2 if model == "deep_gpt2" else 4
    shape = Decoder(
        layers=4, hidden=16, heads=heads, kv_heads=kv_heads, vocab=64, sequence=12, gated=True, intermediate=40,
        tied=model in ("deep_gpt2", "deep_tied"), **experts,
    )  # fmt: skip
    return decoder_spec.spec(shape, model)
