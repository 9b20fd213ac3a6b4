"""Products of matrices for heads of queries that share heads of keys, without repeating keys; the dtype of their sums.

Legend: B samples, A heads, K heads of keys, L queries, S keys, D features of a head.
"""

from __future__ import annotations

import torch
from torch import Tensor

from samestep.building.torch_seams import num_dispatch_modes


def wide(tensor: Tensor) -> torch.dtype:
    """Return the dtype of sums of a tensor."""
    # Torch's own answer is another operation that is dispatched.
    return torch.float32 if tensor.dtype in _HALF else torch.promote_types(tensor.dtype, torch.float32)


def widen(tensor: Tensor) -> Tensor:
    """Return a tensor in the dtype of its sums."""
    return tensor if tensor.dtype in WIDE else tensor.to(wide(tensor))


WIDE = (torch.float32, torch.float64)
_HALF = (torch.bfloat16, torch.float16)


def by_features(query: Tensor, key: Tensor, times: float = 1.0) -> Tensor:
    """Return products over features [B, A, L, S], of queries [B, A, L, D] and keys [B, K, S, D]."""
    product = _multiplied(_by_key_heads(query, key), key.flatten(0, 1).transpose(1, 2), times)
    return product.view(*query.shape[:-1], key.shape[-2])


def by_keys(weights: Tensor, value: Tensor, times: float = 1.0) -> Tensor:
    """Return sums over keys [B, A, L, D], of weights [B, A, L, S] and values [B, K, S, D]."""
    product = _multiplied(_by_key_heads(weights, value), value.flatten(0, 1), times)
    return product.view(*weights.shape[:-1], value.shape[-1])


def by_queries(weights: Tensor, query: Tensor, key: Tensor, times: float = 1.0) -> Tensor:
    """Return sums over queries [B, K, S, D], of weights [B, A, L, S] and queries [B, A, L, D] that share keys [B, K, S, D]."""
    product = _multiplied(_by_key_heads(weights, key).transpose(1, 2), _by_key_heads(query, key), times)
    return product.view(*key.shape[:2], *product.shape[1:])


def _by_key_heads(tensor: Tensor, key: Tensor) -> Tensor:
    """Return [B, A, L, D] as [B K, L A / K, D]: the rows of all heads that share keys one after another."""
    if tensor.shape[1] == key.shape[1]:
        return tensor.flatten(0, 1)
    return tensor.reshape(key.shape[0] * key.shape[1], -1, tensor.shape[-1])


def _multiplied(first: Tensor, second: Tensor, times: float) -> Tensor:
    """Return products of matrices times a number."""
    if times == 1.0:
        return torch.bmm(first, second)
    return torch.baddbmm(nothing(first), first, second, beta=0, alpha=times)


def nothing(like: Tensor) -> Tensor:
    """Return a zero to which products are added."""
    key = (like.dtype, like.device)
    if num_dispatch_modes():
        return torch.zeros(1, dtype=like.dtype, device=like.device)
    if key not in _NOTHING:
        _NOTHING[key] = torch.zeros(1, dtype=like.dtype, device=like.device)
    return _NOTHING[key]


_NOTHING: dict[tuple[torch.dtype, torch.device], Tensor] = {}
"""A zero to which products are added, by dtype and device."""
