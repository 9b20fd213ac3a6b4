"""The public names, and what importing them costs: torch is imported by what needs it, never before."""

from __future__ import annotations

import ast
import inspect
import os
import pkgutil
import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import samestep

ROOT = Path(__file__).parents[2]
HEAVY = {"torch", "transformers", "tensorboardX"}


def _modules_after(code: str, home: Path) -> set[str]:
    """Run code in a new process and return the modules that it has imported."""
    tell = "import sys; print('\\n' + ' '.join(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\n{tell}"],
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"HOME": str(home)},
    )
    assert done.returncode == 0, done.stderr
    return set(done.stdout.splitlines()[-1].split())


def test_the_public_names_are_these() -> None:
    public = """
    Batch CheckpointError CheckpointTable DataError DataTable DriftError EarlyStopping Hardware InputError Job
    JobError Layout LayoutError ModelError ModelTable NonFiniteError NumericsTable OptimizerTable OutOfMemoryError
    Plan Prediction RecordError RepeatError Run RunError RunTable SamestepError SaveError ScheduleTable SpikeError
    StepReport TrainTable UnprovenError Verdict WorkerError after_step batch_cat batch_mean batch_sum batches
    benchmark_hardware benchmark_layouts calibrate doctor evaluate explain export independent inspect latest
    launch layouts load mean_over model_loss parallelize plan ray_worker sample simulate track train verify
    whole_batch write_submission
    """
    assert sorted(samestep.__all__) == public.split()
    assert all(getattr(samestep, name).__doc__ for name in samestep.__all__)


def test_the_lazy_names_are_functions_and_no_submodule_shadows_them() -> None:
    import samestep.runtime.processes.workers
    import samestep.training.train

    verbs = ("layouts", "plan", "simulate", "train", "verify")
    for name in ("batches", "launch", "parallelize", *verbs):
        assert inspect.isfunction(getattr(samestep, name)), name
    modules = {module.name for module in pkgutil.iter_modules(samestep.__path__)}
    assert not modules & set(samestep.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'trian'"):
        samestep.trian  # noqa: B018


def test_it_is_typed() -> None:
    assert Path(samestep.__file__).with_name("py.typed").exists()


COMMANDS = [["--help"], ["--version"], ["train", "--help"], ["train", "--ranks", "0"], ["train", "nope.toml"]]


def test_torch_is_imported_by_names_that_need_it_and_triton_by_kernels_alone(tmp_path: Path) -> None:
    lines = ["import sys, samestep", f"assert not {{*{HEAVY}}} & {{*sys.modules}}", "import samestep.cli"]
    for words in COMMANDS:
        lines += [f"try: samestep.cli.main({words})", "except SystemExit: pass"]
        lines += [f"assert not {{*{HEAVY}}} & {{*sys.modules}}, {words}"]
    lines += ["samestep.plan, samestep.simulate, samestep.layouts, samestep.doctor"]
    lines += [f"assert not {{*{HEAVY}}} & {{*sys.modules}}, 'names of planning'"]
    lines += ["samestep.launch", "import samestep.runtime.run"]
    modules = _modules_after("\n".join(lines), tmp_path)
    assert "torch" in modules
    kernels = (ROOT / "src/samestep/kernels").glob("*.py")
    assert not modules & {f"samestep.kernels.{path.stem}" for path in kernels if "import triton" in path.read_text()}


def test_the_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    from samestep.cli import main

    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert end.value.code == 0
    assert capsys.readouterr().out == f"samestep {metadata.version('samestep')}\n"


def test_every_extra_is_used():
    """A package that no line imports is no part of samestep: what an extra names is imported, or looked for by its name."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    sources = "\n".join(path.read_text() for path in sorted((ROOT / "src").rglob("*.py")))
    for extra in extras.keys() - {"dev", "bench", "all"}:
        for package in (re.split(r"[<>=\[]", one)[0] for one in extras[extra]):
            module = {"pillow": "PIL"}.get(package, package)
            assert re.search(rf"(import|from|import_module\(|find_spec\() *\"?{module}\b", sources), (extra, package)
    assert set(re.findall(r"[\w-]+", extras["all"][0])) - {"samestep"} == extras.keys() - {"dev", "bench", "all"}


def test_the_lock_holds_what_the_tests_install() -> None:
    """Each package that dev needs, and what those need, in the version of constraints.txt: make setup installs nothing else."""
    lines = (ROOT / ".ci" / "requirements.lock").read_text().splitlines()
    locked = {canonicalize_name(line.partition("==")[0]): line.partition("==")[2].split()[0] for line in lines[1:]}
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        name, _, version = line.partition("==")
        if canonicalize_name(name) in locked:
            assert locked[canonicalize_name(name)] == version.strip()
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    wanted = [Requirement(line) for line in extras["dev"]]
    known: set[tuple[str, frozenset[str]]] = set()
    while wanted:
        one = wanted.pop()
        name, its = canonicalize_name(one.name), frozenset(one.extras)
        if (name, its) in known or name == "torch":
            continue
        known.add((name, its))
        assert name == "samestep" or name in locked, (
            f"{name} has no line in .ci/requirements.lock: .ci/lock.py writes it"
        )
        try:
            needs = [Requirement(line) for line in metadata.requires(one.name) or ()]
        except metadata.PackageNotFoundError:  # where the tests run, some of dev may be left out
            continue
        marks = [{"extra": extra, "python_version": of} for extra in its or {""} for of in lines[0].split()[4:]]
        wanted += [need for need in needs if not need.marker or any(need.marker.evaluate(mark) for mark in marks)]


@pytest.mark.parametrize("name", ["HeldOut", "measure"])
def test_an_earlier_name_is_answered_by_its_new_one(name: str) -> None:
    with pytest.raises(AttributeError, match="has a new name: use samestep"):
        getattr(samestep, name)


def test_a_typed_file_uses_every_public_name() -> None:
    """`make check` holds its types."""
    tree = ast.parse((Path(__file__).parents[2] / "examples" / "typed" / "every_name.py").read_text(encoding="utf-8"))
    used = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "samestep"
    }
    assert used >= set(samestep.__all__)
