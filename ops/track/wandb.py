"""Weights & Biases without a network: it writes a folder, which ``wandb sync`` sends when somebody wants that."""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from fedemu.coordinator.record.row import Row
from fedemu.ops.track.tracker import Ended, Gone, Memory, Tracked
from fedemu.ops.track.wandb_file import read
from fedemu.protocol.host.paths import exists

_DATA: Final = "WANDB_DATA_DIR"
"""The variable that names the folder in which wandb keeps copies of artifacts until they are sent. Its default is in
the home folder, where nobody would remove them."""


class WeightsAndBiases:
    """Writes a run of ``project`` into ``out``. When a run goes on, there is one more folder with the same id.

    Nothing makes wandb write all that it was told before it ends. So after a kill, its files say what it has to be told
    again.
    """

    def __init__(self) -> None:
        # A run tells nobody outside of this machine what it does. This has to be set before the import.
        os.environ["WANDB_MODE"] = "offline"
        os.environ["WANDB_ERROR_REPORTING"] = "false"
        self._raises = logging.raiseExceptions
        logging.raiseExceptions = False  # on a full disk each line of its own log would print a traceback
        self._wandb: Any = import_module("wandb")  # an extra, which need not be installed
        self._begin: Callable[[], Any] = lambda: None
        self._begun: Any = None
        self._data = os.environ.get(_DATA)
        self._last = 0
        self._exit_code = 1
        """0 once the run is over and did what it was to do. Otherwise the run counts as failed there."""

    def begin(self, run: Tracked) -> Memory:
        self._last = run.told
        identity = str(run.memory.get("run") or secrets.token_hex(4))
        _check(run, identity)
        Path(run.out).mkdir(parents=True, exist_ok=True)
        os.environ.setdefault(_DATA, str(Path(run.out).resolve()))

        def begin() -> Any:
            _await_free_name(Path(run.out) / "wandb", identity)
            return self._wandb.init(
                project=run.project,
                name=run.name,
                id=identity,
                resume="allow",
                dir=run.out,
                mode="offline",
                config={**run.parameters, "experiment_digest": run.digest},
                settings=self._wandb.Settings(
                    console="off", silent=True, disable_git=True, disable_code=True, x_disable_stats=True
                ),
            )

        self._begin = begin
        if not run.memory:
            self._begun = self._begin()
        return {"run": identity, "told": run.told, "killed": run.memory.get("killed", "")}

    def row(self, row: Row, numbers: Mapping[str, float]) -> None:
        self._last = row.round
        self._run.log(dict(numbers), step=row.round)

    def flush(self) -> None:
        pass  # there is no way to, apart from the end

    def ended(self, end: Ended) -> None:
        self._exit_code = int(end.summary.get("outcome") not in ("completed", "diverged"))
        figures = {f"figures/{figure.stem}": self._wandb.Image(str(figure)) for figure in end.figures}
        self._run.log(figures, step=self._last)
        self._run.summary.update({f"end/{name}": str(end.summary.get(name)) for name in ("outcome", "model_digest")})
        if end.model is not None:
            model = self._wandb.Artifact(f"model-{self._run.id}", type="model")
            model.add_file(str(end.model))
            self._run.log_artifact(model)

    def close(self) -> None:
        if self._begun is not None:
            self._begun.finish(exit_code=self._exit_code)
            self._wandb.teardown()  # its own process writes the last bytes after that
        logging.raiseExceptions = self._raises
        if self._data is None:
            os.environ.pop(_DATA, None)

    @property
    def _run(self) -> Any:
        """The run there. One that goes on begins again when there is something new, and otherwise stays as it ended."""
        if self._begun is None:
            self._begun = self._begin()
        return self._begun


def _check(run: Tracked, identity: str) -> None:
    """Raise Gone if the last process that told the run was killed: its file lacks a part of what it was told.

    The rounds that were told when that process began are durable, also without a file: ``wandb clean`` removes folders
    that were sent. A killed process is found once, because the next one may have nothing to tell and leave no file.
    """
    files = sorted(Path(run.out).glob(f"wandb/offline-run-*-{identity}/run-{identity}.wandb"))  # in the order of time
    if not files or files[-1].parent.name == run.memory.get("killed"):
        return
    rounds, closed = zip(*map(read, files), strict=True)
    if not closed[-1]:
        told = max(int(run.memory.get("told", 0)), *rounds)
        raise Gone(told, {"run": identity, "told": told, "killed": files[-1].parent.name})


def _await_free_name(folder: Path, identity: str) -> None:
    """Return when no folder of this run has the name of the present second.

    Up to version 0.22 a folder is named by the second and the id. A run that goes on within the same second would get
    the folder of its first part, and replace its file.
    """
    while exists(folder / f"offline-run-{time.strftime('%Y%m%d_%H%M%S')}-{identity}"):
        time.sleep(0.05)
