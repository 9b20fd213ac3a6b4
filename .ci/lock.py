"""The lock of `make setup`: the exact version and the digests of every package that the tests install, torch and samestep aside.

    for version in 3.11 3.12 3.13; do
        python -m pip install --quiet --dry-run --ignore-installed --report $version.json --python-version $version \\
            --only-binary :all: --target nowhere --constraint constraints.txt '.[dev]' hatchling editables
    done
    python .ci/lock.py 3.11.json 3.12.json 3.13.json > .ci/requirements.lock
    python .ci/lock.py                 prints the path of the lock where it holds for the Python that runs this, and else nothing

The lock holds for Linux on x86_64 with the versions of Python that its first line names; elsewhere make takes the versions of
constraints.txt without digests. torch has builds of one version for many kinds of machines, so it is installed by its version alone.
"""

import json
import platform
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_OF_TORCH = ("nvidia-", "cuda-", "triton")
"""What only builds of torch for GPUs need, which bring it themselves."""
LOCK = Path(__file__).with_name("requirements.lock")


def holding() -> str:
    """Return the path of the lock if it holds here, else nothing."""
    versions = LOCK.read_text().partition("\n")[0].split()
    here = platform.python_version().rpartition(".")[0]
    is_linux = (platform.system(), platform.machine()) == ("Linux", "x86_64")
    return str(LOCK.relative_to(LOCK.parents[1])) if is_linux and here in versions else ""


def lock(reports: list[str]) -> str:
    """Return the lock of pip's reports, one for each version of Python."""
    versions: list[str] = []
    digests: dict[str, list[str]] = {}
    for path in reports:
        report = json.loads(Path(path).read_text())
        versions.append(Path(path).name.removesuffix(".json"))
        if lacking := [*_lacking(report["install"], versions[-1])]:
            raise SystemExit(f"{path}: {'; '.join(lacking)}")
        for one in report["install"]:
            name, version = one["metadata"]["name"], one["metadata"]["version"]
            if name not in ("torch", "samestep") and not name.startswith(_OF_TORCH):
                digest = one["download_info"]["archive_info"]["hashes"]["sha256"]
                digests.setdefault(f"{name}=={version}", []).append(digest)
    rows = [
        " ".join([name, *(f"--hash=sha256:{digest}" for digest in dict.fromkeys(found))])
        for name, found in sorted(digests.items(), key=lambda item: item[0].lower())
    ]
    return "\n".join([f"# Linux x86_64, Python {' '.join(versions)}", *rows])


def _lacking(packages: list[dict[str, Any]], version: str) -> Iterator[str]:
    """Yield what packages need on a version of Python and a report lacks: pip reads markers by the Python that runs it."""
    # make setup prints the path of the lock before packaging is installed
    from packaging.requirements import Requirement  # noqa: PLC0415
    from packaging.utils import canonicalize_name  # noqa: PLC0415

    found = {canonicalize_name(one["metadata"]["name"]): one["metadata"]["version"] for one in packages}
    for one in packages:
        for extra in ("", *one.get("requested_extras", ())):
            mark = {"python_version": version, "python_full_version": f"{version}.0", "extra": extra}
            for need in map(Requirement, one["metadata"].get("requires_dist", ())):
                has = found.get(canonicalize_name(need.name))
                wanted = need.marker is None or need.marker.evaluate(mark)
                if wanted and (has is None or not need.specifier.contains(has, prereleases=True)):
                    yield f"{one['metadata']['name']} needs {need}, and the report has {has}"


if __name__ == "__main__":
    print(lock(sys.argv[1:]) if sys.argv[1:] else holding())
