"""The graph that autograd has recorded: the nodes that are reached from some, and the tensors at which it ends."""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Iterable
from typing import Any

from torch import Tensor
from torch.autograd.graph import Node


def nodes_from(begin: Iterable[Node | None], known: Container[Node] = ()) -> dict[Node, None]:
    """Return the nodes that are reached from some, in the order of the search, which stops at known ones; None is no node."""
    nodes: dict[Node, None] = {}
    rest = [node for node in begin if node is not None]
    while rest:
        node = rest.pop()
        if node in nodes or node in known:
            continue
        nodes[node] = None
        for after, _ in node.next_functions:  # a comprehension would be a call for each node, in every step
            if after is not None:
                rest.append(after)
    return nodes


def reaches_all(begin: Node | None, wanted: Iterable[Node]) -> bool:
    """Return whether all wanted nodes are reached from one, which a search finds soon where they are near."""
    missing, seen = set(wanted), set[Node]()
    rest = deque([] if begin is None else [begin])
    while missing and rest:
        node = rest.popleft()
        if node in seen:
            continue
        seen.add(node)
        missing.discard(node)
        rest.extend(after for after, _ in node.next_functions if after is not None)
    return not missing


def is_end(node: Node) -> bool:
    """Return whether a node adds to the gradient of a leaf, such as a weight."""
    return node.name().endswith("AccumulateGrad")


def tensor_of(end: Any) -> Tensor:
    """Return the tensor to whose gradient a node adds."""
    tensor: Tensor = end.variable
    return tensor
