"""The trackers by name, and whether a name can be used."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from fedemu.ops.extras import require
from fedemu.ops.track.tracker import Tracker
from fedemu.protocol.errors import ConfigurationError
from fedemu.protocol.host.named import load


class Kind(NamedTuple):
    """Where a tracker is, and which module its extra brings."""

    place: str
    needs: str


KINDS: Mapping[str, Kind] = {
    "tensorboard": Kind("fedemu.ops.track.tensorboard:TensorBoard", "tensorboardX"),
    "mlflow": Kind("fedemu.ops.track.mlflow:MLflow", "mlflow"),
    "wandb": Kind("fedemu.ops.track.wandb:WeightsAndBiases", "wandb"),
}


def check(names: Iterable[str]) -> None:
    """Raise ConfigurationError if one of ``names`` is no tracker, or if its extra is not installed."""
    for name in names:
        if name in KINDS:
            require(KINDS[name].needs, name, f"tracking to {name}", f"leave {name} out of track.to")
        elif ":" not in name:
            raise ConfigurationError(
                f'there is no tracker "{name}"; choose from {", ".join(KINDS)}, or name your own as module:Name'
            )
        else:
            load(name)


def tracker(name: str) -> Tracker:
    """A new tracker. Raises ConfigurationError if there is none of this name."""
    check([name])
    made: Callable[[], Tracker] = load(KINDS[name].place if name in KINDS else name)
    return made()
