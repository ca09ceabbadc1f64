"""What happens to an experiment's data before a run: they are found, and decoded in a process of their own."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

from fedemu.ops.data.cache import read
from fedemu.ops.data.corpora import source_of
from fedemu.ops.data.source import Place, entry_of, locate
from fedemu.ops.experiment import Experiment
from fedemu.ops.extras import require_flwr
from fedemu.ops.homes import cache_folder, data_folder
from fedemu.protocol.errors import DataError
from fedemu.protocol.host.starting import starting
from fedemu.protocol.wording import ending


def find_data(experiment: Experiment) -> Place:
    """Find the experiment's data set, and what divides it. Nothing is read.

    Raises DataError if its name leads nowhere, and ConfigurationError if an optional package is missing.
    """
    if experiment.data.partition.kind == "flwr":
        require_flwr()
    return _place(experiment)


def _place(experiment: Experiment) -> Place:
    return locate(experiment.data.dataset, data_folder(os.environ))


def entry_here(experiment: Experiment) -> Path:
    """The folder of this machine's cache for the experiment's data. Raises DataError if their name leads nowhere."""
    source = source_of(experiment.data, experiment.stream)
    return entry_of(source, _place(experiment), cache_folder(os.environ))


def at_hand(experiment: Experiment) -> bool:
    """Whether this machine has the data: decoded, or as files. What would have to come from the hub does not count."""
    try:
        return _place(experiment).kind != "hub" or read(entry_here(experiment)) is not None
    except DataError:
        return False


def decode_apart(experiment: Experiment, say: Callable[[str], None]) -> None:
    """Decode the experiment's data, unless this machine's cache holds them. Raises DataError if that fails.

    It happens in another process, because decoding imports much and leaves much in memory. ``say`` gets a line for
    people before it begins. If the disk of the cache is full, that is a FedemuError, and a ConfigurationError if no
    process can be started.
    """
    if read(entry_here(experiment)) is not None:
        return
    # It imports asyncio, which would delay every command.
    from fedemu.device.machine.prepare import SAID, command, error_on

    say(f"decoding the data set {experiment.data.dataset}, once on this machine")
    with tempfile.NamedTemporaryFile(prefix="fedemu-", suffix=".json") as file:
        file.write(experiment.to_bytes())
        file.flush()
        with starting():
            process = subprocess.Popen(
                # The data of the user's own experiment may be made by any code.
                command("fedemu.ops.data.corpora:prepare", file.name, None),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                text=True,
                process_group=0,
            )
        try:
            output, _ = process.communicate()
        except BaseException:
            process.kill()
            process.wait()
            raise
    said = output.strip().rpartition("\n")[2]
    if said and process.returncode == SAID:
        raise error_on(said)
    # Without a word the process was not done: the user's own code has ended it.
    if not said or process.returncode != 0:
        raise DataError(
            f"the process that decodes {experiment.data.dataset} {ending(process.returncode)} before it was done; "
            "see the lines above"
        )
