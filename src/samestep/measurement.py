"""The verb `measure`: the hardware profile of the machine it runs on, in about a minute, every number with its source.

All workers measure at the same time, one a device, since that is how they compute in a training step: on a CPU they
share the memory, and what one core reaches alone is not what each of two reaches.

    products     x^3 for growing x and each dtype; the best rate is the dtype's, all rates stand in its source
    memory       a copy of a large buffer, bytes read and written
    launch       an operation on one element: what the host needs to start it
    kernel       what the shortest one takes: on a GPU behind a product that keeps the queue full; on a CPU, which is host
                 and device at once, with all that runs around it in two blocks on a few small tokens, forward and backward
    attention    causal, forward; of a CPU forward and backward, of small heads
    elementwise  of a CPU: activation, softmax and norm of what fits in a cache, against the copy
    unit         of a CPU: a tiny layer gathered, freed, gathered again and scattered by FSDP2, against its gathers alone
    once         of a CPU: AdamW and the gradient's norm of many small weights
    link         all_reduce by size, on CPUs behind some compute, from which ranks never come at once;
                 T = 2 (n-1) (a + S/(nB)) gives a from the smallest message and B from the largest
    overlap      products beside an all_reduce against both alone

A figure is the best of several: what else a machine does only ever makes it slower. What is sent is the middle one of
several: a collective ends with its slowest rank, so that a step is given what else the machine does, and not seldom; of
two such middles, the one behind all other figures, the lesser is taken.
"""

from __future__ import annotations

import functools
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import tomli_w
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from samestep import hardware
from samestep.cost import ATTENTION_BACKWARD, ATTENTION_REACHED, BACKWARD_KERNELS
from samestep.errors import SamestepError
from samestep.hardware import Hardware
from samestep.report import write_whole
from samestep.runtime import launch
from samestep.runtime.joining import Place
from samestep.runtime.trace import trace

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
ENOUGH_S = 0.5
"""A figure is repeated for about so long, and a larger product is left out that would take more."""
_CACHED = (512, 512)  # of float32: one MiB
_SMALL = 50  # weights of 64 elements
_TINY = 200  # operations on one element, one after the other
_UNITS = 4  # layers that FSDP2 gathers and scatters
_WIDTH = 16  # of the blocks in which operations are counted and timed
_BETWEEN_S = 4e-3  # of compute between two collectives
_MOST_RANKS = 8  # of a CPU: more would share what they measure
_FULL_QUEUE_EDGE = 8192
_OVERLAPS_BELOW = 0.9  # of both times one after the other


@dataclass(frozen=True, slots=True)
class _Figures:
    """What one rank has measured; seconds, bytes and FLOPs a second."""

    products: dict[str, dict[int, float]]
    """FLOP/s by dtype and edge."""
    copied_bytes_per_s: float
    launch_s: float
    kernel_s: float
    memory_bytes: int
    num_units: int
    device: str
    elementwise_part: float | None = None
    """What elementwise operations reach of the copy."""
    step_s: float = 0.0
    """What an update takes, however small."""
    unit_s: float | None = None
    """What is around a gather or a scatter of FSDP2."""
    attention_part: float | None = None
    """What a fused causal attention reaches of bfloat16's rate, on a CPU of float32's."""
    sent: dict[str, dict[int, float]] = field(default_factory=dict)
    """Seconds by collective and bytes of the whole buffer."""
    beside_s: tuple[float, float, float] | None = None
    """Products alone, all_reduce alone, both beside each other."""


def measure(out: str | Path | None = None, *, ranks: int | None = None, device: str = "auto") -> Hardware:
    """Measure this machine and write its profile, by default where `plan` looks for it.

    Args:
        out: a TOML file; without it the user's own, `hardware.own_path()`.
        ranks: devices that measure at once; without it all GPUs, or one a core and at least two.
        device: cpu, cuda or auto.

    Raises:
        SamestepError: the file cannot be written; nothing has been measured.
    """
    path = Path(out) if out is not None else hardware.own_path()
    _check_writable(path)
    count = ranks or _default_ranks(device)
    figures = launch.run_workers(_measured, ranks=count, device=device, quiet=True)
    write_whole(path, _as_toml(figures, count))
    return hardware.load(path)


def _default_ranks(device: str) -> int:
    if device != "cpu" and torch.cuda.device_count():
        return torch.cuda.device_count()
    return max(2, min(os.cpu_count() or 1, _MOST_RANKS))


def _check_writable(path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        existed = path.exists()
        path.open("a").close()
        if not existed:
            path.unlink()
    except OSError as error:
        raise SamestepError(f"{path} cannot be written: {error.strerror}") from None


# -- on every rank -----------------------------------------------------------------------------------------------------


def _measured(place: Place) -> _Figures:
    """Measure with all ranks at once; collective."""
    device = place.device
    kind = device.type
    first = _all_sent(place)
    products = {name: _products(dtype, EDGES[kind], place) for name, dtype in DTYPES.items()}
    one = torch.zeros(1, device=device)

    def tiny() -> None:
        for _ in range(_TINY):
            one.add_(1.0)

    launch_s = _best_s(tiny, place, waits=False) / _TINY
    copied = _copied_bytes_per_s(place)
    return _Figures(
        products=products,
        copied_bytes_per_s=copied,
        launch_s=launch_s,
        kernel_s=_kernel_s(tiny, device) if kind == "cuda" else _in_blocks_s(place),
        elementwise_part=None if kind == "cuda" else min(1.0, _elementwise_bytes_per_s(place) / copied),
        step_s=0.0 if kind == "cuda" else _once_s(place),
        memory_bytes=_memory_bytes(place),
        num_units=torch.cuda.get_device_properties(device).multi_processor_count if kind == "cuda" else 0,
        device=torch.cuda.get_device_name(device) if kind == "cuda" else "a core",
        attention_part=_attention_part(max(products["bfloat16"].values()), place)
        if kind == "cuda"
        else _small_attention_part(max(products["float32"].values()), place),
        sent=_lesser(first, _all_sent(place)),
        beside_s=_beside_s(place) if place.world_size > 1 else None,
        unit_s=_unit_s(place) if place.world_size > 1 and kind == "cpu" else None,
    )


def _best_s(work: Callable[[], Any], place: Place, *, waits: bool = True, collective: bool = False) -> float:
    """Time `work` several times on all ranks at once; return the best of this rank's."""
    return min(_times_s(work, place, waits=waits, collective=collective))


def _times_s(work: Callable[[], Any], place: Place, *, waits: bool = True, collective: bool = False) -> list[float]:
    """Time `work` several times on all ranks at once.

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

    once()  # what is made at the first use is not timed
    first_s = min(once() for _ in range(3))
    count = max(3, min(50, int(ENOUGH_S / max(first_s, 1e-6))))
    if collective:
        told = torch.tensor([count], device=place.device)
        dist.broadcast(told, src=0)
        count = int(told.item())
    return [first_s, *(once() for _ in range(count))]


def _products(dtype: torch.dtype, edges: tuple[int, ...], place: Place) -> dict[int, float]:
    """Return FLOP/s by edge; a larger product is left out where it would take too long."""
    found: dict[int, float] = {}
    for edge in edges:
        if found and 2 * edge**3 / max(found.values()) > ENOUGH_S:
            break
        a, b = (torch.ones(edge, edge, dtype=dtype, device=place.device) for _ in range(2))
        result = torch.empty_like(a)
        found[edge] = 2 * edge**3 / _best_s(functools.partial(torch.mm, a, b, out=result), place)
    return found


def _copied_bytes_per_s(place: Place) -> float:
    source = torch.ones(COPIED_BYTES[place.device.type], dtype=torch.uint8, device=place.device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / _best_s(lambda: target.copy_(source), place)


def _kernel_s(tiny: Callable[[], None], device: torch.device) -> float:
    """Return what the shortest kernels take one after the other: the host is ahead, behind a long product."""
    a = torch.ones(_FULL_QUEUE_EDGE, _FULL_QUEUE_EDGE, device=device)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    found: list[float] = []
    for _ in range(5):
        torch.cuda.synchronize()
        torch.mm(a, a)
        start.record()
        tiny()
        end.record()
        end.synchronize()
        found.append(start.elapsed_time(end) / 1e3 / _TINY)
    return min(found)


class _Block(nn.Module):
    """A block as models write it: what surrounds operations on a CPU takes as long as small ones do."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.second_norm = nn.LayerNorm(_WIDTH), nn.LayerNorm(_WIDTH)
        self.q, self.k, self.v, self.out = (nn.Linear(_WIDTH, _WIDTH, bias=False) for _ in range(4))
        self.gate, self.up, self.down = (nn.Linear(_WIDTH, _WIDTH, bias=False) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        given = self.norm(x)
        q, k, v = (part(given).unflatten(-1, (2, -1)).transpose(1, 2) for part in (self.q, self.k, self.v))
        rotated = torch.cat((-q[..., 1::2], q[..., ::2]), dim=-1)
        seen = nn.functional.scaled_dot_product_attention(q * 0.5 + rotated * 0.5, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        given = self.second_norm(x)
        result: torch.Tensor = x + self.down(nn.functional.silu(self.gate(given)) * self.up(given))
        return result


def _in_blocks_s(place: Place) -> float:
    """Return what an operation takes of blocks whose arithmetic takes nothing, its backward counted as `cost` counts it."""
    with torch.device("meta"):
        counted = nn.Sequential(_Block(), _Block())
    x = torch.randn(1, 4, _WIDTH)
    operations = sum(layer.kernels for layer in trace(counted, x, "blocks").layers)
    blocks = nn.Sequential(_Block(), _Block())

    def both() -> None:
        blocks(x).sum().backward()

    return _best_s(both, place) / operations / (1 + BACKWARD_KERNELS)


def _small_attention_part(best_flops_per_s: float, place: Place) -> float:
    """Return what a causal attention of 4 heads of 32 over 128 tokens reaches, forward and backward, as `cost` counts both."""
    samples, heads, length, width = 8, 4, 128, 32
    q, k, v = (torch.ones(samples, heads, length, width, requires_grad=True) for _ in range(3))

    def both() -> None:
        torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).sum().backward()  # type: ignore[no-untyped-call]

    flops = (1 + ATTENTION_BACKWARD) * 2 * samples * heads * length * length * width
    return min(1.0, flops / _best_s(both, place) / best_flops_per_s / ATTENTION_REACHED)


def _elementwise_bytes_per_s(place: Place) -> float:
    """Return bytes read and written by an activation, a softmax and a norm of what fits in a cache."""
    given = torch.randn(_CACHED)

    def work() -> None:
        torch.nn.functional.silu(given)
        torch.softmax(given, -1)
        torch.nn.functional.layer_norm(given, _CACHED[-1:])

    return 3 * 2 * given.nbytes / _best_s(work, place)


def _once_s(place: Place) -> float:
    """Return what an update and the norm of the gradient take for many small weights."""
    weights = [torch.nn.Parameter(torch.ones(64)) for _ in range(_SMALL)]
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    optimizer = torch.optim.AdamW(weights)

    def once() -> None:
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()

    return _best_s(once, place)


def _unit_s(place: Place) -> float:
    """Return what FSDP2 does around one gather or scatter: layers with it, without it, and what is sent."""

    def layers() -> nn.Sequential:
        return nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH) for _ in range(_UNITS)))

    plain, sharded = layers(), layers()
    for layer in sharded:
        fully_shard(layer, reshard_after_forward=True)
    fully_shard(sharded)
    x, sent = torch.randn(4, _WIDTH), torch.zeros(_WIDTH * place.world_size)

    def both(model: nn.Module) -> None:
        model(x).sum().backward()

    alone_s, whole_s = (_best_s(functools.partial(both, model), place, collective=True) for model in (plain, sharded))
    sent_s = _best_s(lambda: _all_gather(sent), place, collective=True)
    return max(0.0, (whole_s - alone_s) / (3 * _UNITS) - sent_s)


def _attention_part(best_flops_per_s: float, place: Place) -> float:
    """Return what a causal attention of 16 heads of 128 over 4,096 tokens reaches, its masked half left out."""
    length, heads, width = 4096, 16, 128
    q, k, v = (torch.ones(1, heads, length, width, dtype=torch.bfloat16, device=place.device) for _ in range(3))
    taken_s = _best_s(lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True), place)
    return min(1.0, 2 * length * length * width * heads / taken_s / best_flops_per_s)


def _memory_bytes(place: Place) -> int:
    """Return what one device has; the devices of a CPU share the machine's."""
    if place.device.type == "cuda":
        return int(torch.cuda.mem_get_info(place.device)[1])
    return int(psutil.virtual_memory().total) // place.world_size


# torch 2.13 renamed it and deprecates the old name.
_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def _all_reduce(buffer: torch.Tensor) -> None:
    dist.all_reduce(buffer)


def _all_gather(buffer: torch.Tensor) -> None:
    part = buffer.chunk(dist.get_world_size())[dist.get_rank()]
    _gather(buffer, part.clone())


_COLLECTIVES = {"all_reduce": _all_reduce, "all_gather": _all_gather}


def _all_sent(place: Place) -> dict[str, dict[int, float]]:
    if place.world_size == 1:
        return {}
    return {name: _sent(send, place) for name, send in _COLLECTIVES.items()}


def _lesser(first: dict[str, dict[int, float]], then: dict[str, dict[int, float]]) -> dict[str, dict[int, float]]:
    return {
        name: {size: min(first[name][size], taken_s) for size, taken_s in found.items()} for name, found in then.items()
    }


def _sent(send: Callable[[torch.Tensor], None], place: Place) -> dict[int, float]:
    """Return seconds by bytes; of CPUs behind compute, from which ranks never come at once, and must be woken up."""
    found = {}
    compute = _computing(place) if place.device.type == "cpu" else None
    alone_s = statistics.median(_times_s(compute, place, collective=True)) if compute else 0.0
    for size in MESSAGES[place.device.type]:
        numel = size // 4 // place.world_size * place.world_size
        buffer = torch.zeros(max(numel, place.world_size), device=place.device)
        once = functools.partial(send, buffer)
        taken_s = statistics.median(_times_s(once, place, collective=True))
        if compute:
            behind_s = statistics.median(
                _times_s(functools.partial(_one_by_one, compute, once), place, collective=True)
            )
            taken_s = max(taken_s, behind_s - alone_s)
        found[buffer.nbytes] = taken_s
    return found


def _one_by_one(*works: Callable[[], None]) -> None:
    for work in works:
        work()


def _computing(place: Place) -> Callable[[], None]:
    """Return what takes about `_BETWEEN_S` on every rank: products."""
    a = torch.ones(_CACHED, device=place.device)
    result = torch.empty_like(a)
    product = functools.partial(torch.mm, a, a, out=result)
    told = torch.tensor([max(1, round(_BETWEEN_S / _best_s(product, place, collective=True)))], device=place.device)
    dist.broadcast(told, src=0)

    def compute() -> None:
        for _ in range(int(told)):
            product()

    return compute


def _beside_s(place: Place) -> tuple[float, float, float]:
    """Time products, an all_reduce, and both beside each other, each about as long."""
    kind = place.device.type
    edge, size = EDGES[kind][-2], MESSAGES[kind][-2]
    a, buffer = torch.ones(edge, edge, device=place.device), torch.zeros(size // 4, device=place.device)
    result = torch.empty_like(a)
    send_s = _best_s(lambda: dist.all_reduce(buffer), place, collective=True)
    once_s = _best_s(lambda: torch.mm(a, a, out=result), place, collective=True)
    told = torch.tensor([max(1, round(send_s / once_s))], device=place.device)
    dist.broadcast(told, src=0)

    def compute() -> None:
        for _ in range(int(told)):
            torch.mm(a, a, out=result)

    def both() -> None:
        work = dist.all_reduce(buffer, async_op=True)
        compute()
        work.wait()

    return _best_s(compute, place, collective=True), send_s, _best_s(both, place, collective=True)


# -- the profile -------------------------------------------------------------------------------------------------------


def _as_toml(figures: _Figures, ranks: int) -> str:
    """Write figures as a profile; every number has its source."""
    best = {name: max(rates.values()) for name, rates in figures.products.items()}
    on_gpu = figures.num_units > 0
    table: dict[str, Any] = {
        "memory_bytes": figures.memory_bytes,
        "memory_bytes_per_s": _rounded(figures.copied_bytes_per_s),
        "devices_per_node": ranks,
        "launch_s": _rounded(figures.launch_s),
    }
    sources = {
        "memory_bytes": f"measured: {figures.device}" if on_gpu else f"measured: the machine's by {ranks}",
        "memory_bytes_per_s": "measured: copy of a large buffer, bytes read and written, all devices at once",
        "devices_per_node": f"measured: {ranks} devices of this machine",
        "launch_s": f"measured: {_TINY} operations on one element, one after the other",
    }
    if on_gpu:
        table |= {"num_units": figures.num_units, "kernel_s": _rounded(figures.kernel_s)}
        sources["num_units"] = f"measured: as the driver says of {figures.device}"
        sources["kernel_s"] = "measured: kernels on one element behind a long product"
    else:
        table |= {"kernel_s": _rounded(figures.kernel_s), "step_s": _rounded(figures.step_s)}
        sources["kernel_s"] = (
            f"measured: operations of two blocks of width {_WIDTH} on a few tokens, forward and backward"
        )
        sources["step_s"] = f"measured: AdamW and the norm of {_SMALL} small gradients"
        if figures.unit_s is not None:
            table["unit_s"] = _rounded(figures.unit_s)
            sources["unit_s"] = f"measured: {_UNITS} layers of width {_WIDTH} under FSDP2, without their gathers"
        if figures.elementwise_part:
            table["memory_efficiency"] = _rounded(figures.elementwise_part)
            sources["memory_efficiency"] = "measured: activation, softmax and norm of one MiB, bytes read and written"
    table["overlap"], sources["overlap"] = _overlap(figures)
    table["flops_per_s"] = {name: _rounded(rate) for name, rate in best.items()}
    for name, rates in figures.products.items():
        curve = ", ".join(f"{edge}^3 {rate:.3g}" for edge, rate in rates.items())
        sources[f"flops_per_s.{name}"] = f"measured: FLOP/s of products {curve}; the best"
    if on_gpu:
        table["efficiency"] = dict.fromkeys(best, 1.0) | {"attention": _rounded(figures.attention_part or 1.0)}
        sources |= {
            f"efficiency.{name}": "measured: the peak given here is what the best product reaches" for name in best
        }
        sources["efficiency.attention"] = "measured: causal, 16 heads of 128, 4,096 tokens, forward"
    else:
        table["efficiency"] = {"attention": _rounded(figures.attention_part or 1.0)}
        table["sides"] = {name: _sides(rates) for name, rates in figures.products.items()}
        sources |= dict.fromkeys((f"sides.{name}" for name in best), "measured: the products above, beside the best")
        sources["efficiency.attention"] = "measured: causal, 4 heads of 32, 128 tokens, forward and backward"
    table["intra"], about = _intra(figures, ranks)
    sources |= {f"intra.{key}": text for key, text in about.items()}
    table["inter"] = {"latency_s": max(table["intra"]["latency_s"], 20e-6), "bytes_per_s": 0.125e9}
    sources["inter.latency_s"] = "assumed: no less than inside the machine, and 20 us"
    sources["inter.bytes_per_s"] = "assumed: gigabit Ethernet; write here what your network has"
    return tomli_w.dumps({**table, "sources": sources})


def _sides(rates: dict[int, float]) -> dict[str, float]:
    """Part of the best rate by edge; a larger product can be cut into smaller ones, so it reaches no less."""
    best, reached, parts = max(rates.values()), 0.0, {}
    for edge, rate in sorted(rates.items()):
        reached = max(reached, rate / best)
        parts[str(edge)] = min(1.0, _rounded(reached))
    return parts


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")


def _overlap(figures: _Figures) -> tuple[bool, str]:
    if figures.beside_s is None:
        return True, "assumed: one device sends nothing"
    compute_s, send_s, both_s = figures.beside_s
    said = f"products {compute_s:.3g} s, all_reduce {send_s:.3g} s, both at once {both_s:.3g} s"
    return both_s < _OVERLAPS_BELOW * (compute_s + send_s), f"measured: {said}"


def _intra(figures: _Figures, ranks: int) -> tuple[dict[str, float], dict[str, str]]:
    """Fit the ring's latency and bandwidth to the smallest and the largest all_reduce."""
    if ranks == 1:
        link = {"latency_s": 10e-6, "bytes_per_s": 25e9}
        return link, dict.fromkeys(link, "assumed: one device sends nothing; PCI Express 4.0, 16 lanes")
    times = figures.sent["all_reduce"]
    small, large = min(times), max(times)
    hops = 2 * (ranks - 1)
    latency_s = times[small] / hops
    moving_s = max(times[large] - times[small], 0.01 * times[large])
    link = {"latency_s": _rounded(latency_s), "bytes_per_s": _rounded(hops / ranks * (large - small) / moving_s)}
    said = {
        name: ", ".join(f"{size:,} B {taken_s * 1e6:.4g} us" for size, taken_s in found.items())
        for name, found in figures.sent.items()
    }
    return link, {
        "latency_s": f"measured: all_reduce of {small:,} B on {ranks} ranks, {hops} hops",
        "bytes_per_s": "measured: " + "; ".join(f"{name} on {ranks} ranks {text}" for name, text in said.items()),
    }
