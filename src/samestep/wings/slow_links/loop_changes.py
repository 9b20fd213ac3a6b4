"""Changes that a loop makes between two steps to the first of several replicas of one rank, the only one that it sees."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from samestep.building.parameter_marks import gradient_hooks_of
from samestep.runtime.assembly import Assembly
from samestep.state.fingerprints import attributes_of, digest
from samestep.trees import tree_map_only

_SOME = 16
"""The number of elements of a tensor that are compared."""


class LoopChanges:
    """Changes that a loop makes between two steps to the first of several replicas of one rank, which `run.model` is."""

    def __init__(self, assembly: Assembly, number: int) -> None:
        """Note the state after a step."""
        self._assembly, self._number = assembly, number
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
        module, optimizer = self._assembly.model.module, self._assembly.weights.updater.optimizer
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
