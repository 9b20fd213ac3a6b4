"""Modules as a run trains them: in training mode, and not compiled by `torch.jit`."""

from __future__ import annotations

import torch
from torch import nn

from samestep.building.several_models import Models
from samestep.errors import ModelError


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
        for one in model.trained():
            set_training(one)
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
