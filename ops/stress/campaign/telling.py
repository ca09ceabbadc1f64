"""Plays the cases of a campaign: case after case, tells each as it ends, and at last what happened how often."""

from __future__ import annotations

import itertools
import shlex
import shutil
import time
from collections import Counter
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.table import Table

from fedemu.ops.stress.campaign.cases import COMMON, METHODS, Case, CaseResult, case
from fedemu.ops.stress.campaign.play import play_case
from fedemu.ops.stress.early import shown
from fedemu.ops.stress.undisturbed import Undisturbed, undisturbed
from fedemu.ops.stress.warm import WarmStart
from fedemu.protocol.wording import counted

MOST_FAILURES: Final = 20
"""After so many cases in a row that failed no more are played: what is wrong has little to do with the accidents."""


def play_campaign(
    folder: Path, seed: int, results: list[CaseResult], *, minutes: float, cases: int | None, number: int | None
) -> None:
    """Play cases until ``minutes`` are over, or ``cases`` have been played. With ``number`` play that case alone.

    ``MOST_FAILURES`` in a row end it early.
    Each result is appended to ``results`` as its case ends, so those before an interruption are known, and shown.
    Each case has a folder of its own below ``folder``. That of a case that passed is removed, unless the case was
    chosen by its ``number``. People read on stderr how it goes.
    """
    console = Console(stderr=True, highlight=False)
    end = time.monotonic() + 60 * minutes
    calm: dict[str, Undisturbed] = {}
    with shown(console, results, lambda: _show(console, results)), WarmStart() as warm:
        for chosen in itertools.count() if number is None else [number]:
            enough = len(results) >= cases if cases is not None else time.monotonic() >= end
            last = results[-MOST_FAILURES:]
            hopeless = len(last) == MOST_FAILURES and not any(result.passed for result in last)
            if number is None and (enough or hopeless):
                if hopeless:
                    console.print(f"the last {MOST_FAILURES} cases failed, so no more are played")
                break
            played = case(seed, chosen)
            if played.method not in calm:
                console.print(f"undisturbed run of {played.method}, for comparison ...")
                experiment, settings = METHODS[played.method]
                directory = folder / f"undisturbed-{played.method}"
                calm[played.method] = undisturbed(experiment, (*COMMON, *settings), directory, warm.start)
            result = play_case(played, folder / f"case-{chosen}", calm[played.method], warm)
            results.append(result)
            _tell(console, result, folder)
            if result.passed and number is None:
                shutil.rmtree(folder / f"case-{chosen}", ignore_errors=True)


def _tell(console: Console, result: CaseResult, folder: Path) -> None:
    played = result.case
    word = "passed" if result.passed else "FAILED"
    lines = [f"case {played.number}  {word} in {result.seconds:.0f} s  {played.text}"]
    if not result.passed:
        lines += [f"  {said}" for said in (*(deed.what for deed in result.done), *result.complaints)]
        lines += [f"  its run and its terminals: {folder / f'case-{played.number}'}"]
        lines += [f"  play it again: {_again(played, folder)}"]
    console.print("\n".join(lines), markup=False, soft_wrap=True)


def _again(played: Case, folder: Path) -> str:
    out = shlex.quote(str(folder.with_name(f"{folder.name}-again")))
    return f"fedemu stress campaign --seed {played.seed} --case {played.number} --out {out}"


def _show(console: Console, results: list[CaseResult]) -> None:
    """How often each method and each accident was played, and how often a case with it failed."""
    _count(console, "method", [(result, {result.case.method}) for result in results])
    _count(console, "fleet", [(result, result.case.fleet or {"as by default"}) for result in results])
    _count(console, "machine", [(result, {" ".join(result.case.machine)}) for result in results])
    _count(console, "accident", [(result, result.happened) for result in results])
    bad = [str(result.case.number) for result in results if not result.passed]
    ended = f"; failed: {', '.join(bad)}" if bad else ", all ended as if nothing had happened"
    console.print(f"{counted(len(results), 'case')} played{ended}")


def _count(console: Console, what: str, named: Sequence[tuple[CaseResult, Collection[str]]]) -> None:
    played = Counter(name for _, names in named for name in names)
    failed = Counter(name for result, names in named for name in names if not result.passed)
    table = Table(box=None, pad_edge=False)
    table.add_column(what)
    for column in ("cases", "failed"):
        table.add_column(column, justify="right")
    for name in sorted(played):
        table.add_row(name, str(played[name]), str(failed[name]), style="bold red" if failed[name] else "")
    console.print(table)
