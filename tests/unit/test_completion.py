"""Completion is that of the parser: tried in bash as a person presses the key, and in zsh and fish where they are installed."""

from __future__ import annotations

import os
import pty
import re
import select
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from samestep import arguments, cli, completion, hardware
from samestep.completion import words_of_layouts
from samestep.engines.scripts import ENGINES
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
    path.write_text(completion.script("bash", VERBS, completion.words_of_flags()))
    return path


COMPLETE = r"""
source "$1"; shift
compopt() { [[ $* == *nospace* ]] && echo "no blank"; return 0; }
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMP_LINE="$*"; COMP_POINT=${#COMP_LINE}
_samestep
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
    assert _completed(script, "") == [*VERBS]
    assert _completed(script, "pre") == ["presets"]
    for verb, (_, parser) in VERBS.items():
        flags = [flag for action in parser._actions for flag in action.option_strings]
        assert _completed(script, verb, "-") == flags
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
        (["launch", "--on", ""], [*ENGINES]),
        (["completion", ""], ["bash", "zsh", "fish"]),
        (["train", ""], ["job.toml", "runs"]),
        (["train", "--out", ""], ["runs"]),
        (["explain", ""], ["runs"]),
        (["simulate", "--case", "zero-m"], ["zero-memory"]),
        (["simulate", "--layout", "zero"], ["zero=0", "zero=1", "zero=2", "zero=3"]),
        (["simulate", "--layout", "schedule", "=", "zero"], ["zero-bubble"]),
        (["simulate", "--layout", '"dp=2 tp=2 sch'], [f"dp=2 tp=2 {word}" for word in words_of_layouts() if word[:3] == "sch"]),
        (["train", "--set", "train.st"], ["train.steps="]),
        (["train", "--set", "numerics.precision", "=", "b"], ["bf16"]),
        (["evaluate", "--samples", ""], []),
        (["plan", "--fewest-devices", "job"], ["job.toml"]),
    ],
)  # fmt: skip
def test_what_stands_behind_a_flag_is_offered(words: list[str], offered: list[str], script: Path) -> None:
    found = _completed(script, *words)
    assert sorted({*found} - {"no blank"}) == sorted(offered)
    assert ("no blank" in found) == ("--layout" in words or any(word.endswith("=") for word in offered))


def test_a_key_pressed_in_bash_completes_a_layout_in_quotes(script: Path) -> None:
    """A shell of its own on a terminal: what it shows behind the key is the rest of the word."""
    process, terminal = pty.fork()
    if process == 0:
        os.execvpe("bash", ["bash", "--norc", "-i"], {**os.environ, "PS1": "$ ", "TERM": "dumb"})
    try:
        os.write(terminal, f"bind 'set bell-style none'; source {script}; echo rea''dy\n".encode())
        _read_until(terminal, r"ready\r\n")
        os.write(terminal, b'samestep simulate --layout "dp=2 sched\t')
        _read_until(terminal, r"dp=2 schedule=")
        os.write(terminal, b"zero\t")  # the only word left, behind which bash ends the quotes
        _read_until(terminal, r"zero-bubble\"")
        os.write(terminal, b" --hardw\th10\t")
        _read_until(terminal, r"--hardware h100x8 ")
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


def test_zsh_reads_its_script(tmp_path: Path) -> None:
    if shutil.which("zsh") is None:
        pytest.skip("zsh is not installed")
    path = tmp_path / "_samestep"
    path.write_text(completion.script("zsh", VERBS, completion.words_of_flags()))
    asked = (  # compadd is replaced by a function that prints what it would offer
        f"autoload -U compinit; compinit -D; source {path}; compset() {{ return 1 }}; "
        'compadd() { while [[ $1 == -* && $1 != -- ]]; do [[ $1 == -S ]] && shift; shift; done; shift; print -l -- "$@" }; '
        "words=(samestep simulate --layout sch); CURRENT=4; PREFIX=sch; _samestep; "
        "words=(samestep plan -); CURRENT=3; PREFIX=-; _samestep; words=(samestep pl); CURRENT=2; PREFIX=pl; _samestep"
    )
    done = subprocess.run(["zsh", "-f", "-c", asked], capture_output=True, text=True, timeout=60)
    assert done.stderr == ""
    assert {*words_of_layouts(), *VERBS, "--measure-top", "--json"} <= {*done.stdout.splitlines()}


def test_fish_offers_what_its_script_says(tmp_path: Path) -> None:
    if shutil.which("fish") is None:
        pytest.skip("fish is not installed")
    path = tmp_path / "samestep.fish"
    path.write_text(completion.script("fish", VERBS, completion.words_of_flags()))

    def offered(line: str) -> set[str]:
        words = ["fish", "--no-config", "-c", f"source {path}; complete -C {line!r}"]
        done = subprocess.run(
            words, capture_output=True, text=True, timeout=60, env={**os.environ, "HOME": str(tmp_path)}
        )
        assert done.stderr == ""
        return {one.partition("\t")[0] for one in done.stdout.splitlines()}

    assert offered("samestep ") == {*VERBS}
    assert {"--measure-top", "--json"} <= offered("samestep plan --")
    assert offered("samestep simulate --layout zero") >= {"zero=0", "zero=3"}
    assert offered("samestep launch --on ") == {*ENGINES}


def test_the_verb_prints_the_script(capsys: pytest.CaptureFixture[str], script: Path) -> None:
    assert small.main("completion", "bash") == 0
    assert capsys.readouterr().out == script.read_text()
    assert small.main("completion", "tcsh") == 2
    assert "bash" in capsys.readouterr().err
