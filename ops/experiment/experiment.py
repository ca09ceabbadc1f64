"""What an experiment is: one frozen object, all of whose settings have been checked.

``sources.py`` reads it from files, presets, the environment and the command line, and ``docs/configuration.md``
explains every key. Times are in seconds, rates are probabilities, and bandwidths are in kbps (1,000 bit/s), unless a
key says otherwise.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field, StringConstraints, ValidationError, model_validator

from fedemu.ops.experiment.mistakes import plain_table, refuse
from fedemu.ops.experiment.tables.fleet import (
    Always,
    Availability,
    AvailabilityTrace,
    ComputeTrace,
    Faults,
    Fleet,
    NetworkTrace,
    Profile,
    Traces,
    Tree,
)
from fedemu.ops.experiment.tables.learning import (
    AlgorithmSpec,
    Data,
    Local,
    ModelSpec,
    Resampled,
)
from fedemu.ops.experiment.tables.run import Clock, Compute, Diagnose, Evaluate, Limits, Liveness, Server
from fedemu.ops.experiment.tables.section import AUTO, FILLED, Count, Section
from fedemu.ops.experiment.tables.stream import LONGEST, Replay, Static, Stream
from fedemu.ops.experiment.toml_text import toml_text
from fedemu.protocol.errors import ConfigurationError
from fedemu.protocol.ids import Digest, digest_of


class Experiment(Section):
    """Everything that decides the outcome of a run. Two experiments with the same ``digest`` have the same outcome."""

    name: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")] = "experiment"
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 1
    rounds: Count = 40
    data: Data = Data()
    stream: Stream = Static()
    model: ModelSpec = Field(default_factory=lambda: ModelSpec.model_validate({"name": "mlp", "hidden": [64]}))
    algorithm: AlgorithmSpec = AlgorithmSpec()
    local: Local = Local()
    replay: Replay = Replay()
    fleet: Fleet = Fleet()
    tree: Tree = Tree()
    availability: Availability = Always()
    profile: Profile = Profile()
    faults: Faults = Faults()
    clock: Clock = Clock()
    evaluate: Evaluate = Evaluate()
    diagnose: Diagnose = Diagnose()
    liveness: Liveness = Liveness()
    server: Server = Server()
    compute: Compute = Compute()
    limits: Limits = Limits()
    traces: Traces = Traces()
    code: dict[str, Annotated[Digest, StringConstraints(pattern=r"^[0-9a-f]{64}$")]] = Field(default_factory=dict)
    """The digest of the source of each module and file that the settings name. It is filled when a run begins."""

    @model_validator(mode="after")
    def _fits_together(self) -> Experiment:
        if self.fleet.per_round > self.fleet.devices:
            raise ValueError(
                f"fleet.per_round = {self.fleet.per_round} is more than fleet.devices = {self.fleet.devices}; "
                "lower fleet.per_round, or set fleet.participation instead"
            )
        if self.fleet.wake == "on-demand" and self.clock.kind == "wall":
            raise ValueError(
                'fleet.wake = "on-demand" needs clock.kind = "virtual"; under the wall clock a device that sleeps '
                "would count as off-line"
            )
        if isinstance(self.data.partition, Resampled) and (self.data.validation or self.stream.kind == "periods"):
            raise ValueError(
                'data.partition.kind = "resampled" lets devices have the same samples, so that one would train on what '
                'another holds out; set data.validation = 0, and no stream.kind = "periods"'
            )
        if self.diagnose.every and self.data.text.kind in ("masked", "next"):
            raise ValueError(
                "diagnose.every tells what models forget of classes, but models of language data predict tokens; "
                "set it to 0"
            )
        if self.tree.edges and self.tree.edges[-1] > self.fleet.devices:
            raise ValueError(
                f"tree.edges = {self.tree.edges[-1]} is more than fleet.devices = {self.fleet.devices}; "
                "each edge needs a device behind it"
            )
        replays = f'replay.strategy = "{self.replay.strategy}"'
        if self.replay.kept and self.stream.period_count == 1:
            raise ValueError(
                f"{replays} has nothing to replay in a stream of one period; "
                'set stream.kind and more periods, or replay.strategy = "none"'
            )
        if self.replay.kept and self.stream.cumulative:
            raise ValueError(
                f"{replays} has nothing to replay where stream.cumulative = true keeps all samples; "
                'set stream.cumulative = false, or replay.strategy = "none"'
            )
        if self.compute.portable and self.server.threads > 1:
            raise ValueError(
                f"compute.portable = true computes with one thread, and server.threads = {self.server.threads}; "
                "set server.threads = 1, or compute.portable = false"
            )
        if self.stream.period_count * self.stream.seconds > LONGEST:
            raise ValueError(
                f"stream.period_seconds = {self.stream.seconds} makes {self.stream.period_count} periods longer than "
                f"{LONGEST:.0e} seconds, for which devices can't tell when they are on-line; set a shorter one"
            )
        return self

    @classmethod
    def parse(cls, table: Mapping[str, Any]) -> Experiment:
        """Check a table that was read from TOML. Raises ConfigurationError with one sentence if a setting is wrong."""
        plain = _resolve(plain_table(table))
        try:
            return cls.model_validate_json(json.dumps(plain))
        except ValidationError as error:
            raise refuse(error, plain, cls) from None

    @classmethod
    def from_bytes(cls, data: bytes) -> Experiment:
        """Read what ``to_bytes`` has written. Raises ConfigurationError if the bytes are anything else."""
        try:
            return cls.model_validate_json(data)
        except ValidationError:
            raise ConfigurationError(
                "the coordinator's experiment is not one that this version of fedemu understands; install the "
                "coordinator's version on this machine"
            ) from None

    def to_bytes(self) -> bytes:
        """The experiment as canonical JSON, with sorted keys and without spaces.

        It includes the content of trace files, and the digests of code if it has any.
        """
        filled = {"traces": self.traces.model_dump(mode="json")} | ({"code": self.code} if self.code else {})
        return json.dumps(self.table() | filled, **_CANONICAL).encode()

    @property
    def digest(self) -> Digest:
        """The SHA-256 of ``to_bytes``."""
        return digest_of(self.to_bytes())

    def table(self) -> dict[str, Any]:
        """Every setting with its value, as plain tables. What is filled is left out."""
        return self.model_dump(mode="json", exclude=set(FILLED))

    def named_files(self) -> dict[str, AvailabilityTrace | ComputeTrace | NetworkTrace]:
        """The tables that name a trace file, by the key ``availability`` or by their key in the profile."""
        tables = {"availability": self.availability, **dict(self.profile)}
        followers = AvailabilityTrace | ComputeTrace | NetworkTrace
        return {key: table for key, table in tables.items() if isinstance(table, followers)}

    @property
    def lacks_traces(self) -> bool:
        """Whether the experiment names a trace file whose content has not been read."""
        held = {*self.traces.profile, *(["availability"] if self.traces.availability else [])}
        return not self.named_files().keys() <= held

    def to_toml(self) -> str:
        """The experiment as TOML, with every default written out.

        Trace files are named, but their content is not included.
        """
        return toml_text(self.table())


_CANONICAL: dict[str, Any] = {"sort_keys": True, "separators": (",", ":"), "allow_nan": False, "ensure_ascii": False}


def _resolve(table: dict[str, Any]) -> dict[str, Any]:
    """Replace keys that are only another way to write a setting.

    ``fleet.participation`` becomes ``fleet.per_round``, and a natural partition without a column gets
    ``data.id_column``. Changes ``table`` and returns it.
    """
    if "traces" in table:
        raise ConfigurationError("traces is no setting; it is filled from the files that availability and profile name")
    if "code" in table:
        raise ConfigurationError("code is no setting; it is filled from the modules and files that the settings name")
    fleet, data = table.get("fleet"), table.get("data")
    if isinstance(fleet, dict) and "participation" in fleet:
        if "per_round" in fleet:
            raise ConfigurationError(
                "fleet.per_round and fleet.participation say the same thing twice; keep one of them"
            )
        share, devices = fleet.pop("participation"), fleet.get("devices", Fleet().devices)
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= 1:
            raise ConfigurationError(f"fleet.participation = {share!r} must be a number above 0 and at most 1")
        if isinstance(devices, int):
            fleet["per_round"] = max(1, round(share * devices))
    if isinstance(data, dict) and isinstance(data.get("partition"), dict):
        partition = data["partition"]
        if partition.get("kind") == "natural" and "column" not in partition:
            if data.get("id_column", AUTO) == AUTO:
                raise ConfigurationError(
                    'data.partition = { kind = "natural" } needs a column that tells devices apart; set data.id_column'
                )
            partition["column"] = data["id_column"]
    return table
