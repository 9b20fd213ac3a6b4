"""The table of what operations do with dimensions, held against operations on real values: what it claims, they do."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map_only

from samestep.independence.dimension_maps import MAPS, Blocks, operands_of

aten = torch.ops.aten
_drawn = torch.Generator().manual_seed(11)


def x(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=_drawn)


MASK = torch.tensor([[True, False, True], [False, True, True]])
PLACES = torch.tensor([2, 0, 1])
CONVOLVED = ([1], [0], [1])  # stride, padding, dilation
CALLS: dict[str, tuple[Any, ...]] = {
    "sum": (aten.add.Tensor, x(2, 3, 4), x(3, 1)),
    "where": (aten.where.self, MASK, x(2, 3), x(1, 3)),
    "copy": (aten.copy_.default, x(2, 3), x(3)),
    "fill": (aten.masked_fill.Scalar, x(2, 3), MASK, 0.0),
    "bucketize": (aten.bucketize.Tensor, x(2, 3), torch.tensor([-1.0, 0.0, 0.5], dtype=torch.float64)),
    "tril": (aten.tril.default, x(2, 3, 4)),
    "mean": (aten.mean.dim, x(2, 3, 4), [1]),
    "mean kept": (aten.mean.dim, x(2, 3, 4), [-1], True),
    "mean of two": (aten.mean.dim, x(2, 3, 4), [0, 2]),
    "mean of all": (aten.mean.default, x(2, 3)),
    "softmax": (aten._softmax.default, x(2, 3, 4), 1, False),
    "topk": (aten.topk.default, x(2, 3, 4), 2, 1),
    "sort": (aten.sort.default, x(2, 3, 4), 0),
    "cumsum": (aten.cumsum.default, x(2, 3), 1),
    "layer norm": (aten.native_layer_norm.default, x(2, 3, 4), [4], x(4), x(4), 1e-5),
    "likelihoods": (aten.nll_loss_forward.default, x(3, 4), torch.tensor([3, 0, 1]), x(4), 0, -100),
    "likelihoods of pixels": (aten.nll_loss2d_forward.default, x(2, 3, 1, 2), torch.tensor([[[2, 0]], [[1, 1]]]), None, 0, -100),
    "mean of likelihoods": (aten.nll_loss_forward.default, x(3, 4), torch.tensor([3, 0, 1]), None, 1, -100),
    "pool": (aten.avg_pool2d.default, x(2, 3, 4, 4), [2, 2]),
    "mm": (aten.mm.default, x(2, 3), x(3, 4)),
    "bmm": (aten.bmm.default, x(2, 3, 4), x(2, 4, 2)),
    "mv": (aten.mv.default, x(2, 3), x(3)),
    "dot": (aten.dot.default, x(3), x(3)),
    "addmm": (aten.addmm.default, x(4), x(2, 3), x(3, 4)),
    "baddbmm": (aten.baddbmm.default, x(2, 1, 2), x(2, 3, 4), x(2, 4, 2)),
    "addmv": (aten.addmv.default, x(2), x(2, 3), x(3)),
    "convolution": (aten.convolution.default, x(2, 4, 5), x(6, 4, 3), x(6), *CONVOLVED, False, [0], 1),
    "convolution of points": (aten.convolution.default, x(2, 4, 5), x(6, 4, 1), x(6), *CONVOLVED, False, [0], 1),
    "convolution of groups": (aten.convolution.default, x(2, 4, 5), x(6, 2, 3), x(6), *CONVOLVED, False, [0], 2),
    "transposed convolution": (aten.convolution.default, x(2, 4, 5), x(4, 6, 3), x(6), *CONVOLVED, True, [0], 1),
    "transposed convolution of groups": (aten.convolution.default, x(2, 4, 5), x(4, 3, 3), x(6), *CONVOLVED, True, [0], 2),
    "embedding": (aten.embedding.default, x(5, 3), PLACES),
    "bags": (aten._embedding_bag.default, x(5, 3), torch.tensor([2, 0, 1, 4, 3, 2]), torch.tensor([0, 2, 4])),
    "weighted bags": (aten._embedding_bag.default, x(5, 3), torch.tensor([2, 0, 1, 4]), torch.tensor([0, 2]), False, 0, False, x(4)),
    "batch norm": (aten.native_batch_norm.default, x(2, 3, 4), x(3), x(3), None, None, True, 0.1, 1e-5),
    "batch norm at rest": (aten.native_batch_norm.default, x(2, 3, 4), x(3), x(3), x(3), x(3).exp(), False, 0.1, 1e-5),
    "group norm": (aten.native_group_norm.default, x(2, 4, 3), x(4), x(4), 2, 4, 3, 2, 1e-5),
    "gather": (aten.gather.default, x(2, 3), 1, torch.tensor([[2, 0], [1, 1]])),
    "scatter": (aten.scatter.src, x(2, 3), 1, torch.tensor([[2, 0], [1, 2]]), x(2, 2)),
    "cat": (aten.cat.default, [x(2, 3), x(2, 1)], 1),
    "stack": (aten.stack.default, [x(2, 3), x(2, 3)], 1),
    "pad": (aten.constant_pad_nd.default, x(2, 3, 4), [1, 0, 0, 2]),
    "roll": (aten.roll.default, x(2, 3), [1], [1]),
    "roll of all": (aten.roll.default, x(2, 3), [1]),
    "flip": (aten.flip.default, x(2, 3), [0]),
    "repeat": (aten.repeat.default, x(2, 3), [2, 1, 3]),
    "glu": (aten.glu.default, x(2, 4, 3), 1),
    "index": (aten.index.Tensor, x(2, 3, 4), [None, PLACES]),
    "index by a matrix": (aten.index.Tensor, x(3, 2, 4), [torch.tensor([[0, 2], [1, 1]])]),
    "index twice": (aten.index.Tensor, x(4, 2, 3, 5), [None, torch.tensor([1, 0]), torch.tensor([[2], [1]])]),
    "index apart": (aten.index.Tensor, x(2, 4, 3, 5), [torch.tensor([1, 0]), None, torch.tensor([2, 1])]),
    "index by a mask": (aten.index.Tensor, x(2, 3, 4), [MASK]),
    "index by a mask, second": (aten.index.Tensor, x(4, 2, 3), [None, MASK]),
    "masked_select": (aten.masked_select.default, x(2, 3), MASK),
    "gather of few": (aten.gather.default, x(3, 4, 2), -2, torch.tensor([[[3, 0], [1, 1]], [[0, 2], [3, 3]]])),
    "gather of a table": (aten.gather.default, x(5), -1, PLACES),
    "take": (aten.take.default, x(2, 3), torch.tensor([[5, 0, 3], [1, 1, 2]])),
    "index_select": (aten.index_select.default, x(2, 3, 4), 1, PLACES),
    "put": (aten.index_put.default, x(2, 3, 4), [None, PLACES[:2]], x(2, 4)),
    "put twice": (aten.index_put.default, x(2, 3, 4), [torch.tensor([1]), PLACES[:2]], x(2, 1)),
    "put apart": (aten.index_put.default, x(2, 4, 3), [torch.tensor([1]), None, PLACES[:2]], x(2, 4)),
    "put by a mask": (aten.index_put.default, x(2, 3, 4), [MASK], x(4)),
    "put by a mask, second": (aten.index_put.default, x(5, 2, 3), [None, MASK], x(5, 1)),
    "index_add": (aten.index_add.default, x(2, 3, 4), 1, PLACES[:2], x(2, 2, 4)),
    "decomposition": (aten.linalg_inv_ex.default, x(2, 3, 3)),
}  # fmt: skip


def _results(func: Any, args: Any) -> tuple[Any, list[Tensor]]:
    """Return copies of the arguments, and what the operation returns of them."""
    own = tree_map_only(Tensor, Tensor.clone, args)
    return own, [one for one in tree_flatten(func(*own))[0] if isinstance(one, Tensor) and one.numel()]


def _changed(tensor: Tensor, dim: int, position: int) -> Tensor:
    """Return a tensor with other values at one position along a dimension."""
    other = tensor.clone()
    part = other.select(dim, position)
    if tensor.dtype is torch.bool:
        part.logical_not_()
    else:
        part.copy_(x(*part.shape) * 3 if tensor.is_floating_point() else (part + 1) % (tensor.max() + 1))
    return other


def _claims(func: Any, args: Any) -> Iterator[tuple[int, int, int, int, int, range]]:
    """Yield every operand, one of its positions along a dimension, a result, and the positions there that may change."""
    own, results = _results(func, args)
    given = [one for one in tree_flatten(own)[0] if isinstance(one, Tensor)]
    found = operands_of(SimpleNamespace(func=func, args=tuple(own), kwargs={}, results=results, given=given))
    assert found is not None
    numbers = {id(one): at for at, one in enumerate(given)}
    for number, (result, operands) in enumerate(zip(results, found, strict=False)):
        for tensor, dims in operands:
            for dim, to in enumerate(dims):
                at, each, gives = to if isinstance(to, Blocks) else (to, 1, 1)
                if at < 0 or tensor.shape[dim] * gives != result.shape[at] * each:
                    continue  # nothing is claimed, or it is broadcast
                for position in range(tensor.shape[dim]):
                    may_change = range(position // each * gives, (position // each + 1) * gives)
                    yield numbers[id(tensor)], dim, position, number, at, may_change


@pytest.mark.parametrize("name", CALLS)
def test_a_position_changes_those_that_the_table_names(name: str) -> None:
    func, *args = CALLS[name]
    _, before = _results(func, args)
    num_claims = 0
    for operand, dim, position, result, at, may_change in _claims(func, args):
        leaves, tree = tree_flatten(args)
        tensors = [number for number, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        leaves[tensors[operand]] = _changed(leaves[tensors[operand]], dim, position)
        _, others = _results(func, torch.utils._pytree.tree_unflatten(leaves, tree))
        differs = (others[result] != before[result]).movedim(at, 0)
        changed = differs.reshape(len(differs), -1).any(1).nonzero().flatten().tolist()
        assert {*changed} <= {*may_change}, (operand, dim, at)
        num_claims += 1
    assert num_claims or name in ("mean of all", "mean of likelihoods", "dot", "roll of all", "masked_select")


def test_the_calls_are_of_every_kind_of_map() -> None:
    tried = {MAPS[func.overloadpacket] for func, *_ in CALLS.values() if func.overloadpacket in MAPS}
    assert tried == {*MAPS.values()}
