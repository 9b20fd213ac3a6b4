"""What ranks of `cp` exchange of an attention, and the points of a traced forward at which they do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

from samestep.models.layer_parts import Exchange
from samestep.tracing.checkpointed import Point

PlacedExchange = tuple[str, int, Exchange, Point]
"""The region of an attention, the storage of one of its tensors, its exchange, and the point at which ranks send it."""


def exchanges_of(
    query: Tensor, key: Tensor, value: Tensor, output: Tensor, *, is_cut: bool
) -> Iterator[tuple[Tensor, Exchange]]:
    """Yield the inputs and the output of an attention with what ranks exchange of each; `is_cut` is whether tp cuts its heads."""
    has_gradient = any(tensor.requires_grad for tensor in (query, key, value))
    for role, tensor in {"query": query, "key": key, "value": value, "output": output}.items():
        yield (
            tensor,
            Exchange(
                role=role,  # type: ignore[arg-type]
                elements=tensor.numel(),
                heads=tensor.shape[1],
                query_heads=query.shape[1],
                is_cut=is_cut,
                takes_gradient=has_gradient if role == "output" else tensor.requires_grad,
            ),
        )


def behind(exchanges: Sequence[PlacedExchange], point: Point) -> list[PlacedExchange]:
    """Return the exchanges of an attention, which is over at a point: its output is sent there, and its inputs take part in the output."""
    return [
        (region, key, one, point if one.role == "output" else before._replace(nodes=point.nodes))
        for region, key, one, before in exchanges
    ]
