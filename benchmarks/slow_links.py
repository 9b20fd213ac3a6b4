"""Training over a slow link: bytes as the kernel counts them, seconds a step and validation loss, beside what was predicted.

    python benchmarks/slow_links.py                            the default job on two hosts, 100 Mbit/s, every codec
    python benchmarks/slow_links.py --mbit 10 --steps 60 --hosts 4 --ways none int8
    python benchmarks/slow_links.py --job wide --mbit 50 --steps 12
    python benchmarks/slow_links.py --latency-ms 20 --loss 0.001                    packets go through a relay (`tun_relay.py`)
    python benchmarks/slow_links.py --rows benchmarks/rows/slow_links.json          besides, keeps the figures as rows

Hosts are network namespaces of this machine (`network_namespaces.py`, which removes them): root and iproute2 are needed, and where
the system allows no namespaces it is said, and nothing is run. Every host is one process of one thread, so hosts beyond the
number of cores make each other slower.

    wire        bytes that a host sends in a step: by the kernel's counter of its interface, headers of packets and answers to
                packets received included; and by the ledger, the collectives that torch was asked for. The ledger must be the
                program's, row by row, or the run ends with an error.
                Behind the last step all parts of the weights are exchanged, so that of a run as short as three periods, with an
                exchange in parts, the kernel counts another one.
    step        seconds of a step, the median; of `every 20` that of whole periods of 20 steps
    predicted   `samestep simulate` with the profile that `samestep measure` has made of this machine at the beginning (or
                --hardware), and the link at its rate without the headers: nothing is fitted to these runs
    alone       seconds of a step of one host with its share of the batch and nobody to send to: what a step computes

`default` is jobs/default.toml. `wide` has the same layers with many weights and few tokens, so that its exchange takes at least
30 times its compute; the table says how many times it did.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import circumstances
from network_namespaces import Host, NetworkError, network

from samestep import Job, Layout, benchmark_hardware, hardware
from samestep import job_files as jobs
from samestep.hardware import Hardware, Link

ROWS = Path(__file__).parent / "rows" / "slow_links.json"
COUNTERS = Path("/proc/self/net/dev")
PORT = 29400
PAYLOAD = 1448 / 1514
"""Bytes of a packet that are data, over all of them: Ethernet, IP and TCP with timestamps take 66 bytes of 1,514."""
EVERY = 20
APART = (f"numerics.exchange_every={EVERY}",)
WAYS: Mapping[str, tuple[str, ...]] = {
    "none": (),
    "bf16": ("numerics.compression=bf16",),
    "int8": ("numerics.compression=int8",),
    "powersgd": ("numerics.compression=powersgd",),
    f"every {EVERY}": APART,
    f"every {EVERY}, int8": (*APART, "numerics.compression=int8"),
}
"""What is compared, as settings of a job."""
JOBS: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "wide": (
        "model.config.hidden_size=512",
        "model.config.intermediate_size=1408",
        "model.config.num_hidden_layers=2",
        "data.sequence_length=16",
        "train.evaluate_samples=8",
        "schedule.warmup_steps=0",
    ),
    "toy": ("model.config.num_hidden_layers=1", "data.sequence_length=16", "schedule.warmup_steps=0"),
}
"""The jobs, as settings of the default one."""
SAMPLES = {"wide": 1, "toy": 1}
"""Sequences of a step for each host, where it is not its share, rounded up, of the default job's global batch."""


def job_of(name: str, way: str, hosts: int, steps: int) -> Job:
    """Return a job as one way trains it on so many hosts."""
    samples = SAMPLES.get(name, -(-jobs.default().train.global_batch // hosts))
    settings = [*JOBS[name], f"train.steps={steps}", f"train.global_batch={samples * hosts}", "train.watch_every=0"]
    settings += WAYS[way]
    if WAYS[way]:
        settings.append(f"numerics.replicas={hosts}")
    return jobs.default(settings)


def _share(job: Job, hosts: int) -> Job:
    """Return a job with the share of the batch that one of the hosts has."""
    return job.model_copy(
        update={"train": job.train.model_copy(update={"global_batch": job.train.global_batch // hosts})}
    )


# -- one host ----------------------------------------------------------------------------------------------------------


def work(several: Sequence[Job]) -> Iterator[dict[str, Any]]:
    """Train jobs one after the other as one rank of `dp=N`, and yield what this rank saw of each; every rank must call it.

    Periods are those of exchanges: the first is not timed, the second is recorded, and all others are timed.
    """
    from samestep.runtime.processes import join

    place = join.join("cpu", threads=1)
    for job in several:
        yield _figures(job, place)


def _figures(job: Job, place: Any) -> dict[str, Any]:
    from samestep.datasets import batches
    from samestep.runtime.run import Run
    from samestep.training.workload import Workload, held_out_losses

    workload, every = Workload(job), job.numerics.exchange_every
    run = Run(workload.source, Layout(dp_replicate=place.world_size), job, place)
    wire_bytes, periods_s, began_s, sent = 0.0, [], 0.0, 0
    for batch in batches(workload.dataset, job):
        if batch.step == 2 * every:
            began_s, sent = time.perf_counter(), _sent()
        if every <= batch.step < 2 * every:
            wire_bytes += _recorded(run, batch) / every
        else:
            _ = run.step(batch).loss
        if batch.step >= 2 * every and (batch.step + 1) % every == 0:
            now_s = time.perf_counter()
            periods_s.append((now_s - began_s) / every)
            began_s = now_s
    return {
        "step_s": statistics.median(periods_s),
        "kernel_bytes": (_sent() - sent) / (job.train.steps - 2 * every),
        "ledger_bytes": wire_bytes,
        "held_out": held_out_losses(run, workload)["held_out"],
        "weights": workload.spec.num_params,
    }


def _sent() -> int:
    """Return the bytes that this process's host has sent."""
    lines = COUNTERS.read_text().splitlines()[2:]
    counted = (line.split(":") for line in lines)
    return sum(int(numbers.split()[8]) for name, numbers in counted if name.strip() != "lo")


def _recorded(run: Any, batch: Any) -> float:
    """Take a step, hold its collectives against the program, and return the bytes that this rank sends for them."""
    from samestep.runtime.ledger import Ledger

    with Ledger() as ledger:
        _ = run.step(batch).loss
    program = run.held.program_behind(run.steps_taken)
    listed = program.ledger(group_of=run.assembly.parallel.mesh.group_of)
    if run.place.world_size == 1:
        return 0.0
    assert listed == ledger.rows, f"the program lists {listed}, and torch sent {ledger.rows}"
    return sum(_wire_bytes(row, run.place.world_size) for rows in ledger.rows.values() for row in rows)


def _wire_bytes(row: Any, ranks: int) -> float:
    """Return the bytes that a rank sends for a collective over all ranks; an all_reduce goes round the ring twice."""
    passes = 2 if row.kind == "all_reduce" else 1
    return passes * row.size_bytes * (ranks - 1) / ranks


# -- all hosts ---------------------------------------------------------------------------------------------------------


def measured(hosts: Sequence[Host], several: Sequence[Job], *, apart: bool = False) -> Iterator[dict[str, Any]]:
    """Train jobs on hosts, one rank on each, and yield for each the mean of what is sent and the seconds of the slowest.

    With `apart` every host trains a job of its own, all at the same time.

    Raises:
        RuntimeError: a rank failed, and has said why on the standard error.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "jobs.json"
        path.write_text(json.dumps([job.model_dump_json() for job in several]))
        groups = [[host] for host in hosts] if apart else [hosts]
        started = [_start(host, rank, group, path) for group in groups for rank, host in enumerate(group)]
        try:
            for _ in several:
                seen = [_next_figures(process) for process in started]
                sent = {key: statistics.fmean(one[key] for one in seen) for key in ("kernel_bytes", "ledger_bytes")}
                yield {**seen[0], **sent, "step_s": max(one["step_s"] for one in seen)}
        finally:
            for process in started:
                process.kill()
                process.communicate()


def _start(host: Host, rank: int, group: Sequence[Host], path: Path) -> subprocess.Popen[str]:
    where = {"RANK": rank, "WORLD_SIZE": len(group), "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "MASTER_PORT": PORT}
    env = {**os.environ, **{key: str(value) for key, value in where.items()}, "MASTER_ADDR": group[0].address}
    words = host.command(sys.executable, str(Path(__file__)), "--worker", str(path))
    return subprocess.Popen(words, env=env, stdout=subprocess.PIPE, text=True)


def _next_figures(process: subprocess.Popen[str]) -> dict[str, Any]:
    """Wait for the next line of figures of a rank."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("{"):
            found: dict[str, Any] = json.loads(line)
            return found
    raise RuntimeError(f"a host's process ended with status {process.wait()}; its own lines are above")


def linked(machine: Hardware, given: argparse.Namespace) -> Hardware:
    """Return hosts of one device each, of a measured machine, with the link of these runs between them."""
    near = machine.intra
    far = Link(
        latency_s=near.latency_s + given.latency_ms / 1e3,
        bytes_per_s=given.mbit * 1e6 / 8 * PAYLOAD,
        collective_s=near.collective_s,
    )
    return replace(machine, name="hosts", devices_per_node=1, inter=far)


def rows_of(given: argparse.Namespace, machine: Hardware) -> Iterator[dict[str, Any]]:
    """Yield a row for each way, as it is measured: the first is one host alone with its share of the batch.

    Raises:
        NetworkError: this machine cannot make the hosts.
    """
    from samestep.wings.plan.simulation.simulate import simulate

    on = linked(machine, given)
    several = [job_of(given.job, way, given.hosts, given.steps) for way in given.ways]
    whole = job_of(given.job, "none", given.hosts, min(given.steps, 20))
    with network(given.hosts, given.mbit * 1e6, given.latency_ms / 1e3, given.loss) as hosts:
        yield {"way": "alone", **next(measured(hosts, [_share(whole, given.hosts)], apart=True))}
        for way, job, seen in zip(given.ways, several, measured(hosts, several), strict=True):
            said = simulate(job, Layout(dp_replicate=given.hosts), on)
            yield {"way": way, "predicted_s": said.step_s, **seen}


def keep(path: Path, given: argparse.Namespace, rows: Sequence[Mapping[str, Any]], measured: Mapping[str, Any]) -> None:
    """Write the rows of one network, job and choice of ways in place of those that the file had of them."""
    runs = json.loads(path.read_text()) if path.exists() else []
    key = {name: getattr(given, name) for name in ("job", "hosts", "mbit", "latency_ms", "loss")}
    run = {**key, "steps": given.steps, circumstances.KEY: measured, "rows": list(rows)}
    others = [one for one in runs if {name: one[name] for name in key} != key or _ways(one) != _ways(run)]
    path.write_text(json.dumps([*others, run], indent=1) + "\n", encoding="utf-8")


def _ways(run: Mapping[str, Any]) -> list[str]:
    return [row["way"] for row in run["rows"]]


# -- tables ------------------------------------------------------------------------------------------------------------

HEAD = (
    "way",
    "wire KB, kernel",
    "of float32",
    "wire KB, ledger",
    "step ms",
    "times as fast",
    "predicted",
    "validation loss",
)


def cells_of(rows: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Return the cells of a table: each way beside float32, `none`."""
    plain = next((row for row in rows if row["way"] == "none"), None)
    cells = []
    for row in rows:
        cell = [row["way"], *[""] * 6, f"{row['held_out']:.3f}"]
        cell[1], cell[3] = f"{row['kernel_bytes'] / 1e3:,.1f}", f"{row['ledger_bytes'] / 1e3:,.1f}"
        cell[4] = f"{row['step_s'] * 1e3:,.0f}"
        if row["way"] == "alone":
            cell[1] = cell[3] = cell[7] = ""
        elif plain is not None:
            cell[2] = f"{row['kernel_bytes'] / plain['kernel_bytes']:.3f}"
            cell[5] = f"{plain['step_s'] / row['step_s']:.2f}"
            cell[6] = f"{plain['predicted_s'] / row['predicted_s']:.2f} ({row['predicted_s'] * 1e3:,.0f} ms)"
            cell[7] += f" ({row['held_out'] / plain['held_out'] - 1:+.1%})"
        cells.append(cell)
    return cells


def markdown(path: Path = ROWS) -> str:
    """Return the tables of all kept rows, one for each network and job."""
    parts = []
    for run in json.loads(path.read_text()):
        rows = run["rows"]
        compute_s = rows[0]["step_s"]
        exchange = next((row["step_s"] - compute_s for row in rows if row["way"] == "none"), 0.0)
        delay = f", {run['latency_ms']:g} ms" * bool(run["latency_ms"]) + f", {run['loss']:.2%} lost" * bool(
            run["loss"]
        )
        parts.append(
            f"**`{run['job']}`, {run['hosts']} hosts, {run['mbit']:g} Mbit/s{delay}**: {rows[0]['weights']:,} weights, "
            f"{run['steps']} steps. With float32 the exchange takes {exchange / compute_s:.1f} times the compute.\n"
        )
        parts.append(f"| {' | '.join(HEAD)} |\n| --- |" + " ---: |" * (len(HEAD) - 1))
        parts += [f"| {' | '.join(cells)} |" for cells in cells_of(rows)]
        parts += ["", circumstances.sentence([run]), ""]
    return "\n".join(parts).rstrip()


def machine_of(name: str | None, ranks: int) -> Hardware:
    """Return a profile by name, or measure this machine with so many ranks at once."""
    if name:
        return hardware.load(name)

    with tempfile.TemporaryDirectory() as folder:
        return benchmark_hardware(out=Path(folder) / "this-machine.toml", ranks=ranks, device="cpu")


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Return what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--job", choices=JOBS, default="default")
    parser.add_argument("--hosts", type=int, default=2, help="2 to 4; default: 2")
    parser.add_argument("--mbit", type=float, default=100.0, help="rate of each link, Mbit/s each way; default: 100")
    parser.add_argument("--latency-ms", type=float, default=0.0, help="time that a packet takes; needs /dev/net/tun")
    parser.add_argument("--loss", type=float, default=0.0, help="fraction of packets that are lost; needs /dev/net/tun")
    parser.add_argument("--steps", type=int, default=300, help=f"at least 3 periods, of {EVERY} steps; default: 300")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--hardware", metavar="NAME|FILE", help="do not measure the machine")
    parser.add_argument("--rows", type=Path, metavar="FILE", help="keep the figures")
    given = parser.parse_args(words)
    every = EVERY if any("every" in way for way in given.ways) else 1
    if not 2 <= given.hosts <= 4 or given.steps < 3 * every or given.steps % every:
        parser.error(f"--hosts are 2 to 4, and --steps a multiple of {every}, at least {3 * every}")
    return given


def main(words: Sequence[str] | None = None) -> int:
    """Run every way and print a line for each as it is measured."""
    given, measured = arguments(words), circumstances.now()
    if given.worker:
        for figures in work([Job.model_validate_json(one) for one in json.loads(given.worker.read_text())]):
            print(json.dumps(figures), flush=True)
        return 0
    try:
        with network(1, given.mbit * 1e6, given.latency_ms / 1e3, given.loss):
            pass  # before the machine is measured, which takes a minute
        machine, rows = machine_of(given.hardware, given.hosts), []
        print(" | ".join(HEAD))
        for row in rows_of(given, machine):
            rows.append(row)
            print(" | ".join(cells_of(rows)[-1]), flush=True)
    except NetworkError as error:
        print(f"nothing was measured: {error}", file=sys.stderr)
        return 2
    if given.rows:
        keep(given.rows, given, rows, measured)
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the hosts are removed
    sys.exit(main())
