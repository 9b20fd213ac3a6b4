"""Kernels in Triton for GPUs, each equal to the bit to a formula in torch; files that need Triton are imported when a kernel runs."""
