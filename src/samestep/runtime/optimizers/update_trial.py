"""The rule of an optimizer that is in no table, as steps on small weights with values show it.

An optimizer takes the same steps, with the same gradients, over some weights of the model in several ways:

```
all together       a       b       c      the update that one device makes
each alone         a     │ b     │ c      another update: weights are coupled, so that no rank may lack one of them
all in parts       a[:]    b[:]    c[:]   another update: elements are coupled, so that a weight is updated whole
```
Gradients have four sizes, from which on a rule may clip. After twelve steps, counters are set forward to 100, to 10,000 and to some between, and to the
numbers among the options, so that a rule which begins to act at step 5,000 does so. A counter is a number that rises by as much in each
step (by one, or by one for each weight), wherever the optimizer keeps it: its state, its groups, its attributes, a closure, a variable.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from samestep.building.optimizer import OptimizerSource
from samestep.building.torch_seams import DispatchMode, disable_compiler
from samestep.errors import ModelError
from samestep.runtime.optimizers.skeletons import alone, over_values, small_shape
from samestep.state.named_variables import Variable
from samestep.state.snapshot import preserve_generators
from samestep.state.step_code import StepCode, write
from samestep.trees import operands

TRIED = (ValueError, TypeError, RuntimeError, AssertionError, IndexError, KeyError, AttributeError, ZeroDivisionError)
"""Exceptions by which an optimizer may refuse tensors it was not made for."""

_FIRST_STEPS = 12
_COUNTS = (100, 5040, 8192, 10_000)
"""The counts to which counters are set forward: most periods divide one of them, as 64 does 8,192, and 48 does 5,040."""
_SIZES = (1e-6, 1.0, 30.0, 1e6)
"""Sizes of gradients: of three of the first steps each, in this order, since updates are compared within the rounding of the weights."""
_LATER_SIZES = (1.0, 1e6, 1e-6)
_LR = 0.1
"""The learning rate of a group that has none yet, as before a warm-up."""
_MOST_ALONE = 16
"""Weights that are updated each alone; those after them are without these together."""
_SMALL = 2**14
"""Elements of a weight in all steps; a longer one is shortened, a matrix to 129 rows and columns at least."""
_MOST_LARGE = 2**22
"""Elements of all weights that are tried in their real shapes."""
_LARGEST = 2**20
"""Elements of one of them; a larger one is shortened."""
_SHIFT = 31

Window = Callable[[Tensor], Tensor]
"""Returns the part of a whole weight, or of its gradient, that a rank has."""
Updates = list[dict[str, Tensor]]
"""What each step adds to each weight, by name."""


class Tried(NamedTuple):
    """The findings of a trial about the weights in it."""

    whole: dict[str, str]
    """Weights whose parts get another update, and why."""
    coupled: str
    """How a weight gets another update without the others; empty if none does."""
    draws: str
    """The operation that draws random numbers; empty if none does."""


@dataclass(slots=True)
class UpdateTrial:
    """Steps of one optimizer on weights with values."""

    source: OptimizerSource
    shapes: Mapping[str, tuple[int, ...]]
    """The shapes of all weights of the model."""
    marks: Mapping[str, Mapping[str, Any]]
    kind: str
    """The name of the optimizer's class."""
    before: Callable[[Optimizer], None] | None = None
    """What a loop calls in front of each step."""
    rows_of: Collection[str] = ()
    """Weights whose gradients have other rows in each step, as those of an embedding have."""
    is_sparse: bool = True
    """Whether these gradients are sparse tensors."""
    _numbers: dict[tuple[str, tuple[int, ...]], Tensor] = field(default_factory=dict)
    _is_fragile: bool | None = None
    _counts: list[int] = field(default_factory=list)
    _dtype: torch.dtype = torch.float64
    _watch: _Watch = field(default_factory=lambda: _Watch())

    def rule(self, kinds: Sequence[Sequence[str]], parts: Mapping[str, Sequence[tuple[int, ...]]]) -> Tried:
        """Return what steps show about two weights of each of the `kinds`, of which ranks hold parts of these shapes.

        Raises:
            ModelError: the optimizer fails at a step.
        """
        names = [name for alike in kinds for name in alike[:2]]
        # What has one element cannot be cut, and its shape () asks for other operations of torch.
        names = [name for name in names if math.prod(self.shapes[name]) > 1] or names
        small = {name: small_shape(self.shapes[name], _SMALL) for name in names}
        with disable_compiler(), preserve_generators():
            together = self._together(small)
            if self._watch.draws:
                return Tried(dict.fromkeys(names, "it draws random numbers"), "", self._watch.draws)
            if coupled := self._coupling(small, together):
                return Tried(dict.fromkeys(names, coupled), coupled, "")
            uncut = self._changed_in_parts(small, together, kinds, parts)
            if rest := [name for name in names if name not in uncut and parts.get(name)]:
                uncut |= self._changed_when_large(rest, small, kinds, parts)
                uncut |= self._led_by_numbers({name: small[name] for name in rest if name not in uncut})
        moved = {name for step in together for name, update in step.items() if update.any()}
        return Tried(dict.fromkeys((name for name in names if name not in moved), "no step moves it") | uncut, "", "")

    def takes_rows(self, names: Collection[str]) -> bool:
        """Return whether sparse gradients, which have some rows, give these weights another update than dense ones; then the trial's are."""
        shapes = {name: small_shape(self.shapes[name], _SMALL) for name in names}
        self.rows_of = names

        def updates(*, is_sparse: bool) -> Updates | None:
            self.is_sparse = is_sparse
            try:
                return self._updates(shapes)
            except TRIED:
                return None

        with disable_compiler(), preserve_generators():
            dense, sparse = updates(is_sparse=False), updates(is_sparse=True)
        # Without `sparse`, the code runs on dense ones alone.
        takes = sparse is not None and (dense is None or any(self._differs(name, dense, sparse) for name in shapes))
        self.rows_of = names if takes else ()
        return takes

    def _together(self, shapes: Mapping[str, tuple[int, ...]]) -> Updates:
        """Return the updates of all weights, in float64 or, if the optimizer does not take it, in float32."""
        try:
            return self._updates(shapes, watch=self._watch)
        except TRIED:
            self._dtype, self._watch = torch.float32, _Watch()
        try:
            return self._updates(shapes, watch=self._watch)
        except TRIED as error:
            raise ModelError("optimizer-fails", f"{self.kind} fails at a step ({error}). Use adamw") from error

    def _coupling(self, shapes: Mapping[str, tuple[int, ...]], together: Updates) -> str:
        """Return which weight gets another update where the optimizer holds it alone; empty if none does."""
        names = list(shapes)
        for some in (*([name] for name in names[:_MOST_ALONE]), names[_MOST_ALONE:]):
            if not some or len(some) == len(names):
                continue
            try:
                apart = self._updates({name: shapes[name] for name in some})
            except TRIED:
                return "it fails without some of them"
            if changed := next((name for name in some if self._differs(name, apart, together)), ""):
                return f"{changed} is updated otherwise without the others"
        return ""

    def _changed_in_parts(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        together: Updates,
        kinds: Sequence[Sequence[str]],
        parts: Mapping[str, Sequence[tuple[int, ...]]],
        steps: int = _FIRST_STEPS,
    ) -> dict[str, str]:
        """Return the weights of which parts get another update than within the whole weight, and why."""
        changed = dict[str, str]()
        tried = {name: (_half(self.shapes[name]), *parts[name]) for name in shapes if parts.get(name)}
        for index in range(max(map(len, tried.values()), default=0)):
            windows = {
                name: _window(self.shapes[name], shapes[name], some[min(index, len(some) - 1)])
                for name, some in tried.items()
                if name not in changed
            }
            for names in ([name for name in alike[:2] if name in windows] for alike in kinds):
                try:
                    cut = self._updates({name: shapes[name] for name in names}, windows, steps=steps) if names else []
                except TRIED:
                    changed |= dict.fromkeys(names, "it fails on a part of a weight")
                    continue
                for name in names:
                    if self._differs(name, cut, together, windows[name]):
                        changed[name] = "its elements influence each other"
        return changed

    def _changed_when_large(
        self,
        rest: Sequence[str],
        small: Mapping[str, tuple[int, ...]],
        kinds: Sequence[Sequence[str]],
        parts: Mapping[str, Sequence[tuple[int, ...]]],
    ) -> dict[str, str]:
        """Return the same in a few steps on one weight of each kind, in its real shape or one of up to a million elements."""
        firsts = [alike[0] for alike in kinds if alike[0] in rest]
        most = min(_LARGEST, max(_MOST_LARGE // max(len(firsts), 1), _SMALL))
        large = {name: small_shape(self.shapes[name], most, 129) for name in firsts}
        changed = dict[str, str]()
        for name in (
            name for name, shape in large.items() if shape != small[name]
        ):  # each by itself, for the sake of memory
            shape = {name: large[name]}
            try:
                changed |= self._changed_in_parts(shape, self._updates(shape, steps=3), kinds, parts, steps=3)
            except TRIED:
                changed[name] = "it fails on a weight of many elements"
        return changed

    def _led_by_numbers(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, str]:
        """Return these weights if a number that depends on a weight or a gradient decides or enters their update: it may act later."""
        if not shapes or not self._watch.leads:
            return {}
        watch = _Watch()
        try:
            self._updates(shapes, watch=watch)  # without the weights that are updated whole
        except TRIED:
            watch.leads = True
        return dict.fromkeys(shapes, "a number of the whole weight enters") if watch.leads else {}

    def _updates(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        windows: Mapping[str, Window] | None = None,
        watch: _Watch | None = None,
        steps: int = _FIRST_STEPS,
    ) -> Updates:
        """Return what the steps of a trial add to weights of these shapes, or to the parts of them in `windows`."""
        values = {}
        for name, shape in shapes.items():
            value = (windows or {}).get(name, _as_it_is)(self._value(name, shape)).clone()
            values[name] = nn.Parameter(value)
            values[name].__dict__.update(self.marks.get(name, {}))
        code = over_values(self.source, self.shapes, self.marks, values)
        _simplify(code)
        if self._is_fragile is None:
            self._is_fragile = fails_on_empty(code)
        updates: Updates = []

        def take(size: float) -> None:
            starts = {}
            for name, weight in values.items():
                gradient = self._gradient(name, shapes[name], len(updates), size)
                weight.grad = (windows or {}).get(name, _as_it_is)(gradient)
                starts[name] = weight.detach().clone()
                if watch is not None:
                    watch.note(weight, weight.grad)
            with alone(self.kind), _NOTHING if watch is None else DispatchMode(watch.carry_out), torch.no_grad():
                if self.before is not None:
                    self.before(code.optimizer)
                code.optimizer.step()
            updates.append({name: weight.detach() - starts[name] for name, weight in values.items()})

        with without_empty_groups(code.optimizers if self._is_fragile else ()), code.put_back():
            rising = _first_steps(code, take, steps)
            if watch is not None:  # other weights may have fewer counters, and take as many steps
                self._counts = sorted({*_COUNTS, *itertools.islice(_options(code), 4)}) if rising else []
            for count in self._counts:
                _set_forward(code, rising, count)
                for size in _LATER_SIZES if steps == _FIRST_STEPS else _LATER_SIZES[:1]:
                    take(size)
        return updates

    def _value(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Return a weight as it is before the first step."""
        drawn = self._numbers.get((name, shape))
        if drawn is None:
            generator = torch.Generator().manual_seed(list(self.shapes).index(name))
            drawn = torch.randn(math.prod(shape) + 3 * _SHIFT, generator=generator, dtype=torch.float64)
            self._numbers[name, shape] = drawn
        return drawn[: math.prod(shape)].view(shape).to(self._dtype)

    def _gradient(self, name: str, shape: tuple[int, ...], step: int, size: float) -> Tensor:
        """Return the gradient of a step: one half of it is that of all steps, as where a loss descends."""
        self._value(name, shape)
        drawn, count = self._numbers[name, shape], math.prod(shape)
        first = _SHIFT + 1 + step % _SHIFT
        gradient = (size * (drawn[_SHIFT : _SHIFT + count] + drawn[first : first + count])).view(shape).to(self._dtype)
        if name not in self.rows_of:
            return gradient
        gradient[step % 2 :: 2] = 0.0
        return gradient.to_sparse(1) if self.is_sparse else gradient

    def _differs(self, name: str, updates: Updates, together: Updates, window: Window | None = None) -> bool:
        """Return whether a step gives a weight, or the part in a window of it, another update than all weights together get.

        What differs by the rounding of the narrowest numbers that the code computes with is equal.
        """
        for update, all_updates in zip((step[name] for step in updates), together, strict=True):
            expected = all_updates[name] if window is None else window(all_updates[name])
            if torch.equal(update, expected):
                continue
            size = float(expected.abs().nan_to_num(0.0, 0.0, 0.0).max())
            limit = max(1e-9, 8 * self._watch.rounding) * size + 1e-30
            limit += 4 * torch.finfo(self._dtype).eps * self._reach(name, together)
            if not torch.allclose(update, expected, rtol=0.0, atol=limit, equal_nan=True):
                return True
        return False

    def _reach(self, name: str, together: Updates) -> float:
        """Return a bound on the size of a weight in all steps, whose rounding is that of an update."""
        return 8.0 + sum(float(step[name].abs().nan_to_num(0.0, 0.0, 0.0).max()) for step in together)


@dataclass(slots=True)
class _Watch:
    """Notes draws of random numbers, numbers of weights and gradients that lead an update, and the rounding of what is computed."""

    draws: str = ""
    leads: bool = False
    """Whether code reads such a number, or computes with it and a tensor of several."""
    rounding: float = 0.0
    _numbers: set[int] = field(default_factory=set)
    """Memories of one number that depends on weights or gradients; counters and rates depend on none."""
    _held: list[Tensor] = field(default_factory=list)

    def carry_out(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation."""
        tensors = operands(*args, *kwargs.values())
        depends = [tensor for tensor in tensors if self._depends(tensor)]
        name = func._schema.name.split("::")[1]
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.draws = self.draws or name
        is_with_others = name == "_local_scalar_dense" or any(tensor.numel() > 1 for tensor in tensors)
        self.leads |= is_with_others and any(tensor.numel() == 1 for tensor in depends)
        result = func(*args, **kwargs)
        for operand in operands(result):
            if operand.is_floating_point() and operand.numel() > 1:
                self.rounding = max(self.rounding, torch.finfo(operand.dtype).eps)
            if depends:
                self.note(operand)
        return result

    def note(self, *tensors: Tensor) -> None:
        """Note that tensors of one number depend on weights or gradients."""
        for tensor in tensors:
            if not self._depends(tensor):
                self._numbers.add(tensor.untyped_storage()._cdata)
                self._held.append(tensor)  # so that no other memory is given its address

    def _depends(self, tensor: Tensor) -> bool:
        if tensor.layout is not torch.strided:
            return True
        storage = tensor.untyped_storage()
        return storage.nbytes() > tensor.element_size() or storage._cdata in self._numbers


_NOTHING = nullcontext()


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor


def _half(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return half of every dimension of a shape."""
    return tuple(-(-size // 2) for size in shape)


def _window(real: tuple[int, ...], shape: tuple[int, ...], part: tuple[int, ...]) -> Window:
    """Return the window of a weight of a `shape` that stands for a `part` of the `real` one, a run of elements or some of its rows.

    It begins at an odd place: parts do not begin where blocks of elements do.
    """
    if len(part) == len(shape):
        sizes = [
            size if of_part == of_real else min(max(1, -(-of_part * size // of_real)), max(size - 1, 1))
            for size, of_real, of_part in zip(shape, real, part, strict=True)
        ]
        firsts = [min((size - most) // 2 | 1, size - most) for size, most in zip(shape, sizes, strict=True)]
        slices = tuple(slice(first, first + size) for first, size in zip(firsts, sizes, strict=True))
        return lambda tensor: tensor[slices].contiguous()
    every = math.prod(shape)
    count = min(max(1, -(-part[0] * every // math.prod(real))), max(every - 1, 1))
    first = min((every - count) // 2 | 1, every - count)
    return lambda tensor: tensor.flatten()[first : first + count]


def _simplify(code: StepCode) -> None:
    """Let an optimizer of torch update its tensors one by one, which gives what its faster ways compute, too; and let each group move."""
    for member in code.optimizers:
        if any(kind.__module__.startswith("torch.optim.") and kind is not Optimizer for kind in type(member).__mro__):
            ways = {"fused": None, "foreach": False, "capturable": False}
            for group in [member.defaults, *member.param_groups]:
                group.update({key: value for key, value in ways.items() if key in group})
        for group in member.param_groups:
            if "lr" in group and not float(group["lr"]):
                group["lr"] = torch.full_like(group["lr"], _LR) if isinstance(group["lr"], Tensor) else _LR


def _first_steps(code: StepCode, take: Callable[[float], None], steps: int) -> dict[tuple[int, str], float]:
    """Take the first steps of an optimizer; return by how much its counters rise in each."""
    counters, rising = _counters(code), dict[tuple[int, str], float]()
    for step in range(steps):
        take(_SIZES[step * len(_SIZES) // steps])
        after = _counters(code)
        risen = {key: now - counters[key][1] for key, (_, now) in after.items() if key in counters}
        rising = {key: by for key, by in risen.items() if by >= 1 and by == rising.get(key, by) and by == by // 1}
        counters = after
    return rising


def _set_forward(code: StepCode, rising: Mapping[tuple[int, str], float], count: int) -> None:
    """Set the counters so that the next step makes them this count."""
    for key, (place, _) in _counters(code).items():
        if key in rising:
            start = count - rising[key]
            write(place, start if isinstance(place.value, Tensor) else type(place.value)(start))


def _options(code: StepCode) -> Iterator[int]:
    """Yield the integers among the options of the groups that may be a count of steps, beyond the first ones."""
    for optimizer in code.optimizers:
        for group in optimizer.param_groups:
            yield from (value for value in group.values() if type(value) is int and _FIRST_STEPS < value < _COUNTS[-1])


def _counters(code: StepCode) -> dict[tuple[int, str], tuple[Variable, float]]:
    """Return the numbers that an optimizer keeps, by the dictionary and the key, or the closure's cell, that hold them."""
    dicts: list[Any] = [vars(code.optimizer)]
    for optimizer in code.optimizers:
        dicts += [*optimizer.param_groups, *optimizer.state.values()]
    places = [Variable("", holder, key, None) for holder in dicts if isinstance(holder, dict) for key in holder]
    numbers = {}
    for place in (*places, *code.places):
        value = place.present
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if is_number or (isinstance(value, Tensor) and value.numel() == 1 and not value.is_meta):
            numbers[id(place.holder), str(place.key)] = (place._replace(value=value), float(value))
    return numbers


def fails_on_empty(code: StepCode) -> bool:
    """Return whether the step of an optimizer fails if no group has a weight; the changes of that step are put back."""
    groups = [group for optimizer in code.optimizers for group in optimizer.param_groups]
    params_of_groups = [group["params"] for group in groups]
    with code.put_back():
        for group in groups:
            group["params"] = []
        try:
            with alone(type(code.optimizer).__name__), torch.no_grad():
                code.optimizer.step()
        except Exception:
            return True
        finally:
            for group, params in zip(groups, params_of_groups, strict=True):
                group["params"] = params
    return False


@contextmanager
def without_empty_groups(optimizers: Sequence[Any]) -> Iterator[None]:
    """Let optimizers have only their groups with weights inside."""
    lists = list({id(optimizer.param_groups): optimizer.param_groups for optimizer in optimizers}.values())
    copies = [list(groups) for groups in lists]
    for groups in lists:
        groups[:] = [group for group in groups if group["params"]]
    try:
        yield
    finally:
        for groups, every in zip(lists, copies, strict=True):
            groups[:] = every
