"""The command line with workers that are spawned, as on GPUs: they inherit nothing, and no module is sent to them."""

from __future__ import annotations

import json
import os
import pickle
import tempfile
from pathlib import Path
from typing import Any

import pytest

from samestep.examination import examine
from samestep.job import Job
from samestep.layout import Layout
from samestep.proof import verify
from samestep.proof.sides import Subject
from tests import small
from tests.device.simulated_cuda import install_if_asked, refusal

needs_device = pytest.mark.skipif(bool(refusal()), reason=refusal())
ROOT = Path(__file__).parents[2]


def samestep(verb: str, *words: str, **settings: Any) -> str:
    """Run the command line on simulated devices, in a fork of this process that spawns its workers; return what it prints."""
    sets = [word for key, value in {**small.SMALL, **settings}.items() for word in ("--set", f"{key}={value}")]
    path = os.pathsep.join(map(str, (ROOT / "tests/site", ROOT, ROOT / "src")))
    variables = {"PYTHONPATH": path, "SAMESTEP_TESTS_SIMULATE_A_DEVICE": "1", "OMP_NUM_THREADS": "1"}

    def command() -> int:
        os.environ.update(variables)
        os.chdir(ROOT)
        install_if_asked()
        return small.main(verb, *words, *sets)

    with tempfile.TemporaryDirectory() as folder:
        status = small.status_of(small.forked(command, Path(folder)), 300)
        printed = "".join(Path(folder, name).read_text(encoding="utf-8") for name in ("out", "err"))
    assert status == 0, printed
    return printed


def losses(folder: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


@needs_device
@pytest.mark.nightly
def test_a_run_and_its_resume(tmp_path: Path) -> None:
    on_device = {"run.device": "cuda", "checkpoint.every": 2}
    samestep("train", "--layout", "dp=2 zero=3", "--out", f"{tmp_path}/whole", "--steps", "4", **on_device)
    samestep("train", "--layout", "dp=2 zero=3", "--out", f"{tmp_path}/parts", "--steps", "2", **on_device)
    samestep("train", "--layout", "dp=2 offload", "--out", f"{tmp_path}/parts", "--steps", "4", "--resume", **on_device)
    samestep("train", "--layout", "dp=1", "--out", f"{tmp_path}/cpu", "--steps", "4", **{"run.device": "cpu"})
    whole, parts, cpu = (losses(tmp_path / name) for name in ("whole", "parts", "cpu"))
    assert whole == pytest.approx(cpu, rel=1e-5)
    assert parts == pytest.approx(whole, rel=1e-5)


@needs_device
def test_a_watched_run_of_a_pipeline_with_samples(tmp_path: Path) -> None:
    """Its text samples need the last stage's logits on every stage; its weights are compared while they are on the host."""
    settings = {"run.device": "cuda", "train.sample_tokens": 4, "train.watch_every": 1, "checkpoint.every": 0}
    printed = samestep("train", "--layout", "pp=2 offload", "--out", f"{tmp_path}/run", "--steps", "1", **settings)
    assert len(losses(tmp_path / "run")) == 1, printed


@needs_device
@pytest.mark.nightly
def test_a_proof_on_devices() -> None:
    assert "the same result" in samestep("verify", "--layout", "dp=2 zero=1", **{"run.device": "cuda"})


@pytest.mark.nightly
def test_a_proof_with_two_threads() -> None:
    assert "the same result" in samestep("verify", "--layout", "dp=2", **{"run.device": "cpu", "run.threads": 2})


def test_a_proof_reaches_a_spawned_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its traced module stays behind, since it has hooks of its own; the worker traces the model again."""
    config = {key.rpartition(".")[2]: value for key, value in small.SMALL.items() if key.startswith("model.")}
    job = Job(model={"source": "hf:llama", "config": config}, data={"sequence_length": 16}, train={"global_batch": 8})
    layout = Layout("dp=2")
    source, data, example = verify._prepare_inputs(job, layout, None, None, None, None)
    subject = Subject(source, data, example, job, layout, tmp_path)
    sent, traced_again = pickle.dumps(subject), []
    monkeypatch.setattr(examine, "_examine_model", lambda *given, **how: traced_again.append(given) or source.prepared)
    arrived: Subject = pickle.loads(sent)
    assert len(traced_again) == 1
    assert (arrived.job, arrived.layout) == (job, layout)
    assert arrived.source.prepared is not None
    assert arrived.source.prepared.module is source.prepared.module
