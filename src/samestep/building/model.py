"""The model of a job: its build function, and the call of the built model on a batch.

    model.source       hf:FAMILY        a family of transformers with the fields of model.config, as a causal LM
                       module:function  called with model.config as keyword arguments

A module is looked for in the working directory too. What transformers would accept silently, such as a field that no
configuration has, is an error here. The loss is in `building/loss.py`, the optimizer in `building/optimizer.py`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from samestep.building.families import family_source, near_family
from samestep.building.imported import imported
from samestep.errors import ModelError
from samestep.job import Job

# -- the model -------------------------------------------------------------------------------------


def model_source(job: Job) -> Callable[[], nn.Module]:
    """Return the function that builds the job's model, with values of its own choosing, in training mode.

    Raises:
        ModelError: transformers, the family, a field, the module or the function does not exist.
    """
    source, config = job.model.source, job.model.config
    if source.startswith("hf:"):
        return family_source(source.removeprefix("hf:"), config)
    if job.model.preset is not None:
        raise ModelError(f"{source} is a model's shape, to plan and simulate; train hf:FAMILY or module:function")
    if ":" not in source:
        raise ModelError(
            f"model.source = {source!r} is not of the form module:function or hf:FAMILY{near_family(source)}"
        )
    function = imported(source, "model.source", ModelError)
    try:
        inspect.signature(function).bind(**config)
    except TypeError as error:
        raise ModelError(f"model.config does not fit {source}: {error}") from None
    return functools.partial(_build_function, function, source, config)


def _build_function(function: Callable[..., Any], source: str, config: Mapping[str, Any]) -> nn.Module:
    model = function(**config)
    if not isinstance(model, nn.Module):
        raise ModelError(f"{source} returned a {type(model).__name__}; it must return an nn.Module")
    return model


# -- calling the model -----------------------------------------------------------------------------


def call_model(model: nn.Module, batch: Any) -> Any:
    """Call the model on a batch: a dict by the forward's argument names, without labels; a tuple's first part.

    Raises:
        ModelError: the forward takes nothing of the batch, or not its position_ids.
    """
    if isinstance(batch, Mapping):
        accepted = _accepted(type(model).forward)
        given = {name: value for name, value in batch.items() if name in accepted and name != "labels"}
        if not given or ("position_ids" in batch and "position_ids" not in given):
            raise ModelError(_unfit(model, batch, accepted))
        return model(**given)
    return model(batch[0] if isinstance(batch, (tuple, list)) else batch)


def _unfit(model: nn.Module, batch: Mapping[str, Any], accepted: Sequence[str]) -> str:
    """Return why a batch cannot be given to the model."""
    name, takes = type(model).__name__, ", ".join(accepted) or "no named argument"
    if "position_ids" in batch and "position_ids" not in accepted:
        return (
            f"the batch has position_ids, without which packed documents see each other, and the forward of {name} "
            f"takes {takes}; a model that takes position_ids works"
        )
    return f"the batch has {', '.join(batch)}, and the forward of {name} takes {takes}; a common name works"


@functools.cache
def _accepted(forward: Callable[..., Any]) -> tuple[str, ...]:
    """Return the names of a forward's arguments; one with **kwargs takes what every language model takes."""
    parameters = inspect.signature(forward).parameters.values()
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    names = [parameter.name for parameter in parameters if parameter.kind in by_name and parameter.name != "self"]
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
        names += [name for name in ("input_ids", "position_ids") if name not in names]
    return tuple(names)
