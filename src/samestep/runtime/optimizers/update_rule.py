"""The rule of an optimizer: which elements of which weights influence an element's update.

```
exp_avg.lerp_(grad, 0.1)            the one at its place       by elements
grad / grad.norm()                  all of its weight          by weights: the weight is updated whole
grad / sum(g.norm() for g in all)   those of all weights       coupled: all weights are updated together
```
The table of torch's own rules (`program/update_rules.py`) decides. Any other optimizer takes steps on small weights, whole and in
parts, each alone and all together (`update_trial.py`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer

from samestep.building.optimizer import CombinedOptimizer, OptimizerSource, class_names, member_over, members_of
from samestep.errors import ModelError
from samestep.program.update_rules import TORCH_RULES, TorchRule
from samestep.runtime.optimizers.skeletons import skeleton
from samestep.runtime.optimizers.update_trial import UpdateTrial
from samestep.state.step_code import optimizers_in
from samestep.trees import tree_leaves

_NO_MARKS: Mapping[str, Mapping[str, Any]] = {}


@dataclass(frozen=True, slots=True)
class UpdateRule:
    """The elements that influence the update of an element."""

    optimizer: str
    """Name of its class."""
    whole: Mapping[str, str] = field(default_factory=dict)
    """Weights that must be updated whole, and why."""
    coupled: str = ""
    """How weights influence each other; empty if none does."""
    draws: str = ""
    """The operation that draws random numbers; empty if none does."""
    by_rows: Collection[str] = ()
    """Weights of which it updates only the rows that are in their sparse gradients."""


def read_rule(
    source: OptimizerSource,
    shapes: Mapping[str, tuple[int, ...]],
    parts: Mapping[str, Sequence[tuple[int, ...]]],
    marks: Mapping[str, Mapping[str, Any]] = _NO_MARKS,
    made: tuple[Optimizer, Mapping[str, Tensor]] | None = None,
    before: Callable[[Optimizer], None] | None = None,
    sparse: Collection[str] = (),
) -> UpdateRule:
    """Return the rule of an optimizer over weights of these shapes, of which ranks hold parts of the shapes `parts`.

    `made` is what `skeleton` returns for them, where the caller has it already. With `before`, a loop calls that in front of steps.
    The gradients of the weights that are `sparse` are sparse tensors on one device.

    Raises:
        ModelError: it holds none of the weights, or fails at a step.
    """
    optimizer, weights = made or skeleton(source, shapes, marks)
    options_of = _options_of(optimizer, weights)
    kind = class_names(optimizer)
    if not options_of:
        raise ModelError(
            "optimizer-weights",
            f"{kind} holds none of the model's weights, so it would train nothing: build it over the parameters that the "
            "optimizer function is given",
        )
    if is_torchs_own(optimizer) and before is None:
        reasons = {name: _OF_TORCH[type(member_over(optimizer, weights[name]))].whole for name in options_of}
        return UpdateRule(kind, {name: reason for name, reason in reasons.items() if reason})
    trial = UpdateTrial(source, shapes, marks, kind, before)
    by_rows = [name for name in sparse if name in options_of]
    by_rows = by_rows if by_rows and trial.takes_rows(by_rows) else []
    kinds: dict[str, list[str]] = {}
    for name, options in options_of.items():
        kinds.setdefault(repr((sorted(options), _rule_options(options), shapes[name], marks.get(name))), []).append(
            name
        )
    tried = trial.rule(list(kinds.values()), parts)
    updated_whole = {
        name: tried.whole[n] for names in kinds.values() for n in names[:2] if n in tried.whole for name in names
    }
    return UpdateRule(kind, updated_whole, tried.coupled, tried.draws, by_rows)


_OF_TORCH: dict[type[Optimizer], TorchRule] = {
    kind: TORCH_RULES[name.lower()]
    for name, kind in vars(torch.optim).items()
    if isinstance(kind, type) and name.lower() in TORCH_RULES
}
_STEPS = {kind: inspect.unwrap(kind.step) for kind in _OF_TORCH}


def is_torchs_own(optimizer: Optimizer) -> bool:
    """Return whether a trial would show what is known: it is one of torch's classes, and nothing was changed in it.

    A combined optimizer is, if its members are.
    """
    if isinstance(optimizer, CombinedOptimizer):
        return not has_hooks(optimizer) and all(map(is_torchs_own, optimizer.members))
    kind = type(optimizer)
    step = vars(optimizer).get("step", kind.step)  # a scheduler wraps it
    if kind not in _OF_TORCH or not inspect.unwrap(step) is inspect.unwrap(kind.step) is _STEPS[kind]:
        return False
    if has_hooks(optimizer):
        return False
    options = [value for group in optimizer.param_groups for key, value in group.items() if key != "params"]
    return all(
        leaf.numel() == 1 if isinstance(leaf, Tensor) else isinstance(leaf, int | float | str | None)
        for leaf in tree_leaves(options)
    )


def has_hooks(optimizer: Optimizer) -> bool:
    """Return whether code of a user's runs before or after each step."""
    hooks = [vars(optimizer).get(f"_optimizer_step_{when}_hooks") for when in ("pre", "post")]
    everywhere = [torch_optimizer._global_optimizer_pre_hooks, torch_optimizer._global_optimizer_post_hooks]
    return any([*hooks, *everywhere])


def options_by_name(optimizer: Optimizer, weights: Mapping[str, Tensor]) -> dict[str, dict[str, Any]]:
    """Return the options of each weight that the optimizer holds, without those that only say how it computes."""
    computing = ("fused", "foreach", "capturable", "differentiable", "maximize")
    return {
        name: {key: value for key, value in options.items() if key not in computing[:-1]}
        for name, options in _options_of(optimizer, weights).items()
    }


def _options_of(optimizer: Optimizer, weights: Mapping[str, Tensor]) -> dict[str, dict[str, Any]]:
    """Return the options of each weight in the optimizer, and in each of those that this one reaches."""
    names = {id(weight): name for name, weight in weights.items()}
    # The step of torch's own class reaches no other optimizer.
    reached = [optimizer] if type(optimizer) in _OF_TORCH and is_torchs_own(optimizer) else optimizers_in(optimizer)
    first, *inner = reached
    options_of = _options_in(first, names)
    for key, member in zip(getattr(optimizer, "names", ()), members_of(optimizer), strict=False):
        for name in _options_in(member, names):
            options_of[name]["member"] = key
    for optimizer_in in inner:
        for name, options in _options_in(optimizer_in, names).items():
            options_there = options_of.setdefault(name, {})
            options_there["inner"] = (
                *options_there.get("inner", ()),
                (type(optimizer_in).__name__, sorted(options.items(), key=lambda pair: pair[0])),
            )
    return options_of


def _options_in(optimizer: Any, names: Mapping[int, str]) -> dict[str, dict[str, Any]]:
    return {
        names[id(param)]: {key: value for key, value in group.items() if key not in ("params", "param_names")}
        for group in optimizer.param_groups
        for param in group["params"]
        if id(param) in names
    }


def _rule_options(options: Mapping[str, Any]) -> str:
    """Return the options that may change the rule: a learning rate is a mere number."""
    return repr([(key, options[key]) for key in sorted(options) if key not in ("lr", "initial_lr")])
