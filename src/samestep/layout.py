"""The `Layout`: WHERE a step is computed, as one line of text; changing it never changes the result.

>>> Layout.parse("dp=4 zero=3").world_size
4
>>> str(Layout.parse("dp_shard=4 dp_replicate=2 recompute=full"))
'dp_replicate=2 dp_shard=4 zero=3 recompute=full'

`zero` is the ZeRO stage (Rajbhandari et al. 2020, arXiv:1910.02054): 0 replicates everything, 1 shards the optimizer's
state over `dp_shard`, 2 also the gradients, 3 also the weights (what PyTorch calls FSDP). `dp=N` is short for
`dp_replicate=N` under zero=0 and for `dp_shard=N` otherwise. `ep` shards the experts of a layer over data ranks: it
adds no ranks, but divides those of the innermost data axis.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any, Literal, get_args, get_type_hints

from samestep.errors import LayoutError, did_you_mean, short_repr
from samestep.layout_limits import MOST_RANKS, check_degree, check_microbatch, check_tokens
from samestep.records import changed
from samestep.schedules import DEFAULT, SCHEDULES

Recompute = Literal["none", "selective", "alternate", "full", "offload"]
Accumulate = Literal["sharded", "full"]
Reduce = Literal["ring", "hierarchical", "root"]
TokenExchange = Literal["auto", "heads", "ring", "hybrid"]


def degree() -> int:
    """Declare a field that is a number of ranks or stages, at least 1."""
    return field(default=1, metadata={"is_degree": True})


def model_axis() -> int:
    """Declare the degree of a model axis: its ranks work on the same samples, each with a part of the weights, or a copy.

    Model axes multiply the ranks there are, and stand inside all others: the ranks of the first one are neighbours.
    """
    return field(default=1, metadata={"is_degree": True, "is_model_axis": True})


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Degrees and switches of an arrangement of ranks: they change where and when a step is computed, never its result.

    `microbatch` is in samples per rank; None runs all samples of a rank in one micro-batch.
    """

    dp_replicate: int = degree()
    dp_shard: int = degree()
    tp: int = model_axis()
    sequence_parallel: bool = False
    cp: int = degree()
    exchange: TokenExchange = "auto"
    """How attention sees all tokens under `cp`: by heads for tokens, by keys and values that pass around a ring, or by heads
    among neighbours and a ring of such groups. `auto` exchanges heads where the degree divides them, and is a ring elsewhere."""
    pp: int = degree()
    ep: int = degree()
    schedule: str = DEFAULT
    """Pipeline schedule, one of `SCHEDULES`."""
    virtual_stages: int = degree()
    zero: int = 0
    microbatch: int | None = None
    loss_chunk: int | None = None
    """Tokens of a chunk in which logits and cross entropy are computed; None makes the logits of a micro-batch at once."""
    mlp_chunk: int | None = None
    """Tokens of a chunk in which the parts of blocks that act on each token by itself are computed; None computes all at once."""
    recompute: Recompute = "none"
    accumulate: Accumulate = "sharded"
    reduce: Reduce = "ring"
    offload: bool = False

    def __post_init__(self) -> None:
        for name in self._fields_with("is_degree"):
            check_degree(name, getattr(self, name))
        if self.schedule not in SCHEDULES:
            raise _none_of("schedule", self.schedule, SCHEDULES)
        check_microbatch(self.microbatch)
        check_tokens("loss_chunk", self.loss_chunk, "a chunk of the loss")
        check_tokens("mlp_chunk", self.mlp_chunk, "a chunk of an MLP")
        if self.world_size > MOST_RANKS:
            raise LayoutError(f"the degrees multiply to {self.world_size} ranks; at most {MOST_RANKS} work")
        if self.zero not in (0, 1, 2, 3):
            raise LayoutError(f"zero={self.zero}: the ZeRO stages are 0, 1, 2 and 3")
        if self.zero == 0 and self.dp_shard > 1:
            raise LayoutError(
                f"dp_shard={self.dp_shard} with zero=0 would shard nothing: "
                f"use dp_replicate={self.dp_shard}, or zero=1, 2 or 3"
            )

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
        kind: Any = type(self)  # hashable, as in `of`
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

    @classmethod
    def parse(cls, text: str) -> Layout:
        """Return the layout that a line of words `name=value` describes; a switch such as `offload` alone means on.

        Raises:
            LayoutError: a word cannot be read; the text names it and the words that can be.
        """
        if not isinstance(text, str):
            raise LayoutError(f"{short_repr(text)} is no line of text; a layout is one, such as 'dp=2 tp=2'")
        words: dict[str, Any] = {}
        for word in text.split():
            name, equals, value = word.partition("=")
            if separators := set(word) & set(",;"):
                blanks = " ".join(text.translate({ord(mark): " " for mark in separators}).split())
                raise LayoutError(f"{word!r}: words are separated by blanks, as in {blanks!r}")
            if name in words:
                raise LayoutError(f"{name!r} is given twice in {text!r}; give it once")
            words[name] = value if equals else True
        return cls.of(words)

    @classmethod
    def of(cls, words: dict[str, Any]) -> Layout:
        """Return the layout of the given words and values, as a job file's `[layout]` table holds them.

        Raises:
            LayoutError: a word is unknown, a value cannot be read, or `dp` is given with `dp_replicate` or `dp_shard`.
        """
        kind: Any = cls  # which mypy does not take for hashable, since its objects are hashed by their fields
        hints = _types_of(kind)
        known = ["dp", *hints]
        for name in words:
            if name not in known:
                hint = did_you_mean(name, known)
                raise LayoutError(f"unknown layout word {name!r}{hint}; the words are {', '.join(known)}")
        values = {name: _read(name, value, hints.get(name, int)) for name, value in words.items()}
        if "dp" in values:
            if "dp_replicate" in values or "dp_shard" in values:
                raise LayoutError("dp=N sets dp_replicate or dp_shard itself: give dp alone, or the two of them")
            degree = values.pop("dp")
            values["dp_shard" if values.get("zero", 0) else "dp_replicate"] = degree
        elif values.get("dp_shard", 1) > 1:
            values.setdefault("zero", 3)
        return cls(**values)

    def __str__(self) -> str:
        """Return the shortest line that parses back to this layout."""
        plain = self.dp_shard == 1 if self.zero == 0 else self.dp_replicate == 1
        words = [f"dp={self.dp}"] if plain else [f"dp_replicate={self.dp_replicate}", f"dp_shard={self.dp_shard}"]
        for one in fields(self)[2:]:
            value = getattr(self, one.name)
            if value != one.default:
                words.append(one.name if value is True else f"{one.name}={value}")
        return " ".join(words)


@functools.cache
def _fields_with(layout: type[Any], mark: str) -> tuple[str, ...]:
    return tuple(one.name for one in fields(layout) if mark in one.metadata)


@functools.cache
def _types_of(layout: type[Any]) -> dict[str, Any]:
    """Return the type of each field of a layout; to evaluate their text takes longer than all else in reading a layout."""
    return get_type_hints(layout)


def _read(name: str, value: Any, hint: Any) -> Any:
    """Return the value of one word, converted to the type of its field."""
    if hint is str:
        return str(value)
    choices = get_args(hint)
    if hint is bool:
        named = {"true": True, "false": False, "on": True, "off": False}
        value = named.get(str(value).lower(), value)
        if isinstance(value, bool):
            return value
        raise LayoutError(f"{name}={value}: {name} is a switch, so write {name} alone or {name}=off")
    if choices and all(isinstance(choice, str) for choice in choices):
        if value in choices:
            return value
        raise _none_of(name, value, choices)
    if value is True:
        raise LayoutError(f"{name} needs a value: {name}=N")
    try:
        if isinstance(value, str | int):
            return int(value)
        raise TypeError
    except (TypeError, ValueError):
        raise LayoutError(f"{name}={value} is not a whole number") from None


def _none_of(name: str, value: object, choices: Iterable[str]) -> LayoutError:
    return LayoutError(f"{name}={value} is none of {', '.join(choices)}{did_you_mean(str(value), choices)}")
