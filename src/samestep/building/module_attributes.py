"""The attributes that code has set on a module, which are what it keeps besides its tensors and the modules below it.

torch keeps weights, buffers, children, hooks and the mode in attributes of every module too: those are left out.
"""

from __future__ import annotations

from typing import Any

from torch import nn

OF_TORCH = frozenset(vars(nn.Module()))
"""The names of what torch itself keeps in every module."""


def set_attributes(module: nn.Module) -> dict[str, Any]:
    """Return the attributes that code has set on one module, by name, as they are now."""
    return {name: value for name, value in vars(module).items() if name not in OF_TORCH}
