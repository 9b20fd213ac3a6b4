"""Host time of a step beside the loop that a person would write for the same numerics, where arithmetic is negligible.

    python benchmarks/host.py [--rounds 16] [--only WORD] [--json FILE] [--keep]

On a GPU the host must run ahead of the device, so what counts is the host's time per step. The models are tiny and have the
operations of real ones. Each row runs both contestants in the same processes by turns of three steps; a figure is the median over
the turns of the ratio of their thread times (waiting and being descheduled do not count), with its quartiles. A second copy of the
peer against the first shows the noise. The calls of ATen and of Python functions in a step are counted too: a bound of them needs no
clock (`tests/benchmarks/test_host.py`). With --keep the figures replace those in benchmarks/rows/host.json, which
docs/reference/waits.md shows.

Rows of compiled blocks are held against the same layout without a compiler. One that is slower beyond its quartiles is named under the table;
nothing is compiled by default.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent))

import host_models
import host_peers
import host_rows
import torch
import torch.distributed as dist
from host_rows import ROWS, Row
from torch.utils._python_dispatch import TorchDispatchMode

import samestep
from samestep.output.text import align_columns

STEPS_EACH = 3
"""Timed steps of a turn; one more before them is not timed."""
WARM_STEPS = 12


def ours(row: Row) -> Iterator[float]:
    """Yield the losses of samestep's steps."""
    data_ranks = samestep.Layout(row.layout).dp
    job = samestep.Job(
        train={"global_batch": row.samples * row.microbatches * data_ranks, "steps": 1 << 16, "watch_every": 0},
        optimizer={"clip_norm": host_peers.CLIP_NORM},
        numerics={"precision": row.precision},
        run={"device": "cpu", **({"compile": "blocks", "compile_backend": row.backend} if row.backend else {})},
    )
    layout = row.layout + (f" microbatch={row.samples}" if row.microbatches > 1 else "")
    run = samestep.parallelize(
        lambda: host_models.build(row.model, **row.options),
        host_models.loss_sum,
        host_peers.adamw,
        layout=layout,
        job=job,
    )
    for batch in samestep.batches(host_models.Samples(row.model), job):
        yield run.step(batch).loss


def peer_of(row: Row) -> Callable[[Row], Iterator[float]]:
    """Return what a row is held against: a function that yields the losses of its steps."""
    return ours if row.peer == host_rows.UNCOMPILED else host_peers.PEERS[row.peer]


class CountedCalls(TorchDispatchMode):
    """Counts calls of ATen, and those among them that are collectives."""

    number = collectives = 0
    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let compiled blocks run compiled."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += 1
        self.collectives += func.namespace == "c10d"
        return func(*args, **(kwargs or {}))


def calls_of(steps: Iterator[float], *, warm: int = 9) -> int:
    """Return the number of ATen calls in one step, after some that are not counted."""
    for _ in range(warm):
        next(steps)
    with CountedCalls() as calls:
        next(steps)
    return calls.number


def python_calls_of(steps: Iterator[float], *, warm: int = 9) -> int:
    """Return the number of Python functions called in one step on the thread of the steps, after some that are not counted."""
    for _ in range(warm):
        next(steps)
    events: list[str] = []
    sys.setprofile(lambda frame, event, arg: events.append(event))
    try:
        next(steps)
    finally:
        sys.setprofile(None)
    return events.count("call")


def measured(_: Any, row: Row, rounds: int) -> dict[str, Any]:
    """Return the ratios of one row on this rank: thread time of ours and of the peer's second copy over the peer's."""
    torch.set_num_threads(1)
    peer, plain = peer_of(row), replace(row, backend="")
    contestants = {"peer": peer(plain), "ours": ours(row)}
    if row.num_ranks == 1:  # two schedules of torch's, or two DDPs, would share their groups
        contestants["twin"] = peer(plain)
    for steps in contestants.values():
        for _ in range(WARM_STEPS):
            next(steps)
    gc.collect()
    gc.freeze()
    names, spent = [*contestants], {name: [] for name in contestants}
    for turn in range(rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            steps = contestants[name]
            next(steps)
            if row.num_ranks > 1:
                dist.barrier()
            began = time.thread_time()
            for _ in range(STEPS_EACH):
                next(steps)
            spent[name].append((time.thread_time() - began) / STEPS_EACH)
    gc.unfreeze()
    ratios = {name: [a / b for a, b in zip(spent[name], spent["peer"], strict=True)] for name in names[1:]}
    calls = {name: calls_of(contestants[name], warm=0) for name in ("peer", "ours")}
    python = {name: python_calls_of(contestants[name], warm=0) for name in ("peer", "ours")}
    return {
        "ratios": ratios,
        "ms": {name: 1e3 * statistics.median(values) for name, values in spent.items()},
        "calls": calls,
        "python": python,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=16, help="turns of each contestant")
    parser.add_argument("--only", default="", metavar="WORD", help="rows whose name contains it")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all values")
    parser.add_argument(
        "--keep", action="store_true", help=f"keep the figures in {host_rows.KEPT.name}, for the documents"
    )
    words = parser.parse_args()
    rows = [row for row in ROWS if words.only in row.name]
    if not rows:
        sys.exit(f"no row has {words.only!r} in its name: the rows are {', '.join(row.name for row in ROWS)}")
    lines, values = [[*host_rows.HEADINGS]], {}
    for row in rows:
        values[row.name] = found = samestep.launch(measured, (row, words.rounds), ranks=row.num_ranks, device="cpu")
        figures = host_rows.figures_of(found)
        lines.append(host_rows.cells(row, figures))
        print("  ".join(lines[-1]), flush=True)
        if words.keep:
            host_rows.keep({row.name: figures})
    print(align_columns(lines))
    slower = [row.name for row in rows if host_rows.is_slower(row, host_rows.figures_of(values[row.name]))]
    if slower:
        print(
            f"slower than without a compiler, beyond the quartiles: {'; '.join(slower)}: run.compile = 'none' (the default) works"
        )
    print(f"load now {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores, torch {torch.__version__}")
    if words.json:
        words.json.write_text(json.dumps(values, indent=1) + "\n")


if __name__ == "__main__":
    main()
