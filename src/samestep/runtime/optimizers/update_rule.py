"""The rule of an optimizer, read from its operations: which elements of which weights influence an element's update.

An optimizer takes steps on meta tensors with the shapes of the model's weights, while every operation is followed. Each
tensor has a label: the weight whose elements it lies beside, one to one, and the weights of which other elements entered.

```
exp_avg.lerp_(grad, 0.1)            beside the weight                        by elements
grad / grad.norm()                  beside it, and all of it entered         by weights: the weight is updated whole
grad / sum(g.norm() for g in all)   beside it, and others entered            coupled: all weights are updated together
```
A rule is elementwise for a weight if nothing else entered, and if the operations and their numbers are the same for the
shapes of the parts that the layout leaves to a rank. Steps are taken up to one beyond the largest integer among the
options and the constants of the code, with step counters set forward in between. Where the code reads numbers of its
data, which meta tensors do not have, real weights of small shapes are updated together and one by one instead; such a
rule is never taken for elementwise.
"""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer

from samestep.building.optimizer import CombinedOptimizer, OptimizerSource, class_names, member_over, members_of
from samestep.building.torch_seams import disable_compiler
from samestep.errors import ModelError
from samestep.runtime.optimizers.followed_step import (
    CountsOnHost,
    Entry,
    FollowedStep,
    ReadsNumbersError,
    UpdateLabel,
    march,
)
from samestep.runtime.optimizers.one_process import alone
from samestep.runtime.optimizers.skeletons import like, over_small_weights, put_in_place, skeleton, small_shape
from samestep.state.step_code import StepCode, optimizers_in
from samestep.trees import tree_leaves

TRIED = (ValueError, TypeError, RuntimeError, AssertionError, IndexError, KeyError, AttributeError, ZeroDivisionError)
"""Exceptions by which an optimizer may refuse tensors it was not made for."""

_NO_MARKS: Mapping[str, Mapping[str, Any]] = {}


@dataclass(frozen=True, slots=True)
class UpdateRule:
    """The elements and numbers that influence the update of an element, as an optimizer's operations show them."""

    optimizer: str
    """Name of its class."""
    whole: Mapping[str, str] = field(default_factory=dict)
    """Weights that must be updated whole, and the operation in which their elements influence each other."""
    coupled: str = ""
    """The operation in which weights influence each other; empty if none does."""
    draws: str = ""
    """The operation that draws random numbers; empty if none does."""


def read_rule(
    source: OptimizerSource,
    shapes: Mapping[str, tuple[int, ...]],
    parts: Mapping[str, Sequence[tuple[int, ...]]],
    marks: Mapping[str, Mapping[str, Any]] = _NO_MARKS,
    made: tuple[Optimizer, Mapping[str, Tensor]] | None = None,
    before: Callable[[Optimizer], None] | None = None,
) -> UpdateRule:
    """Return the rule of an optimizer over weights of these shapes, of which ranks hold parts of the shapes `parts`.

    `made` is what `skeleton` returns for them, where the caller has it already. With `before`, a loop calls that in front of steps.

    Raises:
        ModelError: it holds none of the weights, or fails at a step.
    """
    optimizer, weights = made or skeleton(source, shapes, marks)
    held = _options_of(optimizer, weights)
    kind = class_names(optimizer)
    if not held:
        raise ModelError(
            f"{kind} holds none of the model's weights, so it would train nothing: build it over the parameters that the "
            "optimizer function is given"
        )
    if is_torchs_own(optimizer) and before is None:
        reasons = {name: _OF_TORCH[type(member_over(optimizer, weights[name]))] for name in held}
        return UpdateRule(kind, {name: reason for name, reason in reasons.items() if reason})
    kinds: dict[str, list[str]] = {}
    for name, options in held.items():
        kinds.setdefault(repr((sorted(options), _rule_options(options), shapes[name], marks.get(name))), []).append(
            name
        )
    some = {name: shapes[name] for names in kinds.values() for name in names[:2]}
    # What has one element cannot be cut, and its shape () asks for other operations of torch.
    some = {name: shape for name, shape in some.items() if math.prod(shape) > 1} or some
    return _read(_Trial(source, shapes, marks, kind, before), kinds, some, parts, held)


_OF_TORCH: dict[type[Optimizer], str] = {
    **dict.fromkeys(
        (
            torch.optim.SGD,
            torch.optim.Adam,
            torch.optim.AdamW,
            torch.optim.Adagrad,
            torch.optim.Adadelta,
            torch.optim.Adamax,
            torch.optim.NAdam,
            torch.optim.RAdam,
            torch.optim.RMSprop,
            torch.optim.Rprop,
            torch.optim.ASGD,
        ),
        "",
    ),
    torch.optim.Adafactor: "a mean over its elements",
    torch.optim.Muon: "a product of matrices",
}
"""Torch's own rules, which treat every weight by itself: what couples its elements, empty if nothing does.

`tests/unit/test_update.py` holds each against the trial.
"""
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


def why_uncompiled(optimizer: Optimizer) -> str:
    """Return why an update is no graph of a compiler, which would gain nothing or give another result."""
    members = members_of(optimizer)
    name = " and ".join(dict.fromkeys(type(member).__name__ for member in members))
    if not all(map(is_torchs_own, members)):
        return f"{name} is code that may keep numbers, of which a graph would keep the first"
    if all(group.get("fused") for member in members for group in member.param_groups):
        return f"{name} is fused: one kernel updates many weights"
    return (
        f"{name} has a learning rate that is a number, for each of which a graph would be compiled anew, and powers of other numbers, "
        "which a graph would take in float32"
    )


def has_hooks(optimizer: Optimizer) -> bool:
    """Return whether code of a user's runs before or after each step."""
    own = [vars(optimizer).get(f"_optimizer_step_{when}_hooks") for when in ("pre", "post")]
    everywhere = [torch_optimizer._global_optimizer_pre_hooks, torch_optimizer._global_optimizer_post_hooks]
    return any([*own, *everywhere])


def _read(
    trial: _Trial,
    kinds: Mapping[str, list[str]],
    some: Mapping[str, tuple[int, ...]],
    parts: Mapping[str, Sequence[tuple[int, ...]]],
    held: Mapping[str, Any],
) -> UpdateRule:
    """Return the rule that trials on some weights of each kind show."""
    with disable_compiler():
        try:
            found = trial.watched(some)
        except TRIED as error:
            return trial.with_numbers(some, held, error)
        coupled = found.coupled or trial.counts_weights(some, found)
        whole = dict(found.whole)
        number = max((len(parts[name]) for name in some if name in parts), default=0)
        for index in range(number):
            cut = {
                name: parts[name][min(index, len(parts[name]) - 1)] if parts.get(name) else some[name] for name in some
            }
            if not whole and trial.is_alike(cut, found):
                continue
            for names in kinds.values():
                mine = [name for name in names[:2] if name in some]
                if not mine or any(name in whole or not parts.get(name) for name in mine):
                    continue
                if not trial.is_alike({name: cut[name] for name in mine}):
                    whole |= dict.fromkeys(mine, "it looks at the shape of a weight")
    spread = {name: whole[tried] for names in kinds.values() for tried in names[:2] if tried in whole for name in names}
    return UpdateRule(trial.kind, spread, coupled, found.draws)


def _simplify(code: StepCode) -> None:
    """Let an optimizer of torch update its tensors one by one, which gives what its faster ways compute, too."""
    for member in code.optimizers:
        if any(kind.__module__.startswith("torch.optim.") and kind is not Optimizer for kind in type(member).__mro__):
            ways = {"fused": None, "foreach": False, "capturable": False}
            for group in [member.defaults, *member.param_groups]:
                group.update({key: value for key, value in ways.items() if key in group})


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
    found = _options_in(first, names)
    for key, member in zip(getattr(optimizer, "names", ()), members_of(optimizer), strict=False):
        for name in _options_in(member, names):
            found[name]["member"] = key
    for one in inner:
        for name, options in _options_in(one, names).items():
            mine = found.setdefault(name, {})
            mine["inner"] = (
                *mine.get("inner", ()),
                (type(one).__name__, sorted(options.items(), key=lambda pair: pair[0])),
            )
    return found


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


# -- trials ----------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Watched:
    """The findings of a trial about the weights in it."""

    whole: dict[str, str]
    coupled: str
    draws: str
    steps: list[list[Entry]]


class _Trial:
    """Steps of one optimizer on weights without values, or with small ones."""

    def __init__(
        self,
        source: OptimizerSource,
        shapes: Mapping[str, tuple[int, ...]],
        marks: Mapping[str, Mapping[str, Any]],
        kind: str,
        before: Callable[[Optimizer], None] | None = None,
    ) -> None:
        self._source, self._shapes, self._marks, self.kind = source, shapes, marks, kind
        self._before = before or (lambda _: None)

    def watched(self, shapes: Mapping[str, tuple[int, ...]]) -> _Watched:
        """Follow the operations of the optimizer on weights of these shapes.

        Raises:
            ReadsNumbersError: the optimizer keeps its parameters outside of its groups.
        """
        optimizer, weights = skeleton(self._source, self._shapes, self._marks)
        code = StepCode(optimizer)
        _simplify(code)
        used = {name: like(weights[name], shape, "meta") for name, shape in shapes.items()}
        placed = put_in_place(code, weights, used)
        if placed is None:
            raise ReadsNumbersError("it keeps its parameters outside of its groups")
        follow = FollowedStep()
        for name, weight in used.items():
            follow.mark(weight, UpdateLabel(name))
            weight.grad = torch.empty_like(weight, requires_grad=False)
            follow.mark(weight.grad, UpdateLabel(name))
        for value in tree_leaves([list(one.state.values()) for one in placed.optimizers]):
            if isinstance(value, Tensor):
                follow.mark(value, UpdateLabel())
        steps: list[list[Entry]] = []

        def take() -> None:
            follow.entries = []
            for name, weight in used.items():
                if weight.grad is None:  # a step may drop it, or change it in place
                    weight.grad = torch.empty_like(weight, requires_grad=False)
                follow.mark(weight.grad, UpdateLabel(name))
            with alone(self.kind), CountsOnHost(), follow, torch.no_grad():
                self._before(optimizer)
                optimizer.step()
            follow.forget_the_dead()
            steps.append(follow.entries)

        march(placed, take)
        labels = {name: follow.label(weight) for name, weight in used.items()}
        whole = {
            n: follow.where.get(n, "an operation") for n, label in labels.items() if label.entered or label.beside != n
        }
        coupled = next((follow.where.get(n, "an operation") for n, label in labels.items() if label.weights - {n}), "")
        return _Watched(whole, coupled, follow.draws, steps)

    def is_alike(self, cut: Mapping[str, tuple[int, ...]], whole: _Watched | None = None) -> bool:
        """Return whether the operations on parts are those on the whole weights, with the same numbers."""
        try:
            parts = self.watched(cut)
            whole = whole or self.watched({name: self._shapes[name] for name in cut})
        except TRIED:
            return False
        return not parts.whole and not parts.coupled and parts.steps == whole.steps

    def counts_weights(self, shapes: Mapping[str, tuple[int, ...]], together: _Watched) -> str:
        """Return which weight is updated by other operations or numbers where the optimizer holds half of the weights.

        No tensor shows it where the code counts weights, as in `for index, weight in enumerate(group["params"])`.
        """
        half = dict(list(shapes.items())[1::2])
        try:
            apart = self.watched(half) if half else together
        except TRIED:
            return "it fails without some of them"
        differ = (name for name in half if not _are_alike(_operations_on(name, apart), _operations_on(name, together)))
        return next((f"{name} is updated otherwise without the others" for name in differ), "")

    def with_numbers(
        self, shapes: Mapping[str, tuple[int, ...]], held: Mapping[str, Any], why: Exception
    ) -> UpdateRule:
        """Return the rule as small real weights show it: updated together and one by one.

        Raises:
            ModelError: the optimizer fails on them too.
        """
        small = {name: small_shape(shape) for name, shape in shapes.items()}
        state = torch.get_rng_state()
        try:
            together = self._updated(small, small)
            draws = "" if torch.equal(state, torch.get_rng_state()) else "a draw of random numbers"
            alone = {name: weight for n in small for name, weight in self._updated(small, {n: small[n]}).items()}
        except TRIED as error:
            raise ModelError(f"{self.kind} fails at a step ({error}): adamw works") from error
        finally:
            torch.set_rng_state(state)
        differ = [n for n in small if not torch.allclose(alone[n], together[n], rtol=1e-9, atol=1e-12, equal_nan=True)]
        reason = str(why) if isinstance(why, ReadsNumbersError) else "its operations cannot be followed without values"
        return UpdateRule(
            self.kind,
            dict.fromkeys(held, reason),
            f"{differ[0]} is updated otherwise without the others" if differ else "",
            draws,
        )

    def _updated(self, shapes: Mapping[str, tuple[int, ...]], held: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
        """Return weights with values after the steps of a trial, of which the optimizer holds only some."""
        code, used = over_small_weights(self._source, self._shapes, self._marks, shapes, held)
        _simplify(code)
        generators = {name: torch.Generator().manual_seed(100 + index) for index, name in enumerate(shapes)}
        count = itertools.count()

        def take() -> None:
            # Gradients differ in size from step to step, so that a rule which acts beyond a threshold acts.
            scale = (1.0, 1e6, 1e-6, 30.0)[next(count) % 4]
            for name in held:
                drawn = torch.randn(used[name].shape, dtype=torch.float64, generator=generators[name])
                used[name].grad = scale * drawn
            with alone(self.kind), torch.no_grad():
                self._before(code.optimizer)
                code.optimizer.step()

        march(code, take)
        return {name: used[name].detach() for name in held}


_Operations = list[list[tuple[str, tuple[Any, ...] | None]]]


def _operations_on(name: str, trial: _Watched) -> _Operations:
    """Return the operations of each step that read a weight, with their numbers, or None if they read others too (foreach)."""
    return [
        [
            (operation, numbers if weights == {name} else None)
            for operation, numbers, labels in entries
            if name in (weights := frozenset().union(*(label.weights for label in labels)))
        ]
        for entries in trial.steps
    ]


def _are_alike(ours: _Operations, theirs: _Operations) -> bool:
    """Return whether all steps have the same operations, with the same numbers where both read one weight."""
    return len(ours) == len(theirs) and all(
        len(mine) == len(other)
        and all(
            one[0] == two[0] and (None in (one[1], two[1]) or one[1] == two[1])
            for one, two in zip(mine, other, strict=True)
        )
        for mine, other in zip(ours, theirs, strict=True)
    )
