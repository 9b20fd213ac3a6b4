"""`make matrix`: which pairs of interpreter and torch run, and what it says of the others."""

from __future__ import annotations

import pytest

from tests import matrix

WHEELS = [
    "w/torch-2.11.0+cpu-cp312-cp312-manylinux_2_28_x86_64.whl",
    "w/torch-2.13.0+cpu-cp312-cp312-manylinux_2_28_x86_64.whl",
    "w/torch-2.13.0+cpu-cp313-cp313-manylinux_2_28_x86_64.whl",
    "w/torchvision-0.28.0-cp312-cp312-linux_x86_64.whl",
]


@pytest.mark.parametrize(("version", "releases"), [("3.12", ["2.11", "2.13"]), ("3.13", ["2.13"]), ("3.11", [])])
def test_an_interpreter_runs_the_wheels_made_for_it(version, releases):
    assert sorted(matrix.wheels_for(matrix.Interpreter("python", version, ""), WHEELS)) == releases


def test_each_torch_of_one_version_of_python_runs_and_a_failure_is_one(monkeypatch, capsys, tmp_path):
    ran = []
    monkeypatch.delenv("WHEELS", raising=False)
    monkeypatch.setattr(matrix, "fast_tests", lambda inside, *_: ran.append(inside) or "passed")
    paths = []
    for answer in ("3.12 2.11.0+cu130", "3.12 2.13.0", "3.12 2.13.0+cpu", "3.12 -"):
        paths.append(tmp_path / f"python{len(paths)}")
        paths[-1].write_text(f"#!/bin/sh\necho {answer}\n")
        paths[-1].chmod(0o755)
    monkeypatch.setenv("PYTHONS", " ".join([*map(str, paths), "no-such-python"]))
    assert matrix.main() == 0
    assert ran == [str(path) for path in paths[:2]]
    said = capsys.readouterr().out.splitlines()
    assert {"Python 3.12, torch 2.11: passed", "Python 3.12, torch 2.13: passed"} <= {*said}
    assert "not run: no-such-python is no interpreter that starts" in said
    pairs = {(python, torch) for python in {*matrix.supported(), "3.12"} for torch in {*matrix.TORCHES, "2.11", "2.13"}}
    assert sum("not run: no torch" in line for line in said) == len(pairs) - 2
    monkeypatch.setattr(matrix, "fast_tests", lambda inside, *_: "failed (exit status 1)")
    assert matrix.main() == 1


def test_an_interpreter_without_torch_runs_the_laws_in_an_environment_of_its_own(monkeypatch, capsys, tmp_path):
    bare = tmp_path / "python"
    bare.write_text("#!/bin/sh\necho 3.12 -\n")
    bare.chmod(0o755)
    ran = []
    monkeypatch.setenv("PYTHONS", str(bare))
    monkeypatch.delenv("WHEELS", raising=False)
    monkeypatch.setattr(matrix, "environment", lambda python, release, wheel: f"{python.version} {release} {wheel}")
    monkeypatch.setattr(matrix, "fast_tests", lambda inside, *words: ran.append((inside, words)) or "passed")
    assert matrix.main() == 0
    assert ran == [("3.12 none None", matrix.WITHOUT_TORCH)]
    said = capsys.readouterr().out
    assert "Python 3.12, torch none: passed" in said
    assert "Python 3.11, torch none" not in said
    assert not any(word.startswith("torch") for word in matrix.beside_torch())


def test_nothing_run_is_no_success(monkeypatch, capsys):
    monkeypatch.setenv("PYTHONS", "no-such-python")
    assert matrix.main() == 1
