"""Write the lock of CI: the exact version and the digest of every package that the tests install, torch and samestep aside.

    python -m pip install --quiet --dry-run --ignore-installed --report report.json \
        --constraint constraints.txt '.[dev]' hatchling editables
    python .ci/lock.py report.json > .ci/requirements.lock

The lock holds for Linux on x86_64 with Python 3.11, where .ci/run uses it. torch has builds of one version for many kinds of
machines, so it is installed by its version alone.
"""

import json
import sys
from pathlib import Path

if __name__ == "__main__":
    rows = {}
    for one in json.loads(Path(sys.argv[1]).read_text())["install"]:
        name, version = one["metadata"]["name"], one["metadata"]["version"]
        if name not in ("torch", "samestep"):
            rows[name.lower()] = (
                f"{name}=={version} --hash=sha256:{one['download_info']['archive_info']['hashes']['sha256']}"
            )
    print("\n".join(rows[name] for name in sorted(rows)))
