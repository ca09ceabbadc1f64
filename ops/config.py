"""What an experiment is: one frozen, fully checked object, and the settings of a machine that don't belong to it.

``config_sources.py`` reads both from files, presets, the environment and the command line; ``docs/configuration.md`` explains every
key. Times are seconds, rates probabilities, bandwidths kbps (1,000 bit/s) unless a key says otherwise.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    JsonValue,
    StringConstraints,
    Tag,
    ValidationError,
    model_validator,
)

from fedemu.ops.config_errors import plain_table, refuse
from fedemu.ops.toml_text import toml_text
from fedemu.protocol.errors import ConfigurationError
from fedemu.protocol.ids import Digest, digest_of

AUTO = "auto"
"""Stands for a column or a value that is found from the data."""

Count = Annotated[int, Field(ge=1, le=2**31 - 1)]
Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Rate = Annotated[float, Field(ge=0, le=1)]
Text = Annotated[str, StringConstraints(min_length=1, max_length=1024)]


class Section(BaseModel):
    """Base of all tables: frozen, no unknown keys, no silent conversion, only finite numbers."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)


# Partitions


class Dirichlet(Section):
    """Label shares per device drawn from Dirichlet(alpha). ``balanced`` zeroes the share of devices that hold an even part already."""

    kind: Literal["dirichlet"] = "dirichlet"
    alpha: Positive = 0.1
    min_samples: Annotated[int, Field(ge=0)] = 1
    balanced: bool = False
    retry: bool = False


class DirichletEqual(Section):
    """Every device holds the same number of samples, with its own label shares from Dirichlet(alpha)."""

    kind: Literal["dirichlet_equal"] = "dirichlet_equal"
    alpha: Positive = 0.1


class Shards(Section):
    """Samples sorted by label and cut into shards, ``per_device`` of them to each device."""

    kind: Literal["shards"] = "shards"
    per_device: Count = 2


class Natural(Section):
    """One device per value of a column (a writer, a speaker)."""

    kind: Literal["natural"] = "natural"
    column: Text


class Iid(Section):
    kind: Literal["iid"] = "iid"


Partition = Annotated[Dirichlet | DirichletEqual | Shards | Natural | Iid, Field(discriminator="kind")]


class Data(Section):
    """``validation`` is the part of each device's samples that it keeps from training; ``test_fraction`` applies where no test split exists."""

    dataset: Text = "digits"
    image_column: Text = AUTO
    label_column: Text = AUTO
    id_column: Text = AUTO
    test_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.2
    validation: Annotated[float, Field(ge=0, lt=1)] = 0.0
    partition: Partition = Dirichlet()


class Stream(Section):
    kind: Literal["static"] = "static"


# Learning


class ModelSpec(Section):
    """A model by name, or as ``module:Name``; every other key is an option, checked by the model's builder."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, JsonValue]

    name: Text = "mlp"

    @property
    def options(self) -> dict[str, JsonValue]:
        return dict(self.__pydantic_extra__)


class AlgorithmSpec(Section):
    """A method by name, or as ``module:Name``; ``options`` are checked by the method."""

    name: Text = "fedavg"
    loss: Text = "cross_entropy"
    options: dict[str, JsonValue] = Field(default_factory=dict)


class Local(Section):
    """Training at a device: SGD, whose learning rate is multiplied by ``lr_decay`` after each round."""

    epochs: Count = 5
    batch_size: Count = 10
    lr: Positive = 0.1
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.0
    weight_decay: NotNegative = 0.0
    lr_decay: Annotated[float, Field(gt=0, le=1)] = 1.0
    augment: tuple[Literal["crop", "flip", "cutout"], ...] = ()
    executor: Literal["auto", "serial", "vmapped", "checked"] = "auto"


class Replay(Section):
    """``capacity`` in samples per device."""

    strategy: Literal["none"] = "none"
    capacity: Annotated[int, Field(ge=0)] = 0


# The fleet


class Fleet(Section):
    """``deadline`` is on the experiment's clock; ``start_timeout`` and ``give_up`` are real seconds."""

    devices: Count = 300
    per_round: Count = 30
    over_selection: Annotated[float, Field(ge=1)] = 1.0
    deadline: Positive = 600.0
    quorum: Annotated[float, Field(gt=0, le=1)] = 0.5
    attempts: Count = 3
    start_timeout: Positive = 60.0
    give_up: Positive = 60.0


class Always(Section):
    kind: Literal["always"] = "always"


class Exponential(Section):
    kind: Literal["exponential"] = "exponential"
    mean_online: Positive = 3600.0
    mean_offline: Positive = 1800.0


class Weibull(Section):
    """Spells drawn from Weibull(shape, scale); a shape below 1 makes many short and few very long ones."""

    kind: Literal["weibull"] = "weibull"
    shape: Positive = 0.7
    scale_online: Positive = 3600.0
    scale_offline: Positive = 1800.0


class Diurnal(Section):
    """On-line with a probability that follows the hour of the day; a device decides anew every ``spell`` seconds on average."""

    kind: Literal["diurnal"] = "diurnal"
    mean: Rate = 0.5
    amplitude: Annotated[float, Field(ge=0, le=0.5)] = 0.4
    peak_hour: Annotated[float, Field(ge=0, lt=24)] = 2.0
    spread_hours: NotNegative = 2.0
    spell: Positive = 3600.0

    @model_validator(mode="after")
    def _is_a_probability(self) -> Diurnal:
        if self.mean - self.amplitude < 0 or self.mean + self.amplitude > 1:
            raise ValueError(
                f"availability.amplitude = {self.amplitude} takes availability.mean = {self.mean} out of 0 to 1; "
                f"it may be at most {min(self.mean, 1 - self.mean):g}"
            )
        return self


class AvailabilityTrace(Section):
    """Recorded intervals from a CSV of device, start, end; ``docs/configuration.md`` tells the columns."""

    kind: Literal["trace"] = "trace"
    file: Text
    policy: str = ""
    state: str = "train"
    at_end: Literal["wrap", "end"] = "wrap"
    bootstrap: bool = False


Availability = Annotated[Always | Exponential | Weibull | Diurnal | AvailabilityTrace, Field(discriminator="kind")]


class Fixed(Section):
    kind: Literal["fixed"] = "fixed"
    value: NotNegative


class Uniform(Section):
    kind: Literal["uniform"] = "uniform"
    low: NotNegative
    high: Positive

    @model_validator(mode="after")
    def _is_ordered(self) -> Uniform:
        if self.low > self.high:
            raise ValueError(
                f"a uniform distribution needs low <= high, but has low = {self.low} and high = {self.high}"
            )
        return self


class Normal(Section):
    """Truncated: drawn again until within [low, high]."""

    kind: Literal["normal"] = "normal"
    mean: Positive
    std: NotNegative
    low: NotNegative = 0.0
    high: Positive = 1e12

    @model_validator(mode="after")
    def _holds_its_mean(self) -> Normal:
        if not self.low <= self.mean <= self.high:
            raise ValueError(
                f"a truncated normal distribution needs low <= mean <= high, but has "
                f"low = {self.low}, mean = {self.mean} and high = {self.high}"
            )
        return self


class Lognormal(Section):
    kind: Literal["lognormal"] = "lognormal"
    median: Positive
    sigma: NotNegative


class ComputeTrace(Section):
    """Benchmark scores from a file: the phone of the median score takes ``median`` seconds per sample, one of twice that score half."""

    kind: Literal["trace"] = "trace"
    file: Text
    column: Text = "ai_score"
    weight: str = ""
    median: Positive = 0.01


class NetworkTrace(Section):
    """Measured speeds from a file; a column ``*_kBps`` is in 1,000 byte/s. ``deviation`` names the spread from round to round."""

    kind: Literal["trace"] = "trace"
    file: Text
    column: Text = AUTO
    deviation: str = AUTO
    weight: str = ""


def _which(value: Any) -> str | None:
    """The tag of a quantity: a bare number is the fixed value."""
    if isinstance(value, Mapping):
        kind = value.get("kind")
        return kind if isinstance(kind, str) else None
    if isinstance(value, BaseModel):
        return str(getattr(value, "kind", None))
    return "number"


_Drawn = (
    Annotated[Fixed, Tag("fixed")]
    | Annotated[Uniform, Tag("uniform")]
    | Annotated[Normal, Tag("normal")]
    | Annotated[Lognormal, Tag("lognormal")]
)
Quantity = Annotated[Annotated[NotNegative, Tag("number")] | _Drawn, Discriminator(_which)]
Compute = Annotated[
    Annotated[NotNegative, Tag("number")] | _Drawn | Annotated[ComputeTrace, Tag("trace")], Discriminator(_which)
]
Network = Annotated[
    Annotated[Positive, Tag("number")] | _Drawn | Annotated[NetworkTrace, Tag("trace")], Discriminator(_which)
]


class Profile(Section):
    """What a device is capable of; ``latency`` is one way."""

    seconds_per_sample: Compute = 0.01
    down_kbps: Network = 20000.0
    up_kbps: Network = 5000.0
    latency: Quantity = 0.05


class Faults(Section):
    """Planned misbehaviour, per selected device and round. A device that drops out is back after ``downtime``."""

    crash_rate: Rate = 0.0
    leave_rate: Rate = 0.0
    silence_rate: Rate = 0.0
    corrupt_rate: Rate = 0.0
    duplicate_rate: Rate = 0.0
    decline_rate: Rate = 0.0
    corruptions: Annotated[tuple[Literal["nan", "shape", "truncate"], ...], Field(min_length=1)] = (
        "nan",
        "shape",
        "truncate",
    )
    downtime: Quantity = 60.0

    @model_validator(mode="after")
    def _add_up(self) -> Faults:
        for names in (("crash", "leave", "silence"), ("corrupt", "duplicate", "decline")):
            total = math.fsum(getattr(self, f"{name}_rate") for name in names)
            if total > 1:
                keys = " + ".join(f"faults.{name}_rate" for name in names)
                raise ValueError(f"{keys} = {total:g} is more than 1, but at most one of them can happen to a device")
        return self


# How it is run


class Clock(Section):
    kind: Literal["virtual", "wall"] = "virtual"


class Evaluate(Section):
    """Every so many rounds; the last round is always evaluated."""

    every: Count = 1


class Liveness(Section):
    """Real seconds; a peer that was silent for ``heartbeat_seconds × patience`` is dead."""

    heartbeat_seconds: Positive = 2.0
    patience: Count = 5


class Server(Section):
    """Threads of the coordinator's own torch work; their number changes the last bits."""

    threads: Annotated[int, Field(ge=1, le=256)] = 1


class Limits(Section):
    """What a reply may be at most: bytes of its tensors, and the Euclidean norm over all of them."""

    max_payload_bytes: Annotated[int, Field(ge=1, le=2**40)] = 2**30
    max_norm: Positive = 1e6


# What was read from files


class ProfileRows(Section):
    """One row per recorded device, in the unit of the profile's key. Quantities from one ``file`` are drawn as one row."""

    file: str
    values: tuple[Positive, ...]
    deviations: tuple[NotNegative, ...]
    weights: tuple[NotNegative, ...]


class Traces(Section):
    """The content of trace files, so that an experiment's bytes stand alone. Not part of the TOML.

    ``availability`` holds start, end, start, end, ... per recorded device, ascending; the last end is left out where a device never
    went away again. ``last_event`` is the latest time in the file, whichever device it belongs to.
    """

    availability: tuple[tuple[NotNegative, ...], ...] = ()
    last_event: NotNegative = 0.0
    profile: dict[str, ProfileRows] = Field(default_factory=dict)


class Experiment(Section):
    """All that decides the outcome of a run; two experiments of one ``digest`` are the same science."""

    name: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")] = "experiment"
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 1
    rounds: Count = 40
    data: Data = Data()
    stream: Stream = Stream()
    model: ModelSpec = Field(default_factory=lambda: ModelSpec.model_validate({"name": "mlp", "hidden": [64]}))
    algorithm: AlgorithmSpec = AlgorithmSpec()
    local: Local = Local()
    replay: Replay = Replay()
    fleet: Fleet = Fleet()
    availability: Availability = Always()
    profile: Profile = Profile()
    faults: Faults = Faults()
    clock: Clock = Clock()
    evaluate: Evaluate = Evaluate()
    liveness: Liveness = Liveness()
    server: Server = Server()
    limits: Limits = Limits()
    traces: Traces = Traces()

    @model_validator(mode="after")
    def _fits_together(self) -> Experiment:
        if self.fleet.per_round > self.fleet.devices:
            raise ValueError(
                f"fleet.per_round = {self.fleet.per_round} is more than fleet.devices = {self.fleet.devices}; "
                f"ask at most all devices of a round, or set fleet.participation instead"
            )
        return self

    @classmethod
    def parse(cls, table: Mapping[str, Any]) -> Experiment:
        """Check a table as read from TOML; raises ConfigurationError with one sentence."""
        plain = _resolve(plain_table(table))
        try:
            return cls.model_validate_json(json.dumps(plain))
        except ValidationError as error:
            raise refuse(error, plain, cls) from None

    @classmethod
    def from_bytes(cls, data: bytes) -> Experiment:
        """The inverse of ``to_bytes``."""
        try:
            return cls.model_validate_json(data)
        except ValidationError:
            raise ConfigurationError(
                "these bytes are not an experiment that this version of fedemu understands"
            ) from None

    def to_bytes(self) -> bytes:
        """Canonical JSON: sorted keys, no spaces; self-contained, traces included."""
        return json.dumps(self.table() | {"traces": self.traces.model_dump(mode="json")}, **_CANONICAL).encode()

    @property
    def digest(self) -> Digest:
        return digest_of(self.to_bytes())

    def table(self) -> dict[str, Any]:
        """Every setting with its value, as plain tables; what was read from trace files is left out."""
        return self.model_dump(mode="json", exclude={"traces"})

    def to_toml(self) -> str:
        """A readable file with every default written out; trace files are named, not contained."""
        return toml_text(self.table())


class Runtime(Section):
    """How this machine takes part in a run; free to differ between machines and between a run and its resumption.

    ``trainers = 0`` means one per core, or per GPU; ``metrics_port = 0`` means none.
    """

    bind: Text = "tcp://127.0.0.1:5577"
    connect: Text = "tcp://127.0.0.1:5577"
    transport: Literal["zmq", "memory"] = "zmq"
    trainers: Annotated[int, Field(ge=0, le=1024)] = 0
    per_process: Annotated[int, Field(ge=1, le=100_000)] = 1
    device_type: Literal["auto", "cpu", "cuda"] = "auto"
    metrics_port: Annotated[int, Field(ge=0, le=65535)] = 0
    log_level: Literal["debug", "info", "warning", "error"] = "info"

    @classmethod
    def parse(cls, table: Mapping[str, Any]) -> Runtime:
        """Check the table ``[runtime]``; raises ConfigurationError with one sentence."""
        plain = plain_table(table, "runtime")
        try:
            return cls.model_validate_json(json.dumps(plain))
        except ValidationError as error:
            raise refuse(error, plain, cls, "runtime") from None


_CANONICAL: dict[str, Any] = {"sort_keys": True, "separators": (",", ":"), "allow_nan": False, "ensure_ascii": False}


def _resolve(table: dict[str, Any]) -> dict[str, Any]:
    """Replace the settings that are another way to say a setting: ``fleet.participation``, and the natural partition's column."""
    if "traces" in table:
        raise ConfigurationError("traces is no setting; it is filled from the files that availability and profile name")
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
                    'data.partition = { kind = "natural" } needs the column that tells the devices apart; set data.id_column'
                )
            partition["column"] = data["id_column"]
    return table
