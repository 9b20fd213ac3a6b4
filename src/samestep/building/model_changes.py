"""The changes that a job makes to a model once it is built: frozen weights, adapters, weights that are held in fewer bits; its mode of training.

    model.freeze = ["model.embed_tokens.*", "*norm*"]      parameters of these names ask for no gradient
    model.lora = { targets = ["q_proj", "v_proj"] }        adapters, which the wing `adapters` puts into the model

A frozen weight has neither a gradient nor optimizer state, no gradient of it is sent, and the clip norm leaves it out;
so it is with weights that a model's own code freezes by `requires_grad_(False)`.

Adapters are modules of peft, so a process that has not imported peft has none, and the names of its tensors are as they are. The
format in which a weight is held (`ParamSpec.held_as`) is a file of the wing of this name, with `round_weight`, `pack_values`,
`unpack_values` and `multiply_packed`.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from samestep import wings
from samestep.building.families import is_transposed
from samestep.building.several_models import Models
from samestep.errors import JobError, ModelError, did_you_mean
from samestep.job_tables import LoraTable

_MARK = "held_as"


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
            model = lora().insert(model, self.lora)
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
        params = [param for name, param in named.items() if fnmatchcase(name, pattern)]
        if not params:
            raise JobError(
                "freeze-patterns",
                f"model.freeze: {pattern!r} matches no parameter{did_you_mean(pattern, _patterns_of([*named]))}; a pattern "
                f"matches whole names, such as {next(iter(named), 'none')}",
            )
        for param in params:
            param.requires_grad_(False)
    if patterns and not any(param.requires_grad for param in named.values()):
        raise JobError(
            "freeze-patterns",
            f"model.freeze = {list(patterns)} leaves no weight to train. Use patterns that match fewer names",
        )


def _patterns_of(names: list[str]) -> list[str]:
    """Return names, then the patterns that match everything below a module, or the same weight of every block."""
    patterns = dict.fromkeys(names)
    for name in names:
        parts = name.split(".")
        patterns |= dict.fromkeys(".".join(parts[:end]) + ".*" for end in range(1, len(parts)))
    return list(patterns | dict.fromkeys(re.sub(r"\b\d+\b", "*", name) for name in patterns))


# -- adapters --------------------------------------------------------------------------------------


def lora() -> Any:
    """Return `lora.py` of the wing `adapters`, for a job that asks for adapters.

    Raises:
        InputError: the wing is not installed.
    """
    return wings.required("adapters", "lora")


def _lora_if_used() -> Any:
    return wings.optional("adapters", "lora") if "peft" in sys.modules else None


def name_without_adapters(name: str) -> str | None:
    """Return the name that a tensor has in the model without adapters; None for the weights of an adapter."""
    wing = _lora_if_used()
    return wing.base_name(name) if wing else name


def path_without_adapters(path: str) -> str:
    """Return the path of the module in whose place adapters have put one with this part; other paths are returned as they are."""
    wing = _lora_if_used()
    return str(wing.outer(path)) if wing else path


def cuts_of_parts(model: nn.Module, path: str, style: str) -> dict[str, str]:
    """Return the cut style of each part of a module with adapters, by path; of another module the style itself."""
    wing = _lora_if_used()
    styles: dict[str, str] = wing.cuts_of_parts(model, path, style) if wing else {path: style}
    return styles


# -- weights in fewer bits -------------------------------------------------------------------------


def format_of(held_as: str) -> Any:
    """Return the file of the wing `adapters` that rounds, packs and multiplies weights of a format.

    Raises:
        InputError: the wing is not installed.
    """
    return wings.required("adapters", held_as)


def hold_as(module: nn.Module, held_as: str) -> None:
    """Mark the weight of a module as held in a format, and round it if it has values."""
    setattr(module, _MARK, held_as)
    weight = module.weight
    assert isinstance(weight, Tensor)
    if not weight.is_meta:
        with torch.no_grad():
            weight.copy_(format_of(held_as).round_weight(weight.detach()))


def held_as(module: nn.Module) -> str:
    """Return the format in which the weight of a module is held; empty for the dtype of the others."""
    return str(getattr(module, _MARK, ""))


def packed_weights(model: nn.Module) -> dict[str, str]:
    """Return the format of each weight that is held in fewer bits, by name."""
    return {f"{path}.weight": form for path, module in model.named_modules() if (form := held_as(module))}


def multiply_all_packed(model: nn.Module, weights: Iterable[str]) -> None:
    """Make the linear modules of weights that are held in fewer bits multiply by the bytes that they hold."""
    for name in weights:
        module = model.get_submodule(name.rpartition(".")[0])
        format_of(held_as(module)).multiply_packed(module, is_transposed(module))


def refuse_scripts(model: nn.Module) -> None:
    """Refuse a model with a part that `torch.jit` has compiled.

    Raises:
        ModelError: it has one.
    """
    for path, part in model.named_modules():
        if isinstance(part, torch.jit.ScriptModule):
            raise ModelError(
                "tensor-form",
                f"{path or 'the model'} is compiled by torch.jit, which keeps weights where no layout can put others. Use the module "
                'that was given to torch.jit.script, or run.compile = "blocks"',
            )


def set_training(model: nn.Module) -> None:
    """Let a model train as a loop's `model.train()` does; in one that trains already, a part in evaluation mode is intended.

    A class that keeps a part in evaluation mode, as one with frozen batch norms does, says so in a `train` of its own.
    """
    if isinstance(model, Models):
        for model_in in model.trained():
            set_training(model_in)
        return
    modes = {part: part.training for part in model.modules()}
    is_loaded_for_inference = not model.training
    if is_loaded_for_inference or any(type(part).train is not nn.Module.train for part in modes):
        model.train()
    for part, trains in modes.items() if not is_loaded_for_inference else ():
        part.training &= trains


def copy_modes(source: nn.Module, target: nn.Module) -> None:
    """Put each module of a model into the mode, training or evaluation, of that of an equal model."""
    modes = {path: part.training for path, part in source.named_modules()}
    for path, part in target.named_modules():
        if part.training is not modes.get(path, part.training):  # to set one takes ten times as long as to read it
            part.training = modes[path]
