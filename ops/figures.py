"""Numbers as people read them: sizes and spans of time."""

from __future__ import annotations


def readable_bytes(size: float) -> str:
    """A size in bytes as text, such as ``12.3 MB``. Units are powers of 1,000."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(size) < 999.5:
            return f"{size:.0f} {unit}" if unit == "B" or size >= 100 else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


def time_unit(seconds: float) -> tuple[float, str]:
    """The number of seconds in the unit that suits a span of time, and the name of the unit."""
    for divisor, unit in ((86400.0, "days"), (3600.0, "hours"), (60.0, "minutes")):
        if seconds >= 3 * divisor:
            return divisor, unit
    return 1.0, "seconds"


def span(seconds: float) -> str:
    """A span of time in the unit that suits it: 4.2 s, 3 min 20 s, 5.5 h, 2.3 d."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 60:
        return f"{seconds:.0f} s"
    if seconds < 3600:
        return f"{int(seconds) // 60} min {int(seconds) % 60} s"
    if seconds < 2 * 86400:
        return f"{seconds / 3600:.1f} h"
    return f"{seconds / 86400:.1f} d"


def percent(share: float, digits: int = 1) -> str:
    """A share of 0 to 1 as people read it: ``96.2 %``. Files keep shares as they are."""
    return f"{100 * share:z.{digits}f} %"


def decimal(number: float, digits: int) -> str:
    """A number with so many decimals, or from a million on with its power of ten: ``2.3026``, ``7.5e+35``."""
    return f"{number:.{digits}f}" if abs(number) < 1e6 else f"{number:.1e}"


def per_second(rate: float) -> str:
    """A rate as people read it: ``9.6``, or ``166`` from 10 on."""
    return f"{rate:,.0f}" if rate >= 10 else f"{rate:.1f}"
