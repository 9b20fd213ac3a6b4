"""The model of a job: its build function, and the call of the built model on a batch.

    model.source       hf:FAMILY        a family of transformers with the fields of model.config, for model.task
                       hf:PATH          a folder with a configuration and weights (`building/pretrained.py`)
                       module:function  called with model.config as keyword arguments

What is built is then changed as the job says (`building/model_changes.py`): adapters are put in, and weights are frozen.

A module is looked for in the working directory too. What transformers would accept silently, such as a field that no
configuration has, is an error here. The loss is in `building/loss.py`, the optimizer in `building/optimizer.py`.
"""

from __future__ import annotations

import functools
import inspect
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor, nn

from samestep.building.families import (
    CACHE_FIELD,
    check_installed,
    family_config,
    family_source,
    is_family,
    near_family,
)
from samestep.building.initial_values import Blueprint, blueprint
from samestep.building.model_changes import UNCHANGED, Adaptation
from samestep.building.named_tensors import unwrap
from samestep.building.packed_positions import check_documents, packed_documents
from samestep.building.pretrained import folder_config, pretrained_source
from samestep.building.resnet import resnet
from samestep.building.several_models import Built, as_one
from samestep.datasets.imported import import_function
from samestep.datasets.tokenizers import open_tokenizer
from samestep.datasets.values import is_of_samples, num_samples
from samestep.errors import ModelError
from samestep.job import Job
from samestep.job_files import model_folder
from samestep.trees import map_tensors, tensors_in

# -- the model -------------------------------------------------------------------------------------


def blueprint_of(job: Job) -> Blueprint:
    """Return the job's model on the meta device, with what makes its values.

    Raises:
        ModelError: it does not exist, or cannot be built.
    """
    return blueprint(model_source(job), job.train.seed, functools.partial(job.run.waived, "build"))


def without_adaptation(job: Job) -> Job:
    """Return the job with all weights of its model trained, and without adapters."""
    return job.model_copy(update={"model": job.model.model_copy(update={"lora": None, "freeze": ()})})


def model_source(job: Job) -> Callable[[], nn.Module]:
    """Return the function that builds the job's model in training mode, with the values that its code gives it.

    Raises:
        ModelError: transformers, the family, a field, the module or the function does not exist.
    """
    source, config, adaptation = job.model.named(), job.model.config, Adaptation(job.model.freeze, job.model.lora)
    if model_folder(job) is not None:
        tokens = functools.partial(_num_tokens, job) if job.model.resize_embeddings is not None else None
        return pretrained_source(_folder_of(job), config, job.model.task, adaptation, tokens)
    if job.model.resize_embeddings is not None:
        raise ModelError(
            "resize-embeddings",
            f"model.resize_embeddings changes the embedding of a folder's model, and {source} has no folder. Use a size in model.config",
        )
    if source.startswith("hf:"):
        family = family_source(source.removeprefix("hf:"), config, job.model.task)
        return family if adaptation == UNCHANGED else JobModel(family, source, {}, adaptation)
    if job.model.preset == "resnet50":
        return JobModel(resnet, source, config, adaptation)
    if job.model.preset is not None:
        raise ModelError(
            "model-only-a-shape",
            f"{source} has sizes and no code: it is for plan and simulate. To train, use hf:FAMILY or module:function",
        )
    if ":" not in source:
        raise ModelError(
            "not-module-function",
            f"model.source = {source!r} is not of the form module:function, hf:FAMILY or hf:PATH{near_family(source)}",
        )
    function = import_function(source, "model.source", ModelError, job.run.folder)
    try:
        inspect.signature(function).bind(**config)
    except TypeError as error:
        raise ModelError("model-config", f"model.config does not fit {source}: {error}") from None
    return JobModel(function, source, config, adaptation)


def _num_tokens(job: Job, stored: int) -> int:
    """Return the number of tokens that the job gives the embedding of a folder's model, which has `stored` ones.

    Raises:
        ModelError: the job's data has no tokenizer.
    """
    asked = job.model.resize_embeddings
    if not isinstance(asked, str):
        return asked or stored
    if not job.data.is_text:
        raise ModelError(
            "resize-embeddings",
            f"model.resize_embeddings = {asked!r}: data.source = {job.data.source!r} is read without a tokenizer. Use a number",
        )
    multiple = int(asked.partition(":")[2] or 1)
    return max(stored, math.ceil(open_tokenizer(job).vocab_size / multiple) * multiple)


def configuration_of(job: Job) -> Any:
    """Return the configuration of a model of transformers; None for other models.

    Raises:
        ModelError: the family, the folder or a field does not exist.
    """
    if model_folder(job) is not None:
        return folder_config(_folder_of(job), job.model.config, job.model.task)
    if job.model.source.startswith("hf:"):
        return family_config(job.model.source.removeprefix("hf:"), job.model.config, job.model.task)
    return None


def _folder_of(job: Job) -> Path:
    """Return the folder of a job's model.

    Raises:
        ModelError: it has the name of a family, without a separator; or transformers is not installed.
    """
    folder, name = model_folder(job), job.model.source.removeprefix("hf:")
    assert folder is not None
    check_installed(job.model.source)
    if "/" not in name and is_family(name):
        raise ModelError(
            "model-folder-missing",
            f"model.source: hf:{name} is a family of transformers, and a folder here. Use hf:./{name} for the folder. "
            "For the family, rename the folder",
        )
    return folder


@dataclass(frozen=True, slots=True)
class JobModel:
    """The build function that a job names, with the arguments that it gives."""

    function: Callable[..., Any]
    source: str
    config: Mapping[str, Any]
    adaptation: Adaptation = UNCHANGED

    def __call__(self) -> nn.Module:
        """Return the module that the function builds, adapted as the job says.

        Raises:
            ModelError: it returns no module.
            JobError: the adaptation does not fit it.
        """
        model = self.function(**self.config)
        if not isinstance(model, nn.Module):
            raise ModelError(
                "build-function", f"{self.source} returned a {type(model).__name__}; it must return an nn.Module"
            )
        return self.adaptation.of(model)


# -- calling the model -----------------------------------------------------------------------------


def call_model(model: nn.Module, batch: Any, *, plainly: bool = False, is_watched: bool = False) -> Any:
    """Call the model on a batch: a dict by the forward's argument names, without labels; a tuple by position, without
    its target. A forward of the user's own around models (`several_models.py`) is given the batch as it is.

    Where the loss is the forward's own (`loss_within`), it is given the labels or the target too.

    A list of samples, which are no tensors, is passed as it is. A tuple (input, target, *extra) is passed as (input, *extra), as many as the forward takes by position. A forward
    with **kwargs is given every key of a dict but labels. Packed documents are attended one by one, or with `plainly`
    by the model's own mask.

    Raises:
        ModelError: the forward takes nothing of the batch, or not its position_ids.
    """
    inner = unwrap(model)
    watch = vars(inner).get(_LOSS_WITHIN, _OUTSIDE).watch
    if watch is not None and not is_watched:
        with watch:
            outputs = call_model(model, batch, plainly=plainly, is_watched=True)
        return watch.marked(outputs)
    if _takes_batch(model, inner):
        with nullcontext() if plainly or not isinstance(batch, Mapping) else packed_documents(inner):
            return model(batch)
    accepted, loss_within = _accepted_arguments(type(inner).forward), vars(inner).get(_LOSS_WITHIN, _OUTSIDE)
    if not isinstance(batch, tuple | list) and isinstance(batch, Mapping):
        arguments = {
            name: value
            for name, value in batch.items()
            if accepted.takes(name) and (loss_within.is_given_labels or name != "labels")
        }
        if not arguments or ("position_ids" in batch and "position_ids" not in arguments):
            raise _unfit(model, batch, accepted.names)
        if loss_within.items:
            arguments["num_items_in_batch"] = loss_within.items
        if "position_ids" in arguments and _is_of_transformers(inner) and accepted.takes(CACHE_FIELD):
            # Beside a cache transformers asks no positions where documents begin.
            arguments.setdefault(CACHE_FIELD, False)
        with nullcontext() if plainly else packed_documents(inner, are_given="position_ids" in arguments) as finder:
            outputs = model(**arguments)
        if not plainly:
            check_documents(inner, arguments, finder)
        return outputs
    if isinstance(batch, (tuple, list)) and not is_of_samples(batch):
        inputs = tuple(batch) if loss_within.is_given_labels else (batch[0], *batch[2:])
        return model(*inputs[: max(1, accepted.num_positional)])
    return model(batch)


def _takes_batch(model: nn.Module, inner: nn.Module) -> bool:
    """Return whether a user's forward is put around a model, or around the `inner` one that it wraps (`several_models.py`)."""
    return any(getattr(type(module), "takes_batch", False) for module in (model, inner))


class ForwardWatch(Protocol):
    """A context in which a forward runs (`runtime/loss_watch.py`)."""

    def __enter__(self) -> Any: ...

    def __exit__(self, *error: Any) -> None: ...

    def marked(self, outputs: Any) -> Any:
        """Return outputs whose count knows how it is guarded."""


@dataclass(slots=True)
class LossWithin:
    """The call of a forward that computes the loss itself."""

    is_given_labels: bool = True
    takes_items: bool = False
    """Whether it takes `num_items_in_batch`, by which it divides its sum."""
    items: int = 0
    """What it is given for that; 0 for nothing."""
    watch: ForwardWatch | None = None
    """What sees how it guards the count that it returns against zero; None where it does not."""

    @contextmanager
    def given(self, items: int) -> Iterator[None]:
        """Give the forward another number to divide by inside, where it takes one."""
        previous, self.items = self.items, items if self.takes_items else 0
        try:
            yield
        finally:
            self.items = previous


_OUTSIDE = LossWithin(is_given_labels=False)
_LOSS_WITHIN = "_samestep_loss_within"


def loss_within(module: nn.Module) -> LossWithin:
    """Return how a forward is called, as to the loss."""
    within: LossWithin = vars(unwrap(module)).get(_LOSS_WITHIN, _OUTSIDE)
    return within


def _is_of_transformers(model: nn.Module) -> bool:
    modeling = sys.modules.get("transformers.modeling_utils")
    return modeling is not None and isinstance(model, modeling.PreTrainedModel)


def give_labels(module: nn.Module) -> None:
    """Let calls of a model give its forward the labels, of which it computes the loss."""
    inner = unwrap(module)
    accepted = _accepted_arguments(type(inner).forward)
    takes = "num_items_in_batch" in accepted.names or (
        _is_of_transformers(inner) and accepted.takes_any and getattr(inner, "accepts_loss_kwargs", True) is not False
    )
    vars(inner)[_LOSS_WITHIN] = LossWithin(takes_items=takes, items=int(takes))


def why_unfit(model: nn.Module, batch: Any) -> str:
    """Return why a forward fails on a batch: it needs labels, or names none of its keys; empty if it names one, or
    none at all."""
    inner = unwrap(model)
    if _takes_batch(model, inner):
        return ""
    names = _accepted_arguments(type(inner).forward).names
    if (
        isinstance(batch, Mapping)
        and "labels" in batch
        and _accepted_arguments(type(unwrap(model)).forward).needs_labels
    ):
        return (
            "the loss alone is given labels. Use a forward that takes the part it needs under another name in the batch, "
            "as a mask of the positions that count"
        )
    if not isinstance(batch, Mapping) or not names or not (batch.keys() - {"labels"}).isdisjoint(names):
        return ""
    return str(_unfit(model, batch, names))


def _unfit(model: nn.Module, batch: Mapping[str, Any], accepted: Sequence[str]) -> ModelError:
    """Return why a batch cannot be given to the model."""
    name, takes = type(model).__name__, ", ".join(accepted) or "no named argument"
    if "position_ids" in batch and "position_ids" not in accepted:
        return ModelError(
            "batch-arguments",
            f"the batch has position_ids, without which packed documents see each other, and the forward of {name} "
            f"takes {takes}. Use a model that takes position_ids",
        )
    keys = [key for key in batch if key != "labels"]
    if len(keys) == 1 and len(accepted) == 1:
        works = f"Rename {accepted[0]!r} to {keys[0]!r} in the forward"
    elif len(keys) == 1 and len(accepted) == 2 and "labels" in batch:
        works = (
            f"Rename {accepted[0]!r} to {keys[0]!r} and {accepted[1]!r} to 'labels' in the forward, and set train.loss = 'model' if "
            "the forward returns its loss"
        )
    else:
        works = f"Use a name that both have, or forward=lambda model, batch: model(batch[{next(iter(batch))!r}])"
    text = f"the batch has {', '.join(batch)}, and the forward of {name} takes {takes}. {works}"
    return ModelError("batch-arguments", text)


@dataclass(frozen=True, slots=True)
class _Accepted:
    """The arguments that a forward takes."""

    names: tuple[str, ...]
    takes_any: bool
    """Whether it has **kwargs."""
    num_positional: int
    """The number of its positional arguments; the largest integer with *args."""

    needs_labels: bool = False
    """Whether it fails without labels."""

    def takes(self, name: str) -> bool:
        """Return whether the forward takes an argument of this name."""
        return self.takes_any or name in self.names


@functools.cache
def _accepted_arguments(forward: Callable[..., Any]) -> _Accepted:
    """Return the arguments of a class's forward, without the module itself."""
    parameters = list(inspect.signature(forward).parameters.values())[1:]
    kinds = [p.kind for p in parameters]
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    by_place = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return _Accepted(
        names=tuple(p.name for p in parameters if p.kind in by_name),
        takes_any=inspect.Parameter.VAR_KEYWORD in kinds,
        needs_labels=any(p.name == "labels" and p.default is inspect.Parameter.empty for p in parameters),
        num_positional=sys.maxsize if inspect.Parameter.VAR_POSITIONAL in kinds else sum(k in by_place for k in kinds),
    )


class BatchDim:
    """The dimension of the samples in the batches of one run, which is not the first."""

    def __init__(self, dim: int) -> None:
        self.dim = dim
        self._turned: tuple[bool, ...] | None = None
        """Whether each output has its samples there."""

    def first(self, values: Any) -> Any:
        """Return the values of a batch with the samples first."""
        return map_tensors(values, lambda leaf: leaf.movedim(self.dim, 0) if leaf.dim() > self.dim else leaf)

    def there(self, values: Any) -> Any:
        """Return the values of a batch whose samples come first with the samples where the model has them."""
        count = num_samples(values)
        return map_tensors(values, lambda leaf: leaf.movedim(0, self.dim) if self._has(leaf, 0, count) else leaf)

    def _has(self, leaf: Tensor, dim: int, count: int | None) -> bool:
        return leaf.dim() > self.dim and leaf.shape[dim] == count

    def around(self, model: Built, loss: Callable[[Any, Any], Any]) -> tuple[Built, Callable[[Any, Any], Any]]:
        """Return a model and a loss that are given batches with the samples first."""
        return as_one(model, self._forward), self.loss_of(loss)

    def loss_of(self, loss: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        """Return a loss that is given outputs and batches with the samples first."""

        @functools.wraps(loss)
        def of_turned(outputs: Any, batch: Any) -> Any:
            return loss(self._outputs(outputs, 0, self.dim), self.there(batch))

        return of_turned

    def _forward(self, model: Any, samples: Any) -> Any:
        return self.back(call_model(model, self.there(samples)), samples)

    def back(self, outputs: Any, samples: Any) -> Any:
        """Return what a forward gave for samples, which come first in them, with the samples first."""
        if self._turned is None:
            count = num_samples(samples)
            self._turned = tuple(self._has(leaf, self.dim, count) for leaf in tensors_in(outputs))
        return self._outputs(outputs, self.dim, 0)

    def _outputs(self, outputs: Any, source: int, target: int) -> Any:
        turned = iter(self._turned or ())
        return map_tensors(outputs, lambda leaf: leaf.movedim(source, target) if next(turned, False) else leaf)

    def batch(self, batch: Any) -> Any:
        """Return a batch of `samestep.batches` whose samples come first when they are read."""
        dataset = getattr(batch, "dataset", None)
        is_stacked = dataset is not None and not (hasattr(dataset, "collate") or hasattr(dataset, "read"))
        return batch if is_stacked else TurnedBatch(batch, self)


class TurnedBatch:
    """A batch that a collate_fn or a method `read` puts together, with the samples first."""

    def __init__(self, batch: Any, dim: BatchDim) -> None:
        self._batch, self._dim = batch, dim

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._batch, name)

    def samples(self, indices: Sequence[int] | Any) -> Any:
        """Return the samples of these indices."""
        return self._dim.first(self._batch.samples(indices))
