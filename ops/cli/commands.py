"""The commands of ``fedemu``. The other files of this room hold them, and here they get their names.

Neither torch nor matplotlib is imported before a command needs it to compute or to draw.
"""

from __future__ import annotations

import os
from importlib import metadata
from typing import Annotated, Any

import typer

from fedemu.ops.cli import alone as cli_alone
from fedemu.ops.cli import bench as cli_bench
from fedemu.ops.cli import compare as cli_compare
from fedemu.ops.cli import engines as cli_engines
from fedemu.ops.cli import keys as cli_keys
from fedemu.ops.cli import look as cli_look
from fedemu.ops.cli import ls as cli_ls
from fedemu.ops.cli import presets as cli_presets
from fedemu.ops.cli import run as cli_run
from fedemu.ops.cli import stress as cli_stress
from fedemu.ops.cli import sweep as cli_sweep
from fedemu.ops.cli.shell import complete as cli_complete
from fedemu.ops.cli.shell.usage import Command, Commands
from fedemu.ops.experiment.sources import unknown_variables
from fedemu.ops.running.codes import CODES, IN_WORDS
from fedemu.ops.running.exits import complain

_HELP = {"help_option_names": ["-h", "--help"]}


def _epilog(codes: str, *examples: str) -> str:
    """The end of a help text: the exit codes, and examples. typer leaves the lines after a backspace as they are."""
    title = "Example:" if len(examples) == 1 else "Examples:"
    return "\n\n".join([codes, "\b\n" + "\n".join([title, *(f"  {example}" for example in examples)])])


app = typer.Typer(
    cls=Commands,
    name="fedemu",
    help="Emulates a fleet of federated-learning devices: a coordinator, hundreds of processes, churn, recovery.",
    epilog=_epilog(
        CODES,
        "fedemu run digits-small          # a first run: seconds",
        "fedemu presets                   # the experiments and methods that come with fedemu",
        "fedemu init mine.toml            # an experiment of your own, to be changed",
        "fedemu run mine.toml",
    ),
    context_settings=_HELP,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(metadata.version("fedemu"))
        raise typer.Exit


_READ_NO_SETTINGS = (
    *("ls", "watch", "report", "export", "compare", "presets", "init", "schema", "doctor", "completion"),
    *("keys", "stress", "bench"),
)
"""Commands for which a mistyped variable is no mistake. They only tell it; the others refuse it."""


@app.callback()
def _fedemu(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and stop.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    if context.invoked_subcommand in _READ_NO_SETTINGS:
        for sentence in unknown_variables(os.environ):
            complain(f"warning: {sentence}")


_COMMANDS = (
    (
        "run",
        cli_run.run,
        "Run a whole experiment on this machine.",
        (
            "fedemu run churn --rounds 5",
            "fedemu run digits+wsm --seeds 0-2 --out wsm",
            "fedemu run --resume runs/churn-1",
        ),
    ),
    (
        "coordinator",
        cli_alone.coordinator,
        "Run a coordinator, and wait for devices.",
        ("fedemu coordinator digits", "fedemu coordinator digits --bind tcp://0.0.0.0:5577   # after fedemu keys new"),
    ),
    (
        "device",
        cli_alone.device,
        "Run the devices of one machine.",
        (
            "fedemu device --n 300",
            "fedemu device --n 150 --connect tcp://192.168.0.7:5577 --server-key lab1.key",
        ),
    ),
    (
        "slurm",
        cli_engines.slurm,
        "Write a job of Slurm that runs an experiment on several nodes.",
        ("fedemu slurm digits --nodes 4 --time 1:00:00", "fedemu slurm mine.toml --nodes 8 --gpus-per-node 2 --submit"),
    ),
    (
        "edge",
        cli_alone.edge,
        "Pass messages between a coordinator and many machines, and add up results.",
        (
            "fedemu edge --bind tcp://127.0.0.1:5578",
            "fedemu edge --connect tcp://A:5577 --server-key a.key --bind tcp://0.0.0.0:5578",
        ),
    ),
    (
        "kubernetes",
        cli_engines.kubernetes,
        "Write the manifests that run an experiment on Kubernetes.",
        ("fedemu kubernetes digits --machines 4", "fedemu kubernetes mine.toml --machines 8 --gpus 1 --data datasets"),
    ),
    (
        "sweep",
        cli_sweep.sweep,
        "Run a grid of settings and seeds, or many experiments, and compare them.",
        (
            "fedemu sweep digits --grid local.lr=0.01,0.1 --seeds 0-2 --out runs/rates",
            "fedemu sweep mine.toml --out runs/mine --at-once 2",
        ),
    ),
    (
        "suite",
        cli_sweep.suite,
        "Run every method on some streams, and rank them.",
        ("fedemu suite forgetting --size small", "fedemu suite forgetting --size tiny --method my_module:Mine"),
    ),
    (
        "watch",
        cli_look.watch,
        "Show runs as a page in the browser while they go on.",
        ("fedemu watch runs/digits-1", "fedemu watch runs/digits-1 runs/digits-wsm-1"),
    ),
    ("ls", cli_ls.ls, "List the runs of a folder.", ("fedemu ls", "fedemu ls runs/rates --json")),
    (
        "report",
        cli_look.report,
        "Write the report of a run.",
        ("fedemu report runs/digits-1", "fedemu report runs/digits-1 --figures paper"),
    ),
    (
        "export",
        cli_look.export,
        "Tell TensorBoard, MLflow or Weights & Biases of a run.",
        ("fedemu export runs/digits-1 --to tensorboard --out runs/tensorboard",),
    ),
    (
        "compare",
        cli_compare.compare,
        "Put runs in one table and one set of plots.",
        ("fedemu compare runs/digits-1 runs/digits-wsm-1 --out compare",),
    ),
    (
        "presets",
        cli_presets.presets,
        "List the experiments and methods that come with fedemu, or print one.",
        ("fedemu presets", "fedemu presets churn > mine.toml"),
    ),
    (
        "init",
        cli_presets.init,
        "Write a commented experiment to start from.",
        ("fedemu init mine.toml", "fedemu init drift.toml --from digits-drift"),
    ),
    (
        "schema",
        cli_presets.schema,
        "Print the JSON Schema of experiments, for editors.",
        ("fedemu schema --out experiment.schema.json",),
    ),
    (
        "validate",
        cli_look.validate,
        "Check an experiment without running it.",
        ("fedemu validate mine.toml --set local.lr=0.05",),
    ),
    ("stress", cli_stress.stress, "Try to break a real fleet.", ("fedemu stress --short",)),
    (
        "bench",
        cli_bench.bench,
        "Measure the fleet, the wire, training and the whole system.",
        ("fedemu bench wire --quick",),
    ),
    ("doctor", cli_look.doctor, "Check that this machine can run a fleet.", ("fedemu doctor",)),
    (
        "completion",
        cli_complete.completion,
        "Print what makes a shell complete commands, options and presets.",
        ('eval "$(fedemu completion bash)"',),
    ),
)
for _name, _command, _summary, _examples in _COMMANDS:
    app.command(_name, cls=Command, short_help=_summary, epilog=_epilog(IN_WORDS, *_examples), context_settings=_HELP)(
        _command
    )
_keys = typer.Typer(
    cls=Commands,
    help="Let machines join your coordinators, and keep strangers out.",
    epilog=_epilog(IN_WORDS, *cli_keys.EXAMPLES),
    context_settings=_HELP,
    no_args_is_help=True,
    rich_markup_mode=None,
)
for _name, _of_keys, _summary, _examples in cli_keys.COMMANDS:
    _keys.command(
        _name, cls=Command, short_help=_summary, epilog=_epilog(IN_WORDS, *_examples), context_settings=_HELP
    )(_of_keys)
app.add_typer(_keys, name="keys", short_help="Make keys, and say which machines may join.")
command: Any = typer.main.get_command(app)
"""``app``, put together: it can be called again and again with the words of a command line.

To put it together takes as long as most commands do.
"""
