"""The job: what a file and the settings over it say, every mistake at once, and the file that repeats a run."""

from __future__ import annotations

import pickle
import tomllib
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

import samestep
from samestep import Job, JobError, load

DEFAULT = Path(str(resources.files("samestep") / "default_job.toml"))


def _file(folder: Path, text: str) -> Path:
    path = folder / "job.toml"
    path.write_text(text)
    return path


def _mistakes(path: Path, *settings: str) -> list[str]:
    with pytest.raises(JobError) as caught:
        load(path, settings)
    return str(caught.value).splitlines()


def test_the_default_job_of_the_package_is_that_of_the_repository() -> None:
    repository = Path(__file__).parents[2] / "jobs" / "default.toml"
    assert load(DEFAULT) == load(repository)


def test_an_empty_file_is_the_job_of_all_defaults(tmp_path: Path) -> None:
    assert load(_file(tmp_path, "")) == Job()


def test_a_file_and_python_make_the_same_job(tmp_path: Path) -> None:
    text = (
        "[train]\nglobal_batch = 12\n[optimizer]\nname = 'sgd'\noptions = {momentum = 0.9}\n[layout]\ndp = 4\nzero = 3"
    )
    tables: dict[str, Any] = {
        "train": {"global_batch": 12},
        "optimizer": {"name": "sgd", "options": {"momentum": 0.9}},
        "layout": {"dp": 4, "zero": 3},
    }
    assert load(_file(tmp_path, text)) == Job(**tables)


@pytest.mark.parametrize("path", [DEFAULT, None], ids=["default", "empty"])
def test_what_is_written_reads_as_the_same_job(path: Path | None, tmp_path: Path) -> None:
    job = load(path) if path else Job(model={"config": {"deep": {"a": [1, 2.5, "x", True]}}}, layout={"dp": 2})
    again = load(_file(tmp_path, job.to_toml()))
    assert again == job
    assert again.to_toml() == job.to_toml()


def test_a_written_job_has_every_key() -> None:
    tables = tomllib.loads(load(DEFAULT).to_toml())
    for name, field in Job.model_fields.items():
        keys = getattr(field.annotation, "model_fields", {})
        optional = {key for key, value in keys.items() if value.default is None}
        assert keys.keys() - optional <= tables[name].keys()


def test_a_job_survives_pickling_and_cannot_be_changed() -> None:
    job = load(DEFAULT)
    assert pickle.loads(pickle.dumps(job)) == job
    with pytest.raises(ValueError, match="frozen"):
        job.train.steps = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("setting", "key", "value"),
    [
        ("train.steps=50", "train.steps", 50),
        ("train.steps = 50", "train.steps", 50),
        ("optimizer.lr=1e-4", "optimizer.lr", 1e-4),
        ("optimizer.lr=1", "optimizer.lr", 1.0),
        ("data.source=text:/some/where=there", "data.source", "text:/some/where=there"),
        ("data.source='topics'", "data.source", "topics"),
        ("train.prompt=", "train.prompt", ""),
        ("train.prompt=The ", "train.prompt", "The "),
        ("model.config.hidden_size=8", "model.config", {"hidden_size": 8}),
        ("model.config={a=1, b='c'}", "model.config", {"a": 1, "b": "c"}),
        ("optimizer.no_weight_decay=['*bias']", "optimizer.no_weight_decay", ("*bias",)),
        ("numerics.tf32=true", "numerics.tf32", True),
        ("layout.dp=4", "layout", {"dp": 4}),
    ],
)
def test_a_setting_overrides_a_key(setting: str, key: str, value: Any, tmp_path: Path) -> None:
    found: Any = load(_file(tmp_path, ""), [setting])
    for part in key.split("."):
        found = getattr(found, part)
    assert found == value
    assert type(found) is type(value)


def test_the_last_setting_counts(tmp_path: Path) -> None:
    path = _file(tmp_path, "[train]\nsteps = 9")
    assert load(path).train.steps == 9
    assert load(path, ["train.steps=8", "train.steps=7"]).train.steps == 7


@pytest.mark.parametrize("setting", ["train.steps", "=3", "train..steps=3", ".=1", ""])
def test_a_setting_that_is_none_says_how_one_is_written(setting: str, tmp_path: Path) -> None:
    assert _mistakes(_file(tmp_path, ""), setting) == [f"--set {setting}: write key=value, as in --set train.steps=50"]


def test_a_setting_below_a_value_is_refused(tmp_path: Path) -> None:
    assert _mistakes(_file(tmp_path, ""), "train.steps=3", "train.steps.more=3") == [
        "--set train.steps.more=3: steps is a value, not a table"
    ]


def test_every_mistake_is_said_at_once_with_file_and_key(tmp_path: Path) -> None:
    path = _file(
        tmp_path,
        "[train]\nstepz = 3\nglobal_batch = 0\nseed = 'x'\n[optimzer]\nlr = 1\n"
        "[numerics]\nprecision = 'float16'\n[data]\nheld_out = 1.5\n",
    )
    lines = _mistakes(path)
    assert all(line.startswith(f"{path}: ") for line in lines), lines
    told = {line.removeprefix(f"{path}: ").split(": ")[0]: line for line in lines}
    assert told.keys() == {
        "train.stepz", "train.global_batch", "train.seed", "optimzer", "numerics.precision", "data.held_out",
    }  # fmt: skip
    assert "unknown key (did you mean 'steps'?); the keys here are global_batch, steps," in told["train.stepz"]
    assert "unknown key (did you mean 'optimizer'?)" in told["optimzer"]
    assert told["train.global_batch"].endswith("greater than or equal to 1, got 0")
    assert "'float64', 'float32', 'bf16' or 'fp16', got 'float16'" in told["numerics.precision"]
    assert told["data.held_out"].endswith("less than 1, got 1.5")


def test_a_mistake_in_a_setting_names_its_key(tmp_path: Path) -> None:
    path = _file(tmp_path, "[train]\nseed = -1\n")
    told = [line.split(": ")[:2] for line in _mistakes(path, "train.steps=0")]
    assert sorted(told) == sorted([[str(path), "train.seed"], ["--set train.steps=0", "train.steps"]])
    (line,) = _mistakes(_file(tmp_path, ""), "trian.steps=3")
    assert line.startswith("--set trian.steps=3: trian: unknown key (did you mean 'train'?)")


def test_a_mistake_in_python_is_a_job_error() -> None:
    with pytest.raises(JobError, match=r"^job: train\.steps: input should be greater than or equal to 1, got 0$"):
        Job(train={"steps": 0})


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[layout]\ndp_shardd = 2", "layout: unknown layout word 'dp_shardd' (did you mean 'dp_shard'?)"),
        ("[layout]\ndp = 2\ndp_shard = 2", "dp=N sets dp_replicate or dp_shard itself"),
        ("[train]\nsteps = 5\n[schedule]\nwarmup_steps = 6", "schedule.warmup_steps = 6 is more than train.steps = 5"),
    ],
)
def test_values_that_contradict_each_other_are_refused(text: str, says: str, tmp_path: Path) -> None:
    (line,) = _mistakes(_file(tmp_path, text))
    assert says in line


def test_files_that_are_none(tmp_path: Path) -> None:
    assert _mistakes(tmp_path / "nope.toml") == [f"no job file at {tmp_path}/nope.toml"]
    path = _file(tmp_path, "[model\n")
    (tmp_path / "pyproject.toml").touch()
    assert _mistakes(tmp_path / "nope.toml") == [f"no job file at {tmp_path}/nope.toml; there are {path}"]
    assert _mistakes(tmp_path) == [f"{tmp_path} is a folder; a job is a TOML file"]
    (line,) = _mistakes(path)
    assert line.startswith(f"{path} is not TOML: ")
    assert "line 1" in line
    path.write_bytes(b"\xff\xfe")
    (line,) = _mistakes(path)
    assert line.startswith(f"{path} is not TOML: ")


def test_the_public_load_is_this_one() -> None:
    assert samestep.load is load
