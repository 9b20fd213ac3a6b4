"""From what the user gives as an optimizer to one over the pieces of a rank, or to a refusal.

The groups are those that the optimizer has over the whole weights of the model: a function that divides them by shape,
size, position or a tag gives the same groups in every layout. `check_optimizer` finds the rule (`update_rule.py`) and
holds it against the layout.
"""

from __future__ import annotations

import gc
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from samestep.building.optimizer import CombinedOptimizer, OptimizerSource, members_of
from samestep.errors import JobError, LayoutError, ModelError
from samestep.job_tables import NumericsTable
from samestep.layout import Layout, option_without
from samestep.models.spec import ModelSpec
from samestep.program.update_rules import parts_of
from samestep.runtime.optimizers.optimizers_by_name import (
    NamedOptimizers,
    OptimizerFunction,
    check_partition,
    for_loops,
    is_in_run,
    leave_run,
    sources_by_name,
)
from samestep.runtime.optimizers.skeletons import alone, put_in_place, skeleton
from samestep.runtime.optimizers.update_rule import is_torchs_own, options_by_name, read_rule
from samestep.runtime.optimizers.update_trial import TRIED
from samestep.state.step_code import StepCode


@dataclass(frozen=True, slots=True)
class WholeWeights:
    """The weights of a whole model that ask for gradients, as an optimizer on one device would see them."""

    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    attributes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Python attributes of parameters, by which an optimizer function may tell them apart."""

    @classmethod
    def of(cls, model: ModelSpec, attributes: Mapping[str, Mapping[str, Any]]) -> WholeWeights:
        """Return the weights of a model that ask for gradients."""
        return cls({param.name: param.shape for param in model.params if param.trainable}, attributes)


OptimizerLike = Callable[[Any], Optimizer] | Optimizer
"""A function of the list of parameters, or of a list of (name, parameter), or an instance."""

ALONE = WholeWeights()
"""Stands for no whole weights other than the pieces themselves."""


class GivenOptimizer:
    """Builds an optimizer like an instance that has not stepped, by its groups and the names of their parameters."""

    def __init__(self, instance: Optimizer, names: Mapping[int, str]) -> None:
        """Take an instance over a user's own model, whose parameters have these full names by id."""
        self.instance, self._names, self._kind = instance, names, type(instance)
        self._before: tuple[list[set[str]], dict[str, Any]] | None = None
        """The names in each group of an instance that a run has, and the attributes that it had before."""

    @property
    def names_in_groups(self) -> list[set[str]]:
        """The full names of the parameters in each group of the instance, before a run has it."""
        if self._before is not None:
            return self._before[0]
        return [{self._names[id(param)] for param in group["params"]} for group in self.instance.param_groups]

    def take(self, optimizer: Optimizer) -> Optimizer | None:
        """Let the instance be what the loop sees of an optimizer that was built like it; None if it is that of another one already."""
        if self._before is not None:
            return None
        self._before = self.names_in_groups, vars(self.instance)
        return for_loops(optimizer, self.instance)

    def give_back(self) -> None:
        """Let the instance have its own parameters again, and no state."""
        if self._before is not None:
            leave_run(self.instance, self._before[1])
            self._before = None

    def __call__(self, named: list[tuple[str, Tensor]]) -> Optimizer:
        """Return the optimizer over named tensors, with as many groups as the instance."""
        kind = self._kind
        first, *others = _arguments(kind)
        defaults = {name: self.instance.defaults[name] for name in others}
        groups = []
        for group, members in zip(self.instance.param_groups, self.names_in_groups, strict=True):
            options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
            groups.append({"params": [tensor for name, tensor in named if name in members], **options})
        try:
            with alone(kind.__name__):
                arguments: dict[str, Any] = {first: groups, **defaults}
                return kind(**arguments)
        except (AttributeError, KeyError, IndexError) as error:
            raise ModelError(
                "optimizer-instance",
                f"{kind.__name__} cannot be built again over the groups of the given one ({type(error).__name__}: {error}). Use a "
                f"function of the parameters, as `lambda params: {kind.__name__}(params)`",
            ) from error


def optimizer_source(
    optimizer: OptimizerLike | Sequence[OptimizerLike] | Mapping[str, OptimizerLike],
    names: Mapping[int, str] | None = None,
    child: str = "",
) -> OptimizerSource:
    """Return a function that builds the optimizer: from such a function, from an instance that has not stepped, or from several.

    `names` maps the id of each parameter of the user's own model instance to its full name. A function of a list is given the
    weights of the module `child`, if there is one.

    Raises:
        ModelError: an instance has stepped already, has hooks, holds parameters that are not the model's, or cannot be
            rebuilt.
    """
    if isinstance(optimizer, Sequence | Mapping):
        return sources_by_name(optimizer, lambda member, key: optimizer_source(member, names, key))
    if not isinstance(optimizer, Optimizer):
        return OptimizerFunction(optimizer, child)
    if is_in_run(optimizer):
        gc.collect()  # a run that nobody holds may be in a cycle
    if is_in_run(optimizer):
        raise ModelError(
            "two-runs-one-model",
            f"the {type(optimizer).__name__} instance belongs to a run that is still there. Use run.release(), or another instance",
        )
    # Adagrad has state from the start, with step 0.
    if any(float(state.get("step", 1)) > 0 for state in optimizer.state.values()):
        raise ModelError(
            "optimizer-instance",
            "the optimizer has stepped already: give one that has not, or a function of the parameters",
        )
    kind = type(optimizer).__name__
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        raise ModelError(
            "optimizer-instance",
            f"the {kind} instance has step hooks, which would not run, since it is built again over this rank's weights: "
            "register them in a function of the parameters",
        )
    for group in optimizer.param_groups:
        strangers = [p for p in group["params"] if id(p) not in (names or {})]
        if strangers:
            raise ModelError(
                "optimizer-instance",
                f"the optimizer holds a parameter of shape {tuple(strangers[0].shape)} that is not the model's: "
                "build it over model.parameters(), or give a function of the parameters",
            )
    if not any(group["params"] for group in optimizer.param_groups):
        raise ModelError(
            "optimizer-instance", f"the {kind} instance holds no parameter: build it over model.parameters()"
        )
    if forgotten := [name for name in _arguments(type(optimizer))[1:] if name not in optimizer.defaults]:
        raise ModelError(
            "optimizer-instance",
            f"{kind} does not keep its argument {forgotten[0]} in `defaults`, so it cannot be built again over "
            "the pieces of a layout: give a function of the parameters",
        )
    return GivenOptimizer(optimizer, dict(names or {}))


def _arguments(kind: type[Optimizer]) -> list[str]:
    """Return the names of the arguments of a class, that of its parameters in front: `params`, or else the first."""
    return sorted(inspect.signature(kind).parameters, key=lambda name: name != "params")


def check_step(optimizer: Optimizer) -> None:
    """Refuse an optimizer whose `step` needs more than a closure.

    Raises:
        ModelError: its `step` has several arguments without a default.
    """
    for member in members_of(optimizer):  # of the class: a scheduler replaces the instance's
        parameters = list(inspect.signature(type(member).step).parameters.values())[1:]
        needed = [
            parameter.name
            for parameter in parameters
            if parameter.default is parameter.empty and parameter.kind in (0, 1)
        ]
        if len(needed) > 1:
            raise ModelError(
                "run-call-arguments",
                f"{type(member).__name__}.step needs {' and '.join(needed)}: a step is given a closure that evaluates the loss, and the "
                "options of run.update. Give the others defaults",
            )


def given_sources(source: OptimizerSource) -> dict[int, GivenOptimizer]:
    """Return the instances that the user gave, by their index among the members of the optimizer."""
    makers = [*source.sources.values()] if isinstance(source, NamedOptimizers) else [source]
    return {index: maker for index, maker in enumerate(makers) if isinstance(maker, GivenOptimizer)}


def take_instances(source: OptimizerSource, optimizer: Optimizer) -> Optimizer:
    """Return the optimizer of a run as its loop sees it; instances that the user gave are what it sees of their members."""
    views = [maker.take(members_of(optimizer)[index]) for index, maker in given_sources(source).items()]
    single = views[0] if views and not isinstance(optimizer, CombinedOptimizer) else None
    return single or for_loops(optimizer)


def member_of_weight(source: OptimizerSource, whole_weights: WholeWeights) -> dict[str, int]:
    """Return the index of the optimizer that holds each weight of the whole model, where a user gave several.

    Raises:
        ModelError: two of them hold a weight, or none does.
    """
    if not isinstance(source, NamedOptimizers) or not whole_weights.shapes:
        return {}
    optimizer, weights = skeleton(source, whole_weights.shapes, whole_weights.attributes)
    check_partition(optimizer, weights)
    names = {id(weight): name for name, weight in weights.items()}
    return {
        names[id(param)]: index
        for index, member in enumerate(members_of(optimizer))
        for group in member.param_groups
        for param in group["params"]
    }


# -- over the pieces of a rank ---------------------------------------------------------------------


def build_over(
    source: OptimizerSource, pieces: list[tuple[str, Tensor]], whole_weights: WholeWeights
) -> Optimizer | None:
    """Return the optimizer over a rank's pieces, grouped as over the whole weights; None where there is no piece.

    Raises:
        ModelError: it holds none of the model's weights, or cannot be built over pieces.
    """
    if not pieces:
        return None
    if all(whole_weights.shapes.get(name, value.shape) == value.shape for name, value in pieces) and len(pieces) >= len(
        whole_weights.shapes
    ):
        candidate = source(pieces)
        _check_holds(candidate, pieces, is_whole=bool(whole_weights.shapes))
        return candidate
    wanted, weights = skeleton(source, whole_weights.shapes, whole_weights.attributes)
    _check_holds(wanted, list(weights.items()), is_whole=True)
    groups = options_by_name(wanted, weights)
    optimizer: Optimizer | None = None
    try:
        optimizer = source(pieces)
        options = options_by_name(optimizer, dict(pieces))
        if {name: repr(options.get(name)) for name, _ in pieces} == {
            name: repr(groups.get(name)) for name, _ in pieces
        }:
            return optimizer
    except TRIED:
        optimizer = None
    wanted, weights = skeleton(
        source, whole_weights.shapes, whole_weights.attributes
    )  # the last one made, which a scheduler has
    code = StepCode(wanted)
    state_from_the_start = any(optimizer.state for optimizer in code.optimizers)
    if put_in_place(code, weights, dict(pieces)) is not None and not state_from_the_start:
        return wanted
    if optimizer is None or len(code.optimizers) > 1:
        raise ModelError(
            "optimizer-not-elementwise",
            f"{type(wanted).__name__} keeps its parameters outside of its groups, or state from the start, and gives parts "
            "of the weights other options than the whole ones. Use zero=0 without tp and pp",
        )
    optimizer.param_groups[:] = wanted.param_groups
    return optimizer


def _check_holds(optimizer: Optimizer, named: Sequence[tuple[str, Tensor]], *, is_whole: bool) -> None:
    ids = {id(tensor) for _, tensor in named}
    params = [param for group in optimizer.param_groups for param in group["params"]]
    strangers = [param for param in params if id(param) not in ids]
    if strangers or (is_whole and not params):
        what = f"a parameter of shape {tuple(strangers[0].shape)}" if strangers else "no parameter"
        raise ModelError(
            "optimizer-instance",
            f"{type(optimizer).__name__} holds {what}{' that the optimizer function was not given' if strangers else ''}, so it "
            "would not train the model as it is here: build it over the function's argument, as in "
            "`lambda params: torch.optim.AdamW(params)`",
        )
    if is_whole:
        check_partition(optimizer, dict(named))


# -- the rule against the layout -------------------------------------------------------------------


def check_optimizer(
    source: OptimizerSource,
    model: ModelSpec,
    layout: Layout,
    attributes: Mapping[str, Mapping[str, Any]] | None = None,
    evaluating: Collection[int] = (),
) -> ModelSpec:
    """Refuse an optimizer whose update in the layout differs from its update on one device.

    `evaluating` are the members whose step evaluates the loss again.

    Returns:
        The model, its weights marked that ZeRO divides and the optimizer must update whole.

    Raises:
        LayoutError: its rule couples what the layout spreads; the text says which layout word works.
        ModelError: the optimizer cannot be used in any layout.
    """
    params = [param for param in model.params if param.trainable and param.numel]
    if not params or (layout.world_size == 1 and not any(param.sparse_gradient for param in params)):
        return model
    shapes = dict(WholeWeights.of(model, {}).shapes)
    parts = {param.name: shape for param in params if (shape := parts_of(param, layout))}
    marks = attributes or {}
    trial = skeleton(source, shapes, marks)
    check_step(trial[0])
    check_partition(*trial)
    spread = [(word, how) for word, how in _spreading(layout)]
    if evaluating and spread:
        word, how = spread[0]
        names = " and ".join(type(members_of(trial[0])[index]).__name__ for index in sorted(evaluating))
        raise LayoutError(
            "closure-unsupported",
            f"the step of {names} evaluates the loss again, at weights that depend on all of them, and weights are {how} by {word}. Use "
            "zero=0 without tp and pp",
        )
    if evaluating:
        return model
    rule = read_rule(source, shapes, parts, marks, trial, sparse=[p.name for p in params if p.sparse_gradient])
    if rule.draws and layout.world_size > 1:
        raise LayoutError(
            "random-optimizer",
            f"{rule.optimizer} draws random numbers ({rule.draws}), and every rank would draw others. Use one rank",
        )
    if rule.coupled and spread:
        word, how = spread[0]
        raise LayoutError(
            "optimizer-not-elementwise",
            f"{rule.optimizer} does not update every weight separately ({rule.coupled}), so weights {how} by {word} would get "
            f"another update. Use {option_without(word)}",
        )
    if divided := [name for name in rule.by_rows if name in parts]:
        word, _ = spread[0]
        raise LayoutError(
            "optimizer-sparse",
            f"the update of {divided[0]} by {rule.optimizer} has only the rows of its sparse gradient, and {word} leaves a rank a part of the "
            f"weight. Use {option_without(word)}, or sparse=False with adamw",
        )
    return _marked(model, [name for name in rule.whole if name in parts], rule.by_rows)


def _marked(model: ModelSpec, whole: Collection[str], by_rows: Collection[str]) -> ModelSpec:
    """Return a model with marks on the weights that the optimizer must update whole, and on those of which it updates rows."""
    params = (replace(p, is_updated_by_rows=True) if p.name in by_rows else p for p in model.params)
    params = (replace(p, is_updated_whole=True) if p.name in whole else p for p in params)
    return replace(model, params=tuple(params)) if whole or by_rows else model


def check_call(
    source: OptimizerSource,
    model: ModelSpec,
    layout: Layout,
    attributes: Mapping[str, Mapping[str, Any]],
    method: str,
    before: Callable[[Optimizer], None],
) -> None:
    """Refuse a method of an optimizer that does not treat every element by itself, where the layout divides the weights.

    `model` marks the weights that the layout's ranks update whole; `before` calls the method.

    Raises:
        LayoutError: it couples what the layout spreads.
    """
    params = [param for param in model.params if param.trainable and param.numel]
    spread = _spreading(layout)
    if not params or not spread:
        return
    parts = {param.name: shape for param in params if (shape := parts_of(param, layout))}
    sparse = [param.name for param in params if param.is_updated_by_rows]
    rule = read_rule(source, dict(WholeWeights.of(model, {}).shapes), parts, attributes, before=before, sparse=sparse)
    divided = [param.name for param in params if param.name in rule.whole and param.name in parts]
    divided = [name for name in divided if not any(p.name == name and p.is_updated_whole for p in params)]
    if rule.coupled or divided:
        word, how = spread[0]
        why = rule.coupled or f"{divided[0]}: {rule.whole[divided[0]]}"
        raise LayoutError(
            "optimizer-not-elementwise",
            f"{rule.optimizer}.{method} does not treat every weight, or every element of one, by itself ({why}), and weights are {how} by "
            f"{word}. Use {option_without(word)}",
        )


def couples_weights(source: OptimizerSource, model: ModelSpec, attributes: Mapping[str, Mapping[str, Any]]) -> bool:
    """Return whether the update of a weight depends on which other weights the optimizer holds, as in D-Adaptation."""
    shapes = {param.name: param.shape for param in model.params if param.trainable and param.numel}
    sparse = [param.name for param in model.params if param.is_updated_by_rows]
    return bool(shapes) and bool(read_rule(source, shapes, {}, attributes, sparse=sparse).coupled)


def updates_in_chunks(source: OptimizerSource, numerics: NumericsTable, whole_weights: WholeWeights) -> bool:
    """Return whether an optimizer may update some weights before others, where a job's numerics make anything depend on it.

    Raises:
        JobError: its states are to be packed, and it is none of torch's own.
    """
    packs = numerics.optimizer_states != "float32"
    in_chunks = (packs or numerics.precision == "bf16") and _is_torchs_own(source, whole_weights)
    if packs and not in_chunks:
        raise JobError(
            "optimizer-8bit",
            f'numerics.optimizer_states = "{numerics.optimizer_states}" holds states of torch\'s own optimizers, and this must be one of them. Set optimizer_states = "float32", or adamw',
        )
    return in_chunks


def _is_torchs_own(source: OptimizerSource, whole_weights: WholeWeights) -> bool:
    """Return whether an optimizer is one of torch, which updates every weight independently."""
    try:
        return is_torchs_own(skeleton(source, whole_weights.shapes, whole_weights.attributes)[0])
    except (ModelError, *TRIED):  # one that cannot be built over weights without values
        return False


def _spreading(layout: Layout) -> list[tuple[str, str]]:
    """Return each word of the layout that leaves a rank less than all weights, and whether it cuts or spreads them."""
    words = [(f"zero={layout.zero}", "cut")] if layout.num_shards > 1 else []
    words += [(f"{axis}={degree}", "cut") for axis, degree in layout.weight_axes.items() if degree > 1]
    return words + ([(f"pp={layout.pp}", "spread")] if layout.pp > 1 else [])
