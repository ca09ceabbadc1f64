"""How a run ended, as everything that reads a run directory tells it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

_ROUNDS: Final = re.compile(r"^rounds = (\d+(?:_\d+)*)", re.MULTILINE)


def outcome_of(summary: Mapping[str, Any], last_round: int, planned: int | None) -> str | None:
    """How a run ended, by its summary. None if the summary does not tell it, as that of a run that has none yet.

    ``last_round`` is the round of its last row, 0 without rows, and ``planned`` the number of rounds that its settings
    ask for. A completed run that was resumed for more rounds, and has not got them, is ``interrupted``: a group of
    seeds writes the new number into the settings of all seeds before it goes on with the first. If the summary does not
    tell its rounds, or ``planned`` is None, the run ended as the summary says.
    """
    outcome, finished = summary.get("outcome"), summary.get("rounds")
    if not isinstance(outcome, str):
        return None
    if outcome == "completed" and isinstance(finished, int) and planned is not None:
        return outcome if max(finished, last_round) >= planned else "interrupted"
    return outcome


def planned_rounds(config: str) -> int | None:
    """The number of rounds that a ``config.toml`` asks for, by its text. None if the text does not tell it.

    The file may be damaged after its first settings, which stand before all tables.
    """
    found = _ROUNDS.search(f"\n{config}".partition("\n[")[0])
    return int(found[1]) if found else None
