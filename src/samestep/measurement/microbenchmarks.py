"""What `measure` measures on every rank at once: the figures of a device and of the links between them.

All ranks measure at the same time, one a device, since that is how they compute in a training step: on a CPU they share the
memory, and what one core reaches alone is not what each of two reaches.

    products     x^3 for growing x and each dtype
    memory       a copy of a large buffer, bytes read and written
    launch       an operation on one element: what the host needs to start it
    kernel       what the shortest one takes: on a GPU behind a product that keeps the queue full; on a CPU, which is host
                 and device at once, with all that runs around it in two blocks on a few small tokens, forward and backward
    attention    causal, forward; of a CPU forward and backward, of small heads
    elementwise  of a CPU: activation, softmax and norm of what fits in a cache
    once         of a CPU: AdamW and the gradient's norm of many small weights
    unit         of a CPU: a tiny block gathered, freed, gathered again and scattered by FSDP2, against its gathers alone
    sent         all_reduce and all_gather by size; on CPUs behind some compute, from which ranks never come at once
    beside       products beside an all_reduce, and both alone

A GPU is ours alone: a figure is the best of several. The cores of a CPU are seldom: what else runs on the machine, or on the
machine below a virtual one, slows them by half for seconds at a time. There all figures are taken in turns, several times,
and each is the middle one: what a core gives in a step, which has no second try.
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
from samestep.simulation.cost import ATTENTION_BACKWARD, BACKWARD_KERNELS
from samestep.tracing.trace import trace

DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
EDGES = {"cpu": (64, 128, 256, 512, 1024), "cuda": (512, 1024, 2048, 4096, 8192)}
"""Of the cubes that are multiplied."""
COPIED_BYTES = {"cpu": 128 * 2**20, "cuda": 2**30}
MESSAGES = {
    "cpu": (2**10, 2**14, 2**18, 2**21, 2**24, 2**26),
    "cuda": (2**10, 2**14, 2**18, 2**22, 2**25, 2**28),
}
"""Bytes of what is sent."""
TURNS = {"cpu": 4, "cuda": 1}
"""How many times all figures are taken, one after the other."""
ENOUGH_S = {"cpu": 0.1, "cuda": 0.5}
"""A figure is repeated for about so long in each turn."""
_TOO_LONG_S = 0.5
"""A larger product is left out that would take more."""
_CACHED = (512, 512)  # of float32: one MiB
SMALL = 50  # weights of 64 elements
TINY = 200  # operations on one element, one after the other
UNITS = 4  # blocks that FSDP2 gathers and scatters
WIDTH = 16  # of the blocks in which operations are counted and timed
_BETWEEN_S = 4e-3  # of compute between two collectives
_FULL_QUEUE_EDGE = 8192


@dataclass(frozen=True, slots=True)
class Device:
    """What a device says of itself."""

    name: str
    memory_bytes: int
    num_units: int


@dataclass(frozen=True, slots=True)
class Figures:
    """What one rank has measured; seconds, bytes and FLOPs a second."""

    products: dict[str, dict[int, float]]
    """FLOP/s by dtype and edge."""
    copied_bytes_per_s: float
    kernel_launch_s: float
    kernel_s: float
    attention_flops_per_s: float
    """Of a fused causal attention, its masked half left out; of a CPU forward and backward."""
    elementwise_bytes_per_s: float = 0.0
    """What elementwise operations read and write."""
    host_step_s: float = 0.0
    """What an update takes, however small."""
    fsdp_unit_s: float = 0.0
    """What is around a gather or a scatter of FSDP2."""
    sent: dict[str, dict[int, float]] = field(default_factory=dict)
    """Seconds by collective and bytes of the whole buffer."""
    beside_s: Sequence[float] = ()
    """Products alone, all_reduce alone, both beside each other."""


def device_of(place: RankInfo) -> Device:
    """Ask the device; those of a CPU share the machine's memory."""
    if place.device.type == "cuda":
        properties = torch.cuda.get_device_properties(place.device)
        return Device(properties.name, int(torch.cuda.mem_get_info(place.device)[1]), properties.multi_processor_count)
    return Device("a core", int(psutil.virtual_memory().total) // place.world_size, 0)


def measured(place: RankInfo) -> Figures:
    """Measure with all ranks at once; collective."""
    return _middle([_turn(place) for _ in range(TURNS[place.device.type])])


def _turn(place: RankInfo) -> Figures:
    """Take all figures once."""
    many = place.world_size > 1
    one = torch.zeros(1, device=place.device)

    def tiny() -> None:
        for _ in range(TINY):
            one.add_(1.0)

    common = functools.partial(
        Figures,
        sent=_all_sent(place) if many else {},
        products={name: _products(dtype, EDGES[place.device.type], place) for name, dtype in DTYPES.items()},
        copied_bytes_per_s=_copied_bytes_per_s(place),
        kernel_launch_s=_taken_s(tiny, place, waits=False) / TINY,
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
    """Return the middle one of each figure."""
    first, middle = turns[0], statistics.median
    numbers = (one.name for one in fields(Figures) if one.type == "float")
    return Figures(
        **{name: middle(getattr(one, name) for one in turns) for name in numbers},
        products={
            name: {edge: middle(one.products[name].get(edge, rate) for one in turns) for edge, rate in rates.items()}
            for name, rates in first.products.items()
        },
        sent={
            name: {size: middle(one.sent[name][size] for one in turns) for size in times}
            for name, times in first.sent.items()
        },
        beside_s=[middle(of) for of in zip(*(one.beside_s for one in turns), strict=True)],
    )


def _taken_s(work: Callable[[], Any], place: RankInfo, *, waits: bool = True, collective: bool = False) -> float:
    """Time `work` many times on all ranks at once: the best of a GPU, the middle one of a CPU.

    Args:
        work: what is timed.
        place: where.
        waits: until the device has done it, not only until it was started.
        collective: every rank must do it equally often; rank 0 says how often.
    """
    on_gpu = place.device.type == "cuda"

    def once() -> float:
        if on_gpu:
            torch.cuda.synchronize()
        start_s = time.perf_counter()
        work()
        if on_gpu and waits:
            torch.cuda.synchronize()
        return time.perf_counter() - start_s

    count = _tries(once, place, collective=collective)
    return (min if on_gpu else statistics.median)([once() for _ in range(count)])


def _tries(once: Callable[[], float], place: RankInfo, *, collective: bool) -> int:
    """Return how often something is done for `ENOUGH_S`; much is made at the first use, which is not counted."""
    once()
    count = max(3, min(50, int(ENOUGH_S[place.device.type] / max(min(once() for _ in range(3)), 1e-6))))
    return _agreed(count, place) if collective else count


def _agreed(count: int, place: RankInfo) -> int:
    """Return rank 0's, on every rank."""
    told = torch.tensor([count], device=place.device)
    dist.broadcast(told, src=0)
    return int(told.item())


def _products(dtype: torch.dtype, edges: tuple[int, ...], place: RankInfo) -> dict[int, float]:
    """Return FLOP/s by edge; a larger product is left out where it would take too long."""
    found: dict[int, float] = {}
    for edge in edges:
        if found and 2 * edge**3 / max(found.values()) > _TOO_LONG_S:
            break
        a, b = (torch.ones(edge, edge, dtype=dtype, device=place.device) for _ in range(2))
        result = torch.empty_like(a)
        found[edge] = 2 * edge**3 / _taken_s(functools.partial(torch.mm, a, b, out=result), place)
    return found


def _copied_bytes_per_s(place: RankInfo) -> float:
    source = torch.ones(COPIED_BYTES[place.device.type], dtype=torch.uint8, device=place.device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / _taken_s(lambda: target.copy_(source), place)


def _kernel_s(tiny: Callable[[], None], device: torch.device) -> float:
    """Return what the shortest kernels take one after the other: the host is ahead, behind a long product."""
    a = torch.ones(_FULL_QUEUE_EDGE, _FULL_QUEUE_EDGE, device=device)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    found: list[float] = []
    for _ in range(5):
        torch.cuda.synchronize()
        torch.mm(a, a)
        start.record()
        tiny()
        end.record()
        end.synchronize()
        found.append(start.elapsed_time(end) / 1e3 / TINY)
    return min(found)


class _MeasuredBlock(nn.Module):
    """A block as models write it: what surrounds operations on a CPU takes as long as small ones do."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.second_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.gate, self.up, self.down = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        given = self.norm(x)
        q, k, v = (part(given).unflatten(-1, (2, -1)).transpose(1, 2) for part in (self.q, self.k, self.v))
        rotated = torch.cat((-q[..., 1::2], q[..., ::2]), dim=-1)
        seen = nn.functional.scaled_dot_product_attention(q * 0.5 + rotated * 0.5, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        given = self.second_norm(x)
        result: torch.Tensor = x + self.down(nn.functional.silu(self.gate(given)) * self.up(given))
        return result


def _in_blocks_s(place: RankInfo) -> float:
    """Return what an operation takes of blocks whose arithmetic takes nothing, its backward counted as `cost` counts it."""
    with torch.device("meta"):
        counted = nn.Sequential(_MeasuredBlock(), _MeasuredBlock())
    x = torch.randn(1, 4, WIDTH)
    operations = sum(layer.kernels for layer in trace(counted, x, "blocks").layers)
    blocks = nn.Sequential(_MeasuredBlock(), _MeasuredBlock())

    def both() -> None:
        blocks(x).sum().backward()

    return _taken_s(both, place) / operations / (1 + BACKWARD_KERNELS)


def _small_attention_flops_per_s(place: RankInfo) -> float:
    """Time a causal attention of 4 heads of 32 over 128 tokens, forward and backward, as `cost` counts both."""
    samples, heads, length, width = 8, 4, 128, 32
    q, k, v = (torch.ones(samples, heads, length, width, requires_grad=True) for _ in range(3))

    def both() -> None:
        torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).sum().backward()

    flops = (1 + ATTENTION_BACKWARD) * 2 * samples * heads * length * length * width
    return flops / _taken_s(both, place)


def _elementwise_bytes_per_s(place: RankInfo) -> float:
    """Return bytes read and written by an activation, a softmax and a norm of what fits in a cache."""
    given = torch.randn(_CACHED)

    def work() -> None:
        torch.nn.functional.silu(given)
        torch.softmax(given, -1)
        torch.nn.functional.layer_norm(given, _CACHED[-1:])

    return 3 * 2 * given.nbytes / _taken_s(work, place)


def _once_s(place: RankInfo) -> float:
    """Return what an update and the norm of the gradient take for many small weights."""
    weights = [torch.nn.Parameter(torch.ones(64)) for _ in range(SMALL)]
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    optimizer = torch.optim.AdamW(weights)

    def once() -> None:
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()

    return _taken_s(once, place)


def _unit_s(place: RankInfo) -> float:
    """Return what FSDP2 does around one gather or scatter: blocks with it, without it, and what is sent."""

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

    alone_s, whole_s = (_taken_s(functools.partial(both, model), place, collective=True) for model in (plain, sharded))
    sent_s = _taken_s(lambda: _all_gather(sent), place, collective=True)
    return max(0.0, (whole_s - alone_s) / (3 * UNITS) - sent_s)


def _attention_flops_per_s(place: RankInfo) -> float:
    """Time a causal attention of 16 heads of 128 over 4,096 tokens."""
    length, heads, width = 4096, 16, 128
    q, k, v = (torch.ones(1, heads, length, width, dtype=torch.bfloat16, device=place.device) for _ in range(3))
    taken_s = _taken_s(lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True), place)
    return 2 * length * length * width * heads / taken_s


# torch 2.13 renamed it and deprecates the old name.
_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def _all_reduce(buffer: torch.Tensor) -> None:
    dist.all_reduce(buffer)


def _all_gather(buffer: torch.Tensor) -> None:
    _gather(buffer, buffer.chunk(dist.get_world_size())[dist.get_rank()])


_COLLECTIVES = {"all_reduce": _all_reduce, "all_gather": _all_gather}
WAYS = {"all_reduce": 2, "all_gather": 1}


def _all_sent(place: RankInfo) -> dict[str, dict[int, float]]:
    """Return what collectives take by size."""
    compute = _computing(place) if place.device.type == "cpu" else None
    sent: dict[str, dict[int, float]] = {name: {} for name in _COLLECTIVES}
    for name, size in itertools.product(_COLLECTIVES, MESSAGES[place.device.type]):
        buffer = torch.zeros(max(size // 4 // place.world_size, 1) * place.world_size, device=place.device)
        send = functools.partial(_COLLECTIVES[name], buffer)
        taken_s = _behind_s(compute, send, place) if compute else _taken_s(send, place, collective=True)
        sent[name][buffer.nbytes] = taken_s
    return sent


def _behind_s(compute: Callable[[], None], send: Callable[[], None], place: RankInfo) -> float:
    """Time a collective behind compute; return what a rank spends in it, waiting for the others too, on average of all."""

    def once() -> float:
        compute()
        start_s = time.perf_counter()
        send()
        return time.perf_counter() - start_s

    taken = torch.tensor([once() for _ in range(_tries(once, place, collective=True))])
    dist.all_reduce(taken)
    return float(taken.median()) / place.world_size


def _computing(place: RankInfo) -> Callable[[], None]:
    """Return what takes about `_BETWEEN_S` on every rank: products."""
    a = torch.ones(_CACHED)
    product = functools.partial(torch.mm, a, a, out=torch.empty_like(a))
    return _repeated(product, _agreed(round(_BETWEEN_S / _taken_s(product, place, collective=True)), place))


def _repeated(work: Callable[[], Any], times: int) -> Callable[[], None]:
    """Return what does the work so often, once at least."""

    def often() -> None:
        for _ in range(max(1, times)):
            work()

    return often


def _beside_s(place: RankInfo) -> tuple[float, float, float]:
    """Time products, an all_reduce, and both beside each other, each about as long."""
    kind = place.device.type
    edge, size = EDGES[kind][-2], MESSAGES[kind][-2]
    a, buffer = torch.ones(edge, edge, device=place.device), torch.zeros(size // 4, device=place.device)
    product = functools.partial(torch.mm, a, a, out=torch.empty_like(a))
    send_s = _taken_s(lambda: dist.all_reduce(buffer), place, collective=True)
    once_s = _taken_s(product, place, collective=True)
    compute = _repeated(product, _agreed(round(send_s / once_s), place))

    def both() -> None:
        work = dist.all_reduce(buffer, async_op=True)
        compute()
        work.wait()

    return _taken_s(compute, place, collective=True), send_s, _taken_s(both, place, collective=True)
