"""The FLOPs of matrix products and convolutions, the sizes of what they multiply, and what a tensor cut leaves a rank of them.

FLOPs are torch's own count (`torch.utils.flop_counter`): 2 for a multiplication and an addition.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from samestep.models.layer_parts import Cutting, Factors, Product
from samestep.tracing.meta_tensors import GROUPED_PRODUCTS

_PLAIN = (torch.ops.aten.mm, torch.ops.aten.addmm)
_BATCHED = (torch.ops.aten.bmm, torch.ops.aten.baddbmm)
_ADDING = (torch.ops.aten.addmm, torch.ops.aten.baddbmm)
"""Products whose first operand is the tensor they are added to."""


@dataclass(frozen=True, slots=True)
class Products:
    """The products of a model's forward."""

    grouped_fallback: str
    """The operator by which the model's family multiplies rows with the matrix of their group, where torch's own is missing."""

    def flops_of(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], outcome: Any) -> int | None:
        """Return the FLOPs of a matrix product or convolution; None for other operations."""
        if self._is_grouped(func):
            return int(2 * outcome.numel() * args[0].shape[-1])
        formula = flop_registry.get(func.overloadpacket)
        return None if formula is None else int(formula(*args, **kwargs, out_val=outcome))

    def factors_of(self, func: Any, args: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
        """Return the two tensors that a product multiplies."""
        left, right = args[1:3] if func.overloadpacket in _ADDING else args[:2]
        return left, right

    def product_of(
        self,
        func: Any,
        args: tuple[Any, ...],
        outcome: Tensor,
        flops: int,
        *,
        factors: Factors,
        cut: Cutting,
        owner: str,
    ) -> Product:
        """Return a product with its sizes; one of another kind has its FLOPs alone."""
        product = functools.partial(Product, factors=factors, cut=cut, owner=owner)
        left, right = self.factors_of(func, args)
        if func.overloadpacket in _PLAIN:
            return product(rows=left.shape[0], inner=left.shape[1], columns=right.shape[1])
        if func.overloadpacket in _BATCHED:
            (count, rows, inner), columns = left.shape, right.shape[2]
            if factors != "pair":  # a weight for each of the rows' groups
                return product(rows=count * rows, inner=inner, columns=columns, groups=count, is_batched=True)
            return product(rows=rows, inner=inner, columns=columns, count=count, is_batched=True)
        if func.overloadpacket is torch.ops.aten.convolution:
            count, taps = args[8], right.shape[2:].numel()
            columns, inner = right.shape[0] // count, right.shape[1:].numel()
            rows = outcome.numel() // right.shape[0]
            return product(rows=rows, inner=inner, columns=columns, count=count, taps=taps)
        if self._is_grouped(func):
            rows, groups = left.shape[0], right.shape[0]
            return product(rows=rows, inner=left.shape[1], columns=right.shape[2], groups=groups)
        return product(rows=max(flops // 2, 1), inner=1, columns=1)

    def _is_grouped(self, func: Any) -> bool:
        """Return whether an operation multiplies rows with the matrix of their group."""
        return func in GROUPED_PRODUCTS or func._schema.name == self.grouped_fallback


_BY_COLUMNS = ("column", "qkv", "gather", "vocab")
"""The cut styles that leave a rank some of the columns of a product."""


@dataclass(slots=True)
class CutStorages:
    """The storages of which a tensor cut leaves a rank its part, followed from the modules that have a cut style."""

    styles: Mapping[str, str]
    """Cut style of each module, by its path."""
    storages: set[int] = field(default_factory=set)

    def of_product(self, owner: str, factors: tuple[int, int], *, is_pair: bool) -> Cutting:
        """Return how a product of a module is cut, given the storages of its factors; of a pair neither is a weight."""
        if is_pair and not self.storages.isdisjoint(factors):
            return "count"
        style = self.styles.get(owner, "")
        return "inner" if style == "row" else "columns" if style in _BY_COLUMNS else ""

    def follow(self, read: Set[int], made: Set[int], product: Product | None) -> bool:
        """Follow an operation to the storages that it makes; return whether its work is cut."""
        is_cut = product.cut in ("columns", "count") if product else not self.storages.isdisjoint(read)
        if is_cut and not (product and self.styles.get(product.owner) == "gather"):
            self.storages |= made
        return is_cut
