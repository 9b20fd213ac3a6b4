"""Hosts that are started over ssh get the same command, and the secret and the stop signals through standard input only."""

from __future__ import annotations

import os
import shlex
import signal
import threading
from pathlib import Path

import pytest

from samestep.errors import InputError
from samestep.wings.cluster.hosts import ssh
from tests import small

_SSH = """#!/bin/sh
cd {folder}
read token
echo "$token" > $5.token
echo "$@" > $5.words
echo "said by all" >&2
echo "said by $5" >&2
read word
echo "$word" > $5.told
exit {status}
"""


_LOST = """#!/bin/sh
read token
if [ $5 = h2 ]; then echo "follows h1, over eth0"; exit 255; fi
sleep 0.3
if timeout 1 cat; then exit 1; fi
echo "continues with 1 of 2 ranks"
"""
"""The second host is lost, and the first one finishes the run, unless its standard input ends."""


@pytest.fixture
def said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of what a pretended ssh was told, by host."""
    _pretend(_SSH.format(folder=tmp_path, status=143), tmp_path, monkeypatch)
    return tmp_path


def _pretend(script: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = folder / "bin" / "ssh"
    program.parent.mkdir()
    program.write_text(script)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")


@pytest.mark.usefixtures("stop_signals")
@pytest.mark.parametrize("goes_on", [True, False])
def test_a_run_that_may_go_on_without_a_host_is_not_stopped(goes_on, tmp_path, monkeypatch, capfd):
    _pretend(_LOST, tmp_path, monkeypatch)
    monkeypatch.setattr(ssh, "_OTHERS_END_S", 0.2)
    assert ssh.start(["h1", "h2"], None, ["train"], goes_on=goes_on) == (0 if goes_on else 1)
    assert ("continues with 1 of 2 ranks" in capfd.readouterr().out) == goes_on


@pytest.mark.usefixtures("stop_signals")
def test_hosts_get_one_command_and_a_secret_that_no_other_process_sees(said, capfd):
    def stop() -> None:
        small.wait_for(lambda: len([*said.glob("*.words")]) == 2)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=stop).start()
    given = ["train", "my job.toml", "--nodes", "me@h1,h2", "--ranks", "2:4", "--set", "a=b"]
    assert ssh.start(["me@h1", "h2"], None, given) == 143
    tokens = {(said / f"{host}.token").read_text() for host in ("me@h1", "h2")}
    assert len(tokens) == 1
    (token,) = tokens
    assert len(token.strip()) == 64
    commands = [(said / f"{host}.words").read_text().partition(f" {host} ")[2] for host in ("me@h1", "h2")]
    assert commands[0] == commands[1]
    assert token.strip() not in commands[0]
    words = shlex.split(commands[0])
    assert words[:3] == ["cd", os.getcwd(), "&&"]
    begin = words.index("train")
    assert words[begin : begin + 6] == ["train", "my job.toml", "--ranks", "2:4", "--set", "a=b"]
    assert words[-6:-3] == ["--nodes", "2", "--rendezvous"]
    assert words[-3].startswith("h1:")
    assert words[-2:] == ["--token-file", "-"]
    assert {(said / f"{host}.told").read_text() for host in ("me@h1", "h2")} == {"TERM\n"}
    assert sorted(capfd.readouterr().err.splitlines()) == ["h2: said by h2", "said by all", "said by me@h1"]


@pytest.mark.parametrize("hosts", [["h1"], ["h1", "h1"], ["h1", ""], ["h1", "-oProxyCommand=x"]])
def test_names_that_are_none_are_refused(hosts: list[str], said: Path) -> None:
    with pytest.raises(
        InputError, match=r"--nodes h1.*: (it takes the names of two hosts|the name of a host cannot begin)"
    ):
        ssh.start(hosts, None, ["train"])
    assert not [*said.glob("*.words")]


def test_lines_come_as_they_are_written() -> None:
    read, write = os.pipe()
    os.write(write, b"secret\nIN")
    lines = ssh._lines(read)
    assert next(lines) == b"secret"
    os.write(write, b"T\n")
    os.close(write)
    assert [*lines] == [b"INT"]
    os.close(read)
