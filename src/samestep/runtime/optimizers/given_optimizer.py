"""The optimizer instance that a user gave, which takes no step: a run builds another one like it.

The options of its groups are followed, so that schedulers act. Its state stays empty, so what a loop reads of it, or does to it,
is refused: momenta that are set to zero, `state_dict` and `load_state_dict`, hooks, other parameters in a group.
"""

from __future__ import annotations

import functools
import inspect
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer

from samestep.building.optimizer import CombinedOptimizer
from samestep.errors import ModelError

_OWN = "run.updater.optimizer.state is what it holds, and run.save and run.load keep it"


def for_loops(optimizer: Optimizer) -> Optimizer:
    """Return what a loop sees of a run's optimizer: all that it holds, without the methods of its own class, which would act on this
    rank's pieces alone. Its step, which a scheduler wraps, is that of the optimizer itself."""
    kind = type(optimizer)
    written = {name for base in kind.__mro__ if not issubclass(Optimizer, base) for name in vars(base)}
    names = [name for name in written - {*dir(Optimizer)} if inspect.isroutine(getattr(kind, name)) and name[0] != "_"]
    if isinstance(optimizer, CombinedOptimizer):
        methods: dict[str, Any] = {"members": property(lambda self: tuple(map(for_loops, vars(self)["members"])))}
    elif names:
        methods = {name: functools.partialmethod(_refuse_method, name) for name in names}
    else:
        return optimizer
    step = functools.wraps(kind.step)(lambda _, *args, **given: kind.step(optimizer, *args, **given))
    view: Optimizer = object.__new__(
        type(kind.__name__, (kind,), {**methods, "step": step, "__module__": kind.__module__})
    )
    view.__dict__ = optimizer.__dict__
    return view


def _refuse_method(_: Optimizer, name: str, *__: Any, **___: Any) -> None:
    raise ModelError(
        "optimizer-instance",
        f"run.updater.optimizer.{name} would act on this rank's part of the weights, and not on the weights that the forward reads. Use "
        f'run.call(None, "{name}"). If there are several optimizers, name one instead of None',
    )


class NoState(defaultdict[Any, Any]):
    """A state whose use raises an error that names the place of the run's state."""

    def __init__(self, kind: str) -> None:
        super().__init__(dict)
        self._kind = kind

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise ModelError(
            "optimizer-instance",
            f"the {self._kind} instance that was given has no state, since the run updates by one of its own: {_OWN}",
        )

    __getitem__ = __setitem__ = __delitem__ = __iter__ = __contains__ = __missing__ = __reduce__ = _refuse
    __reduce_ex__ = __deepcopy__ = __copy__ = _refuse
    items = keys = values = get = pop = clear = update = setdefault = popitem = copy = _refuse

    def __len__(self) -> int:
        return 0


def watch(optimizer: Optimizer) -> list[tuple[str, Callable[[], Any], Any]]:
    """Put a state that refuses to be read into the given optimizer; return what else a loop may do to it, with a function that
    reads it and what that returned before.
    """
    kind, number = type(optimizer).__name__, len(optimizer.param_groups)
    if not isinstance(optimizer.state, NoState):
        optimizer.state = NoState(kind)

    def members() -> list[list[int]]:
        return [[*map(id, group["params"])] for group in optimizer.param_groups[:number]]

    return [
        (
            f"was given another state, which the run does not use: {_OWN}",
            lambda: id(optimizer.state),
            id(optimizer.state),
        ),
        (
            "was given step hooks, which the run does not call. Register them in a function of the parameters",
            lambda: bool(optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks),
            False,  # as it was when the run was made
        ),
        (
            "was given other parameters in a group, and the run updates those that it had. Set lr = 0 and requires_grad_(False) in "
            "run.model",
            members,
            members(),
        ),
    ]
