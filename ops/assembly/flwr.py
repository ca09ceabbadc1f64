"""Partitions drawn by flwr-datasets. Importing it takes seconds, so only an experiment that asks for one does."""

from __future__ import annotations

import inspect
import os
import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

# Nothing is reported to its makers.
os.environ["FLWR_TELEMETRY_ENABLED"] = "0"

from datasets import Dataset  # type: ignore[import-untyped]
from flwr_datasets import partitioner as flwr  # type: ignore[import-untyped]

from fedemu.algorithms.data.partition import Indices
from fedemu.ops.data.source import LABEL
from fedemu.protocol.errors import ConfigurationError, DataError

_INDEX = "index"
_NOT_ROWS = ("Partitioner", "VerticalEvenPartitioner", "VerticalSizePartitioner")


def flwr_shares(
    labels: NDArray[np.int64],
    columns: Mapping[str, NDArray[Any]],
    devices: int,
    name: str,
    options: Mapping[str, Any],
    seed: int,
) -> list[Indices]:
    """The shares of the partitioner called ``name``, constructed with ``options``.

    What it takes and is not given is filled in: ``num_partitions`` is the number of devices, ``partition_by`` the
    label, ``seed`` the experiment's. Labels are 0 to classes - 1. Some partitioners leave samples out.
    """
    names = [known for known in flwr.__all__ if known not in _NOT_ROWS]
    if name not in names:
        raise ConfigurationError(f"flwr-datasets has no partitioner {name!r} for samples; it has {', '.join(names)}")
    make = getattr(flwr, name)
    takes = inspect.signature(make).parameters
    if unknown := [option for option in options if option not in takes]:
        raise ConfigurationError(f"{name} of flwr-datasets takes {', '.join(takes)}, but not {', '.join(unknown)}")
    given = {"num_partitions": devices, "partition_by": LABEL, "seed": seed} | dict(options)
    table = {LABEL: labels, **columns, _INDEX: np.arange(len(labels))}
    with warnings.catch_warnings():
        # It warns at every draw that it takes again, and says so once more when it gives up.
        warnings.simplefilter("ignore")
        try:
            drawn = make(**{option: value for option, value in given.items() if option in takes})
            drawn.dataset = Dataset.from_dict(table)
            count = drawn.num_partitions
            if count != devices:
                raise ConfigurationError(f"{name} of flwr-datasets makes {count} devices of these data, not {devices}")
            shares = [
                np.sort(drawn.load_partition(device).with_format("numpy")[_INDEX][:]) for device in range(devices)
            ]
        except ConfigurationError:
            raise
        except Exception as error:
            words = " ".join(str(error).split()) or type(error).__name__
            raise DataError(f"{name} of flwr-datasets can't divide {len(labels)} samples: {words}") from error
    if empty := sum(not len(share) for share in shares):
        raise DataError(f"{name} of flwr-datasets leaves {empty} of {devices} devices without samples")
    return [np.asarray(share, dtype=np.int64) for share in shares]
