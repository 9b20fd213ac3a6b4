"""Completion is that of the parser: what shtab writes is tried in bash, also as a person presses the key."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import subprocess
import time
from argparse import SUPPRESS
from pathlib import Path

import pytest

from samestep import arguments, cli, hardware
from samestep.wings.cluster.engines.scripts import ENGINES
from tests import small

VERBS = arguments.verbs_of(cli._parser())


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The script for bash, in a folder with a job, another file and a folder."""
    folder = tmp_path_factory.mktemp("completion")
    (folder / "job.toml").touch()
    (folder / "notes.txt").touch()
    (folder / "runs").mkdir()
    path = folder / "samestep.bash"
    path.write_text(cli.script("bash", cli._parser()))
    return path


COMPLETE = r"""
source "$1"; shift
compopt() { return 0; }
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMP_LINE="$*"; COMP_POINT=${#COMP_LINE}
_shtab_samestep
printf '%s\n' "${COMPREPLY[@]}"
"""


def _completed(script: Path, *words: str) -> list[str]:
    """What bash offers for the last of some words, as readline splits them."""
    done = subprocess.run(
        ["bash", "--norc", "-c", COMPLETE, "bash", str(script), "samestep", *words],
        capture_output=True, text=True, check=True, cwd=script.parent, timeout=60,
    )  # fmt: skip
    assert done.stderr == ""
    return [line for line in done.stdout.splitlines() if line]


def test_every_verb_and_every_flag_is_offered(script: Path) -> None:
    assert {*VERBS} <= {*_completed(script, "")}
    assert _completed(script, "pre") == ["presets"]
    for verb, (_, parser) in VERBS.items():
        flags = {flag for action in parser._actions for flag in action.option_strings if action.help != SUPPRESS}
        assert flags <= {*_completed(script, verb, "-")}
        assert _completed(script, verb, "--js") == ["--json"]


def test_choices_of_every_flag_are_offered(script: Path) -> None:
    tried = 0
    for verb, (_, parser) in VERBS.items():
        for action in parser._actions:
            if action.choices and action.option_strings:
                tried += 1
                assert _completed(script, verb, action.option_strings[-1], "") == [*map(str, action.choices)]
    assert tried >= 5


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["simulate", "--hardware", "h"], [name for name in hardware.known() if name.startswith("h")]),
        (["submit", "--on", ""], [*ENGINES]),
        (["completion", ""], ["bash", "zsh", "fish", "tcsh"]),
        (["train", ""], ["job.toml", "notes.txt", "runs", "samestep.bash"]),
        (["train", "--out", ""], ["runs"]),
        (["explain", ""], ["runs"]),
        (["simulate", "--case", "zero-m"], ["zero-memory"]),
        (["simulate", "--layout", "zero"], ["zero=0", "zero=1", "zero=2", "zero=3"]),
        (["train", "--set", "train.st"], ["train.steps="]),
        (["evaluate", "--samples", ""], []),
        (["plan", "--fewest-devices", "job"], ["job.toml"]),
    ],
)  # fmt: skip
def test_what_stands_behind_a_flag_is_offered(words: list[str], offered: list[str], script: Path) -> None:
    assert sorted(_completed(script, *words)) == sorted(offered)


def test_a_key_pressed_in_bash_completes_the_word(script: Path) -> None:
    """A shell of its own on a terminal: what it shows behind the key is the rest of the word."""
    process, terminal = pty.fork()
    if process == 0:
        os.execvpe("bash", ["bash", "--norc", "-i"], {**os.environ, "PS1": "$ ", "TERM": "dumb"})
    try:
        os.write(terminal, f"bind 'set bell-style none'; source {script}; echo rea''dy\n".encode())
        _read_until(terminal, r"ready\r\n")
        os.write(terminal, b"samestep sim\t --hardw\th10\t")
        _read_until(terminal, r"samestep simulate +--hardware h100x8 ")
    finally:
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
        os.close(terminal)


def _read_until(terminal: int, pattern: str) -> str:
    said, end = "", time.monotonic() + 60
    while not re.search(pattern, said):
        assert time.monotonic() < end, said
        if select.select([terminal], [], [], 1.0)[0]:
            said += os.read(terminal, 4096).decode(errors="replace")
    return said


@pytest.mark.parametrize("shell", ["zsh", "fish", "tcsh"])
def test_other_shells_have_a_script_of_every_verb(shell: str) -> None:
    text = cli.script(shell, cli._parser())
    assert all(verb in text for verb in VERBS)
    assert "h100x8" in text


def test_the_verb_prints_the_script(capsys: pytest.CaptureFixture[str], script: Path) -> None:
    assert small.main("completion", "bash") == 0
    assert capsys.readouterr().out.rstrip() == script.read_text().rstrip()
    assert small.main("completion", "ksh") == 2
    assert "bash" in capsys.readouterr().err
