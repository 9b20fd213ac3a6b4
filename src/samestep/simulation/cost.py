"""Seconds of one op, alone on its stream: products by a roofline, other work by bytes, alpha-beta for a collective.

A layer's forward takes what its parts take one after the other, but never less than the host needs to start them:

    product      the longer of  waves x time of a tile   and   bytes / bandwidth        plus the shortest kernel
                 (where tiles and waves are not known, of a CPU, by what its shortest side lets it reach)
    attention    FLOPs / (peak x what a fused kernel reaches); a causal one does half of them
    other work   elements read and written / bandwidth
    the layer    (device^n + host^n)^(1/n), host = operations x kernel_launch_s          a soft maximum, n = 8

A product [m, k] x [k, n] is cut into tiles, one for a multiprocessor at a time, so that its time grows in steps of
`num_units` tiles; a tile pays for filling its pipeline too: (k + FILL) instead of k (Williams et al. 2009,
doi:10.1145/1498765.1498785, for the roofline; NVIDIA, Matrix Multiplication Background, for tiles and waves). The
backward of a product is two products, by the input and by the weight, of the same three numbers in other places; the
weight's gradient is added to what earlier micro-batches left. Before products in a dtype of one byte there is a cast.

With n ranks, S bytes of whole buffer, a link of latency a and bandwidth B (Thakur, Rabenseifner, Gropp 2005,
doi:10.1177/1094342005051521, rings):

    all_gather, reduce_scatter   (n-1) (a + S/(nB))      n-1 hops of one n-th of the buffer
    all_reduce                  2(n-1) (a + S/(nB))      one after the other; towards 2 S/B for many ranks
    all_to_all                   (n-1) (a + S/(nB))      every rank sends to every other, by its own port alone
    send                               a + S/B           a recv waits for it, and takes no time of its own
    reduce, broadcast            (n-1) (a + S/B)         naive: the root takes, or sends, whole buffers one by one

so reduce=root costs n times the bandwidth of a ring. Ranks count with tp inside, dp_shard and dp_replicate around it,
node by node:

    4 ranks a node, dp_replicate=2 dp_shard=4      node 0: 0 1 2 3   node 1: 4 5 6 7
    dp_shard      0 1 2 3 | 4 5 6 7                stride 1, in one node
    dp_replicate  0 4 | 1 5 | 2 6 | 3 7            stride dp_shard, across

A group on several nodes is hierarchical: its g members on one node leave it through g network ports at once, so
B = min(intra, g x inter), hops inside cost the inner latency and hops between nodes the outer, and where a ring has
more hops than a tree (NCCL's double binary trees and PAT, src/graph/tuning.cc), the tree's count.

An update reads and writes the master weights and Adam's two states, reads the gradient, and writes the weight's copy
in the compute dtype where there is one. What the code around gathers and scatters of units takes is counted there too.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Literal, NamedTuple

from samestep.errors import InputError
from samestep.hardware import Hardware, Link
from samestep.models.spec import Product
from samestep.program.ops import BYTES_OF, COMPUTE_DTYPE, TF32, Kind, Op
from samestep.program.program import Program
from samestep.program.step import StepSpec

UPDATE_PASSES = 7
"""Times an update goes over memory for one weight: weight, two states read and written, gradient read."""

REACHED = 0.88
"""What products of a training step reach of the best shape's rate. Fitted once, on the published record."""
ATTENTION_REACHED = 0.65
"""The same of a fused attention, forward and backward together. Fitted once, on the published record."""
TILES = ((256, 128, 1.0), (128, 128, 0.9), (128, 64, 0.75), (64, 64, 0.55))
"""Rows, columns, and what a multiprocessor reaches of its best in them."""
ALIGNED = ((64, 1.0), (8, 0.8), (1, 0.5))
"""What products reach whose rows start at 128 bytes, at 16 bytes, or anywhere (NVIDIA, Matrix Multiplication
Background, tensor core requirements; the parts are assumed)."""
NETWORK_REACHED = 0.75
"""What messages of a training step reach of a port's rate for very large ones. Fitted once, on the published record."""
FILL = 64
"""Steps along `inner` that a tile spends on filling its pipeline and writing its result."""
SPLIT = 1024
"""Steps along `inner` from which on it pays to share a tile."""
SHARPNESS = 8
"""Of the maximum of device and host: both are uneven, so neither hides the other wholly."""
ATTENTION_BACKWARD = 2.5
"""FLOPs of a fused attention's backward over its forward: it makes the scores once more (arXiv:2307.08691)."""
BACKWARD_MOVES = 1.75
"""Bytes that the backward of all else moves over those of its forward."""
BACKWARD_KERNELS = 2.2
"""Operations of a backward over those of its forward."""


def seconds(op: Op, program: Program, hardware: Hardware) -> float:
    """Price one op of the program.

    Raises:
        InputError: the hardware has no speed for the op's dtype.
    """
    if op.axis is not None:
        return _collective_s(op, program, hardware)
    if op.kind is Kind.UPDATE:
        moved = _update_bytes(program.step) / hardware.memory_bytes_per_s / hardware.memory_efficiency
        return (
            moved + hardware.host_step_s + (hardware.fsdp_unit_s * _handlings(program) if hardware.fsdp_unit_s else 0.0)
        )
    dtype = dtype_on(hardware, op.dtype)
    if op.flops:
        _peak(hardware, dtype)
    if op.layer is None:
        return op.flops / _peak(hardware, dtype) if op.flops else 0.0
    step = program.step
    layer = step.model.layers[op.layer]
    if not layer.products and not layer.moved_elements:
        return op.flops / _peak(hardware, dtype) if op.flops else 0.0
    work = _Work(layer.products, layer.moved_elements, layer.kernels, layer.backward_reads_weights)
    values = dtype if dtype == TF32 else step.compute_dtype  # products of two activations run in it too
    dtypes = _Dtypes(dtype if op.flops else values, values, step.master_dtype)
    is_whole = op.kind is not Kind.RECOMPUTE or step.layout.recompute == "full"
    part: Part = "all" if not step.splits_backward else "weights" if op.kind is Kind.WEIGHT else "inputs"
    return _layer_s(work, op.kind, is_whole, part, step.microbatch_samples, dtypes, hardware)


# -- compute -----------------------------------------------------------------------------------------------------------


class _Work(NamedTuple):
    """What a layer does, and no more, so that equal layers are priced once."""

    products: tuple[Product, ...]
    moved_elements: int
    kernels: int
    has_input_gradient: bool


Part = Literal["all", "inputs", "weights"]
"""Of a backward: what it computes, where the schedule takes the gradients of weights out of it."""


class _Dtypes(NamedTuple):
    """Of matrix products, of everything between them, of sums of gradients."""

    products: str
    values: str
    sums: str


@lru_cache(maxsize=2**16)
def _layer_s(
    work: _Work, kind: Kind, is_whole: bool, part: Part, samples: int, dtypes: _Dtypes, hardware: Hardware
) -> float:
    backward = kind in (Kind.BACKWARD, Kind.WEIGHT)
    products = work.products if is_whole else ()
    if kind is Kind.WEIGHT:
        products = tuple(product for product in products if product.is_deferrable)
        times = [_product_s(product, samples, True, part, work, dtypes, hardware) for product in products]
        return _soft_maximum(sum(times), len(products) * hardware.kernel_launch_s)
    times = [_product_s(product, samples, backward, part, work, dtypes, hardware) for product in products]
    moved = work.moved_elements * samples * BYTES_OF[dtypes.values] * (BACKWARD_MOVES if backward else 1.0)
    launched = max(work.kernels - (0 if is_whole else len(work.products)), 0) + _casts(products, dtypes)
    kernels = launched * (BACKWARD_KERNELS if backward else 1.0)
    others = max(kernels - len(times), 0)
    device_s = sum(times) + moved / _bandwidth(hardware) + others * hardware.kernel_s
    return _soft_maximum(device_s, kernels * hardware.kernel_launch_s)


def _casts(products: tuple[Product, ...], dtypes: _Dtypes) -> int:
    """Operations that make smaller dtypes of what is multiplied: the rows, and the weight of every expert."""
    if DTYPE_BYTES.get(dtypes.products, 8) >= BYTES_OF[dtypes.values]:
        return 0
    return sum(1 + product.groups for product in products if product.factors == "weight")


def _soft_maximum(first: float, second: float) -> float:
    larger, smaller = max(first, second), min(first, second)
    return larger * (1 + (smaller / larger) ** SHARPNESS) ** (1 / SHARPNESS) if larger else 0.0


def _product_s(
    product: Product, samples: int, backward: bool, part: Part, work: _Work, dtypes: _Dtypes, hardware: Hardware
) -> float:
    """Time of a product's forward, or of the products of its backward, or of a part of those."""
    if product.factors in ("attention", "causal"):
        return _attention_s(product, samples, backward, dtypes, hardware)
    if product.factors == "pair":
        m, k, n, count, groups = product.rows, product.inner, product.columns, product.count * samples, 1
    else:
        m, k, n, count, groups = product.rows * samples, product.inner, product.columns, product.count, product.groups
    # Rows dealt to experts make as many products, each with its own weight.
    m, count = -(-m // groups), count * groups
    dtype = dtypes.values if product.factors == "pair" else dtypes.products
    if not backward:
        return _matrix_s(m, k, n, count, dtype, dtypes, hardware, product.taps)
    has_inputs = work.has_input_gradient and part != "weights"
    total = _matrix_s(m, n, k, count, dtype, dtypes, hardware, given=product.taps) if has_inputs else 0.0
    if part == "inputs" and product.is_deferrable:
        return total
    if product.factors != "frozen":
        total += _matrix_s(k, m, n, count, dtype, dtypes, hardware, product.taps)
    if product.factors == "weight":
        total += 2 * k * n * count * BYTES_OF[dtypes.sums] / _bandwidth(hardware)
    return total


def _attention_s(product: Product, samples: int, backward: bool, dtypes: _Dtypes, hardware: Hardware) -> float:
    flops = product.flops * samples * (0.5 if product.factors == "causal" else 1.0)
    reached = hardware.efficiency.get("attention")
    peak = _peak(hardware, dtypes.values) * (ATTENTION_REACHED * reached if reached else 1.0)
    # queries, keys, values and the result, once
    elements = product.count * (product.rows + product.columns) * product.inner * samples
    forward_s = max(flops / peak, elements * BYTES_OF[dtypes.values] / _bandwidth(hardware))
    return hardware.kernel_s + forward_s * (ATTENTION_BACKWARD if backward else 1.0)


@lru_cache(maxsize=2**16)
def _matrix_s(
    m: int, k: int, n: int, count: int, dtype: str, dtypes: _Dtypes, hardware: Hardware, taps: int = 1, given: int = 1
) -> float:
    """Time of `count` equal products [m, k] x [k, n]; `taps` elements of the first factor are one, and `given` of the result."""
    size = DTYPE_BYTES.get(dtype, 0) or BYTES_OF[dtype]
    kept = BYTES_OF[dtypes.values]
    rate = _peak(hardware, dtype)
    if dtype in hardware.efficiency:
        aligned = next(part for multiple, part in ALIGNED if k % multiple == 0 and n % multiple == 0)
        rate *= REACHED * hardware.efficiency[dtype] * aligned
    rate *= _reached_by(min(m, k, n), hardware.efficiency_by_shortest_side.get(dtype, {}))
    compute_s = 2.0 * m * k * n * count / rate
    if hardware.num_units:
        compute_s = min(
            _waves(m, n, count, rows, columns, k, hardware.num_units) * 2.0 * rows * columns / reached
            for rows, columns, reached in ((r, c, part * rate / hardware.num_units) for r, c, part in TILES)
        )
    moved = count * (size * (m * k / taps + k * n) + kept * m * n / given)
    # The kernel before it writes what it gives once more in the smaller dtype, as it is and transposed.
    cast_s = count * m * k * 2 * size / _bandwidth(hardware) if size < kept else 0.0
    return max(compute_s, moved / _bandwidth(hardware)) + cast_s + hardware.kernel_s


def _reached_by(side: int, known: Mapping[int, float]) -> float:
    """Part of the best rate that a product reaches whose shortest side is so long."""
    below = max((one for one in known if one <= side), default=0)
    above = min((one for one in known if one >= side), default=0)
    if not above:
        return known[below] if below else 1.0
    low = known.get(below, 0.0)  # nothing for a side of no length
    return low + (known[above] - low) * (side - below) / max(above - below, 1)


def _waves(m: int, n: int, count: int, rows: int, columns: int, k: int, num_units: int) -> float:
    """Steps along `inner` that all multiprocessors take on their tiles, round by round.

    Where there are fewer tiles than multiprocessors, several share one: each takes a part of its steps.
    """
    tiles = count * math.ceil(m / rows) * math.ceil(n / columns)
    shared = max(1, min(num_units // tiles, k // SPLIT))
    return max(math.ceil(tiles * shared / num_units), 1) * (math.ceil(k / shared) + FILL)


DTYPE_BYTES = {"float8": 1, "float4": 1}
"""Of dtypes that only products run in."""


def dtype_on(hardware: Hardware, dtype: str) -> str:
    """Return what a dtype is on hardware that may have no TensorFloat-32."""
    return "float32" if dtype == TF32 and TF32 not in hardware.flops_per_s else dtype


def _bandwidth(hardware: Hardware) -> float:
    return hardware.memory_bytes_per_s * hardware.memory_efficiency


def _peak(hardware: Hardware, dtype: str) -> float:
    if dtype not in hardware.flops_per_s:
        known = ", ".join(hardware.flops_per_s)
        words = [word for word, of_word in reversed(COMPUTE_DTYPE.items()) if of_word in hardware.flops_per_s]
        works = f": numerics.precision={' or '.join(words)} works" if words else ""
        raise InputError(f"hardware {hardware.name} has no flops_per_s for {dtype}; it has {known}{works}")
    return hardware.flops_per_s[dtype]


IN_SWITCH = 4
"""More ranks than so many let the switch add up (measured: H200 and B200, ml-engineering network/README.md)."""

RINGS = 8
"""Ranks up to which a ring is taken; NCCL has trees, and PAT for all_gather and reduce_scatter, above."""

# -- communication -----------------------------------------------------------------------------------------------------


class GroupShape(NamedTuple):
    """Where the ranks of a group lie: on `nodes` nodes, at least `inside` of them on each."""

    num_ranks: int
    nodes: int = 1
    inside: int = 1


def _collective_s(op: Op, program: Program, hardware: Hardware) -> float:
    if op.kind is Kind.RECV:
        return 0.0
    axis = op.axis or ""
    return collective_s(op.kind, op.size_bytes, group_of(axis, program.axes[axis], program.step, hardware), hardware)


@lru_cache(maxsize=2**16)
def collective_s(kind: Kind, size_bytes: int, group: GroupShape, hardware: Hardware) -> float:
    """Time of one collective over a group."""
    link = _link(group, kind, hardware)
    if kind is Kind.SEND:
        link = hardware.intra if group.nodes == 1 else hardware.inter
        return link.collective_s + link.latency_s + size_bytes / link.bytes_per_s
    if group.num_ranks == 1:
        return 0.0
    hops = group.num_ranks - 1
    if kind in (Kind.REDUCE, Kind.BROADCAST):
        far = hardware.intra if group.nodes == 1 else hardware.intra.slower(hardware.inter)
        return far.collective_s + hops * (far.latency_s + size_bytes / far.bytes_per_s)
    if kind is Kind.ALL_TO_ALL:
        return link.collective_s + _exchange_s(size_bytes, group, hardware)
    ways = 2 if kind is Kind.ALL_REDUCE else 1
    # Of a ring through N nodes N hops leave a node; with one rank on each node all but none stay inside.
    between = group.nodes - 1
    ring_s = between * hardware.inter.latency_s + (hops - between) * hardware.intra.latency_s
    tree_s = math.log2(group.nodes) * hardware.inter.latency_s + math.log2(group.inside) * hardware.intra.latency_s
    waiting_s = min(ring_s, tree_s) if group.num_ranks > RINGS else ring_s
    return link.collective_s + ways * (waiting_s + hops / group.num_ranks * size_bytes / link.bytes_per_s)


def _exchange_s(size_bytes: int, group: GroupShape, hardware: Hardware) -> float:
    """Every rank sends each other one an n-th: to those of its node, and at the same time to the others by its own port."""
    near, far = hardware.intra.among(group.inside), hardware.inter
    part = size_bytes / group.num_ranks
    away = group.num_ranks - group.inside if group.nodes > 1 else 0
    here = group.num_ranks - 1 - away
    near_s = here * (near.latency_s + part / near.bytes_per_s)
    return max(near_s, away * part / (far.bytes_per_s * _reached(hardware)) + far.latency_s * bool(away))


def _link(group: GroupShape, kind: Kind, hardware: Hardware) -> Link:
    """What a ring of the group runs over: every rank on a node brings its own port to the network."""
    near = hardware.intra.among(group.inside)
    if kind is Kind.ALL_REDUCE and near.all_reduce_bytes_per_s and group.inside > IN_SWITCH:
        near = replace(near, bytes_per_s=near.all_reduce_bytes_per_s)
    if group.nodes == 1:
        return near
    return Link(
        latency_s=hardware.inter.latency_s,
        bytes_per_s=min(near.bytes_per_s, hardware.inter.bytes_per_s * group.inside * _reached(hardware)),
        collective_s=hardware.inter.collective_s,
    )


def _reached(hardware: Hardware) -> float:
    return NETWORK_REACHED if hardware.efficiency else 1.0  # a profile without efficiencies has achieved rates


def group_of(axis: str, size: int, step: StepSpec, hardware: Hardware) -> GroupShape:
    """Return how the ranks of one group of an axis, so many of them, lie on the nodes."""
    per_node, stride = hardware.devices_per_node, step.ranks.stride(axis)
    if axis == "pp":
        # A stage passes on to the next one, which is most often on the same node where several stages share it.
        crosses = step.layout.world_size > per_node and (step.stage + 1) * stride % per_node == 0
        return GroupShape(2, 2 if crosses or stride >= per_node else 1)
    if step.layout.world_size <= per_node or per_node % (stride * size) == 0:
        return GroupShape(size, 1, size)
    inside = max(1, per_node // stride)
    nodes = max(2, -(-size // inside))
    return GroupShape(size, nodes, max(1, size // nodes))


# -- update ------------------------------------------------------------------------------------------------------------


def _update_bytes(step: StepSpec) -> int:
    """Bytes that the optimizer of one rank touches: of all weights, or of its share of them."""
    master = BYTES_OF[step.master_dtype]
    touched = 0
    for param in step.model.params:
        if param.trainable:
            copied = step.zero < 2 and step.working_dtype(param) != step.master_dtype
            held = param.numel * (step.layout.num_shards // step.holding(param).num_shards)
            touched += held * (UPDATE_PASSES * master + copied * BYTES_OF[step.compute_dtype])
    return -(-touched // step.layout.num_shards)  # 1 where nothing is sharded


def _handlings(program: Program) -> int:
    """Count the gathers and scatters of units in a step."""
    tasks = Counter(task.body for task in program.tasks)
    return sum(tasks[key] * sum(op.implied for op in ops) for key, ops in program.bodies.items())
