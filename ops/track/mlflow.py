"""MLflow, by mlflow-skinny: metrics by round, parameters, tags, and the figures and the model as artifacts."""

from __future__ import annotations

import fcntl
import os
import re
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from hashlib import sha256
from importlib import import_module
from itertools import accumulate
from pathlib import Path
from typing import Any, Final

from fedemu.coordinator.record.row import Row, read_rows
from fedemu.ops.track.numbers import names_of, numbers_of
from fedemu.ops.track.tracker import Ended, Memory, Tracked
from fedemu.protocol.host.files import write_whole

_AT_ONCE: Final = 100
"""The parameters that one request to a server may have."""
_METRICS_AT_ONCE: Final = 1000
"""The metrics that it may have."""
_TRIES: Final = "3"
"""How often a server that does not answer is asked again, which takes about 15 s."""
_LONGEST: Final = 500
"""The most characters of a parameter's value."""
_LONGEST_NAME: Final = 200
"""The most bytes of a metric's name. MLflow takes 250 signs, and a folder 255 bytes."""
_FINISHED: Final = "finished_round"
"""The metric that tells which rounds were told. Its value is the round."""
SETTINGS: Final = "experiment.toml"
SUMMARY: Final = "end.json"
"""Two artifacts. Under the names that a run directory has for them, a folder of artifacts would be taken for a run."""
_STATUS: Final = {"completed": "FINISHED", "diverged": "FINISHED", "interrupted": "KILLED"}


class MLflow:
    """Writes a run of the experiment ``project`` to ``out``: a folder, or the address of a server."""

    def __init__(self) -> None:
        # A run tells nobody outside of this machine what it does. These have to be set before the imports.
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        # By default a server that does not answer is asked again for minutes.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", _TRIES)
        self._entities: Any = import_module("mlflow.entities")  # an extra, which need not be installed
        self._tracking: Any = import_module("mlflow.tracking")
        self._client: Any = None
        self._run = ""
        self._told = 0
        self._resumed = False
        self._names = _Names()

    def begin(self, run: Tracked) -> Memory:
        uri = run.out if "://" in run.out else Path(run.out).resolve().as_uri()
        self._client = self._tracking.MlflowClient(tracking_uri=uri)
        self._run = str(run.memory.get("run") or "")
        if self._run:
            self._resumed = True
            if "://" not in run.out:
                self._move_here(Path(run.out), uri)
            history = self._client.get_metric_history(self._run, _FINISHED)
            self._told = max((metric.step for metric in history), default=0)
            for row in read_rows(run.directory):  # they decide which names are taken
                if row.round <= max(self._told, run.told):
                    self._names.of({*numbers_of(row), _FINISHED}, names_of(row))
            return {"run": self._run}
        with nullcontext() if "://" in run.out else _alone_beside(Path(run.out)):
            experiment = self._experiment(run.project)
        made = self._client.create_run(experiment, run_name=run.name, tags={"experiment_digest": run.digest})
        self._run = made.info.run_id
        parameters = [
            self._entities.Param(_allowed(name), str(value)[:_LONGEST]) for name, value in run.parameters.items()
        ]
        for start in range(0, len(parameters), _AT_ONCE):
            self._client.log_batch(self._run, params=parameters[start : start + _AT_ONCE])
        if run.config:
            self._client.log_text(self._run, run.config, SETTINGS)
        return {"run": self._run}

    def _experiment(self, name: str) -> str:
        """The id of an experiment, which is made if it is not there. Other runs may do so at the same time."""
        found = self._client.get_experiment_by_name(name)
        if found is None:
            try:
                return str(self._client.create_experiment(name))
            except Exception:
                found = self._client.get_experiment_by_name(name)
                if found is None:
                    raise
        return str(found.experiment_id)

    def _move_here(self, store: Path, uri: str) -> None:
        """Name the folder ``store`` where it is now, if it was moved with its run: it names itself by whole paths.

        Artifacts would go to where it was, and make that folder anew.
        """
        info = self._client.get_run(self._run).info
        before = str(info.artifact_uri).removesuffix(f"/{info.experiment_id}/{self._run}/artifacts")
        if before != uri:
            for file in (*store.glob("*/meta.yaml"), *store.glob("*/*/meta.yaml")):
                write_whole(file, file.read_text(encoding="utf-8").replace(f"{before}/", f"{uri}/"))

    def row(self, row: Row, numbers: Mapping[str, float]) -> None:
        if row.round <= self._told:
            return  # the process before this one was killed after it had told the round
        if self._resumed:  # without a new row it stays as it ended
            self._client.update_run(self._run, status="RUNNING")
            self._resumed = False
        now = int(1000 * time.time())
        told = {**numbers, _FINISHED: float(row.round)}
        names = self._names.of(told, names_of(row))
        metrics = [self._entities.Metric(names[name], value, now, row.round) for name, value in told.items()]
        for start in range(0, len(metrics), _METRICS_AT_ONCE):
            self._client.log_batch(self._run, metrics=metrics[start : start + _METRICS_AT_ONCE])

    def flush(self) -> None:
        pass  # every call is durable when it returns

    def ended(self, end: Ended) -> None:
        for figure in end.figures:
            self._client.log_artifact(self._run, str(figure), "figures")
        if end.model is not None:
            self._client.log_artifact(self._run, str(end.model))
        for name in ("outcome", "model_digest"):
            self._client.set_tag(self._run, name, str(end.summary.get(name)))
        self._client.log_dict(self._run, dict(end.summary), SUMMARY)
        self._client.set_terminated(self._run, _STATUS.get(str(end.summary.get("outcome")), "FAILED"))

    def close(self) -> None:
        pass


@contextmanager
def _alone_beside(store: Path) -> Iterator[None]:
    """No other run begins in a folder ``store`` meanwhile, which could have an experiment twice."""
    descriptor = os.open(store.parent, os.O_RDONLY)
    try:
        with suppress(OSError):  # there are file systems without locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


class _Names:
    """The names of metrics as MLflow takes them. A metric keeps the name that it has in its first round.

    Where MLflow would take two for one, or a name is too long, a digest follows. A store in a folder has a file for
    each metric, so no name is also a folder of others.
    """

    def __init__(self) -> None:
        self._written: dict[str, str] = {}
        self._files: set[str] = set()
        self._folders: set[str] = set()

    def of(self, measured: Collection[str], named: Collection[str]) -> Mapping[str, str]:
        """The names there of the ``measured`` values of a row, and of earlier rows. ``named`` are all of its values.

        Rows must come in the order of rounds. Then a run has the same names whenever it is told.
        """
        if new := sorted({*measured} - {*self._written}):
            known = {*named, *self._written}
            wanted = {name: _allowed(_beside(name, known)) for name in {*named, *new}}
            count = Counter(wanted.values())
            for name in new:
                written = wanted[name]
                fits = count[written] == 1 and len(written.encode()) <= _LONGEST_NAME and self._is_free(written)
                self._give(name, written if fits else self._with_digest(name, written))
        return self._written

    def _give(self, name: str, written: str) -> None:
        self._written[name] = written
        self._files.add(written)
        self._folders.update(_folders(written))

    def _is_free(self, written: str) -> bool:
        taken = written in self._files or written in self._folders
        return not taken and self._files.isdisjoint(_folders(written))

    def _with_digest(self, name: str, wanted: str) -> str:
        start = wanted.encode()[:_LONGEST_NAME].decode(errors="ignore")
        written = f"{start}-{sha256(name.encode()).hexdigest()[:8]}"
        return written if self._is_free(written) else written.replace("/", ".")


def _folders(written: str) -> list[str]:
    """The folders in which a store has the metric of this name."""
    return list(accumulate(written.split("/")[:-1], "{}/{}".format))


def _beside(name: str, known: Collection[str]) -> str:
    """A name that can lie in a folder beside the ``known`` ones: ``loss.own`` for ``loss/own`` where ``loss`` is one.

    A store in a folder has a file for each metric, which can be no folder as well.
    """
    path, *parts = name.split("/")
    written = path
    for part in parts:
        written += f"{'.' if path in known else '/'}{part}"
        path += f"/{part}"
    return written


def _allowed(name: str) -> str:
    """A name as MLflow takes it: other signs become ``_``, and as a path it leads to itself."""
    parts = re.sub(r"[^/\w.\- :]", "_", name).split("/")
    return "/".join(part for part in parts if part not in ("", ".", ".."))
