"""The options that several commands have in common, and how they become overrides of an experiment."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from fedemu.ops.cli.shell import complete
from fedemu.ops.experiment.toml_text import toml_value


class Format(StrEnum):
    """The formats of data on stdout."""

    TEXT = "text"
    JSON = "json"


class ComparisonFormat(StrEnum):
    """The formats of data on stdout, and those of figures for papers."""

    TEXT = "text"
    JSON = "json"
    PDF = "pdf"
    SVG = "svg"
    PNG = "png"


class FigureFormat(StrEnum):
    """The formats of figures for papers."""

    PDF = "pdf"
    SVG = "svg"
    PNG = "png"


class Transport(StrEnum):
    """The ways in which processes exchange messages."""

    ZMQ = "zmq"
    MEMORY = "memory"


class LogLevel(StrEnum):
    """The levels of log lines, the least important one first."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class DeviceType(StrEnum):
    """The kinds of processors on which trainers compute."""

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


Experiment = Annotated[
    str | None,
    typer.Argument(
        metavar="EXPERIMENT",
        help="A TOML file, or the name of a preset (see `fedemu presets`). Default: digits.",
        show_default=False,
        autocompletion=complete.experiments,
    ),
]
Out = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        help="The run directory to make. It must be new or empty. Default: runs/NAME-N.",
        show_default=False,
    ),
]
Seed = Annotated[int | None, typer.Option(metavar="N", help="The seed of the experiment.", show_default=False)]
Rounds = Annotated[int | None, typer.Option(metavar="N", help="The number of rounds.", show_default=False)]
Devices = Annotated[
    int | None, typer.Option(metavar="N", help="The number of devices of the fleet.", show_default=False)
]
Resume = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        help="Continue the run in DIR with its config.toml. Of the experiment only --rounds may be changed, to a "
        "larger number.",
        show_default=False,
        autocompletion=complete.run_directories,
    ),
]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Override one setting, as in local.lr=0.05. Can be repeated.",
        show_default=False,
        autocompletion=complete.overrides,
    ),
]
Bind = Annotated[
    str | None,
    typer.Option(
        metavar="ADDRESS", help="The address of the coordinator, as in tcp://0.0.0.0:5577.", show_default=False
    ),
]
MetricsPort = Annotated[
    int | None,
    typer.Option(metavar="PORT", help="Serve Prometheus metrics on this port.", min=1, max=65535, show_default=False),
]
MetricsAddress = Annotated[
    str | None,
    typer.Option(
        metavar="ADDRESS",
        help="The address of this machine at which metrics are served. Default: 127.0.0.1, which only this machine "
        "reaches. 0.0.0.0 is reached from everywhere.",
        show_default=False,
    ),
]
LogLevelOption = Annotated[
    LogLevel | None,
    typer.Option(
        metavar="debug|info|warning|error",
        help="The least important level that is logged. Default: info.",
        show_default=False,
    ),
]
FormatOption = Annotated[
    Format, typer.Option("--format", metavar="text|json", help="The format of the data on stdout.")
]
Figures = Annotated[
    Path | None,
    typer.Option(
        metavar="FOLDER",
        help="Write every plot as a figure for a paper into this folder, and the data behind each as CSV.",
        show_default=False,
    ),
]
FigureFormats = Annotated[
    list[FigureFormat] | None,
    typer.Option(
        "--format",
        metavar="pdf|svg|png",
        help="The format of the figures. Can be repeated. Default: pdf.",
        show_default=False,
    ),
]
Widths = Annotated[
    list[str] | None,
    typer.Option(
        "--width",
        metavar="single|double|INCHES",
        help="The width of the figures: one column (3.25 inches), two (6.75 inches), or a number of inches. "
        "Can be repeated. Default: single.",
        show_default=False,
    ),
]
FontSize = Annotated[
    float | None,
    typer.Option(
        metavar="POINTS", help="The size of the figures' texts. Default: 8.", min=4, max=24, show_default=False
    ),
]
Titles = Annotated[bool, typer.Option("--titles", help="Write the titles into the figures. Papers have captions.")]
Trainers = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        help="The number of trainer processes. Default: one per core, or one per GPU.",
        min=0,
        show_default=False,
    ),
]
PerProcess = Annotated[
    int | None,
    typer.Option(
        metavar="K",
        help="The number of devices in each device process. Default: 1, or 50 awake ones where devices sleep.",
        min=1,
        show_default=False,
    ),
]
DeviceTypeOption = Annotated[
    DeviceType | None,
    typer.Option(
        "--device-type",
        metavar="auto|cpu|cuda",
        help="Where trainers and server jobs compute. Default: auto, which is CUDA if there is a GPU.",
        show_default=False,
    ),
]


Page = Annotated[
    bool,
    typer.Option(
        "--page",
        help="Serve a page that shows the run in the browser. Prints its address, which only this machine reaches.",
    ),
]
Keys = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        help="The folder of keys. Default: FEDEMU_KEYS, or fedemu/keys in the user's configuration folder.",
        show_default=False,
    ),
]
Insecure = Annotated[
    bool | None,
    typer.Option(
        "--insecure",
        help="Listen where other machines can reach it, without keys: whoever does can read, join and disturb the run.",
        show_default=False,
    ),
]


def given(context: typer.Context, name: str) -> bool:
    """Whether the parameter of this name stands on the command line."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def overrides_of(settings: list[str] | None, **options: object) -> list[str]:
    """The overrides ``key=value`` of a command: first those of ``--set``, then the other options, which win.

    An option is named by its key with ``__`` for the dot (``runtime__bind``). None means that it was not given.
    """
    given = {key.replace("__", "."): value for key, value in options.items() if value is not None}
    texts = {key: toml_value(str(value) if isinstance(value, Path) else value) for key, value in given.items()}
    return [*(settings or []), *(f"{key}={text}" for key, text in texts.items())]
