"""Low-rank adapters (LoRA) by peft: put into a model, named, saved, and added into the weights of the model without them.

    model.lora = { targets = ["q_proj", "v_proj"] }        adapters by peft are trained in place of these layers

An adapted layer computes (Hu et al. 2021, arXiv:2106.09685)

    y = x W + (alpha / r) x A B        W is frozen; A [in, r] and B [r, out] are trained, and B begins with zeros

Peft puts a module with W, A and B in the place of each linear layer that is a target. Its names of modules, weights and
files are known here alone:

    q_proj.weight                  q_proj.base_layer.weight, q_proj.lora_A.default.weight, q_proj.lora_B.default.weight
    lm_head.weight (in modules_to_save)      lm_head.original_module.weight, lm_head.modules_to_save.default.weight

A tensor cut of the layer becomes that of its parts. Cut by columns, A stays whole and B is cut like W; cut by rows, A
is cut like W, its r features are summed over ranks, and B stays whole.

Embedding and head may be one weight in the model without adapters and two values after training: one of them has an adapter, or is
trained whole as a module of its own (`modules_to_save`). The merged model then has two weights, and its configuration says so.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from samestep.building.families import head_of, is_transposed, untied_fields
from samestep.building.initial_values import Blueprint
from samestep.building.model import blueprint_of, without_adaptation
from samestep.building.model_changes import hold_as
from samestep.building.pretrained_form import Merged, Value
from samestep.errors import JobError, did_you_mean, short_repr
from samestep.job import Job
from samestep.job_tables import ALL_LINEAR, LoraTable, Task
from samestep.models.catalog import is_called
from samestep.models.param_spec import BLOCK

_NAME = "default"
"""The name of an adapter in peft where a model has only one."""
_BASE, _ORIGINAL, _SAVED, _DOWN, _UP = "base_layer", "original_module", "modules_to_save", "lora_A", "lora_B"
_OF_EMBEDDINGS = "lora_embedding_A", "lora_embedding_B"
"""The two factors of an embedding's adapter; peft keeps them as parameters, not as modules."""
_INSERTED = {_BASE, _ORIGINAL, _SAVED, _DOWN, _UP, *_OF_EMBEDDINGS}
_SETTINGS = "peft_config"
"""A model's attribute in which peft keeps its configuration."""
CONFIG, FILE = "adapter_config.json", "adapter_model.safetensors"
"""Files of peft's own folder."""
_PREFIX = "base_model.model."
"""Prefix of every weight's name in peft's files."""

_TASKS: dict[Task, str] = {"causal": "CAUSAL_LM", "seq2seq": "SEQ_2_SEQ_LM"}
"""Peft's word for each task."""


def insert(model: nn.Module, lora: LoraTable) -> nn.Module:
    """Put adapters into a model, and freeze all of its weights but theirs and those of the modules that are saved.

    Raises:
        JobError: peft is not installed, a target is no module of the model, or peft has no adapter for it.
    """
    peft = _peft()
    targets = _linear_layers(model, lora) if lora.targets == (ALL_LINEAR,) else lora.targets
    paths = [path for path, _ in model.named_modules() if path]
    for key, names in (("targets", targets), ("modules_to_save", lora.modules_to_save)):
        for name in names:
            if not any(is_called(path, name) for path in paths):
                near = did_you_mean(name, dict.fromkeys(path.rpartition(".")[2] for path in paths))
                raise JobError(
                    "lora-targets", f"model.lora.{key}: no module of {type(model).__name__} is called {name!r}{near}"
                )
    for path in paths:
        part = model.get_submodule(path)
        if any(is_called(path, name) for name in targets) and not _takes_adapter(model, part):
            raise JobError(
                "lora-targets",
                f"model.lora.targets: {path} is a {type(part).__name__}, and only linear layers and embeddings have adapters; "
                "in model.lora.modules_to_save it is trained whole",
            )
    try:
        with warnings.catch_warnings():  # peft warns of transposed layers, and then treats them correctly
            warnings.simplefilter("ignore")
            changed: nn.Module = peft.inject_adapter_in_model(_configuration(lora, targets), model)
    except (ValueError, TypeError, NotImplementedError) as error:
        raise JobError(
            "lora-targets",
            f"model.lora does not fit {type(model).__name__}: {short_repr(' '.join(str(error).split()))}",
        ) from None
    vars(changed).pop(_SETTINGS, None)  # the job has them; here they would count as a state of the training
    if lora.base != "full":
        _round_base(changed, lora.base)
    return changed


def _round_base(model: nn.Module, held_as: str) -> None:
    """Let the weights of all linear layers but the head be held in 4 bits, those without adapters too.

    A layer without adapters stays as it is where its weight is tied, or its rows are no whole blocks.

    Raises:
        JobError: a weight with adapters is one of an embedding, is tied, or its rows are no whole blocks.
    """
    names = dict(model.named_parameters(remove_duplicate=False))
    for path, base in _bases(model):
        has_adapters = path.rpartition(".")[2] == _BASE
        if isinstance(base, nn.Embedding):
            raise JobError(
                "nf4-unsupported",
                f'model.lora.base = "nf4" rounds linear layers, and {path.removesuffix("." + _BASE)} is an embedding. Use targets without '
                'it, or base = "full"',
            )
        weight = names[f"{path}.weight"]
        tied = [name for name, other in names.items() if other is weight and name != f"{path}.weight"]
        if not has_adapters and (tied or weight.shape[-1] % BLOCK):
            continue
        if tied:
            raise JobError(
                "nf4-unsupported",
                f'model.lora.base = "nf4" rounds {path}.weight, which is tied to {tied[0]}. Use targets without it, or base = "full"',
            )
        if weight.shape[-1] % BLOCK:
            raise JobError(
                "nf4-unsupported",
                f'model.lora.base = "nf4" has a scale for each {BLOCK} elements of a row, and rows of {path}.weight have '
                f'{weight.shape[-1]}. Use a width that {BLOCK} divides, or base = "full"',
            )
        hold_as(base, held_as)


def _bases(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the layers whose weights are rounded, with their paths: all linear ones but the head and those trained whole, and
    embeddings with adapters."""
    bases = {}
    for path, part in model.named_modules():
        parts = path.split(".")
        is_linear = type(part) is nn.Linear or is_transposed(part)
        if not {_DOWN, _UP, _SAVED, _ORIGINAL, *_OF_EMBEDDINGS}.isdisjoint(parts):
            continue
        if is_linear or parts[-1] == _BASE:
            bases[path] = part
    head = head_of(model) or next(reversed(bases.values()), None)  # of other models the last one is taken for it
    yield from ((path, part) for path, part in bases.items() if part is not getattr(head, _BASE, head))


def _takes_adapter(model: nn.Module, part: nn.Module) -> bool:
    return isinstance(part, nn.Linear | nn.Embedding) or is_transposed(part)


def _linear_layers(model: nn.Module, lora: LoraTable) -> tuple[str, ...]:
    """Return the paths of all linear layers of a model but its head and those in modules that are trained whole.

    Raises:
        JobError: it has none.
    """
    head, layers = head_of(model), []
    for path, part in model.named_modules():
        is_linear = _takes_adapter(model, part) and not isinstance(part, nn.Embedding)
        above = [path.rsplit(".", cut)[0] for cut in range(path.count(".") + 1)]
        is_saved = any(is_called(path_, name) for path_ in above for name in lora.modules_to_save)
        if is_linear and part is not head and not is_saved:
            layers.append(path)
    if not layers:
        raise JobError(
            "lora-targets",
            f"model.lora.targets = {ALL_LINEAR!r}: {type(model).__name__} has no linear layer but its head",
        )
    return tuple(layers)


def configuration(model: nn.Module, lora: LoraTable, base: Path | None, task: Task) -> Any:
    """Return peft's configuration of a model's adapters; `base` is the folder of the model for which they were
    trained."""
    targets = lora.targets
    if targets == (ALL_LINEAR,):
        targets = tuple(outer(path) for path, _ in model.named_modules() if path.rpartition(".")[2] == _BASE)
    return _configuration(lora, targets, base, task)


def _configuration(lora: LoraTable, targets: Sequence[str], base: Path | None = None, task: Task | None = None) -> Any:
    return _peft().LoraConfig(
        task_type=_TASKS.get(task) if task else None,
        base_model_name_or_path=str(base) if base else None,
        r=lora.r,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=list(targets),
        modules_to_save=list(lora.modules_to_save) or None,
        inference_mode=False,
    )


def _peft() -> Any:
    try:
        return importlib.import_module("peft")
    except ImportError:
        raise JobError(
            "package-missing", "model.lora needs the package peft. Use pip install 'samestep[peft]'"
        ) from None


# -- names -----------------------------------------------------------------------------------------


def base_name(name: str) -> str | None:
    """Return the name that a tensor has in the model without adapters; None for the weights of an adapter."""
    parts = name.split(".")
    if not {_DOWN, _UP, *_OF_EMBEDDINGS}.isdisjoint(parts):
        return None
    for inserted in ([_BASE], [_ORIGINAL], [_SAVED, _NAME]):
        for start in range(len(parts) - len(inserted) + 1):
            if parts[start : start + len(inserted)] == inserted:
                return ".".join(parts[:start] + parts[start + len(inserted) :])
    return name


def outer(path: str) -> str:
    """Return the path of the module that peft replaced by one with this part; other paths are returned as they are."""
    parts = path.split(".")
    inner = next((index for index, part in enumerate(parts) if part in _INSERTED), None)
    return ".".join(parts[:inner])


def cuts_of_parts(model: nn.Module, path: str, style: str) -> dict[str, str]:
    """Return the cut style of each part of a module with adapters, by path; of another module the given style."""
    module = model.get_submodule(path)
    if hasattr(module, _ORIGINAL) and hasattr(module, _SAVED):
        return {f"{path}.{_SAVED}.{_NAME}": style}
    if not (hasattr(module, _BASE) and hasattr(module, _DOWN)):
        return {path: style}
    adapted = [part for part in (_DOWN, _UP) if _NAME in getattr(module, part, {})]
    cut = _DOWN if style == "row" else _UP
    return {f"{path}.{_BASE}": style} | {f"{path}.{part}.{_NAME}": style for part in adapted if part == cut}


# -- what is saved ---------------------------------------------------------------------------------


def saved_name(name: str) -> str | None:
    """Return the name in peft's file of a tensor of the model; None for one that belongs to the model without adapters."""
    parts = name.split(".")
    if _SAVED in parts:
        return _PREFIX + str(base_name(name))
    return _PREFIX + ".".join(part for part in parts if part != _NAME) if base_name(name) is None else None


def frozen_name(name: str) -> str:
    """Return the name that peft's file gives a tensor outside of the adapters, as where it saves embeddings too."""
    return _PREFIX + name


def origins(names: Iterable[str]) -> dict[str, tuple[str, bool]]:
    """Return, by each name in the model without adapters, the name that its value has in the model with them, and whether an
    adapter is added to it.

    `names` are those in the model with adapters.
    """
    name_set = set(names)
    sources: dict[str, str] = {}
    for name in name_set:
        base = base_name(name)
        if base is not None and (base not in sources or _SAVED in name.split(".")):
            sources[base] = name
    return {
        base: (name, name.endswith(f"{_BASE}.weight") and _factors(name, name_set) is not None)
        for base, name in sources.items()
    }


def _factors(weight: str, name_set: Collection[str]) -> tuple[str, str] | None:
    """Return the names of A and B of the adapter of a layer's weight; None where it has none."""
    path = outer(weight.rpartition(".")[0])
    for (down, up), leaf in (((_DOWN, _UP), ".weight"), (_OF_EMBEDDINGS, "")):
        names = (f"{path}.{down}.{_NAME}{leaf}", f"{path}.{up}.{_NAME}{leaf}")
        if names[0] in name_set:
            return names
    return None


def merge_adapters(model: nn.Module, names: Collection[str], value: Value, lora: LoraTable) -> Value:
    """Return a function from a tensor's name to its value in the model without adapters, with the adapters added to it.

    `names` are those of the tensors of the model with adapters, whose values `value` returns.
    """
    made_of, name_set = origins(names), set(names)

    def made(name: str) -> Tensor:
        source, is_adapted = made_of[name]
        if not is_adapted:
            return value(source)
        factors = _factors(source, name_set)
        assert factors is not None
        down, up = factors
        change = (lora.alpha / lora.r) * (value(up) @ value(down))
        layer = model.get_submodule(source.removesuffix(".weight"))
        is_turned = is_transposed(layer) or isinstance(layer, nn.Embedding)
        return value(source) + (change.T if is_turned else change)

    return made


def merged(adapted: Blueprint, job: Job) -> Merged:
    """Return the merged form of a job's model, in which tied weights that were trained separately are two.

    Raises:
        JobError: the job has no adapters, or they train separately what the model always ties.
    """
    lora = job.model.lora
    if lora is None:
        raise JobError(
            "merge-adapters", "--merge adds adapters into weights, and the run has none (model.lora). Leave out --merge"
        )
    bare = without_adaptation(job)
    plan = blueprint_of(bare)
    if (
        job.model.source.startswith("hf:")
        and _find_untied_pair(plan, adapted)
        and (untied := untied_fields(plan.module))
    ):
        bare = bare.model_copy(
            update={"model": bare.model.model_copy(update={"config": _override_fields(bare, untied)})}
        )
        plan = blueprint_of(bare)
    if apart := _find_untied_pair(plan, adapted):
        raise JobError(
            "merge-adapters",
            f"--merge: model.lora trains {apart[0]} and {apart[1]} apart, and {type(plan.module).__name__} has one "
            "weight for them in any configuration: without --merge the adapters themselves are written",
        )
    return Merged(plan, bare, adapted, lambda value: merge_adapters(adapted.module, adapted.canonical, value, lora))


def _find_untied_pair(plan: Blueprint, adapted: Blueprint) -> tuple[str, str] | None:
    """Return two names of one tensor whose values the model with adapters makes of different tensors; None if there are none."""
    sources = {
        base: (adapted.canonical[name], name if is_adapted else "")
        for base, (name, is_adapted) in origins(adapted.canonical).items()
    }
    for name, first in plan.canonical.items():
        if sources.get(name) != sources.get(first):
            return first, name
    return None


def _override_fields(job: Job, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a job's model with others in their place, also within tables."""
    joined = dict(job.model.config)
    for name, value in fields.items():
        joined[name] = {**joined.get(name, {}), **value} if isinstance(value, dict) else value
    return joined
