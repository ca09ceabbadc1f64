"""``fedemu bench``: measures this machine, and shows every figure beside its floor."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedemu.device.compute.environment import COMPUTE_ENVIRONMENT
from fedemu.ops.bench.measuring.measure import QUICK, Effort, Figure, Spread
from fedemu.ops.bench.subjects import STUDIES, SUBJECTS, Study, Wishes
from fedemu.ops.cli.shell.guarded import guarded
from fedemu.ops.cli.shell.options import Format, FormatOption, given
from fedemu.ops.running.portable import start_again_with
from fedemu.protocol.errors import ConfigurationError

if TYPE_CHECKING:
    from rich.table import Table

_GOES_WITH = {
    "large": ("fleet", "selection"),
    "problems": ("selection",),
    "largest": ("fleet-size",),
    "envs": ("peers", "gpu"),
    "plots": ("growth",),
}
"""The subjects with one of which an option has an effect. It is refused without them."""
WIDTH = 150
"""The width of the tables in columns, if the output is no terminal."""


@guarded
def bench(
    context: typer.Context,
    subjects: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="SUBJECT...",
            help=f"Any of {', '.join(SUBJECTS)}; all of these if none is named. Or selection, which prints how near "
            "the selections of replay samples come to the best one, how far coordination lowers its objective, and how "
            "fast and how exact our solver is beside cvxpy. Or peers, which lets other simulators (Flower, "
            "pfl-research, FedJAX) do the same work as we do, in turns. Or growth, which measures what a round costs "
            "with up to 30,000 devices, with models of up to 100 MB and with up to 1,000 devices in a round. Or "
            "fleet-size, which measures time and memory of whole runs with 1,000 to 1,000,000 devices that sleep until "
            "they are asked. Or gpu, which measures training on an NVIDIA GPU: in stacks of 8 to 128, by several "
            "trainers with and without MPS, and beside pfl-research. It also measures server jobs.",
            show_default=False,
        ),
    ] = None,
    quick: Annotated[
        bool,
        typer.Option(
            "--quick", help="Do a tenth of the work. This shows that the benchmark runs, but its figures mean little."
        ),
    ] = False,
    large: Annotated[
        bool, typer.Option("--large", help="Also measure fleets of 1,000 devices: fleet and selection.")
    ] = False,
    problems: Annotated[
        int, typer.Option(metavar="N", help="How many problems the strategies of selection solve.", min=1)
    ] = 50,
    largest: Annotated[
        int, typer.Option(metavar="N", help="The largest fleet of fleet-size.", min=1_000, max=10_000_000)
    ] = 1_000_000,
    envs: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Where peers and gpu keep the virtual environments that they make; about 3 GB. "
            "[default: peers in the cache]",
            show_default=False,
            file_okay=False,
        ),
    ] = None,
    plots: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Where growth draws its plot: growth.png and growth.svg.",
            show_default=False,
            file_okay=False,
        ),
    ] = None,
    format: FormatOption = Format.TEXT,
) -> int:
    """Measure this machine's fleet, wire, training, aggregation and the whole system, each beside its floor.

    A floor is the least that the same work can cost. The work of fedemu and its floor are measured in turns, in the
    same run. On a busy machine look at the ratio of CPU times. All subjects together take about seven minutes.
    """
    for name in subjects or ():
        if name not in (*SUBJECTS, *STUDIES):
            raise ConfigurationError(f"there is no benchmark {name!r}; choose from {', '.join((*SUBJECTS, *STUDIES))}")
    for name, wanted in _GOES_WITH.items():
        if given(context, name) and not {*wanted} & {*(subjects or SUBJECTS)}:
            raise ConfigurationError(f"--{name} is for fedemu bench {' or '.join(wanted)}; leave it out")
    if "gpu" in (subjects or ()):
        _compute_as_trainers_do()
    from rich.console import Console  # No other command should have to wait for it.

    console = Console(stderr=True, highlight=False)
    results = Console(highlight=False) if format is Format.TEXT else console
    for each in (console, results):
        if not each.is_terminal:
            each.width = WIDTH
    effort = replace(QUICK if quick else Effort(), large=large)
    about = _facts()
    console.print(_in_words(about))
    figures: list[Figure] = []
    studies: dict[str, Study] = {}
    wishes = Wishes(problems=problems, environments=envs, plots=plots, largest=largest)
    complete = False
    try:
        with console.status("") as status:

            def tell(line: str) -> None:
                status.update(line) if console.is_interactive else console.print(f"{line} ...", markup=False)

            for name in dict.fromkeys(subjects or SUBJECTS):
                if name in STUDIES:
                    for study in STUDIES[name](effort, wishes, tell):
                        studies[name] = study
                else:
                    figures.extend(SUBJECTS[name](effort, tell))
        complete = True
    finally:  # what was measured before an error, or before Ctrl-C, is shown
        if figures:
            results.print(table(figures))
        for study in studies.values():
            results.print(study)
        if format is Format.JSON and (complete or figures or studies):
            said = about | {"quick": quick, "complete": complete, "figures": [figure.table() for figure in figures]}
            print(json.dumps(said | {name: study.table() for name, study in studies.items()}, indent=1))
    return 0


def _compute_as_trainers_do() -> None:
    """Start this command again with the variables of a trainer's environment, if there is a GPU to compute on."""
    import torch  # No other command should have to wait for it.

    if torch.cuda.is_available():
        start_again_with(COMPUTE_ENVIRONMENT)


def table(figures: list[Figure]) -> Table:
    """A table of the figures: medians, and the extremes of the ratios."""
    from rich.table import Table

    drawn = Table(box=None, pad_edge=False)
    for column in ("figure", "unit", "ours", "floor", "ratio", "from-to", "by CPU", "wanted"):
        drawn.add_column(column, justify="left" if column in ("figure", "unit", "wanted") else "right")
    subject = ""
    for figure in figures:
        if figure.subject != subject:
            subject = figure.subject
            drawn.add_row(f"[bold]{subject}[/]")
        drawn.add_row(
            f"  {figure.name}",
            figure.unit,
            _number(figure.ours.median),
            _median(figure.floor),
            _median(figure.ratio),
            f"{_number(figure.ratio.least)}-{_number(figure.ratio.most)}" if figure.ratio else "",
            _median(figure.cpu_ratio),
            _wanted(figure),
        )
    return drawn


def _wanted(figure: Figure) -> str:
    if figure.met is None:
        return ""
    wanted = f"{figure.reach:g} or more" if figure.limit is None else f"{figure.limit:g} {figure.unit} or less"
    return f"[green]reached[/] {wanted}" if figure.met else f"[bold red]missed[/] {wanted}"


def _median(spread: Spread | None) -> str:
    return _number(spread.median) if spread else ""


def _number(value: float) -> str:
    """The value with three significant digits."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _facts() -> dict[str, Any]:
    # Imports numpy, which other commands do not need.
    from fedemu.coordinator.record.summary import machine, versions

    return {"machine": machine(), "versions": versions(), "load": os.getloadavg()[0]}


def _in_words(about: dict[str, Any]) -> str:
    """The machine in one line, with a warning if other programs are using it."""
    of, load = about["machine"], about["load"]
    memory = f"{of['memory_bytes'] / 2**30:.0f} GiB"
    line = f"{of['processor']}, {of['cores']} cores, {memory}; {of['system']}; load {load:.1f}"
    return line if load < 0.5 * of["cores"] else f"{line}: busy, so wall times say little"
