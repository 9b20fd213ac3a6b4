"""The changes that a job makes to a model once it is built: low-rank adapters (LoRA) by peft, and frozen weights.

    model.lora = { targets = ["q_proj", "v_proj"] }        adapters by peft are trained in place of these layers
    model.freeze = ["model.embed_tokens.*", "*norm*"]      parameters of these names ask for no gradient

A frozen weight has neither a gradient nor optimizer state, no gradient of it is sent, and the clip norm leaves it out;
so it is with weights that a model's own code freezes by `requires_grad_(False)`. An adapted layer computes (Hu et al.
2021, arXiv:2106.09685)

    y = x W + (alpha / r) x A B        W is frozen; A [in, r] and B [r, out] are trained, and B begins with zeros

Peft puts a module with W, A and B in the place of each linear layer that is a target. Its names of modules, weights and
files are known here alone:

    q_proj.weight                  q_proj.base_layer.weight, q_proj.lora_A.default.weight, q_proj.lora_B.default.weight
    lm_head.weight (in modules_to_save)      lm_head.original_module.weight, lm_head.modules_to_save.default.weight

A tensor cut of the layer becomes that of its parts. Cut by columns, A stays whole and B is cut like W; cut by rows, A
is cut like W, its r features are summed over ranks, and B stays whole.
"""

from __future__ import annotations

import importlib
import re
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from samestep.building import adapters, nf4
from samestep.building.families import facts_of
from samestep.errors import JobError, did_you_mean, short_repr
from samestep.job_tables import ALL_LINEAR, LoraTable, Task
from samestep.models.packing import BLOCK

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

Value = Callable[[str], Tensor]


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
            if not any(_is_named(path, name) for path in paths):
                near = did_you_mean(name, dict.fromkeys(path.rpartition(".")[2] for path in paths))
                raise JobError(f"model.lora.{key}: no module of {type(model).__name__} is called {name!r}{near}")
    for path in paths:
        part = model.get_submodule(path)
        if any(_is_named(path, name) for name in targets) and not _takes_adapter(model, part):
            raise JobError(
                f"model.lora.targets: {path} is a {type(part).__name__}, and adapters are those of linear layers and embeddings; "
                "in model.lora.modules_to_save it is trained whole"
            )
    try:
        with warnings.catch_warnings():  # peft warns of transposed layers, and then treats them correctly
            warnings.simplefilter("ignore")
            changed: nn.Module = peft.inject_adapter_in_model(_configuration(lora, targets), model)
    except (ValueError, TypeError, NotImplementedError) as error:
        raise JobError(
            f"model.lora does not fit {type(model).__name__}: {short_repr(' '.join(str(error).split()))}"
        ) from None
    vars(changed).pop(_SETTINGS, None)  # the job has them; here they would count as a state of the training
    if lora.base == "nf4":
        _round_base(changed)
    return changed


def _round_base(model: nn.Module) -> None:
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
                f'model.lora.base = "nf4" rounds linear layers, and {path.removesuffix("." + _BASE)} is an embedding: targets without '
                'it work, and so does base = "full"'
            )
        weight = names[f"{path}.weight"]
        tied = [name for name, other in names.items() if other is weight and name != f"{path}.weight"]
        if not has_adapters and (tied or weight.shape[-1] % BLOCK):
            continue
        if tied:
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


def _bases(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the layers whose weights are rounded, with their paths: all linear ones but the head and those trained whole, and
    embeddings with adapters."""
    facts, found = facts_of(model), {}
    for path, part in model.named_modules():
        parts = path.split(".")
        is_linear = type(part) is nn.Linear or facts.is_transposed(part)
        if not {_DOWN, _UP, _SAVED, _ORIGINAL, *_OF_EMBEDDINGS}.isdisjoint(parts):
            continue
        if is_linear or parts[-1] == _BASE:
            found[path] = part
    head = facts.head_of(model) or next(reversed(found.values()), None)  # of other models the last one is taken for it
    yield from ((path, part) for path, part in found.items() if part is not getattr(head, _BASE, head))


def _is_named(path: str, name: str) -> bool:
    """Return whether a module's path is a name, or ends with it."""
    return path == name or path.endswith(f".{name}")


def _takes_adapter(model: nn.Module, part: nn.Module) -> bool:
    return isinstance(part, nn.Linear | nn.Embedding) or facts_of(model).is_transposed(part)


def _linear_layers(model: nn.Module, lora: LoraTable) -> tuple[str, ...]:
    """Return the paths of all linear layers of a model but its head and those in modules that are trained whole.

    Raises:
        JobError: it has none.
    """
    head, found = facts_of(model).head_of(model), []
    for path, part in model.named_modules():
        is_linear = _takes_adapter(model, part) and not isinstance(part, nn.Embedding)
        above = [path.rsplit(".", cut)[0] for cut in range(path.count(".") + 1)]
        is_saved = any(_is_named(one, name) for one in above for name in lora.modules_to_save)
        if is_linear and part is not head and not is_saved:
            found.append(path)
    if not found:
        raise JobError(f"model.lora.targets = {ALL_LINEAR!r}: {type(model).__name__} has no linear layer but its head")
    return tuple(found)


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
        raise JobError("model.lora needs the package peft: pip install 'samestep[peft]' works") from None


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
    held = set(names)
    found: dict[str, str] = {}
    for name in held:
        base = base_name(name)
        if base is not None and (base not in found or _SAVED in name.split(".")):
            found[base] = name
    return {
        base: (name, name.endswith(f"{_BASE}.weight") and _factors(name, held) is not None)
        for base, name in found.items()
    }


def _factors(weight: str, held: Collection[str]) -> tuple[str, str] | None:
    """Return the names of A and B of the adapter of a layer's weight; None where it has none."""
    path = outer(weight.rpartition(".")[0])
    for (down, up), leaf in (((_DOWN, _UP), ".weight"), (_OF_EMBEDDINGS, "")):
        names = (f"{path}.{down}.{_NAME}{leaf}", f"{path}.{up}.{_NAME}{leaf}")
        if names[0] in held:
            return names
    return None


def merge_adapters(model: nn.Module, names: Collection[str], value: Value, lora: LoraTable) -> Value:
    """Return a function from a tensor's name to its value in the model without adapters, with the adapters added to it.

    `names` are those of the tensors of the model with adapters, whose values `value` returns.
    """
    made_of, held, facts = origins(names), set(names), facts_of(model)

    def made(name: str) -> Tensor:
        source, is_adapted = made_of[name]
        if not is_adapted:
            return value(source)
        factors = _factors(source, held)
        assert factors is not None
        down, up = factors
        change = (lora.alpha / lora.r) * (value(up) @ value(down))
        layer = model.get_submodule(source.removesuffix(".weight"))
        is_turned = facts.is_transposed(layer) or isinstance(layer, nn.Embedding)
        return value(source) + (change.T if is_turned else change)

    return made


@dataclass(frozen=True, slots=True)
class Adaptation:
    """The changes that a job makes to a built model."""

    freeze: tuple[str, ...] = ()
    """Patterns of the names of parameters that are not trained."""
    lora: LoraTable | None = None
    """The adapters that are trained; None for none."""

    def of(self, model: nn.Module) -> nn.Module:
        """Insert the adapters into a model and freeze weights, in place; return the model.

        Raises:
            JobError: a pattern or a target matches nothing, or nothing is left to train.
        """
        if self.lora is not None:
            model = adapters.insert(model, self.lora)
        _freeze(model, self.freeze)
        return model


UNCHANGED = Adaptation()


def _freeze(model: nn.Module, patterns: tuple[str, ...]) -> None:
    """Let parameters whose names match a pattern ask for no gradient; a tied one has several names.

    Raises:
        JobError: a pattern matches no parameter, or nothing is left to train.
    """
    named = dict(model.named_parameters(remove_duplicate=False))
    for pattern in patterns:
        found = [param for name, param in named.items() if fnmatchcase(name, pattern)]
        if not found:
            raise JobError(
                f"model.freeze: {pattern!r} matches no parameter{did_you_mean(pattern, _patterns_of([*named]))}; a pattern "
                f"matches whole names, such as {next(iter(named), 'none')}"
            )
        for param in found:
            param.requires_grad_(False)
    if patterns and not any(param.requires_grad for param in named.values()):
        raise JobError(
            f"model.freeze = {list(patterns)} leaves no weight to train: patterns that match fewer names work"
        )


def _patterns_of(names: list[str]) -> list[str]:
    """Return names, then the patterns that match everything below a module, or the same weight of every block."""
    found = dict.fromkeys(names)
    for name in names:
        parts = name.split(".")
        found |= dict.fromkeys(".".join(parts[:end]) + ".*" for end in range(1, len(parts)))
    return list(found | dict.fromkeys(re.sub(r"\b\d+\b", "*", name) for name in found))
