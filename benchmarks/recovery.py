"""How long a run of 4 workers stands still after a fault: from the fault to the next step that it logs.

    python benchmarks/recovery.py [--turns 7] [--keep]

With --keep what is measured replaces benchmarks/rows/recovery.json, which docs/checkpoints.md shows.

    a worker is killed     the command starts the workers again (`run.restarts`) from the newest checkpoint
    the command is killed  its workers die with it, and a script starts it anew with --auto-resume: a new process imports torch

A turn takes both, and imports torch alone in a process of its own, so that other work on the machine affects all of them. Our
own share of a recovery is what is left of it without that import. Exits 1 where a median is above its aim.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil

ROWS = Path(__file__).parent / "rows" / "recovery.json"
WORKERS, EVERY, KILLED_AT = 4, 5, 7
RECOVERY_S, OWN_S = 12.0, 3.0
"""The aims: seconds of a recovery, and of those our own beside importing torch."""
_LIMIT_S = 600.0
WORKER, COMMAND, TORCH = "a worker is killed", "the command is killed", "importing torch alone"


def recovered_s(folder: Path, of: str) -> float:
    """Start a run, kill a worker of it or the command, and return the seconds from then to the next step."""
    folder.mkdir()
    run, said = folder / "run", folder / "said"
    command = _started(run, said)
    _wait(lambda: _last_step(run) >= KILLED_AT)
    if of == WORKER:
        began = time.monotonic()
        psutil.Process(command.pid).children()[-1].kill()
    else:
        command.kill()
        command.wait()
        began = time.monotonic()
        command = _started(run, said)
    try:
        _wait(lambda: "resumes after step" in said.read_text())
        at = int(said.read_text().partition("resumes after step ")[2].split()[0])
        _wait(lambda: _last_step(run) > at)
        return time.monotonic() - began
    finally:
        command.kill()
        command.wait()


def importing_s() -> float:
    """Return the seconds in which a new process imports torch and ends."""
    began = time.monotonic()
    subprocess.run([sys.executable, "-c", "import torch, torch._dynamo"], check=True)  # any optimizer imports both
    return time.monotonic() - began


def _started(run: Path, said: Path) -> subprocess.Popen[bytes]:
    keys = {"train.steps": 100_000, "checkpoint.every": EVERY, "run.restarts": 1, "run.device": '"cpu"'}
    words = [word for name, value in keys.items() for word in ("--set", f"{name}={value}")]
    words += ["--layout", f"dp={WORKERS}", "--out", str(run), "--auto-resume"]
    with said.open("wb") as talk:
        return subprocess.Popen([sys.executable, "-m", "samestep", "train", *words], stdout=talk, stderr=talk)


def _last_step(run: Path) -> int:
    """Return the number of the last whole line of the log."""
    log = run / "metrics.jsonl"
    whole = log.read_text().rpartition("\n")[0] if log.exists() else ""
    return int(json.loads(whole.rpartition("\n")[2])["step"]) if whole else 0


def _wait(happened: Callable[[], bool]) -> None:
    end = time.monotonic() + _LIMIT_S
    while not happened():
        if time.monotonic() > end:
            raise TimeoutError("the run took no further step")
        time.sleep(0.01)


def own_s(found: dict[str, list[float]], of: str) -> float:
    """Return the median of our own share: of a new process without the import of torch in the same turn."""
    imports = found[TORCH] if of == COMMAND else [0.0] * len(found[of])
    return statistics.median(one - other for one, other in zip(found[of], imports, strict=True))


def table(found: dict[str, list[float]]) -> str:
    """Return the medians and the largest seconds, as a table of Markdown."""
    lines = [
        f"| {WORKERS} workers on a CPU | median, s | most, s | beside importing torch, s |",
        "| --- | ---: | ---: | ---: |",
    ]
    for name, all_s in found.items():
        own = "" if name == TORCH else f"{own_s(found, name):.1f}"
        lines.append(f"| {name} | {statistics.median(all_s):.1f} | {max(all_s):.1f} | {own} |")
    return "\n".join(lines)


def kept() -> str:
    """Return the table of the rows that were kept."""
    return table(json.loads(ROWS.read_text()))


def main(words: Sequence[str] | None = None) -> int:
    """Measure, print, and with --keep write the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--keep", action="store_true", help=f"write {ROWS.name}")
    chosen = parser.parse_args(words)
    found: dict[str, list[float]] = {WORKER: [], COMMAND: [], TORCH: []}
    with tempfile.TemporaryDirectory(prefix="samestep-recovery-") as name:
        for turn in range(chosen.turns):
            for of in (WORKER, COMMAND):
                found[of].append(round(recovered_s(Path(name, f"{of} {turn}"), of), 2))
            found[TORCH].append(round(importing_s(), 2))
            print({of: all_s[-1] for of, all_s in found.items()}, flush=True)
    print(table(found))
    if chosen.keep:
        ROWS.write_text(json.dumps(found, indent=1) + "\n")
    is_good = all(statistics.median(found[of]) <= RECOVERY_S and own_s(found, of) <= OWN_S for of in (WORKER, COMMAND))
    return int(not is_good)


if __name__ == "__main__":
    sys.exit(main())
