"""Gives the processes of a test a simulated device as they start; Python imports this file where it is on the path."""

from tests.device.simulated_cuda import install_if_asked

install_if_asked()
