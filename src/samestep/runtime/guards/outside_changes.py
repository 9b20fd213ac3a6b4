"""Changes that a loop makes between two steps to the model and the optimizer of a run, which would change what a layout has planned.

What was frozen when the layout was planned has no gradient in it; what the loop freezes afterwards, it may thaw again
(`used_weights.py`). Modules that the loop puts into evaluation mode stay in it, on all ranks alike. One that was in evaluation mode from
the start, such as a frozen batch norm, was planned so. Of several replicas that one rank trains a loop sees the first alone.
"""

from __future__ import annotations

import operator
from typing import Any

from torch import Tensor, nn

from samestep.building.parameter_marks import gradient_hooks_of
from samestep.runtime.assembly import Assembly
from samestep.runtime.weights import parameter_hooks
from samestep.state.fingerprints import attributes_of, digest
from samestep.trees import tree_map_only

_NONE, _IN_TRAINING = frozenset[str](), operator.itemgetter("training")
_SOME = 16
"""The number of elements of a tensor that are compared."""


class OutsideChanges:
    """The state of a run's module as it was before the first step."""

    def __init__(self, assembly: Assembly) -> None:
        frozen = {param.name for param in assembly.model.spec.params if not param.trainable}
        self._params = [*assembly.model.module.named_parameters()]
        """The parameters themselves: a module may hold a stand-in of one that other ranks have updated ([Note: late weights])."""
        self._judged_hooks: dict[int, object] = {}
        self._reads_hooks = parameter_hooks.may_refuse(assembly.parallel.program)
        self._num_hooks = -1
        self.has_hooks = False
        """Whether hooks of the loop's see the gradients of whole steps, which they may act by."""
        self._frozen = [(name, param) for name, param in self._params if name in frozen]
        modes = assembly.model.training_modes
        self._trained = [(path, part) for path, part in assembly.model.module.named_modules() if modes.get(part)]
        # What torch.compile returns has no mode of its own: that of its module is looked at.
        self._modes = [vars(part) for _, part in self._trained if "training" in vars(part)]
        self._evaluated = [
            (path, part)
            for path, part in assembly.model.module.named_modules()
            if modes.get(part) is False and _reads_mode(part)
        ]

    def refusal(self, assembly: Assembly) -> str:
        """Return why the next step would not be that of a plain loop; empty if nothing shows it."""
        thawed = [(name, param) for name, param in self._frozen if param.requires_grad]
        # The step is refused at its end, on all ranks, and gathers nothing for these gradients.
        for _, param in thawed:
            param.requires_grad_(False)
        if thawed:
            return _thawed_refusal(thawed[0][0])
        if self._reads_hooks and (
            reason := parameter_hooks.later_refusal(self._params, assembly.parallel.program, self._judged_hooks)
        ):
            return reason
        if not self._reads_hooks and (number := parameter_hooks.num_on(self._params)) != self._num_hooks:
            self._num_hooks, self.has_hooks = number, parameter_hooks.are_on(self._params)
        for path, part in self._evaluated:
            if part.training:
                return (
                    f"{path} was in evaluation mode when the run was made, which the layout relies on, and it is in training "
                    f"mode now. Build it in training mode, and call eval() of it in run.model until then"
                )
        return assembly.weights.updater.rates.refusal()

    def evaluated_paths(self) -> frozenset[str]:
        """Return the paths of the modules that the loop has put into evaluation mode."""
        if all(map(_IN_TRAINING, self._modes)):
            return _NONE
        return frozenset([path for path, part in self._trained if not part.training])


class LoopChanges:
    """Changes that a loop makes between two steps to the first of several replicas of one rank, which `run.model` is."""

    def __init__(self, assembly: Assembly, number: int) -> None:
        """Note the state after a step."""
        self._held, self._number = assembly, number
        self._before = self._present()

    def refusal(self) -> str:
        """Return why the next step would not be that of one rank for each replica; empty if nothing shows it."""
        now = self._present()
        name = next((name for name in {**self._before, **now} if now.get(name) != self._before.get(name)), "")
        return name and (
            f"the loop has changed {name} of run.model, which is the first of the {self._number} replicas that this rank trains "
            f"(numerics.replicas). Use a data rank for each replica"
        )

    def _present(self) -> dict[str, Any]:
        module, optimizer = self._held.model.module, self._held.weights.updater.optimizer
        tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        groups, states = (optimizer.param_groups, optimizer.state.values()) if optimizer is not None else ((), ())
        # Structures leave out the mode, which is that of all replicas.
        return {
            **{path or type(part).__name__: _structure_of(part) for path, part in module.named_modules()},
            **{f"{path}.{key}".lstrip("."): digest(v) for path, key, v in attributes_of(module) if key[0] != "_"},
            **{name: (_some_of(tensor), _hooks_of(tensor)) for name, tensor in tensors.items()},
            **{f"group {i} of the optimizer": digest(group | {"params": 0}) for i, group in enumerate(groups)},
            **{f"state {i} of the optimizer": tree_map_only(Tensor, _some_of, state) for i, state in enumerate(states)},
        }


def _structure_of(part: nn.Module) -> tuple[Any, ...]:
    """Return a module's parts, its forward and its hooks."""
    kinds = (part._forward_hooks, part._forward_pre_hooks, part._backward_hooks, part._backward_pre_hooks)
    tables = (part._modules, part._parameters, part._buffers)
    return (*([*map(id, table.values())] for table in tables), id(vars(part).get("forward")), *map(list, kinds))


def _some_of(tensor: Tensor) -> list[float]:
    if tensor.is_meta:
        return []
    some: list[float] = tensor.detach().flatten()[:: max(1, tensor.numel() // _SOME)].double().tolist()
    return some


def _hooks_of(tensor: Tensor) -> tuple[bool, list[Any]]:
    """Return whether a tensor asks for a gradient, and the keys of the hooks on it."""
    hooks = gradient_hooks_of(tensor) if isinstance(tensor, nn.Parameter) else ()
    return tensor.requires_grad, [key for kind in hooks for key in kind]


def _reads_mode(module: nn.Module) -> bool:
    """Return whether the forward of a module's class acts by its mode, as that of a batch norm or a dropout does."""
    code = getattr(type(module).forward, "__code__", None)
    return code is None or "training" in code.co_names


def _thawed_refusal(name: str) -> str:
    return (
        f"{name} was frozen when the run was made, and now requires a gradient, which no part of the layout computes. Build it "
        "trainable, and freeze it in run.model until then"
    )
