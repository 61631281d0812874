"""Numbers as people read them: three figures, with a unit that fits."""

from __future__ import annotations


def figures(number: float) -> str:
    """Render with about three figures: `1,234`, `123`, `12.3`, `1.23`, `0.12`; empty if zero."""
    size = abs(number)
    if size == 0:
        return ""
    if size < 0.0005:
        return "<0.001"
    digits = 0 if size >= 99.95 else 1 if size >= 9.995 else 2 if size >= 0.0995 else 3
    return f"{number:,.{digits}f}"


def whole(number: float) -> str:
    """Render a count: `12`, or `12.5` where a mean is none; empty if zero."""
    return figures(number) if number != round(number) else f"{number:,.0f}" if number else ""


def size(size_bytes: float) -> str:
    """Render bytes: `512 B`, `12.3 kB`, `4.56 MB`; empty if zero."""
    if size_bytes < 999.5:
        return f"{size_bytes:.0f} B" if size_bytes else ""
    for limit, factor, unit in ((999.5e3, 1e3, "kB"), (999.5e6, 1e6, "MB")):
        if size_bytes < limit:
            return f"{figures(size_bytes / factor)} {unit}"
    return f"{figures(size_bytes / 1e9)} GB"


def duration(duration_us: float) -> str:
    """Render a time: `12.3 us`, `4.56 ms`, `1.23 s`; `0 us` if zero."""
    for limit, factor, unit in ((999.5, 1.0, "us"), (999.5e3, 1e3, "ms")):
        if abs(duration_us) < limit:
            return f"{figures(duration_us / factor) or '0'} {unit}"
    return f"{figures(duration_us / 1e6)} s"


def percent(share: float) -> str:
    """Render a share of one: `41%`, `0.4%`, `<0.1%`."""
    if 0 < share < 0.0005:
        return "<0.1%"
    return f"{share * 100:.0f}%" if share >= 0.0095 or share == 0 else f"{share * 100:.1f}%"
