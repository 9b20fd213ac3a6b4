"""A process that is killed leaves its temporary folder until the next one makes one; those of living processes stay."""

from __future__ import annotations

import os
import signal
import tempfile
from pathlib import Path

import pytest

from samestep.output import temporary_folder


def test_what_a_killed_process_has_left_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    mine, (read, write) = temporary_folder.make(), os.pipe()
    (tmp_path / "samestep-of-others").mkdir()
    maker = os.fork()
    if maker == 0:
        os.write(write, str(temporary_folder.make()).encode())
        if (worker := os.fork()) == 0:
            signal.pause()
        os.write(write, f"\n{worker}".encode())
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(maker, 0)
    text, worker = os.read(read, 1000).decode().split("\n")
    theirs = Path(text)
    assert theirs.stat().st_mode & 0o077 == 0
    temporary_folder.remove(temporary_folder.make())
    assert theirs.exists(), "a worker lives"
    os.kill(int(worker), signal.SIGKILL)
    while theirs.exists():  # the time limit of tests ends it
        temporary_folder.remove(temporary_folder.make())
    temporary_folder.remove(mine)
    assert [path.name for path in tmp_path.iterdir()] == ["samestep-of-others"]
