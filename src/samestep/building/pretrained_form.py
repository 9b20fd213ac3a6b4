"""The form in which transformers stores a model: its configuration, the names and tensors of its files, and who makes them.

A model of transformers may hold its tensors in another form than its files do: fused experts are stored one by one, parts
are renamed. Transformers' own mapping, reversed, makes the tensors of the files, some from each group of the model's tensors.

Of a model with adapters the form is peft's: the adapters alone, for `PeftModel.from_pretrained`. Its weights with the adapters
added into them have the form of the model without.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from samestep.building import families
from samestep.building.initial_values import Blueprint
from samestep.building.model_changes import lora
from samestep.building.module_copies import deep_copy
from samestep.building.named_tensors import unwrap
from samestep.building.stored_weights import by_kind, convert_tensors, loading, transforms_of
from samestep.errors import ModelError
from samestep.job import Job
from samestep.job_files import model_folder, place_of
from samestep.models.weight_files import ONE_FILE

_OF_TOKENIZERS = (
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "*.model", "*.tiktoken",
    "chat_template*", "*processor_config.json",
)  # fmt: skip
"""Files of a folder that belong to a tokenizer or another processor of inputs."""
GENERATION = "generation_config.json"


Value = Callable[[str], Tensor]
"""The value of a tensor by its name."""


@dataclass(frozen=True, slots=True, eq=False)
class Merged:
    """A model without adapters, and the model with adapters from which its weights are computed."""

    plan: Blueprint
    """The model without adapters."""
    job: Job
    """Its job."""
    adapted: Blueprint
    values: Callable[[Value], Value]
    """Returns the function from a tensor's name to its merged value; its argument is that function of the model with adapters."""


@dataclass(frozen=True, slots=True)
class SavedGroup:
    """Tensors of a model that are converted together into some tensors of the files."""

    sources: tuple[str, ...]
    numel: int
    """Number of elements that it writes."""
    make: Callable[[Sequence[Tensor]], Mapping[str, Tensor]]
    """Returns tensors of the files by name."""


@dataclass(frozen=True, slots=True, eq=False)
class PretrainedForm:
    """The contents of transformers' files of a model, and where each value comes from."""

    plan: Blueprint
    """The model, with the values of what no checkpoint holds."""
    module: nn.Module
    """The model on the meta device, which no run cuts."""
    groups: tuple[SavedGroup, ...]
    beside: tuple[Path, ...]
    """Files to copy: those of the tokenizer, and the settings of generation in the folder that the run started from."""
    job: Job
    merged: Merged | None = None
    """The model with the adapters that are added into the weights of this one."""

    @classmethod
    def of(cls, plan: Blueprint, job: Job, merged: Merged | None = None) -> PretrainedForm:
        """Return the form of a model that is on the meta device and whole.

        Raises:
            ModelError: it has no adapters, and is no model of transformers.
        """
        if job.model.lora is not None:
            return cls(plan, deep_copy(plan.module, {}), tuple(_of_adapters(plan)), tuple(_beside(job)), job)
        if not is_of_transformers(plan):
            raise ModelError(
                "export-form",
                f"a folder for transformers holds a model of transformers, and {job.model.source or 'the model of the run'} is a "
                f"{type(plan.module).__name__}. Use samestep export RUN --out DIR with --format safetensors or --format dcp. In a loop of your "
                "own, use run.state_dict(), or save_pretrained of the model, such as peft's, within `with run.gathered() as model`",
            )
        module = deep_copy(plan.module, {})
        groups = tuple(_groups(module, _saved_names(module, plan.canonical)))
        return cls(plan, module, groups, tuple(_beside(job)), job, merged)

    @property
    def one_file(self) -> str:
        """The name of the file that holds all tensors, if one does."""
        return ONE_FILE if self.job.model.lora is None else lora().FILE

    @property
    def is_divisible(self) -> bool:
        """Whether several files may hold the tensors; peft reads one."""
        return self.job.model.lora is None

    @property
    def stored_plan(self) -> Blueprint:
        """The model whose tensors a checkpoint holds."""
        return self.merged.adapted if self.merged is not None else self.plan

    def values(self, stored: Value) -> Value:
        """Return the function of a tensor's value, from that of the model whose tensors a checkpoint holds."""
        return self.merged.values(stored) if self.merged is not None else stored

    def write_configuration(self, folder: Path, dtype: torch.dtype) -> None:
        """Write the configuration, the settings of generation and the files of the tokenizer into a folder.

        Raises:
            ModelError: transformers refuses to write them.
        """
        if self.job.model.lora is not None:
            model = self.job.model
            lora().configuration(self.module, self.job.model.lora, model_folder(self.job), model.task).save_pretrained(
                folder
            )
            return
        config: Any = copy.deepcopy(self.module.config)
        families.allow_cache(config)
        config.dtype = dtype
        config.architectures = [type(self.module).__name__]
        can_generate: Callable[[], bool] = self.module.can_generate  # type: ignore[assignment]
        with families.quiet():
            try:
                config.save_pretrained(folder)
                if can_generate() and not any(path.name == GENERATION for path in self.beside):
                    settings: Any = self.module.generation_config
                    settings.save_pretrained(folder)
            except (ValueError, TypeError, OSError) as error:
                raise ModelError(
                    "export-form", f"transformers cannot write the configuration: {' '.join(str(error).split())}"
                ) from None


def is_of_transformers(plan: Blueprint) -> bool:
    """Return whether a model is one of transformers, which has a form for files; a wrapper that hands attributes on is none."""
    modeling = sys.modules.get("transformers.modeling_utils")
    return modeling is not None and isinstance(unwrap(plan.module), modeling.PreTrainedModel)


def _of_adapters(plan: Blueprint) -> Iterator[SavedGroup]:
    """Yield each tensor that peft saves, under its name in peft's file; an embedding that was resized is saved with its new entries."""

    def maker(saved: str) -> Callable[[Sequence[Tensor]], Mapping[str, Tensor]]:
        return lambda tensors: {saved: tensors[0]}

    resized: set[str] = set()
    for name, tensor in plan.module.state_dict().items():
        saved, first = lora().saved_name(name), plan.canonical[name]
        if saved is None and first not in resized and plan.stored is not None and plan.stored.resized(name) is not None:
            resized.add(first)
            saved = lora().frozen_name(name)
        if saved:
            yield SavedGroup((name,), tensor.numel(), maker(saved))


def _saved_names(module: nn.Module, canonical: Mapping[str, str]) -> list[str]:
    """Return the names of the tensors that are saved; of tied tensors, the one to which the others are tied."""
    ignored = set(getattr(module, "_keys_to_ignore_on_save", None) or ())
    tied = set(getattr(module, "all_tied_weights_keys", None) or ())
    chosen: dict[str, str] = {}
    for name in module.state_dict():
        if name not in ignored and (canonical[name] not in chosen or chosen[canonical[name]] in tied):
            chosen[canonical[name]] = name
    return list(chosen.values())


def _groups(module: nn.Module, names: Sequence[str]) -> Iterator[SavedGroup]:
    """Yield the groups of a model's tensors that are saved together, by the reverse of transformers' mapping."""
    state = module.state_dict()
    renamings, converters = by_kind(conversion.reverse_transform() for conversion in reversed(_conversions(module)))
    collected: dict[str, tuple[Any, list[tuple[str, str]]]] = {}
    for name in sorted(names, key=loading().dot_natural_key):
        target, conversion, pattern = name, None, None
        for converter in converters:
            target, pattern = converter.rename_source_key(name)
            if pattern is not None:
                conversion = next(converter for converter in converters if pattern in converter.source_patterns)
                break
        collected.setdefault(target, (conversion, []))[1].append((name, pattern or ""))

    def renamed(name: str) -> str:
        for renaming in renamings:
            name, _ = renaming.rename_source_key(name)
        return name

    def maker(conversion: Any, target: str, sources: Sequence[tuple[str, str]]) -> Callable[..., Mapping[str, Tensor]]:
        def make(tensors: Sequence[Tensor]) -> Mapping[str, Tensor]:
            converted = convert_tensors(conversion, target, sources, tensors, module)
            return {renamed(name): tensor for name, tensor in converted.items()}

        return make

    for target, (conversion, sources) in collected.items():
        numel = sum(state[name].numel() for name, _ in sources)
        yield SavedGroup(tuple(name for name, _ in sources), numel, maker(conversion, target, sources))


def _conversions(module: nn.Module) -> list[Any]:
    """Return the transforms by which the files were loaded, or those of the class where there were none."""
    used = getattr(module, "_weight_conversions", None)
    if used is not None:
        return list(used)
    # Whether a prefix stood in files that do not exist is not known; transformers leaves it as it is too.
    return [
        transform
        for transform in transforms_of(module, add_legacy=False)
        if not isinstance(transform, loading().PrefixChange)
    ]


def unread_tokenizer(job: Job) -> Path | None:
    """Return the folder of the model's tokenizer where the job leaves it unread and encodes its text as bytes."""
    folder = model_folder(job)
    if folder is None or job.data.tokenizer != "bytes" or not job.data.is_text:
        return None
    return folder if any(True for _ in folder.glob("tokenizer*")) else None


def _beside(job: Job) -> Iterator[Path]:
    """Yield the files that are copied: of the tokenizer's folder, or else of the folder that the run started from."""
    source = model_folder(job)
    tokens = source if job.data.tokenizer == "bytes" and not job.data.is_text else None
    if job.data.tokenizer != "bytes":
        tokens = place_of(job, job.data.tokenizer)
    if tokens is not None:
        yield from sorted({path for pattern in _OF_TOKENIZERS for path in tokens.glob(pattern) if path.is_file()})
    if source is not None and (source / GENERATION).is_file():
        yield source / GENERATION
