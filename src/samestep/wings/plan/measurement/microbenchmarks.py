"""The microbenchmarks of `measure`, which every rank runs at once: figures of the devices and of the links between them.

All ranks measure at the same time, one for each device, because they compute at the same time in a training step: on a CPU
they share the memory, so that two cores are not twice as fast as one.

    products     matrix products of x^3 multiplications for growing x, in each dtype
    copies       a copy of a large buffer, bytes read and written
    launches     operations on one element: the time in which the host starts one
    kernels      the shortest operation: on a GPU behind a product that keeps the queue full; on a CPU, which is host and
                 device at once, as one of all operations of two blocks on a few tokens, forward and backward
    attention    causal attention, forward; on a CPU forward and backward, with small heads
    elementwise  CPU only: activation, softmax and norm of data that fits in a cache
    update       CPU only: AdamW and the gradient norm of many small weights
    FSDP units   CPU only: tiny blocks that FSDP2 gathers, frees and scatters, minus the collectives alone
    collectives  all_reduce and all_gather by size; on CPUs after some compute, which ranks never end at the same time
    overlap      products and an all_reduce, each alone and both at once

A GPU is used by this process alone: a figure is the best of several tries. The cores of a CPU are seldom ours alone: other
processes, or other virtual machines, slow them by half for seconds at a time. There all figures are measured in turns, several
times, and each is the median: the speed that a core has in a training step, which has no second try.
"""

from __future__ import annotations

import functools
import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from samestep.runtime.processes.join import RankInfo
from samestep.runtime.processes.mesh import all_gather
from samestep.tracing.trace import trace
from samestep.wings.plan.simulation.cost import BACKWARD_KERNELS
from samestep.wings.plan.simulation.kernel_rates import BACKWARD

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
EDGES = {"cpu": (64, 128, 256, 512, 1024), "cuda": (512, 1024, 2048, 4096, 8192)}
"""The sizes x of the products of x^3 multiplications."""
COPIED_BYTES = {"cpu": 128 * 2**20, "cuda": 2**30}
MESSAGES = {"cpu": (2**10, 2**14, 2**18, 2**21, 2**24, 2**26), "cuda": (2**10, 2**14, 2**18, 2**22, 2**25, 2**28)}
"""The sizes in bytes of the buffers of collectives."""
TURNS = {"cpu": 4, "cuda": 1}
"""The number of times that all figures are measured, one after the other."""
ENOUGH_S = {"cpu": 0.1, "cuda": 0.5}
"""The seconds for which one figure is repeated in each turn, approximately."""
_TOO_LONG_S = 0.5
"""A product that would take longer than this is left out."""
_CACHED = (512, 512)  # the shape of float32 data that fits in a cache: one MiB
SMALL = 50  # the number of weights of 64 elements in the benchmark of an update
TINY = 200  # the number of operations on one element, one after the other
UNITS = 4  # the number of blocks that FSDP2 gathers and scatters
WIDTH = 16  # the width of the blocks in which operations are counted and timed
_BETWEEN_S = 4e-3  # the seconds of compute before each collective
FULL_QUEUE_EDGE = 8192  # the size of the product that keeps a GPU busy while operations are queued behind it
ATTENDED_TOKENS = 4096  # the length of the samples in the benchmark of attention on a GPU
ATTENDED_HEADS, ATTENDED_WIDTH = 16, 128  # its heads and their size


@dataclass(frozen=True, slots=True)
class Device:
    """The properties of a device that its driver reports."""

    name: str
    memory_bytes: int
    num_units: int
    """The number of multiprocessors of a GPU; 0 on a CPU."""


@dataclass(frozen=True, slots=True)
class Figures:
    """The figures that one rank has measured, in seconds, bytes a second and FLOPs a second."""

    products: dict[str, dict[int, float]]
    """FLOP/s of matrix products, by dtype and size of the matrices."""
    copied_bytes_per_s: float
    """Bytes read and written by a large copy."""
    kernel_launch_s: float
    """Time in which the host starts one operation."""
    kernel_s: float
    """Time of the shortest operation."""
    attention_flops_per_s: float
    """FLOP/s of a fused causal attention without its masked half: forward, on a CPU forward and backward."""
    elementwise_bytes_per_s: float = 0.0
    """Bytes read and written by elementwise operations in a cache; CPU only."""
    host_step_s: float = 0.0
    """Time of the smallest optimizer update with its gradient norm; CPU only."""
    fsdp_unit_s: float = 0.0
    """Time that FSDP2 adds to one gather or scatter; CPU only."""
    sent: dict[str, dict[int, float]] = field(default_factory=dict)
    """Seconds of a collective, by its kind and the bytes of the whole buffer."""
    beside_s: Sequence[float] = ()
    """Seconds of products alone, of an all_reduce alone, and of both at once."""


def device_of(place: RankInfo) -> Device:
    """Return the properties of a rank's device; ranks on a CPU share the machine's memory in equal parts."""
    if place.device.type == "cuda":
        properties = torch.cuda.get_device_properties(place.device)
        return Device(properties.name, int(torch.cuda.mem_get_info(place.device)[1]), properties.multi_processor_count)
    return Device("a core", int(psutil.virtual_memory().total) // place.world_size, 0)


def measure_figures(place: RankInfo) -> Figures:
    """Measure this rank's figures while all other ranks measure theirs.

    Collective over the world, see [Note: collective calls].
    """
    return _middle([_turn(place) for _ in range(TURNS[place.device.type])])


def _turn(place: RankInfo) -> Figures:
    """Measure all figures once."""
    many = place.world_size > 1
    scalar = torch.zeros(1, device=place.device)

    def tiny() -> None:
        for _ in range(TINY):
            scalar.add_(1.0)

    common = functools.partial(
        Figures,
        sent=_all_sent(place) if many else {},
        products={name: _products(dtype, EDGES[place.device.type], place) for name, dtype in DTYPES.items()},
        copied_bytes_per_s=_measure_copy_bytes_per_s(place),
        kernel_launch_s=_time_work_s(tiny, place, waits=False) / TINY,
        beside_s=_beside_s(place) if many else (),
    )
    if place.device.type == "cuda":
        return common(kernel_s=_kernel_s(tiny, place.device), attention_flops_per_s=_attention_flops_per_s(place))
    return common(
        kernel_s=_in_blocks_s(place),
        attention_flops_per_s=_small_attention_flops_per_s(place),
        elementwise_bytes_per_s=_elementwise_bytes_per_s(place),
        host_step_s=_once_s(place),
        fsdp_unit_s=_unit_s(place) if many else 0.0,
    )


def _middle(turns: Sequence[Figures]) -> Figures:
    """Return the median of each figure over the turns."""
    first, middle = turns[0], statistics.median
    numbers = (field.name for field in fields(Figures) if field.type == "float")
    return Figures(
        **{name: middle(getattr(turn, name) for turn in turns) for name in numbers},
        products={
            name: {edge: middle(turn.products[name].get(edge, rate) for turn in turns) for edge, rate in rates.items()}
            for name, rates in first.products.items()
        },
        sent={
            name: {size: middle(turn.sent[name][size] for turn in turns) for size in times}
            for name, times in first.sent.items()
        },
        beside_s=[middle(of) for of in zip(*(turn.beside_s for turn in turns), strict=True)],
    )


def _time_work_s(work: Callable[[], Any], place: RankInfo, *, waits: bool = True, collective: bool = False) -> float:
    """Time `work` many times on all ranks at once; return the least seconds on a GPU, the median on a CPU.

    Args:
        work: the function to time.
        place: the rank and its device.
        waits: whether to time until a GPU has finished the work, and not only until it was started.
        collective: whether every rank must call `work` equally often; rank 0 then decides how often.
    """
    on_gpu = place.device.type == "cuda"

    def timed_s() -> float:
        if on_gpu:
            torch.cuda.synchronize()
        start_s = time.perf_counter()
        work()
        if on_gpu and waits:
            torch.cuda.synchronize()
        return time.perf_counter() - start_s

    count = _tries(timed_s, place, collective=collective)
    return (min if on_gpu else statistics.median)([timed_s() for _ in range(count)])


def _tries(once: Callable[[], float], place: RankInfo, *, collective: bool) -> int:
    """Return the number of tries that take `ENOUGH_S` together; the first call, which sets things up, is not counted."""
    once()
    count = max(3, min(50, int(ENOUGH_S[place.device.type] / max(min(once() for _ in range(3)), 1e-6))))
    return _agree_on_count(count, place) if collective else count


def _agree_on_count(count: int, place: RankInfo) -> int:
    """Return rank 0's count on every rank; every rank must call it."""
    agreed = torch.tensor([count], device=place.device)
    dist.broadcast(agreed, src=0)
    return int(agreed.item())


def _products(dtype: torch.dtype, edges: tuple[int, ...], place: RankInfo) -> dict[int, float]:
    """Return the FLOP/s of products by size; sizes that would take longer than `_TOO_LONG_S` are left out."""
    products: dict[int, float] = {}
    for edge in edges:
        if products and 2 * edge**3 / max(products.values()) > _TOO_LONG_S:
            break
        # Equal numbers draw less power, at which a GPU is a tenth faster than with those of a model.
        a, b = (torch.randn(edge, edge, dtype=dtype, device=place.device) for _ in range(2))
        result = torch.empty_like(a)
        products[edge] = 2 * edge**3 / _time_work_s(functools.partial(torch.mm, a, b, out=result), place)
    return products


def _measure_copy_bytes_per_s(place: RankInfo) -> float:
    source = torch.ones(COPIED_BYTES[place.device.type], dtype=torch.uint8, device=place.device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / _time_work_s(lambda: target.copy_(source), place)


def _kernel_s(tiny: Callable[[], None], device: torch.device) -> float:
    """Return the seconds of the shortest kernel in a row of them, queued after a long product so that the host is ahead."""
    a = torch.ones(FULL_QUEUE_EDGE, FULL_QUEUE_EDGE, device=device)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times: list[float] = []
    for _ in range(5):
        torch.cuda.synchronize()
        torch.mm(a, a)
        start.record()
        tiny()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3 / TINY)
    return min(times)


class _MeasuredBlock(nn.Module):
    """A transformer block, for timing operations on a CPU, where Python around small operations takes as long as they do."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.second_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.gate, self.up, self.down = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(x)
        q, k, v = (part(hidden).unflatten(-1, (2, -1)).transpose(1, 2) for part in (self.q, self.k, self.v))
        rotated = torch.cat((-q[..., 1::2], q[..., ::2]), dim=-1)
        seen = nn.functional.scaled_dot_product_attention(q * 0.5 + rotated * 0.5, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        hidden = self.second_norm(x)
        result: torch.Tensor = x + self.down(nn.functional.silu(self.gate(hidden)) * self.up(hidden))
        return result


def _in_blocks_s(place: RankInfo) -> float:
    """Return the seconds of one operation in blocks with hardly any arithmetic; backwards are counted as `cost` counts them."""
    with torch.device("meta"):
        counted = nn.Sequential(_MeasuredBlock(), _MeasuredBlock())
    x = torch.randn(1, 4, WIDTH)
    operations = sum(layer.moved.kernels for layer in trace(counted, x, "blocks").layers)
    blocks = nn.Sequential(_MeasuredBlock(), _MeasuredBlock())

    def both() -> None:
        blocks(x).sum().backward()

    return _time_work_s(both, place) / operations / (1 + BACKWARD_KERNELS)


def _small_attention_flops_per_s(place: RankInfo) -> float:
    """Return the FLOP/s of a causal attention of 4 heads of 32 over 128 tokens, forward and backward counted as in `cost`."""
    samples, heads, length, width = 8, 4, 128, 32
    q, k, v = (torch.ones(samples, heads, length, width, requires_grad=True) for _ in range(3))

    def both() -> None:
        torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).sum().backward()

    flops = (1 + BACKWARD) * 2 * samples * heads * length * length * width
    return flops / _time_work_s(both, place)


def _elementwise_bytes_per_s(place: RankInfo) -> float:
    """Return the bytes a second read and written by an activation, a softmax and a norm of data that fits in a cache."""
    values = torch.randn(_CACHED)

    def work() -> None:
        torch.nn.functional.silu(values)
        torch.softmax(values, -1)
        torch.nn.functional.layer_norm(values, _CACHED[-1:])

    return 3 * 2 * values.nbytes / _time_work_s(work, place)


def _once_s(place: RankInfo) -> float:
    """Return the seconds of an optimizer update and the gradient norm for many small weights."""
    weights = [torch.nn.Parameter(torch.ones(64)) for _ in range(SMALL)]
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    optimizer = torch.optim.AdamW(weights)

    def update() -> None:
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()

    return _time_work_s(update, place)


def _unit_s(place: RankInfo) -> float:
    """Return the seconds that FSDP2 adds to one gather or scatter: blocks under FSDP2, minus plain blocks and collectives."""

    def blocks() -> nn.Sequential:
        return nn.Sequential(*(_MeasuredBlock() for _ in range(UNITS)))

    plain, sharded = blocks(), blocks()
    for block in sharded:
        fully_shard(block, reshard_after_forward=True)
    fully_shard(sharded)
    elements = sum(param.numel() for param in plain[0].parameters())
    x, sent = torch.randn(1, 4, WIDTH), torch.zeros(elements // place.world_size * place.world_size)

    def both(model: nn.Module) -> None:
        model(x).sum().backward()

    alone_s, whole_s = (
        _time_work_s(functools.partial(both, model), place, collective=True) for model in (plain, sharded)
    )
    sent_s = _time_work_s(lambda: _all_gather(sent), place, collective=True)
    return max(0.0, (whole_s - alone_s) / (3 * UNITS) - sent_s)


def _attention_flops_per_s(place: RankInfo) -> float:
    """Return the FLOP/s of a causal attention of `ATTENDED_HEADS` heads over `ATTENDED_TOKENS` tokens."""
    length, heads, width = ATTENDED_TOKENS, ATTENDED_HEADS, ATTENDED_WIDTH
    q, k, v = (torch.randn(1, heads, length, width, dtype=torch.bfloat16, device=place.device) for _ in range(3))
    taken_s = _time_work_s(lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True), place)
    return 2 * length * length * width * heads / taken_s


def _all_reduce(buffer: torch.Tensor) -> None:
    dist.all_reduce(buffer)


def _all_gather(buffer: torch.Tensor) -> None:
    all_gather(buffer, buffer.chunk(dist.get_world_size())[dist.get_rank()])


_COLLECTIVES = {"all_reduce": _all_reduce, "all_gather": _all_gather}
WAYS = {"all_reduce": 2, "all_gather": 1}
"""The number of times that a ring passes the whole buffer round, by collective."""


def _all_sent(place: RankInfo) -> dict[str, dict[int, float]]:
    """Return the seconds of each collective by the bytes of its buffer; every rank must call it."""
    compute = _computing(place) if place.device.type == "cpu" else None
    sent: dict[str, dict[int, float]] = {name: {} for name in _COLLECTIVES}
    for name, size in itertools.product(_COLLECTIVES, MESSAGES[place.device.type]):
        buffer = torch.zeros(max(size // 4 // place.world_size, 1) * place.world_size, device=place.device)
        send = functools.partial(_COLLECTIVES[name], buffer)
        taken_s = _behind_s(compute, send, place) if compute else _time_work_s(send, place, collective=True)
        sent[name][buffer.nbytes] = taken_s
    return sent


def _behind_s(compute: Callable[[], None], send: Callable[[], None], place: RankInfo) -> float:
    """Return the seconds of a collective after compute, including the wait for other ranks, averaged over ranks."""

    def timed_s() -> float:
        compute()
        start_s = time.perf_counter()
        send()
        return time.perf_counter() - start_s

    taken = torch.tensor([timed_s() for _ in range(_tries(timed_s, place, collective=True))])
    dist.all_reduce(taken)
    return float(taken.median()) / place.world_size


def _computing(place: RankInfo) -> Callable[[], None]:
    """Return a function that computes products for about `_BETWEEN_S` seconds on every rank."""
    a = torch.ones(_CACHED)
    product = functools.partial(torch.mm, a, a, out=torch.empty_like(a))
    return _repeat(product, _agree_on_count(round(_BETWEEN_S / _time_work_s(product, place, collective=True)), place))


def _repeat(work: Callable[[], Any], times: int) -> Callable[[], None]:
    """Return a function that calls `work` the given number of times, and at least once."""

    def repeated() -> None:
        for _ in range(max(1, times)):
            work()

    return repeated


def _beside_s(place: RankInfo) -> tuple[float, float, float]:
    """Return the seconds of products, of an all_reduce that takes about as long, and of both at once."""
    kind = place.device.type
    edge, size = EDGES[kind][-2], MESSAGES[kind][-2]
    a, buffer = torch.ones(edge, edge, device=place.device), torch.zeros(size // 4, device=place.device)
    product = functools.partial(torch.mm, a, a, out=torch.empty_like(a))
    send_s = _time_work_s(lambda: dist.all_reduce(buffer), place, collective=True)
    once_s = _time_work_s(product, place, collective=True)
    compute = _repeat(product, _agree_on_count(round(send_s / once_s), place))

    def both() -> None:
        work = dist.all_reduce(buffer, async_op=True)
        compute()
        work.wait()

    return _time_work_s(compute, place, collective=True), send_s, _time_work_s(both, place, collective=True)
