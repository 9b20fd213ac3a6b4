"""Random words of layouts, bytes that are no file of ours, and odd jobs on the command line are read or refused. Odd files: `test_odd_inputs.py`."""

from __future__ import annotations

import contextlib
import json
import random
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from hypothesis import given, settings
from hypothesis import strategies as st

from samestep import hardware
from samestep import job_files as jobs
from samestep.errors import SamestepError
from samestep.job import Job
from samestep.layout import Layout
from samestep.runtime.checkpoints import manifests
from tests import small
from tests.damage import mutated
from tests.odd_inputs import without_none

RAW = [
    b"\xff\xfe", b"a = " + b"[" * 10_000, b"a = 1" + b"0" * 5000, b"\xef\xbb\xbf", b"", b"\0", b"[[a]]\n[a]", b"{" * 100_000,
    b'{"a": NaN}', b"[1]", b"null", b'"text"',
]  # fmt: skip
WORDS = ("dp", "tp", "pp", "cp", "ep", "zero", "schedule", "virtual_stages", "microbatch", "offload", "reduce", "dp_shard", "", "x")  # fmt: skip
VALUES = ("1", "2", "0", "-1", "1e3", "٣", "²", "1_0", "full", "gpipe", "", "=", "nan", "9" * 5000, "0x2")
JOB: dict[str, Any] = json.loads(Job(model={"source": "preset:gpt3-125m"}).model_dump_json())


@settings(max_examples=80, derandomize=True, database=None)
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


@pytest.mark.parametrize("seed", range(12))
def test_the_command_says_it_in_one_line(seed: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    drawn = random.Random(seed)
    table, _ = mutated({key: value for key, value in JOB.items() if key != "model"}, drawn)
    words = drawn.choice(("dp=2", "tp=2 pp=2", "zero=9", "dp=2 zero=3 schedule=x"))
    try:
        (tmp_path / "drawn.toml").write_text(tomli_w.dumps(without_none({**table, "model": JOB["model"]})))
    except (ValueError, TypeError, AttributeError):  # what TOML has not
        return
    status = small.main("simulate", tmp_path / "drawn.toml", "--layout", words)
    said = capsys.readouterr().err
    assert status in (0, 1, 2)
    assert "Traceback" not in said
    assert status == 0 or said.startswith(("samestep: ", "usage: "))
