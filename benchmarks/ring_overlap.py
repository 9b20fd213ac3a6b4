"""How much of a ring's transfer is hidden behind the attention to the keys that are there, between two hosts with a slow link.

    python benchmarks/ring_overlap.py [--mbit 400] [--length 4096] [--steps 6] [--keep]     --keep writes benchmarks/rows/ring_overlap.json
    python benchmarks/ring_overlap.py --crossover [--mbit 50 200 800] [--degrees 2 4] [--limit 120] [--keep]
                     steps around a ring over those by heads, by link, degree and heads; --keep writes rows/exchanges_measured.json after
                     every cell. Four trainings a cell, each of which is ended after --limit seconds

Hosts are network namespaces (`network_namespaces.py`): root and iproute2 are needed. Both runs are explained ones, `cp=2 exchange=ring`:

    ring        messages pass while blocks are computed
    planted     the same, but each rank waits for a message before it computes the block beside it: all of the transfer is exposed
    heads       the same job with `exchange=heads`, whose two messages everything waits for

    transfer    seconds in which the link carries the messages of a step, by their bytes and its rate
    exposed     seconds of a step in which the rank that computes longest waits for messages of `cp`, as `samestep explain` has them
    hidden      the part of the transfer that is not exposed
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import slow_links
from network_namespaces import Host, NetworkError, network

import samestep
from samestep import Job, Layout, hardware
from samestep import job_files as jobs
from samestep.program.ops import OpKind
from samestep.wings.explain.explain import read_run
from samestep.wings.explain.step_parts import measured_steps

ROWS = Path(__file__).parent / "rows" / "ring_overlap.json"
WARM_STEPS = 2
WAYS = {"ring": "ring", "planted": "ring", "heads": "heads"}
"""The exchange of each run."""
PARTS_SENT = {OpKind.SHIFT: 1.0, OpKind.ALL_TO_ALL: 0.5}
"""The part of a buffer that leaves one of two ranks."""


def settings_of(length: int, steps: int) -> list[str]:
    """Return the job: one long sequence a step, whose attention takes longer than its messages."""
    return [
        f"data.sequence_length={length}", "train.global_batch=1", f"train.steps={steps}", f"train.record={WARM_STEPS}:{steps - 1}",
        "train.sample_tokens=0", "train.watch_every=0", "checkpoint.every=0", "train.evaluate_samples=2", "schedule.warmup_steps=0",
        "model.config.num_hidden_layers=2", f"model.config.max_position_embeddings={length}",
    ]  # fmt: skip


def work(way: str, degree: int, settings: Sequence[str], out: str) -> None:
    """Train as one rank of some."""
    if way == "planted":
        _wait_at_once()
    samestep.train(jobs.default([*settings]), layout=f"cp={degree} exchange={WAYS[way]}", out=Path(out))


def _wait_at_once() -> None:
    """Let each message arrive before the block beside it is computed."""
    from samestep.runtime.axes.context.ring_attention import RingForm

    begin = RingForm.shift

    def shift(*given: Any) -> Callable[[], Any]:
        arrived = begin(*given)()
        return lambda: arrived

    RingForm.shift = shift  # type: ignore[method-assign]


def trained(hosts: Sequence[Host], way: str, settings: Sequence[str], out: Path, limit_s: float) -> None:
    """Train with one rank on each host; none of them is left when this returns.

    Raises:
        RuntimeError: a rank failed, or they took longer than `limit_s` seconds.
    """
    started: list[subprocess.Popen[bytes]] = []
    out.mkdir(parents=True)
    said = [out / f"rank{rank}.txt" for rank in range(len(hosts))]  # a pipe that nobody reads would hold a rank up
    for rank, host in enumerate(hosts):
        where = {"RANK": rank, "WORLD_SIZE": len(hosts), "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
        where |= {"MASTER_ADDR": hosts[0].address, "MASTER_PORT": slow_links.PORT}
        env = {**os.environ, **{key: str(value) for key, value in where.items()}}
        given = json.dumps([way, len(hosts), list(settings), str(out)])
        words = host.command(sys.executable, __file__, "--worker", given)
        with said[rank].open("wb") as file:
            started.append(subprocess.Popen(words, env=env, stdout=file, stderr=subprocess.STDOUT))
    end = time.monotonic() + limit_s
    try:
        while (codes := [process.poll() for process in started]) and None in codes and not any(codes):
            if time.monotonic() > end:
                texts = "\n".join(path.read_text()[-1000:] for path in said)
                raise RuntimeError(f"training on hosts took more than {limit_s:.0f} s (--limit):\n{texts}")
            time.sleep(0.1)
    finally:
        for process in started:  # others wait for one that failed
            process.kill()
            process.wait()
    failed = [path for code, path in zip(codes, said, strict=True) if code]
    if failed:
        raise RuntimeError(f"training on hosts failed:\n{failed[0].read_text()[-2000:]}")


def figures_of(out: Path, mbit: float) -> dict[str, float]:
    """Return what an explained run shows of its messages, medians over the recorded steps."""
    records = read_run(out)[1]
    steps = sorted(set.intersection(*({*record.steps} for record in records.values())))[1:]
    found = [measured_steps(records, [number]) for number in steps]
    rank = measured_steps(records, steps).busiest
    sent = sum(
        op.size_bytes * PARTS_SENT[op.kind]
        for op in records[rank].head.ops
        if op.kind in PARTS_SENT and str(op.axis).startswith("cp")
    )
    exposed_s = [
        sum(seconds for (row, axis), seconds in one.rows[rank].items() if row == "transfer" and axis.startswith("cp"))
        for one in found
    ]
    transfer_s = sent * 8 / (mbit * 1e6 * slow_links.PAYLOAD)
    exposed = statistics.median(exposed_s)
    return {
        "step_s": statistics.median(one.lasted_s[rank] for one in found),
        "sent_bytes": sent,
        "transfer_s": transfer_s,
        "exposed_s": exposed,
        "hidden": 1.0 - min(1.0, exposed / transfer_s),
    }


def rows_of(mbit: float, length: int, steps: int, limit_s: float) -> list[dict[str, Any]]:
    """Return a row for each way.

    Raises:
        NetworkError: this machine cannot make two hosts.
    """
    rows = []
    with tempfile.TemporaryDirectory() as folder, network(2, mbit * 1e6) as hosts:
        for way in WAYS:
            out = Path(folder) / way
            trained(hosts, way, settings_of(length, steps), out, limit_s)
            rows.append({"way": way, **figures_of(out, mbit)})
    return rows


def markdown(path: Path = ROWS) -> str:
    """Return the table of the rows that were written."""
    found = json.loads(path.read_text())
    lines = [
        "| run | step ms | sent MB | transfer ms | exposed ms | hidden |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in found["rows"]:
        seconds = [f"{row[key] * 1e3:,.0f}" for key in ("step_s", "transfer_s", "exposed_s")]
        lines.append(
            f"| {row['way']} | {seconds[0]} | {row['sent_bytes'] / 1e6:.1f} | {seconds[1]} | {seconds[2]} | {row['hidden']:.0%} |"
        )
    return "\n".join(lines)


MEASURED = Path(__file__).parent / "rows" / "exchanges_measured.json"
HEADS = {"8 heads": (8, 8), "8 heads, 2 of keys": (8, 2)}
"""Heads of queries, and of keys and values, of a measured model."""


def measured_rows(
    rates: Sequence[float], degrees: Sequence[int], length: int, steps: int, limit_s: float
) -> Iterator[dict[str, Any]]:
    """Yield a row for each link, degree and number of heads: the seconds of a step by heads and around a ring, one host a rank.

    Raises:
        NetworkError: this machine cannot make the hosts.
        RuntimeError: a training failed, or took longer than `limit_s` seconds.
    """
    for mbit, degree in itertools.product(rates, degrees):
        with tempfile.TemporaryDirectory() as folder, network(degree, mbit * 1e6) as hosts:
            for name, (heads, of_keys) in HEADS.items():
                row: dict[str, Any] = {"mbit": mbit, "degree": degree, "heads": name}
                more = [f"model.config.num_attention_heads={heads}", f"model.config.num_key_value_heads={of_keys}"]
                for way in ("heads", "ring"):
                    out = Path(folder) / f"{way} {name}"
                    trained(hosts, way, [*settings_of(length, steps), *more], out, limit_s)
                    row[f"{way}_s"] = figures_of(out, mbit)["step_s"]
                yield row


def measured_markdown(path: Path = MEASURED) -> str:
    """Return the table of measured steps around a ring over those by heads, empty cells where none was measured: below 1 a ring is faster."""
    if not path.exists():
        return "No measurement is kept."
    found = json.loads(path.read_text())["rows"]
    columns = list(dict.fromkeys((row["degree"], row["heads"]) for row in found))
    lines = [f"| link | {' | '.join(f'cp={degree}, {heads}' for degree, heads in columns)} |"]
    lines.append("| --- |" + " ---: |" * len(columns))
    for mbit in dict.fromkeys(row["mbit"] for row in found):
        ratios = {(row["degree"], row["heads"]): row["ring_s"] / row["heads_s"] for row in found if row["mbit"] == mbit}
        lines.append(
            f"| {mbit:,.0f} Mbit/s | {' | '.join(f'{ratios[one]:.2f}' if one in ratios else '' for one in columns)} |"
        )
    return "\n".join(lines)


LINKS = {"450 GB/s (NVLink)": None, "50 GB/s": 50e9, "12.5 GB/s": 12.5e9}
LENGTHS, DEGREES = (2**13, 2**15, 2**17), (2, 4, 8)


def crossover(preset: str = "llama3-8b") -> str:
    """Return the table of predicted steps with a ring over those with heads, by link, length and degree, of one model on H100s."""
    near = hardware.load("h100x8")
    head = ["link", *(f"{length:,} tokens, cp={degree}" for length in LENGTHS for degree in DEGREES)]
    lines = [f"| {' | '.join(head)} |", "| --- |" + " ---: |" * (len(head) - 1)]
    for name, rate in LINKS.items():
        far = replace(near, devices_per_node=1, inter=replace(near.inter, bytes_per_s=rate)) if rate else near
        cells = [_ring_over_heads(preset, length, degree, far) for length in LENGTHS for degree in DEGREES]
        lines.append(f"| {' | '.join([name, *(f'{one:.2f}' for one in cells)])} |")
    return "\n".join(lines)


def _ring_over_heads(preset: str, length: int, degree: int, machine: hardware.Hardware) -> float:
    job = Job(
        model={"source": f"preset:{preset}"}, data={"sequence_length": length}, train={"global_batch": 1}, numerics={"precision": "bf16"}
    )  # fmt: skip
    heads, ring = (
        samestep.simulate(job, Layout(f"dp=1 cp={degree} exchange={one} recompute=full"), machine).step_s
        for one in ("heads", "ring")
    )
    return ring / heads


def main(words: Sequence[str] | None = None) -> int:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mbit", type=float, nargs="+", default=[400.0])
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--crossover", action="store_true")
    parser.add_argument("--degrees", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--limit", type=float, default=120.0, help="seconds after which a training is ended")
    parser.add_argument("--keep", action="store_true")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    given = parser.parse_args(words)
    if given.worker:
        work(*json.loads(given.worker))
        return 0
    kept, table = (MEASURED, measured_markdown) if given.crossover else (ROWS, markdown)
    size = {"length": given.length, "steps": given.steps}
    found: dict[str, Any] = {"mbit": given.mbit if given.crossover else given.mbit[0], **size, "rows": []}
    with tempfile.TemporaryDirectory() as folder:
        path = kept if given.keep else Path(folder) / "rows.json"
        try:
            if given.crossover:
                for row in measured_rows(given.mbit, given.degrees, **size, limit_s=given.limit):
                    print(json.dumps(row), file=sys.stderr, flush=True)
                    found["rows"].append(row)
                    path.write_text(json.dumps(found, indent=1) + "\n")
            else:
                found["rows"] = rows_of(given.mbit[0], **size, limit_s=given.limit)
                path.write_text(json.dumps(found, indent=1) + "\n")
        except (NetworkError, RuntimeError) as error:
            print(error)
            return 2 if isinstance(error, NetworkError) else 1
        print(table(path))
    return 0


if __name__ == "__main__":
    sys.exit(main())
