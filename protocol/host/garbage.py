"""Python's garbage collector, and what it need not look at."""

from __future__ import annotations

import gc


def settle() -> None:
    """Let the collector look only at what is made from now on.

    A process that lives long and has much (modules, data) would else let garbage grow to a quarter of all that before
    it looks. Children that are forked share the memory of what exists now, as long as the collector does not write
    into it.
    """
    gc.collect()
    gc.freeze()
