"""``fedemu stress``: plays scenarios and tells which of them passed.

What plays is imported when it plays, because every command of fedemu imports this file.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedemu.coordinator.record.json_lines import plain
from fedemu.ops.cli.shell.guarded import guarded
from fedemu.ops.cli.shell.options import Format, FormatOption, given
from fedemu.protocol.errors import ConfigurationError
from fedemu.protocol.host.paths import exists

if TYPE_CHECKING:
    from rich.console import Console

    from fedemu.ops.stress.campaign.cases import CaseResult
    from fedemu.ops.stress.network import WeatherResult
    from fedemu.ops.stress.play import ScenarioResult
    from fedemu.ops.stress.recovery.play import RecoveryResult
    from fedemu.ops.stress.scenarios import Scale, Scenario
    from fedemu.ops.stress.strangers.play import AttackResult

    Results = Sequence[CaseResult | RecoveryResult | WeatherResult | AttackResult | ScenarioResult]

FAILED = 1
CAMPAIGN = "campaign"
"""The word that plays a campaign in place of scenarios."""
SOAK = "soak"
"""The word that plays a small fleet under churn for a long time instead."""
NETWORK = "network"
"""The word that plays runs with bad wires between machines."""
STRANGERS = "strangers"
"""The word that attacks runs instead."""
RECOVERY = "recovery"
"""The word that kills processes of runs, and measures when their rounds go on."""
ALONE = (CAMPAIGN, SOAK, RECOVERY, NETWORK, STRANGERS)
SCENARIO = "SCENARIO"
_GOES_WITH = {
    "short": (SCENARIO,),
    "list_": (SCENARIO,),
    "seed": (SCENARIO, CAMPAIGN, SOAK, RECOVERY),
    "minutes": (CAMPAIGN, SOAK, RECOVERY),
    "cases": (CAMPAIGN,),
    "case": (CAMPAIGN,),
    "attack": (STRANGERS,),
    "seconds": (STRANGERS,),
    "edge": (STRANGERS,),
}
"""The words with which an option has an effect. It is refused beside others."""


@guarded
def stress(
    context: typer.Context,
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="SCENARIO...",
            help="The scenarios to play. Default: all of them. The word campaign plays random accidents at random "
            "moments of runs of random methods instead, case after case. The word soak plays a small fleet under churn "
            "for a long time, and tells whether memory, descriptors, processes or files grow. The word recovery kills "
            "the coordinator, the edge and the machine of runs, and tells how soon rounds go on. The word strangers "
            "attacks a run of 40 devices in each way that the page on security names, without keys and with keys. The "
            "word network puts a coordinator and two machines into network namespaces, with delay, loss, little "
            "bandwidth and partitions between them.",
        ),
    ] = None,
    short: Annotated[
        bool, typer.Option("--short", help="Use 20 devices and 16 rounds instead of 300 and 120.")
    ] = False,
    list_: Annotated[
        bool, typer.Option("--list", help="List the scenarios, or those that are named, and stop.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="A folder in which run directories and logs are kept.")
    ] = None,
    seed: Annotated[
        int,
        typer.Option(metavar="N", help="scenarios, campaign, soak, recovery: the seed of what is disturbed, and when."),
    ] = 1,
    minutes: Annotated[
        float,
        typer.Option(
            min=0.5,
            max=100_000,
            metavar="N",
            help="campaign: begin no case after so many minutes. soak, recovery: last so long; a soak 10 or more.",
        ),
    ] = 10.0,
    cases: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="campaign: play so many cases, however long they take.")
    ] = None,
    case: Annotated[
        int | None, typer.Option(min=0, metavar="NUMBER", help="campaign: play the case of this number alone.")
    ] = None,
    attack: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="strangers: play this attack alone. Can be repeated."),
    ] = None,
    seconds: Annotated[
        float, typer.Option(min=1, max=3600, metavar="N", help="strangers: how long each attack goes on, about.")
    ] = 10.0,
    edge: Annotated[
        bool, typer.Option("--edge", help="strangers: attack an edge, behind which all devices are.")
    ] = False,
    format: FormatOption = Format.TEXT,
) -> int:
    """Try to break a real fleet, scenario by scenario, and check that the invariants held.

    The exit code is 0 if all scenarios passed, and 1 if one failed.
    """
    alone = names[0] if names and len(names) == 1 and names[0] in ALONE else SCENARIO
    for name, words in _GOES_WITH.items():
        if given(context, name) and alone not in words:
            option = f"--{name.strip('_')}"
            raise ConfigurationError(f"{option} is for fedemu stress {' or '.join(words)}; leave it out")
    _require_one_of(context, "case", "cases", "minutes")
    if names == [CAMPAIGN]:
        from fedemu.ops.stress.campaign.telling import play_campaign

        played: list[CaseResult] = []
        with _printed(played, format), _folder(out, keep=lambda: not all(result.passed for result in played)) as folder:
            play_campaign(folder, seed, played, minutes=minutes, cases=cases, number=case)
        return _code(played)
    if names == [SOAK]:
        from fedemu.ops.stress.soak.telling import play_soak

        with _folder(out) as folder:
            soaked = play_soak(folder, seed, minutes=minutes, kept=out is not None)
        if format is Format.JSON:
            # A slope that is not known has no bounds, and JSON has no infinite numbers.
            print(json.dumps(plain({"passed": soaked.passed, **asdict(soaked)}), indent=1))
        if soaked.interrupted:
            raise KeyboardInterrupt
        return 0 if soaked.passed else FAILED
    if names == [RECOVERY]:
        from fedemu.ops.stress.recovery.telling import play_recovery

        recovered: list[RecoveryResult] = []
        with (
            _printed(recovered, format),
            _folder(out, keep=lambda: not all(result.passed for result in recovered)) as folder,
        ):
            play_recovery(folder, seed, recovered, minutes=minutes, kept=out is not None)
        return _code(recovered)
    if names == [NETWORK]:
        from fedemu.ops.stress.network import play_network

        weathered: list[WeatherResult] = []
        with (
            _printed(weathered, format),
            _folder(out, keep=lambda: not all(result.passed for result in weathered)) as folder,
        ):
            for result in play_network(folder):
                weathered.append(result)
        return _code(weathered)
    if names == [STRANGERS]:
        from fedemu.ops.stress.strangers.telling import play_strangers

        attacked: list[AttackResult] = []
        with _printed(attacked, format), _folder(out) as folder:
            play_strangers(folder, attack or (), seconds, attacked, edge)
        return _code(attacked)
    from fedemu.ops.stress.scenarios import FULL, SHORT, scenarios

    scale = SHORT if short else FULL
    known = scenarios(scale)
    for name in names or ():
        if name not in known:
            raise ConfigurationError(
                f"there is no scenario {name!r}; choose from {', '.join(known)}, "
                f"or {', '.join(ALONE[:-1])} or {ALONE[-1]} alone"
            )
    chosen = [known[name] for name in dict.fromkeys(names or known)]
    if list_:
        if format is Format.JSON:
            print(json.dumps([{"name": scenario.name, "what": scenario.what} for scenario in chosen], indent=1))
            return 0
        for scenario in chosen:
            print(f"{scenario.name:22}{scenario.what}")
        return 0
    results: list[ScenarioResult] = []
    with _printed(results, format), _folder(out) as folder:
        _play_all(chosen, scale, folder, seed, results)
    return _code(results)


@contextmanager
def _printed(results: Results, format: Format) -> Iterator[None]:
    """Print the results if they are wanted as JSON, at the end of the block. If it raises, those before, if any."""
    try:
        yield
    except BaseException:
        if results:
            _print(results, format)
        raise
    _print(results, format)


def _print(results: Results, format: Format) -> None:
    if format is Format.JSON:
        print(json.dumps([asdict(result) | {"passed": result.passed} for result in results], indent=1))


def _code(results: Results) -> int:
    return 0 if all(result.passed for result in results) else FAILED


def _require_one_of(context: typer.Context, *options: str) -> None:
    """Raise ConfigurationError if several of these options are given. Each would take the others' effect."""
    if len(chosen := [f"--{name}" for name in options if given(context, name)]) > 1:
        raise ConfigurationError(f"{' and '.join(chosen)} exclude each other; leave out all but one")


@contextmanager
def _folder(out: Path | None, keep: Callable[[], bool] = lambda: False) -> Iterator[Path]:
    """The folder ``out``, or a temporary one that is removed at the end unless ``keep`` says otherwise.

    If the block has put nothing into a folder that was not there, such as one that refuses, it is removed, too.
    """
    if out is None:
        folder = Path(tempfile.mkdtemp(prefix="fedemu-stress-"))
        try:
            yield folder
        finally:
            if not keep():
                shutil.rmtree(folder, ignore_errors=True)
    else:
        if exists(out) and any(out.iterdir()):
            raise ConfigurationError(f"{out} is not empty; name a new folder with --out")
        is_new = not exists(out)
        out.mkdir(parents=True, exist_ok=True)
        try:
            yield out
        finally:
            if is_new and not any(out.iterdir()):
                out.rmdir()


def _play_all(chosen: list[Scenario], scale: Scale, folder: Path, seed: int, results: list[ScenarioResult]) -> None:
    """Play the scenarios, and append each result to ``results`` as its run ends."""
    from rich.console import Console

    from fedemu.ops.stress.early import shown

    console = Console(stderr=True)
    with shown(console, results, lambda: _show(console, results)):
        _play_each(console, chosen, scale, folder, seed, results)


def _play_each(
    console: Console, chosen: list[Scenario], scale: Scale, folder: Path, seed: int, results: list[ScenarioResult]
) -> None:
    from fedemu.ops.stress.fleet import start_interpreter
    from fedemu.ops.stress.play import play
    from fedemu.ops.stress.undisturbed import Undisturbed, undisturbed

    calm: dict[tuple[str, ...], Undisturbed] = {}
    for scenario in chosen:
        alone = scenario.settings_alone(scale)
        if alone not in calm:
            console.print("undisturbed run, for comparison ...", highlight=False)
            calm[alone] = undisturbed(scale.experiment, alone, folder / f"undisturbed-{len(calm)}", start_interpreter)
        console.print(f"{scenario.name}: {scenario.what} ...", highlight=False)
        result = play(scenario, scale, folder / scenario.name, seed=seed, expected=calm[alone])
        results.append(result)
        console.print(f"  {'passed' if result.passed else 'FAILED'} in {result.seconds:.1f} s", highlight=False)


def _show(console: Console, results: list[ScenarioResult]) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for column in ("scenario", "result", "seconds", "rounds", "accepted", "dropped", "late", "rejected"):
        table.add_column(column, justify="left" if column in ("scenario", "result") else "right")
    for result in results:
        counts = [str(result.facts[outcome]) for outcome in ("accepted", "dropped", "late", "rejected")]
        style = "green" if result.passed else "bold red"
        word = f"[{style}]{'passed' if result.passed else 'FAILED'}[/]"
        table.add_row(result.name, word, f"{result.seconds:.1f}", str(result.rounds), *counts)
    console.print(table)
    for result in results:
        for complaint in result.complaints:
            console.print(f"{result.name}: {complaint}", markup=False, highlight=False)
