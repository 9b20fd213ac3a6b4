"""examples/ports: each script before and after its port prints the same losses, and the port prints them in four layouts."""

from __future__ import annotations

import ast
import contextlib
import functools
import re
import socket
import tempfile
from pathlib import Path

import pytest

from samestep import cli
from tests import small

FOLDER = Path(__file__).parents[2] / "examples" / "ports"
KINDS = ("ddp", "accelerate", "trainer", "fabric", "nanogpt")
SAMPLES = {"ddp": 64, "accelerate": 64, "trainer": 8, "fabric": 64, "nanogpt": 8}
LAYOUTS = {
    kind: ("dp=2", f"dp=2 zero=3 microbatch={samples // 4}", "tp=2", "pp=2 microbatch=4")
    for kind, samples in SAMPLES.items()
}
"""The layouts of each kind by the samples of its steps: each rank has two micro-batches where weights are sharded."""
MOST_LINES = 12
"""Changed lines of a port: those of a port to Accelerate."""
NEEDS = {"accelerate": "accelerate", "trainer": "accelerate", "fabric": "lightning.fabric"}
"""The modules that scripts before their port import."""


def losses(said: str) -> list[float]:
    """Return the losses that a script printed, on rank 0 of several."""
    return [float(loss) for loss in re.findall(r"^.*\bloss'?:? '?([\d.]+)", small.of_rank_0(said), re.MULTILINE)]


def of_script(name: str, folder: Path) -> list[float]:
    status, said, complaints = small.script(FOLDER / f"{name}.py", (), folder / "said")
    assert status == 0, said + complaints
    return losses(said)


@functools.cache
def of_port(kind: str) -> list[float]:
    """Return the losses that a port prints on one device, for all layouts that are compared with them."""
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        return of_script(f"{kind}_after", Path(folder))


@pytest.mark.parametrize("kind", KINDS)
def test_a_port_has_the_losses_of_the_script(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    if kind in NEEDS:
        pytest.importorskip(NEEDS[kind])
    after = of_port(kind)
    assert len(after) >= 8
    if kind == "ddp":
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        for name, value in {"RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
            monkeypatch.setenv(name, str(value))
    before = of_script(f"{kind}_before", tmp_path)
    assert before == pytest.approx(after, abs=1e-3 if kind == "trainer" else 1e-5)  # Trainer prints four digits


@pytest.mark.parametrize(("kind", "layout"), [(kind, layout) for kind in KINDS for layout in LAYOUTS[kind]])
def test_a_port_has_the_same_losses_in_each_layout(
    kind: str, layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["launch", str(FOLDER / f"{kind}_after.py"), "--device", "cpu", "--layout", layout]
    status = small.status_of(small.forked(lambda: cli.main(words), tmp_path / "said"), 500.0)
    said = (tmp_path / "said" / "out").read_text(encoding="utf-8")
    assert status == 0, said + (tmp_path / "said" / "err").read_text(encoding="utf-8")
    assert losses(said) == pytest.approx(of_port(kind), abs=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_a_port_changes_few_lines(kind: str) -> None:
    before, after = (
        (FOLDER / f"{kind}_{side}.py").read_text(encoding="utf-8").splitlines() for side in ("before", "after")
    )
    ast.parse("\n".join(before))
    assert len([line for line in after if line and line not in before]) <= MOST_LINES
