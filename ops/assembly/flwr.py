"""Partitions drawn by flwr-datasets, an optional package: ``pip install 'fedemu[flwr]'``.

Importing flwr-datasets takes seconds, so it is imported only if an experiment has such a partition.
"""

from __future__ import annotations

import inspect
import os
import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedemu.algorithms.data.flat import Indices
from fedemu.ops.data.source import LABEL
from fedemu.ops.extras import require_flwr
from fedemu.protocol.errors import ConfigurationError, DataError

_NOT_ROWS = ("Partitioner", "VerticalEvenPartitioner", "VerticalSizePartitioner")


def flwr_shares(
    labels: NDArray[np.int64],
    columns: Mapping[str, NDArray[Any]],
    devices: int,
    name: str,
    options: Mapping[str, Any],
    seed: int,
) -> list[Indices]:
    """Divide samples by the partitioner called ``name``, which is constructed with ``options``.

    ``labels`` are 0 to classes - 1, ``[samples]``, and each of ``columns`` is ``[samples]`` as well. Returns for each
    device the ascending positions of its samples. Arguments that the partitioner takes and ``options`` does not name
    are filled in: ``num_partitions`` is the number of devices, ``partition_by`` the label, ``seed`` is ``seed``. Some
    partitioners leave samples out.

    Raises ConfigurationError if the package is missing or has no such partitioner or option, and DataError if it
    cannot divide these samples.
    """
    require_flwr()
    os.environ["FLWR_TELEMETRY_ENABLED"] = "0"  # the package sends no usage reports to its makers
    from datasets import Dataset  # type: ignore[import-untyped]
    from flwr_datasets import partitioner

    names = [known for known in partitioner.__all__ if known not in _NOT_ROWS]
    if name not in names:
        raise ConfigurationError(f"flwr-datasets has no partitioner {name!r} for samples; it has {', '.join(names)}")
    make = getattr(partitioner, name)
    takes = inspect.signature(make).parameters
    if unknown := [option for option in options if option not in takes]:
        raise ConfigurationError(f"{name} of flwr-datasets takes {', '.join(takes)}, but not {', '.join(unknown)}")
    given = {"num_partitions": devices, "partition_by": LABEL, "seed": seed} | dict(options)
    table = {**columns, LABEL: labels}
    row = "row"
    while row in table:  # a column may have this name, and the partitioner may go by it
        row += "_"
    table[row] = np.arange(len(labels))
    with warnings.catch_warnings():
        # The library warns whenever it repeats a draw. When it gives up, it raises an error as well.
        warnings.simplefilter("ignore")
        try:
            drawn = make(**{option: value for option, value in given.items() if option in takes})
            drawn.dataset = Dataset.from_dict(table)
            count = drawn.num_partitions
            if count != devices:
                raise ConfigurationError(f"{name} of flwr-datasets makes {count} devices of these data, not {devices}")
            shares = [np.sort(drawn.load_partition(device).with_format("numpy")[row][:]) for device in range(devices)]
        except ConfigurationError:
            raise
        except Exception as error:
            words = " ".join(str(error).split()) or type(error).__name__
            raise DataError(f"{name} of flwr-datasets can't divide {len(labels)} samples: {words}") from error
    if empty := sum(not len(share) for share in shares):
        raise DataError(f"{name} of flwr-datasets leaves {empty} of {devices} devices without samples")
    return [np.asarray(share, dtype=np.int64) for share in shares]
