"""Files and words that nobody would write on purpose, and somebody does: each is read, or refused by one of our own errors.

What is drawn is a real job, profile, layout or manifest with some of its values exchanged for others; the manifests are signed
again, as who means harm does. No exception of another kind comes out of a reader, and the command line says it in one line.
"""

from __future__ import annotations

import contextlib
import copy
import json
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import samestep
from samestep import hardware
from samestep import job_files as jobs
from samestep.datasets import batches
from samestep.errors import SamestepError
from samestep.job import Job
from samestep.layout import Layout
from samestep.runtime.checkpoints import checkpoint, manifests
from samestep.runtime.run import Run
from tests import small
from tests.laboratory import job_of, make_run
from tests.models import Tokens

FUZZ = settings(
    max_examples=80, derandomize=True, database=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
ODD: list[Any] = [
    0, -1, 1, 2, 3, 2**31, 2**63, 10**30, 0.5, -0.5, 1e300, float("nan"), float("inf"), True, "", "x", "\0", "../..", "é" * 300,
    "hf:", "preset:", "text:/dev/null", "os:system", "builtins:eval", "value/x/0", "auto", [], [1], ["x"], [[]], {}, {"a": 1},
]  # fmt: skip
RAW = [
    b"\xff\xfe", b"a = " + b"[" * 10_000, b"a = 1" + b"0" * 5000, b"\xef\xbb\xbf", b"", b"\0", b"[[a]]\n[a]", b"{" * 100_000,
    b'{"a": NaN}', b"[1]", b"null", b'"text"',
]  # fmt: skip
WORDS = ("dp", "tp", "pp", "cp", "ep", "zero", "schedule", "virtual_stages", "microbatch", "offload", "reduce", "dp_shard", "", "x")  # fmt: skip
VALUES = ("1", "2", "0", "-1", "1e3", "٣", "²", "1_0", "full", "gpipe", "", "=", "nan", "9" * 5000, "0x2")
JOB: dict[str, Any] = json.loads(Job(model={"source": "preset:gpt3-125m"}).model_dump_json())
PROFILE = tomllib.loads((Path(samestep.__file__).parent / "profiles" / "cpu-laptop.toml").read_text())


def paths(table: Any, before: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where the values of nested tables and lists stand."""
    for key, value in table.items() if isinstance(table, dict) else enumerate(table) if isinstance(table, list) else ():
        yield (*before, key)
        yield from paths(value, (*before, key))


@st.composite
def changed(draw: st.DrawFn, table: dict[str, Any]) -> dict[str, Any]:
    """A table of which one to three values are exchanged, removed or joined by another."""
    found = copy.deepcopy(table)
    for _ in range(draw(st.integers(1, 3))):
        path = draw(st.sampled_from([*paths(found)] or [("x",)]))
        holder = found
        for key in path[:-1]:
            holder = holder[key]
        value = copy.deepcopy(draw(st.sampled_from(ODD)))
        match draw(st.sampled_from(("exchange", "exchange", "exchange", "remove", "join"))):
            case "remove" if path != ("x",):
                del holder[path[-1]]
            case "join" if isinstance(holder, dict):
                holder[f"{path[-1]}x"] = value
            case _:
                holder[path[-1]] = value
    return found


def written(folder: Path, table: dict[str, Any]) -> Path:
    path = folder / "drawn.toml"
    path.write_text(tomli_w.dumps(_without_none(table)))
    return path


def _without_none(value: Any) -> Any:
    """A value without None, which TOML has not."""
    if isinstance(value, dict):
        return {key: _without_none(one) for key, one in value.items() if one is not None}
    return [_without_none(one) for one in value if one is not None] if isinstance(value, list) else value


@FUZZ
@given(table=changed(JOB))
def test_a_job_is_read_or_refused(table: dict[str, Any], tmp_path: Path) -> None:
    try:
        job = jobs.load(written(tmp_path, table))
    except SamestepError:
        return
    assert Job(**tomllib.loads(job.to_toml())) == job


@FUZZ
@given(table=changed(PROFILE))
def test_a_profile_is_read_or_refused(table: dict[str, Any], tmp_path: Path) -> None:
    with contextlib.suppress(SamestepError):
        hardware.load(written(tmp_path, table))


@FUZZ
@given(
    st.lists(st.tuples(st.sampled_from(WORDS), st.sampled_from(("=", "", "==")), st.sampled_from(VALUES)), max_size=5)
)
def test_a_layout_is_read_or_refused(words: list[tuple[str, str, str]]) -> None:
    try:
        layout = Layout(" ".join(map("".join, words)))
    except SamestepError:
        return
    assert Layout(str(layout)) == layout


@pytest.mark.parametrize("content", RAW)
def test_what_is_no_file_of_ours_is_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "step-000001" / manifests.NAME
    path.parent.mkdir()
    path.write_bytes(content)
    with pytest.raises(SamestepError):
        manifests.read_manifest(path.parent)
    for read in (jobs.load, hardware.load):
        with contextlib.suppress(SamestepError):
            read(path)


@settings(FUZZ, max_examples=12)
@given(table=changed(JOB), words=st.sampled_from(("dp=2", "tp=2 pp=2", "zero=9", "dp=2 zero=3 schedule=x")))
def test_the_command_says_it_in_one_line(
    table: dict[str, Any], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if table.get("model") != JOB["model"]:
        return  # another model than a preset is built, which takes torch and time
    status = small.main("simulate", written(tmp_path, table), "--layout", words)
    said = capsys.readouterr().err
    assert status in (0, 1, 2)
    assert "Traceback" not in said
    assert status == 0 or said.startswith(("samestep: ", "usage: "))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Path, dict[str, Any]]:
    """A run, its checkpoint and what its manifest says."""
    job = job_of("float32", 4, optimizer={"name": "adamw", "lr": 1e-2, "options": {}}, train={"watch_every": 0})
    run = make_run(0, 1, "plain", "dp=1", job)
    run.step(next(batches(Tokens(), job)))
    folder = checkpoint.save(run, tmp_path_factory.mktemp("saved"))
    return run, folder, manifests.read_manifest(folder)


@FUZZ
@given(data=st.data())
def test_a_manifest_is_read_or_refused(data: st.DataObject, saved: tuple[Run, Path, dict[str, Any]]) -> None:
    run, folder, manifest = saved
    table = data.draw(changed(manifest))
    (folder / manifests.NAME).unlink(missing_ok=True)
    manifests.write_manifest(folder, table)
    with contextlib.suppress(SamestepError):
        checkpoint.load(run, folder)
