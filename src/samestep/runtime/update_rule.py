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

import functools
import itertools
import math
import sys
import types
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves

from samestep.errors import ModelError

OptimizerSource = Callable[[list[tuple[str, Tensor]]], Optimizer]
"""Builds an optimizer over named tensors: whole weights on one device, pieces of them in a layout."""

TRIED = (ValueError, TypeError, RuntimeError, AssertionError, IndexError, KeyError, AttributeError, ZeroDivisionError)
"""Exceptions by which an optimizer may refuse tensors it was not made for."""

_PLAIN_STEPS = 4
_LARGEST_COUNT = 10_000
_MOST_COUNTS = 32
_NO_MARKS: Mapping[str, Mapping[str, Any]] = {}


@dataclass(frozen=True, slots=True)
class UpdateRule:
    """What influences the update of an element, as an optimizer's operations show it."""

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
) -> UpdateRule:
    """Return the rule of an optimizer over weights of these shapes, of which ranks hold parts of the shapes `parts`.

    Raises:
        ModelError: it holds none of the weights, or fails at a step.
    """
    optimizer, weights = skeleton(source, shapes, marks)
    held = _options_of(optimizer, weights)
    kind = type(optimizer).__name__
    if not held:
        raise ModelError(
            f"{kind} holds none of the model's weights, so it would train nothing: build it over the parameters that the "
            "optimizer function is given"
        )
    kinds: dict[str, list[str]] = {}
    for name, options in held.items():
        kinds.setdefault(repr((sorted(options), _told(options), shapes[name], marks.get(name))), []).append(name)
    some = {name: shapes[name] for names in kinds.values() for name in names[:2]}
    # What has one element cannot be cut, and its shape () asks for other operations of torch.
    some = {name: shape for name, shape in some.items() if math.prod(shape) > 1} or some
    trial = _Trial(source, shapes, marks, kind)
    cut = {name: tuple(parts[name]) for name in some if name in parts}
    key = (kind, tuple(sorted(kinds)), tuple(sorted(some.items())), tuple(sorted(cut.items())))
    is_torchs = type(optimizer).__module__.startswith("torch.optim.") and not vars(optimizer).get(
        "_optimizer_step_pre_hooks"
    )
    if not is_torchs or key not in _KNOWN:
        rule = _read(trial, kinds, some, parts, held)
        if not is_torchs:
            return rule
        _KNOWN[key] = rule
    return _KNOWN[key]


_KNOWN: dict[Hashable, UpdateRule] = {}
"""The rules of torch's own optimizers, by their options and the shapes tried."""


def _read(
    trial: _Trial,
    kinds: Mapping[str, list[str]],
    some: Mapping[str, tuple[int, ...]],
    parts: Mapping[str, Sequence[tuple[int, ...]]],
    held: Mapping[str, Any],
) -> UpdateRule:
    """Return the rule that trials on some weights of each kind show."""
    with torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext():
        try:
            found = trial.watched(some)
        except TRIED as error:
            return trial.with_numbers(some, held, error)
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
    return UpdateRule(trial.kind, spread, found.coupled, found.draws)


def skeleton(
    source: OptimizerSource, shapes: Mapping[str, tuple[int, ...]], marks: Mapping[str, Mapping[str, Any]]
) -> tuple[Optimizer, dict[str, Tensor]]:
    """Return the optimizer over weights of these shapes that have no values, and the weights by name."""

    def build(device: str) -> tuple[Optimizer, dict[str, Tensor]]:
        weights: dict[str, Tensor] = {}
        for name, shape in shapes.items():
            weights[name] = nn.Parameter(torch.empty(shape, device=device))
            weights[name].__dict__.update(marks.get(name, {}))
        with _Counts():
            return source(list(weights.items())), weights

    try:
        return build("meta")
    except RuntimeError as error:
        if "meta" not in str(error):
            raise
    optimizer, weights = build(
        "cpu"
    )  # fused=True is checked against the device; memory that nothing writes costs nothing
    absent = {name: _like(weight, shapes[name], "meta") for name, weight in weights.items()}
    if not put_in_place(optimizer, weights, absent):
        raise ModelError(f"{type(optimizer).__name__} keeps its parameters outside of its groups: foreach=None works")
    return optimizer, absent


def _simplest(optimizer: Optimizer) -> Optimizer:
    """Let one of torch's own optimizers take its tensors one by one: that is what its faster ways compute, too."""
    if any(kind.__module__.startswith("torch.optim.") and kind is not Optimizer for kind in type(optimizer).__mro__):
        ways = {"fused": None, "foreach": False, "capturable": False}
        for group in [optimizer.defaults, *optimizer.param_groups]:
            group.update({key: value for key, value in ways.items() if key in group})
    return optimizer


def put_in_place(optimizer: Optimizer, weights: Mapping[str, Tensor], others: Mapping[str, Tensor]) -> bool:
    """Give an optimizer that has not stepped the `others` in place of its weights, group by group; drop what has none.

    Returns:
        Whether nothing in the optimizer still holds one of the weights.
    """
    names = {id(weight): name for name, weight in weights.items()}
    for group in optimizer.param_groups:
        held = [names[id(param)] for param in group["params"] if id(param) in names]
        group["params"][:] = [others[name] for name in held if name in others]
        if "param_names" in group:
            group["param_names"] = [name for name in held if name in others]
    for name, weight in weights.items():
        state = optimizer.state.pop(weight, None)
        if state and name in others:
            optimizer.state[others[name]] = {
                key: _like(value, others[name].shape, others[name].device)
                if isinstance(value, Tensor) and value.shape == weight.shape and value.device == weight.device
                else value
                for key, value in state.items()
            }
    kept = [value for key, value in vars(optimizer).items() if key not in ("param_groups", "state", "defaults")]
    return not any(id(leaf) in names for leaf in tree_leaves(kept))


def options_by_name(optimizer: Optimizer, weights: Mapping[str, Tensor]) -> dict[str, dict[str, Any]]:
    """Return the options of each weight that the optimizer holds, without those that only say how it computes."""
    computing = ("fused", "foreach", "capturable", "differentiable", "maximize")
    return {
        name: {key: value for key, value in options.items() if key not in computing[:-1]}
        for name, options in _options_of(optimizer, weights).items()
    }


def _options_of(optimizer: Optimizer, weights: Mapping[str, Tensor]) -> dict[str, dict[str, Any]]:
    names = {id(weight): name for name, weight in weights.items()}
    return {
        names[id(param)]: {key: value for key, value in group.items() if key not in ("params", "param_names")}
        for group in optimizer.param_groups
        for param in group["params"]
        if id(param) in names
    }


def _told(options: Mapping[str, Any]) -> str:
    """Return the options that may change the rule: a learning rate is a mere number."""
    return repr([(key, options[key]) for key in sorted(options) if key not in ("lr", "initial_lr")])


def _like(tensor: Tensor, shape: Sequence[int], device: Any) -> Tensor:
    made = torch.empty(shape, dtype=tensor.dtype, device=device)
    if not isinstance(tensor, nn.Parameter):
        return made
    param = nn.Parameter(made)
    param.__dict__.update(tensor.__dict__)
    return param


# -- following the operations ----------------------------------------------------------------------


class _Label(NamedTuple):
    """What a tensor depends on."""

    beside: str | None = None
    """The weight beside whose elements its own lie, each depending on the one at its place."""
    entered: frozenset[str] = frozenset()
    """Weights of which other elements, or all, entered."""
    is_uniform: bool = True
    """Whether its elements do not depend on their place, for a tensor that depends on no weight."""

    @property
    def weights(self) -> frozenset[str]:
        return self.entered | ({self.beside} if self.beside is not None else frozenset())


_Entry = tuple[str, tuple[Any, ...], tuple[_Label, ...]]
_POINTWISE = frozenset(
    [
        "copy",
        "copy_",
        "clone",
        "_to_copy",
        "masked_fill",
        "masked_fill_",
        "lerp",
        "lerp_",
        "contiguous",
        "detach",
        "lift_fresh",
        "lift_fresh_copy",
        "alias",
        "positive",
    ]
)
_FILLED = frozenset(
    [
        "zeros",
        "ones",
        "full",
        "empty",
        "zeros_like",
        "ones_like",
        "full_like",
        "empty_like",
        "new_zeros",
        "new_ones",
        "new_full",
        "new_empty",
        "empty_strided",
        "new_empty_strided",
        "scalar_tensor",
        "zero_",
        "fill_",
        "zero",
        "fill",
        "_foreach_zero_",
    ]
)
_OVERWRITING = ("copy_", "zero_", "fill_", "_foreach_copy_", "_foreach_zero_")
_NOT_BY_ELEMENT = ("_foreach_norm", "_foreach_max")


class _Facts(NamedTuple):
    """What an operation's schema says of it."""

    name: str
    pointwise: bool
    draws: bool
    writes: tuple[int, ...]
    """Positions of the arguments that it writes."""
    writes_named: tuple[str, ...]


@functools.cache
def _facts_of(func: Any) -> _Facts:
    name = func._schema.name.split("::")[1]
    pointwise = (
        name in _POINTWISE
        or torch.Tag.pointwise in func.tags
        or (name.startswith(("_foreach_", "_fused_")) and not name.startswith(_NOT_BY_ELEMENT))
    )
    written = [
        (i, a) for i, a in enumerate(func._schema.arguments) if a.alias_info is not None and a.alias_info.is_write
    ]
    return _Facts(
        name,
        pointwise,
        torch.Tag.nondeterministic_seeded in func.tags,
        tuple(i for i, argument in written if not argument.kwarg_only),
        tuple(argument.name for _, argument in written),
    )


_ARITHMETIC = frozenset(
    [
        "mul",
        "add",
        "sub",
        "div",
        "sqrt",
        "square",
        "neg",
        "sign",
        "abs",
        "clone",
        "lerp",
        "addcmul",
        "addcdiv",
        "pow",
        "maximum",
        "minimum",
        "exp",
        "log",
        "rsqrt",
        "reciprocal",
        "clamp",
        "clamp_min",
        "clamp_max",
        "tanh",
        "sigmoid",
    ]
)


def _shortcut(facts: _Facts, func: Any, args: Any, kwargs: Any, tensors: list[Tensor]) -> Any:
    """Run an operation; of arithmetic without values, return only where its result would be, in a tenth of the time."""
    if not facts.pointwise or not args:
        return func(*args, **kwargs)
    if facts.name.endswith("_") and facts.writes == (0,):
        targets = _tensors_in(args[0])
        if targets and all(target.is_meta for target in targets):
            return args[0] if isinstance(args[0], Tensor) else None
    if facts.name in _ARITHMETIC and not kwargs.keys() - {"alpha", "value"}:
        large = [tensor for tensor in tensors if tensor.dim()]
        alike = large and all(t.is_meta and t.shape == large[0].shape and t.dtype == large[0].dtype for t in large)
        if alike and large[0].is_floating_point() and large[0].is_contiguous():
            return torch.empty_like(large[0])
    return func(*args, **kwargs)


def _tensors_in(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [leaf for leaf in value if isinstance(leaf, Tensor)] if isinstance(value, list | tuple) else []


def _is_masked(args: Any) -> bool:
    """Return whether an assignment by index is one by a mask of the same shape, of one number: element by element."""
    indices = [index for index in args[1] if index is not None]
    is_mask = len(args[1]) == len(indices) == 1 and indices[0].dtype == torch.bool and indices[0].shape == args[0].shape
    return is_mask and args[2].numel() == 1


class _ReadsNumbersError(RuntimeError):
    """The code reads a number of its data."""


class _Follow(TorchDispatchMode):
    """Labels every tensor, and lists the operations."""

    def __init__(self) -> None:
        super().__init__()
        self._labels: dict[int, tuple[StorageWeakRef, _Label]] = {}
        self.entries: list[_Entry] = []
        self.where: dict[str, str] = {}
        """The first operation in which a weight's elements, or other weights, entered its own."""
        self.draws = ""

    def mark(self, tensor: Tensor, label: _Label) -> None:
        """Label a tensor's memory."""
        weak = StorageWeakRef(tensor.untyped_storage())
        self._labels[weak.cdata] = (weak, label)

    def forget_the_dead(self) -> None:
        """Drop the labels of memory that nobody holds."""
        self._labels = {key: kept for key, kept in self._labels.items() if not kept[0].expired()}

    def label(self, tensor: Tensor) -> _Label:
        """Return what a tensor depends on: a part or another order of a memory is not beside the weight."""
        storage = tensor.untyped_storage()
        kept = self._labels.get(storage._cdata)
        if kept is None:
            return _Label(is_uniform=tensor.numel() == 1)
        label = kept[1]
        covers = tensor.numel() * tensor.element_size() == storage.nbytes() and tensor.is_contiguous()
        return label if covers or label.beside is None else _Label(None, label.weights, False)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, and label what it writes."""
        kwargs = kwargs or {}
        facts = _facts_of(func)
        values = [*args, *kwargs.values()]
        tensors = [leaf for value in values for leaf in _tensors_in(value)]
        before = {id(tensor): self.label(tensor) for tensor in tensors}
        if facts.name == "_local_scalar_dense" and (before[id(args[0])].weights or args[0].is_meta):
            raise _ReadsNumbersError("it reads numbers of weights and gradients")
        if facts.draws and not self.draws:
            self.draws = facts.name
        if facts.name.startswith("index_put") and _is_masked(args):
            self._note(facts.name, values, tensors, before)
            for target in (args[0],) if facts.name.endswith("_") else ():
                self._write(facts._replace(pointwise=True), target, [(t, before[id(t)]) for t in tensors])
                return target
        known = {tensor.untyped_storage()._cdata for tensor in tensors}
        result = _shortcut(facts, func, args, kwargs, tensors)
        written = [args[i] for i in facts.writes if i < len(args)] + [
            kwargs[k] for k in facts.writes_named if k in kwargs
        ]
        made = [t for t in _tensors_in(result) if t.untyped_storage()._cdata not in known]
        if not written and not made:
            return result  # a view: its memory is labelled
        self._note(facts.name, values, tensors, before)
        for row in _rows_of(values, written, result, made):
            read = [(tensor, before[id(tensor)]) for tensor in row.read]
            for target in row.written:
                self._write(facts, target, read)
        return result

    def _note(self, name: str, values: list[Any], tensors: list[Tensor], before: Mapping[int, _Label]) -> None:
        numbers = tuple(v for v in values if type(v) in (int, float))
        numbers += tuple(x for v in values if isinstance(v, list | tuple) for x in v if type(x) is float)
        self.entries.append((name, numbers, tuple(before[id(tensor)] for tensor in tensors)))

    def _write(self, facts: _Facts, target: Tensor, read: list[tuple[Tensor, _Label]]) -> None:
        """Label what an operation has written, from the labels of what it read."""
        name = facts.name
        if name in _OVERWRITING:
            read = [(t, label) for t, label in read if t is not target]
        if name in _FILLED:
            read = [(t, label) for t, label in read if t.numel() == 1 and name.startswith("fill")]
        if facts.pointwise or name in _FILLED:
            label = _beside(read, target.shape)
        else:
            entered = frozenset[str]().union(*(label.weights for _, label in read))
            label = _Label(None, entered, not entered and target.numel() == 1)
        storage = target.untyped_storage()
        kept = self._labels.get(storage._cdata)
        covers = target.numel() * target.element_size() == storage.nbytes() and target.is_contiguous()
        if kept is not None and not covers:
            old = kept[1]
            label = _Label(old.beside, old.entered | label.weights | old.weights, False)
        if label.entered:
            for weight in label.weights:
                self.where.setdefault(weight, name)
        self.mark(target, label)


class _Counts(TorchFunctionMode):
    """Makes counts and rates, tensors without dimensions, on the host: the code may read their values."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function of torch's; a tensor of one number is not made on the meta device."""
        kwargs = kwargs or {}
        if func in _MAKING and "device" in kwargs and torch.device(kwargs["device"] or "cpu").type == "meta":
            size = args[0] if args else kwargs.get("size", kwargs.get("data"))
            if (isinstance(size, int | float) and func in _OF_DATA) or (isinstance(size, tuple | list) and not size):
                kwargs = {**kwargs, "device": "cpu"}
        return func(*args, **kwargs)


_OF_DATA = (torch.tensor, torch.as_tensor, torch.scalar_tensor)
_MAKING = (*_OF_DATA, torch.zeros, torch.ones, torch.full, torch.empty)


class _Row(NamedTuple):
    read: list[Tensor]
    written: list[Tensor]


def _rows_of(values: list[Any], written: list[Any], result: Any, made: list[Tensor]) -> Iterator[_Row]:
    """Yield what an operation reads and writes; an operation on lists is one for each place in them."""
    lists = [value for value in values if isinstance(value, list | tuple) and value and isinstance(value[0], Tensor)]
    is_list = any(isinstance(value, list | tuple) for value in written) or isinstance(result, list | tuple)
    if lists and is_list and len({len(value) for value in lists}) == 1:
        shared = [value for value in values if isinstance(value, Tensor)]
        outputs = [value for value in written if isinstance(value, list | tuple)] or [result]
        for index in range(len(lists[0])):
            yield _Row([value[index] for value in lists] + shared, [value[index] for value in outputs])
        return
    yield _Row(
        [t for value in values for t in _tensors_in(value)], [t for value in written for t in _tensors_in(value)] + made
    )


def _beside(inputs: list[tuple[Tensor, _Label]], shape: torch.Size) -> _Label:
    """Return the label of what an operation makes element by element."""
    entered = frozenset[str]().union(*(label.entered for _, label in inputs))
    besides = {label.beside for tensor, label in inputs if label.beside is not None and tensor.shape == shape}
    broadcast = {label.beside for tensor, label in inputs if label.beside is not None and tensor.shape != shape}
    placed = any(not label.is_uniform and not label.weights for _, label in inputs)
    entered |= {weight for weight in broadcast if weight is not None}
    if len(besides) > 1 or placed:
        entered |= {weight for weight in besides if weight is not None}
    beside = next(iter(besides)) if len(besides) == 1 else None
    return _Label(beside, entered, not placed and beside is None and not entered)


# -- trials ----------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Watched:
    """What a trial has shown of the weights in it."""

    whole: dict[str, str]
    coupled: str
    draws: str
    steps: list[list[_Entry]]


class _Trial:
    """Steps of one optimizer on weights without values, or with small ones."""

    def __init__(
        self,
        source: OptimizerSource,
        shapes: Mapping[str, tuple[int, ...]],
        marks: Mapping[str, Mapping[str, Any]],
        kind: str,
    ) -> None:
        self._source, self._shapes, self._marks, self.kind = source, shapes, marks, kind

    def watched(self, shapes: Mapping[str, tuple[int, ...]]) -> _Watched:
        """Follow the operations of the optimizer on weights that have these shapes in place of their own."""
        optimizer, weights = skeleton(self._source, self._shapes, self._marks)
        _simplest(optimizer)
        used = {name: _like(weights[name], shape, "meta") for name, shape in shapes.items()}
        if not put_in_place(optimizer, weights, used):
            raise _ReadsNumbersError("it keeps its parameters outside of its groups")
        follow = _Follow()
        for name, weight in used.items():
            follow.mark(weight, _Label(name))
            weight.grad = torch.empty_like(weight, requires_grad=False)
            follow.mark(weight.grad, _Label(name))
        for value in tree_leaves(list(optimizer.state.values())):
            if isinstance(value, Tensor):
                follow.mark(value, _Label())
        steps: list[list[_Entry]] = []

        def take() -> None:
            follow.entries = []
            for name, weight in used.items():
                assert weight.grad is not None
                follow.mark(weight.grad, _Label(name))  # a step may change it in place
            with _Counts(), follow, torch.no_grad():
                optimizer.step()
            follow.forget_the_dead()
            steps.append(follow.entries)

        _march(optimizer, take)
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

    def with_numbers(
        self, shapes: Mapping[str, tuple[int, ...]], held: Mapping[str, Any], why: Exception
    ) -> UpdateRule:
        """Return the rule as small real weights show it: updated together and one by one.

        Raises:
            ModelError: the optimizer fails on them too.
        """
        small = {name: _small(shape) for name, shape in shapes.items()}
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
        reason = str(why) if isinstance(why, _ReadsNumbersError) else "its operations cannot be followed without values"
        return UpdateRule(
            self.kind,
            dict.fromkeys(held, reason),
            f"{differ[0]} is updated otherwise without the others" if differ else "",
            draws,
        )

    def _updated(self, shapes: Mapping[str, tuple[int, ...]], held: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
        """Return weights with values after the steps of a trial, of which the optimizer holds only some."""
        optimizer, weights = skeleton(self._source, self._shapes, self._marks)
        used: dict[str, Tensor] = {}
        for index, name in enumerate(shapes):
            generator = torch.Generator().manual_seed(index)
            value = nn.Parameter(torch.randn(shapes[name], dtype=torch.float64, generator=generator))
            value.__dict__.update(self._marks.get(name, {}))
            used[name] = value
        if optimizer.state or not put_in_place(optimizer, weights, {name: used[name] for name in held}):
            optimizer = self._source([(name, used[name]) for name in held])
        _simplest(optimizer)
        generators = {name: torch.Generator().manual_seed(100 + index) for index, name in enumerate(shapes)}
        count = itertools.count()

        def take() -> None:
            # Gradients differ in size from step to step, so that a rule which acts beyond a threshold acts.
            scale = (1.0, 1e6, 1e-6, 30.0)[next(count) % 4]
            for name in held:
                drawn = torch.randn(used[name].shape, dtype=torch.float64, generator=generators[name])
                used[name].grad = scale * drawn
            with torch.no_grad():
                optimizer.step()

        _march(optimizer, take)
        return {name: used[name].detach() for name in held}


def _small(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return a shape with as many dimensions, of at most about four thousand elements."""
    most = 4096 if len(shape) < 2 else 64 if len(shape) == 2 else max(2, round(4096 ** (1 / len(shape))))
    return tuple(min(size, most) for size in shape)


# -- the steps that matter -------------------------------------------------------------------------


def _march(optimizer: Optimizer, take: Callable[[], None]) -> None:
    """Take the first steps, and those around every integer among the options and the constants of the code."""
    counts = sorted(_counts(optimizer))[-_MOST_COUNTS:]
    taken, before, rising = 0, _counters(optimizer), set[tuple[int, str]]()
    for _ in range(_PLAIN_STEPS):
        take()
        taken += 1
        after = _counters(optimizer)
        rising = {key for key, (_, value) in after.items() if key in before and value == before[key][1] + 1}
        before = after
    for count in counts:
        now = [value for key, (_, value) in _counters(optimizer).items() if key in rising]
        if not now:
            while taken <= count:
                take()
                taken += 1
            continue
        if count + 1 <= min(now):
            continue
        for key, (container, value) in _counters(optimizer).items():
            if key in rising and value < count - 2:
                _set(container, key[1], count - 2)
        for _ in range(4):
            take()


def _counts(optimizer: Optimizer) -> set[int]:
    """Return the integers, from 2 to 10,000, among an optimizer's options, its attributes and its code's constants."""
    found: set[int] = set()
    own = {key: value for key, value in vars(optimizer).items() if key not in ("state", "param_groups")}
    options = [
        {k: v for k, v in group.items() if k not in ("params", "param_names")} for group in optimizer.param_groups
    ]
    for leaf in tree_flatten([own, options])[0]:
        if isinstance(leaf, int | float) and not isinstance(leaf, bool) and leaf == leaf // 1:
            found.add(int(leaf))
    functions = [f for kind in type(optimizer).__mro__ if kind not in (Optimizer, object) for f in vars(kind).values()]
    if not type(optimizer).__module__.startswith("torch.optim"):
        functions += [leaf for leaf in tree_flatten([own, options])[0] if isinstance(leaf, types.FunctionType)]
        for function in functions:
            code = getattr(getattr(function, "__wrapped__", function), "__code__", None)
            found |= set(_constants(code)) if isinstance(code, types.CodeType) else set()
    return {count for count in found if 2 <= count <= _LARGEST_COUNT}


def _constants(code: types.CodeType) -> Iterator[int]:
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _constants(constant)
        elif isinstance(constant, int | float) and not isinstance(constant, bool) and math.isfinite(constant):
            yield int(constant)


def _counters(optimizer: Optimizer) -> dict[tuple[int, str], tuple[dict[str, Any], float]]:
    """Return the numbers that an optimizer keeps, by the dictionary and the key that hold them."""
    places: Iterable[dict[str, Any]] = [vars(optimizer), *optimizer.param_groups, *optimizer.state.values()]
    found = {}
    for place in places:
        if not isinstance(place, dict):
            continue
        for key, value in place.items():
            if (isinstance(value, Tensor) and value.numel() == 1 and not value.is_meta) or (
                isinstance(value, int | float) and not isinstance(value, bool)
            ):
                found[id(place), str(key)] = (place, float(value))
    return found


def _set(place: dict[str, Any], key: str, count: int) -> None:
    value = place[key]
    if isinstance(value, Tensor):
        value.fill_(count)
    else:
        place[key] = type(value)(count)
