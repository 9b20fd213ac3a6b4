"""Peaks: what a rank has alive at most within a step is what the program says, within a per cent, whatever the layout.

Everything counts by its storage: weights, gradients and states, activations, what a backward works on, logits, gathered
weights, what is sent. A reference that is kept too long shows here, since nothing in the model of memory knows of it.
"""

from __future__ import annotations

import gc
import itertools
import json
import sys
import time
import weakref
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from samestep.datasets import batches
from samestep.job import Job
from samestep.job_files import load
from samestep.layout import Layout
from samestep.memory.memory_use import during_init, during_step, over_step, saving_host_bytes
from samestep.program.update_rules import states_per_param
from samestep.runtime.checkpoints import checkpoint
from samestep.runtime.processes.join import RankInfo
from samestep.runtime.run import Run
from samestep.training.workload import Workload
from tests.covering import daily
from tests.pool import pool
from tests.traced import families_once

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from live import Live

JOB = Path(__file__).parents[2] / "jobs" / "default.toml"
SETTINGS = ("train.global_batch=16", "model.config.num_hidden_layers=3", "data.sequence_length=32")


def _place(rank: int, world: int) -> RankInfo:
    return RankInfo(rank, rank, world, world, torch.device("cpu"))


def _job(precision: str, *settings: str) -> Job:
    return load(JOB, (*SETTINGS, f"numerics.precision={precision}", *settings))


def _workload(job: Job) -> Workload:
    with families_once():
        return Workload(job)


@dataclass(frozen=True, slots=True)
class Peak:
    """Bytes, measured and as the program says."""

    of: str
    most: int
    said: int
    parts: dict[str, int]


def _peaks(rank: int, world: int, layout: str, precision: str, folder: str, *settings: str) -> list[Peak]:
    gc.freeze()  # what was there before is not counted, and `Live`, which collects often, need not look through it
    job = _job(precision, *settings)
    workload, place = _workload(job), _place(rank, world)
    run = Run(workload.source, Layout(layout), job, place)
    drawing = Live()
    idle = drawing.count_all()  # the example
    with drawing.watching():
        run.prepare(workload.example)
    most, before = sys.maxsize, 0
    for batch in itertools.islice(batches(workload.dataset, job), WATCHED.stop):
        if batch.step not in WATCHED:
            run.step(batch)
            continue
        live = Live()
        before = live.count_all()
        with live.watching():
            run.step(batch)
        most = min(most, live.most)
    said = during_step(run.program, states_per_param(job), rank)
    # What is on the host is in the same memory here.
    most_said = max(use.total + use.host for _, use in over_step(run.program, states_per_param(job), rank))
    trained = sys.maxsize
    for _ in range(5):  # a thread of gloo may hold a message of the last step for a moment
        saving = Live()
        trained = min(trained, saving.count_all())
        time.sleep(0.02)
    with saving.watching():
        checkpoint.save(run, Path(folder), keep=1)
    drawn, saved = during_init(run.program, rank).total, saving_host_bytes(run.program, states_per_param(job), rank)
    return [
        Peak("step", most - idle, most_said, {**said.parts(), "at rest": before}),
        Peak("init", drawing.most - idle, drawn, {}),
        Peak("checkpoint", saving.most - trained, saved, {}),
    ]


WATCHED = range(2, 5)
"""Steps of which the least peak counts: a thread of gloo may hold a message longer in one of them, and none of them less."""
LAYOUTS = [
    "dp=1",
    "dp=1 microbatch=4",
    "dp=1 recompute=full",
    "dp=1 recompute=selective microbatch=4",
    "dp=1 recompute=alternate microbatch=4",
    "dp=1 recompute=offload microbatch=4",
    "dp=2",
    "dp=2 zero=1 microbatch=2",
    "dp=2 zero=2",
    "dp=2 zero=3",
    "dp=2 zero=3 microbatch=4",
    "dp=2 zero=3 recompute=full microbatch=4",
    "tp=2",
    "tp=2 sequence_parallel microbatch=8",
    "pp=2 microbatch=4",
    "pp=2 microbatch=4 schedule=gpipe",
    "cp=2",
]
HYBRIDS = ["cp=2 zero=3", "tp=2 pp=2 microbatch=4", "dp=2 tp=2 zero=3", "dp=2 pp=2 zero=3 microbatch=4"]


@pytest.mark.parametrize(
    ("layout", "precision"), daily((layout, precision) for precision in ("float32", "bf16") for layout in LAYOUTS)
)
def test_what_is_alive_at_most_is_what_the_program_says(layout: str, precision: str, tmp_path: Path) -> None:
    for peak in _peaks_of_all_ranks(layout, precision, tmp_path):
        if peak.of == "checkpoint" and "zero" not in layout and peak.most < peak.said / 2:
            continue  # of replicas the first one writes
        limit = {"step": 0.01, "init": 0.06, "checkpoint": 0.03}[peak.of]
        assert peak.said == pytest.approx(peak.most, rel=limit), peak


@pytest.mark.parametrize("layout", daily(HYBRIDS))
def test_steps_of_hybrids_within_two_per_cent(layout: str, tmp_path: Path) -> None:
    for peak in _peaks_of_all_ranks(layout, "float32", tmp_path):
        assert peak.of != "step" or peak.said == pytest.approx(peak.most, rel=0.02), peak


@pytest.mark.parametrize(
    ("layout", "precision"),
    [
        ("dp=1", "bf16"),
        pytest.param("dp=1 loss_chunk=64", "bf16", marks=pytest.mark.nightly),
        pytest.param("dp=1 loss_chunk=128 microbatch=4", "float32", marks=pytest.mark.nightly),
        ("tp=2 loss_chunk=64", "float32"),
        ("dp=2 zero=3 loss_chunk=64", "bf16"),
        pytest.param("pp=2 loss_chunk=32 microbatch=4", "float32", marks=pytest.mark.nightly),
    ],
)
def test_steps_with_many_classes_whose_logits_are_whole_or_in_chunks(
    layout: str, precision: str, tmp_path: Path
) -> None:
    for peak in _peaks_of_all_ranks(layout, precision, tmp_path, "model.config.vocab_size=4096"):
        assert peak.of != "step" or peak.said == pytest.approx(peak.most, rel=0.01), peak


REPEATED = [
    f"tp=2 {words} microbatch=4".replace("  ", " ")
    for words in (
        f"{parallel} recompute={recompute}"
        for parallel in ("", "sequence_parallel")
        for recompute in ("full", "selective", "alternate")
    )
]


@pytest.mark.parametrize(
    ("layout", "precision"),
    [
        pytest.param(
            layout, precision, marks=[] if (layout, precision) == (REPEATED[0], "bf16") else pytest.mark.nightly
        )
        for layout in (*REPEATED, "tp=2 recompute=full", "tp=2 sequence_parallel recompute=full")
        for precision in ("bf16", "float32")
    ],
)
def test_steps_of_blocks_that_tp_cuts_and_recompute_repeats(layout: str, precision: str, tmp_path: Path) -> None:
    for peak in _peaks_of_all_ranks(layout, precision, tmp_path):
        assert peak.of != "step" or peak.said == pytest.approx(peak.most, rel=0.02), peak


@pytest.mark.parametrize(
    ("layout", "precision"),
    [
        ("dp=1 microbatch=2", "float32"),
        pytest.param("cp=2", "bf16", marks=pytest.mark.nightly),
        pytest.param("tp=2", "float32", marks=pytest.mark.nightly),
        pytest.param("dp=1 recompute=full", "float32", marks=pytest.mark.nightly),
    ],
)
def test_steps_of_packed_documents_hold_no_mask(layout: str, precision: str, tmp_path: Path) -> None:
    lines = (json.dumps({"text": "a mat " * (37 * index % 19 + 1)}) for index in range(400))
    (tmp_path / "documents.jsonl").write_text("\n".join(lines))
    settings = (f"data.source=jsonl:{tmp_path / 'documents.jsonl'}", "data.sequence_length=256", "train.global_batch=4")
    for peak in _peaks_of_all_ranks(layout, precision, tmp_path, *settings):
        assert peak.of != "step" or peak.said == pytest.approx(peak.most, rel=0.01), peak


@pytest.mark.parametrize(
    ("layout", "precision"),
    [
        ("dp=1 mlp_chunk=64", "float32"),
        pytest.param("dp=1 mlp_chunk=64 microbatch=4", "bf16", marks=pytest.mark.nightly),
    ],
)
def test_steps_of_mlps_in_chunks(layout: str, precision: str, tmp_path: Path) -> None:
    for peak in _peaks_of_all_ranks(layout, precision, tmp_path, "data.sequence_length=128"):
        assert peak.of != "step" or peak.said == pytest.approx(peak.most, rel=0.01), peak


@pytest.mark.parametrize(
    ("layout", "precision"),
    [
        ("cp=2", "float32"),
        pytest.param("cp=2 recompute=selective", "bf16", marks=pytest.mark.nightly),
        pytest.param("tp=2 sequence_parallel", "float32", marks=pytest.mark.nightly),
    ],
)
def test_steps_of_one_long_sample_keep_a_slice_of_embeddings_and_angles(
    layout: str, precision: str, tmp_path: Path
) -> None:
    settings = ("data.sequence_length=512", "model.config.max_position_embeddings=512", "train.global_batch=2")
    for peak in _peaks_of_all_ranks(f"{layout} microbatch=1", precision, tmp_path, *settings):
        assert peak.of != "step" or peak.said == pytest.approx(peak.most, rel=0.01), peak


@pytest.mark.parametrize(
    "words", ["zero=3", pytest.param("zero=2 microbatch=2 accumulate=full", marks=pytest.mark.nightly)]
)
def test_where_codes_are_scattered(words: str, tmp_path: Path) -> None:
    settings = ("numerics.compression=int8", "numerics.replicas=2")
    for peak in _peaks_of_all_ranks(f"dp=2 {words}", "float32", tmp_path, *settings):
        limit = {"step": 0.01, "init": 0.06}.get(peak.of)
        assert limit is None or peak.said == pytest.approx(peak.most, rel=limit), peak


def _peaks_of_all_ranks(layout: str, precision: str, folder: Path, *settings: str) -> list[Peak]:
    ranks, case = Layout(layout).world_size, (layout, precision, str(folder), *settings)
    _workload(_job(precision, *settings))  # which the ranks inherit
    seen = pool(ranks).run(_peaks, *case) if ranks > 1 else [_peaks(0, 1, *case)]
    return list(itertools.chain.from_iterable(seen))


def test_a_run_that_nobody_holds_is_freed() -> None:
    job = load(JOB, SETTINGS)
    workload = Workload(job)
    run = Run(workload.source, Layout("dp=1 microbatch=4"), job, _place(0, 1))
    run.prepare(workload.example)
    run.step(next(iter(batches(workload.dataset, job))))
    weights = [weakref.ref(param) for param in run.model.parameters()]
    del run, workload
    gc.collect()
    assert [weight for weight in weights if weight() is not None] == []
