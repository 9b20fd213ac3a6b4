"""benchmarks/slow_links.py: what the kernel counts is what the ledger says, and where there can be no hosts it is said."""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
from multiprocessing.queues import Queue
from pathlib import Path
from typing import Any

import pytest

from samestep.job import Job
from tests.small import enter_namespace

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import circumstances
import network_namespaces
import slow_links
from network_namespaces import Host, network

_LACKING = network_namespaces.lacking()
needs_namespaces = pytest.mark.skipif(bool(_LACKING), reason=_LACKING or "hosts can be made here")


def train(rank: int, hosts: list[Host], job: Job, said: Queue[dict[str, Any]]) -> None:
    """Train on a host, in a fork of this process, which has imported everything."""
    enter_namespace(hosts[rank].name)
    where = {"RANK": rank, "WORLD_SIZE": len(hosts), "MASTER_ADDR": hosts[0].address, "MASTER_PORT": slow_links.PORT}
    os.environ.update({name: str(value) for name, value in where.items()})
    for figures in slow_links.work([job]):
        said.put(figures)


@needs_namespaces
def test_the_kernel_counts_what_the_ledger_lists() -> None:
    job, forks = slow_links.job_of("toy", "int8", 2, 4), multiprocessing.get_context("fork")
    said = forks.Queue()
    with network(2, bits_per_s=1e9) as hosts:
        started = [forks.Process(target=train, args=(rank, hosts, job, said), daemon=True) for rank in range(2)]
        for process in started:
            process.start()
        seen = [said.get(timeout=100) for _ in started]
        for process in started:
            process.join()
    for figures in seen:
        as_float32 = 4 * figures["weights"]
        assert as_float32 / 4 < figures["ledger_bytes"] < 0.27 * as_float32
        assert figures["ledger_bytes"] < figures["kernel_bytes"] < 1.2 * figures["ledger_bytes"] + 8192


def test_a_machine_without_namespaces_is_told_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "")
    assert slow_links.main(["--hardware", "cpu-laptop"]) == 2
    assert "nothing was measured: no network of namespaces on this machine" in capsys.readouterr().err


def test_rows_of_one_network_take_the_place_of_its_former_ones(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    one = {"kernel_bytes": 4e6, "ledger_bytes": 4e6, "held_out": 2.0, "weights": 10, "predicted_s": 0.4}
    rows = [
        {"way": "alone", **one, "step_s": 0.01},
        {"way": "none", **one, "step_s": 0.41},
        {"way": "int8", **one, "step_s": 0.11, "kernel_bytes": 1e6, "predicted_s": 0.1, "held_out": 2.01},
    ]
    for mbit in (10.0, 100.0, 10.0):
        given = slow_links.arguments(["--mbit", str(mbit)])
        slow_links.keep(file, given, rows, circumstances.now())
    slow_links.keep(file, given, rows[:2], circumstances.now())  # of other ways: a table of its own
    assert [(run["mbit"], len(run["rows"])) for run in json.loads(file.read_text())] == [
        (100.0, 3),
        (10.0, 3),
        (10.0, 2),
    ]
    text = slow_links.markdown(file)
    assert text.count("Measured on ") == 3
    assert "the exchange takes 40.0 times the compute" in text
    assert "| int8 | 1,000.0 | 0.250 | 4,000.0 | 110 | 3.73 | 4.00 (100 ms) | 2.010 (+0.5%) |" in text


def test_a_link_has_its_rate_without_the_headers() -> None:
    given = slow_links.arguments(["--mbit", "100", "--latency-ms", "5"])
    machine = slow_links.hardware.load("cpu-laptop")
    on = slow_links.linked(machine, given)
    assert on.inter.bytes_per_s == pytest.approx(12.5e6 * 1448 / 1514)
    assert on.inter.latency_s == machine.intra.latency_s + 5e-3
    assert on.devices_per_node == 1
