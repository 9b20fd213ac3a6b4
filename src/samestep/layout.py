"""The `Layout`: WHERE a step is computed, as one line of text; changing it never changes the result.

>>> Layout("dp=4 zero=3").world_size
4
>>> Layout(dp=4, zero=3) == Layout("dp=4,zero=3")
True
>>> str(Layout("dp_shard=4 dp_replicate=2 recompute=full"))
'dp_replicate=2 dp_shard=4 zero=3 recompute=full'

`zero` is the ZeRO stage (Rajbhandari et al. 2020, arXiv:1910.02054): 0 replicates everything, 1 shards the optimizer's
state over `dp_shard`, 2 also the gradients, 3 also the weights (what PyTorch calls FSDP). `dp=N` is short for
`dp_replicate=N` under zero=0 and for `dp_shard=N` otherwise. `ep` shards the experts of a layer over data ranks: it
adds no ranks, but divides those of the innermost data axis.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any, Literal, get_args, get_type_hints

from samestep.errors import LayoutError, did_you_mean, short_repr, word_of_others
from samestep.records import changed
from samestep.schedules import DEFAULT, SCHEDULES

Recompute = Literal["none", "selective", "alternate", "full", "offload"]
Accumulate = Literal["sharded", "full"]
Reduce = Literal["ring", "hierarchical", "root"]
TokenExchange = Literal["auto", "heads", "ring", "hybrid"]
MOST_RANKS = 2**20
"""The largest number of ranks: no machine has more, and the divisors of larger numbers take long to find."""
MOST_TOKENS = 2**30
"""The largest number of tokens of a chunk, more than any micro-batch has."""
MOST_SAMPLES = 2**24
"""The largest number of samples of a batch: their indices are an array on every rank."""


def degree() -> int:
    """Declare a field that is a number of ranks or stages, at least 1."""
    return field(default=1, metadata={"is_degree": True})


def model_axis() -> int:
    """Declare the degree of a model axis: its ranks work on the same samples, each with a part of the weights, or a copy.

    Model axes multiply the ranks there are, and stand inside all others: the ranks of the first one are neighbours.
    """
    return field(default=1, metadata={"is_degree": True, "is_model_axis": True})


@dataclass(frozen=True, init=False)
class Layout:
    """A layout says how a step is parallelized: the size of each mesh dimension, and the memory options. It never changes the result.

    A layout is made from a line of text, from keywords, or from both: `Layout("dp=2 zero=3")`, `Layout(dp=2, zero=3)`.
    `microbatch` is in samples per rank; None runs all samples of a rank in one micro-batch.
    """

    dp_replicate: int = degree()
    dp_shard: int = degree()
    tp: int = model_axis()
    sequence_parallel: bool = False
    cp: int = degree()
    exchange: TokenExchange = "auto"
    """How attention sees all tokens under `cp`: by heads for tokens, by keys and values that pass around a ring, or by heads
    among neighbours and a ring of such groups. `auto` exchanges heads if the degree divides them, and is a ring otherwise."""
    pp: int = degree()
    ep: int = degree()
    schedule: str = DEFAULT
    """Pipeline schedule, one of `SCHEDULES`."""
    virtual_stages: int = degree()
    zero: int = 0
    microbatch: int | None = None
    loss_chunk: int | None = None
    """Tokens in a chunk of the logits and the cross-entropy; None computes the logits of a micro-batch at once."""
    mlp_chunk: int | None = None
    """Tokens in a chunk of the MLP, and of other parts of blocks that act on each token alone; None computes all at once."""
    recompute: Recompute = "none"
    accumulate: Accumulate = "sharded"
    reduce: Reduce = "ring"
    offload: bool = False

    def __init__(self, text: str = "", /, **options: Any) -> None:
        """Read the options of a line of text, and those given as keywords.

        Raises:
            LayoutError: an option is unknown or given twice, or a value cannot be used.
        """
        named = _options_in(text)
        options = {_ALIASES.get(name, name): value for name, value in options.items()}
        if twice := [name for name in options if name in named]:
            raise LayoutError(
                "layout-option-twice", f"{twice[0]!r} is given twice, in {text!r} and as a keyword; give it once"
            )
        values = {option.name: option.default for option in fields(self)} | _values_of(type(self), named | options)
        self.__dict__.update(values)
        for name in self._fields_with("is_degree"):
            check_number(name, getattr(self, name))
        if self.schedule not in SCHEDULES:
            raise _none_of("schedule", self.schedule, SCHEDULES)
        check_number("microbatch", self.microbatch, MOST_SAMPLES)
        check_number("loss_chunk", self.loss_chunk, MOST_TOKENS)
        check_number("mlp_chunk", self.mlp_chunk, MOST_TOKENS)
        if self.world_size > MOST_RANKS:
            raise LayoutError(
                "value-out-of-range", f"the degrees multiply to {self.world_size} ranks. Use at most {MOST_RANKS}"
            )
        if self.zero not in (0, 1, 2, 3):
            raise LayoutError("value-out-of-range", f"zero={self.zero}: the ZeRO stages are 0, 1, 2 and 3")
        if self.zero == 0 and self.dp_shard > 1:
            raise LayoutError(
                "zero-shards-nothing",
                f"dp_shard={self.dp_shard} with zero=0 would shard nothing: "
                f"use dp_replicate={self.dp_shard}, or zero=1, 2 or 3",
            )

    @property
    def options(self) -> dict[str, Any]:
        """The options that are not the default, and `dp_replicate`, which is in every table of a layout."""
        defaults = {option.name: option.default for option in fields(self)}
        values = ((name, getattr(self, name)) for name in defaults)
        return {name: value for name, value in values if name == "dp_replicate" or value != defaults[name]}

    @property
    def dp(self) -> int:
        """Number of ranks that read different samples."""
        return self.dp_replicate * self.dp_shard

    @property
    def num_shards(self) -> int:
        """Number of ranks of a `dp_shard` group; those of `cp` hold equal weights, so they are among them."""
        return self.dp_shard * self.cp if self.zero else 1

    @property
    def gathers_weights(self) -> bool:
        """Whether a forward gathers weights of which each rank holds some rows: under ZeRO-2 and ZeRO-3 on several shards."""
        return self.zero >= 2 and self.num_shards > 1

    @property
    def num_replicas(self) -> int:
        """Number of ranks of a `dp_replicate` group; those of `cp` are among them if nothing is sharded."""
        return self.dp_replicate if self.zero else self.dp_replicate * self.cp

    @property
    def innermost_data_ranks(self) -> int:
        """Number of ranks of a group of the innermost data axis, those of `cp` among them."""
        return self.num_shards if self.num_shards > 1 else self.num_replicas

    def _fields_with(self, mark: str) -> tuple[str, ...]:
        kind: Any = type(self)  # mypy does not take it for hashable, since its objects are hashed by their fields
        return _fields_with(kind, mark)

    @cached_property
    def model_axes(self) -> dict[str, int]:
        """Degrees of the axes that are declared as `model_axis`, the innermost first."""
        return {name: getattr(self, name) for name in self._fields_with("is_model_axis")}

    @cached_property
    def model_ranks(self) -> int:
        """Number of ranks that work on the same samples, of one pipeline stage and one slice of the sequence."""
        return math.prod(self.model_axes.values())

    @property
    def weight_axes(self) -> dict[str, int]:
        """Degrees of the axes whose ranks may hold different parts of a weight, whatever ZeRO does."""
        return {**self.model_axes, "ep": self.ep}

    @property
    def inner_degrees(self) -> dict[str, int]:
        """Degrees of the axes that divide a model, its layers, its sequences or its experts: all but those of data."""
        return {**self.model_axes, "pp": self.pp, "cp": self.cp, "ep": self.ep}

    @cached_property
    def cuts(self) -> tuple[int | str | None, ...]:
        """Degrees and switches that determine the part of a layer that a rank computes, and how the head computes it."""
        degrees = *self.model_axes.values(), self.sequence_parallel, self.cp, self.exchange, self.ep
        return *degrees, self.loss_chunk, self.mlp_chunk

    @property
    def borrows_data_ranks(self) -> bool:
        """Whether an axis such as `ep`, which adds no ranks, divides those of the innermost data axis."""
        return self.ep > 1

    @property
    def dp_cp_size(self) -> int:
        """Number of ranks whose gradients of one weight are summed, because each has seen other tokens."""
        return self.dp * self.cp

    @property
    def world_size(self) -> int:
        """Total number of ranks."""
        return self.dp * self.cp * self.model_ranks * self.pp

    def but(self, **words: Any) -> Layout:
        """Return this layout with some words changed to values that are known to be right, which `replace` would check."""
        return changed(self, **words)

    def __str__(self) -> str:
        """Return the shortest line that parses back to this layout."""
        plain = self.dp_shard == 1 if self.zero == 0 else self.dp_replicate == 1
        words = [f"dp={self.dp}"] if plain else [f"dp_replicate={self.dp_replicate}", f"dp_shard={self.dp_shard}"]
        for entry in fields(self)[2:]:
            value = getattr(self, entry.name)
            if value != entry.default:
                words.append(entry.name if value is True else f"{entry.name}={value}")
        return " ".join(words)


def layout_from(layout: str | Layout | Mapping[str, Any]) -> Layout:
    """Return the layout that a line of text, or the table of a job, names.

    Raises:
        LayoutError: it names none.
    """
    if isinstance(layout, Layout):
        return layout
    return Layout(layout) if isinstance(layout, str) else Layout(**layout)


_VALUES_OF_OTHERS = {
    "zb": "zero-bubble",
    "zerobubble": "zero-bubble",
    **dict.fromkeys(("ulysses", "a2a"), "heads"),
    "p2p": "ring",
    **dict.fromkeys(("usp", "a2a+p2p"), "hybrid"),
    "interleaved1f1b": "interleaved",
}
"""Names that other frameworks have for a value, and the value."""
_ALIASES = {"cp_method": "exchange"}
"""Options with a second name."""


def _options_in(text: Any) -> dict[str, Any]:
    """Return the options of a line of text with their values as text, and True for a switch."""
    if not isinstance(text, str):
        raise LayoutError(
            "layout-option-value", f"{short_repr(text)} is not a layout. Use one line of text, such as 'dp=2 tp=2'"
        )
    options: dict[str, Any] = {}
    for word in filter(None, re.split(r"[\s,;]+", re.sub(r"\s*=\s*", "=", text))):
        name, equals, value = word.partition("=")
        name = _ALIASES.get(name, name)
        if name in options:
            raise LayoutError("layout-option-twice", f"{name!r} is given twice in {text!r}; give it once")
        options[name] = value if equals else True
    return options


def _values_of(kind: Any, options: dict[str, Any]) -> dict[str, Any]:
    """Return the values of fields that options set: `dp` sets one of two fields, and a sharded layout has `zero=3`."""
    hints = _types_of(kind)
    known = ["dp", *hints]
    for name in options:
        if name not in known:
            raise LayoutError(
                "layout-option-unknown",
                f"unknown layout option {name!r}{_hint(name, known)}; the options are {', '.join(known)}",
            )
    values = {name: _read(name, value, hints.get(name, int)) for name, value in options.items()}
    if "dp" in values:
        if "dp_replicate" in values or "dp_shard" in values:
            raise LayoutError(
                "layout-option-twice", "dp=N sets dp_replicate or dp_shard itself: give dp alone, or the two of them"
            )
        check_number("dp", values["dp"])
        values["dp_shard" if values.get("zero", 0) else "dp_replicate"] = values.pop("dp")
    elif values.get("dp_shard", 1) > 1:
        values.setdefault("zero", 3)
    return values


def _hint(name: str, known: Iterable[str]) -> str:
    """Return the option that was probably meant, as a hint: the same thing in the words of another framework first."""
    if option := word_of_others(name):
        return f": use {option}{' of the job' * ('.' in option)}"
    return did_you_mean(name.lower(), known)


@functools.cache
def _fields_with(layout: type[Any], mark: str) -> tuple[str, ...]:
    return tuple(field.name for field in fields(layout) if mark in field.metadata)


@functools.cache
def _types_of(layout: type[Any]) -> dict[str, Any]:
    """Return the type of each field of a layout; to evaluate their text takes longer than all else in reading a layout."""
    return get_type_hints(layout)


def _read(name: str, value: Any, hint: Any) -> Any:
    """Return the value of one word, converted to the type of its field."""
    if isinstance(value, str):
        value = _VALUES_OF_OTHERS.get(value.lower(), value.lower())
    if hint is str:
        return str(value)
    choices = get_args(hint)
    if value is None and type(None) in choices:
        return None
    if hint is bool:
        value = {"true": True, "false": False, "on": True, "off": False}.get(str(value).lower(), value)
        if isinstance(value, bool):
            return value
        raise LayoutError(
            "layout-option-value", f"{name}={value}: {name} is a switch, so write {name} alone or {name}=off"
        )
    if choices and all(isinstance(choice, str) for choice in choices):
        if value is True:
            raise LayoutError("layout-option-value", f"{name} needs a value: {name}={'|'.join(choices)}")
        if value in choices:
            return value
        raise _none_of(name, value, choices)
    return _number_of(name, value)


def _number_of(name: str, value: Any) -> int:
    if value is True:
        raise LayoutError("layout-option-value", f"{name} needs a value: {name}=N")
    try:
        number = int(value) if isinstance(value, str | int) else None
    except ValueError:
        number = None
    if number is None:
        raise LayoutError("layout-option-value", f"{name} must be a whole number, got {name}={value}")
    if abs(number) > MOST_SAMPLES * MOST_RANKS:
        raise LayoutError("value-out-of-range", f"{name} is too large: {short_repr(number)}")
    return number


def _none_of(name: str, value: object, choices: Iterable[str]) -> LayoutError:
    hint = did_you_mean(str(value), choices) or _hint(name, ())
    return LayoutError("layout-option-value", f"{name}={value} must be one of {', '.join(choices)}{hint}")


def check_number(name: str, value: int | None, most: int = MOST_RANKS) -> None:
    """Refuse a number of ranks, devices, stages, samples or tokens that no layout can have; None is the default.

    Raises:
        LayoutError: it is below 1 or above `most`.
    """
    if value is not None and not 1 <= value <= most:
        raise LayoutError("value-out-of-range", f"{name}={value} must be from 1 to {most}")


def option_without(option: str) -> str:
    """Return the value of an option that divides nothing: `zero=0` for `zero=3`, `tp=1` for `tp=2`."""
    name = option.partition("=")[0]
    return f"{name}={0 if name == 'zero' else 1}"
