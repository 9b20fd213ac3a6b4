"""`samestep inspect`: the findings of a trace of a job's model, as tables; it makes the examinations of `train` and no
others.

layers      blocks and what stands between them: weights, work, and what a pipeline stage that begins there is sent
weights     how tensor parallelism cuts each weight, or why every rank has it whole
experts     where tokens are dispatched to experts
samples     whether samples and tokens are independent, which operations were tested, and the state that a forward keeps
words       the words of a layout that the job may have, and the reason where it may not
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from samestep import calls
from samestep.enumeration import valid_layouts
from samestep.job import Job
from samestep.models import catalog
from samestep.models.layer_parts import Crossing
from samestep.models.layer_spec import LayerSpec
from samestep.models.param_spec import ParamSpec
from samestep.models.spec import ModelSpec, StateSpec
from samestep.output.text import align_columns
from samestep.training.workload import trace_job

_STYLES = {
    "column": "by columns",
    "row": "by rows, outputs summed",
    "vocab": "by vocabulary",
    "gather": "by columns, outputs gathered",
}
"""The styles of a cut in words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspection:
    """The facts about a model that are known before it is trained."""

    spec: ModelSpec
    words: tuple[tuple[str, str], ...]
    """Words of a layout, each with the reason why the job may not have it; empty where it may."""
    gathered: Mapping[str, str] = field(default_factory=dict)
    """Modules that a plan of cuts treats otherwise, whose outputs are gathered or which stay whole, and why."""
    states: tuple[StateSpec, ...] = ()
    """The states that a forward keeps."""
    waived: tuple[str, ...] = ()
    """Refusals of initial values that `run.allow` waives."""

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(self.to_text())

    def to_text(self) -> str:
        """Return the tables for a terminal."""
        spec = self.spec
        trained = sum(param.numel for param in spec.params if param.trainable)
        blocks = sum(layer.is_block for layer in spec.layers)
        parts_found = f"{blocks} blocks" if blocks else f"{len(spec.layers)} calls of modules"
        options = ({"option": word, "reason": reason or "yes"} for word, reason in self.words)
        parts = [
            f"{spec.name}: {spec.num_params:,} weights, {trained:,} trained, {parts_found}, "
            f"{spec.forward_flops:,} FLOPs in the forward pass of a sample",
            _table(_LAYER_HEAD, self._layers(), (0, 5)),
            f"weights under tp{f': none is sharded, {spec.cut_refusal}' if spec.cut_refusal else ''}",
            _table(_WEIGHT_HEAD, self._weights(), (0, 1, 3)),
            "\n".join(self._experts()),
            "\n".join(self._samples()),
            _table(("layout option", "supported"), options, (0, 1)),
        ]
        return "\n\n".join(part for part in parts if part)

    def to_record(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return {
            "model": self.spec.name,
            "weights": self.spec.num_params,
            "layers": list(self._layers()),
            "cut_refusal": self.spec.cut_refusal,
            "params": list(self._weights()),
            "experts": list(self._experts()),
            "samples": list(self._samples()),
            "words": [{"word": word, "works": not reason, "reason": reason} for word, reason in self.words],
        }

    def _layers(self) -> Iterator[dict[str, Any]]:
        """Yield a row for each run of layers that differ in names alone."""
        spec = self.spec
        sent = [0, *(layer.output_elements for layer in spec.layers)]
        rows = [
            (
                layer,
                sum(param.numel for param in spec.params_of(index)),
                _describe_received(layer, sent[index]) if index else "",
            )
            for index, layer in enumerate(spec.layers)
        ]
        for _, run in itertools.groupby(rows, _without_names):
            layers = list(run)
            (first, weights, received), last = layers[0], layers[-1][0]
            yield {
                "layers": first.name if first is last else f"{first.name} ... {last.name.rpartition('.')[2]}",
                "number": len(layers),
                "weights": weights,
                "flops": first.forward_flops,
                "kept_elements": first.saved_elements,
                "stage": received,
            }

    def _weights(self) -> Iterator[dict[str, Any]]:
        """Yield a row for the weights of all blocks that have one shape and one cut."""
        counts: dict[tuple[str, tuple[int, ...], str], int] = {}
        for param in self.spec.params:
            key = (re.sub(r"\b\d+\b", "*", param.name), param.shape, self._cut(param))
            counts[key] = counts.get(key, 0) + 1
        for (name, shape, cut), number in counts.items():
            yield {"weight": name, "shape": list(shape), "number": number, "tp": cut}

    def _cut(self, param: ParamSpec) -> str:
        """Return how a weight is cut, or why it is not."""
        path, cut = param.name.rpartition(".")[0], param.cut
        prefix = "" if param.trainable else "frozen in 4 bits, " if param.held_as else "frozen, "
        if cut is not None:
            shared = ", shared by ranks beyond that" if cut.is_shareable else ""
            fused = f" of {cut.parts} weights in one" if cut.parts > 1 else ""
            why = f" ({self.gathered[path]})" if path in self.gathered else ""
            return f"{prefix}{_STYLES[cut.style]}{fused}: dimension {cut.dim} in up to {cut.groups} parts{shared}{why}"
        if path in self.gathered:
            return f"{prefix}replicated: {self.gathered[path]}"
        if param.experts:
            return f"{prefix}replicated over tp: ep distributes its {param.experts} experts"
        if param.partial == "cut":
            return f"{prefix}replicated, and applied to sharded activations: its gradient is summed"
        return f"{prefix}replicated" + ("" if self.spec.cut_refusal else ": applied to full activations")

    def _experts(self) -> Iterator[str]:
        spec = self.spec
        calls = [call for layer in spec.layers for call in layer.dispatches]
        if not calls:
            return
        number = {(call.experts, call.rows, call.width) for call in calls}
        for experts, rows, width in sorted(number):
            owners = [call.owner for call in calls if (call.experts, call.rows, call.width) == (experts, rows, width)]
            yield (
                f"experts: {len(owners)} modules of {experts} ({owners[0]} ...); a sample sends them {rows:,} rows of "
                f"{width:,} elements; ep divides the experts"
            )
        if spec.expert_refusal:
            yield f"experts with sequence_parallel: not supported, {spec.expert_refusal}"

    def _samples(self) -> Iterator[str]:
        spec = self.spec
        if spec.mixes_samples:
            yield f'samples: {spec.mixes_samples}; run.allow = ["samples"] skips the check'
        elif spec.couples_samples:
            owners = dict.fromkeys((*spec.coupled_modules, *spec.batch_norm_owners))
            modules = f"{len(owners)} module{'s' * (len(owners) > 1)}"
            yield f"samples: coupled by the statistics of {modules} alone (numerics.batch_norm_group), as {next(iter(owners))}"
        else:
            yield "samples: independent, in dimension 0 of the batch"
        if spec.length:
            places = ", ".join(f"{_argument(place)} along dimension {dim}" for place, dim in spec.slices)
            where = f" in the arguments of blocks: {places}" if places else ""
            sliced = f"cp is not supported, {spec.slice_refusal}" if spec.slice_refusal else f"cp slices them{where}"
            yield f"tokens: {spec.length} per sample; {sliced}"
            for part in {part.owner: part for layer in spec.layers for part in layer.gathered_parts}.values():
                yield f"tokens under cp: {part.owner} computes all of them on every rank, since {part.reason}"
            for move in {
                move.owner: move for layer in spec.layers for move in layer.token_moves if move.messages
            }.values():
                if move.kind == "state":
                    yield f"tokens under cp: {move.owner} is given the state of the rank before by {move.function}, one rank after the other"
                    continue
                tokens = " and ".join(
                    f"the {'last' if where == 'before' else 'first'} {count} tokens of the rank {where}"
                    for count, where in ((move.left, "before"), (move.right, "behind"))
                    if count
                )
                yield f"tokens under cp: {move.owner} is sent {tokens}"
            if spec.sequence_refusal:
                yield f"tokens under sequence_parallel: not supported, {spec.sequence_refusal}"
        for module, what in (
            (spec.varies_at, "shapes or branches depend on values"),
            (spec.picks_at, "works on as many rows as values of the sample pick"),
            (spec.differentiates_at, "takes gradients itself"),
        ):
            if module:
                yield f"{module}: {what}"
        yield from (f"tried, not proven: {text}" for text in spec.tried)
        for state in self.states:
            yield f'kept by the forward: {state.full_name} ({state.kind}); a layout that keeps it otherwise needs run.allow = ["state"]'
        yield from (f"skipped check: {text}" for text in self.waived)


_LAYER_HEAD = ("layers", "number", "weights", "FLOPs", "saved elements", "received per sample if a stage begins here")
_WEIGHT_HEAD = ("weight", "shape", "number", "under tp")


def _table(head: Sequence[str], rows: Iterable[Mapping[str, Any]], left: Sequence[int]) -> str:
    return align_columns([head, *(tuple(map(_format_cell, row.values())) for row in rows)], left=left, wraps=True)


def _without_names(row: tuple[LayerSpec, int, str]) -> tuple[object, ...]:
    layer, *rest = row
    return layer.is_block, layer.forward_flops, layer.saved_elements, *rest


def _argument(place: str) -> str:
    """Return a place among the arguments of a block, positional ones and those with names, for a reader."""
    match = re.fullmatch(r"\[([01])\]\[([^]]*)\](.*)", place, re.DOTALL)
    if match is None:
        return place
    word = f"argument {int(match[2]) + 1}" if match[1] == "0" else match[2].strip("'")
    return word + match[3]


def _format_cell(cell: Any) -> str:
    if isinstance(cell, list):
        return " x ".join(map(str, cell)) or "a number"
    return f"{cell:,}" if isinstance(cell, int) else str(cell)


def _describe_received(layer: LayerSpec, elements: int) -> str:
    """Return what a pipeline stage that begins with a layer receives; `elements` are those that the layer before
    passes on."""
    if not layer.may_begin_stage:
        return f"none can begin: {layer.crossing_refusal}" if layer.crossing_refusal else ""
    return " + ".join(map(_crossing, layer.crossings)) or f"{elements:,} elements"


def _crossing(crossing: Crossing) -> str:
    size = f"{crossing.elements:,} elements" + (
        f" and {crossing.fixed_elements:,} for all samples" if crossing.fixed_elements else ""
    )
    dtype = f" of {crossing.dtype}" if crossing.dtype else ""
    return f"{size}{dtype}{'' if crossing.takes_gradient else ', without a gradient'}"


@calls.checked
def inspect(job: Job) -> Inspection:
    """Return the facts about a job's model: the shape of a preset, or all findings of another model's trace.

    Raises:
        InputError: the job, its data or its model cannot be used.
    """
    if job.model.preset is not None:
        spec = catalog.model_spec(job)
        return Inspection(spec=spec, words=tuple(valid_layouts.words(spec, job)))
    traced = trace_job(job)
    analysis = traced.analysis
    return Inspection(
        spec=traced.spec,
        words=tuple(valid_layouts.words(traced.spec, job)),
        gathered=analysis.gathered,
        states=analysis.states,
        waived=traced.blueprint.waived,
    )
