"""Faults at random, one after another, and what came of them: `make crashes [SECONDS=1800] [SEED=0]`.

    run_faults.py       whole runs are killed, stopped, or lose their disk or a checkpoint, and are resumed
    stored_faults.py    a save fails at any call, or a checkpoint is damaged: in milliseconds
    network_faults.py   runs on two hosts, where this machine can make some: a cable is pulled, a host is lost

A case is a function of the seed, its kind and its number. The next one is of the kind that is furthest behind its aim; sums
are kept in benchmarks/rows/crashes.json, so a sweep that is ended goes on where it was, and docs/checkpoints.md shows them.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import random
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.network_namespaces import Host, lacking, network
from tests.crashes import network_faults, outcomes, run_faults, stored_faults
from tests.crashes.outcomes import Outcome, Sums
from tests.pool import close_all

Case = Callable[[random.Random], Outcome]
AIMS = {
    "killed at the start": 40, "killed in a step": 60, "killed in a save": 60, "killed in a resume": 40, "stopped": 40,
    "full disk": 20, "failing call": 20, "damaged, then resumed": 20, "failing save": 300, "damaged": 2000,
    "partition": 10, "flap": 10, "host": 10, "leading host": 10,
}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=1800)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--record", type=Path, default=outcomes.RECORD)
    parser.add_argument("--kinds", nargs="*", default=list(AIMS), choices=AIMS, metavar="KIND")
    given = parser.parse_args()
    known = outcomes.read(given.record)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="samestep-crashes-")))
        stack.callback(close_all)
        cases = {kind: case for kind, case in prepared(folder, stack, given.kinds).items() if kind in given.kinds}
        end = time.monotonic() + given.seconds
        is_good = True
        while time.monotonic() < end:
            kind = min(cases, key=lambda one: known.get(one, Sums()).injected / AIMS[one])
            sums = known.setdefault(kind, Sums())
            name = f"{given.seed} {kind} {sums.injected}"
            one = cases[kind](random.Random(name))
            sums.add(one, name)
            is_good &= one.is_good
            if not one.is_good:
                print(f"{name}: {one}", flush=True)
            if kind not in stored_faults.KINDS or sums.injected % 50 == 0:
                outcomes.write(given.record, known)
    outcomes.write(given.record, {kind: known[kind] for kind in AIMS if kind in known})
    print(outcomes.table(known))
    return int(not is_good)


def prepared(folder: Path, stack: contextlib.ExitStack, kinds: list[str]) -> dict[str, Case]:
    """Return what makes a case of each kind that this machine allows."""
    found: dict[str, Case] = {}
    if not set(kinds).isdisjoint(stored_faults.KINDS):
        stored = stored_faults.Stored.made(folder / "stored")
        found |= {kind: functools.partial(_stored, kind, stored) for kind in stored_faults.KINDS}
    if not set(kinds).isdisjoint(run_faults.HARMS):
        losses = run_faults.undisturbed(folder)
        found |= {kind: functools.partial(_run, kind, losses, folder) for kind in run_faults.HARMS}
        if not run_faults.can_mount(folder):
            del found["full disk"]
    if not set(kinds).isdisjoint(network_faults.FAULTS) and not lacking():
        hosts = stack.enter_context(network(2))
        of_two = network_faults.undisturbed(folder / "hosts")
        for fault in network_faults.FAULTS:
            found[fault] = functools.partial(_between, fault, hosts, of_two, folder / "hosts")
    return found


def _stored(kind: str, stored: stored_faults.Stored, drawn: random.Random) -> Outcome:
    return stored_faults.case(kind, drawn, stored)


def _run(kind: str, losses: list[float], folder: Path, drawn: random.Random) -> Outcome:
    return run_faults.case(kind, drawn, losses, folder)


def _between(fault: str, hosts: list[Host], losses: list[float], folder: Path, drawn: random.Random) -> Outcome:
    return network_faults.case(fault, drawn, hosts, losses, folder)


if __name__ == "__main__":
    sys.exit(main())
