"""From a job's words to Python objects: the model's build function, the loss, the optimizer, the learning rate.

    model.source       hf:FAMILY        a family of transformers with the fields of model.config, as a causal LM
                       module:function  called with model.config as keyword arguments
    train.loss         cross_entropy | mse | module:function of (outputs, batch) -> (sum, count)
    optimizer.name     a class of torch.optim in any case | module:function of (parameters)

A module is looked for in the working directory too. What transformers or torch.optim would take in silence, such as a
field that no configuration has, is an error here.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from samestep.errors import InputError, JobError, ModelError, did_you_mean
from samestep.job import Job, OptimizerTable, ScheduleTable
from samestep.runtime.families import family_source, near_family

IGNORED_LABEL = -100
"""A label of this value is not counted."""

LossFunction = Callable[[Any, Any], tuple[Tensor, Tensor]]

# -- the model -------------------------------------------------------------------------------------


def model_source(job: Job) -> Callable[[], nn.Module]:
    """Return the function that builds the job's model, with values of its own choosing, in training mode.

    Raises:
        ModelError: transformers, the family, a field, the module or the function is not there.
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


def imported(source: str, key: str, error: type[InputError]) -> Callable[..., Any]:
    """Import `module:function`, from the working directory too; `error` is raised with `key` where that fails."""
    module_name, colon, name = source.partition(":")
    if not colon or not module_name or not name:
        raise error(f"{key} = {source!r} is not of the form module:function")
    here = str(Path.cwd())
    if here not in sys.path and "" not in sys.path:
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as missing:
        if missing.name is None or not f"{module_name}.".startswith(f"{missing.name}."):
            raise error(f"{key}: {module_name} needs the module {missing.name}, which is not installed") from missing
        raise error(
            f"{key}: there is no module {module_name!r}, neither in {here} nor among the installed ones"
        ) from None
    except Exception as failed:
        raise error(f"{key}: importing {module_name} failed: {type(failed).__name__}: {failed}") from failed
    function = getattr(module, name, None)
    if function is None:
        public = [word for word in vars(module) if not word.startswith("_")]
        raise error(f"{key}: {module_name} has no function {name!r}{did_you_mean(name, public)}")
    if not callable(function):
        raise error(f"{key}: {source} is a {type(function).__name__}, not a function")
    return cast(Callable[..., Any], function)


# -- calling the model -----------------------------------------------------------------------------


def call_model(model: nn.Module, batch: Any) -> Any:
    """Give a batch to the model: a dict by the names of its forward, without the labels; of a tuple the first part.

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
    """Say why a batch cannot be given to the model."""
    name, takes = type(model).__name__, ", ".join(accepted) or "no named argument"
    if "position_ids" in batch and "position_ids" not in accepted:
        return (
            f"the batch has position_ids, without which packed documents see each other, and the forward of {name} "
            f"takes {takes}; a model that takes position_ids works"
        )
    return f"the batch has {', '.join(batch)}, and the forward of {name} takes {takes}; a common name works"


@functools.cache
def _accepted(forward: Callable[..., Any]) -> tuple[str, ...]:
    """Names of the arguments of a model's forward; one that takes any is given what every language model takes."""
    parameters = inspect.signature(forward).parameters.values()
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    names = [parameter.name for parameter in parameters if parameter.kind in by_name and parameter.name != "self"]
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
        names += [name for name in ("input_ids", "position_ids") if name not in names]
    return tuple(names)


# -- the loss --------------------------------------------------------------------------------------


def loss_of(job: Job) -> LossFunction:
    """Return the job's loss: (outputs, batch) -> (sum, count), never a mean.

    Raises:
        JobError: the loss has no such name.
    """
    losses: dict[str, LossFunction] = {"cross_entropy": cross_entropy, "mse": mse}
    name = job.train.loss
    if name in losses:
        return losses[name]
    if ":" not in name:
        raise JobError(
            f"train.loss = {name!r} is none of {', '.join(losses)}{did_you_mean(name, losses)}, nor module:function"
        )
    return functools.partial(_checked_loss, imported(name, "train.loss", JobError), name)


def _checked_loss(function: LossFunction, name: str, outputs: Any, batch: Any) -> tuple[Tensor, Tensor]:
    result = function(outputs, batch)
    if isinstance(result, tuple) and len(result) == 2 and isinstance(result[0], Tensor):
        return result[0], torch.as_tensor(result[1], device=result[0].device)
    raise JobError(f"train.loss: {name} must return (sum, count): a tensor and the number of what it sums over")


def cross_entropy(outputs: Any, batch: Any) -> tuple[Tensor, Tensor]:
    """Sum the cross entropy over all labels but -100, in float32 at least, and count them.

    Classes are the last dimension of the logits, [B, T, V] for labels [B, T], or else the second, [B, V, ...].
    """
    logits, labels = at_least_float32(_prediction(outputs)), target_of(batch)
    if logits.shape[:-1] == labels.shape:
        logits, labels = logits.flatten(0, -2), labels.flatten()
    elif logits.shape[:1] + logits.shape[2:] != labels.shape:
        raise JobError(
            f"train.loss = 'cross_entropy': logits {list(logits.shape)} do not fit labels {list(labels.shape)}; "
            "[B, T, V] with [B, T], or [B, C] with [B], works"
        )
    total = F.cross_entropy(logits, labels, ignore_index=IGNORED_LABEL, reduction="sum")
    return total, (labels != IGNORED_LABEL).sum()


def mse(outputs: Any, batch: Any) -> tuple[Tensor, Tensor]:
    """Sum the squared errors, in float32 at least, and count the elements."""
    prediction, target = at_least_float32(_prediction(outputs)), target_of(batch)
    if prediction.shape != target.shape:
        raise JobError(
            f"train.loss = 'mse': the model gives {list(prediction.shape)}, the target is {list(target.shape)}; "
            "equal shapes work"
        )
    total = F.mse_loss(prediction, target.to(prediction.dtype), reduction="sum")
    return total, torch.tensor(target.numel(), device=total.device)


def at_least_float32(tensor: Tensor) -> Tensor:
    """Raise a half-precision tensor."""
    return tensor if tensor.dtype is torch.float64 else tensor.float()


def _prediction(outputs: Any) -> Tensor:
    """What the model predicts: a tensor itself, its `logits`, or the first of a tuple."""
    found = getattr(outputs, "logits", outputs)
    if isinstance(found, Mapping):
        found = found.get("logits")
    elif isinstance(found, (tuple, list)) and found:
        found = found[0]
    if isinstance(found, Tensor):
        return found
    raise JobError(
        f"the model gives a {type(outputs).__name__} without logits; train.loss = 'module:function' can read it"
    )


def target_of(batch: Any) -> Tensor:
    """What the model should have predicted: `labels` of a dict, the second of a tuple."""
    found = None
    if isinstance(batch, Mapping):
        found = batch.get("labels")
    elif isinstance(batch, (tuple, list)) and len(batch) > 1:
        found = batch[1]
    if isinstance(found, Tensor):
        return found
    raise JobError("the batch has no labels: a dict with `labels`, or a tuple (inputs, labels), works")


# -- the optimizer ---------------------------------------------------------------------------------

_UNFIT = {
    "lbfgs": "it evaluates the loss several times a step",
    "sparseadam": "it needs sparse gradients",
}
_FUSED = {"cpu": ("adam", "adamw", "sgd", "adagrad"), "cuda": ("adam", "adamw", "sgd")}
"""Classes with a fused update in every torch we run on, by the parameters' device."""


def optimizer_of(job: Job) -> Callable[[list[tuple[str, Tensor]]], Optimizer]:
    """Return the function that makes the job's optimizer over named parameters, or over pieces of them.

    Raises:
        JobError: torch.optim has no such class, or the class no such option; the returned function: a value is wrong.
    """
    table = job.optimizer
    if ":" in table.name:
        return functools.partial(_from_function, imported(table.name, "optimizer.name", JobError), table.name)
    kind = _optimizer_class(table.name)
    accepted = [name for name in inspect.signature(kind).parameters if name not in ("params", "lr", "weight_decay")]
    for name in table.options:
        if name not in accepted:
            raise JobError(
                f"optimizer.options.{name}: {kind.__name__} takes {', '.join(accepted)}{did_you_mean(name, accepted)}"
            )
    if table.weight_decay and "weight_decay" not in inspect.signature(kind).parameters:
        raise JobError(f"optimizer.weight_decay: {kind.__name__} has none; weight_decay = 0.0 works")
    return functools.partial(_make_optimizer, kind, table)


def _optimizer_class(name: str) -> type[Optimizer]:
    classes = {
        word.lower(): kind
        for word, kind in vars(torch.optim).items()
        if isinstance(kind, type) and issubclass(kind, Optimizer) and kind is not Optimizer
    }
    kind = classes.get(name.lower())
    if kind is None:
        usable = sorted(set(classes) - set(_UNFIT))
        hint = did_you_mean(name.lower(), usable)
        raise JobError(f"optimizer.name = {name!r} is none of {', '.join(usable)}{hint}, nor module:function")
    if name.lower() in _UNFIT:
        raise JobError(f"optimizer.name = {name!r} cannot be used: {_UNFIT[name.lower()]}; adamw works")
    return kind


def _from_function(function: Callable[..., Any], source: str, named: list[tuple[str, Tensor]]) -> Optimizer:
    optimizer = function([tensor for _, tensor in named])
    if isinstance(optimizer, Optimizer):
        return optimizer
    raise JobError(f"optimizer.name: {source} returned a {type(optimizer).__name__}, not a torch optimizer")


def _make_optimizer(kind: type[Optimizer], table: OptimizerTable, named: list[tuple[str, Tensor]]) -> Optimizer:
    """Group the parameters into decayed and not decayed, and make the optimizer."""
    options: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value for key, value in table.options.items()
    }
    accepted = inspect.signature(kind).parameters
    options["lr"] = table.lr
    if "weight_decay" in accepted:
        options["weight_decay"] = table.weight_decay
    rivals = ("fused", "foreach", "differentiable", "capturable")
    if "fused" in accepted and not any(rival in options for rival in rivals):
        options["fused"] = _can_fuse(kind, [tensor for _, tensor in named])
    groups: list[dict[str, Any]] = [{"params": [tensor for _, tensor in named]}]
    if table.weight_decay and table.no_weight_decay:
        spared = [any(fnmatchcase(name, pattern) for pattern in table.no_weight_decay) for name, _ in named]
        groups = [
            {"params": [tensor for (_, tensor), is_spared in zip(named, spared, strict=True) if not is_spared]},
            {
                "params": [tensor for (_, tensor), is_spared in zip(named, spared, strict=True) if is_spared],
                "weight_decay": 0.0,
            },
        ]
    try:
        # A rank may have nothing to update; torch takes an empty group, though not an empty list.
        return kind([group for group in groups if group["params"]] or groups[:1], **options)
    except (TypeError, ValueError, RuntimeError) as error:
        raise JobError(f"optimizer: {kind.__name__} refuses its settings: {error}") from None


def _can_fuse(kind: type[Optimizer], tensors: Sequence[Tensor]) -> bool:
    """Whether torch updates these in one kernel: plain floating tensors, on one device."""
    devices = {tensor.device.type for tensor in tensors}
    if len(devices) != 1 or kind.__name__.lower() not in _FUSED.get(devices.pop(), ()):
        return False
    dtypes = (torch.float32, torch.float64)
    return all(type(tensor) in (Tensor, nn.Parameter) and tensor.dtype in dtypes for tensor in tensors)


def learning_rate_factor(schedule: ScheduleTable, num_steps: int) -> Callable[[int], float]:
    """Return what the learning rate is multiplied by in step 0, 1, ...: up to 1, then down to final_ratio.

    Step `warmup_steps` has the whole learning rate, step `num_steps - 1` and all after it the last.
    """
    warmup, last = schedule.warmup_steps, num_steps - 1

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        if schedule.name == "constant" or last <= 0:
            return 1.0
        done = min((step - warmup) / (last - warmup), 1.0) if last > warmup else 1.0
        remaining = 1.0 - done if schedule.name == "linear" else (1.0 + math.cos(math.pi * done)) / 2.0
        return schedule.final_ratio + (1.0 - schedule.final_ratio) * remaining

    return factor
