"""The command ``fedemu``. Each command lives beside what it does; here they get their names.

Neither torch nor matplotlib is imported before a command that computes or draws needs it.
"""

from __future__ import annotations

from importlib import metadata
from typing import Annotated

import typer

from fedemu.ops import cli_fleet, cli_look, cli_stress
from fedemu.ops.cli_errors import EXIT_CODES

app = typer.Typer(
    name="fedemu",
    help="Emulates a fleet of federated-learning devices: a coordinator, hundreds of processes, churn, recovery.",
    epilog=EXIT_CODES,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(metadata.version("fedemu"))
        raise typer.Exit


@app.callback()
def _fedemu(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and stop.", callback=_print_version, is_eager=True)
    ] = False,
) -> None: ...


app.command("run", epilog=EXIT_CODES)(cli_fleet.run)
app.command("coordinator", epilog=EXIT_CODES)(cli_fleet.coordinator)
app.command("device", epilog=EXIT_CODES)(cli_fleet.device)
app.command("report", epilog=EXIT_CODES)(cli_look.report)
app.command("stress", epilog=EXIT_CODES)(cli_stress.stress)
app.command("presets")(cli_look.presets)
app.command("validate", epilog=EXIT_CODES)(cli_look.validate)
app.command("stress", epilog=EXIT_CODES)(guarded(stress))
app.command("doctor", epilog=EXIT_CODES)(cli_look.doctor)


def main() -> None:
    """The entry point of the console script."""
    app()


if __name__ == "__main__":
    main()
