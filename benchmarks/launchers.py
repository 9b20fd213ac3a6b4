"""Which launchers start samestep here: each trains the default job, made small, to the losses of one rank; what is absent is said.

    make launchers

Writes `rows/launchers.json`. The tests are those of `tests/launchers/`; a launcher is skipped where its programs are not
installed, and the row says which.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path

ROOT = Path(__file__).parents[1]
ROWS = Path(__file__).parent / "rows" / "launchers.json"
LAUNCHERS = {
    "Slurm, srun and torchrun": "tests/launchers/test_slurm.py",
    "Open MPI and MPICH": "tests/launchers/test_mpi.py",
    "Ray Train, two nodes": "tests/launchers/test_ray.py",
    "torchrun": "tests/parity/test_training.py::test_torchrun_gives_the_losses_of_our_own_launcher",
    "our agent on hosts that are network namespaces": "tests/crashes/test_hosts.py",
    "variables of Kubernetes, SkyPilot, dstack, srun, mpirun": "tests/launchers/test_variables.py",
    "samestep doctor on hosts that are broken in twelve ways": "tests/launchers/test_doctor.py",
    "scripts, and manifests against schemas": "tests/unit/test_engines.py",
}


def outcome(path: str) -> dict[str, object]:
    """Run the tests of one launcher; return how many passed and failed, and why others were skipped."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        words = [sys.executable, "-m", "pytest", "-q", "--every-layout", f"--junitxml={report}", *path.split()]
        subprocess.run(words, cwd=ROOT, check=False)
        cases = [*ElementTree.parse(report).iter("testcase")]
    skipped = [one.get("message", "") for case in cases for one in case.iter("skipped")]
    failed = sum(case.find("failure") is not None or case.find("error") is not None for case in cases)
    passed = len(cases) - failed - len(skipped)
    return {"passed": passed, "failed": failed, "skipped": len(skipped), "why": "; ".join(dict.fromkeys(skipped))}


def table(rows: dict[str, dict[str, object]]) -> str:
    """Return the outcomes as a table in Markdown."""
    lines = ["| launcher | tests passed | failed | skipped, and why |", "| --- | --- | --- | --- |"]
    for name, row in rows.items():
        why = f"{row['skipped']}: {row['why']}" if row["skipped"] else "0"
        lines.append(f"| {name} | {row['passed']} | {row['failed']} | {why} |")
    return "\n".join(lines)


def main() -> int:
    """Run all launchers that are here, and return 1 where one fails."""
    rows = {name: outcome(path) for name, path in LAUNCHERS.items()}
    ROWS.write_text(json.dumps(rows, indent=1) + "\n")
    print(table(rows))
    return int(any(row["failed"] for row in rows.values()))


if __name__ == "__main__":
    sys.exit(main())
