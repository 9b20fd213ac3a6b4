"""The software of a host: versions, the files of samestep as they are, the commit of the work folder, and the job.

Nothing is imported for it: the version of torch is read from its metadata, and the CUDA that it was built for from its files.
"""

from __future__ import annotations

import hashlib
import platform
import re
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import metadata, util
from pathlib import Path

from samestep.job import Job

_GIT_S = 2.0
_MOST_SCRIPTS = 200


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


def find_software(job: Job | None, folder: Path) -> Software:
    """Return the software of this host.

    Args:
        job: the job that is to run.
        folder: the folder of the job file, or the one that the process works in.
    """
    return Software(
        samestep=_version("samestep"),
        python=platform.python_version(),
        torch=_version("torch"),
        torch_cuda=_cuda_of_torch(),
        source=_digest(Path(__file__).parents[1].rglob("*.py")),
        commit=_commit(folder),
        job="" if job is None else _digest_of_job(job, folder),
    )


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "none"


def _cuda_of_torch() -> str:
    found = util.find_spec("torch")
    if found is None or not found.origin:
        return ""
    try:
        text = Path(found.origin).with_name("version.py").read_text()
    except OSError:
        return ""
    known = re.search(r"^(cuda|hip)\b[^=\n]*= *'([^']+)'", text, re.MULTILINE)
    return "" if known is None else f"{'CUDA' if known[1] == 'cuda' else 'ROCm'} {known[2]}"


def _digest_of_job(job: Job, folder: Path) -> str:
    scripts = sorted(folder.glob("*.py"))[:_MOST_SCRIPTS]
    return hashlib.sha256(f"{job.to_toml()}{_digest(scripts)}".encode()).hexdigest()[:12]


def _digest(files: Iterable[Path]) -> str:
    """Return a digest of the contents of files, and of their names without folders."""
    found = hashlib.sha256()
    for path in sorted(files, key=lambda path: path.parts):
        try:
            found.update(path.name.encode() + b"\0" + path.read_bytes())
        except OSError:
            found.update(b"cannot be read")
    return found.hexdigest()[:12]


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
