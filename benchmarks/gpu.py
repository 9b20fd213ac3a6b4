"""One GPU, or several: is samestep right there, does it need what it predicts, and how fast is it?

    python benchmarks/gpu.py                     all parts, each in a process of its own, and each size of throughput
    python benchmarks/gpu.py correctness         verify, exact resume, waits of a step, NCCL, dropout: `gpu_correctness.py`
    python benchmarks/gpu.py predict             the device measured, and jobs predicted and run: `gpu_forecast.py`
    python benchmarks/gpu.py throughput          Llamas of four sizes beside a loop in torch alone: `gpu_throughput.py`
    python benchmarks/gpu.py ... --toy           at a size at which nothing but the code is tried, on a CPU too

Each process takes less than two minutes: no contestant begins after `--limit-s`, and at one and a half times that it prints
where it stands and ends. A process in which CUDA has failed can do no more there, which --sizes or --trials does alone. Every row is printed and written to `--rows` as soon as it is known: rows/gpu.json, of which
`python docs/tables.py` makes the tables in README.md beside it. Exits 1 where a part has failed or something is wrong; the
other parts, sizes and trials go on.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import faulthandler
import os
import platform
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # workers are forked on CPUs, which a used pool of threads forbids
sys.path.insert(0, str(Path(__file__).parent.parent / "src"))  # a machine without network installs nothing

import gpu_rows
import torch

from samestep.output.text import align_columns
from samestep.runtime.processes import join
from samestep.runtime.processes.join import RankInfo

Row = tuple[str, dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Given:
    """What the command line says."""

    part: str | None
    toy: bool
    device: str
    rows: Path | None
    """Where rows are written; None writes none."""
    sizes: tuple[str, ...]
    trials: tuple[str, ...]
    limit_s: float


def correctness(given: Given) -> Iterable[Row]:
    """Yield a row for each trial."""
    import gpu_correctness

    for name in given.trials or gpu_correctness.TRIALS:
        began = time.perf_counter()
        wrong = gpu_correctness.tried(name, given.device)
        values = {"outcome": "; ".join(wrong) or "right", "seconds": time.perf_counter() - began}
        yield name, values | ({"error": values["outcome"]} if wrong else {})


def predict(given: Given, place: RankInfo) -> Iterable[Row]:
    """Measure the device, and yield a row for each job."""
    import gpu_forecast

    path = given.rows.with_name("gpu-profile.toml") if given.rows else None
    with gpu_forecast.toy() if given.toy else contextlib.nullcontext():
        settings = gpu_forecast.TOY_SETTINGS if given.toy else gpu_forecast.SETTINGS
        machine = gpu_forecast.measured(place, path)
        yield from gpu_forecast.rows(place, machine, settings, *((16, 1) if given.toy else (2048, 9)))


def throughput(given: Given, place: RankInfo) -> Iterable[Row]:
    """Yield a row for each size and contestant."""
    import gpu_throughput

    end_s = time.monotonic() + given.limit_s
    yield from gpu_throughput.rows(place, [*chosen_sizes(given).items()], end_s, *((1, 1) if given.toy else ()))


def chosen_sizes(given: Given) -> dict[str, Any]:
    """Return the sizes of throughput by name."""
    import gpu_throughput

    known = gpu_throughput.TOY_SIZES if given.toy else gpu_throughput.SIZES
    return {name: known[name] for name in given.sizes or known}


def in_a_rank(part: Callable[[Given, RankInfo], Iterable[Row]], given: Given) -> Iterable[Row]:
    """Yield the rows of a part for which this process joins a world of its own."""
    place = join.join(given.device)
    try:
        yield from part(given, place)
    finally:
        join.leave()


PARTS: dict[str, Callable[[Given], Iterable[Row]]] = {
    "correctness": correctness,
    "predict": lambda given: in_a_rank(predict, given),
    "throughput": lambda given: in_a_rank(throughput, given),
}


def machine_of(device: str) -> gpu_rows.Measured:
    """Return the name of this machine's device, the software and the day."""
    name, kind = f"{platform.machine()} CPU", join.resolve_device(device)
    if kind == "cuda":
        join.set_defaults(join.allocator_variables(kind))  # before the first use of a GPU, which follows
        name = torch.cuda.get_device_name(0)
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    return gpu_rows.Measured(name, torch.__version__, platform.python_version(), today)


def run(given: Given) -> int:
    """Carry out one part in this process; return how many of its rows are errors."""
    assert given.part is not None
    where = machine_of(given.device)
    print(f"{given.part} on {where.machine}, torch {where.torch}, Python {where.python}", flush=True)
    found: list[Row] = []
    errors = 0
    try:
        for name, values in PARTS[given.part](given):
            found.append((name, values))
            errors += "error" in values
            print(f"  {name}: {_said(given.part, values)}", flush=True)
            if given.rows is not None:
                gpu_rows.write(given.rows, where, given.part, name, values)
    except Exception as error:
        traceback.print_exc()
        print(f"  {given.part} failed: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
        errors += 1
    if found:
        print(
            align_columns([gpu_rows.head(given.part), *(gpu_rows.cells(given.part, *row) for row in found)]), flush=True
        )
    return errors


def _said(part: str, values: dict[str, Any]) -> str:
    titles, cells = gpu_rows.head(part)[1:], gpu_rows.cells(part, "", values)[1:]
    return ", ".join(f"{title} {cell}" for title, cell in zip(titles, cells, strict=True) if cell)


def run_all(given: Given, words: Sequence[str]) -> int:
    """Carry out each part in a process of its own, and each size of throughput; return how many have failed."""
    failed = 0
    for part in PARTS:
        alone = [["--sizes", size] for size in chosen_sizes(given)] if part == "throughput" else [[]]
        for more in alone:
            command = [sys.executable, __file__, part, *words, *more]
            status = subprocess.run(command, check=False).returncode
            failed += status != 0
            if status < 0:
                print(f"{' '.join([part, *more])} ended by signal {-status}", flush=True)
    return failed


def parsed(words: Sequence[str] | None) -> Given:
    """Return what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", nargs="?", choices=PARTS)
    parser.add_argument("--toy", action="store_true", help="tiny sizes; no rows are written without --rows")
    parser.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: a GPU if there is one"
    )
    parser.add_argument(
        "--rows", type=Path, metavar="FILE", help="default: rows/gpu.json; predict writes gpu-profile.toml beside"
    )
    parser.add_argument("--sizes", nargs="+", default=[], metavar="SIZE", help="of throughput: 0.5B 1B 3B 8B-layers")
    parser.add_argument(
        "--trials", nargs="+", default=[], metavar="NAME", help="of correctness: nccl waits dropout resume verify"
    )
    parser.add_argument("--limit-s", type=float, default=100.0, metavar="S", help="seconds of a part; default: 100")
    said = parser.parse_args(words)
    rows = said.rows or (None if said.toy else gpu_rows.KEPT)
    return Given(said.part, said.toy, said.device, rows, tuple(said.sizes), tuple(said.trials), said.limit_s)


def main(words: Sequence[str] | None = None) -> int:
    """Run one part, or each in a process of its own; return 1 where something is wrong."""
    words = sys.argv[1:] if words is None else words
    given = parsed(words)
    if given.part is None:
        return int(run_all(given, words) > 0)
    warnings.simplefilter("default")
    faulthandler.dump_traceback_later(1.5 * given.limit_s, exit=True, file=sys.__stderr__)
    try:
        return int(run(given) > 0)
    finally:
        faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    sys.exit(main())
