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
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from types import MappingProxyType
from typing import Any

from torch import nn

from samestep.building.recurrences import functions_of, intercepting
from samestep.building.torch_seams import FunctionMode
from samestep.errors import InputError
from samestep.independence.gathered_parts import wider_parts
from samestep.independence.slice_prover import WHOLE, BlockProver, compare_forwards
from samestep.independence.sliced_shapes import tokens_of
from samestep.independence.traced_moves import TracedMoves, TracedStates
from samestep.independence.value_numbers import Table
from samestep.models.spec import ExpertModules, ModelSpec, is_below
from samestep.tracing.flow import CannotPassError
from samestep.tracing.forward import ValueOf
from samestep.tracing.stage_events import with_slices_of
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
            "its samples are not sequences" if not length else "they are too short" if blocks else "it has no blocks"
        )
        return _refuse_slices(spec, length, reason)
    sample = map_tensors(sample, lambda t: t[:, : size * parts] if t.dim() > 1 and t.shape[1] == length else t)

    def run(wider: frozenset[str]) -> tuple[tuple[_ProverWithMoves, _ProverWithMoves], str, str]:
        """Return the two forwards, why they do not prove that blocks work on slices, and the module where that shows."""
        table = Table()
        whole, part = (
            _ProverWithMoves(module, blocks, tokens, size * parts, table, spec.looks_in, wider)
            for tokens in (size * parts, size)
        )
        for watch in (whole, part):
            watch.tracer.has_backward, watch.tracer.cut.styles = bool(spec.differentiates_at), styles
        refusal, path = compare_forwards(whole, part, module, sample, value_of, experts)
        if not refusal and whole.parts.shapes != part.parts.shapes:
            refusal = "other parts of its blocks compute all tokens of a slice"
        return (whole, part), refusal, path

    watches, reason, failed = run(frozenset())
    wider, first, reasons = frozenset[str](), reason, dict[str, str]()
    while reason:  # parts that mix tokens by themselves may compute all of them
        called = {path for watch in watches for path in watch.tracer.modules.of}
        grown = None if _needs_slices(spec) else wider_parts(module, blocks, wider, failed, called)
        if grown is None or grown >= {*blocks}:
            is_behind = not any(is_below(failed, block) for block in blocks)
            return _refuse_slices(spec, length, reason if is_behind else first)
        reasons |= dict.fromkeys(grown - wider, reason)
        wider = grown
        watches, reason, failed = run(wider)
    return _with_slices(spec, watches, length, size * parts, reasons)


def _with_slices(
    spec: ModelSpec, watches: Sequence[_ProverWithMoves], length: int, num_tokens: int, reasons: Mapping[str, str]
) -> ModelSpec:
    """Return the spec with what two forwards, on `num_tokens` and on a slice of them, show of each tensor; `reasons` are those of modules
    that compute all tokens.
    """
    slices = {name: WHOLE if dim is None else dim for watch in watches for name, dim in watch.slices.items()}
    slices |= {name: WHOLE for watch in watches for name in watch.passed if name not in slices}
    whole, sliced = (watch.tracer.flow_recorder.flow for watch in watches)
    assert whole is not None
    assert sliced is not None
    try:
        layers = with_slices_of(watches[0].parts.added_to(spec.layers, (length, num_tokens), reasons), whole, sliced)
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


class _ProverWithMoves(BlockProver):
    """Follows a forward on a slice, in which calls that need tokens of neighbours, and recurrences, are carried out."""

    def placed(self, module: nn.Module) -> ExitStack:
        """Return a context in which blocks, and the parts that compute all tokens, are given what a rank gives them."""
        hooks = super().placed(module)
        hooks.enter_context(FunctionMode(TracedMoves(self)))
        hooks.enter_context(intercepting(functions_of(module), TracedStates(self)))
        return hooks


def _refuse_slices(spec: ModelSpec, length: int, reason: str) -> ModelSpec:
    return dataclasses.replace(spec, length=length, slice_refusal=reason)


def _length(sample: Any) -> int:
    """Return the tokens of a sample; 0 where there is none."""
    try:
        tokens = tokens_of(sample)
    except InputError:
        return 0
    return tokens.shape[1] if tokens.dim() == (3 if tokens.is_floating_point() else 2) else 0
