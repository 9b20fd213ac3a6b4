"""Several optimizers of one run: each is given some of the weights, and together they hold every weight once.

```
optimizer=[f, g]                 each function picks some of the named parameters, or is an instance
optimizer={"d": f, "g": g}       the same, with names for `run.update("d")`; a function of a list under the name of a
                                 child module is given the weights of that module
```
They act as one `CombinedOptimizer`, whose groups and states are those of its members. So a step updates all of them, and checkpoints,
layouts and loss scales need not know that there are several.

An instance that a user gives is the run's: one like it is built over the pieces of this rank, and the instance shares its attributes
(`for_loops`). So a loop and its schedulers read and change the groups and the states that the run updates by. What would act on this rank's
part alone is refused: `step`, methods of its own class, `state_dict` and `load_state_dict`, hooks, other parameters in a group.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MethodType
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from samestep.building.optimizer import CombinedOptimizer, OptimizerSource, members_of
from samestep.errors import InputError, ModelError
from samestep.runtime.optimizers.skeletons import alone, rejoined
from samestep.runtime.optimizers.update_trial import TRIED
from samestep.runtime.weights.pieces import Piece
from samestep.state.writes import Marks, exact_norms, marks_of

Named = list[tuple[str, Tensor]]
Names = tuple[str | int, ...]


@dataclass(slots=True)
class OptimizerFunction:
    """A user's function that makes an optimizer, of a list of parameters or of a list of (name, parameter)."""

    function: Callable[..., Any]
    child: str = ""
    """The name under which it stands: where a child module has it, a function of a list is given the weights of that module."""
    _takes_names: bool | None = None
    """Whether it takes names as well; None until it was called."""

    def __post_init__(self) -> None:
        try:
            first = next(iter(inspect.signature(self.function).parameters), "")
        except (TypeError, ValueError):
            first = ""
        if first.startswith("named"):
            self._takes_names = True

    def __call__(self, named: Named) -> Optimizer:
        """Return the optimizer over named tensors.

        Raises:
            ModelError: what the function returns is none.
        """
        with alone("the optimizer function"):
            optimizer = self._made(named)
        if not hasattr(optimizer, "param_groups") or not hasattr(optimizer, "step"):
            raise ModelError(
                "optimizer-refuses",
                f"the optimizer function returned a {type(optimizer).__name__}; it must return a torch.optim.Optimizer over the "
                "list of parameters that it is given",
            )
        return optimizer

    def _made(self, named: Named) -> Any:
        if self._takes_names is not None:
            return self._with_names(named) if self._takes_names else self._of_list(named)
        refused: Exception | None = None
        optimizer = None
        try:
            optimizer = self._of_list(named)
        except TRIED as error:
            refused = error
        if refused is None and _holds_only(optimizer, named):
            self._takes_names = False
            return optimizer
        try:
            other = self._with_names(named)
        except TRIED:
            other = None
        if other is not None and _holds_only(other, named):
            self._takes_names = True
            return other
        if refused is not None:
            raise refused
        return optimizer

    def _of_list(self, named: Named) -> Any:
        within = [tensor for name, tensor in named if name.startswith(f"{self.child}.")] if self.child else []
        return self.function(within or [tensor for _, tensor in named])

    def _with_names(self, named: Named) -> Any:
        return self.function(list(named))


def _holds_only(optimizer: Any, named: Named) -> bool:
    """Return whether an object is an optimizer over some of the tensors, and over no others."""
    ids = {id(tensor) for _, tensor in named}
    params = [param for group in getattr(optimizer, "param_groups", ()) for param in group["params"]]
    return bool(params) and all(id(param) in ids for param in params)


@dataclass(frozen=True, slots=True)
class NamedOptimizers:
    """Builds the optimizers that a user gave as a list or by name, as one."""

    sources: Mapping[str | int, OptimizerSource]

    def __call__(self, named: Named) -> Optimizer:
        """Return the combined optimizer over named tensors.

        Raises:
            ModelError: two of the optimizers hold the same weight.
        """
        members = [source(named) for source in self.sources.values()]
        names = {id(tensor): name for name, tensor in named}
        holders: dict[str, str | int] = {}
        for key, member in zip(self.sources, members, strict=True):
            for name in [names[id(param)] for param in _params_of(member) if id(param) in names]:
                if name in holders:
                    raise ModelError(
                        "optimizer-weights",
                        f"{name} is held by the optimizers {holders[name]!r} and {key!r}: each weight has one optimizer, as with "
                        "`lambda named: torch.optim.AdamW([p for name, p in named if ...])`, which picks some of the weights by name",
                    )
                holders[name] = key
        return CombinedOptimizer(members, tuple(self.sources))


def _params_of(optimizer: Optimizer) -> Iterator[Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


def check_partition(optimizer: Optimizer, weights: Mapping[str, Tensor]) -> None:
    """Refuse several optimizers by name of which none holds one of the weights of the whole model.

    Raises:
        ModelError: there is such a weight.
    """
    names = optimizer.names if isinstance(optimizer, CombinedOptimizer) else ()
    if not names:
        return
    ids = {id(param) for param in _params_of(optimizer)}
    if left := next((name for name, weight in weights.items() if id(weight) not in ids), ""):
        raise ModelError(
            "optimizer-weights",
            f"{left} is held by none of the optimizers {', '.join(map(repr, names))}: together they hold every trained weight. To "
            f"freeze it, use requires_grad_(False) in the model, or an optimizer with lr = 0",
        )


def names_of(source: OptimizerSource) -> Names:
    """Return the names of the optimizers that a source builds; none where the user gave one."""
    return tuple(source.sources) if isinstance(source, NamedOptimizers) else ()


def sources_by_name(
    optimizers: Sequence[Any] | Mapping[Any, Any], source_of: Callable[[Any, str], OptimizerSource]
) -> NamedOptimizers:
    """Return what builds the optimizers of a list or a dict; `source_of` makes the source of one that has a name.

    Raises:
        ModelError: there is none, or a name is no text.
    """
    if not optimizers:
        raise ModelError("optimizer-weights", "optimizer is empty. Use one optimizer, or a list or a dict of some")
    pairs = list(optimizers.items()) if isinstance(optimizers, Mapping) else list(enumerate(optimizers))
    for key, _ in pairs:
        if isinstance(optimizers, Mapping) and (not isinstance(key, str) or not key):
            raise ModelError(
                "optimizer-weights",
                f"optimizer has {key!r} as a name: a dict of optimizers has names as keys, as in {{'d': ...}}",
            )
    return NamedOptimizers({key: source_of(optimizer, key if isinstance(key, str) else "") for key, optimizer in pairs})


# -- the members of an update ----------------------------------------------------------------------


@dataclass(slots=True)
class Closure:
    """The closure of one update: it evaluates the loss, and lends the gradients to the pieces."""

    pieces: list[Piece]
    evaluate: Callable[[], tuple[float, float]]
    """Runs a forward and a backward at the present weights; returns the loss, and the factor that makes the gradients those of a mean, clipped."""
    loss: float
    """The loss of the step's own backward."""
    _first: tuple[list[int], Marks] | None = None
    """The ids of the lent gradients at the beginning of the update, and the marks of the weights and of these."""

    def begin(self) -> None:
        """Note the weights and the gradients that the optimizer is lent, which the step's backward has computed."""
        self._first = self._present()

    @torch.enable_grad()
    def __call__(self) -> Tensor:
        """Return the loss at the present weights, whose gradients the pieces then have.

        Collective over the world, see [Note: collective calls].
        """
        first, (ids, marks) = self._first, self._present()
        if first is None or first[0] != ids or any(marks.since(first[1])):
            with rejoined():
                self.loss, factor = self.evaluate()
            for piece in self.pieces:
                gradient = piece.gradient()
                if factor != 1.0:
                    gradient.mul_(factor)
                piece.value.grad = gradient.to(piece.value.device).view_as(piece.value)
        self._first = None
        return torch.full((), self.loss, dtype=torch.float64, device=self.pieces[0].value.device)

    def _present(self) -> tuple[list[int], Marks]:
        values, gradients = [piece.value for piece in self.pieces], [piece.value.grad for piece in self.pieces]
        tensors = [*values, *(gradient for gradient in gradients if gradient is not None)]
        return [*map(id, gradients)], marks_of(tensors, norms=exact_norms)


@dataclass(frozen=True, slots=True)
class UpdatedPart:
    """The members of an optimizer that an update is for, or all of them, and the options that their `step` is given."""

    members: tuple[int, ...] | None = None
    """The indices of the members; None for the whole optimizer."""
    options: Mapping[str, Any] = field(default_factory=dict)
    evaluating: frozenset[int] = frozenset()
    """The members whose step is given the closure."""
    closure: Closure | None = None


ALL = UpdatedPart()


def member_index(names: Names, name: str | int | None, method: str) -> tuple[int, ...] | None:
    """Return the indices of the members that a name stands for; None, for the whole optimizer, without a name.

    Raises:
        ModelError: no optimizer has the name.
    """
    if name is None:
        return None
    if name not in names:
        known = (
            ", ".join(map(repr, names))
            if names
            else 'one optimizer without a name, and optimizer={"d": f, "g": g} names two'
        )
        raise ModelError("run-call-arguments", f"{method}: unknown optimizer {name!r}: the run has {known}")
    return (names.index(name),)


def members_in(optimizer: Optimizer | None, part: UpdatedPart) -> list[Optimizer]:
    """Return the members of an optimizer that a part has; none where a rank has no optimizer."""
    members = enumerate(members_of(optimizer) if optimizer is not None else ())
    return [member for index, member in members if part.members is None or index in part.members]


def check_options(optimizer: Optimizer | None, part: UpdatedPart) -> None:
    """Refuse options that the step of an optimizer does not take.

    Raises:
        ModelError: there is one.
    """
    for member in members_in(optimizer, part) if part.options else ():
        try:
            inspect.signature(type(member).step).bind(member, **part.options)
        except TypeError as error:
            raise ModelError(
                "run-call-arguments",
                f"run.update gives {', '.join(part.options)} to {type(member).__name__}.step, which does not take it ({error}). Use "
                "options of the optimizer's own step",
            ) from None


def check_method(
    optimizer: Optimizer | None, part: UpdatedPart, method: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> None:
    """Refuse a method that an optimizer does not have, or arguments that it does not take.

    Raises:
        ModelError: it is one.
    """
    for member in members_in(optimizer, part):
        function = getattr(member, method, None)
        if not callable(function):
            raise ModelError("several-models", f"run.call: {type(member).__name__} has no method {method!r}")
        try:
            inspect.signature(function).bind(*args, **kwargs)
        except TypeError as error:
            raise ModelError(
                "run-call-arguments",
                f"run.call: {type(member).__name__}.{method} does not take its arguments ({error})",
            ) from None


def step_members(
    optimizer: Optimizer, steps: Sequence[tuple[Optimizer, Callable[..., Any]]], part: UpdatedPart, *, is_first: bool
) -> None:
    """Let the members of a part that hold weights on this rank take a step; `steps` are all members, with their methods.

    Raises:
        ModelError: the step, which is the first one of the run, fails in code that is the user's, such as an assertion that a
            closure is given.
    """
    try:
        if part.closure is not None:
            part.closure.begin()
        for index, (member, step) in enumerate(steps):
            if part.members is not None and index not in part.members:
                continue
            vars(member)["_opt_called"] = True  # what a scheduler asks for
            if member is not optimizer and not any(group["params"] for group in member.param_groups):
                continue
            closure = (part.closure,) if index in part.evaluating else ()
            step(*closure, **part.options)
        vars(optimizer)["_opt_called"] = True
    except TRIED as error:
        if not is_first or isinstance(error, InputError | torch.OutOfMemoryError | torch.AcceleratorError):
            raise
        name, words = type(optimizer).__name__, str(error).partition("\n")[0]
        raise ModelError(
            "optimizer-fails",
            f"the first step of {name} fails: {type(error).__name__}: {words}; it is called with the options of "
            "run.update, and with a closure where it needs one. Use another optimizer, such as adamw",
        ) from error


@functools.cache
def _class_in_loops(kind: Any) -> type[Optimizer]:
    """Return the class of a run's optimizer as a loop has it: what would act on this rank's pieces alone is refused."""
    written = {name for base in kind.__mro__ if not issubclass(Optimizer, base) for name in vars(base)}
    names = [name for name in written - {*dir(Optimizer)} if inspect.isroutine(getattr(kind, name)) and name[0] != "_"]
    methods: dict[str, Any] = {"members": property(lambda self: tuple(map(for_loops, vars(self)["members"])))}
    if not issubclass(kind, CombinedOptimizer):
        methods = {name: functools.partialmethod(_refuse_method, name) for name in names}
    methods |= {"step": _refuse_step, "state_dict": _refuse_states, "load_state_dict": _refuse_states}
    return type(kind.__name__, (kind,), {**methods, "__module__": kind.__module__, "in_run": True})


def for_loops(optimizer: Optimizer, instance: Optimizer | None = None) -> Optimizer:
    """Return what a loop sees of a run's optimizer, which shares all attributes with it: groups, states, options. It is the `instance` that
    the loop has, if there is one, until `leave_run`.
    """
    kind: Any = type(optimizer)
    view: Optimizer = object.__new__(kind) if instance is None else instance
    of_loop = {key: value for key, value in vars(view).items() if key not in vars(optimizer) and key != "step"}
    view.__dict__ = optimizer.__dict__
    vars(view).update(of_loop)
    view.__class__ = _class_in_loops(kind)
    return view


def is_in_run(optimizer: Optimizer) -> bool:
    """Return whether an optimizer is that of a run."""
    return bool(getattr(type(optimizer), "in_run", False))


def leave_run(instance: Optimizer, attributes: dict[str, Any]) -> None:
    """Let an instance have the attributes that it had before the run, with the present options of its groups. Its state stayed in the run,
    so that it takes no step, unless another run has it.
    """
    for group, present in zip(attributes["param_groups"], instance.param_groups, strict=False):
        group.update({key: value for key, value in present.items() if key not in ("params", "param_names")})
    instance.__class__ = type(instance).__mro__[1]
    instance.__dict__ = attributes
    vars(instance)["step"] = MethodType(_refuse_step, instance)


def _refuse_step(self: Optimizer, *_: Any, **__: Any) -> None:
    raise ModelError(
        "optimizer-instance",
        f"{type(self).__name__}.step was called by the loop, and the run takes the steps of this optimizer. Use run.step(batch), or "
        "run.backward(batch) and run.update(). After run.release(), use another instance",
    )


_refuse_step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # a scheduler need not notice the steps: `step_members` does


def _refuse_states(self: Optimizer, *_: Any, **__: Any) -> None:
    raise ModelError(
        "optimizer-instance",
        f"a state dict of the {type(self).__name__} of a run would have the states of this rank's weights alone. Use run.save and run.load; "
        "optimizer.state holds these states",
    )


def _refuse_method(_: Optimizer, name: str, *__: Any, **___: Any) -> None:
    raise ModelError(
        "optimizer-instance",
        f"run.updater.optimizer.{name} would act on this rank's part of the weights, and not on the weights that the forward reads. Use "
        f'run.call(None, "{name}"). If there are several optimizers, name one instead of None',
    )
