"""Triton kernels equal the formulas in torch, to the bit: Triton's interpreter runs them on CPUs, in a process of its own."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
INTERPRETED = sorted(path.name for path in (ROOT / "tests" / "kernels").glob("[a-z]*.py") if path.stem != "compiled")
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


@needs_triton
@pytest.mark.parametrize("file", INTERPRETED)
def test_in_the_interpreter(file: str) -> None:
    """Each file of `tests/kernels` passes: which functions are interpreted is decided when Triton is imported."""
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(ROOT / "tests" / "kernels" / file)]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    found = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert found.returncode == 0, found.stdout + found.stderr
    assert " skipped" not in found.stdout


@needs_triton
def test_every_kernel_compiles_for_gpus() -> None:
    """Triton's compiler needs no GPU, and makes the code of one; it runs in a process in which nothing is interpreted."""
    words = [sys.executable, "-m", "tests.kernels.compiled"]
    environment = {name: word for name, word in os.environ.items() if name != "TRITON_INTERPRET"}
    found = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert found.returncode == 0, found.stdout + found.stderr


def test_importing_samestep_imports_no_file_that_needs_triton() -> None:
    code = "import sys, samestep.runtime.run; print(*(name for name in sys.modules if name.startswith('samestep.kernels.hashed')))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True)
    assert found.stdout.split() == []
