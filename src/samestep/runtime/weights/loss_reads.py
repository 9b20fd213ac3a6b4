"""What a loss reads of the model besides the outputs of its forward: weights of which ranks have parts, and values that a forward sets.

A loss that closes over the model may read whole weights. A part of one would give another number on each rank, and so would a value that
a forward has computed from the samples of one rank. Gradients that the loss sends to the weights by such ways are found by
`guards/loss_paths.py`. A proof trains a copy of an instance, of which a loss that closes over the instance sees the first weights alone.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from samestep.building.named_tensors import set_attributes
from samestep.building.outside_reads import FirstRead
from samestep.errors import ModelError
from samestep.examination.examine import Source
from samestep.program.program import Program
from samestep.runtime.axes import forward_state
from samestep.state.snapshot import modules_of
from samestep.trees import tensors_in

Loss = Callable[[Any, Any], Any]
_VALUES = (Tensor, bool, int, float)


def watching(loss: Loss, source: Source, module: nn.Module, program: Program) -> Loss:
    """Return the loss, whose first call must not read what `module`, which the run trains of an instance, has otherwise on each rank.

    Raises:
        ModelError: the returned function: it reads a weight of which ranks have parts, or a value that a forward has set.
    """
    layout, instance = program.step.layout, source.model
    if not isinstance(instance, nn.Module):
        return loss
    is_cut = layout.gathers_weights or any(degree > 1 for degree in layout.weight_axes.values())
    is_split = layout.world_size > 1 or bool(forward_state.splits(layout, program.step.num_microbatches))
    if source.owner is not None and not is_cut and not is_split:
        return loss
    watched = module if source.owner is not None else instance
    weights = [*watched.named_parameters()] if is_cut or source.owner is None else []
    before = _values_of(modules_of(loss), module)
    is_first = True

    @functools.wraps(loss)
    def first_watched(outputs: Any, batch: Any) -> Any:
        nonlocal is_first
        if not is_first:
            return loss(outputs, batch)
        is_first = False
        returned = {id(tensor) for tensor in tensors_in(outputs)}
        reads = FirstRead([(name, one) for name, one in weights if not one.is_meta and id(one) not in returned])
        with reads:
            found = loss(outputs, batch)
        name, what = reads.name, "of which ranks have parts"
        if not name:
            present = _values_of(modules_of(loss), module)
            name = next((one for one in present if present[one] is not before.get(one) and _names(loss, one)), "")
            what = "which each forward sets from its own samples"
        if name:
            what = what if source.owner is not None else "of which a proof trains a copy"
            raise ModelError(
                "instance-read-elsewhere",
                f"the loss reads {name} of the model, {what}. Use a forward that returns the values for the loss; for a penalty on weights, "
                "weight_decay works too.",
            )
        return found

    return first_watched


def _values_of(held: nn.Module, model: nn.Module) -> dict[str, Any]:
    """Return the tensors and numbers in attributes of the parts of a model that a loss holds."""
    parts = {part: path for path, part in model.named_modules()}
    return {
        f"{parts[part]}.{name}".lstrip("."): value
        for part in held.modules()
        if part in parts
        for name, value in set_attributes(part).items()
        if isinstance(value, _VALUES)
    }


def _names(loss: Loss, name: str) -> bool:
    """Return whether the code of a loss names an attribute, as far as it can be read."""
    code = getattr(inspect.unwrap(loss), "__code__", None)
    return code is None or name.rpartition(".")[2] in code.co_names
