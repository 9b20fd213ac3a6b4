"""Host memory that a step frees stays with its rank, for the next step takes as much again.

Tensors on a CPU lie in the heap of the C library. glibc gives what is free at the heap's end back to the system once it
exceeds twice the largest tensor freed so far, and every 4 KiB page of it costs a fault when the next step writes it again:
up to 36,000 faults, 0.15 s of a step of 0.87 s. A rank therefore tells glibc to give nothing back. Its peak stays what it
was; what it holds between two steps is that peak.

Source: mallopt(3). Other C libraries and allocators keep their own rules.
"""

from __future__ import annotations

import ctypes
import os

_TRIM_THRESHOLD = -1
"""M_TRIM_THRESHOLD of malloc.h."""
_MMAP_THRESHOLD = -3
"""M_MMAP_THRESHOLD of malloc.h."""
_NEVER = -1
"""As an unsigned number of bytes, more than any heap has."""
_LARGEST_IN_HEAP_BYTES = 32 << 20
"""What glibc allows on 64 bits; greater tensors are mapped one by one."""
_OF_THE_USER = {"MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_"}


def keep_freed_memory() -> bool:
    """Let glibc keep what this process frees, unless the user has set thresholds; return whether it does so now."""
    if _OF_THE_USER & os.environ.keys() or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", ""):
        return False
    library = ctypes.CDLL(None)
    if not hasattr(library, "gnu_get_libc_version"):
        return False
    kept = library.mallopt(_TRIM_THRESHOLD, _NEVER) and library.mallopt(_MMAP_THRESHOLD, _LARGEST_IN_HEAP_BYTES)
    return bool(kept)
