"""Nested containers of tensors: batches, outputs and arguments, walked by torch's pytree and by nothing else.

`torch.utils._pytree` was seen in torch 2.11 and 2.13; `torch.utils.pytree` of 2.13 is its public successor.
"""

from __future__ import annotations

from torch.utils._pytree import (
    keystr,
    tree_flatten,
    tree_flatten_with_path,
    tree_leaves,
    tree_map,
    tree_map_only,
    tree_unflatten,
)

__all__ = [
    "keystr",
    "tree_flatten",
    "tree_flatten_with_path",
    "tree_leaves",
    "tree_map",
    "tree_map_only",
    "tree_unflatten",
]
