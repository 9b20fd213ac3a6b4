"""What checkpoints cost, beside torch's own distributed checkpoint: the wait of a step, the time of writing, the share of hashing.

    python benchmarks/checkpoint.py [--turns 5] [--keep]      [--layouts "dp=2 zero=1" ...]

With --keep what is measured replaces its rows in benchmarks/rows/checkpoint.json, which docs/checkpoints.md shows.

A run saves every 20 steps in the background (`checkpoint.background`). A step waits for the copy, and for what is left of the
writing when the next save comes:

    waits = seconds in saves / seconds of the steps between them

torch's own is `torch.distributed.checkpoint.async_save` of what its `get_state_dict` returns, in a loop that people write by
hand: alone, with DDP, or with fully_shard. Both have the same model, AdamW and folder, and wait for the disk (fsync).

Processor time of writing is that of all ranks in a save that nothing else goes on beside: with as many cores as ranks the
steps pay for it too. Hashing is part of our writing alone; its share is that of a file of tensors written with and without.
Exits 1 where a step waits for 2 per cent of its time or more, or hashing adds more than a fifth.
"""

from __future__ import annotations

import argparse
import gc
import json
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from peers import CLIP_NORM, Windows, adamw, build, ddp_options, loss_mean, loss_sum
from torch import nn

import samestep
from samestep.output import durable_files
from samestep.runtime.checkpoints import writer
from samestep.training.rank_part import Saver

ROWS = Path(__file__).parent / "rows" / "checkpoint.json"
WAITS, HASHES = 0.02, 0.2
"""The largest parts of a step's and of the writing's time."""
EVERY, BATCH = 20, 8
LAYOUTS = ("dp=1", "dp=2", "dp=2 zero=1", "dp=2 zero=3")
SIZES = ("middle", "heavy")
"""Models of `peers.py`, with samples of 64 tokens."""


@dataclass(frozen=True)
class Cost:
    """What one contestant's checkpoints cost in a layout; sums over its ranks where nothing else is said."""

    layout: str
    size: str
    whose: str
    mib: float
    """Size of a checkpoint."""
    step_s: float
    """Median of the steps without a save."""
    waits: float
    """Seconds in saves by seconds of steps; of the rank that waits most."""
    writing_s: float
    """Seconds of a save that nothing goes on beside."""
    processor_s: float
    """Processor time of it."""


# -- the contestants: each yields after a step, and a turn of steps begins with a save --------------


@dataclass
class Contestant:
    """A loop that takes steps and saves."""

    step: Callable[[], object]
    begin: Callable[[], None]
    """Begin a save, once the one before has ended."""
    finish: Callable[[], None]
    """Wait for the save that was begun."""


def ours(rank: Any, layout: str, size: str, folder: Path) -> Contestant:
    where = samestep.Layout(layout)
    job = samestep.Job(
        train={"global_batch": BATCH * where.dp, "steps": 10**6, "watch_every": 0},
        optimizer={"clip_norm": CLIP_NORM},
        checkpoint={"keep": 1},
        run={"device": "cpu"},
    )
    run = samestep.parallelize(lambda: build(size), loss_sum, adamw, layout=layout, job=job)
    stream: Iterator[Any] = samestep.batches(Windows(size, 4096), job)
    saver = Saver(run, folder / "checkpoints", print)
    saver._settings = job.checkpoint.model_copy(update={"background": True})
    return Contestant(
        lambda: run.step(next(stream)), lambda: saver.save(is_last=False), lambda: saver._try(saver._finish, must=True)
    )


def torchs(rank: Any, layout: str, size: str, folder: Path) -> Contestant:
    import torch.distributed as dist
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    if not dist.is_initialized():  # of one rank: async_save wants a group in any case
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    place, world = dist.get_rank(), dist.get_world_size()
    own_group = dist.new_group(backend="gloo")  # of the thread that writes, beside the steps
    model: nn.Module = build(size)
    if "zero=3" in layout:
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
    elif world > 1:
        model = DistributedDataParallel(model, **ddp_options())
    optimizer = adamw(model.parameters())
    data, taken, saving = Windows(size, 4096), 0, None

    def step() -> None:
        nonlocal taken
        first = (taken * world + place) * BATCH
        rows = [data[(first + index) % len(data)] for index in range(BATCH)]
        batch = {key: torch.stack([row[key] for row in rows]) for key in rows[0]}
        loss = loss_mean(model(batch["input_ids"]), batch)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        optimizer.step()
        loss.item()
        taken += 1

    def finish() -> None:
        nonlocal saving
        if saving is not None:
            saving.result()
        saving = None

    def begin() -> None:
        nonlocal saving
        finish()
        weights, states = get_state_dict(model, optimizer)
        if place == 0:
            for old in folder.glob("step-*"):
                shutil.rmtree(old)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            saving = checkpoint.async_save(  # type: ignore[attr-defined]
                {"model": weights, "optim": states}, checkpoint_id=folder / f"step-{taken}", process_group=own_group
            )

    return Contestant(step, begin, finish)


KINDS: dict[str, Callable[[Any, str, str, Path], Contestant]] = {"samestep": ours, "torch": torchs}


def measured(rank: Any, whose: str, layout: str, size: str, folder: Path, turns: int) -> dict[str, float]:
    """Take turns of steps, each of which begins with a save; return one rank's times in seconds."""
    contestant = KINDS[whose](rank, layout, size, folder)
    for _ in range(6):
        contestant.step()
    contestant.begin()  # the first save makes what later ones have, of either
    contestant.finish()
    plain = [_timed(contestant.step) for _ in range(EVERY)]
    waited = took = 0.0
    for _ in range(turns):
        waited += _timed(contestant.begin)
        took += sum(_timed(contestant.step) for _ in range(EVERY))
        waited += _timed(contestant.finish)
    gc.collect()
    contestant.step()  # a checkpoint of its own
    began, processor = time.perf_counter(), time.process_time()
    contestant.begin()
    contestant.finish()
    alone = {"processor_s": time.process_time() - processor, "writing_s": time.perf_counter() - began}
    return {"step_s": statistics.median(plain), "waits": waited / took, **alone}


def _timed(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def cost(whose: str, layout: str, size: str, turns: int) -> Cost:
    """Measure one contestant in one layout."""
    ranks = samestep.Layout(layout).world_size
    with tempfile.TemporaryDirectory(prefix="samestep-checkpoint-") as name:
        folder = Path(name)
        rows = samestep.launch(measured, (whose, layout, size, folder, turns), ranks=ranks, device="cpu")
        found = rows if isinstance(rows, list) else [rows]
        stored_bytes = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    most = {key: max(one[key] for one in found) for key in ("step_s", "waits", "writing_s")}
    return Cost(layout, size, whose, stored_bytes / 2**20, processor_s=sum(one["processor_s"] for one in found), **most)


# -- hashing ---------------------------------------------------------------------------------------


class _NoDigest:
    """What takes the place of xxhash's digest, to see what it costs."""

    def update(self, _: object) -> None:
        """Do nothing."""

    def hexdigest(self) -> str:
        """Return the digest of nothing."""
        return ""


def hashing(turns: int) -> tuple[float, float]:
    """Return the medians of seconds in which a file of 64 MiB is written with and without a digest, in turn."""
    tensors = {str(index): torch.randn(1 << 20) for index in range(16)}
    plain = type("Plain", (), {"xxh3_128": staticmethod(_NoDigest)})
    names: Any = durable_files
    digests, times = names.xxhash, ([], [])
    with tempfile.TemporaryDirectory(prefix="samestep-checkpoint-") as folder:
        for number in range(2 * turns):
            path = Path(folder, "file")
            names.xxhash = (digests, plain)[number % 2]
            times[number % 2].append(_timed(lambda path=path: writer.write(path, tensors)))
            path.unlink()
    names.xxhash = digests
    return statistics.median(times[0]), statistics.median(times[1])


# -- the table -------------------------------------------------------------------------------------


def table(found: dict[str, Any]) -> str:
    """Return the costs, as a table of Markdown."""
    lines = ["| layout | model | step, ms | MiB | waits | seconds of writing | CPU seconds |"]
    lines.append("| --- | --- | ---: | ---: | ---: | ---: | ---: |")
    rows = [Cost(**one) for one in found["costs"].values()]
    for mine in (one for one in rows if one.whose == "samestep"):
        other = next(o for o in rows if (o.layout, o.size, o.whose) == (mine.layout, mine.size, "torch"))
        pairs = [(one.step_s * 1e3, one.mib, one.waits * 100, one.writing_s, one.processor_s) for one in (mine, other)]
        forms = ("{:.1f}", "{:.1f}", "{:.2f} %", "{:.3f}", "{:.3f}")
        cells = (" / ".join(form.format(pair[index]) for pair in pairs) for index, form in enumerate(forms))
        lines.append(f"| `{mine.layout}` | {mine.size} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def hashing_line(found: dict[str, Any]) -> str:
    """Return what hashing adds to writing, as a sentence."""
    hashed, plain = found["hashing"]
    return f"A file of 64 MiB takes {hashed * 1e3:.0f} ms with the digest that is computed on the way, and {plain * 1e3:.0f} ms without."


def kept() -> str:
    """Return the table and the sentence of the rows that were kept."""
    found = json.loads(ROWS.read_text())
    return f"{table(found)}\n\n{hashing_line(found)}"


def main(words: Sequence[str] | None = None) -> int:
    """Measure, print, and with --keep write the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=5, help="saves of each contestant, with 20 steps behind each")
    parser.add_argument("--layouts", nargs="*", default=LAYOUTS)
    parser.add_argument("--keep", action="store_true", help=f"write {ROWS.name}")
    chosen = parser.parse_args(words)
    known = json.loads(ROWS.read_text()) if ROWS.exists() else {"costs": {}, "hashing": [0, 0]}
    print(*Cost.__dataclass_fields__)
    is_good = True
    for layout in chosen.layouts:
        for size in SIZES:
            for whose in KINDS:
                one = cost(whose, layout, size, chosen.turns)
                print(*map(_cell, asdict(one).values()), flush=True)
                known["costs"][f"{layout}, {size}, {whose}"] = asdict(one)
                is_good &= one.waits < WAITS or whose != "samestep"
                if chosen.keep:
                    ROWS.write_text(json.dumps(known, indent=1) + "\n")
    known["hashing"] = hashed, plain = hashing(5 * chosen.turns)
    print(hashing_line(known))
    if chosen.keep:
        ROWS.write_text(json.dumps(known, indent=1) + "\n")
    return int(not is_good or hashed / plain - 1 > HASHES)


def _cell(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    sys.exit(main())
