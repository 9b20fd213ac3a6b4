"""What a load does beyond reading: events of Python's audit hook, of the pytest process and of every rank that it forks.

    pickle.find_class                        something is unpickled that names a class or function
    subprocess.Popen, os.system, os.exec...  a process is started
    exec, import                             code of a file below a temporary folder runs: a checkpoint's, a data set's, a model's

A hook cannot be removed, so it is installed once, before the first rank is forked, and looks only while a test says so: the
word that says it lies in memory that all these processes share, and what they find they append to one file.
"""

from __future__ import annotations

import functools
import linecache
import mmap
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

STARTS = ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "pty.spawn")
PIPES = {
    "samestep/runtime/processes/local_workers.py": "pickle.loads(", "tests/pool.py": "pickle.loads(",
    "multiprocessing/connection.py": ".loads(", "multiprocessing/queues.py": ".loads(",
}  # fmt: skip
"""Who unpickles what a process that it has started itself, or its own thread, sends it over a pipe; and the words of that line."""
ROOT = Path(__file__).parents[1]
COPIES = "transformers_modules"
"""Part of the path to which transformers copies code of a model's folder before it runs it."""


@functools.cache
def install() -> tuple[mmap.mmap, int]:
    """Install the hook, which rests; return the byte that wakes it, and the file of what it finds."""
    is_on, folders = mmap.mmap(-1, 1), tempfile.gettempdir()
    descriptor, path = tempfile.mkstemp()
    os.unlink(path)

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if is_on[0] and (found := _seen(event, args, folders)):
            os.write(descriptor, f"{found}\n".encode())

    sys.addaudithook(hook)
    return is_on, descriptor


def _seen(event: str, args: tuple[Any, ...], folders: str) -> str:
    """Return what an event shows, as text; empty where it is harmless."""
    if event in STARTS:
        return f"{event} {args[:2]!s:.200}"
    if event == "pickle.find_class":
        return "" if _over_a_pipe() else f"{event} {args[-2:]}"
    path = ""
    if event == "exec" and isinstance(args[0], CodeType):
        path = args[0].co_filename
    elif event == "import" and isinstance(args[1], str):
        path = args[1]
    is_ours = path.startswith(f"{ROOT}/")  # a clone of the repository may itself lie in a temporary folder
    return f"{event} {path}" if (path.startswith(f"{folders}/") and not is_ours) or COPIES in path else ""


def _over_a_pipe() -> bool:
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        path = frame.f_code.co_filename
        if any(path.endswith(one) and words in linecache.getline(path, frame.f_lineno) for one, words in PIPES.items()):
            return True
        frame = frame.f_back
    return False


@contextmanager
def watched() -> Iterator[list[str]]:
    """Yield a list that holds afterwards what this process and its forks did meanwhile, each once."""
    is_on, record = install()
    before, found = os.fstat(record).st_size, []
    is_on[0] = 1
    try:
        yield found
    finally:
        is_on[0] = 0
        text = os.pread(record, os.fstat(record).st_size - before, before).decode()
        found += dict.fromkeys(text.splitlines())


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
