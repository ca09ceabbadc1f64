"""Plays the cases of a campaign: case after case, tells each as it ends, and at last what happened how often."""

from __future__ import annotations

import itertools
import shlex
import time
from collections import Counter
from pathlib import Path

from rich.console import Console
from rich.table import Table

from fedemu.ops.figures import counted
from fedemu.ops.stress.campaign import Case, CaseResult, case, play_case, undisturbed


def play_campaign(
    folder: Path, seed: int, *, minutes: float, cases: int | None, number: int | None
) -> list[CaseResult]:
    """Play cases until ``minutes`` are over, or ``cases`` have been played. With ``number`` play that case alone.

    Each case has a folder of its own below ``folder``. People read on stderr how it goes.
    """
    console = Console(stderr=True, highlight=False)
    end = time.monotonic() + 60 * minutes
    digests: dict[str, str] = {}
    results: list[CaseResult] = []
    for chosen in itertools.count() if number is None else [number]:
        enough = len(results) >= cases if cases is not None else time.monotonic() >= end
        if number is None and enough:
            break
        played = case(seed, chosen)
        if played.method not in digests:
            console.print(f"undisturbed run of {played.method}, for comparison ...")
            digests[played.method] = undisturbed(played.method, folder)
        result = play_case(played, folder / f"case-{chosen}", digests[played.method])
        results.append(result)
        word = "passed" if result.passed else "FAILED"
        console.print(f"case {chosen}  {word} in {result.seconds:.0f} s  {played.text}", markup=False, soft_wrap=True)
        for complaint in result.complaints:
            console.print(f"  {complaint}", markup=False, soft_wrap=True)
        if not result.passed:
            console.print(f"  play it again: {_again(played, folder)}", markup=False, soft_wrap=True)
    _show(console, results)
    return results


def _again(played: Case, folder: Path) -> str:
    out = shlex.quote(str(folder.with_name(f"{folder.name}-again")))
    return f"fedemu stress campaign --seed {played.seed} --case {played.number} --out {out}"


def _show(console: Console, results: list[CaseResult]) -> None:
    """How often each accident was played, and how often a case with it failed."""
    played, failed = Counter[str](), Counter[str]()
    for result in results:
        names = {accident.name for accident in result.case.accidents}
        played.update(names)
        failed.update(names if not result.passed else ())
    table = Table(box=None, pad_edge=False)
    table.add_column("accident")
    for column in ("cases", "failed"):
        table.add_column(column, justify="right")
    for name in sorted(played):
        table.add_row(name, str(played[name]), str(failed[name]), style="bold red" if failed[name] else "")
    console.print(table)
    bad = [str(result.case.number) for result in results if not result.passed]
    ended = f"; failed: {', '.join(bad)}" if bad else ", all ended as if nothing had happened"
    console.print(f"{counted(len(results), 'case')} played{ended}")
