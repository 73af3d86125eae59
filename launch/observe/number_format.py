"""Numbers as a person reads them."""

import time


def duration(seconds: float) -> str:
    """'0.4 s', '12 s', '3 min', '2.1 h'."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"


def clock(time_s: float) -> str:
    """Local time of day of a Unix time."""
    return time.strftime("%H:%M:%S", time.localtime(time_s))
