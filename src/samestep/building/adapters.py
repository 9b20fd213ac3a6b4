"""Low-rank adapters (LoRA) by peft, and everything that is known of its names: of its modules, its weights and its files.

    y = x W + (alpha / r) x A B        W is frozen; A [in, r] and B [r, out] are trained, and B begins with zeros

Hu et al. 2021, arXiv:2106.09685. Peft puts a module with W, A and B in the place of each linear layer that is a target:

    q_proj.weight                  q_proj.base_layer.weight, q_proj.lora_A.default.weight, q_proj.lora_B.default.weight
    lm_head.weight (in modules_to_save)      lm_head.original_module.weight, lm_head.modules_to_save.default.weight

A tensor cut of the layer becomes that of its parts. Cut by columns, A stays whole and B is cut like W; cut by rows, A is cut like
W, its r features are summed over ranks, and B stays whole.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from samestep.building import nf4
from samestep.building.families import facts_of
from samestep.errors import JobError, did_you_mean, shown
from samestep.job_tables import LoraTable, Task
from samestep.models.packing import BLOCK

_NAME = "default"
"""The name that peft gives an adapter of which there is one."""
_BASE, _ORIGINAL, _SAVED, _DOWN, _UP = "base_layer", "original_module", "modules_to_save", "lora_A", "lora_B"
_SETTINGS = "peft_config"
"""A model's attribute in which peft keeps its configuration."""
CONFIG, FILE = "adapter_config.json", "adapter_model.safetensors"
"""Files of peft's own folder."""
_PREFIX = "base_model.model."
"""What peft's files put before the name of a weight."""

_TASKS: dict[Task, str] = {"causal": "CAUSAL_LM", "seq2seq": "SEQ_2_SEQ_LM"}
"""Peft's own words for what a model is for."""

Value = Callable[[str], Tensor]


def insert(model: nn.Module, lora: LoraTable) -> nn.Module:
    """Put adapters into a model, and freeze all of its weights but theirs and those of the modules that are saved.

    Raises:
        JobError: peft is not installed, a target is no module of the model, or peft has no adapter for it.
    """
    peft = _peft()
    paths = [path for path, _ in model.named_modules() if path]
    for key, names in (("targets", lora.targets), ("modules_to_save", lora.modules_to_save)):
        for name in names:
            if not any(path == name or path.endswith(f".{name}") for path in paths):
                near = did_you_mean(name, dict.fromkeys(path.rpartition(".")[2] for path in paths))
                raise JobError(f"model.lora.{key}: no module of {type(model).__name__} is called {name!r}{near}")
    for path in paths:
        part, is_target = (
            model.get_submodule(path),
            any(path == one or path.endswith(f".{one}") for one in lora.targets),
        )
        if is_target and not (isinstance(part, nn.Linear) or facts_of(model).is_transposed(part)):
            raise JobError(
                f"model.lora.targets: {path} is a {type(part).__name__}, and adapters stand beside linear layers; in "
                "model.lora.modules_to_save it is trained whole"
            )
    try:
        with warnings.catch_warnings():  # of transposed layers, which peft then treats as what they are
            warnings.simplefilter("ignore")
            changed: nn.Module = peft.inject_adapter_in_model(configuration(lora), model)
    except (ValueError, TypeError, NotImplementedError) as error:
        raise JobError(
            f"model.lora does not fit {type(model).__name__}: {shown(' '.join(str(error).split()))}"
        ) from None
    vars(changed).pop(_SETTINGS, None)  # the job has them; what a model remembers would be a state of its training
    if lora.base == "nf4":
        _round_base(changed)
    return changed


def _round_base(model: nn.Module) -> None:
    """Let the weights beside adapters be held in 4 bits.

    Raises:
        JobError: one is tied, or its rows are no whole blocks.
    """
    names = dict(model.named_parameters(remove_duplicate=False))
    bases = {path: part for path, part in model.named_modules() if path.rpartition(".")[2] == _BASE}
    for path, base in bases.items():
        weight = names[f"{path}.weight"]
        if tied := [name for name, other in names.items() if other is weight and name != f"{path}.weight"]:
            raise JobError(
                f'model.lora.base = "nf4" rounds {path}.weight, which is tied to {tied[0]}: targets without it work, and so '
                'does base = "full"'
            )
        if weight.shape[-1] % BLOCK:
            raise JobError(
                f'model.lora.base = "nf4" has a scale for each {BLOCK} elements of a row, and rows of {path}.weight have '
                f'{weight.shape[-1]}: a width that {BLOCK} divides works, and so does base = "full"'
            )
        nf4.mark(base)


def configuration(lora: LoraTable, base: Path | None = None, task: Task | None = None) -> Any:
    """Return peft's configuration of the adapters; `base` is the folder of the model that they were made for."""
    return _peft().LoraConfig(
        task_type=_TASKS.get(task) if task else None,
        base_model_name_or_path=str(base) if base else None,
        r=lora.r,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=list(lora.targets),
        modules_to_save=list(lora.modules_to_save) or None,
        inference_mode=False,
    )


def _peft() -> Any:
    try:
        return importlib.import_module("peft")
    except ImportError:
        raise JobError("model.lora needs the package peft: pip install 'samestep[peft]' works") from None


# -- names -----------------------------------------------------------------------------------------


def base_name(name: str) -> str | None:
    """Return the name that a tensor has in the model without adapters; None for the weights of an adapter."""
    parts = name.split(".")
    if _DOWN in parts or _UP in parts:
        return None
    for inserted in ([_BASE], [_ORIGINAL], [_SAVED, _NAME]):
        for start in range(len(parts) - len(inserted) + 1):
            if parts[start : start + len(inserted)] == inserted:
                return ".".join(parts[:start] + parts[start + len(inserted) :])
    return name


def outer(path: str) -> str:
    """Return the path of the module in whose place peft has put one with this part; other paths are returned as they are."""
    parts = path.split(".")
    inner = next((index for index, part in enumerate(parts) if part in (_BASE, _ORIGINAL, _SAVED, _DOWN, _UP)), None)
    return ".".join(parts[:inner])


def cuts_of_parts(model: nn.Module, path: str, style: str) -> dict[str, str]:
    """Return the cut styles of the parts of a module with adapters, by their paths; of another module its own."""
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


def merged(names: Iterable[str], value: Value, lora: LoraTable, transposed: Collection[str]) -> Value:
    """Return the function of a tensor's value in the model without adapters, into whose weights they are added.

    `names` are those in the model with adapters, of whose tensors `value` returns the values. `transposed` are the
    paths of the modules whose weight is [in, out].
    """
    known: dict[str, list[str]] = {}
    for name in names:
        if (base := base_name(name)) is not None:
            known.setdefault(base, []).append(name)
    held = set(names)

    def made(name: str) -> Tensor:
        chosen = max(known[name], key=lambda one: _SAVED in one.split("."))
        path = outer(chosen.rpartition(".")[0])
        down, up = (f"{path}.{part}.{_NAME}.weight" for part in (_DOWN, _UP))
        if down not in held or not chosen.endswith(f"{_BASE}.weight"):
            return value(chosen)
        change = (lora.alpha / lora.r) * (value(up) @ value(down))
        return value(chosen) + (change.T if path in transposed else change)

    return made
