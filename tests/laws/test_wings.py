"""The core imports, trains and proves without its wings, and a command of a missing wing says so in one line."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CORE_TESTS = (
    "tests/laws/test_holding.py",
    "tests/laws/test_layout.py",
    "tests/laws/test_order.py",
    "tests/laws/test_placement.py",
    "tests/laws/test_program.py",
    "tests/laws/test_ranks.py",
    "tests/laws/test_sample_groups.py",
    "tests/ledger/test_data_axis.py",
    "tests/ledger/test_repeated_products.py",
    "tests/parity/test_frozen.py",
    "tests/parity/test_unused_weights.py",
)
"""Laws, ledger and parity of the core alone."""

IMPORTS = """
import importlib, os, pathlib, sys, torch, transformers
from tests.without_wings import WINGS, remove

FIRST = {"plan": "search", "explain": "explain", "pages": "page", "cluster": "engines.scripts", "readers": "rows", "adapters": "lora",
         "slow_links": "powersgd"}

def import_core():
    import samestep
    folder = pathlib.Path(samestep.__file__).parent
    for path in sorted(folder.rglob("*.py")):
        words = path.relative_to(folder.parent).with_suffix("").parts
        if "wings" not in words and words[-1] != "__main__" and "kernels" not in words:
            importlib.import_module(".".join(words).removesuffix(".__init__"))

if __name__ == "__main__":
    from samestep import wings
    import_core()
    for wing in WINGS:
        if not (child := os.fork()):
            remove([wing])
            doors = {name: wings.optional(name, module) for name, module in FIRST.items()}
            assert doors[wing] is None and any(doors.values()), doors
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0, f"without {wing}"
    remove(WINGS)
"""
TRAINS = """
    import samestep, tempfile
    from samestep import cli
    settings = ["train.steps=1", "train.global_batch=4", "train.sample_tokens=0", "train.evaluate_samples=4", "train.watch_every=0"]
    settings += ["model.config.num_hidden_layers=1", "model.config.hidden_size=16", "model.config.intermediate_size=40"]
    job = samestep.load("jobs/default.toml", settings + ["schedule.warmup_steps=0", "data.sequence_length=16"])
    summary = samestep.train(job, layout="dp=2", out=tempfile.mkdtemp() + "/run")
    assert summary.steps == 1 and summary._repr_html_() is None, summary
    verdict = samestep.verify(job, layout="dp=2", steps=2)
    assert verdict.proven, verdict.to_text()
    assert cli.main(["plan", "--devices", "2"]) == 2
    assert not [name for name in sys.modules if name.startswith("samestep.wings.")]
"""
"""Each wing alone is removed in a fork, since the import of the core takes the most time, and then all are."""


def test_the_core_imports_trains_and_proves_without_wings(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    script = tmp_path / "script.py"
    script.write_text(IMPORTS + TRAINS)
    command = [sys.executable, str(script)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "has no folder wings/plan: install the whole package to use it" in done.stderr


@pytest.mark.nightly
def test_the_tests_of_the_core_pass_without_any_wing() -> None:
    pytest.importorskip("torch")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.without_wings", *CORE_TESTS]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=550, check=False)
    assert done.returncode == 0, done.stdout[-4000:]
