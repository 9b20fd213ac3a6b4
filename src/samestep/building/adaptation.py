"""The changes that a job makes to a model once it is built: adapters are put in, and weights are frozen.

    model.lora = { targets = ["q_proj", "v_proj"] }        adapters by peft are trained in place of these layers (`adapters.py`)
    model.freeze = ["model.embed_tokens.*", "*norm*"]      parameters of these names ask for no gradient

What a model's own code freezes with `requires_grad_(False)` is frozen in the same way: a frozen weight has neither a gradient nor
optimizer state, no gradient of it is sent, and the clip norm leaves it out.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn

from samestep.building import adapters
from samestep.errors import JobError, did_you_mean
from samestep.job_tables import LoraTable


@dataclass(frozen=True, slots=True)
class Adaptation:
    """The changes that a job makes to a built model."""

    freeze: tuple[str, ...] = ()
    """Patterns of the names of parameters that are not trained."""
    lora: LoraTable | None = None
    """The adapters that are trained; None for none."""

    def of(self, model: nn.Module) -> nn.Module:
        """Return a model with the changes made in place.

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
    """Return names, and the patterns that match what is below a module or the same weight of every block."""
    found = dict.fromkeys(names)
    for name in names:
        parts = name.split(".")
        found |= dict.fromkeys(".".join(parts[:end]) + ".*" for end in range(1, len(parts)))
    return list(found | dict.fromkeys(re.sub(r"\b\d+\b", "*", name) for name in found))
