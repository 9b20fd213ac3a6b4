"""What a load does beyond reading: events of Python's audit hook, of the pytest process and of all that it starts.

    pickle.find_class                        something is unpickled that names a class or function
    subprocess.Popen, os.system, os.exec...  a process is started
    exec, import                             code of a file below a temporary folder runs: a checkpoint's, a data set's, a model's

Every test fails in which samestep causes one (`by_samestep`; `MAY` names who may): the innermost file of the repository on
the stack is one of samestep. A test that says so (`watched`) finds those that any code causes.

A hook cannot be removed, so it is installed once, before the first rank is forked; a process that is spawned, or that a test
starts by a command, installs it as it starts (`site/sitecustomize.py`). The word that says whether a test watches lies in
memory that all these processes share, and what they find they append to one of two files. None of the three has a name that
could be left behind: a new process opens them as the descriptors of the pytest process, which a variable of its environment names.
"""

from __future__ import annotations

import fcntl
import functools
import linecache
import mmap
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

VARIABLE = "SAMESTEP_TESTS_AUDIT"
STARTS = ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "pty.spawn")
_EVENTS = frozenset((*STARTS, "pickle.find_class", "exec", "import"))
"""The others are harmless, and many: each call of `id` is one."""
PIPES = {
    "samestep/runtime/processes/local_workers.py": "pickle.loads(", "tests/pool.py": "pickle.loads(",
    "multiprocessing/connection.py": ".loads(", "multiprocessing/queues.py": ".loads(",
    "multiprocessing/spawn.py": "pickle.load(",
}  # fmt: skip
"""Who unpickles what a process that it has started itself, or its own thread, sends it over a pipe; and the words of that line."""
ROOT = Path(__file__).parents[1]
PACKAGE, TESTS = f"{ROOT}/src/samestep/", f"{ROOT}/tests/"
COPIES = "transformers_modules"
"""Part of the path to which transformers copies code of a model's folder before it runs it."""


_BY_SUBPROCESS = ("subprocess.Popen", "os.posix_spawn")  # the latter too from Python 3.13 on
MAY = {
    "datasets/imported.py": ("exec", "import"), "datasets/source.py": ("exec", "import"),
    "runtime/processes/local_workers.py": ("exec", "import"), "models/catalog.py": _BY_SUBPROCESS, "wings/cluster/hosts/ssh.py": _BY_SUBPROCESS,
    "wings/cluster/engines/scripts.py": _BY_SUBPROCESS, "training/launch.py": ("exec", "import"),
    "wings/cluster/engines/ray_job.py": ("exec", "import", "pickle.find_class", *_BY_SUBPROCESS),
}  # fmt: skip
"""What files of samestep may do: run the script of `samestep launch`, and the module that a job names, import modules that they name themselves,
trace a model in another process, start ssh, hand a script to the command of an engine, and call Ray, whose processes send each other
pickles."""
COMPILER = ("/torch/_dynamo/", "/torch/_inductor/", "/triton/")
"""Whose code is generated in a temporary folder, and starts processes: torch.compile's, where `run.compile` asks for it, and Triton's."""
CUDA = "/cuda/pathfinder/"
"""What finds CUDA's libraries: as a build of torch for CUDA is imported, it asks `ldconfig` where they are."""


@dataclass(frozen=True)
class _Hook:
    is_on: mmap.mmap
    """The byte that says whether a test watches all code."""
    anybodys: int
    """The file of what is found while it does."""
    samesteps: int
    """The file of what samestep causes, at any time."""

    @classmethod
    def of_pytest(cls) -> _Hook:
        """Return the hook of the pytest process, open here too; of a new one, which the processes find that it starts."""
        if files := os.environ.get(VARIABLE, ""):
            is_on, *found = (os.open(file, os.O_RDWR | os.O_APPEND) for file in files.split())
        else:
            is_on, *found = (_nameless_file() for _ in range(3))
            os.write(is_on, b"\0")
            os.environ[VARIABLE] = " ".join(f"/proc/{os.getpid()}/fd/{descriptor}" for descriptor in (is_on, *found))
            os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (f"{TESTS}site", os.environ.get("PYTHONPATH"))))
        return cls(mmap.mmap(is_on, 1), *found)


@functools.cache
def install() -> _Hook:
    """Install the hook."""
    installed, folders = _Hook.of_pytest(), tempfile.gettempdir()

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event not in _EVENTS or not (found := _seen(event, args, folders)):
            return
        path, line = _cause()
        if event in MAY.get(path, ()):
            return
        if installed.is_on[0]:
            os.write(installed.anybodys, f"{found}\n".encode())
        if path:
            os.write(installed.samesteps, f"{path}:{line}: {found}\n".encode())

    sys.addaudithook(hook)
    return installed


def _nameless_file() -> int:
    descriptor, path = tempfile.mkstemp()
    os.unlink(path)
    fcntl.fcntl(descriptor, fcntl.F_SETFL, os.O_APPEND)
    return descriptor


def _seen(event: str, args: tuple[Any, ...], folders: str) -> str:
    """Return what an event shows, as text; empty where it is harmless."""
    if event in STARTS:
        return "" if any(CUDA in path for path, _ in _stack()) else f"{event} {args[:2]!s:.200}"
    if event == "pickle.find_class":
        return "" if _over_a_pipe() else f"{event} {args[-2:]}"
    path = ""
    if event == "exec" and isinstance(args[0], CodeType):
        path = args[0].co_filename
    elif event == "import" and isinstance(args[1], str):
        path = args[1]
    is_ours = path.startswith(
        (f"{ROOT}/", f"{sys.prefix}/")
    )  # a clone and its environment may be in a temporary folder themselves
    return f"{event} {path}" if (path.startswith(f"{folders}/") and not is_ours) or COPIES in path else ""


def _over_a_pipe() -> bool:
    return any(
        path.endswith(one) and words in linecache.getline(path, line)
        for path, line in _stack()
        for one, words in PIPES.items()
    )


def _cause() -> tuple[str, int]:
    """Return the innermost file of the repository on the stack, if it is one of samestep, and its line; else no file."""
    for path, line in _stack():
        if path.startswith(PACKAGE):
            return path.removeprefix(PACKAGE), line
        if path.startswith(TESTS) or any(one in path for one in COMPILER):
            break
    return "", 0


def _stack() -> Iterator[tuple[str, int]]:
    """Yield the file and the line of each frame, the innermost first."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if (path := frame.f_code.co_filename) != __file__:
            yield path, frame.f_lineno
        frame = frame.f_back


@contextmanager
def watched() -> Iterator[list[str]]:
    """Yield a list that holds afterwards what any code of this process and its forks did meanwhile, each once."""
    hook, found = install(), list[str]()
    _taken(hook.anybodys)
    hook.is_on[0] = 1
    try:
        yield found
    finally:
        hook.is_on[0] = 0
        found += _taken(hook.anybodys)


def by_samestep() -> list[str]:
    """Return what samestep has caused in this process and its forks since the last call, each once."""
    return _taken(install().samesteps)


def _taken(record: int) -> list[str]:
    """Return the lines of a file, each once, and empty it."""
    text = os.pread(record, os.fstat(record).st_size, 0).decode()
    os.ftruncate(record, 0)
    return [*dict.fromkeys(text.splitlines())]


def planted(folder: Path) -> Path:
    """Write files into a folder that say so if anything runs or unpickles them, under the names that people load."""
    code = f"import pathlib; pathlib.Path({str(folder / 'RAN')!r}).touch()\n"
    for name in (
        "modeling_planted.py",
        "tokenization_planted.py",
        "planted.py",
        "conftest.py",
        "sitecustomize.py",
        "__init__.py",
    ):
        (folder / name).write_text(code)
    # a pickle that calls os.system
    for name in ("pytorch_model.bin", "training_args.bin", "state.pkl", "optimizer.pt"):
        (folder / name).write_bytes(f"cposix\nsystem\n(Vtouch {folder / 'RAN'}\ntR.".encode())
    return folder
