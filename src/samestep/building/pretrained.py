"""A model from a folder: the class that its configuration names, with the values in its files. No code of the folder runs.

    model.source = "hf:PATH"      a folder with a config.json and safetensors
    model.config                  fields of its configuration to override
    model.task                    the class of model, as for a family

The model is built on the meta device like that of a family, and each value is read when it is asked for; what the folder
lacks, such as a new head, is drawn as in a new model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from samestep.building import families
from samestep.building.model_changes import UNCHANGED, Adaptation, name_without_adapters
from samestep.building.stored_weights import StoredWeights, find_stored_weights
from samestep.errors import ModelError, did_you_mean
from samestep.job_tables import Task
from samestep.models import weight_files


@dataclass(frozen=True, slots=True)
class PretrainedModel:
    """The build function of a model whose values are read from a folder."""

    folder: Path
    config: Any
    task: Task
    adaptation: Adaptation = UNCHANGED
    before: Any = None
    """The configuration before the embedding was resized; None where it is not."""

    def build(self) -> nn.Module:
        """Return the model with new values, in training mode and float32."""
        return self.adaptation.of(
            families.build_model(f"hf:{self.folder}", self.config, self.task, dtype=torch.float32)
        )

    def stored(self, module: nn.Module, canonical: Mapping[str, str]) -> StoredWeights:
        """Return the places of a built model's values in the folder, whose files have none of the model's adapters."""
        files = weight_files.tensors(self.folder)
        num_before, now = families.num_tokens(self.before or self.config), families.num_tokens(self.config)
        tokens = (num_before, now) if self.before is not None and num_before is not None and now is not None else None
        if self.adaptation.lora is None:
            return find_stored_weights(module, canonical, files, tokens)
        with torch.device("meta"):
            bare = families.build_model(f"hf:{self.folder}", self.config, self.task, dtype=torch.float32)
        first: dict[int, str] = {}
        names = {name: first.setdefault(id(tensor), name) for name, tensor in bare.state_dict(keep_vars=True).items()}
        known = {name: names[base] for name in canonical if (base := name_without_adapters(name)) in names}
        return replace(find_stored_weights(bare, names, files, tokens), canonical=known)

    def __call__(self) -> nn.Module:
        """Return the model as transformers itself loads it from the folder: the reference for ours."""
        auto = families.auto_class(self.task)
        with families.quiet():
            model: Any = auto.from_pretrained(
                self.folder,
                config=self.before or self.config,
                dtype=torch.float32,
                local_files_only=True,
                use_safetensors=True,
                trust_remote_code=False,
            )
            if self.before is not None:
                model.resize_token_embeddings(families.num_tokens(self.config), mean_resizing=False)
        return self.adaptation.of(model.train())


def pretrained_source(
    folder: Path,
    fields: Mapping[str, Any],
    task: Task,
    adaptation: Adaptation = UNCHANGED,
    tokens: Callable[[int], int] | None = None,
) -> PretrainedModel:
    """Return the build function of a folder's model; `tokens` gives a new size of its vocabulary, from that of the folder.

    Raises:
        ModelError: the folder lacks a part, its class is unknown, or a field does not exist.
    """
    config = folder_config(folder, fields, task)
    weight_files.tensors(folder)  # before anything is built
    size = families.num_tokens(config)
    if tokens is None:
        return PretrainedModel(folder, config, task, adaptation)
    if size is None or families.VOCABULARY_FIELD in fields:
        both = "model.config sets it too. Use model.resize_embeddings alone"
        raise ModelError(
            "resize-embeddings",
            f"model.resize_embeddings: {both if size is not None else f'{folder} has no vocabulary'}",
        )
    if (wanted := tokens(size)) == size:
        return PretrainedModel(folder, config, task, adaptation)
    resized = folder_config(folder, families.fields_with_tokens(config, fields, wanted), task)
    return PretrainedModel(folder, resized, task, adaptation, config)


def folder_config(folder: Path, fields: Mapping[str, Any], task: Task) -> Any:
    """Return the configuration of a folder, with `fields` in place of the stored ones.

    Raises:
        ModelError: it has none, or one of a class that transformers does not have; or a field does not fit.
    """
    stored = weight_files.configuration(folder)
    family = families.family_of(stored)
    code = "; it comes with code of its own, which samestep does not run" if "auto_map" in stored else ""
    if "trust_remote_code" in fields:
        raise ModelError(
            "model-folder-unsupported",
            "model.config.trust_remote_code: samestep runs no code of a folder. Use a module:function",
        )
    if not family:
        raise ModelError(
            "model-folder-damaged",
            f"model.source: {folder / weight_files.CONFIG} names no {families.FAMILY_FIELD}{code}",
        )
    try:
        families.check_family(family, task)
    except ModelError as error:
        raise ModelError(
            "model-folder-damaged", f"model.source: {folder}: {str(error).removeprefix(f'hf:{family}: ')}{code}"
        ) from None
    if "quantization_config" in stored:
        raise ModelError(
            "model-folder-unsupported",
            f"model.source: the weights in {folder} are quantized, which samestep does not train. Use the weights before quantization",
        )
    families.check_fields(family, fields)
    if unknown := [name for name in fields if isinstance(fields[name], dict) and name not in stored]:
        raise ModelError(
            "model-config", f"model.config.{unknown[0]}: {folder} has no such table{did_you_mean(unknown[0], stored)}"
        )
    values = _merge_fields(stored, fields)
    return families.make_config(f"hf:{folder}", family, values, fields, task)


def _merge_fields(stored: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the stored fields with others in their place; lists with an entry for each block get those of the new depth."""
    merged = dict(stored)
    for name, value in fields.items():
        known = stored.get(name)
        merged[name] = {**known, **value} if isinstance(known, dict) and isinstance(value, dict) else value
    depth = next((name for name in families.DEPTH_FIELDS if isinstance(fields.get(name), int) and name in stored), "")
    if depth:
        for name, value in stored.items():
            if name not in fields and isinstance(value, list) and len(value) == stored[depth]:
                merged[name] = value[: fields[depth]]
    return merged
