"""An experiment's data before anything reads them: where they are, and decoding them in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from fedemu.ops.data.cache import cache_folder, read
from fedemu.ops.data.corpora import source_of
from fedemu.ops.data.source import Place, entry_of, locate
from fedemu.ops.experiment import Experiment
from fedemu.protocol.errors import DataError

_SAID = 1
"""How ``fedemu.device.machine.prepare`` ends after an error that it has told on stdout."""


def find_data(experiment: Experiment) -> Place:
    """Where the experiment's data set is; raises DataError where its name leads nowhere. Nothing is read."""
    folder = os.environ.get("FEDEMU_DATA")
    return locate(experiment.data.dataset, Path(folder).expanduser() if folder else None)


def decode_apart(experiment: Experiment, say: Callable[[str], None]) -> None:
    """See to it that this machine's cache holds the experiment's data; raises DataError where they can't be decoded.

    Another process takes along what decoding imports and leaves in memory.
    """
    source = source_of(experiment.data, experiment.stream.columns)
    if read(entry_of(source, find_data(experiment), cache_folder(os.environ))) is not None:
        return
    say(f"decoding the data set {experiment.data.dataset}, once on this machine")
    with tempfile.NamedTemporaryFile(prefix="fedemu-", suffix=".json") as file:
        file.write(experiment.to_bytes())
        file.flush()
        process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "fedemu.device.machine.prepare",
                "fedemu.ops.data.corpora:prepare",
                file.name,
                str(os.getpid()),
            ],
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
    if process.returncode == _SAID:
        raise DataError(output.strip().rpartition("\n")[2])
    if process.returncode != 0:
        raise DataError(f"decoding {experiment.data.dataset} ended with code {process.returncode}; see the lines above")
