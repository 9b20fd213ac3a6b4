"""Changes that a loop makes between two steps where the run does not see them: in the given instance, and in what is trained.

A run trains a model of its own, which a model instance has only lent its values. A loop that freezes a layer of the instance,
sets a number in it or writes into a weight changes nothing of the run, where a plain loop would train otherwise. And what was
frozen when the layout was planned has no gradient in it; what the loop freezes of the run's own module afterwards, it may thaw
again (`used_weights.py`). Values that the instance takes from the run itself, to evaluate
it, are no change.

Modules that the loop puts into evaluation mode stay in it, on all ranks alike. One that was in evaluation mode from the start, such
as a frozen batch norm, was planned so.
"""

from __future__ import annotations

import functools
import operator
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from samestep.building.module_attributes import set_attributes
from samestep.building.parameter_marks import gradient_hooks_of
from samestep.errors import ModelError
from samestep.runtime.assembly import Assembly
from samestep.runtime.optimizers import given_optimizer
from samestep.runtime.weights import parameter_hooks
from samestep.state.writes import Marks, marks_of, version_of

_TRAINED = "trained"
_NONE, _IN_TRAINING = frozenset[str](), operator.itemgetter("training")
_SINGLE = (bool, int, float, str)
_MANY = 1000
"""The most items of a collection that are compared in every step."""
_SOME = 16
"""The number of elements of a tensor of the instance that are compared."""


class _Fact(NamedTuple):
    """Something about the given instance or optimizer that a loop may change, as it was before the first step."""

    name: str
    what: Sequence[str]
    """What was done to it where it is another; where several values are read, for each of them."""
    read: Callable[[], Any]
    value: Any

    @classmethod
    def of(cls, name: str, what: str | Sequence[str], read: Callable[[], Any]) -> _Fact:
        return cls(name, (what,) if isinstance(what, str) else what, read, read())

    def change(self, now: Any) -> str:
        """Return what was done to it, which is another `now`."""
        if len(self.what) == 1:
            return self.what[0].format(now)
        return next(what for what, one, before in zip(self.what, now, self.value, strict=True) if one != before)


class OutsideChanges:
    """The state of a run's module and of the instance that was given, as both were before the first step."""

    def __init__(self, given: object, held: Assembly) -> None:
        frozen = {param.name for param in held.model.spec.params if not param.trainable}
        self._params = [*held.model.module.named_parameters()]
        """The parameters themselves: a module may hold a stand-in of one that other ranks have updated (`late_weights.py`)."""
        self._judged_hooks: dict[int, object] = {}
        self._reads_hooks = parameter_hooks.may_refuse(held.parallel.program)
        self._frozen = [(name, param) for name, param in self._params if name in frozen]
        modes = held.model.training_modes
        self._trained = [(path, part) for path, part in held.model.module.named_modules() if modes.get(part)]
        # What torch.compile returns has no mode of its own: that of its module is looked at.
        self._modes = [vars(part) for _, part in self._trained if "training" in vars(part)]
        self._evaluated = [
            (path, part)
            for path, part in held.model.module.named_modules()
            if modes.get(part) is False and _reads_mode(part)
        ]
        module = given if isinstance(given, nn.Module) else nn.Module()
        self._tensors = dict([*module.named_parameters(), *module.named_buffers()])
        self._marks = self._present_marks()
        self._some = self._some_elements()
        self._num_steps = 0
        self._facts = [*_facts_of(module)] if isinstance(given, nn.Module) else []
        self._is_copy = False
        """Whether the loop loads the instance with what the run has trained, to evaluate it as it likes."""
        self._of_optimizer = [
            (type(given).__name__, *watched)
            for given in held.weights.updater.rates.given.values()
            for watched in given_optimizer.watch(given)
        ]
        if isinstance(given, nn.Module):
            _refuse_forwards(given, self)

    def refusal(self, held: Assembly) -> str:
        """Return why the next step would not be that of a plain loop; empty if nothing shows it."""
        written = self._find_written(held)
        thawed = [(name, param) for name, param in self._frozen if param.requires_grad]
        # The step is refused at its end, on all ranks, and gathers nothing for these gradients.
        for _, param in thawed:
            param.requires_grad_(False)
        if thawed:
            return _thawed_refusal(thawed[0][0])
        if self._reads_hooks and (
            reason := parameter_hooks.later_refusal(self._params, held.parallel.program, self._judged_hooks)
        ):
            return reason
        for path, part in self._evaluated:
            if part.training:
                return (
                    f"{path} was in evaluation mode when the run was made, and so is planned in the layout, and it is in training "
                    f"mode now: to build it in training mode, and to put it into evaluation mode in run.model until then, works"
                )
        for fact in () if self._is_copy else self._facts:
            if (now := fact.read()) != fact.value:
                what = fact.change(now)
                return _thawed_refusal(fact.name) if what == _TRAINED else _unseen_refusal(fact.name, what)
        if written:
            return _unseen_refusal(written, "written")
        for kind, what, read, value in self._of_optimizer:
            if read() != value:
                return f"the {kind} instance that was given {what}"
        return ""

    def evaluated_paths(self) -> frozenset[str]:
        """Return the paths of the modules that the loop has put into evaluation mode."""
        if all(map(_IN_TRAINING, self._modes)):
            return _NONE
        return frozenset([path for path, part in self._trained if not part.training])

    def _find_written(self, held: Assembly) -> str:
        """Return which tensor of the instance was written since the last call, with other values than the run's weights or averages."""
        if not self._tensors:
            return ""
        now, some = self._present_marks(), self._some
        self._num_steps += 1
        if not self._num_steps & (self._num_steps - 1):  # steps 1, 2, 4, 8, ...
            some = self._some_elements()
        written = zip(self._tensors, now.since(self._marks), strict=True)
        names = [name for name, is_written in written if is_written or some[name] != self._some[name]]
        if names:
            self._marks, self._some = now, self._some_elements()
        if not names or held.weights.updater.averages is not None:
            return ""
        other = _other_value({name: self._tensors[name] for name in names}, held)
        self._is_copy |= not other
        return other

    @property
    def is_stale(self) -> bool:
        """Whether the instance has no values of the last step."""
        return not self._is_copy and not self._present_marks().differ(self._marks)

    def _present_marks(self) -> Marks:
        return marks_of(self._tensors.values(), addresses=True)

    def _some_elements(self) -> dict[str, list[float]]:
        """Return a few elements of each tensor, in which writes through `.data` show, that no version counts."""
        return {name: _some_of(tensor) for name, tensor in self._tensors.items()}


class LoopChanges:
    """Changes that a loop makes between two steps to the first of several replicas of one rank, which `run.model` is."""

    def __init__(self, held: Assembly, number: int) -> None:
        """Note the state after a step."""
        self._held, self._number = held, number
        self._before = self._present()

    def refusal(self) -> str:
        """Return why the next step would not be that of one rank for each replica; empty if nothing shows it."""
        now = self._present()
        name = next((name for name in {**self._before, **now} if now.get(name) != self._before.get(name)), "")
        return name and (
            f"the loop has changed {name} of run.model, which is the first of the {self._number} replicas that this rank trains "
            f"(numerics.replicas): a data rank for each replica works"
        )

    def _present(self) -> dict[str, Any]:
        module, optimizer = self._held.model.module, self._held.weights.updater.optimizer
        found: dict[str, Any] = {}
        for path, part in module.named_modules():
            found[path or type(part).__name__] = _structure_of(part)[:-1]  # modes are those of all replicas
        for fact in _facts_of(module):
            found.setdefault(fact.name, fact.value)
        for name, param in module.named_parameters():
            found[name] = _is_trained(param), _gradient_hooks(param), _some_of(param)
        for name, buffer in module.named_buffers():
            found[name] = _some_of(buffer)
        for index, group in enumerate(optimizer.param_groups if optimizer is not None else ()):
            found[f"group {index} of the optimizer"] = {
                key: float(value) if isinstance(value, Tensor) else value
                for key, value in group.items()
                if key != "params"
            }
        for index, state in enumerate(optimizer.state.values() if optimizer is not None else ()):
            found[f"state {index} of the optimizer"] = {
                key: _some_of(value) if isinstance(value, Tensor) else value for key, value in state.items()
            }
        return found


class _StaleForward:
    """A hook of the given instance that refuses its forward while a run trains other weights; copies of the instance have none."""

    def __init__(self, instance: nn.Module, changes: OutsideChanges) -> None:
        self._instance, self._changes = weakref.ref(instance), weakref.ref(changes)

    def __deepcopy__(self, _: Any) -> _StaleForward:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return _no_hook, ()

    def __call__(self, module: nn.Module, *_: Any) -> None:
        changes = self._changes()
        if module is self._instance() and changes is not None and changes.is_stale:
            raise ModelError(
                f"the forward of the {type(module).__name__} instance that was given would use its first weights, since the run "
                "trains a model of its own: run.model, run.outputs and run.evaluate work, and so does "
                "instance.load_state_dict(run.state_dict(on_every_rank=True))"
            )


def _no_hook() -> Callable[..., None]:
    """Return a hook that does nothing, for an instance that is read from a file."""
    return _nothing


def _nothing(*_: Any) -> None:
    return None


def _refuse_forwards(instance: nn.Module, changes: OutsideChanges) -> None:
    for key, hook in list(instance._forward_pre_hooks.items()):
        if isinstance(hook, _StaleForward):
            del instance._forward_pre_hooks[key]
    instance.register_forward_pre_hook(_StaleForward(instance, changes))


def _facts_of(module: nn.Module) -> Iterator[_Fact]:
    """Yield what a loop may change of each part of a module, besides the values of its tensors."""
    seen = set[int]()
    for path, part in module.named_modules():
        own = vars(part)
        name = path or type(part).__name__
        mode = f"put into {'evaluation' if part.training else 'training'} mode"
        yield _Fact.of(name, (*_OF_PARTS, mode), functools.partial(_structure_of, part))
        for key, value in set_attributes(part).items():
            if key.startswith("_") or isinstance(value, nn.Module):
                continue
            where = f"{path}.{key}".lstrip(".")
            if type(value) in _SINGLE:
                yield _Fact.of(where, "set to {!r}", functools.partial(own.get, key))
            elif id(value) not in seen and _content(own, key) is not None:
                seen.add(id(value))  # a configuration is an attribute of many modules
                yield _Fact.of(where, "changed", functools.partial(_content, own, key))
    for name, param in module.named_parameters():
        done = "frozen" if param.requires_grad else _TRAINED
        yield _Fact.of(name, done, functools.partial(_is_trained, param))
        yield _Fact.of(name, "given hooks on its gradient", functools.partial(_gradient_hooks, param))


_OF_PARTS = ("given other parts", "given other tensors", "given other tensors", "given another forward", "given hooks")


def _structure_of(part: nn.Module) -> tuple[Any, ...]:
    """Return a module's parts and its mode, in the order of `_OF_PARTS`."""
    modules, params, buffers = ([*map(id, own.values())] for own in (part._modules, part._parameters, part._buffers))
    return modules, params, buffers, id(vars(part).get("forward")), _hooks_of(part), part.training


def _some_of(tensor: Tensor) -> list[float]:
    if tensor.is_meta:
        return []
    some: list[float] = tensor.detach().flatten()[:: max(1, tensor.numel() // _SOME)].double().tolist()
    return some


def _is_trained(param: Tensor) -> bool:
    return param.requires_grad


def _hooks_of(part: nn.Module) -> list[int]:
    kinds = (part._forward_hooks, part._forward_pre_hooks, part._backward_hooks, part._backward_pre_hooks)
    return [key for own in kinds for key, hook in own.items() if not isinstance(hook, _StaleForward)]


def _gradient_hooks(param: Tensor) -> list[int]:
    return [key for kind in gradient_hooks_of(param) for key in kind]


def _content(own: dict[str, Any], key: str) -> Any:
    """Return what may change in an attribute: of a tensor, a collection of numbers, or an object that holds some; else None."""
    value = own.get(key)
    if isinstance(value, Tensor):
        return id(value), version_of(value)
    if isinstance(value, list | tuple | set):
        return [one for one in value if type(one) in _SINGLE] if len(value) <= _MANY else None
    held = value if isinstance(value, dict) else getattr(value, "__dict__", None)
    if not isinstance(held, dict) or len(held) > _MANY or isinstance(value, type) or callable(value):
        return None
    return {key: one for key, one in held.items() if type(one) in _SINGLE}


def _reads_mode(module: nn.Module) -> bool:
    """Return whether the forward of a module's class acts by its mode, as that of a batch norm or a dropout does."""
    code = getattr(type(module).forward, "__code__", None)
    return code is None or "training" in code.co_names


def _thawed_refusal(name: str) -> str:
    return (
        f"{name} was frozen when the run was made, and asks for a gradient now, which no part of the layout computes: to build it "
        "trainable, and to freeze it in run.model until then, works"
    )


def _unseen_refusal(name: str, what: str) -> str:
    return (
        f"{name} of the model instance that was given was {what} after the run was made, and the run trains a model of its own: "
        "the same change in run.model works"
    )


def _other_value(tensors: dict[str, Tensor], held: Assembly) -> str:
    """Return which of the tensors has other values than the run's, as far as this rank holds them; empty if none has."""
    step = held.parallel.program.step
    uncut = {spec.name for spec in step.model.params if step.holding(spec).num_parts == 1}
    for piece in [*held.weights.updater.pieces, *held.weights.store.frozen]:
        theirs = tensors.get(piece.name)
        if theirs is None or piece.name not in uncut or piece.is_packed:
            continue
        part = theirs.detach().flatten()[piece.start : piece.stop]
        if not torch.equal(piece.master().flatten().to(part), part):
            return piece.name
    for name, buffer in held.model.module.named_buffers():
        if (
            name in tensors
            and tensors[name].shape == buffer.shape
            and not torch.equal(buffer.to(tensors[name]), tensors[name])
        ):
            return name
    return ""
