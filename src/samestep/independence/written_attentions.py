"""The attentions that blocks write out (`building/attention/written_out.py`), found in a traced forward on slices of the tokens.

A product begins one if each factor has a row for each token along a dimension that the product keeps; it is one if queries, keys and
values have the tokens of one sequence, and each mask is whole, or one that the code makes for the tokens it sees and of which the values
show what it hides: later keys, and keys out of a window. A rank that sees a slice makes such a mask for the slice, so what it hides is
kept by its rule of distances, and not by its elements.

Whatever else the code does with scores, their elements are computed as it says, and tokens are mixed as they were.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from samestep.building.attention.interception import Intercepting, KnownFormulas, as_fused
from samestep.building.attention.score_form import LEAST_FILL, ScoreMask, WrittenCall
from samestep.building.attention.written_out import Formulas
from samestep.building.torch_seams import disable_current_modes
from samestep.independence.dependence import Along, Dependences
from samestep.independence.value_numbers import ValueNumbers
from samestep.models.layer_spec import LayerSpec
from samestep.models.spec import COUNTS, ModelSpec
from samestep.models.written_attention import MadeMask, WrittenAttention
from samestep.tracing.arranged_layers import spread_over_calls
from samestep.tracing.forward import ValueOf
from samestep.tracing.looks import Looks
from samestep.tracing.meta_tensors import KnownValues
from samestep.tracing.trace import samples_traced, trace


class SlicedForward(Protocol):
    """A traced forward whose blocks are given a slice of the tokens (`token_slices.SliceProver`)."""

    is_following: bool
    known: Dependences
    values: KnownValues
    looks: Looks
    numbers: ValueNumbers
    size: int
    whole: int

    @property
    def is_on_slices(self) -> bool:
        """Whether the code that runs now is given slices."""
        ...

    @property
    def where(self) -> str:
        """Path of the module whose code runs."""
        ...

    def runs(self, path: str) -> bool:
        """Return whether the forward of a module runs."""
        ...

    def key(self, tensor: Tensor) -> int:
        """Return the address of a tensor's storage in bytes."""
        ...


Found = dict[str, tuple[WrittenAttention, ...]]
"""The attentions that each block writes out, by its path."""


_BY_KEY = MadeMask(by_key=True)


class TracedFormulas(Formulas):
    """The attentions that the blocks of a traced forward write out."""

    def __init__(self, watch: SlicedForward, expected: Found | None) -> None:
        super().__init__()
        self._watch, self._expected = watch, expected
        self._found: dict[str, list[tuple[WrittenAttention, ...]]] = {}
        self._tokens: dict[int, tuple[int, int]] = {}

    @property
    def found(self) -> Found | None:
        """The attentions found; None where calls of one block write out others."""
        is_alike = all(calls.count(calls[0]) == len(calls) for calls in self._found.values())
        return {path: calls[0] for path, calls in self._found.items() if calls[0]} if is_alike else None

    def are_those_of(self, whole: TracedFormulas) -> bool:
        """Return whether blocks write out the same attentions as in the forward on whole sequences."""
        mine, others = self.found, whole.found
        if mine is None or others is None or mine.keys() != others.keys():
            return False
        return all([one.number for one in some] == [one.number for one in others[path]] for path, some in mine.items())

    def enter(self, path: str) -> None:
        """Begin to count the products of a block."""
        super().enter(path)
        self._found.setdefault(path, []).append(())

    @property
    def is_within(self) -> bool:
        """Whether code runs that is not given slices."""
        return not self._watch.is_on_slices

    def begins(self, first: Tensor, second: Tensor) -> tuple[int, int] | None:
        """Return the dimensions of tokens of two factors that a block multiplies."""
        watch = self._watch
        if not watch.is_following or not watch.runs(self.path):
            return None
        with disable_current_modes():
            found = [self._token_dim(one) for one in (first, second)]
        if found[0] is None or found[1] is None:
            return None
        self._tokens[self.count] = found[0], found[1]
        return found[0], found[1]

    def _token_dim(self, factor: Tensor) -> int | None:
        known = self._watch.known.of(factor) if factor.is_meta else None
        if not isinstance(known, Along) or known.dim < 0 or not self._watch.known.has_rows(factor, known.dim):
            return None
        return known.dim - factor.dim()

    def reject(self, what: str) -> None:
        """Let the elements be computed as the code says, which mixes tokens as it did."""

    def number_in(self, tensor: Tensor, hides: float) -> float | None:
        """Return the value of a tensor of one element."""
        watch = self._watch
        with disable_current_modes():
            if not tensor.is_meta:
                return float(tensor)
            is_constant = watch.values.knows(tensor) and not watch.looks.is_open([watch.key(tensor)])
            return float(watch.values.of(tensor)) if is_constant else None

    def attend(self, written: WrittenCall) -> Tensor | None:
        """Return the output of an attention on the meta device, and record it."""
        watch, path = self._watch, self.path
        if not watch.runs(path):
            return None
        with disable_current_modes():
            may_go = written.call.softcap is None
            made = [_BY_KEY if may_go and self._is_by_key(mask.tensor) else self._made(mask) for mask in written.masks]
            whole = [
                _is_whole(mask.tensor, watch.whole) and one != _BY_KEY
                for mask, one in zip(written.masks, made, strict=True)
            ]
            sinks = written.call.sinks
            if not all(is_whole or one for is_whole, one in zip(whole, made, strict=True)):
                return None
            if any(
                one != _BY_KEY and watch.known.of(mask.tensor) is not None
                for mask, one in zip(written.masks, made, strict=True)
            ):
                return None
            if sinks is not None and watch.known.of(sinks) is not None:
                return None
        mine = WrittenAttention(number=written.number, tokens=self._tokens[written.number], masks=tuple(made))
        place = len(self._found[path][-1])
        if self._expected is not None:
            before = self._expected.get(path, ())[place : place + 1]
            if not before or not self._is_expected(mine, before[0], written.masks, whole):
                return None
            # Where a rank is given the mask whole, it is used as it is.
            own = [None if is_whole else one for is_whole, one in zip(whole, before[0].masks, strict=True)]
            self._found[path][-1] += (dataclasses.replace(mine, masks=tuple(own)),)
            # A window may be wider than the slice, which then shows none.
            made = [one if is_whole else rule for is_whole, one, rule in zip(whole, made, before[0].masks, strict=True)]
        else:
            self._found[path][-1] += (mine,)
        written = written.with_keys([mask for mask, one in zip(written.masks, made, strict=True) if one == _BY_KEY])
        given = [mask for mask, one in zip(written.masks, made, strict=True) if one is None]
        call = written.masked_by(given)
        output: Tensor = F.scaled_dot_product_attention(
            *call[:3],
            call.attn_mask,
            call.dropout_p,
            any(one is not None and one.causal for one in made),
            scale=call.scale,
        )
        with disable_current_modes():
            sink = None if sinks is None else watch.numbers.of(sinks)
            what = (repr(made), call.softcap, sink, watch.numbers.of(output))
            watch.numbers.name(output, "written attention", *what, where=watch.where)
        return output

    def _is_by_key(self, mask: Tensor) -> bool:
        """Return whether a mask [B, A, 1, S] has a number for each key of a slice."""
        known = self._watch.known.of(mask) if mask.is_meta else None
        return mask.shape[-2] == 1 and isinstance(known, Along) and self._watch.known.has_rows(mask, mask.dim() - 1)

    def _is_expected(
        self, mine: WrittenAttention, before: WrittenAttention, masks: Iterable[ScoreMask], whole: Iterable[bool]
    ) -> bool:
        """Return whether an attention on a slice is that on the whole, with masks of the same rules."""
        if (mine.number, mine.tokens, len(mine.masks)) != (before.number, before.tokens, len(before.masks)):
            return False
        if [one == _BY_KEY for one in mine.masks] != [one == _BY_KEY for one in before.masks]:
            return False
        for mask, is_whole, rule in zip(masks, whole, before.masks, strict=True):
            if not is_whole and rule != _BY_KEY and (rule is None or not _follows(self._hidden(mask), rule)):
                return False
        return True

    def _made(self, mask: ScoreMask) -> MadeMask | None:
        """Return the rule of a mask of known values that depends on no sample; None where it has none."""
        hidden = self._hidden(mask)
        return None if hidden is None else _rule_of(hidden)

    def _hidden(self, mask: ScoreMask) -> Tensor | None:
        """Return which keys a mask hides from which queries [L, S]; None where that is not known, or another one for each head."""
        watch, tensor = self._watch, mask.tensor
        if (
            tensor.dim() < 2
            or tensor.shape[-1] != tensor.shape[-2]
            or tensor.shape[-1] not in (watch.size, watch.whole)
        ):
            return None
        if not watch.values.knows(tensor):
            return None
        key = watch.key(tensor) if tensor.is_meta else 0
        if tensor.is_meta and (watch.looks.is_open([key]) or key in watch.looks.tokens):
            return None
        value = watch.values.of(tensor).flatten(0, -3) if tensor.dim() > 2 else watch.values.of(tensor)[None]
        if not bool((value == value[:1]).all()):
            return None
        value = value[0]
        if mask.fill is not None:
            return value
        value = value * mask.times
        hidden = value <= LEAST_FILL
        return hidden if bool((hidden | (value == 0)).all()) else None


def _is_whole(mask: Tensor, length: int) -> bool:
    return mask.shape[-1] in (1, length) and mask.shape[-2] in (1, length)


def _rule_of(hidden: Tensor) -> MadeMask | None:
    """Return the rule by which keys are hidden."""
    size = len(hidden)
    rules = [MadeMask(causal=True), MadeMask(causal=False)]
    windows = [int((~hidden[:, 0]).sum()), int((~hidden[0]).sum())]
    rules += [MadeMask(causal=causal, window=window) for window in windows for causal in (True, False) if window < size]
    return next((rule for rule in rules if _follows(hidden, rule)), None)


def _follows(hidden: Tensor | None, rule: MadeMask) -> bool:
    """Return whether a rule hides these keys."""
    if hidden is None:
        return False
    places = torch.arange(len(hidden))
    distance = places[:, None] - places
    seen = distance >= 0 if rule.causal else torch.ones_like(hidden, dtype=torch.bool)
    if rule.window is not None:
        seen = seen & ((distance if rule.causal else distance.abs()) < rule.window)
    return torch.equal(seen, ~hidden)


# -- the price of a layer whose attentions are exchanged -------------------------------------------


def with_written_attentions(
    spec: ModelSpec,
    module: nn.Module,
    sample: Any,
    value_of: ValueOf | None,
    styles: Mapping[str, str],
    found: Found,
    blocks: Iterable[str],
    parts: Collection[str],
) -> tuple[LayerSpec, ...]:
    """Return the layers with the attentions that their blocks write out exchanged, by two forwards of the whole model."""

    def layers() -> tuple[LayerSpec, ...]:
        keeps_all = bool(spec.varies_at)
        traced = trace(module, sample, spec.name, value_of, styles=styles, keeps_all=keeps_all)
        return spread_over_calls(traced).layers

    before = layers()
    formulas = KnownFormulas(found, as_fused, samples_traced(module))
    with _entering(module, formulas, blocks, parts), Intercepting(formulas):
        after = layers()
    changed = []
    for layer, one, other in zip(spec.layers, before, after, strict=True):
        mine = {path for path in layer.called if path in found}
        changed.append(_changed(layer, one, other, {path: found[path] for path in sorted(mine)}) if mine else layer)
    return tuple(changed)


@contextmanager
def _entering(
    module: nn.Module, formulas: KnownFormulas, blocks: Iterable[str], parts: Collection[str]
) -> Iterator[None]:
    def within(value: bool) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            formulas.runs_part = value

        return hook

    with ExitStack() as hooks:
        for path in blocks:
            enter = functools.partial(lambda path, *_: formulas.enter(path), path)
            hooks.enter_context(module.get_submodule(path).register_forward_pre_hook(enter))
        for path in parts:
            hooks.enter_context(module.get_submodule(path).register_forward_pre_hook(within(True)))
            hooks.enter_context(module.get_submodule(path).register_forward_hook(within(False)))
        yield


def _changed(layer: LayerSpec, before: LayerSpec, after: LayerSpec, found: Found) -> LayerSpec:
    """Return a layer with what changes from one forward to the other."""
    counts = {name: max(0, getattr(layer, name) + getattr(after, name) - getattr(before, name)) for name in COUNTS}
    products = [*layer.products]
    if len(products) == len(before.products):
        products, rest = [], [*zip(layer.products, before.products, strict=True)]
        for one in after.products:
            if one.is_attention and not (rest and rest[0][1] == one):
                pairs = [rest.pop(0)[0] for _ in range(2) if rest and rest[0][1].factors == "pair"]
                cut = next((pair.cut for pair in pairs), one.cut)
                products.append(
                    dataclasses.replace(one, cut="count" if cut else "", owner=pairs[0].owner if pairs else one.owner)
                )
            elif rest:
                products.append(rest.pop(0)[0])
    else:
        products = [*after.products]
    return dataclasses.replace(
        layer, **counts, products=tuple(products), exchanges=after.exchanges, written=tuple(sorted(found.items()))
    )
