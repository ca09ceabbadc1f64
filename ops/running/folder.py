"""The run directory: claimed before anything starts, reopened by ``--resume``, and given back without results."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib import metadata
from pathlib import Path
from typing import Any

from fedemu.coordinator.fleet.journal import LEASES
from fedemu.coordinator.record.json_lines import read_object
from fedemu.coordinator.record.records import newest_record, recorded_rounds
from fedemu.coordinator.record.row import read_rows
from fedemu.coordinator.record.run import read_summary
from fedemu.coordinator.record.run_directory import alone_in, claim_folder, require_kinds
from fedemu.device.machine.lease import sizes_with_own_states
from fedemu.ops.experiment import Experiment, Runtime
from fedemu.ops.experiment.sources import CONFIG_FILE, check_resume, read_frozen, write_frozen
from fedemu.ops.experiment.traces import TRACES_FILE
from fedemu.ops.experiment.unchanged import require_unchanged
from fedemu.ops.terminal import say
from fedemu.protocol.errors import ConfigurationError, FedemuError
from fedemu.protocol.host.files import usable
from fedemu.protocol.host.paths import exists, is_file, is_folder
from fedemu.protocol.wording import counted

RUNS = Path("runs")
PLACES = "places.json"
"""The file of a run directory in which an engine keeps the records of the leases of its places."""
_ANOTHER = "choose another folder with --out"
_before_growth: dict[Path, Experiment] = {}
"""The experiments of runs that this process has given more rounds, as they were."""


def claim(experiment: Experiment, out: Path | None) -> Path:
    """Make a new run directory that holds the frozen experiment: ``out``, or the first free ``runs/NAME-N``.

    Raises ConfigurationError if ``out`` exists already or cannot be written, and FedemuError if the disk is full.
    """
    directory = out if out is not None else next_free(experiment.name)
    claim_folder(directory)
    try:
        with usable(directory, _ANOTHER):
            write_frozen(experiment, directory)
    except BaseException:  # also Ctrl-C, while the disk is waited for
        give_back(directory)
        raise
    return directory


def holds_run(directory: Path) -> bool:
    """Whether a run lies in a folder: its experiment, or a checkpoint from which ``reopen`` writes it back."""
    return is_file(directory / CONFIG_FILE) or newest_record(directory / "checkpoint") is not None


def clear_claim(directory: Path) -> None:
    """Remove the folder of a run if a killed process has made it, and it does not hold the experiment yet.

    A folder looks the same while another process is claiming it, whose claim then fails.
    """
    if not is_folder(directory) or is_file(directory / CONFIG_FILE):
        return
    if all(one.name.startswith((".", CONFIG_FILE, TRACES_FILE)) for one in directory.iterdir()):
        shutil.rmtree(directory, ignore_errors=True)


def reopen(directory: Path, overrides: Sequence[str], environment: Mapping[str, str]) -> tuple[Experiment, Runtime]:
    """Look at a run to continue it. Returns its experiment, perhaps with more rounds, and the runtime.

    More rounds are written by ``keep_grown``, when everything else was checked. Raises ConfigurationError if it is no
    run directory, if something else is where it has its files and folders, if its experiment was changed or damaged
    since the run began or is one of another version of fedemu, or if other settings are to change.
    """
    require_kinds(directory)
    unchanged = require_unchanged(directory, say)
    try:
        frozen = read_frozen(directory)
    except ConfigurationError as error:
        if not unchanged:
            raise
        began = version_of(directory)
        which = f"version {began}" if began not in ("", metadata.version("fedemu")) else "another version"
        raise ConfigurationError(
            f"{which} of fedemu began the run in {directory}, and this one cannot read its settings; go on "
            f"with that version: {error}"
        ) from None
    return check_resume(frozen, overrides, environment)


def version_of(directory: Path) -> str:
    """The version of fedemu that began a run. Empty before its first checkpoint, and if no file of the run tells."""
    newest = newest_record(directory / "checkpoint")
    ways = [] if newest is None else newest["record"].get("compute", {}).get("coordinator", [])
    if ways:
        return str(ways[0].get("fedemu", ""))
    with suppress(ConfigurationError, OSError):  # a damaged one is named elsewhere
        known = read_summary(directory).get("versions", {})
        return str(known.get("fedemu", "")) if isinstance(known, dict) else ""
    return ""


@contextmanager
def naming_version(directory: Path) -> Iterator[None]:
    """A ConfigurationError of the block names the version that began the run, if that is another one than this.

    That version may have taken what this one refuses.
    """
    try:
        yield
    except ConfigurationError as error:
        if (began := version_of(directory)) in ("", mine := metadata.version("fedemu")):
            raise
        raise ConfigurationError(
            f"{error}; version {began} of fedemu began the run in {directory}, and this is version {mine}: if that "
            "one took it, go on with it"
        ) from error


def require_own_states(directory: Path, experiment: Experiment, runtime: Runtime) -> None:
    """Raise ConfigurationError if a run cannot go on in this way without losing the own states of its devices.

    A machine finds them by its number of devices. Everything in one process is one machine, whatever ``tree.edges``.
    An engine has divided them among its places.
    """
    kept = sizes_with_own_states(directory / "devices")
    if runtime.on:
        if kept:
            raise ConfigurationError(f"the devices of {directory} have states of their own here; go on without --on")
        places = len(read_places(directory))
        if places and min(runtime.nodes or places, experiment.fleet.devices) != places:
            raise ConfigurationError(
                f"the devices of {directory} are divided among {counted(places, 'place')}, which keep their own "
                f"states; go on with --nodes {places}"
            )
        return
    if not kept and read_places(directory) and _with_own_states(directory):
        raise ConfigurationError(
            f"the devices of {directory} have states of their own at the nodes of a Ray cluster; go on with --on ray"
        )
    if not experiment.tree.edges:
        return
    in_memory = runtime.transport == "memory"
    each, over = divmod(experiment.fleet.devices, 1 if in_memory else experiment.tree.edges[-1])
    sizes = {each, each + 1} if over else {each}
    if kept and not kept & sizes:
        before, now = ("zmq", "memory") if in_memory else ("memory", "zmq")
        raise ConfigurationError(
            f"the devices of {directory} have states of their own at other machines than with the transport {now}, "
            f"because of tree.edges; go on with --transport {before}"
        )


def last_kept(directory: Path) -> int:
    """The round after which a run goes on: that of its newest checkpoint, 0 if there is none.

    A round may have a row without a checkpoint, as on a full disk.
    """
    return max(recorded_rounds(directory / "checkpoint"), default=0)


def read_places(directory: Path) -> dict[str, Any]:
    """The records of the leases of each place at which an engine has put devices of a run, empty if none has.

    Raises ConfigurationError for a damaged file.
    """
    file = directory / PLACES
    return read_object(file.read_bytes(), file) if is_file(file) else {}


def _with_own_states(directory: Path) -> bool:
    """Whether a run has devices with own states, as its newest checkpoint tells."""
    newest = newest_record(directory / "checkpoint")
    return newest is not None and bool(newest["record"].get("roster", {}).get("states"))


def keep_grown(directory: Path, experiment: Experiment) -> None:
    """Write the experiment of a run anew if it has got more rounds.

    Raises ConfigurationError if another coordinator is at work in the directory, and then changes nothing.
    """
    before = read_frozen(directory)
    if experiment != before:
        with alone_in(directory):
            write_frozen(experiment, directory)
        _before_growth[directory] = before


def require_alone(directory: Path) -> None:
    """Raise ConfigurationError if another coordinator is at work in the run, before anything of it is touched."""
    with alone_in(directory):
        pass


def take_back_growth(folder: Path | None = None) -> None:
    """Undo what ``keep_grown`` has written in this process, in every run of which no further round was played.

    With a ``folder`` only in its run, or in the runs of its group: threads may have others going on.
    """
    for directory in _grown(folder):
        before = _before_growth.pop(directory)
        with suppress(FedemuError), alone_in(directory):
            if _played(directory) <= before.rounds:
                write_frozen(before, directory)


def accept_growth(folder: Path) -> None:
    """Nobody will take back what ``keep_grown`` has written in the run of this folder, or in the runs of its group."""
    for directory in _grown(folder):
        _before_growth.pop(directory, None)


def _grown(folder: Path | None) -> list[Path]:
    return [directory for directory in list(_before_growth) if folder in (None, directory, directory.parent)]


def give_back(directory: Path) -> bool:
    """Remove a claimed run directory without results. Returns False if it holds some, which are kept.

    Results are rows, and what a checkpoint has beside the leases of devices that have enrolled. A directory is kept,
    too, if the system does not let it be seen.
    """
    rows, checkpoint = directory / "metrics.jsonl", directory / "checkpoint"
    try:
        if exists(rows) and rows.stat().st_size:
            return False
        if exists(checkpoint) and any(file.name != LEASES for file in checkpoint.iterdir()):
            return False
    except OSError:
        return False
    shutil.rmtree(directory, ignore_errors=True)
    if directory.parent == RUNS:
        with suppress(OSError):  # other runs are in it
            RUNS.rmdir()
    return True


def next_free(name: str) -> Path:
    """Make the first folder ``runs/NAME-N`` that is not there yet, whoever else does so at the same time."""
    number = 1
    while True:
        directory = RUNS / f"{name}-{number}"
        with usable(directory, _ANOTHER):
            try:
                directory.mkdir(parents=True)
            except FileExistsError:
                number += 1
            else:
                return directory


def _played(directory: Path) -> int:
    """The number of rounds that were played. 0 if the rows are damaged: such a run is not resumed."""
    try:
        return len(read_rows(directory))
    except ConfigurationError:
        return 0
