"""What was played before something ended early, such as by Ctrl-C: it may have taken hours, so it is shown."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console


@contextmanager
def shown(console: Console, results: Sequence[object], show: Callable[[], None]) -> Iterator[None]:
    """Call ``show`` at the end of the block, in which ``results`` grow.

    If the block raises and there are results, people read that there could be more, and the exception goes on.
    """
    try:
        yield
    except BaseException:
        if results:
            console.print("ended early; this was played to its end before:")
            show()
        raise
    show()
