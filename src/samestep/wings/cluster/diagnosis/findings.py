"""What one process finds on its host, without any other: plain data that is sent to the first host.

Here stand the software and the limits of a host. Nothing is imported for it: the version of torch is read from its metadata, and the
CUDA that it was built for from its files.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import hashlib
import os
import platform
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib import util
from pathlib import Path
from typing import Any, TypeVar

import psutil
from pydantic import TypeAdapter, ValidationError

from samestep import errors
from samestep.job import Job
from samestep.output import process_limits
from samestep.output.text import installed_version
from samestep.wings.cluster.diagnosis.gpus import Gpus, find_gpus
from samestep.wings.cluster.diagnosis.identity import Identity, Network, find_network
from samestep.wings.cluster.diagnosis.report import shortened

_LOOK_S, _EVERY_S = 2.0, 0.1
"""Folders of a network show new files of others after a while: NFS after up to 3 s, and at once to who opens by name."""


@dataclass(frozen=True)
class Folder:
    """A folder, seen from one host."""

    path: str
    kind: str
    """The file system, and whence it is mounted."""
    free_bytes: int
    error: str
    """Why nothing can be written there; empty where it can."""


@dataclass(frozen=True)
class Sight:
    """The files of other hosts that one host sees, and does not see."""

    missing: tuple[int, ...] = ()
    """The hosts whose files it does not see, by number."""
    sees_lock: bool = True
    """Whether it sees that the first host has locked its file."""
    error: str = ""


def find_folder(path: Path) -> Folder:
    """Return a folder as this host sees it; one that is not there yet is looked at through the folder above it."""
    real = path.absolute()
    above = next((parent for parent in (real, *real.parents) if parent.is_dir()), Path("/"))
    free = psutil.disk_usage(str(above)).free
    probe = above / f".samestep-doctor-{os.getpid()}-{time.time_ns()}"
    error = "it is a file" if real.is_file() else _written(probe, "probe")
    with contextlib.suppress(OSError):
        probe.unlink()
    return Folder(str(real), _mount_of(above), free, error)


def _written(path: Path, text: str) -> str:
    """Write a new file, and return why it cannot be written."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        words = {
            errno.EROFS: "it is mounted read-only",
            errno.EACCES: "this user may not write there",
            errno.ENOSPC: "it is full",
        }
        return words.get(error.errno or 0, error.strerror or str(error))
    return ""


def _mount_of(path: Path) -> str:
    mount = ("", "")
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/mounts").read_text().splitlines():
            device, at, kind, *_ = line.split(" ")
            at = at.encode().decode("unicode_escape")
            if path.is_relative_to(at) and len(at) >= len(mount[0]):
                mount = (at, f"{kind} of {device}")
    return mount[1]


class SharedFiles:
    """The file of this host in the shared folder, and its look at those of the others."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder, self._name = (
            next(parent for parent in (folder, *folder.absolute().parents) if parent.is_dir()),
            name,
        )
        self._descriptor: int | None = None
        self._mine: Path | None = None

    def write(self, number: int, nonce: str) -> str:
        """Write this host's file and lock it; return why that cannot be done."""
        path = self._path(number)
        if why := _written(path, nonce):
            return why
        self._mine = path
        try:
            self._descriptor = os.open(path, os.O_RDWR | process_limits.O_CLOEXEC)
            process_limits.lock(self._descriptor, waits=False)
        except OSError as error:
            return f"no lock: {error.strerror}"
        return ""

    def look(self, nonces: Mapping[int, str]) -> Sight:
        """Return which of the files with these words are not seen here, and whether the lock of the first one is."""
        end_s, missing = time.monotonic() + _LOOK_S, [*nonces]
        while True:
            missing = [number for number in missing if self._read(number) != nonces[number]]
            if not missing or time.monotonic() > end_s:
                break
            time.sleep(_EVERY_S)
        first = min(nonces, default=0)
        return Sight(tuple(missing), first in missing or self._is_locked(first))

    def close(self) -> None:
        """Remove this host's file."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
        if self._mine is not None:
            with contextlib.suppress(OSError):
                self._mine.unlink()

    def _path(self, number: int) -> Path:
        return self._folder / f".samestep-doctor-{self._name}-{number}"

    def _read(self, number: int) -> str:
        try:
            return self._path(number).read_text()
        except (OSError, ValueError):
            return ""

    def _is_locked(self, number: int) -> bool:
        if self._mine == self._path(number):
            return True
        try:
            descriptor = os.open(self._path(number), os.O_RDWR)
        except OSError:
            return True
        try:
            process_limits.lock(descriptor, waits=False)
        except BlockingIOError:
            return True
        except OSError:
            return False
        finally:
            os.close(descriptor)
        return False


T = TypeVar("T")
PROBE_S = 3.0
"""The longest that one probe may take."""
_GIT_S = 2.0
_MOST_SCRIPTS = 200


@dataclass(frozen=True)
class HostFindings:
    """The findings of all probes on one host; None where a probe did not end in time."""

    identity: Identity
    software: Software | None
    network: Network | None
    folder: Folder | None
    limits: Limits | None
    gpus: Gpus | None
    late: tuple[str, ...] = ()
    """The probes that did not end in time, or failed, each with the reason."""

    def to_record(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return dataclasses.asdict(self)


def of_record(kind: type[T], record: object) -> T | None:
    """Return the dataclass of a record that came from another host; None where it is none."""
    try:
        return TypeAdapter(kind).validate_python(record)
    except ValidationError:
        return None


def find(identity: Identity, job: Job | None, job_folder: Path, folder: Path) -> HostFindings:
    """Return what is found on this host, all probes at once.

    Args:
        identity: who this process is.
        job: the job that is to run.
        job_folder: the folder of its file.
        folder: the folder that all hosts are to see.
    """
    probes: dict[str, Callable[[], Any]] = {
        "software": lambda: _find_software(job, job_folder),
        "network": lambda: find_network(identity.meets_at, identity.listed),
        "folder": lambda: find_folder(folder),
        "limits": _find_limits,
        "gpus": find_gpus,
    }
    values, late = at_once(probes)
    return HostFindings(identity, **values, late=late)


def at_once(probes: dict[str, Callable[[], Any]], limit_s: float = PROBE_S) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Run probes at the same time; return their results, and why some have none.

    A probe that hangs, as in a file system whose server is gone, is left behind in its thread.
    """
    results: dict[str, Any] = dict.fromkeys(probes)
    failures: dict[str, str] = {}

    def run(name: str) -> None:
        try:
            results[name] = probes[name]()
        except Exception as error:  # whatever a broken host does must not hide the other findings
            failures[name] = shortened(f"{type(error).__name__}: {error}")

    threads = {name: threading.Thread(target=run, args=(name,), daemon=True) for name in probes}
    for name, thread in threads.items():
        try:
            thread.start()
        except RuntimeError:  # no thread is left to this user; what hangs is then waited for
            run(name)
    end_s = time.monotonic() + limit_s
    for name, thread in threads.items():
        while thread.is_alive() and time.monotonic() < end_s:
            thread.join(0.05)
        if thread.is_alive():
            failures[name] = f"it did not end within {limit_s:.3g} s"
    return {name: results[name] for name in probes}, tuple(f"{name}: {error}" for name, error in failures.items())


with contextlib.suppress(ModuleNotFoundError):  # of Windows
    import resource

SHM = Path("/dev/shm")
NO_LIMIT = -1


@dataclass(frozen=True)
class Limits:
    """The room that is left on one host: bytes and files; -1 where nothing limits it."""

    temporary: str
    """The folder for temporary files."""
    temporary_free_bytes: int
    shm_bytes: int
    """The size of /dev/shm; -1 where the system has none."""
    shm_free_bytes: int
    shm_error: str
    """Why no file can be written there."""
    open_files: int
    """The files that a process may open."""


def _find_limits() -> Limits:
    """Return what this host has left."""
    temporary, (size, free, error) = tempfile.gettempdir(), _shm()
    return Limits(
        temporary=temporary,
        temporary_free_bytes=psutil.disk_usage(temporary).free,
        shm_bytes=size,
        shm_free_bytes=free,
        shm_error=error,
        open_files=_limit("RLIMIT_NOFILE"),
    )


def _shm() -> tuple[int, int, str]:
    if not SHM.is_dir():
        return NO_LIMIT, NO_LIMIT, ""
    usage = psutil.disk_usage(str(SHM))
    try:
        with tempfile.NamedTemporaryFile(dir=SHM, prefix="samestep-doctor-") as file:
            file.write(b"\0" * (1 << 16))
            file.flush()
    except OSError as error:
        return usage.total, usage.free, error.strerror or str(error)
    return usage.total, usage.free, ""


def _limit(name: str) -> int:
    if "resource" not in sys.modules:
        return NO_LIMIT
    soft = resource.getrlimit(getattr(resource, name))[0]
    return NO_LIMIT if soft == resource.RLIM_INFINITY else soft


@dataclass(frozen=True)
class Software:
    """The versions and files of one host."""

    samestep: str
    python: str
    torch: str
    torch_cuda: str
    """The CUDA or ROCm that torch was built for; empty for a build without."""
    source: str
    """A digest of samestep's files."""
    commit: str
    """The commit of the work folder, with a digest of its uncommitted changes; empty outside of a repository of git."""
    job: str
    """A digest of the job and of the Python files in its folder; empty without a job."""


def _find_software(job: Job | None, folder: Path) -> Software:
    """Return the software of this host.

    Args:
        job: the job that is to run.
        folder: the folder of the job file, or the one that the process works in.
    """
    return Software(
        samestep=installed_version("samestep"),
        python=platform.python_version(),
        torch=installed_version("torch"),
        torch_cuda=_cuda_of_torch(),
        source=_digest(Path(errors.__file__).parent.rglob("*.py")),
        commit=_commit(folder),
        job="" if job is None else _digest_of_job(job, folder),
    )


def _cuda_of_torch() -> str:
    spec = util.find_spec("torch")
    if spec is None or not spec.origin:
        return ""
    try:
        text = Path(spec.origin).with_name("version.py").read_text()
    except OSError:
        return ""
    known = re.search(r"^(cuda|hip)\b[^=\n]*= *'([^']+)'", text, re.MULTILINE)
    return "" if known is None else f"{'CUDA' if known[1] == 'cuda' else 'ROCm'} {known[2]}"


def _digest_of_job(job: Job, folder: Path) -> str:
    scripts = sorted(folder.glob("*.py"))[:_MOST_SCRIPTS]
    return hashlib.sha256(f"{job.to_toml()}{_digest(scripts)}".encode()).hexdigest()[:12]


def _digest(files: Iterable[Path]) -> str:
    """Return a digest of the contents of files, and of their names without folders."""
    digest = hashlib.sha256()
    for path in sorted(files, key=lambda path: path.parts):
        try:
            digest.update(path.name.encode() + b"\0" + path.read_bytes())
        except OSError:
            digest.update(b"cannot be read")
    return digest.hexdigest()[:12]


def _commit(folder: Path) -> str:
    head = _git(folder, "rev-parse", "--short=12", "HEAD")
    if not head:
        return ""
    changes = _git(folder, "diff", "HEAD")
    return f"{head} with changes {hashlib.sha256(changes.encode()).hexdigest()[:8]}" if changes else head


def _git(folder: Path, *words: str) -> str:
    try:
        said = subprocess.run(
            ["git", "-c", f"safe.directory={folder.resolve()}", "-C", str(folder), *words],
            capture_output=True,
            timeout=_GIT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return said.stdout.decode(errors="replace").strip() if said.returncode == 0 else ""
