"""Proof that a plan of tensor parallelism cuts a model between units that are computed independently, and a rank's
settings.

`features.follow` reads the operations of the whole model's forward; `rank_trial` runs the forward of a rank. Where a
plan leaves a choice, it is tried: the number of weights that are fused in one, and whether the loss gets cut logits.

Where the code behind a cut needs the whole of what it reads (a norm over all heads, a number for each head that the code
counts itself, heads that are mixed), the modules that it reads become `gather`: their weights stay cut, every rank gets
their whole output and computes the rest as one device does, so it is equal, with more communication and no less work.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from samestep.building.families import is_transposed
from samestep.errors import InputError
from samestep.independence.dependence import Rows
from samestep.independence.feature_units import MixesError, UnitFlow, WeightCut
from samestep.independence.rank_trial import Count, DiffersError, Forward, RankTrial, alike, having
from samestep.independence.unit_walk import (
    PartialGradients,
    check_whole_gradients,
    data_in,
    follow,
    owners_in,
    partial_gradients,
)
from samestep.models.spec import is_below, owner_of
from samestep.tracing.costs import BY_COLUMNS
from samestep.tracing.forward import ForwardTracer, ValueOf
from samestep.tracing.looks import Looks
from samestep.tracing.meta_tensors import NeedsValuesError
from samestep.tracing.operations import Operation, Recorder
from samestep.tracing.trace import samples_traced
from samestep.tracing.watched_forward import watch_forward

FUSED = 3
"""Style `qkv`: three weights in one."""


@dataclass(frozen=True, slots=True)
class CutProof:
    """The cuts of a plan that are proven to compute what the whole model does."""

    styles: Mapping[str, str]
    """Cut style of each module, by its path."""
    cuts: Mapping[str, WeightCut] = field(default_factory=dict)
    """How each weight is cut, by its name; weights that the plan does not name are those with an element for each unit."""
    groups: Mapping[str, int] = field(default_factory=dict)
    """Number of units between which each of these may be cut."""
    uses: Mapping[str, set[str]] = field(default_factory=dict)
    """Uses of the trained weights of each module: on a "cut" or "whole" tensor, or "elsewhere" (a cut one, by another)."""
    copied: frozenset[str] = frozenset()
    """Modules at whose input `copy` sums a gradient: those cut by columns, and whole ones that lead to what is cut."""
    cut_storages: frozenset[int] = frozenset()
    """Storages of the recorded forward that hold a part, or a summand, on each rank."""
    cuts_logits: bool = False
    """Whether the loss may get logits that are cut by vocabulary."""
    cut_outputs: Mapping[int, frozenset[str]] = field(default_factory=dict)
    """The weights by which other outputs are cut, by their number among all tensors of the outputs; -1 for the prediction."""
    tried: tuple[str, ...] = ()
    """Operations without a rule, and custom backwards, of which a trial has passed."""
    looking: tuple[str, ...] = ()
    """Modules that stay whole, because their code looks at values."""
    degree: int = 1
    """Degree that was tried with the shapes of a rank."""
    counts: tuple[Count, ...] = ()
    """Attributes that are divided on a rank."""
    refusal: str = ""
    refused_at: str = ""
    """Path of the module whose code a refusal is about."""
    refused: frozenset[str] = frozenset()
    """Names of the cut weights that it is about."""
    fails_after: str = ""
    """Path of the last module that ran before the forward with the shapes of a rank failed; empty if it did not."""

    def divided(self, model: nn.Module) -> tuple[tuple[str, str, int], ...]:
        """Return the path, the attribute and the divisor of every count of a rank of the model."""
        return tuple(
            (path, count.name, count.divisor) for count in self.counts for path in having(model, self.styles, count)
        )


def weight_cuts(model: nn.Module, styles: Mapping[str, str], parts: Mapping[str, int]) -> dict[str, WeightCut]:
    """Return how the weights of the modules of a plan are cut, by their names; `parts` are those of fused weights.

    Raises:
        MixesError: a weight has not the dimension that is cut, such as a gain of the whole layer.
    """
    cuts = {}
    for name, param in model.named_parameters():
        path, _, leaf = name.rpartition(".")
        style = styles.get(path)
        if style in (None, "sum") or (style == "row" and leaf == "bias"):
            continue
        module = model.get_submodule(path)
        across = 0 if (is_transposed(module) and leaf == "weight") or isinstance(module, nn.Embedding) else 1
        dim = across if style == "row" else 0 if style == "vocab" else (1 - across) * (param.dim() > 1)
        fused = FUSED if style == "qkv" else parts.get(path, 1)
        if dim >= param.dim():
            reason = f"{name} {list(param.shape)} has no dimension along which the weights of {path} are cut"
            raise MixesError(reason).at(path, [f"{path}.{leaf}" for leaf, _ in module.named_parameters(recurse=False)])
        if param.shape[dim] % fused == 0:
            cuts[name] = WeightCut(dim, fused)
    return cuts


def prove(
    model: nn.Module,
    styles: Mapping[str, str],
    whole_modules: Collection[str],
    recorder: Recorder,
    cuts_logits: bool,
    looking: tuple[str, ...] = (),
) -> CutProof:
    """Return the proven cuts of a plan, or why they are not proven; a rank's forward is not tried yet.

    `recorder` has recorded a forward of the whole model. Modules in `whole_modules` are in the plan, and every rank has them
    whole. `cuts_logits` is whether a head stays cut by vocabulary, instead of being gathered. `looking` are modules whose code looks at
    values: all that they are given must be whole on every rank, and its gradient too.
    """
    heads = [
        path for path, style in styles.items() if style == "vocab" and isinstance(model.get_submodule(path), nn.Linear)
    ]
    cuts_logits = cuts_logits and bool(heads)
    way = dict(styles) if cuts_logits else {**styles, **dict.fromkeys(heads, "gather")}
    refused = CutProof(styles, cuts_logits=cuts_logits, looking=looking)
    try:
        cuts, flow = _follow_cuts(model, way, whole_modules, recorder, looking)
        partial = partial_gradients(recorder.operations, recorder.tracer.modules, flow)
        check_whole_gradients(recorder.operations, partial, flow)
    except MixesError as reason:
        return replace(refused, refusal=str(reason), refused_at=reason.where, refused=reason.cut)
    if cuts_logits and not _are_logits(flow, model, heads):
        return replace(refused, refusal="its prediction is another tensor than the output of the head")
    uses = _uses(recorder.operations, flow, partial)
    tried = tuple(dict.fromkeys(flow.tried))
    storages = frozenset(
        storage for storage, state in flow.states.items() if state == "partial" or isinstance(state, Rows)
    )
    outputs = {index: names for index, names in flow.cut_outputs.items() if index >= 0 or not cuts_logits}
    by_columns = {path for path, style in flow.styles.items() if style in BY_COLUMNS}
    copied = frozenset(by_columns - partial.uncopied | partial.copied)
    return CutProof(way, cuts, flow.groups, uses, copied, storages, cuts_logits, outputs, tried, looking)


def to_gather(model: nn.Module, proof: CutProof) -> frozenset[str]:
    """Return the modules whose outputs, gathered, may let a refused plan run: between them every rank computes the whole.

    They are those whose parts the refused operation has met, and that are cut below the module whose code runs it, in every
    block of the same kind. Where these are gathered already, as where code reads their weights, they may stay whole.
    """
    cut = {path for path, style in proof.styles.items() if style in ("column", "qkv", "row", "gather")}
    below = {path for path in cut if path == proof.refused_at or is_below(proof.refused_at, path)}
    met = {owner_of(name) for name in proof.refused} & cut | below
    if proof.styles.get(proof.fails_after) in ("column", "qkv"):  # the code after it does not fit a rank's part
        met = {proof.fails_after}
    above = proof.refused_at
    while not met and above:
        met = {path for path in cut if is_below(path, above)}
        above = owner_of(above)
    kinds = {(_leaf(path), type(model.get_submodule(owner_of(path)))) for path in met}
    paths = {path for path in cut if (_leaf(path), type(model.get_submodule(owner_of(path)))) in kinds}
    return frozenset({path for path in paths if proof.styles[path] != "gather"} or paths)


def _uses(operations: list[Operation], flow: UnitFlow, partial: PartialGradients) -> dict[str, set[str]]:
    """Return how each module's trained weights are used."""
    uses: dict[str, set[str]] = {}
    for index, op in enumerate(operations):
        if op.func == "outputs":  # the loss is computed from a weight that it returns, alike on every rank
            for path in {path for view in op.given for path in flow.owners.get(view.storage, ())}:
                uses.setdefault(path, set()).add("whole")
        owners = owners_in(flow, op) if op.func not in ("left", "outputs") else frozenset()
        data = data_in(flow, op)
        if not owners or not data:
            continue
        states = dict(zip(op.given, flow.history[index], strict=False))
        is_cut = index in partial.operations or any(isinstance(states[view], Rows) for view in data)
        for owner in {op.where} & owners or owners:
            uses.setdefault(owner, set()).add(("cut" if owner == op.where else "elsewhere") if is_cut else "whole")
    return uses


def _are_logits(flow: UnitFlow, model: nn.Module, heads: list[str]) -> bool:
    """Return whether the model's prediction is the head's logits, cut by vocabulary along the last dimension."""
    identities = {id(param) for path in heads for param in model.get_submodule(path).parameters()}
    names = {name for name, param in model.named_parameters() if id(param) in identities}
    return bool(flow.logits_of) and flow.logits_of <= names


def _follow_cuts(
    model: nn.Module,
    styles: Mapping[str, str],
    whole_modules: Collection[str],
    recorder: Recorder,
    looking: tuple[str, ...],
) -> tuple[dict[str, WeightCut], UnitFlow]:
    """Return the cut of each weight, and where its units are; a weight whose output the code splits in parts is a fused
    one.

    Raises:
        MixesError: an operation does not compute each unit by itself.
    """
    parts: dict[str, int] = {}
    while True:
        cuts = {
            name: cut for name, cut in weight_cuts(model, styles, parts).items() if owner_of(name) not in whole_modules
        }
        try:
            flow = follow(recorder.operations, model, styles, cuts, looking, recorder.branching)
        except MixesError as reason:
            fused = {
                path for path in map(owner_of, reason.sources) if styles.get(path) == "column" and path not in parts
            }
            if reason.parts < 2 or not fused:
                raise
            others = {other for path in fused for other in alike(model, styles, path) if _leaf(other) == _leaf(path)}
            parts |= dict.fromkeys(others, reason.parts)
            continue
        return cuts | {name: WeightCut(dim) for name, dim in flow.like.items()}, flow


def _leaf(path: str) -> str:
    return path.rpartition(".")[2]


def smallest_degree(proof: CutProof) -> int:
    """Return the smallest degree that divides the units of all weights but those of a vocabulary; 0 if none does."""
    sizes = [n for name, n in proof.groups.items() if proof.styles.get(owner_of(name)) not in ("vocab", "gather")]
    common = math.gcd(*sizes) if sizes else math.gcd(*proof.groups.values())
    return next((degree for degree in range(2, common + 1) if common % degree == 0), 0)


def with_degree(
    proof: CutProof,
    model: nn.Module,
    shared: Mapping[str, int],
    operations: list[Operation],
    forward: Forward,
    degree: int,
) -> CutProof:
    """Return the proof with the counts of a rank of this degree, tried by a forward with the shapes of a rank.

    `shared` are modules of fewer heads than the degree, of which a rank has one: their numbers of heads.

    Raises:
        MixesError: units that the degree divides are not computed independently.
        DiffersError: the forward of a rank does not compute its part of the whole model's.
    """
    degrees = {name: shared.get(owner_of(name), degree) for name in proof.cuts}
    cuts = {name: cut for name, cut in proof.cuts.items() if proof.groups[name] % degrees[name] == 0}
    left_whole = {owner_of(name) for name in proof.cuts if name not in cuts}
    styles = {path: style for path, style in proof.styles.items() if path not in left_whole}
    flow = follow(operations, model, styles, cuts, proof.looking)
    trial = RankTrial(model, styles, cuts, {name: degrees[name] for name in cuts}, degree, operations, flow, forward)
    known = [replace(count, divisor=degree) for count in proof.counts if count.divisor == proof.degree]
    return replace(proof, degree=degree, counts=tuple(trial.counts(known)))


def run_forward(
    model: nn.Module,
    sample: Any,
    styles: Mapping[str, str],
    value_of: ValueOf,
    recorder: Recorder,
    *,
    looking: Collection[str] = (),
    keeps_all: bool = False,
    answers: Sequence[Any] | None = None,
) -> Looks:
    """Run a forward of one real sample on the meta device, record its operations, and return where its code looks at values.

    `keeps_all` is whether all values are followed, and `answers` are what an earlier forward was answered, with whose branches this
    one is run; `looking` are the modules whose code looks.

    Raises:
        DiffersError: it fails, at the module that the error names.
    """
    watch = ForwardTracer(model, {}, keeps_all=keeps_all, analysis=recorder, answers=answers, has_backward=False)
    modules, recorder.styles, recorder.looking = watch.modules, styles, looking
    try:
        watch_forward(model, sample, samples_traced(model), watch, value_of, "it")
    except DiffersError:
        raise
    except NeedsValuesError:
        raise DiffersError(f"{modules.where} reads values of the part that a rank has", modules.where) from None
    except InputError as error:
        reason = str(error).removeprefix("it cannot be traced: ")
        raise DiffersError(f"with the shapes of a rank {reason}", modules.where, modules.innermost) from None
    return watch.looks
