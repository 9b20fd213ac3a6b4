"""What one process finds on its host, without any other: plain data that is sent to the first host.

Here stand the software and the limits of a host. Nothing is imported for it: the version of torch is read from its metadata, and the
CUDA that it was built for from its files.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import platform
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from importlib import util
from pathlib import Path
from typing import Any, TypeVar

import psutil
from pydantic import TypeAdapter, ValidationError

from samestep.job import Job
from samestep.output.text import installed_version
from samestep.wings.cluster.diagnosis.gpus import Gpus, find_gpus
from samestep.wings.cluster.diagnosis.identity import Identity, Network, find_network
from samestep.wings.cluster.diagnosis.report import shortened
from samestep.wings.cluster.diagnosis.shared_folder import Folder, find_folder

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
    errors: dict[str, str] = {}

    def run(name: str) -> None:
        try:
            results[name] = probes[name]()
        except Exception as error:  # whatever a broken host does must not hide the other findings
            errors[name] = shortened(f"{type(error).__name__}: {error}")

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
            errors[name] = f"it did not end within {limit_s:.3g} s"
    return {name: results[name] for name in probes}, tuple(f"{name}: {error}" for name, error in errors.items())


with suppress(ModuleNotFoundError):  # of Windows
    import resource

SHM = Path("/dev/shm")
NO_LIMIT = -1


@dataclass(frozen=True)
class Limits:
    """The room that is left on one host: bytes, files and processes; -1 where nothing limits it."""

    temporary: str
    """The folder for temporary files."""
    temporary_free_bytes: int
    temporary_unused: str
    """The folder that is named for temporary files, by TMPDIR or by custom, where nothing can be written to it."""
    shm_bytes: int
    """The size of /dev/shm; -1 where the system has none."""
    shm_free_bytes: int
    shm_error: str
    """Why no file can be written there."""
    open_files: int
    """The files that a process may open."""
    processes: int
    """The processes and threads that may still be started."""


def _find_limits() -> Limits:
    """Return what this host has left."""
    named, temporary = Path(os.environ.get("TMPDIR") or "/tmp"), tempfile.gettempdir()
    is_unused = os.name == "posix" and named.absolute() != Path(temporary)
    size, free, error = _shm()
    return Limits(
        temporary=temporary,
        temporary_free_bytes=psutil.disk_usage(temporary).free,
        temporary_unused=str(named) if is_unused else "",
        shm_bytes=size,
        shm_free_bytes=free,
        shm_error=error,
        open_files=_limit("RLIMIT_NOFILE"),
        processes=_processes_left(),
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


def _processes_left() -> int:
    """Return the least of what the user's limit and the control group leave; the user's threads are at most all of the system."""
    left = []
    if sys.platform == "linux":
        allowed = _limit("RLIMIT_NPROC")
        if allowed != NO_LIMIT and os.geteuid() != 0:
            left.append(allowed - _threads_of_user())
        left += [
            most - _number(group / "pids.current") for group in _groups() if (most := _number(group / "pids.max")) > 0
        ]
    return min(left, default=NO_LIMIT)


def _threads_of_user() -> int:
    user_id, count = os.getuid(), 0
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.uids().real == user_id:
                count += process.num_threads()
    return count


def _groups() -> list[Path]:
    """Return the control groups of this process that may limit its number of processes, itself and those around it."""
    with suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            number, names, path = line.split(":", 2)
            root = Path("/sys/fs/cgroup", *(["pids"] if "pids" in names.split(",") else []))
            if number == "0" or "pids" in names.split(","):
                inner = root / path.lstrip("/")
                return [root, *([inner, *inner.parents] if inner.is_relative_to(root) else [])]
    return []


def _number(path: Path) -> int:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return 0


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
        source=_digest(Path(__file__).parents[1].rglob("*.py")),
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
