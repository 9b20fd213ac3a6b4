"""The documents: tables are what their commands print today, and every example runs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


STATUS = {"planted_bug.py": 1}
"""Examples that end with another status than 0: the proof fails, as it must."""


def _run(*words: str, status: int = 0) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *words], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout


def test_tables_are_fresh() -> None:
    assert _run("docs/tables.py", "--check") == ""


@pytest.mark.parametrize("example", sorted(path.name for path in (ROOT / "examples").glob("*.py")))
def test_example_runs(example: str) -> None:
    assert "loss" in _run(f"examples/{example}", status=STATUS.get(example, 0))
