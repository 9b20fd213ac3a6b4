"""Proof that blocks and head work token by token, attention aside: the slices of a sequence that ranks of `cp` may hold.

A forward runs on the meta device twice, once whole and once as a rank of `cp` runs it: at the first block the hidden
states, and every other argument with a row for each token, become a slice. From there on it is followed on which token
of the slice each value depends (`dependence.py`). A fused attention returns rows of its own tokens, since the exchange
lets it see the whole sequence; and so does a module of experts, which is called with rows and computes each by itself,
however it sorts them. Slicing is right if

    queries, keys and values of every attention, and the logits, depend on the token of their own row alone
    no constant with a row for each token meets them: positions counted in a block would restart in every slice
    the logits of a token are computed alike in the slice and the whole (`value_numbers.py`): a block that divides
        by its length, or looks up what stands for it, would do so with a slice's

What cannot be shown is refused, with the operation at which it failed.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any

from torch import nn

from samestep.building.recurrences import functions_of, intercepting
from samestep.errors import InputError
from samestep.independence.gathered_parts import wider_parts
from samestep.independence.slice_prover import WHOLE, WORKS, SliceProver
from samestep.independence.sliced_shapes import Reshaping, tokens_of
from samestep.independence.traced_moves import TracedMoves, TracedStates
from samestep.independence.value_numbers import Table, first_difference
from samestep.models.spec import ExpertModules, ModelSpec, is_below
from samestep.state import snapshot
from samestep.tracing.containers import containers_of
from samestep.tracing.crossings import with_slices_of
from samestep.tracing.flow import CannotPassError
from samestep.tracing.forward import ValueOf
from samestep.tracing.meta_tensors import NeedsValuesError
from samestep.tracing.watched_forward import answer_alike, watch_forward
from samestep.trees import map_tensors


def prove(
    module: nn.Module,
    sample: Any,
    spec: ModelSpec,
    value_of: ValueOf | None,
    experts: ExpertModules,
    parts: int,
    styles: Mapping[str, str] = MappingProxyType({}),
) -> ModelSpec:
    """Return the spec with the length of its samples, and how its blocks are cut into `parts` slices or why they cannot be.

    `sample` is a batch of one real sample; tensors as long as its labels have a number for each token. `styles` are the cut styles of
    modules.
    """
    length = _length(sample)
    size = length // parts
    blocks = [path for layer in spec.layers if layer.is_block for path in layer.modules]
    if size < 2 or not blocks:
        reason = (
            "its samples are no sequences" if not length else "they are too short" if blocks else "it has no blocks"
        )
        return _refuse_slices(spec, length, reason)
    sample = _shorten_sample(sample, length, size * parts)
    trial = _SliceTrial(module, sample, spec, value_of, experts, blocks, (size * parts, size), styles)
    watches, reason, failed = trial.run(frozenset())
    wider, first, reasons = frozenset[str](), reason, dict[str, str]()
    while reason:  # parts that mix tokens by themselves may compute all of them
        called = {path for watch in watches for path in watch.tracer.modules.of}
        grown = None if _needs_slices(spec) else wider_parts(module, blocks, wider, failed, called)
        if grown is None or grown >= {*blocks}:
            is_behind = not any(is_below(failed, block) for block in blocks)
            return _refuse_slices(spec, length, reason if is_behind else first)
        reasons |= dict.fromkeys(grown - wider, reason)
        wider = grown
        watches, reason, failed = trial.run(wider)
    slices = {name: WHOLE if dim is None else dim for watch in watches for name, dim in watch.slices.items()}
    slices |= {name: WHOLE for watch in watches for name in watch.passed if name not in slices}
    whole, sliced = (watch.tracer.flow_recorder.flow for watch in watches)
    assert whole is not None
    assert sliced is not None
    try:
        layers = with_slices_of(watches[0].parts.added_to(spec.layers, (length, size * parts), reasons), whole, sliced)
    except CannotPassError as reason:
        return _refuse_slices(spec, length, str(reason))
    tried = tuple(dict.fromkeys((*spec.tried, *(text for watch in watches for text in watch.tried))))
    proven = _refuse_slices(spec, length, "")
    slices_of = tuple(sorted(slices.items()))
    return dataclasses.replace(proven, slices=slices_of, layers=layers, tried=tried)


def _needs_slices(spec: ModelSpec) -> bool:
    """Return whether a model adds up over tokens what parts that compute all of them would count on every rank, or takes gradients
    within its forward, through which nothing is gathered."""
    return bool(spec.balanced_experts or spec.couples_samples or spec.differentiates_at)


@dataclasses.dataclass(frozen=True)
class _SliceTrial:
    """A proof with some parts that compute all tokens."""

    module: nn.Module
    sample: Any
    spec: ModelSpec
    value_of: ValueOf | None
    experts: ExpertModules
    blocks: list[str]
    sizes: tuple[int, int]
    styles: Mapping[str, str]

    def run(self, parts: frozenset[str]) -> tuple[list[SliceProver], str, str]:
        """Return the two forwards, why they do not prove that blocks work on slices, and the module where that shows."""
        whole, table = self.sizes[0], Table()
        watches = [SliceProver(self.module, self.blocks, size, whole, table, self.spec.looks_in) for size in self.sizes]
        if self.spec.looks_in:
            tracers = [watch.tracer for watch in watches]
            answer_alike(tracers, self.module, self.sample, containers_of(self.module), self.value_of)
        for watch in watches:
            watch.tracer.has_backward, watch.tracer.cut.styles = bool(self.spec.differentiates_at), self.styles
        for watch in watches:
            if refusal := _refusal_of(watch, self.module, self.sample, self.value_of, self.experts, parts):
                return watches, refusal, watch.failed_at or watch.where
        if path := differing(*watches):
            return watches, f"{path} computes differently, or with other numbers, on slices of another length", path
        if watches[0].parts.shapes != watches[1].parts.shapes or watches[0].parts.moves != watches[1].parts.moves:
            return watches, "other parts of its blocks compute all tokens of a slice", ""
        return watches, "", ""


def differing(whole: SliceProver, part: SliceProver) -> str:
    """Return the module whose code computes a token otherwise in a part of the sequence; empty if none does."""
    return "" if whole.outcome == part.outcome else first_difference(whole.numbers, part.numbers)


def _refuse_slices(spec: ModelSpec, length: int, reason: str) -> ModelSpec:
    return dataclasses.replace(spec, length=length, slice_refusal=reason)


def _length(sample: Any) -> int:
    """Return the tokens of a sample; 0 where there is none."""
    try:
        tokens = tokens_of(sample)
    except InputError:
        return 0
    return tokens.shape[1] if tokens.dim() == (3 if tokens.is_floating_point() else 2) else 0


def _shorten_sample(sample: Any, length: int, wanted: int) -> Any:
    return map_tensors(sample, lambda t: t[:, :wanted] if t.dim() > 1 and t.shape[1] == length else t)


def _refusal_of(
    watch: SliceProver,
    module: nn.Module,
    sample: Any,
    value_of: ValueOf | None,
    experts: ExpertModules,
    parts: Collection[str],
) -> str:
    """Run the forward; return why it cannot be sliced, or an empty text."""
    handles = [
        module.get_submodule(path).register_forward_pre_hook(
            functools.partial(watch.enter_block, path), with_kwargs=True
        )
        for path in watch.blocks
    ]
    for path in parts:
        part = module.get_submodule(path)
        handles.append(part.register_forward_pre_hook(functools.partial(watch.enter_part, path), with_kwargs=True))
        handles.append(part.register_forward_hook(functools.partial(watch.leave_part, path)))
    handles.append(module.register_forward_hook(lambda _, args, outputs: watch.check_outputs(outputs)))
    try:
        reshaping = Reshaping(watch.whole, watch.size, lambda: watch.is_on_slices, watch.slice_of)
        with (
            snapshot.preserve_modules(module),
            reshaping,
            watch.experts_by_row(module, experts),
            TracedMoves(watch),
            intercepting(functions_of(module), TracedStates(watch)),
        ):
            watch_forward(module, sample, 1, "the model", containers_of(module), watch.tracer, value_of)
    except NeedsValuesError:
        return f"{watch.where} looks at values of its slice"
    except InputError as error:
        reason = str(error).removeprefix("the model cannot be traced: ")
        return watch.refusal or f"on a slice {reason}; {WORKS}"
    finally:
        for handle in handles:
            handle.remove()
    return watch.refusal
