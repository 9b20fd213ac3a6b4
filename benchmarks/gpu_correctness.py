"""What must hold on a real device before anything is timed there: five trials at toy size.

    verify   `samestep verify` of layouts for as many GPUs as there are, with workers that are spawned
    resume   `samestep train` twice as long, and stopped and resumed: the same losses to the bit, by deterministic kernels
    waits    the waits of a step by function, which must be those that tests/device counts on a simulated device
    nccl     each kind of collective and a split of the world, on as many ranks as there are GPUs
    dropout  attention with dropout by our kernels: `gpu_attention.py`

Each trial returns what it has found wrong, or nothing; `tests/device` has the rest (`make gpu`).
"""

from __future__ import annotations

import json
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gpu_attention
import torch
import torch.distributed as dist

from samestep import Job, Layout, train, verify
from samestep.datasets import batches
from samestep.runtime.processes import mesh, messages, workers
from samestep.runtime.processes.join import RankInfo, resolve_device
from samestep.runtime.run import Run
from samestep.training.workload import Workload

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

LAYOUTS = {
    1: ("dp=1 microbatch=2 recompute=full offload",),
    2: ("dp=2 zero=3 microbatch=2", "tp=2 sequence_parallel", "pp=2 microbatch=1", "cp=2"),
}
"""By the number of GPUs that they need; those of fewer GPUs run too."""


def job(precision: str = "bf16", device: str = "cuda", **tables: Any) -> Job:
    """Return a small job of four steps with its own data."""
    config = {
        "vocab_size": 256, "hidden_size": 16, "intermediate_size": 40, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    }  # fmt: skip
    return Job(
        model={"source": "hf:llama", "config": config},
        data={"sequence_length": 16, "held_out": 0.0},
        train={"global_batch": 4, "steps": 4, "evaluate_samples": 0, "sample_tokens": 0, **tables.pop("train", {})},
        optimizer={"name": "adamw", "lr": 1e-2, "clip_norm": 0.5},
        numerics={"precision": precision, **tables.pop("numerics", {})},
        run={"device": device},
        **tables,
    )


Trial = Callable[[str], Iterator[str]]
"""A trial of a kind of device; it yields what is wrong."""


def devices(kind: str) -> int:
    """Return how many ranks can run: one on CPUs, which hold nothing against NCCL."""
    return torch.cuda.device_count() if resolve_device(kind) == "cuda" else 1


def proofs(kind: str) -> Iterator[str]:
    """Prove layouts on the devices that there are."""
    for needed, layouts in LAYOUTS.items():
        for layout in layouts if needed <= devices(kind) else ():
            verdict = verify(job(device=kind), layout=layout, steps=2)
            if not verdict.proven:
                yield f"{layout!r} differs: {verdict.to_line()}"


def resume(kind: str) -> Iterator[str]:
    """Train four steps in one run, and in two; hold losses and norms against each other."""
    chosen = job(device=kind, numerics={"deterministic": True}, checkpoint={"every": 2})
    with tempfile.TemporaryDirectory() as folder:
        train(chosen, layout="dp=1", out=f"{folder}/whole")
        train(chosen, layout="dp=1", out=f"{folder}/parts", steps=2)
        train(chosen, layout="dp=1", out=f"{folder}/parts", resume=True)
        whole, parts = (_numbers(Path(folder) / name / "metrics.jsonl") for name in ("whole", "parts"))
    if whole != parts or len(whole) != chosen.train.steps:
        yield f"losses and norms of one run {whole}, of the resumed one {parts}"


def _numbers(metrics: Path) -> list[tuple[float, float]]:
    lines = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    return [(line["loss"], line["grad_norm"]) for line in lines]


def waiting(kind: str) -> Iterator[str]:
    """Count the waits of a step in a worker."""
    yield from workers.run_workers(waits_of_a_step, ranks=1, device=kind)


def waits_of_a_step(place: RankInfo) -> list[str]:
    """Return the functions in which the third step waits otherwise than on a simulated device."""
    from tests.device import test_waits, waits

    chosen = job(device=place.device.type, train={"watch_every": 0})
    workload = Workload(chosen)
    run = Run(workload.source, Layout("dp=1"), chosen, place)
    stream = batches(workload.dataset, chosen)
    with waits.counting():
        for _ in range(3):
            waits.clear()
            run.step(next(stream))
        found = waits.by_function(waits.counted)
    on_gpu = place.device.type == "cuda"
    expected = waits.by_function(test_waits.of_one_rank()) if on_gpu else waits.by_function(type(waits.counted)())
    return [
        f"{where}: {found[where]} waits, {expected[where]} expected"
        for where in sorted({*found, *expected})
        if found[where] != expected[where]
    ]


def collectives(kind: str) -> Iterator[str]:
    """Try the collectives in as many workers as there are devices."""
    yield from workers.run_workers(wrong_collectives, ranks=devices(kind), device=kind, timeout_s=60.0)


def wrong_collectives(place: RankInfo) -> list[str]:
    """Return the kinds of collectives whose results are wrong on this rank.

    Collective over the world: every rank calls it; if one does not, the others wait until the time limit.
    """
    ranks, rank, device = place.world_size, place.rank, place.device
    everyone = tuple(range(ranks))
    split = mesh.group_among((everyone,), "tried", 60.0)
    assert split is not None
    mine = torch.full((ranks, 3), float(rank + 1), device=device)
    total, all_ranks = sum(range(1, ranks + 1)), torch.arange(1.0, ranks + 1, device=device)
    right: dict[str, bool] = {}

    def holds(name: str, found: torch.Tensor, expected: torch.Tensor | float) -> None:
        right[name] = bool((found == expected).all())

    for name, group in (("all_reduce", dist.group.WORLD), ("all_reduce in a split group", split)):
        summed = mine.clone()
        work = dist.all_reduce(summed, group=group, async_op=True)
        work.wait()
        holds(name, summed, total)
    least = torch.tensor([rank, -rank], device=device)
    dist.all_reduce(least, op=dist.ReduceOp.MIN)
    holds("all_reduce of the least", least, torch.tensor([0, 1 - ranks], device=device))
    gathered, part = mine.new_empty(3 * ranks), mine.new_empty(3)
    mesh.all_gather(gathered, mine[0].contiguous())
    holds("all_gather", gathered.view(ranks, 3), all_ranks[:, None])
    mesh.reduce_scatter(part, mine.flatten())
    holds("reduce_scatter", part, total)
    exchanged = torch.empty_like(mine)
    dist.all_to_all_single(exchanged, mine)
    holds("all_to_all", exchanged, all_ranks[:, None])
    sent = mine.clone()
    dist.broadcast(sent, src=0)
    holds("broadcast", sent, 1.0)
    dist.reduce(sent.fill_(2.0), dst=0)
    holds("reduce", sent if rank == 0 else sent.fill_(2.0 * ranks), 2.0 * ranks)
    right["objects"] = messages.gather_values({"rank": rank}, ranks) == [{"rank": one} for one in everyone]
    if ranks > 1:
        came = torch.empty_like(mine)
        calls = [
            lambda: dist.isend(mine, (rank + 1) % ranks, split),
            lambda: dist.irecv(came, (rank - 1) % ranks, split),
        ]
        for work in [call() for call in (calls if rank % 2 == 0 else reversed(calls))]:
            work.wait()
        holds("messages", came, float((rank - 1) % ranks + 1))
    dist.barrier()
    return [f"{name} is wrong on rank {rank} of {ranks}" for name, is_right in right.items() if not is_right]


TRIALS: dict[str, Trial] = {
    "nccl": collectives, "waits": waiting, "dropout": gpu_attention.wrong_attentions, "resume": resume, "verify": proofs
}  # fmt: skip
"""The quickest first."""


def tried(name: str, kind: str) -> list[str]:
    """Return what a trial has found wrong; an exception is one line of it."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("default")
            return list(TRIALS[name](kind))
    except Exception as error:
        traceback.print_exc()
        return [f"{type(error).__name__}: {error}".splitlines()[0]]
