"""The ways by which a loss reaches the weights: the outputs of the forward, and no other.

A layout gives the loss the outputs that one device has, whole and for its own samples. What the loss finds elsewhere is what
one rank happens to hold: a feature that a hook has caught is a part of the neurons under tp, and not there at all behind
another stage; and a gradient that the loss takes through the model, as a penalty on it does, runs backward through the
boundaries of ranks in the middle of a forward. Both show in the graph of the loss: it ends at weights of the model without
passing an output.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from samestep.building.autograd_graph import is_end, nodes_from, tensor_of
from samestep.building.torch_seams import disable_current_modes
from samestep.runtime.guards.divided_samples import tensors_in

_LAST = 12
"""So many operations of a loss are compared."""


def beside_outputs(total: Tensor, outputs: Any, model: nn.Module) -> tuple[str, str]:
    """Return the refusal of a loss that reaches a weight of the model by a path around the outputs, and a remark on one with a trainable
    weight that the optimizer of the run does not have; empty if there is none.
    """
    ends = {get_gradient_edge(tensor).node for tensor in tensors_in(outputs) if tensor.requires_grad}
    leaves = [node for node in nodes_from([get_gradient_edge(total).node], known=ends) if is_end(node)]
    names = {id(param): name for name, param in model.named_parameters()} if leaves else {}
    of_model = nodes_from(ends) if leaves else ()
    for node in leaves:
        name = names.get(id(tensor_of(node)), "")
        if name or node in of_model:
            return (
                f"the loss reaches {name or 'a weight'} of the model by another way than the outputs of its forward: by a tensor "
                "that the forward keeps elsewhere, as a hook does, or by torch.autograd.grad through the model"
            ), ""
    weight = next((weight for weight in map(tensor_of, leaves) if isinstance(weight, nn.Parameter)), None)
    return "", "" if weight is None else (
        f"the loss has a weight of its own, of shape {list(weight.shape)}, which is not a part of the model and stays as it is: models that are "
        'parallelized together, {"model": ..., "loss": ...}, with a forward that returns it, train it too'
    )


def last_operations(total: Tensor) -> tuple[str, ...]:
    """Return the operations by which a loss ends, and which of them divide by the count by which it was multiplied: others once a forward
    computes another loss. Numbers on an accelerator are not looked at, since the host would wait for them.
    """
    last = [] if total.grad_fn is None else [total.grad_fn]
    for node in last:  # which grows
        nodes = [operand for operand, _ in node.next_functions if operand is not None and operand not in last]
        last += nodes[: _LAST - len(last)]
    with disable_current_modes():  # a mode is given the numbers of Python
        numbers = [_operand_of(node) for node in last]
    counts = {number for node, number in zip(last, numbers, strict=True) if node.name().startswith("Mul")}
    return tuple(f"{node.name()} {number in counts}" for node, number in zip(last, numbers, strict=True))


def _operand_of(node: Any) -> float | None:
    """Return the number by which an operation multiplies or divides; None if there is none on the host."""
    other = getattr(node, "_saved_other", None)
    return float(other) if isinstance(other, Tensor) and other.numel() == 1 and other.device.type == "cpu" else None


def differentiates_graphs(total: Tensor) -> bool:
    """Return whether a loss depends on gradients that it has taken through a graph of torch.compile, which torch cannot differentiate again."""
    start = get_gradient_edge(total).node
    return any(node.name().startswith("CompiledFunctionBackwardBackward") for node in nodes_from([start]))
