"""Dropout probabilities that a model's modules and configurations show."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from samestep.building.families import FamilyFacts, facts_of


def has_dropout(model: nn.Module) -> bool:
    """Return whether a module or a configuration in the model has a dropout probability above 0.

    A probability is a number above 0 and up to 1 whose name contains "drop" (`dropout`, `attn_pdrop`, `layerdrop`), in
    a module's attributes or in its configuration, or any such number of a module whose class name contains it
    (`Dropout.p`). Fields of a configuration for heads (`classifier_dropout`, `summary_first_dropout`) count through
    their `nn.Dropout` only. A number written in the code (`F.dropout(x, 0.1)`) cannot be seen: run the first
    micro-batch under a `DropoutMode` whatever this returns, and keep the mode if its `num_draws` is not 0.
    """
    seen: set[int] = set()
    facts = facts_of(model)
    for module in model.modules():
        if _has_rate(vars(module), facts, everything="drop" in type(module).__name__.lower()):
            return True
        for config in facts.configurations_of(module):
            if id(config) in seen:
                continue
            seen.add(id(config))
            fields = config.to_dict() if hasattr(config, "to_dict") else config
            if _has_rate(fields if isinstance(fields, Mapping) else getattr(fields, "__dict__", {}), facts):
                return True
    return False


def rates_of(model: nn.Module) -> list[tuple[dict[str, Any], str]]:
    """Return the attributes of modules that look like dropout probabilities, whatever their value."""
    return [
        (fields, name)
        for module in model.modules()
        for fields, named in [(vars(module), "drop" in type(module).__name__.lower())]
        for name, value in fields.items()
        if ((named and not name.startswith("_")) or "drop" in name.lower())
        and not isinstance(value, bool)
        and (value is None or (isinstance(value, int | float) and value == 0))
    ]


def _has_rate(fields: Mapping[str, Any], facts: FamilyFacts, everything: bool = False) -> bool:
    """Return whether a field, or a field of a mapping in it, is a dropout probability above 0."""
    for name, value in fields.items():
        named = everything or ("drop" in str(name).lower() and not facts.is_head_dropout(str(name)))
        if named and isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= 1:
            return True
        if isinstance(value, Mapping) and not str(name).startswith("_") and _has_rate(value, facts):
            return True
    return False
