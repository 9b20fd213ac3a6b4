"""What is loaded runs no code: checkpoints, folders of models and of data, profiles; and who could send some: the sockets of a run."""

from __future__ import annotations

import json
import pickle
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import datasets
import psutil
import pytest
import torch

import samestep
from samestep.datasets import open_dataset
from samestep.errors import CheckpointError
from samestep.job import Job
from samestep.job_tables import DataTable
from samestep.runtime.checkpoints import torch_checkpoint
from tests import audit, folders, small
from tests.pool import pool


def samples_exports_and_resumes(folder: Path) -> None:
    assert small.train("--layout", "dp=2 zero=3", "--steps", "2", "--out", folder) == 0
    audit.planted(folder)
    audit.planted(folder / "checkpoints" / "step-000002")
    assert samestep.evaluate(folder, samples=2).step == 2
    assert small.main("sample", folder, "--tokens", "2") == 0
    assert small.main("export", folder, "--out", folder / "exported") == 0
    assert small.main("train", "--resume", "--out", folder, "--layout", "tp=2", "--steps", "3") == 0


def starts_from_a_folder(folder: Path) -> None:
    model = folders.saved(folder / "model", "llama", vocab_size=257)
    config = json.loads((model / "config.json").read_text())
    config["auto_map"] = {"AutoModelForCausalLM": "modeling_planted.Planted", "AutoConfig": "planted.Planted"}
    (model / "config.json").write_text(json.dumps(config))
    (model / "tokenizer_config.json").write_text(
        json.dumps({"auto_map": {"AutoTokenizer": ["tokenization_planted.T", None]}})
    )
    audit.planted(model)
    keys = {key: value for key, value in small.SMALL.items() if not key.startswith("model.config")}
    words = [f"--set={key}={value}" for key, value in {**keys, "model.source": f"hf:{model}"}.items()]
    assert small.main("train", *words, "--layout", "dp=2", "--steps", "2", "--out", folder / "run") == 0


def reads_data(folder: Path) -> None:
    data = folder / "data"
    datasets.Dataset.from_dict({"text": ["some words to learn"] * 9}).save_to_disk(data)
    (data / "train.jsonl").write_text('{"text": "some words to learn"}\n' * 9)
    audit.planted(data)
    (data / "data.py").write_text((data / "planted.py").read_text())  # a builder script, as datasets once ran
    for source in (f"jsonl:{data / 'train.jsonl'}", f"hf:{data}", f"text:{data / 'train.jsonl'}"):
        table = DataTable(source=source, tokenizer="bytes", sequence_length=8, held_out=0.0)
        assert len(open_dataset(Job(data=table)))


def plans_with_a_profile(folder: Path) -> None:
    profile = Path(samestep.__file__).parent / "profiles" / "cpu-laptop.toml"
    audit.planted(folder)
    (folder / "mine.toml").write_text(profile.read_text())
    assert small.main("plan", "--devices", "2", "--hardware", folder / "mine.toml", "--json", folder / "plan.json") == 0


LOADS = (samples_exports_and_resumes, starts_from_a_folder, reads_data, plans_with_a_profile)


@pytest.mark.filterwarnings("ignore:text becomes bytes")  # the folder's tokenizer is planted, and must not be read
@pytest.mark.parametrize("load", LOADS)
def test_a_load_runs_no_code(load: Callable[[Path], None], tmp_path: Path) -> None:
    with audit.watched() as found:
        load(tmp_path)
    assert found == []
    assert not [*tmp_path.rglob("RAN")]


def unpickles(rank: int, world: int, folder: Path) -> None:
    torch.load(folder / "planted.pt", weights_only=False)


def runs_what_is_there(rank: int, world: int, folder: Path) -> None:
    path = folder / "planted.py"
    exec(compile(path.read_text(), path, "exec"), {})


def starts_a_process(rank: int, world: int, folder: Path) -> None:
    subprocess.run([sys.executable, "-c", ""], check=True)


@pytest.mark.parametrize(
    ("loads", "shows"),
    [(unpickles, "pickle.find_class"), (runs_what_is_there, "exec"), (starts_a_process, "subprocess.Popen")],
)
def test_a_load_that_runs_code_on_any_rank_is_found(loads: Any, shows: str, tmp_path: Path) -> None:
    torch.save(Path("a value of a class"), tmp_path / "planted.pt")
    (tmp_path / "planted.py").write_text("x = 1\n")
    with audit.watched() as found:
        pool(2).run(loads, tmp_path)
    assert any(text.startswith(shows) for text in found)


class Planted:
    """A pickle of it names a function."""

    def __reduce__(self) -> Any:
        return print, ()


def reads_metadata(rank: int, world: int, folder: Path) -> None:
    with mock.patch.object(torch_checkpoint, "_Unpickler", pickle.Unpickler), pytest.raises(CheckpointError):
        torch_checkpoint.entries(folder, [])


def test_whatever_samestep_unpickles_on_any_rank_is_found_in_every_test(tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Planted()))
    torch.save(Path("a value of a class"), tmp_path / "planted.pt")
    pool(2).run(unpickles, tmp_path)  # by the test's own code
    assert audit.by_samestep() == []
    pool(2).run(reads_metadata, tmp_path)
    (one,) = audit.by_samestep()
    assert re.fullmatch(r"runtime/checkpoints/torch_checkpoint.py:\d+: pickle.find_class .*print.*", one)


def test_a_run_listens_on_loopback_alone(tmp_path: Path) -> None:
    words = [*small.settings(train__steps=100_000), "--layout", "dp=2", "--out", str(tmp_path / "run")]
    pid = small.in_background(["train", *words], tmp_path)
    try:
        small.wait_for(lambda: (tmp_path / "run" / "metrics.jsonl").exists())
        processes = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
        sockets = [one for process in processes for one in process.net_connections("inet")]
    finally:
        small.end_background()
    listening = {one.laddr.ip for one in sockets if one.status == psutil.CONN_LISTEN}
    assert listening
    assert listening <= {"127.0.0.1", "::1"}
    assert {one.raddr.ip for one in sockets if one.raddr} <= {"127.0.0.1", "::1"}
