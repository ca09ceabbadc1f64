"""What a call shows while its run goes on: lines on stderr, or in a notebook one output that changes."""

from __future__ import annotations

import importlib
import re
import sys
import time
from collections.abc import Callable
from html import escape
from typing import Any, Protocol

_ROUNDS = re.compile(r"\bround +(\d+)/(\d+)")
_SEED = re.compile(r"seed \d+ \(\d+ of \d+\)")
_LEAST_SECONDS = 0.3
"""The least real time between two states of a notebook's output. The last state always comes."""


class Shown(Protocol):
    """Shows a run to a person."""

    def line(self, text: str) -> None:
        """The run has told a line."""
        ...

    def ended(self, text: str) -> None:
        """The run has ended. ``text`` says how, in one line."""
        ...


class Silence:
    """Shows nothing."""

    def line(self, text: str) -> None:
        pass

    def ended(self, text: str) -> None:
        pass


class Lines:
    """Writes every line to stderr, as the command does."""

    def line(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    def ended(self, text: str) -> None:
        """Nothing: the run has told its end itself."""


class CellOutput:
    """One output of a notebook's cell: the latest line and a bar. A stored notebook holds its last state."""

    def __init__(self, name: str, display: Callable[..., Any], clock: Callable[[], float] = time.monotonic) -> None:
        """``display`` is that of IPython. ``clock`` gives real seconds."""
        self._name = name
        self._clock = clock
        self._seed = ""
        self._text = "starting"
        self._changed = clock()
        self._handle = display(self._state(), raw=True, display_id=True)

    def line(self, text: str) -> None:
        if not text or text[0].isspace():
            return
        if found := _SEED.match(text):
            self._seed = found[0]
        self._text = text
        if self._clock() - self._changed >= _LEAST_SECONDS:
            self._show()

    def ended(self, text: str) -> None:
        self._seed, self._text = "", text
        self._show()

    def _show(self) -> None:
        self._changed = self._clock()
        self._handle.update(self._state(), raw=True)

    def _state(self) -> dict[str, str]:
        parts = [self._name, *([self._seed] if self._seed and self._seed not in self._text else [])]
        text = self._text.removeprefix(f"{self._name}: ")
        found = _ROUNDS.search(text)
        bar = f'<progress value="{found[1]}" max="{found[2]}"></progress> ' if found else ""
        html = f"<div><b>{escape(' '.join(parts))}</b> {bar}{escape(text)}</div>"
        return {"text/plain": f"{' '.join(parts)}: {text}", "text/html": html}


def open_shown(name: str, progress: bool) -> Shown:
    """What shows the run ``name``: nothing, the output of a notebook's cell, or lines on stderr."""
    if not progress:
        return Silence()
    if in_notebook():
        return CellOutput(name, importlib.import_module("IPython.display").display)
    return Lines()


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook. A terminal with IPython is none."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return shell is not None and getattr(shell, "kernel", None) is not None


def show_figures(to_png: Callable[[Any], bytes]) -> None:
    """Let a notebook show matplotlib figures as pictures, made by ``to_png``, unless it does so already.

    Without ``%matplotlib inline`` it would show their names alone.
    """
    if not in_notebook():
        return
    from matplotlib.figure import Figure

    formatter = sys.modules["IPython"].get_ipython().display_formatter.formatters["image/png"]
    try:
        formatter.lookup_by_type(Figure)
    except KeyError:
        formatter.for_type(Figure, to_png)
