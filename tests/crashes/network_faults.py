"""Faults between two hosts, which are network namespaces of this machine: a cable that is pulled, and a host that is killed.

    flap            the cable of one host is pulled for 1 to 4 s: nothing may happen, but a pause
    partition       it stays pulled: the leading host goes on with its own ranks, and the other one ends
    host            all processes of the following host are killed: the leading one goes on
    leading host    those of the leading host are killed: the following one ends, and resumes the run alone

`make crashes` takes them in turn with others (`sweep.py`).
"""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.network_namespaces import Host
from tests import small
from tests.crashes.outcomes import Outcome

FAULTS = ("flap", "partition", "host", "leading host")
LAYOUTS = ("dp=2", "dp=2 zero=3", "dp=4 reduce=hierarchical", "dp=2 tp=2", "dp=2 pp=2 microbatch=2")
"""Layouts of which one host alone can carry out the same with smaller data degrees."""
STEPS = 150
KEYS: dict[str, Any] = {
    "train.steps": STEPS, "checkpoint.every": 5, "checkpoint.keep": 2, "numerics.precision": "float64",
    "run.restarts": 3, "train.watch_every": 0,
}  # fmt: skip


def undisturbed(folder: Path) -> list[float]:
    """Return the losses of a run that nothing harms."""
    assert small.train("--layout", "dp=1", "--out", folder / "whole", **KEYS) == 0
    return small.losses(folder / "whole")


def case(fault: str, drawn: random.Random, hosts: list[Host], losses: list[float], folder: Path) -> Outcome:
    """Start a run on two hosts, harm it, and return what came of it."""
    layout, run, token = drawn.choice(LAYOUTS), folder / "run", folder / "token"
    token.touch(0o600)
    token.write_text("a secret of 42 letters that both hosts have")
    ranks = 4 if "=4" in layout or layout.count("=2") > 1 else 2
    words = ["train", *small.settings(**KEYS), "--layout", layout, "--ranks", f"1:{ranks}", "--out", str(run)]
    words += ["--nodes", "2", "--rendezvous", f"{hosts[0].address}:{drawn.randrange(20000, 30000)}"]
    words += ["--token-file", str(token)]
    pids = [small.in_background(words, folder / host.address, host.name) for host in hosts]
    small.wait_for(lambda: small.num_steps(run) >= 6)
    leads = hosts[1 if fault == "leading host" else 0]
    noted = ""
    with _harmed(fault, drawn, hosts, pids) as pulled_s:
        before, began = small.num_steps(run), time.monotonic()
        time.sleep(0.2)  # what was on its way arrives
        before = max(before, small.num_steps(run))
        time.sleep(pulled_s)
        if fault == "leading host":
            ended, noted = small.status_of(pids[1], 180), (folder / leads.address / "err").read_text()
            alone = ["train", *small.settings(**KEYS), "--layout", "dp=1", "--out", str(run), "--auto-resume"]
            pids = [pids[0], small.in_background(alone, folder / leads.address, leads.name)]
            assert ended == 1, noted
        if fault != "flap":
            small.wait_for(lambda: "resumes after step" in _said(folder, leads))
            small.wait_for(lambda: small.num_steps(run) > _resumed_at(_said(folder, leads)))
    if fault == "flap":
        small.wait_for(lambda: small.num_steps(run) > before)
    seconds = time.monotonic() - began
    statuses = [small.status_of(pid, 180) for pid in pids]
    said, found = _said(folder, leads), small.losses(run)
    gone = -signal.SIGKILL
    expected = {"flap": [0, 0], "partition": [0, 1], "host": [0, gone], "leading host": [gone, 0]}[fault]
    words = {"flap": "", "leading host": "the leading host"}.get(fault, "is lost with its host")
    noticed = words in (noted or said) and ("is lost" in said) == (words.startswith("is lost"))
    lost = 0 if fault == "flap" else max(0, before - _resumed_at(said))
    wrong = any(abs(one - other) > 1e-9 * abs(other) for one, other in zip(found, losses, strict=False))
    recovered = statuses == expected and len(found) == STEPS
    shutil.rmtree(run)
    return Outcome(f"{layout}: {fault}", noticed, recovered, lost, seconds, wrong)


@contextmanager
def _harmed(fault: str, drawn: random.Random, hosts: list[Host], pids: list[int]) -> Iterator[float]:
    """Harm the run while the context lasts; yield the seconds for which a cable is to be pulled at least."""
    if "host" in fault:
        os.kill(pids[0 if fault == "leading host" else 1], signal.SIGKILL)
        yield 0.0
        return
    host = drawn.choice(hosts) if fault == "flap" else hosts[1]
    host.set_link(False)
    try:
        yield drawn.uniform(1.0, 4.0) if fault == "flap" else 0.0
    finally:
        host.set_link(True)


def _said(folder: Path, host: Host) -> str:
    return (folder / host.address / "out").read_text()


def _resumed_at(said: str) -> int:
    found = re.findall(r"resumes after step (\d+)", said)
    return int(found[-1]) if found else 0
