"""glibc's allocator: keep what a step frees, for the next step to use.

glibc gives the top of its heap back to the system whenever twice the largest block that was ever freed is unused
there. A small model's activations come and go in larger sums than that, so each step takes thousands of pages anew,
zeroed: 5,000 in the forward and backward pass of a model of 0.5 M parameters, an eighth of its time. The rule's own end
values, taken from the start, avoid it; what is kept is bounded by them.
"""

from __future__ import annotations

import ctypes
import os
import platform

#: DEFAULT_MMAP_THRESHOLD_MAX of 64-bit glibc: larger blocks are mappings of their own and go back when freed.
MMAP_THRESHOLD = 32 << 20
#: Twice that, as glibc's dynamic rule has it: unused memory at the top of the heap beyond this goes back.
TRIM_THRESHOLD = 2 * MMAP_THRESHOLD

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
#: By which a user decides otherwise.
_ENVIRONMENT = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")


def keep_freed_memory() -> bool:
    """Set both thresholds for this process, unless the environment sets them or the allocator is not glibc's.

    Returns:
        whether they are set.
    """
    if platform.libc_ver()[0] != "glibc" or any(name in os.environ for name in _ENVIRONMENT):
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return bool(mallopt(_M_MMAP_THRESHOLD, MMAP_THRESHOLD)) and bool(mallopt(_M_TRIM_THRESHOLD, TRIM_THRESHOLD))
