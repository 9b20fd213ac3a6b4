"""docs/python-api.md has everything that is public: functions, methods of a run, fields of a report; its examples run."""

from __future__ import annotations

import dataclasses
import importlib
import re
import sys
from pathlib import Path
from typing import Any

import mypy.api
import pytest

import samestep
from samestep.runtime.run import Run
from samestep.runtime.step_report import StepReport
from tests import small

DOCS = Path(__file__).parents[2] / "docs"
TEXT = (DOCS / "python-api.md").read_text(encoding="utf-8")


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(DOCS)
    yield importlib.import_module("api_tables")
    sys.modules.pop("api_tables", None)


def test_nothing_public_is_missing() -> None:
    shown = set(re.findall(r"^\| `(?:samestep\.|run\.)?(\w+)", TEXT, re.MULTILINE))
    methods = {name for name in dir(Run) if not name.startswith("_")}
    fields = {field.name for field in dataclasses.fields(StepReport)}
    assert not (set(samestep.__all__) | methods | fields) - shown


def test_every_row_says_what_it_is(tables: Any) -> None:
    for table in tables.TABLES.values():
        for line in table().splitlines()[2:]:
            *_, text = re.split(r"(?<!\\) \| ", line.removesuffix(" |"))
            assert re.match(r"[A-Z`].*\w", text), line


def test_fields_have_the_types_of_the_report(tables: Any) -> None:
    found = {name: kind for name, kind, _ in tables.fields_of(StepReport)}
    assert found["loss"] == "float"
    assert found["reserved_bytes"] == r"int \| None"


def test_the_types_of_a_jobs_tables_are_those_of_the_tables(tmp_path: Path) -> None:
    status, said, _ = small.script(Path("docs/job_keys.py").resolve(), ["--check"], tmp_path)
    assert (status, said) == (0, "")


RIGHT = """
from samestep.job import Job
from samestep.job_keys import TrainKeys
from samestep.job_tables import TrainTable
train: TrainKeys = {"steps": 3, "loss_over": "batch", "ema": None, "record": 4}
Job(train=train, model={"source": "hf:llama", "lora": {"targets": ["q_proj"], "r": 4}})
Job(train=TrainTable(steps=3), data={"augment": ("crop",), "mixture": {"topics": 1}}, layout={"dp": 2, "zero": 3, "sequence_parallel": True})
Job(optimizer={"lr": 1, "groups": [{"match": ["*.bias"], "lr": 0.1}]}, run={"report": "wandb", "allow": ["loss"]})
"""
WRONG = {
    'Job(train={"step": 3})': "TrainKeys",
    'Job(train={"steps": "3"})': "TrainKeys",
    'Job(training={"steps": 3})': '"training"',
    'Job(numerics={"precision": "fp32"})': "NumericsKeys",
    'Job(model={"lora": {"r": 4}})': "ModelKeys",
    'Job(run={"allow": ["lose"]})': "RunKeys",
    'Job(layout={"dpp": 2})': "LayoutKeys",
    'Job(layout={"zero": 4})': "LayoutKeys",
    'wrong: OptimizerKeys = {"learning_rate": 1.0}': 'Extra key "learning_rate" for TypedDict "OptimizerKeys"',
}


def test_a_type_checker_knows_the_keys_of_a_job(tmp_path: Path) -> None:
    source = Path(samestep.__file__).parent
    (tmp_path / "right.py").write_text(RIGHT)
    (tmp_path / "wrong.py").write_text(
        "\n".join(["from samestep.job import Job; from samestep.job_keys import OptimizerKeys", *WRONG])
    )
    files = [source / name for name in ("job.py", "job_keys.pyi", "job_tables.py", "layout.py", "optimizer_tables.py")]
    options = [
        "--follow-imports=skip",
        "--config-file=",
        "--no-incremental",
        "--hide-error-context",
        "--cache-dir=/dev/null",
    ]
    said, _, _ = mypy.api.run([*options, *map(str, (tmp_path / "right.py", tmp_path / "wrong.py", *files))])
    said = [line for line in said.splitlines() if str(tmp_path) in line]
    assert [line for line in said if "right.py" in line] == []
    for number, (code, words) in enumerate(WRONG.items(), 2):
        assert any(f"wrong.py:{number}: error" in line and words in line for line in said), (code, said)


def test_each_public_name_has_a_nearest_counterpart(tables: Any) -> None:
    assert set(tables.NEAREST) == set(samestep.__all__)
    assert set(tables._OF_RUN) <= set(tables.public_methods())
    assert tables.counterparts() in (DOCS / "reference" / "names.md").read_text(encoding="utf-8")
