"""One setting of glibc's allocator, for processes through which large messages pass."""

import ctypes

KEPT_BYTES = 128 << 20  # freed memory at the top of a heap that a process keeps
MMAP_BYTES = 32 << 20  # blocks from here on come from the kernel one by one; the largest that glibc allows
TRIM_THRESHOLD, MMAP_THRESHOLD, ARENA_MAX = -1, -3, -8  # names of mallopt(3)


def keep_freed_memory(one_heap: bool = False) -> bool:
    """Let this process reuse what large messages leave behind; returns whether the C library took it.

    By default glibc gives that memory back to the kernel, which maps it again page by page. For groups of 0.6 MB this
    costs more than everything else that is done to them. Call it before threads are started. `one_heap` makes all
    threads share one heap, because other heaps give memory back in pieces of 64 MB. Never where threads compute.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):
        return False
    mallopt.argtypes, mallopt.restype = [ctypes.c_int, ctypes.c_int], ctypes.c_int
    settings = [(TRIM_THRESHOLD, KEPT_BYTES), (MMAP_THRESHOLD, MMAP_BYTES)]
    settings += [(ARENA_MAX, 1)] if one_heap else []
    return all([mallopt(*setting) == 1 for setting in settings])
