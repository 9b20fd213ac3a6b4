"""Makes every Python process that a test starts one that the test watches; Python imports this file where it is on the path."""

import importlib.util
import os
import sys
from pathlib import Path

if not any(
    "resource_tracker" in word for word in sys.orig_argv
):  # a process that multiprocessing starts beside workers
    if "SAMESTEP_TESTS_AUDIT" in os.environ:
        # By its path: the repository need not be on the path of this process, and nothing else shall be imported here.
        spec = importlib.util.spec_from_file_location("tests.audit", Path(__file__).parents[1] / "audit.py")
        assert spec is not None
        assert spec.loader is not None
        audit = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(audit)
        audit.install()
    if "SAMESTEP_TESTS_SIMULATE_A_DEVICE" in os.environ:
        from tests.device.simulated_cuda import install_if_asked

        install_if_asked()
