"""`make matrix`: the fast tests on every interpreter and torch that are at hand, and a list of what was not run.

    make matrix                                                 every python3.x on the PATH that has torch and pytest
    make matrix PYTHONS="python3.12 python3.13" WHEELS="wheels/torch-2.11*.whl wheels/torch-2.13*.whl"

An interpreter runs the builds of torch in `WHEELS` that are made for it, each in an environment of its own below
`.venv/matrix`, with what samestep and its tests need beside torch; without wheels, the torch that it has. No torch is
downloaded: a pair for which there is none is printed as not run. An interpreter for which there is no torch at all runs the
laws that need none (`without_torch.py`), in an environment of its own too.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from glob import glob
from pathlib import Path
from shutil import which

ROOT = Path(__file__).parent.parent
HOME = ROOT / ".venv" / "matrix"
FAST = ("tests/laws", "tests/unit", "tests/seams")
WITHOUT_TORCH = ("--noconftest", "-p", "tests.without_torch", "tests/laws")
TORCHES = ("2.11", "2.13")
"""The releases of torch that the documents promise."""
_WHEEL = re.compile(r"torch-(?P<version>\d+\.\d+)[^-]*-cp(?P<python>\d+)-")
_ASKS = "import sys, importlib.util as u; t = u.find_spec('torch') and u.find_spec('pytest') and u.find_spec('hypothesis'); print('.'.join(map(str, sys.version_info[:2])), __import__('torch').__version__ if t else '-')"


@dataclass(frozen=True, slots=True)
class Interpreter:
    """An interpreter at hand."""

    path: str
    version: str
    """Such as 3.12."""
    torch: str
    """The version of the torch that it has, with what the tests need; empty if it has none."""


def interpreters(given: Sequence[str]) -> Iterator[Interpreter]:
    """Yield the interpreters that are given, or those of this checkout and on the PATH, one for each version and torch."""
    own = ROOT / ".venv" / "bin" / "python"
    words = given or [str(own), sys.executable, *(f"python{version}" for version in supported())]
    seen: set[tuple[str, str]] = set()
    for word in words:
        path = which(word)
        asked = subprocess.run([path, "-c", _ASKS], capture_output=True, text=True, check=False) if path else None
        if asked is None or asked.returncode:
            if given:
                print(f"not run: {word} is no interpreter that starts")
            continue
        version, torch = asked.stdout.split()
        torch = torch.replace("-", "").partition("+")[0]
        if (version, torch) not in seen:
            seen.add((version, torch))
            yield Interpreter(str(path), version, torch)


def supported() -> list[str]:
    """Return the versions of Python that the package names."""
    words = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["classifiers"]
    return [
        word.rpartition(" ")[2] for word in words if re.fullmatch(r"Programming Language :: Python :: 3\.\d+", word)
    ]


def wheels_for(python: Interpreter, wheels: Sequence[str]) -> dict[str, str]:
    """Return the wheels made for an interpreter, by the release of torch."""
    found = {}
    for wheel in wheels:
        match = _WHEEL.search(Path(wheel).name)
        if match is not None and match["python"] == python.version.replace(".", ""):
            found[match["version"]] = wheel
    return found


def environment(python: Interpreter, release: str, wheel: str | None) -> str:
    """Return the interpreter of an environment with a wheel of torch, or with none, and what the tests need; make it if it is missing."""
    home = HOME / f"py{python.version}-torch{release}"
    inside = str(home / "bin" / "python")
    if not (home / "ready").exists():
        limits = home.with_suffix(".txt")
        home.mkdir(parents=True, exist_ok=True)
        pinned = (ROOT / "constraints.txt").read_text().splitlines()
        limits.write_text("\n".join(line for line in pinned if not line.startswith("torch==")) + "\n")
        pip = [inside, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--constraint", str(limits)]
        # The wheel is named again beside samestep, so that its range of versions lets pip look for no other.
        needed = (
            [[wheel, "--editable", f"{ROOT}[dev]"]]
            if wheel
            else [beside_torch(), ["--no-deps", "--editable", str(ROOT)]]
        )
        for command in ([python.path, "-m", "venv", str(home)], *([*pip, *words] for words in needed)):
            subprocess.run(command, check=True)
        (home / "ready").touch()
    return inside


def beside_torch() -> list[str]:
    """Return the packages that samestep and its laws need beside torch."""
    needed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    return [*(word for word in needed if not word.startswith("torch")), "hypothesis", "pytest"]


def fast_tests(inside: str, *words: str) -> str:
    """Run the fast tests with an interpreter, or others; return one word on how they ended."""
    paths = words or os.environ.get("TESTS", "").split() or FAST
    known = {
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]))
    }
    ended = subprocess.run([inside, "-m", "pytest", "-q", *paths], cwd=ROOT, env=os.environ | known, check=False)
    return "passed" if ended.returncode == 0 else f"failed (exit status {ended.returncode})"


def main() -> int:
    """Run every pair that is at hand, print a line for each pair, and return 1 if one has failed or none was run."""
    wheels = [path for pattern in os.environ.get("WHEELS", "").split() for path in sorted(glob(pattern))]
    ended: dict[tuple[str, str], str] = {}
    for python in interpreters(os.environ.get("PYTHONS", "").split()):
        made_for: dict[str, str | None] = {**wheels_for(python, wheels)}
        if not made_for and python.torch:
            ended[python.version, ".".join(python.torch.split(".")[:2])] = fast_tests(python.path)
        elif not made_for and not any(version == python.version for version, _ in ended):
            made_for = {"none": None}
        for release, wheel in made_for.items():
            if (python.version, release) in ended:
                continue
            try:
                inside = environment(python, release, wheel)
                ended[python.version, release] = fast_tests(inside, *(() if wheel else WITHOUT_TORCH))
            except subprocess.CalledProcessError as error:
                ended[python.version, release] = f"no environment: {' '.join(map(str, error.cmd[:4]))} failed"
    for version in sorted({*supported(), *(version for version, _ in ended)}, key=lambda v: int(v.split(".")[1])):
        for release in sorted({*TORCHES, *(release for of, release in ended if of == version or release != "none")}):
            missing = f"not run: no torch {release} for Python {version} in WHEELS, and none installed"
            print(f"Python {version}, torch {release}: {ended.get((version, release), missing)}")
    return 0 if ended and set(ended.values()) == {"passed"} else 1


if __name__ == "__main__":
    sys.exit(main())
