"""Runs without planted delays, for `explain.py`: clean ones under other load, the layouts, the recorder's cost, and a slow link.

clean      the default job ten times, five of them while other programs compute: nobody is called a straggler, and no link is blamed
layouts    rows add up to the step, host and rest are a small part of it, and torch sends what the program lists
cost       records of a step times what each takes, beside a step
link       one machine, and two network namespaces with a slow link between them: what `explain` says, and what int8 saves
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import slow_links
import torch
from explain_delays import medians
from network_namespaces import Host, network
from planted_delays import WARM_STEPS, quietly
from torch import nn

import samestep
from samestep import Job, Layout
from samestep import job_files as jobs
from samestep.program.ops import UPDATE_BODY, Task
from samestep.runtime.ledger import Ledger, owned
from samestep.runtime.recording import marks
from samestep.runtime.recording.step_recorder import StepRecorder
from samestep.runtime.run import Run
from samestep.runtime.step_observer import StepObserver
from samestep.training.workload import Workload
from samestep.wings.explain.explain import explain, read_run
from samestep.wings.explain.step_parts import measured_steps, parts_of

QUIET = ("train.sample_tokens=0", "train.watch_every=0", "checkpoint.every=0", "train.evaluate_samples=32")
BATCH = "train.global_batch=64"
"""Sequences with which a step of the default job takes about 100 ms on two ranks."""
LOADS = (0, 1, 0, 2, 0, 4, 0, 2, 0, 1)
"""Other programs that compute during each clean run."""
LAYOUTS = (
    "dp=2",
    "tp=2",
    "pp=2 microbatch=8 schedule=1f1b",
    "pp=2 microbatch=8 schedule=zero-bubble",
    "cp=2",
    "dp=2 zero=3",
    "dp=2 tp=2 pp=2 microbatch=8",
)
MBIT = 100.0
"""Rate of the slow link, each way."""


# -- clean runs --------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def other_load(programs: int) -> Iterator[None]:
    """Let other programs compute on this machine, each in a session of its own."""
    command = (sys.executable, "-c", "while True: pass")
    running = [subprocess.Popen(command, start_new_session=True) for _ in range(programs)]
    try:
        yield
    finally:
        for one in running:
            one.kill()
            one.wait()


def clean(loads: Sequence[int] = LOADS) -> Iterator[dict[str, Any]]:
    """Train the default job on two ranks again and again, and yield the verdict on each run."""
    steps = 32
    job = jobs.default([*QUIET, BATCH, f"train.steps={steps}", f"train.record={WARM_STEPS}:{steps - 1}"])
    for programs in loads:
        with tempfile.TemporaryDirectory() as name, other_load(programs):
            out = Path(name) / "run"
            with quietly():
                samestep.train(job, layout="dp=2", ranks=2, out=out)
            found = explain(out)
            log = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
            yield {
                "load": programs,
                "step_s": found.step_s,
                "kind": found.verdict.kind,
                "verdict": found.verdict.line,
                "named": [one["straggler"]["rank"] for one in log if "straggler" in one],
            }


# -- layouts -----------------------------------------------------------------------------------------------------------


def layouts(several: Sequence[str] = LAYOUTS) -> Iterator[dict[str, Any]]:
    """Train the default job in each layout, and yield the rows of the steps of its busiest rank."""
    steps = WARM_STEPS + 12
    job = jobs.default([*QUIET, BATCH, f"train.steps={steps}", f"train.record={WARM_STEPS}:{steps - 1}"])
    for layout in several:
        with tempfile.TemporaryDirectory() as name:
            out, ranks = Path(name) / "run", Layout(layout).world_size
            with quietly():
                samestep.train(job, layout=layout, ranks=ranks, out=out)
            yield {"layout": layout, **_rows(out), "bytes": _agree(job, layout, ranks)}


def _rows(out: Path) -> dict[str, Any]:
    records = read_run(out)[1]
    steps = sorted(set.intersection(*({*record.steps} for record in records.values())))[1:]
    each = [measured_steps(records, [number]) for number in steps]
    worst = 0.0
    for one in each:
        for rank in records:
            parts, rest_s = parts_of(one, rank, None)
            added_s = sum(part.measured_s for part in parts) + rest_s
            worst = max(worst, abs(added_s - one.lasted_s[rank]), abs(rest_s))
    whole = measured_steps(records, steps)
    rank = whole.busiest
    keys = {key for one in each for key in one.rows[rank]}
    rows = {key: statistics.median(one.rows[rank].get(key, 0.0) for one in each) for key in keys}
    by_name: Counter[str] = Counter()
    for (row, _), seconds in rows.items():
        by_name[row] += seconds
    return {
        "step_s": statistics.median(one.lasted_s[rank] for one in each),
        "rows": {name: seconds for name, seconds in by_name.items() if seconds > 0},
        "unexplained_s": worst,
        "missing": list(whole.missing),
        "records": Counter(event[0] for event in records[rank].steps[steps[-1]].events),
    }


def _agree(job: Job, layout: str, ranks: int) -> dict[str, int]:
    """Return the bytes of the buffers of a step by axis, as torch was asked for them; they are those of the program, row by row."""
    workload = Workload(job, Layout(layout))
    workload.trace_for(Layout(layout))
    found: dict[str, int] = samestep.launch(_sent, (workload, layout), ranks=ranks, device="cpu")
    return found


def _sent(place: Any, workload: Workload, layout: str) -> dict[str, int]:
    run = Run(workload.source, Layout(layout), workload.job, place)
    stream = iter(samestep.batches(workload.dataset, workload.job))
    for _ in range(2):
        _ = run.step(next(stream)).loss
    with Ledger() as ledger:
        _ = run.step(next(stream)).loss
    program = run.held.program_behind(run.steps_taken)
    listed = program.ledger(group_of=run.assembly.parallel.mesh.group_of)
    assert listed == ledger.rows, f"the program lists {listed}, and torch was asked for {ledger.rows}"
    sizes: Counter[str] = Counter()
    for axis, rows in ledger.rows.items():
        sizes[str(axis)] += sum(row.size_bytes for row in rows)
    return dict(sizes)


# -- the recorder's cost -----------------------------------------------------------------------------------------------


_NOTHING: Any = SimpleNamespace(ops=tuple, exchange=(), tasks=(Task(UPDATE_BODY, 0),))
"""A program without ops, for steps of nothing but records."""


def cost(rounds: int = 12) -> dict[str, float]:
    """Return the seconds that a step and each kind of record take, all that follows from them included, while nothing else is done."""
    recorder, nobody, many = StepRecorder(Job(), torch.device("cpu"), 0), StepObserver(), 400
    work = SimpleNamespace(wait=lambda: None)

    def collective() -> None:
        with owned("bucket.0") as issue:
            handle = issue.sent(work)
        handle.wait()

    def region() -> None:
        with marks.region("data"):
            pass

    def task() -> None:
        with recorder.running(Task(UPDATE_BODY, 0), np.empty(0, np.int64), nobody):
            pass

    def seconds(body: Callable[[], None], times: int) -> float:
        """Return the seconds of a step with so many records, and of the one that reads it."""
        began = time.perf_counter()
        for number in (times, 0):
            with recorder.taking(recorder.step + 1, _NOTHING, nn.Module(), _NOTHING, dict):
                for _ in range(number):
                    body()
        return time.perf_counter() - began

    def unheard(body: Callable[[], None]) -> float:
        marks.listen(None)
        began = time.perf_counter()
        for _ in range(many):
            body()
        return time.perf_counter() - began

    step_s = min(seconds(region, 0) for _ in range(10 * rounds)) / 2
    found = {"step": step_s}
    for body in (collective, region, task):
        heard_s = min(seconds(body, many) for _ in range(rounds)) - 2 * step_s
        unheard_s = 0.0 if body is task else min(unheard(body) for _ in range(rounds))
        found[body.__name__] = (heard_s - unheard_s) / many
    recorder.close()
    return found


def window_cost(steps: int = 60) -> dict[str, float]:
    """Return processor seconds of a tiny step with and without a window, medians, and the records of a window's step."""
    job = jobs.default([*QUIET, "train.global_batch=1", "data.sequence_length=8", f"train.steps={steps}"])
    workload = Workload(job, Layout())
    with tempfile.TemporaryDirectory() as name:
        taken: list[float] = samestep.launch(_timed, (workload, steps, name), ranks=1, device="cpu")
        (record,) = read_run(Path(name))[1].values()
    plain_s, window_s = (statistics.median(part) for part in (taken[10 : steps // 2 - 1], taken[steps // 2 + 1 :]))
    return {"plain_s": plain_s, "window_s": window_s, "records": len(record.steps[steps - 1].events)}


def _timed(place: Any, workload: Workload, steps: int, folder: str) -> list[float]:
    """Return the processor seconds of each step, of which the second half is recorded."""
    run = Run(workload.source, Layout(), workload.job, place)
    run.record(f"{steps // 2}:{steps}", folder)
    taken = []
    for batch in samestep.batches(workload.dataset, workload.job):
        began = time.thread_time()
        _ = run.step(batch).loss
        taken.append(time.thread_time() - began)
    run.recorder.close()
    return taken


# -- a slow link -------------------------------------------------------------------------------------------------------


def train_on_hosts(hosts: Sequence[Host], settings: Sequence[str], layout: str, out: Path) -> None:
    """Train a job with one rank on each host."""
    words = [word for setting in settings for word in ("--set", setting)]
    started = []
    for rank, host in enumerate(hosts):
        where = {"RANK": rank, "WORLD_SIZE": len(hosts), "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
        where |= {"MASTER_ADDR": hosts[0].address, "MASTER_PORT": slow_links.PORT}
        env = {**os.environ, **{key: str(value) for key, value in where.items()}}
        command = host.command(sys.executable, "-m", "samestep", "train", "--layout", layout, "--out", str(out), *words)
        started.append(subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
    said = [process.communicate()[0] for process in started]
    failed = [text for process, text in zip(started, said, strict=True) if process.returncode]
    if failed:
        raise RuntimeError(f"training on hosts failed:\n{failed[0][-2000:]}")


def sent_s(sizes: Mapping[str, int]) -> float:
    """Return the seconds in which two hosts send the buffers of a step over the slow link: each sends as many bytes as a buffer has."""
    return sizes["dp_replicate"] * 8 / (MBIT * 1e6 * slow_links.PAYLOAD)


def link(job: Sequence[str] = ("train.global_batch=32",), pairs: int = 2) -> dict[str, Any]:
    """Train the default job on one machine and on two, with a fast and with a slow link, in turns; and then with int8.

    Raises:
        NetworkError: this machine cannot make two hosts.
    """
    steps = WARM_STEPS + 12
    settings = [*QUIET, *job, f"train.steps={steps}", f"train.record={WARM_STEPS}:{steps - 1}"]
    coded = [*settings, "numerics.compression=int8", "numerics.replicas=2"]
    ways = [(1, None, settings), *[(2, None, settings), (2, MBIT, settings)] * pairs, (2, MBIT, coded)]
    found: dict[str, list[Any]] = {"one": [], "fast": [], "slow": [], "int8": []}
    with tempfile.TemporaryDirectory() as name:
        on = slow_links.linked(slow_links.machine_of(None, 2), SimpleNamespace(latency_ms=0.0, mbit=MBIT))
        for number, (num_hosts, mbit, given) in enumerate(ways):
            kind = "one" if num_hosts == 1 else "fast" if mbit is None else "int8" if given is coded else "slow"
            out = _trained(Path(name) / f"{number}", num_hosts, mbit, given)
            found[kind].append(explain(out, hardware=on))
        return _told(found)


def _trained(out: Path, num_hosts: int, mbit: float | None, settings: Sequence[str], tries: int = 2) -> Path:
    """Train on hosts of their own, once more where a rank fails, which is said; return the run folder."""
    try:
        with network(num_hosts, None if mbit is None else mbit * 1e6) as hosts:
            train_on_hosts(hosts, settings, f"dp={num_hosts}", out)
        return out
    except RuntimeError as error:
        if tries == 1:
            raise
        print(error, file=sys.stderr)
        return _trained(out.with_name(f"{out.name}-again"), num_hosts, mbit, settings, tries - 1)


def _told(found: dict[str, list[Any]]) -> dict[str, Any]:
    """Return the rows of each kind of run, and what `explain` says of the slow link."""
    said: dict[str, Any] = {}
    for kind, runs in found.items():
        each = [medians(run.found.records, run.found.steps) for run in runs]
        last = runs[-1]
        rank = last.found.busiest
        keys = {key for rows, *_ in each for key in rows[rank]}
        rows = {key: statistics.fmean(rows[rank].get(key, 0.0) for rows, *_ in each) for key in keys}
        said[kind] = {
            "step_s": statistics.fmean(step_s for *_, step_s in each),
            # The fast link is as fast as this machine, which no profile says.
            "predicted_step_s": None if kind == "fast" or last.predicted is None else last.predicted.step_s,
            "rows": [[*key, seconds] for key, seconds in rows.items() if seconds > 0],
            "sent_bytes": last.found.sent_bytes(rank),
            "kind": last.verdict.kind,
            "verdict": last.verdict.line,
            "reasons": list(last.verdict.reasons),
            "tries": list(last.verdict.tries),
        }
    return said
