"""The extras: packages that only some experiments and commands need, and that ``pip install fedemu`` leaves out."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Final

from fedemu.protocol.errors import ConfigurationError

EXTRAS: Final[Mapping[str, str]] = {
    "language": "texts",
    "flwr": "partitions of the kind flwr",
    "search": "fedemu sweep --search",
    "ray": "--on ray",
    "tensorboard": "tracking to tensorboard",
    "mlflow": "tracking to mlflow",
    "wandb": "tracking to wandb",
}
"""The use of each extra."""


def require(module: str, extra: str, need: str, instead: str = "") -> None:
    """Raise ConfigurationError if a module that an extra brings is not installed. Nothing is imported.

    ``need`` is what needs it, and ``instead`` what can be done without it.
    """
    found = find_spec(module)
    if found is None or found.origin is None:  # no origin: a folder of this name, such as the one that wandb makes
        package = module.replace("_", "-")
        otherwise = f", or {instead}" if instead else ""
        raise ConfigurationError(
            f"{need} needs the package {package}; install it with pip install 'fedemu[{extra}]'{otherwise}"
        )


def require_flwr() -> None:
    """Raise ConfigurationError if the package that draws partitions of the kind flwr is not installed."""
    require("flwr_datasets", "flwr", "data.partition.kind = 'flwr'", "choose another kind of partition")
