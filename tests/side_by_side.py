"""`make test`: the folders that trace most models in one session of pytest and all others in another beside it, for the two cores of a CI.

Of rows that take turns (`turns.py`) a commit runs an eighth; `make test TURN=1` runs the second eighth, and `TURN=all` runs all of them.

Lines of progress are printed as they come, and what else a session says when it has ended. Both get the options of the command line.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

from tests import shard, turns

_FIRST = ("tests/parity", "tests/code", "tests/unit")
PARTS = (_FIRST, ("tests", *(f"--ignore={folder}" for folder in _FIRST)))
"""What the sessions run: each takes about half of the processor time, and they trace few models twice."""
AIM_S = 700.0
"""Seconds of processor time that `make test` is to use at most."""
_printing = threading.Lock()


def main() -> int:
    """Run the sessions, with the options given; return 0 if every test of both has passed."""
    begin_s = time.monotonic()
    for option, _, number in (word.partition("=") for word in sys.argv[1:]):
        if option == "--turn":
            turn = shard.number_of(number) % turns.TURNS
            print(f"of rows that take turns, those of turn {turn}: `make test TURN={turn}` runs them again", flush=True)
    with ThreadPoolExecutor(len(PARTS)) as threads:
        statuses = list(threads.map(_run, PARTS))
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    elapsed_s = time.monotonic() - begin_s
    used_s = used.ru_utime + used.ru_stime
    print(f"together {used_s:.0f} s of processor time (the aim is {AIM_S:.0f} s), {elapsed_s:.0f} s elapsed")
    if used_s > AIM_S:
        print(
            f"{used_s - AIM_S:.0f} s more than the aim: `pytest --costs 30 FILE` shows the dearest tests of a file of tests/costs.json"
        )
    return int(any(statuses))


def _run(part: tuple[str, ...]) -> int:
    """Run one session to its end; return its exit status."""
    command = [sys.executable, "-m", "pytest", "-q", *sys.argv[1:], *part]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as session:
        assert session.stdout is not None
        held: list[str] = []
        for line in session.stdout:
            if held or line.startswith("="):  # the sections behind the progress
                held.append(line)
                continue
            with _printing:
                print(line, end="", flush=True)
    with _printing:
        print("".join(held), end="", flush=True)
    return session.returncode


if __name__ == "__main__":
    sys.exit(main())
