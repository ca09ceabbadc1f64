"""The commands of ``fedemu``. The other files of this room hold them, and here they get their names.

Neither torch nor matplotlib is imported before a command needs it to compute or to draw.
"""

from __future__ import annotations

import sys
from importlib import metadata
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from fedemu.ops.cli import bench as cli_bench
from fedemu.ops.cli import compare as cli_compare
from fedemu.ops.cli import look as cli_look
from fedemu.ops.cli import run as cli_run
from fedemu.ops.cli import stress as cli_stress
from fedemu.ops.cli import sweep as cli_sweep
from fedemu.ops.running.codes import IN_WORDS
from fedemu.ops.running.exits import complain


class _Commands(TyperGroup):
    """The group of all commands. It reports wrong usage in one sentence, like every other mistake."""

    def main(self, *args: Any, standalone_mode: bool = True, **kwargs: Any) -> Any:
        kwargs["standalone_mode"] = False
        try:
            code = super().main(*args, **kwargs)
        except Exception as error:
            # What typer raises for wrong usage has this method in every version, and a public class only in the latest.
            if not hasattr(error, "format_message"):
                raise
            code = _usage(error)
        if standalone_mode:
            sys.exit(code)
        return code


def _usage(error: Any) -> int:
    """Tell what was wrong with the arguments, and return the exit code. Without any arguments, show the help."""
    said = error.format_message().strip().rstrip(".")
    if not sys.argv[1:] and said.startswith("Usage:"):
        error.show()
    else:
        command = error.ctx.command_path if error.ctx else "fedemu"
        complain(f"{said[:1].lower()}{said[1:]}; see {command} --help")
    return int(error.exit_code)


app = typer.Typer(
    cls=_Commands,
    name="fedemu",
    help="Emulates a fleet of federated-learning devices: a coordinator, hundreds of processes, churn, recovery.",
    epilog=IN_WORDS,
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


for _name, _command, _summary in (
    ("run", cli_run.run, "Run a whole experiment on this machine."),
    ("coordinator", cli_run.coordinator, "Run a coordinator, and wait for devices."),
    ("device", cli_run.device, "Run the devices of one machine."),
    ("sweep", cli_sweep.sweep, "Run many experiments and seeds, and compare them."),
    ("report", cli_look.report, "Write the report of a run."),
    ("compare", cli_compare.compare, "Put runs in one table and one set of plots."),
    ("presets", cli_look.presets, "List the experiments and methods that come with fedemu."),
    ("validate", cli_look.validate, "Check an experiment without running it."),
    ("stress", cli_stress.stress, "Try to break a real fleet."),
    ("bench", cli_bench.bench, "Measure the fleet, the wire, training and the whole system."),
    ("doctor", cli_look.doctor, "Check that this machine can run a fleet."),
):
    app.command(_name, short_help=_summary, epilog=IN_WORDS)(_command)
