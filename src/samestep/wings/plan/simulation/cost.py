"""The cost of one op in seconds, alone on its stream: a roofline for products, bytes for other work; collectives are in
`collectives.py`.

A layer's forward takes the sum of its parts, but not less than the host needs to launch them:

    product      max(waves x time of a tile, bytes / bandwidth) + kernel_s
                 (without num_units, as on a CPU, FLOPs / the rate that its shortest side allows, instead of waves)
    attention    keys that the tiles of a fused kernel visit, at its rate (`kernel_rates.py`)
    other work   (bytes / bandwidth, instructions / rate) as the sides of a right angle: elements read and written x ISSUED instructions
    the layer    (device^n + host^n)^(1/n), host = operations x kernel_launch_s          a soft maximum, n = 8
                 (a collective in it takes the host as long as COLLECTIVE_STARTS operations)
    in a graph   without what fused groups spare of the elements and operations (`run.compile`, `LayerSpec.fusible.elements`);
                 the host starts the graph itself too, GRAPH_STARTS

A product [m, k] x [k, n] is divided into tiles (`kernel_rates.py`), one on each multiprocessor at a time, so its time grows in steps of `num_units`
tiles; a tile also fills its pipeline: k + FILL steps instead of k (Williams et al. 2009, doi:10.1145/1498765.1498785, for the
roofline; NVIDIA, Matrix Multiplication Background, for tiles and waves). The backward of a product is two products, for the input
and for the weight, with m, k and n permuted; the weight's gradient is added to that of earlier micro-batches. Factors of a product
in a one-byte dtype are cast first.

A sum of an input's gradient (`Op.beside`) runs beside the gradients of the weights that are given the input, which are part of
their layer's backward: its time is what is left of it, and by how much it slows them.

An update reads and writes the master weights and Adam's two states, reads the gradient, and writes the weight's copy in the compute
dtype if there is one; under `offload` gradients and weights cross the link to the host, whose memory is slower. The time of the
code around gathers and scatters of units is added to the update.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from functools import lru_cache
from typing import Literal, NamedTuple

from samestep.errors import InputError
from samestep.hardware import Hardware
from samestep.layout import Layout
from samestep.models.layer_parts import Product
from samestep.models.layer_spec import LayerSpec
from samestep.models.spec import ModelSpec, cache_by_model
from samestep.program.codecs import CODECS, PLAIN
from samestep.program.holding import SHARDS
from samestep.program.ops import BYTES_OF, COMPUTE_DTYPE, COPIES, TF32, Op, OpKind
from samestep.program.program import Program
from samestep.program.repeated_products import repeated_products
from samestep.program.step import StepSpec
from samestep.wings.plan.simulation import kernel_rates
from samestep.wings.plan.simulation.collectives import collective_s, group_of
from samestep.wings.plan.simulation.kernel_rates import aligned, by_shortest_side, tiled_s

CODING_PASSES = 4
"""Elements that a codec reads or writes for one that it encodes: gradient, what was lost before, what is lost now."""
FACTOR_PASSES = 2
"""Reads and writes of a matrix for each of its four products with a factor, those of the sum with the lost part included."""
UNPACKED_BYTES = 21
"""Bytes that are read or written to make the value of an element in 4 bits: code, index, level, product with the scale, cast."""
UPDATE_PASSES = 7
"""Elements that an update reads or writes for one weight: weight and two states read and written, gradient read."""
AVERAGE_PASSES = 3
"""Elements that are read or written to average one weight: average read and written, weight read."""

REACHED = 0.88
"""Fraction of the best shape's rate that products of a training step reach. Fitted once, on the published record."""
ATTENTION_REACHED = 0.9
"""The same fraction for fused attention, of what its kernels reach alone. Fitted once, on the published record."""
WINOGRAD_TAPS, WINOGRAD = 9, 2.25
"""Taps of a convolution that float32 computes with fewer products, and how many times fewer: 36 for 16 (Lavin and Gray 2015, arXiv:1509.09308)."""
REORDERED = 2
"""Times that a convolution's tensors are read or written more where their channels come first: tensor cores compute with channels last
(NVIDIA, Convolutional Layers User's Guide), so cuDNN copies each before or after. Timm's ResNet-50 in AMP on an RTX 3090 takes 0.39 ms an
image longer so; these copies alone take 0.33."""
IMAGE_CHANNELS = 4
"""Channels up to which the input of a convolution is an image, which has no gradient."""
DIRECT = 0.25
"""Part of float32's rate that a convolution in groups reaches without tensor cores, for which few channels of a group leave a tile empty."""
ISSUED = 8
"""Instructions that an elementwise kernel issues for each element that it reads or writes: conversion, index, arithmetic. They bound kernels in
16 bits on devices whose memory is fast for their clock: 11 are issued in the time of an element on A100 and B200, 49 on RTX A6000. Fitted on
one half of the published sources, confirmed on the other."""
BLOCK_ELEMENTS_PER_S = 512 * 4 / 600e-9
"""Elements that one block of threads reads or writes a second: 512 threads (aten/src/ATen/native/cuda/Normalization.cuh) have four elements
on their way each, for the 600 ns that device memory takes to answer. Batch norms with channels first have one block for each channel."""
AT_ONCE = 1e30
"""Bytes a second of a memory for which nothing waits."""
SHARPNESS = 8
"""Exponent of the soft maximum of device and host: both are uneven, so neither hides the other entirely."""
BACKWARD_MOVES = 1.75
"""Ratio of bytes moved by the backward of other work to its forward."""
CHUNK_KERNELS = 10
"""Operations that each further chunk of logits adds to the forward of a head and its loss."""
BACKWARD_KERNELS = 2.2
"""Ratio of the number of operations of a backward to its forward."""
COLLECTIVE_STARTS = 5.5
"""Operations in whose time the host starts a collective: 89 to 131 us of PyTorch's c10d (pytorch/pytorch, issue 138773), where a Linear takes 20.7."""
GRAPH_STARTS, BACKWARD_GRAPH_STARTS = 8, 24
"""Operations in whose time the host starts a compiled graph, its guards and wrappers: forward, and backward. Measured with torch 2.13, without
a GPU: a graph of one operation took 23 us longer than it forward and 75 us backward, where an operation of a block took 3.0 us; published: 33 us
longer, where it took 5.6 us (pytorch/pytorch, issue 122029), and 176 us where a Linear takes about 20.7 (issue 150488). An operation in a graph is taken to take as long as another: measured 4.1 us;
published: 7 to 9 us of a Triton kernel (meta-pytorch/tritonbench, pull request 1017), where a Linear takes 20.7 (COLLECTIVE_STARTS)."""
FILLS = 0.6
"""New tensors that torch fills for each operation where only deterministic kernels run: those that are made by `empty` and the like
(counted in a block of Megatron-Core 0.16 under torch's profiler: 40 of 68 operations)."""
FILL_PART = 1 / 3
"""Part of an operation's launch that a fill within it costs, with neither Python nor autograd (pytorch/pytorch, issue 41383: 5 to 7 us), and
part of the bytes moved by other work that are results. Published: 15 % less TFLOP/s (NVIDIA/Megatron-LM, pull request 7093)."""


def seconds(op: Op, program: Program, hardware: Hardware) -> float:
    """Return the predicted seconds of one op of a program, alone on its stream.

    Raises:
        InputError: the hardware has no speed for the op's dtype.
    """
    if op.axis is not None:
        return _collective_s(op, program, hardware)
    if op.kind is OpKind.OUTER:
        return 0.0
    if op.kind in COPIES:
        return hardware.kernel_s + op.size_bytes / (hardware.host_bytes_per_s or _bandwidth(hardware))
    if op.kind is OpKind.UPDATE:
        handled_s = hardware.fsdp_unit_s * _handlings(program) if hardware.fsdp_unit_s else 0.0
        return _update_s(program.step, hardware) + hardware.host_step_s + handled_s
    dtype = dtype_on(hardware, op.dtype)
    if op.flops:
        _peak(hardware, dtype)
    if op.layer is None:
        return op.flops / _peak(hardware, dtype) if op.flops else 0.0
    step = program.step
    layer = step.model.layers[op.layer]
    if not layer.products and not layer.moved.elements:
        return op.flops / _peak(hardware, dtype) if op.flops else 0.0
    work = work_of(layer)
    if step.fuses == "blocks" and layer.is_block and not (step.layout.cp > 1 and layer.token_moves):  # in a graph
        work = work.fused()
    if op.kind is OpKind.RECOMPUTE:
        work = work.repeating(repeated_products(step, layer))
    if step.attention in kernel_rates.CHOSEN:
        hardware = _with_attention(hardware, step.attention)
    values = dtype if dtype == TF32 else step.compute_dtype  # products of two activations run in it too
    dtypes = _Dtypes(dtype if op.flops else values, values, step.master_dtype)
    work = work.filling() if step.deterministic else work
    work = work._replace(collectives=_collectives(op.kind, layer, step.layout))
    part: BackwardPart = "all" if not step.splits_backward else "weights" if op.kind is OpKind.WEIGHT else "inputs"
    unpacked = _packed_numel_by_layer(step.model).get(op.layer, 0) if part != "weights" else 0
    unpacking_s = unpacked * UNPACKED_BYTES / _bandwidth(hardware)
    return unpacking_s + _layer_s(work, op.kind, part, step.microbatch_samples, dtypes, hardware)


@lru_cache(maxsize=64)
def _with_attention(hardware: Hardware, word: str) -> Hardware:
    """Return a machine whose attention runs by the kernel that a job chooses."""
    return replace(hardware, attention_kernel=kernel_rates.CHOSEN[word])


PriceKey = tuple[object, ...]


def price_key(op: Op, program: Program) -> PriceKey:
    """Return a key that is the same for ops of one program that take the same seconds, such as those of equal layers."""
    layer = None if op.layer is None else _kinds_of_work(program.step.model)[op.layer]
    return op.kind, op.axis, op.dtype, op.flops, op.size_bytes, op.codec, op.beside, layer


@cache_by_model
def _kinds_of_work(model: ModelSpec) -> tuple[int, ...]:
    """Return the number of each layer's kind: layers of one kind have the same work."""
    packed, known, kinds = _packed_numel_by_layer(model), dict[object, int](), list[int]()
    for index, layer in enumerate(model.layers):
        key = work_of(layer), layer.forward_flops, packed.get(index, 0)
        kinds.append(known.setdefault(key, len(known)))
    return tuple(kinds)


@cache_by_model
def _packed_numel_by_layer(model: ModelSpec) -> dict[int, int]:
    """Return the elements in 4 bits of the layers that have any."""
    packed_numel: dict[int, int] = {}
    for param in model.params:
        if param.held_as:
            packed_numel[param.layer] = packed_numel.get(param.layer, 0) + param.numel
    return packed_numel


class _Work(NamedTuple):
    """The work of a layer, without its name, so that equal layers are priced once."""

    products: tuple[Product, ...]
    moved_elements: int
    kernels: float
    has_input_gradient: bool
    has_backward: bool
    fusible_elements: int = 0
    """The part of `moved_elements` that a graph spares."""
    fusible_kernels: int = 0
    is_block: bool = True
    needs_whole: bool = False
    """Whether under `cp` it runs outside of graphs: it needs tokens of neighbours."""
    spared: int = 0
    """The part of `kernels` that its graph spares; `kernels` are those of code that is not compiled."""
    collectives: int = 0
    """Those that the host starts within the op."""
    channel_elements: int = 0
    """The part of `moved_elements` of a channel of the batch norms that have a block of threads for each."""

    def fused(self) -> _Work:
        """Return the work of a graph whose compiler fuses operations."""
        moved = max(self.moved_elements - self.fusible_elements, 0)
        return self._replace(moved_elements=moved, spared=self.fusible_kernels, channel_elements=0)

    def repeating(self, products: tuple[Product, ...]) -> _Work:
        """Return the work of a repeated forward, with these products of its layer alone and with all other operations."""
        return self._replace(products=products, kernels=max(self.kernels - len(self.products), 0) + len(products))

    def filling(self) -> _Work:
        """Return the work where each new tensor is filled before it is written."""
        moved = round(self.moved_elements * (1 + FILL_PART))
        return self._replace(moved_elements=moved, kernels=self.kernels * (1 + FILLS * FILL_PART))


def work_of(layer: LayerSpec) -> _Work:
    """Return all of a layer on which its seconds depend, but for FLOPs and packed weights."""
    return _Work(
        layer.products, layer.moved.elements, layer.moved.kernels, layer.backward_reads_weights, layer.has_backward, layer.fusible.elements,
        layer.fusible.kernels, layer.is_block, bool(layer.token_moves),
        channel_elements=layer.moved.channel_elements,
    )  # fmt: skip


BackwardPart = Literal["all", "inputs", "weights"]
"""The gradients that a backward op computes: `inputs` or `weights` alone if the schedule splits the backward."""


class _Dtypes(NamedTuple):
    """Dtypes of matrix products, of all other activations, and of accumulated gradients."""

    products: str
    values: str
    sums: str


@lru_cache(maxsize=2**16)
def _layer_s(work: _Work, kind: OpKind, part: BackwardPart, samples: int, dtypes: _Dtypes, hardware: Hardware) -> float:
    """Return the seconds of a layer's op."""
    if not work.has_backward and kind is not OpKind.FORWARD:
        return 0.0
    backward = kind in (OpKind.BACKWARD, OpKind.WEIGHT)
    products = work.products
    if kind is OpKind.WEIGHT:
        products = tuple(product for product in products if product.is_deferrable)
        times = [_product_s(product, samples, True, part, work, dtypes, hardware) for product in products]
        return _soft_maximum(sum(times), len(products) * hardware.kernel_launch_s)
    times = [_product_s(product, samples, backward, part, work, dtypes, hardware) for product in products]
    passes = samples * (BACKWARD_MOVES if backward else 1.0)
    moved_s = _elementwise_s(work.moved_elements * passes, dtypes.values, hardware, work.channel_elements * passes)
    launched = work.kernels + _casts(products, dtypes)
    launched += CHUNK_KERNELS * sum(_chunks(product, samples) - 1 for product in products)
    kernels = launched * (BACKWARD_KERNELS if backward else 1.0)
    spared = work.spared * (BACKWARD_KERNELS if backward else 1.0)
    others = max(kernels - spared - len(times), 0)
    device_s = sum(times) + moved_s + others * hardware.kernel_s
    starts = BACKWARD_GRAPH_STARTS if backward else GRAPH_STARTS
    # A graph of so few operations that it takes the host longer to start is priced as they are.
    started = kernels - max(spared - starts, 0)
    return _soft_maximum(device_s, (started + COLLECTIVE_STARTS * work.collectives) * hardware.kernel_launch_s)


def _elementwise_s(elements: float, dtype: str, hardware: Hardware, channel_elements: float = 0.0) -> float:
    """Return the seconds of kernels that read or write so many elements: bytes moved, instructions issued beside them, and what one block
    of threads of those that have one for each channel reads and writes."""
    moved_s = elements * BYTES_OF[dtype] / _bandwidth(hardware)
    if hardware.library == "gloo" or "float32" not in hardware.flops_per_s:
        return moved_s
    issued_s = elements * ISSUED * 2 / hardware.flops_per_s["float32"]
    waited_s = channel_elements / BLOCK_ELEMENTS_PER_S if hardware.memory_bytes_per_s < AT_ONCE else 0.0
    return math.hypot(moved_s, issued_s, waited_s)


def _collectives(kind: OpKind, layer: LayerSpec, layout: Layout) -> int:
    """Return the number of collectives that a layer's op waits for in its middle: those of `tp` and `ep`."""
    if kind is OpKind.WEIGHT:
        return 0
    sums = layer.backward_sums if kind is OpKind.BACKWARD else layer.forward_sums
    cut = layer.sequence_boundaries if layout.sequence_parallel else sums
    return len(cut) * (layout.tp > 1) + 2 * len(layer.dispatches) * (layout.ep > 1)


def _chunks(product: Product, samples: int) -> int:
    """Return the number of chunks in which a product is computed."""
    return -(-product.rows * samples // product.chunk_rows) if product.chunk_rows else 1


def _casts(products: tuple[Product, ...], dtypes: _Dtypes) -> int:
    """Return the number of casts to a smaller dtype: of the rows, and of the weight of every expert."""
    if DTYPE_BYTES.get(dtypes.products, 8) >= BYTES_OF[dtypes.values]:
        return 0
    return sum(1 + product.groups for product in products if product.factors == "weight")


def _soft_maximum(first: float, second: float) -> float:
    """Return (first^n + second^n)^(1/n), n = SHARPNESS."""
    larger, smaller = max(first, second), min(first, second)
    return larger * (1 + (smaller / larger) ** SHARPNESS) ** (1 / SHARPNESS) if larger else 0.0


def _product_s(
    product: Product, samples: int, backward: bool, part: BackwardPart, work: _Work, dtypes: _Dtypes, hardware: Hardware
) -> float:
    """Return the seconds of a product's forward, or of its backward or a part of it."""
    if product.keeps_scores:
        return _kept_scores_s(product, samples, backward, dtypes, hardware)
    if product.factors in ("attention", "causal"):
        return _attention_s(product, samples, backward, dtypes, hardware)
    if product.factors == "pair":
        m, k, n, count, groups = product.rows, product.inner, product.columns, product.count * samples, 1
    else:
        m, k, n, count, groups = product.rows * samples, product.inner, product.columns, product.count, product.groups
    # Rows divided among experts are as many products, each with its own weight.
    m, count = -(-m // groups), count * groups
    if product.chunk_rows:
        m, count = min(m, product.chunk_rows), count * _chunks(product, samples)
    dtype = dtypes.values if product.factors == "pair" else dtypes.products
    taps = product.taps
    alike = count, dtype, dtypes, hardware, taps, product.channels_first
    if not backward:
        return _matrix_s(m, k, n, *alike)
    has_inputs = work.has_input_gradient and part != "weights"
    has_inputs = has_inputs and (taps == 1 or product.count > 1 or k // taps > IMAGE_CHANNELS)
    total = _matrix_s(m, k, n, *alike) if product.chunk_rows else 0.0
    total += (
        _matrix_s(m, n * taps, k // taps, *alike) if has_inputs else 0.0
    )  # a convolution back: the same taps of the result
    if part == "inputs" and product.is_deferrable:
        return total
    if product.factors != "frozen":
        total += _matrix_s(k, m, n, *alike)
    if product.factors == "weight":
        total += 2 * k * n * count * BYTES_OF[dtypes.sums] / _bandwidth(hardware)
    return total


def _attention_s(product: Product, samples: int, backward: bool, dtypes: _Dtypes, hardware: Hardware) -> float:
    """Return the seconds of a fused attention's forward or backward."""
    times, peak = kernel_rates.BACKWARD if backward else 1.0, _peak(hardware, dtypes.values)
    # queries, keys, values and the result are read or written once
    elements = product.count * (product.rows + product.columns) * product.inner * samples
    moved_s = elements * BYTES_OF[dtypes.values] / _bandwidth(hardware) * times
    reached = hardware.efficiency.get("attention")
    rate = peak * (ATTENTION_REACHED * reached if reached else 1.0)
    if not reached or hardware.library == "gloo":  # on a CPU there are no tiles
        return hardware.kernel_s + max(product.flops * samples * product.attended_part / rate * times, moved_s)
    scores_s = kernel_rates.scores_s(
        hardware.attention_kernel, backward, product.inner / 2, product.rows, product.columns, product.count * samples,
        product.attended_part, rate, peak, hardware.num_units,
    )  # fmt: skip
    return hardware.kernel_s + max(scores_s, moved_s)


def _kept_scores_s(product: Product, samples: int, backward: bool, dtypes: _Dtypes, hardware: Hardware) -> float:
    """Return the seconds of an attention by torch's math: two products and a softmax over all scores, in float32 at least.

    A forward casts the factors, adds the mask, takes the softmax and casts its result, and a backward reads two and writes one of them.
    """
    wide = dtypes.values if BYTES_OF[dtypes.values] >= BYTES_OF["float32"] else "float32"
    size, count = product.inner // 2, product.count * samples
    types = dtypes._replace(values=wide)
    sides = ((product.rows, size, product.columns), (product.rows, product.columns, size))
    products_s = sum(_matrix_s(m, k, n, count, wide, types, hardware) for m, k, n in sides) * (2 if backward else 1)
    passes = 3 if backward else 5.5 if wide != dtypes.values else 4
    scores_s = passes * count * product.rows * product.columns * BYTES_OF[wide] / _bandwidth(hardware)
    factors_s = 3 * count * product.rows * size * (BYTES_OF[wide] + BYTES_OF[dtypes.values]) / _bandwidth(hardware)
    return products_s + scores_s + factors_s


@lru_cache(maxsize=2**16)
def _matrix_s(
    m: int, k: int, n: int, count: int, dtype: str, dtypes: _Dtypes, hardware: Hardware, taps: int = 1, reorders: bool = False
) -> float:  # fmt: skip
    """Return the seconds of `count` equal products [m, k] x [k, n].

    In memory `taps` elements of the first factor are one element. With `reorders` the activations have their channels first, and a
    kernel on tensor cores reads and writes them in the other order (`REORDERED`).
    """
    size = DTYPE_BYTES.get(dtype, 0) or BYTES_OF[dtype]
    element_bytes = BYTES_OF[dtypes.values]
    rate = _peak(hardware, dtype)
    if dtype in hardware.efficiency:
        rate *= REACHED * hardware.efficiency[dtype] * aligned(k, n)
    rate *= by_shortest_side(min(m, k, n), hardware.efficiency_by_shortest_side.get(dtype, {}))
    if dtype == "float32" and taps == WINOGRAD_TAPS:
        rate *= WINOGRAD
    compute_s = 2.0 * m * k * n * count / rate
    if hardware.num_units:
        compute_s = tiled_s(m, k, n, count, rate, hardware.num_units)
    if taps > 1 and count > 1 and "float32" in hardware.flops_per_s and hardware.num_units:
        direct_s = 2.0 * m * k * n * count / (DIRECT * hardware.flops_per_s["float32"])
        compute_s, reorders = min((compute_s, reorders), (direct_s, False))
    moved = count * (size * (m * k / taps + k * n) + element_bytes * m * n)
    # The kernel before it writes its result once more in the smaller dtype, as it is and transposed.
    cast_s = count * m * k * 2 * size / _bandwidth(hardware) if size < element_bytes else 0.0
    if reorders and hardware.num_units and dtype != "float32":
        elements = count * (m * k / taps + k * n + m * n)
        cast_s += _elementwise_s(REORDERED * elements, dtypes.values, hardware)
    return max(compute_s, moved / _bandwidth(hardware)) + cast_s + hardware.kernel_s


DTYPE_BYTES = {"float8": 1, "float4": 1}
"""Bytes of an element of the dtypes in which only products run."""


def dtype_on(hardware: Hardware, dtype: str) -> str:
    """Return the dtype in which hardware computes: float32 instead of TF32 if it has no TF32."""
    return "float32" if dtype == TF32 and TF32 not in hardware.flops_per_s else dtype


def _bandwidth(hardware: Hardware) -> float:
    """Return the bytes per second that an elementwise kernel reaches."""
    return hardware.memory_bytes_per_s * hardware.memory_efficiency


def _peak(hardware: Hardware, dtype: str) -> float:
    """Return the peak FLOP/s of a dtype at the clock that is sustained; raise InputError if the hardware has none."""
    if dtype not in hardware.flops_per_s:
        known = ", ".join(hardware.flops_per_s)
        words = [word for word, of_word in reversed(COMPUTE_DTYPE.items()) if of_word in hardware.flops_per_s]
        works = f". Use numerics.precision={' or '.join(words)}" if words else ""
        raise InputError(
            "hardware-profile", f"hardware {hardware.name} has no flops_per_s for {dtype}; it has {known}{works}"
        )
    return hardware.flops_per_s[dtype] * hardware.sustained


def _collective_s(op: Op, program: Program, hardware: Hardware) -> float:
    """Return the seconds of a communication op of a program."""
    if op.kind is OpKind.RECV:
        return 0.0
    axis = op.axis or ""
    group = group_of(axis, program.axes[axis], program.step, hardware)
    alone_s = collective_s(op.kind, op.size_bytes, group, hardware)
    return _coding_s(op, program.step, hardware) + exposed_s(op, alone_s, program.step, hardware)


def exposed_s(op: Op, alone_s: float, step: StepSpec, hardware: Hardware) -> float:
    """Return by how much a collective within a layer makes it longer that takes so many seconds alone.

    The products that run at the same time are part of the layer's op, which they lengthen if they are slowed.
    """
    is_shift = op.kind is OpKind.SHIFT
    if not op.beside or not hardware.overlap or (step.splits_backward and not is_shift):
        return alone_s
    dtypes = _Dtypes(dtype_on(hardware, step.product_dtype), step.compute_dtype, step.master_dtype)
    work = _Work(op.beside, 0, 0, True, True)
    products_s = [
        _product_s(product, step.microbatch_samples, not is_shift, "weights", work, dtypes, hardware)
        for product in op.beside
    ]
    work_s = sum(products_s)
    slowed_s = work_s + min(alone_s, hardware.contention * work_s) * (1 - 1 / hardware.contention)
    return max(alone_s, slowed_s) - work_s


def _coding_s(op: Op, step: StepSpec, hardware: Hardware) -> float:
    """Return the seconds that gradients take to be encoded, before an all_to_all, or decoded, summed and encoded again."""
    if op.codec in (None, PLAIN):
        return 0.0
    if CODECS[op.codec].factors:
        return _factoring_s(op, step.sharing.rank, hardware)
    elements = op.size_bytes / CODECS[op.codec].element_bytes
    if (
        step.contributions is not None and step.contributions.axis == SHARDS
    ):  # without an all_gather after it, decoding is paid here
        elements *= 2
    return CODING_PASSES * elements * BYTES_OF[step.master_dtype] / _bandwidth(hardware)


def _factoring_s(op: Op, rank: int, hardware: Hardware) -> float:
    """Return the seconds of products of matrices with factors, for each of which a matrix is read or written."""
    reached = by_shortest_side(rank, hardware.efficiency_by_shortest_side.get(op.dtype, {}))
    moved = FACTOR_PASSES * op.flops / (2 * rank) * BYTES_OF[op.dtype]
    return max(op.flops / (_peak(hardware, op.dtype) * reached), moved / _bandwidth(hardware))


def _update_s(step: StepSpec, hardware: Hardware) -> float:
    """Return the seconds in which one rank updates its weights: all, or its shard of them.

    Under `offload` its gradients go to the host, which updates the masters, and the weights come back.
    """
    numel, copied = step.updated_numel
    master, shards = BYTES_OF[step.master_dtype], step.layout.num_shards  # one if nothing is sharded
    moved = (UPDATE_PASSES + AVERAGE_PASSES * step.averages_weights) * numel * master
    of_copies = copied * BYTES_OF[step.compute_dtype]
    if not step.layout.offload or not hardware.host_bytes_per_s:  # without a link host and device are one memory
        return -(-(moved + of_copies) // shards) / hardware.memory_bytes_per_s / hardware.memory_efficiency
    sent = 2 * numel * master - copied * master + of_copies
    return (sent / hardware.host_bytes_per_s + moved / hardware.host_update_bytes_per_s) / shards


def _handlings(program: Program) -> int:
    """Return the number of gathers and scatters of units in a step."""
    tasks = Counter(task.body for task in program.tasks)
    return sum(tasks[key] * sum(op.implied for op in ops) for key, ops in program.bodies.items())
