"""Gives the processes of a test a simulated device as they start; Python imports this file where it is on the path."""

import sys

if not any(
    "resource_tracker" in word for word in sys.orig_argv
):  # a process that multiprocessing starts beside workers
    from tests.device.simulated_cuda import install_if_asked

    install_if_asked()
