"""The modules that tensor parallelism cuts, and the cost of each cut, seen in a forward on the meta device.

A plan names modules by patterns and gives the style of each cut: `{"blocks.*.q": "column", "blocks.*.out": "row"}`. It
comes from the user (`module.tensor_plan`), or from the data flow of the forward (`examination/plan_search.py`). The forward also shows what no plan needs to state: which cuts read one tensor and share its sum, which inputs take no gradient,
and which whole weights are used on cut tensors. `runtime/axes/tensor.py` carries the cuts out.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from torch import nn

from samestep.building.families import heads_of, is_transposed, repeats_of
from samestep.building.model_changes import cuts_of_parts, path_without_adapters
from samestep.errors import ModelError
from samestep.independence import cut_proof
from samestep.independence.cut_proof import CutProof
from samestep.models.layer_parts import PartialSum
from samestep.models.layer_spec import LayerSpec
from samestep.models.param_spec import Cut, ParamSpec
from samestep.models.spec import ModelSpec, is_below, owner_of
from samestep.tracing.arranged_layers import containers_of, layers_of_regions
from samestep.tracing.checkpointed import Point, TracedPlaces
from samestep.tracing.looks import paths_within
from samestep.tracing.module_inputs import ForwardCalls
from samestep.tracing.operations import Recorder
from samestep.tracing.trace import samples_traced

Plan = Mapping[str, str]
"""Patterns of module paths, each with one of `STYLES`."""

STYLES = ("column", "qkv", "gather", "row", "vocab", "sum")


@dataclass(slots=True)
class Cuts:
    """The modules of one model that its plan cuts, or why it has none."""

    styles: dict[str, str] = field(default_factory=dict)
    """Style of each module in the plan, by its path."""
    refusal: str = ""
    may_shrink: bool = False
    """Whether parts of it may be left whole, where a proof refuses them."""
    gathered: dict[str, str] = field(default_factory=dict)
    """Modules that the plan cuts otherwise, whose outputs are gathered, or which stay whole, and why."""
    looking: tuple[str, ...] = ()
    """Modules whose code looks at values, and which therefore stay whole."""

    def gather(self, paths: Collection[str], reason: str) -> None:
        """Gather the outputs of modules, since the code after them needs them whole; or leave gathered modules
        whole."""
        styles = {path: style for path, style in self.styles.items() if path not in paths or style != "gather"}
        self.styles = styles | dict.fromkeys((path for path in paths if path in styles), "gather")
        self.gathered |= dict.fromkeys(sorted(paths), reason)


def smaller(model: nn.Module, cuts: Cuts, refusal: str) -> Cuts | None:
    """Return the plan that leaves whole the part of each block that a refusal names first; if it names none, the vocabulary.

    None if that leaves no cut within blocks, or where the plan is the model's own: what its author asks for is cut, or refused.
    """
    parts: dict[str, set[str]] = {}
    for path in cuts.styles if cuts.may_shrink else ():
        container = next((outer for outer in containers_of(model) if path != outer and is_below(path, outer)), None)
        below = path[len(container) + 1 :].split(".") if container else []
        parts.setdefault(f".{below[0]}.{below[1]}" if len(below) > 1 else "", set()).add(path)
    places = {part: refusal.find(part) for part in parts if part and part in refusal}
    named = min(places, key=places.__getitem__).rpartition(".")[2] if places else ""
    whole_modules = {path for part, paths in parts.items() if part.rpartition(".")[2] == named for path in paths}
    styles = {path: style for path, style in cuts.styles.items() if path not in whole_modules}
    return Cuts(styles, may_shrink=True, looking=cuts.looking) if whole_modules and "row" in styles.values() else None


def without_looking(model: nn.Module, cuts: Cuts, looking: tuple[str, ...]) -> Cuts:
    """Return the plan that leaves whole all that modules may compute with whose code looks at values.

    The branch that they take for other values is not known. Where nothing is cut in them, and they are given whole tensors, all
    ranks take the same one. A plan that leaves no cut, or is the model's own and cuts what is in them, is refused.
    """
    looking = (*dict.fromkeys((*cuts.looking, *looking)),)
    whole_modules = paths_within(model, looking)
    styles = {path: style for path, style in cuts.styles.items() if path not in whole_modules}
    where = f"shapes or branches at {looking[0] or 'the model itself'} depend on values"
    works = "Use a module of its own for the branch"
    refusal = ""
    if not cuts.may_shrink and (cut := next((path for path in cuts.styles if path in whole_modules), None)):
        refusal = f"{where}, so its result stays whole, and its plan cuts {cut}. {works}, or a plan without it"
    elif cuts.may_shrink and "row" not in styles.values():
        refusal = f"{where}, so its result stays whole, and nothing is left to shard. {works}"
    return replace(cuts, styles=styles, looking=looking, refusal=refusal)


def cuts_of(model: nn.Module) -> Cuts | None:
    """Return the modules that the patterns of the model's own `tensor_plan` match; None of a model without one.

    Raises:
        ModelError: the plan has an unknown style.
    """
    plan: Plan | None = getattr(model, "tensor_plan", None)
    if plan is None:
        return None
    cuts = Cuts()
    paths = [path for path, _ in model.named_modules()]
    for pattern, style in plan.items():
        if style not in STYLES:
            raise ModelError(
                "tensor-plan", f"tensor_plan: {pattern!r} is {style!r}. Use {', '.join(STYLES[:-1])} and {STYLES[-1]}"
            )
        matches = fnmatch.filter(paths, pattern)
        parts = [part for path in matches for part in cuts_of_parts(model, path, style)]
        for path in parts:
            module = model.get_submodule(path)
            if style == "sum" or isinstance(module, nn.Linear | nn.Embedding) or is_transposed(module):
                cuts.styles[path] = style
            else:
                cuts.refusal = f"{path} is a {type(module).__name__}, and only Linear and Embedding can be cut"
    if not cuts.styles:
        cuts.refusal = cuts.refusal or f"its plan names no module of it (it has {', '.join(plan)})"
    return cuts


def proof_of(
    spec: ModelSpec, model: nn.Module, cuts: Cuts, shareable: Mapping[str, int], recorder: Recorder, cuts_logits: bool
) -> CutProof:
    """Return what a recorded forward of the whole model proves of a plan, with the logits of its head cut by vocabulary or gathered."""
    varies = f"the shapes at {spec.varies_at} depend on values" if spec.varies_at and not cuts.looking else ""
    if refusal := cuts.refusal or varies:
        return CutProof(cuts.styles, refusal=refusal)
    whole_modules = {path for path, heads in shareable.items() if heads == 1}
    proof = cut_proof.prove(model, cuts.styles, whole_modules, recorder, cuts_logits, cuts.looking)
    if not proof.refusal and (path := _unclear_use(spec, cuts, proof)) is not None:
        return replace(proof, refusal=_use(spec, proof, path), refused_at=path)
    return proof


# -- the cost of a cut, as the calls of a forward show it ------------------------------------------


_Sums = list[tuple[PartialSum, Point, str]]
"""Sums with the points and the regions of the forward in which they stand, in the order in which modules end; elements are those of one sample."""


def _output_sums(calls: ForwardCalls, model: nn.Module, cuts: Cuts, proof: CutProof) -> _Sums:
    """Return the sums, or gathered parts, of the outputs of cut modules."""
    sums: _Sums = []
    for call in calls.ended:
        style = cuts.styles.get(call.path)
        if call.output is None or style not in ("row", "vocab", "gather"):
            continue
        is_logits = is_head(model.get_submodule(call.path), style)
        is_gathered = style == "gather" or (is_logits and proof.styles[call.path] == "gather")
        kind: Literal["gather", "logits", "sum"] = "gather" if is_gathered else "logits" if is_logits else "sum"
        elements = call.output.shape.numel() // samples_traced(model)
        sums.append((PartialSum(owner=call.path, elements=elements, kind=kind), call.left_at, call.region))
    return sums


def _input_sums(calls: ForwardCalls, model: nn.Module, copied: Collection[str], separable: Collection[str]) -> _Sums:
    """Return the sums of the gradients of these modules' inputs; modules with one input share its sum.

    The gradients of weights of `separable` modules can be computed while these are summed.
    """
    sums: _Sums = []
    last: tuple[int, tuple[int, bool]] | None = None
    for call in calls.ended:
        tensor = call.input if call.is_positional and call.path in copied else None
        if tensor is None or not (tensor.takes_gradient and tensor.state[1] and calls.places.is_reached(call.way)):
            continue
        if (tensor.number, tensor.state) != last:
            elements = tensor.shape.numel() // samples_traced(model)
            sums.append((PartialSum(owner=call.path, elements=elements), call.way, call.region))
            last = tensor.number, tensor.state
        if call.path in separable:
            part, *_ = sums[-1]
            sums[-1] = (replace(part, beside=(*part.beside, call.path)), *sums[-1][1:])
    return sums


def with_cuts(
    spec: ModelSpec, model: nn.Module, cuts: Cuts, calls: ForwardCalls, shareable: Mapping[str, int], proof: CutProof
) -> ModelSpec:
    """Return the spec with the cuts of its weights and their costs; add to `cuts` the whole weights that need sums."""
    refusal = cuts.refusal or proof.refusal
    if refusal:
        return replace(spec, cut_refusal=refusal)
    sums = _output_sums(calls, model, cuts, proof)
    for path in [path for path, style in cuts.styles.items() if style == "sum"]:  # a plan may name too many
        del cuts.styles[path]
    cuts.styles |= {path: "sum" for path, uses in proof.uses.items() if "cut" in uses and path not in cuts.styles}
    if name := _half_summed(spec, cuts):
        return replace(
            spec, cut_refusal=f"{name} is shared by modules, and only some of them use it on a tensor that tp cuts"
        )
    pairs = [(param, _cut_of(cuts, param, shareable, proof)) for param in spec.params]
    params = tuple(
        replace(param, cut=cut, partial="cut" if cut is None and _is_summed(cuts, param) else "")
        for param, cut in pairs
    )
    copies = _input_sums(calls, model, proof.copied, _separable(spec, model, cuts))
    layer_of = layers_of_regions(spec.layers, calls)
    layers = tuple(
        _layer_with(layer, index, layer_of, calls.places, sums, copies, shareable)
        for index, layer in enumerate(spec.layers)
    )
    cuts.styles |= {path: style for path, style in proof.styles.items() if cuts.styles.get(path) == "vocab"}
    head = next((path for path, style in cuts.styles.items() if is_head(model.get_submodule(path), style)), None)
    logits = None if head is None or head not in calls.of else calls.of[head][-1].output
    rows = logits.shape[:-1].numel() // samples_traced(model) if logits else 0
    return replace(spec, params=params, layers=layers, cut_refusal="", logit_rows=rows)


def _separable(spec: ModelSpec, model: nn.Module, cuts: Cuts) -> set[str]:
    """Return the column-cut linear modules whose weight has one use: its gradient may be computed after the input's.

    A head is none of them: it would hold the gradient of the logits for longer.
    """
    used_once = {p.name for p in spec.params if p.calls == 1 and not (p.shared or p.read_outside or p.is_replaced)}
    return {
        path
        for path, style in cuts.styles.items()
        if style in ("column", "qkv") and f"{path}.weight" in used_once and is_linear(model.get_submodule(path))
    }


def _unclear_use(spec: ModelSpec, cuts: Cuts, proof: CutProof) -> str | None:
    """Return a module whose weight's gradient would be neither whole on every rank nor a part on each, if any."""
    blocks = [path for layer in spec.layers if layer.is_block for path in layer.modules]
    for path, uses in proof.uses.items():
        if cuts.styles.get(path, "sum") != "sum" or uses == {"whole"}:
            continue
        if uses != {"cut"} or not any(is_below(path, block) for block in blocks):
            return path
    return None


def _use(spec: ModelSpec, proof: CutProof, path: str) -> str:
    """Return why the gradient of a module's weight is not clear."""
    where = f"a weight of {path or spec.name} is used on a tensor that tp cuts"
    if "elsewhere" in proof.uses[path]:
        return f"{where} by another module: use it in a module of its own"
    if "whole" in proof.uses[path]:
        return f"{where}, and on one that it leaves whole: give each use a module of its own"
    return f"{where} after the last block: use it before the head"


def _half_summed(spec: ModelSpec, cuts: Cuts) -> str | None:
    """Return a weight with one gradient that is whole on every rank and another that is partial, if any."""
    for param in spec.params:
        if len({cuts.styles.get(owner_of(name)) == "sum" for name in (param.name, *param.aliases)}) > 1:
            return param.name
    return None


def _is_summed(cuts: Cuts, param: ParamSpec) -> bool:
    """Return whether a whole weight is used on a cut tensor."""
    return cuts.styles.get(owner_of(param.name)) == "sum"


def _layer_with(
    layer: LayerSpec,
    index: int,
    layer_of: Mapping[str, int],
    places: TracedPlaces,
    sums: _Sums,
    copies: _Sums,
    shareable: Mapping[str, int],
) -> LayerSpec:
    def placed(parts: Iterable[tuple[PartialSum, Point, str]]) -> tuple[PartialSum, ...]:
        """Return those of these sums that are the layer's."""
        return tuple(
            replace(part, place=places.place(point, layer.called))
            for part, point, region in parts
            if layer_of.get(region) == index
        )

    forward, backward = placed(sums), placed(reversed(copies))
    points = [point for part, point, _ in sums if any(is_below(part.owner, root) for root in layer.called)]
    repeats = bool(forward) and places.is_kept_behind(points[-1], layer.called)
    products = tuple(replace(p, most_parts=shareable.get(p.owner, 0)) for p in layer.products)
    return replace(layer, products=products, forward_sums=forward, backward_sums=backward, repeats_last_sum=repeats)


def shareable_heads(model: nn.Module, cuts: Cuts) -> dict[str, int]:
    """Return the number of heads of keys and values that several ranks may share, by the projection's path.

    The attention's code repeats these heads for its queries; a rank with fewer queries is given a smaller number of
    repeats.
    """
    shareable: dict[str, int] = {}
    projections: dict[str, dict[str, int]] = {}
    for path, style in cuts.styles.items():
        module = model.get_submodule(path)
        if style == "column" and isinstance(module, nn.Linear):
            parent = owner_of(path_without_adapters(path))
            heads = heads_of(model.get_submodule(parent), module.out_features)
            projections.setdefault(parent, {})[path] = heads
    for parent, heads_by_path in projections.items():
        times = repeats_of(model.get_submodule(parent))
        if times > 1:
            queries = max(heads_by_path.values())
            shareable |= {path: heads for path, heads in heads_by_path.items() if heads * times == queries}
    return shareable


def _cut_of(cuts: Cuts, param: ParamSpec, shareable: Mapping[str, int], proof: CutProof) -> Cut | None:
    """Return along which dimension and between which groups of elements a weight is cut; None if whole."""
    path = owner_of(param.name)
    style = cuts.styles.get(path)
    if shareable.get(path) == 1:
        return Cut(style="column", dim=0, groups=1, is_shareable=True)
    if param.name not in proof.cuts:
        return None
    cut, groups = proof.cuts[param.name], proof.groups[param.name]
    kind: Literal["column", "row", "vocab", "gather"] = (
        style if style in ("row", "vocab", "gather") else "column"  # type: ignore[assignment]
    )
    return Cut(style=kind, dim=cut.dim, groups=groups, parts=cut.parts, is_shareable=path in shareable)


def is_linear(module: nn.Module) -> bool:
    """Return whether a module multiplies by its weight, [out, in] or as GPT-2's [in, out], and adds its bias."""
    return type(module).forward is nn.Linear.forward or is_transposed(module)


def is_head(module: nn.Module, style: str | None) -> bool:
    """Return whether a cut along the vocabulary is that of the head, whose logits stay cut."""
    return style == "vocab" and isinstance(module, nn.Linear)
