"""Triton kernels equal the formulas in torch, masks to the bit: Triton's interpreter runs them on CPUs, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
INTERPRETED = sorted(path.name for path in (ROOT / "tests" / "kernels").glob("[a-z]*.py") if path.stem != "compiled")
HELD = Path(sys.prefix) / "triton"
"""The folder in which `make triton` installs Triton, for these tests alone."""


def _has_triton() -> bool:
    """Return whether there is a Triton with an interpreter that works: that of 3.6, which comes with torch 2.11, fails with numpy 2.4."""
    if (HELD / "triton").is_dir():
        return True
    try:
        major, minor, *_ = metadata.version("triton").split(".")
    except metadata.PackageNotFoundError:
        return False
    return (int(major), int(minor)) >= (3, 7)


needs_triton = pytest.mark.skipif(not _has_triton(), reason="Triton 3.7 is not installed: `make triton` does that")


def _passes(words: list[str], **variables: str) -> str:
    """Run Python with Triton, and return what it has printed."""
    path = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH", ""), str(HELD))))
    environment = {name: word for name, word in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": path, **variables}
    words = [sys.executable, "-m", *words]
    found = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert found.returncode == 0, found.stdout + found.stderr
    return found.stdout


@needs_triton
@pytest.mark.parametrize("file", INTERPRETED)
def test_in_the_interpreter(file: str) -> None:
    """Each file of `tests/kernels` passes: which functions are interpreted is decided when Triton is imported."""
    words = ["pytest", "-q", "-p", "no:cacheprovider", str(ROOT / "tests" / "kernels" / file)]
    assert " skipped" not in _passes(words, TRITON_INTERPRET="1")


@needs_triton
@pytest.mark.parametrize("which", ["one", pytest.param("every", marks=pytest.mark.nightly)])
def test_every_kernel_compiles_for_gpus(which: str) -> None:
    """Triton's compiler needs no GPU, and makes the code of one; it runs in a process in which nothing is interpreted."""
    assert f"{which} form compiles" in _passes(["tests.kernels.compiled", which])
