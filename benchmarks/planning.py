"""Seconds of plans and simulations, beside their aims: one core, processor time, garbage and first prices included.

    python benchmarks/planning.py [--json FILE] [--only WORD]
    python benchmarks/planning.py --before FOLDER --json FILE      another checkout and this one in turn; the less of two seconds each

An aim is for an idle machine of today; the line of a plain loop says how fast this one is: about 0.4 s on such a machine. The megabytes are
the most that the process has held so far: with --only they are those of one row.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from samestep import Job, Layout, hardware, load
from samestep.models import presets
from samestep.wings.plan import search
from samestep.wings.plan.simulation.simulate import predict

H100 = "h100x8"
ROOT = Path(__file__).parent.parent
JOB = ROOT / "jobs" / "default.toml"
TURNS = 2
"""Runs of each row in each of two checkouts, of which the shortest counts: load makes processor seconds longer, and never shorter."""


def _job(name: str, sequence: int, batch: int) -> Job:
    return Job(
        model={"source": f"preset:{name}"},
        data={"sequence_length": sequence},
        train={"global_batch": batch},
        numerics={"precision": "bf16"},
    )


def plan(name: str, devices: int, sequence: int, batch: int) -> Callable[[], object]:
    """Return what plans a preset on so many devices."""
    model, job, machine = presets.preset(name, sequence), _job(name, sequence, batch), hardware.load(H100)
    return lambda: search.plan(model, job, machine, devices)


def plan_default(devices: int) -> Callable[[], object]:
    """Return what plans the default job."""
    from samestep.models import catalog

    job, machine = load(JOB), hardware.load(H100)
    model = catalog.model_spec(job)
    return lambda: search.plan(model, job, machine, devices)


def simulation() -> Callable[[], object]:
    """Return what plays 4,096 devices, 96 layers, 64 micro-batches."""
    model, job, machine = presets.preset("gpt3-175b", 2048), _job("gpt3-175b", 2048, 64 * 64), hardware.load(H100)
    layout = Layout("dp=64 zero=1 tp=8 pp=8 microbatch=1 sequence_parallel")
    return lambda: predict(model, job, layout, machine).to_record()


def _loop() -> None:
    total = 0
    for number in range(10**7):
        total += number


ROWS: dict[str, tuple[Callable[[], Callable[[], object]], float]] = {
    "a loop of 10 million additions": (lambda: _loop, 0.4),
    "simulate gpt3-175b, 4096 devices, 64 micro-batches": (simulation, 0.3),
    "plan the default job, 512 devices": (lambda: plan_default(512), 2.0),
    "plan llama3-70b, 512 devices": (lambda: plan("llama3-70b", 512, 8192, 1024), 2.0),
    "plan gpt3-175b, 512 devices": (lambda: plan("gpt3-175b", 512, 2048, 1536), 2.0),
    "plan mixtral-8x7b, 512 devices": (lambda: plan("mixtral-8x7b", 512, 4096, 1024), 2.0),
    "plan deepseek-v3, 4096 devices": (lambda: plan("deepseek-v3", 4096, 4096, 15360), 5.0),
    "plan llama3-70b, 4096 devices": (lambda: plan("llama3-70b", 4096, 8192, 2048), 10.0),
    "plan gpt3-175b, 4096 devices": (lambda: plan("gpt3-175b", 4096, 2048, 1536), 10.0),
}


def in_turn(before: Path, word: str) -> dict[str, dict[str, float]]:
    """Return the processor seconds of each plan in another checkout and in this one, each row in a process of its own."""
    found: dict[str, dict[str, float]] = {}
    for name in (name for name in ROWS if name.startswith("plan") and word in name):
        for _ in range(TURNS):
            for place, folder in (("before", before), ("now", ROOT)):
                took_s = _seconds_in(folder, name)
                alike = found.setdefault(name, {})
                alike[place] = min(took_s, alike.get(place, took_s))
        print(f"{name:<52} {found[name]['before']:7.2f} s before {found[name]['now']:7.2f} s now", flush=True)
    return found


def _seconds_in(folder: Path, name: str) -> float:
    with tempfile.TemporaryDirectory() as place:
        file = Path(place) / "row.json"
        command = [sys.executable, str(folder / "benchmarks" / "planning.py"), "--only", name, "--json", str(file)]
        environment = {**os.environ, "PYTHONPATH": str(folder / "src")}
        subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)
        return json.loads(file.read_text(encoding="utf-8"))[name]["seconds"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Time each row and print it."""
    parser = argparse.ArgumentParser(description="seconds of plans and simulations, beside their aims")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures")
    parser.add_argument("--only", default="", metavar="WORD", help="rows that have this word")
    parser.add_argument("--before", type=Path, metavar="FOLDER", help="compare with another checkout")
    words = parser.parse_args(arguments)
    record: dict[str, dict[str, float]] = in_turn(words.before, words.only) if words.before else {}
    for name, (make, aim_s) in ROWS.items():
        if words.before or words.only not in name:
            continue
        work = make()
        began = time.process_time()
        found = work()
        took_s = time.process_time() - began
        megabytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        record[name] = {"seconds": took_s, "aim": aim_s, "megabytes": megabytes}
        layouts = ""
        if isinstance(found, search.Plan):
            record[name] |= {"layouts": found.considered, "played": found.played}
            layouts = f"   {found.considered:,} layouts, {found.played} played"
        late = "" if took_s <= aim_s else "   NO"
        print(f"{name:<52} {took_s:7.2f} s   aim {aim_s:g} s   {megabytes:,.0f} MB{layouts}{late}", flush=True)
    if words.json:
        words.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
