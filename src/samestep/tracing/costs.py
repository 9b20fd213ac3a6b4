"""The costs of a traced forward, a pure function of its events: what each region computes, passes on and keeps.

The operations from one call of a top-most module with weights to the next are a region. One region makes a storage, and others read
it, return it or keep it for the backward. FLOPs are torch's own count (`torch.utils.flop_counter`): 2 for a multiplication and an addition.

Operations other than matrix products read and write elements one by one, and in fused groups. A compiler joins operations that pass on
each element, or reduce rows, into one kernel, which reads what the group is given and writes what others read; what is made and read
within it stays in registers. Matrix products, attention, and what moves rows by values or draws random numbers stand alone. A group is
the operations of one layer that

    make and read each other's results, directly or by others of the group
    come after equally many products on the longest way from the inputs, so that no way leaves the group and comes back

as a compiler whose cost of a kernel is the memory that it moves would choose them (inductor: Ansel et al. 2024, doi:10.1145/3620665.3640366, section 4).
What others read is written once; what the backward alone reads is not, because a graph computes it again from what the group is given.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from samestep.building.families import GROUPED_FALLBACK
from samestep.models.layer_parts import Cutting, Exchange, Factors, OtherWork, Product
from samestep.tracing.meta_tensors import GROUPED_PRODUCTS
from samestep.tracing.operations import SavedTensor, Work

_PLAIN = (torch.ops.aten.mm, torch.ops.aten.addmm)
_BATCHED = (torch.ops.aten.bmm, torch.ops.aten.baddbmm)
_ADDING = (torch.ops.aten.addmm, torch.ops.aten.baddbmm)
"""Products whose first operand is the tensor they are added to."""


def flops_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], outcome: Any) -> int | None:
    """Return the FLOPs of a matrix product or convolution; None for other operations."""
    if _is_grouped(func):
        return int(2 * outcome.numel() * args[0].shape[-1])
    formula = flop_registry.get(func.overloadpacket)
    return None if formula is None else int(formula(*args, **kwargs, out_val=outcome))


def factors_of(func: Any, args: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
    """Return the two tensors that a product multiplies."""
    left, right = args[1:3] if func.overloadpacket in _ADDING else args[:2]
    return left, right


def product_of(
    func: Any, args: tuple[Any, ...], outcome: Tensor, flops: int, *, factors: Factors, cut: Cutting, owner: str
) -> Product:
    """Return a product with its sizes; one of another kind has its FLOPs alone."""
    product = functools.partial(Product, factors=factors, cut=cut, owner=owner)
    left, right = factors_of(func, args)
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
        channels_first = left.dim() == 4 and not left.is_contiguous(memory_format=torch.channels_last)
        return product(rows=rows, inner=inner, columns=columns, count=count, taps=taps, channels_first=channels_first)
    if _is_grouped(func):
        rows, groups = left.shape[0], right.shape[0]
        return product(rows=rows, inner=left.shape[1], columns=right.shape[2], groups=groups)
    return product(rows=max(flops // 2, 1), inner=1, columns=1)


def _is_grouped(func: Any) -> bool:
    """Return whether an operation multiplies rows with the matrix of their group."""
    return func in GROUPED_PRODUCTS or func._schema.name == GROUPED_FALLBACK


BY_COLUMNS = ("column", "qkv", "gather", "vocab")
"""The cut styles that leave a rank some of the columns of a product, and whose input is copied: an embedding takes tokens, without gradients."""


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
        return "inner" if style == "row" else "columns" if style in BY_COLUMNS else ""

    def follow(self, read: Set[int], results: Set[int], product: Product | None) -> bool:
        """Follow an operation to the storages that it makes; return whether its work is cut."""
        is_cut = product.cut in ("columns", "count") if product else not self.storages.isdisjoint(read)
        if is_cut and not (product and self.styles.get(product.owner) == "gather"):
            self.storages |= results
        return is_cut


_COPIES = frozenset(
    ("_to_copy", "cat", "clone", "constant_pad_nd", "copy_", "fill_", "full_like", "ones_like", "zeros_like")
)
_OF_DIMS = frozenset(("amax", "amin", "linalg_vector_norm", "logsumexp", "mean", "std", "sum", "var", "var_mean"))
"""Reductions whose second argument, or third, says over which dimensions."""
_OF_ROWS = frozenset(("_fused_rms_norm", "_log_softmax", "_softmax", "native_layer_norm"))


@dataclass(slots=True)
class Region:
    """The operations between the entry of one top-most module with weights and the next such entry."""

    path: str
    """Path of the module; empty before the first."""
    flops: int = 0
    products: list[Product] = field(default_factory=list)
    repeated: int = 0
    """Number of its products behind which autograd keeps something."""
    read: set[int] = field(default_factory=set)
    results: set[int] = field(default_factory=set)
    """Storages written by matrix products, convolutions and attention."""


@dataclass(frozen=True, slots=True)
class Costs:
    """The costs of a forward: its regions by name, and the regions that make, read and keep each storage."""

    regions: dict[str, Region]
    makers: dict[int, str] = field(default_factory=dict)
    readers: dict[int, list[str]] = field(default_factory=dict)
    savers: dict[int, str] = field(default_factory=dict)
    norm_savers: dict[int, str] = field(default_factory=dict)
    """Storages that norms keep, which compute in master precision, with their regions."""
    owners: dict[int, str] = field(default_factory=dict)
    """Path of the module whose code ran when autograd kept a storage first."""
    saves: Counter[int] = field(default_factory=Counter)
    """Number of times that each storage is kept."""
    moved: MovedElements = field(default_factory=lambda: MovedElements())

    @property
    def saved(self) -> dict[int, str]:
        """All storages that autograd keeps, with the regions that keep them first."""
        return self.norm_savers | self.savers


def costs_of(
    events: Iterable[Work | SavedTensor], regions: Mapping[str, str], weights: Collection[int], norms: Collection[str]
) -> Costs:
    """Return the costs of a forward.

    `regions` are the paths of its regions by name, `weights` the storages of weights and buffers, and `norms` the paths of norms.
    """
    costs = Costs({name: Region(path) for name, path in regions.items()})
    for event in events:
        if isinstance(event, SavedTensor):
            _add_saved(costs, event, norms)
        else:
            _add_work(costs, event, weights)
    return costs


def _add_saved(costs: Costs, event: SavedTensor, norms: Collection[str]) -> None:
    region, key = costs.regions[event.region], event.storage
    if event.is_inside:
        region.repeated = len(region.products)
    if key is not None:
        savers = costs.norm_savers if event.owner in norms else costs.savers
        savers.setdefault(key, event.region)
        costs.owners.setdefault(key, event.owner)
        costs.saves[key] += 1


def _add_work(costs: Costs, work: Work, weights: Collection[int]) -> None:
    region = costs.regions[work.region]
    read, written = ({key for key, _ in elements} for elements in (work.reads, work.writes))
    for key in read.difference(weights, region.read):
        costs.readers.setdefault(key, []).append(work.region)
    region.read |= read
    for key in written - read:  # a view, or a tensor written in place, was made earlier
        costs.makers.setdefault(key, work.region)
    if work.flops is not None:
        region.flops += work.flops
        region.results |= written
    if work.product is not None:
        region.products.append(work.product)
    if not work.is_view:
        costs.moved.ran(work)


class MovedElements:
    """The operations of a traced forward in their order, but for views."""

    def __init__(self) -> None:
        self._works = list[Work]()
        self._depth_of = list[int]()
        """Products on the longest way to each operation; -1 if it joins no group."""
        self._depths = dict[int, int]()
        """Products on the longest way to each storage."""
        self._readers = dict[int, list[int]]()
        """The numbers of the operations that read each storage."""

    def ran(self, work: Work) -> None:
        """Add an operation."""
        depth = max((self._depths.get(key, 0) for key, _ in work.reads), default=0)
        for key, _ in work.reads:
            self._readers.setdefault(key, []).append(len(self._works))
        for key, _ in work.writes:
            self._depths[key] = depth + (work.kind != "fusible")
        self._works.append(work)
        self._depth_of.append(depth if work.kind == "fusible" else -1)

    def of(
        self, regions: Collection[str], sizes: Mapping[int, int], returned: Collection[int]
    ) -> tuple[OtherWork, OtherWork]:
        """Return the work of the regions of a layer, matrix products among its kernels, and the part of it that fused groups spare.

        `sizes` are the elements of each storage, and `returned` those that the model returns.
        """
        works = {number: work for number, work in enumerate(self._works) if work.region in regions}
        others = [work for work in works.values() if work.kind != "product"]
        groups: dict[int, list[int]] = {}
        for number, group in self._groups_of(works).items():
            groups.setdefault(group, []).append(number)
        fusible = fusible_cut = 0
        for numbers in groups.values():
            apart, apart_cut = _moved([works[number] for number in numbers])
            fused, fused_cut = self._fused(numbers, sizes, returned)
            fusible, fusible_cut = fusible + apart - fused, fusible_cut + apart_cut - fused_cut
        spared = sum(len(numbers) - 1 for numbers in groups.values())
        of_channels = sum(_moved([work])[0] // work.channels for work in others if work.channels)
        return OtherWork(*_moved(others), len(works), of_channels), OtherWork(fusible, fusible_cut, spared)

    def _fused(self, numbers: list[int], sizes: Mapping[int, int], returned: Collection[int]) -> tuple[int, int]:
        """Return the elements that a group reads and writes as one kernel, and those of them that a tensor cut divides."""
        inside, written = set(numbers), set[int]()
        reads, writes, cut = Counter[int](), Counter[int](), dict[int, bool]()
        for number in numbers:
            work = self._works[number]
            read = {key for key, _ in work.reads}
            for key, elements in work.reads:
                if key not in written:
                    reads[key] += elements
                    cut.setdefault(key, work.is_cut)
            for key, elements in work.writes:
                is_changed = key in read and key not in written  # in place, and it is there after the group
                if is_changed or key in returned or not inside.issuperset(self._readers.get(key, ())):
                    writes[key] = max(writes[key], elements)
                    cut.setdefault(key, work.is_cut)
                written.add(key)
        parts = [
            (key, min(sizes.get(key, elements), elements)) for some in (reads, writes) for key, elements in some.items()
        ]
        return sum(elements for _, elements in parts), sum(elements for key, elements in parts if cut[key])

    def _groups_of(self, works: Mapping[int, Work]) -> dict[int, int]:
        """Return for each operation that joins a group, by number, the least number of its group."""
        group: dict[int, int] = {}

        def first(number: int) -> int:
            while group[number] != number:
                number = group[number]
            return number

        makers: dict[int, int] = {}
        for number, work in works.items():
            if self._depth_of[number] >= 0:
                group[number] = number
                for key, _ in work.reads:
                    maker = makers.get(key)
                    if maker is not None and self._depth_of[maker] == self._depth_of[number]:
                        joined = sorted((first(maker), first(number)))
                        group[joined[1]] = joined[0]
            for key, _ in work.writes:
                makers[key] = number
        return {number: first(number) for number in group}


def _moved(works: Collection[Work]) -> tuple[int, int]:
    """Return the elements that operations read and write one by one, and those of them that a tensor cut divides."""
    each = [(sum(count for _, count in (*work.reads, *work.writes)), work.is_cut) for work in works]
    return sum(count for count, _ in each), sum(count for count, is_cut in each if is_cut)


def is_fusible(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Return whether a compiler joins an operation of torch with others: it works on each element, or reduces along rows."""
    name = func.overloadpacket.__name__
    if torch.Tag.nondeterministic_seeded in func.tags:
        return False
    if torch.Tag.pointwise in func.tags or name in _COPIES or name in _OF_ROWS:
        return True
    if name not in _OF_DIMS or not args:
        return False
    dims = kwargs.get(
        "dim", args[2] if name == "linalg_vector_norm" and len(args) > 2 else args[1] if len(args) > 1 else None
    )
    dims = (dims,) if isinstance(dims, int) else dims
    return bool(dims) and isinstance(dims, list | tuple) and any(dim in (-1, args[0].dim() - 1) for dim in dims)


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
