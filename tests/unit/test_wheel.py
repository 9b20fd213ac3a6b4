"""The wheel holds all that the package reads, and, installed into a bare environment, trains the default job."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.nightly, pytest.mark.time_limit(900)]


def _run(*words: str | Path, folder: Path, **variables: str) -> str:
    """Run a command in a folder, with nothing of this process on Python's path, and return what it prints."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    ended = subprocess.run(
        [str(word) for word in words], cwd=folder, env={**environment, **variables}, text=True, capture_output=True
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of the files that git knows, built by the backend that is installed, or by the one of constraints.txt."""
    folder = tmp_path_factory.mktemp("wheel")
    for name in _files_of_git("."):
        (folder / "source" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / "source" / name)
    words = [sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check", "--no-deps"]
    try:
        import hatchling  # noqa: F401

        words.append("--no-build-isolation")
    except ImportError:
        pass
    _run(*words, "--wheel-dir", folder, folder / "source", folder=folder, PIP_CONSTRAINT=str(ROOT / "constraints.txt"))
    (built,) = folder.glob("*.whl")
    return built


def _files_of_git(folder: str) -> list[str]:
    words = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z", folder]
    said = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [name for name in said.split("\0") if name and (ROOT / name).is_file()]


def test_it_holds_every_file_of_the_package(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as opened:
        names = {*opened.namelist()}
        metadata = next(name for name in names if name.endswith(".dist-info/METADATA"))
        said = opened.read(metadata).decode()
    kept = {name.removeprefix("src/") for name in _files_of_git("src")}
    assert {"samestep/py.typed", "samestep/profiles/h100x8.toml"} <= kept
    assert {name for name in names if ".dist-info/" not in name} == kept
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert "Requires-Python: >=3.11" in said


def test_it_trains_the_default_job_in_a_bare_environment(wheel: Path, tmp_path: Path) -> None:
    """Its own dependencies are those of this environment, which it finds as an installed system's; samestep is the wheel's."""
    bare = tmp_path / "bare"
    _run(sys.executable, "-m", "venv", "--without-pip", bare, folder=tmp_path)
    python = bare / "bin" / "python"
    words = ["install", "--quiet", "--disable-pip-version-check", "--no-deps", "--no-index", wheel]
    _run(sys.executable, "-m", "pip", "--python", python, *words, folder=tmp_path)
    (site,) = bare.glob("lib/python*/site-packages")
    others = {sysconfig.get_paths()["purelib"], *(path for path in sys.path if path.endswith("site-packages"))}
    (site / "dependencies.pth").write_text("\n".join(sorted(others)) + "\n")
    where = _run(python, "-c", "import samestep; print(samestep.__file__)", folder=tmp_path).strip()
    assert Path(where).is_relative_to(bare)
    home = {"HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    said = _run(bare / "bin" / "samestep", "train", "--steps", "60", "--out", "run", "--json", folder=tmp_path, **home)
    summary = json.loads(said)["result"]
    assert summary["loss"] < 4.0  # of bytes at random 5.5
    assert summary["steps"] == 60
    assert json.loads(_run(bare / "bin" / "samestep", "profiles", "--json", folder=tmp_path, **home))["result"]
