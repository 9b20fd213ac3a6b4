"""Starting a run on several hosts over ssh: the same command on each, with a new secret that only they get.

```
samestep train JOB --nodes H1,H2 ─┬─ ssh H1 ─ samestep train JOB --nodes 2 --rendezvous H1:PORT --token-file -
                                  └─ ssh H2 ─ the same
```
The secret, and later the signals of this process, go through the standard input of ssh; when that ends, the host
stops too. The folder of this process and its Python must exist on all hosts. The first host's output is printed here;
of the others, the errors that the first one has not printed.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import IO

from samestep.errors import InputError
from samestep.runtime.processes.join import REQUESTS, STOP_SIGNALS
from samestep.runtime.processes.rank_variables import ON_HOSTS

_PORTS = range(20000, 30000)
_OTHERS_END_S = 5.0
"""Seconds after which the others are stopped when one host has failed."""
_FOLLOWS = b"follows "
"""The beginning of the line that a host prints when all are connected (`hosts.follow`)."""
_WORDS = {number: number.name.removeprefix("SIG").encode() for number in (*STOP_SIGNALS, *REQUESTS)}
"""The words of signals: one to stop goes to every host, a request to the first one that runs, which passes it on to all ranks."""


def start(
    hosts: Sequence[str], rendezvous: str | None, words: Sequence[str] | None = None, *, goes_on: bool = False
) -> int:
    """Start the command of this process, or `words`, on every host, wait for all; return the number of the run's exit
    status.

    With `goes_on` the first host may go on without others that are lost, once all have been connected.

    Raises:
        InputError: there is no ssh here, or fewer than two hosts.
    """
    if shutil.which("ssh") is None:
        raise InputError(
            "launch-nodes", "--nodes H1,H2 needs ssh. Use --nodes N --rendezvous HOST:PORT --token-file F on each host"
        )
    if len({*hosts}) < len(hosts) or len(hosts) < 2 or not all(hosts):
        raise InputError(
            "launch-nodes", f"--nodes {','.join(hosts)}: it takes the names of two hosts or more, each once"
        )
    if any(host.startswith("-") for host in hosts):
        raise InputError("launch-nodes", f"--nodes {','.join(hosts)}: the name of a host cannot begin with a dash")
    port = secrets.choice(_PORTS)
    address = rendezvous or f"{hosts[0].rpartition('@')[2]}:{port}"
    arguments = _without_nodes(sys.argv[1:] if words is None else words)
    arguments += ["--nodes", str(len(hosts)), "--rendezvous", address, "--token-file", "-"]
    remote = shlex.join([sys.executable, "-m", "samestep", *arguments])
    if lines := os.environ.get(ON_HOSTS):
        remote = shlex.join(["bash", "-c", f"{lines}\nexec {remote}"])
    command = f"cd {shlex.quote(os.getcwd())} && exec {remote}"
    return _Hosts(hosts, command, goes_on).run(secrets.token_hex(32).encode())


def heed_standard_input() -> bytes:
    """Return the first line of standard input; later lines, and the end of the input, stop this process."""
    lines = _lines(sys.stdin.fileno())
    token = next(lines, b"")
    threading.Thread(target=_heed, args=(lines,), daemon=True).start()
    return token


def _lines(descriptor: int) -> Iterator[bytes]:
    """Yield the lines of a descriptor without a buffered reader, in which a thread could not wait when the process
    ends."""
    read = b""
    while more := os.read(descriptor, 4096):
        *lines, read = (read + more).split(b"\n")
        yield from lines


def _heed(lines: Iterator[bytes]) -> None:
    for line in lines:
        for number, word in _WORDS.items():
            if line == word and (
                number not in REQUESTS or callable(signal.getsignal(number))
            ):  # else it would end here
                os.kill(os.getpid(), number)
    os.kill(os.getpid(), signal.SIGTERM)


def _without_nodes(words: Sequence[str]) -> list[str]:
    """Return the arguments of a command without the flags for several hosts and the form of its result."""
    arguments, flags = [], ("--nodes", "--rendezvous", "--token-file", "--json")
    is_value = False
    for word in words:
        if not is_value and word.partition("=")[0] not in flags:
            arguments.append(word)
        is_value = not is_value and word in flags
    return arguments


class _Hosts:
    """The processes of ssh, one for each host, of which the first leads."""

    def __init__(self, hosts: Sequence[str], command: str, goes_on: bool) -> None:
        self.hosts, self.command, self.goes_on = hosts, command, goes_on
        self.have_met = False
        self.processes: list[subprocess.Popen[bytes]] = []
        self.said: list[list[bytes]] = [[] for _ in hosts]

    def run(self, token: bytes) -> int:
        """Start all processes, and return the number of the run's exit status."""
        handlers = {number: signal.signal(number, self._on_signal) for number in _WORDS}
        try:
            readers = [reader for index in range(len(self.hosts)) for reader in self._started(index, token)]
            self._wait()
            for reader in readers:
                reader.join()
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
            for process in self.processes:
                with process:
                    pass  # which closes its pipes
        for host, lines in zip(self.hosts[1:], self.said[1:], strict=True):
            for line in lines:
                if line not in self.said[0]:
                    print(f"{host}: {line.decode(errors='replace').rstrip()}", file=sys.stderr)
        statuses = [process.returncode for process in self.processes]
        return abs(statuses[0]) if statuses[0] or self.goes_on else max(map(abs, statuses))

    def _started(self, index: int, token: bytes) -> Iterator[threading.Thread]:
        """Start one host; yield the threads that read its output."""
        is_first = index == 0
        process = subprocess.Popen(
            ["ssh", "-o", "BatchMode=yes", "-oServerAliveInterval=5", "--", self.hosts[index], self.command],
            stdin=subprocess.PIPE,
            stdout=None if is_first else subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,  # Ctrl-C in the terminal reaches this process only, which passes it on once
        )
        self.processes.append(process)
        self._write(process, token)
        for read, stream in ((self._read, process.stderr), (self._read_output, process.stdout)):
            if stream is not None:
                reader = threading.Thread(target=read, args=(index, stream), daemon=True)
                reader.start()
                yield reader

    def _read_output(self, index: int, lines: IO[bytes]) -> None:
        for line in lines:
            self.have_met |= line.startswith(_FOLLOWS)

    def _read(self, index: int, lines: IO[bytes]) -> None:
        for line in lines:
            self.said[index].append(line)
            if index == 0:
                sys.stderr.buffer.write(line)
                sys.stderr.flush()

    def _wait(self) -> None:
        """Wait for all hosts; where one has failed, the others are stopped if they do not end by themselves."""
        failed_s = 0.0
        while None in [process.poll() for process in self.processes]:
            if not failed_s and any(process.returncode for process in self.processes):
                failed_s = time.monotonic()
            is_over = self.processes[0].returncode is not None or not (self.goes_on and self.have_met)
            if failed_s and time.monotonic() > failed_s + _OTHERS_END_S and is_over:
                for process in self.processes:
                    assert process.stdin is not None
                    with contextlib.suppress(OSError):
                        process.stdin.close()
            time.sleep(0.1)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        running = [process for process in self.processes if process.poll() is None]
        for process in running[:1] if number in REQUESTS else self.processes:
            self._write(process, _WORDS[signal.Signals(number)])

    def _write(self, process: subprocess.Popen[bytes], line: bytes) -> None:
        assert process.stdin is not None
        with contextlib.suppress(OSError, ValueError):
            process.stdin.write(line + b"\n")
            process.stdin.flush()
