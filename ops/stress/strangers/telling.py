"""Plays attack after attack, with and without keys, and tells what became of each run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from fedemu.ops.figures import percent, readable_bytes, span
from fedemu.ops.stress.early import shown
from fedemu.ops.stress.strangers.attacks import ATTACKS
from fedemu.ops.stress.strangers.play import AttackResult, names, play, undisturbed
from fedemu.protocol.errors import ConfigurationError
from fedemu.protocol.wording import counted


def play_strangers(
    folder: Path, wanted: Sequence[str], seconds: float, results: list[AttackResult], edge: bool = False
) -> None:
    """Play the attacks of these names, or all, each for about ``seconds``, without keys and with keys.

    Each result is appended to ``results`` as its run ends, so those before an interruption are known, and shown.
    With ``edge`` they go against an edge, behind which all devices are. Raises ConfigurationError if there is no attack
    of a name. People read on stderr how it goes.
    """
    for name in wanted:
        if name not in ATTACKS:
            raise ConfigurationError(f"there is no attack {name!r}; choose from {', '.join(ATTACKS)}")
    console = Console(stderr=True, highlight=False)
    console.print("undisturbed run, for comparison ...")
    calm = undisturbed(folder, seconds)
    console.print(f"  {counted(calm.rounds, 'round')}, {calm.pace:.1f} a second")
    with shown(console, results, lambda: _show(console, results)):
        for keys in (False, True):
            for name in names(wanted, keys):
                console.print(f"{name}, {'with' if keys else 'without'} keys: {ATTACKS[name].what} ...")
                result = play([name], calm, folder / f"{name}-{'keys' if keys else 'open'}", keys=keys, edge=edge)
                results.append(result)
                console.print(f"  {'passed' if result.passed else 'FAILED'} in {span(result.seconds)}")


def _show(console: Console, results: Sequence[AttackResult]) -> None:
    table = Table(box=None, pad_edge=False)
    for column in ("attack", "keys", "result"):
        table.add_column(column)
    for column in ("pace", "memory", "processors"):
        table.add_column(column, justify="right")
    table.add_column("counted, at least")
    for result in results:
        style = "green" if result.passed else "bold red"
        table.add_row(
            ", ".join(result.attacks),
            "yes" if result.keys else "no",
            f"[{style}]{'passed' if result.passed else 'FAILED'}[/]",
            percent(result.pace),
            f"+{readable_bytes(result.memory)}",
            f"{result.processors:.2f}",
            ", ".join(f"{reason} {count:,}" for reason, count in sorted(result.counted.items())),
        )
    console.print(table)
    for result in results:
        for complaint in result.complaints:
            console.print(f"{', '.join(result.attacks)}: {complaint}", markup=False)
