"""The tables that describe what is learnt: data, model, algorithm, local training."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field, JsonValue, model_validator

from fedemu.ops.experiment.tables.section import AUTO, Count, Positive, PositiveFloat32, Section, Text


class Dirichlet(Section):
    """The samples of each label are divided among the devices by a draw from Dirichlet(alpha).

    With ``balanced`` a device that already holds an even part of all samples gets no more. If a device has fewer than
    ``min_samples``, it gets samples of others; with ``retry`` everything is drawn again instead.
    """

    kind: Literal["dirichlet"] = "dirichlet"
    alpha: Positive = 0.1
    min_samples: Annotated[int, Field(ge=0)] = 1
    balanced: bool = False
    retry: bool = False


class DirichletEqual(Section):
    """Every device has the same number of samples. Its shares of the labels are drawn from Dirichlet(alpha)."""

    kind: Literal["dirichlet_equal"] = "dirichlet_equal"
    alpha: Positive = 0.1


class Shards(Section):
    """Each class is cut into equally many shards. Each device gets ``per_device`` of all shards at random."""

    kind: Literal["shards"] = "shards"
    per_device: Count = 2


class Natural(Section):
    """Each value of a column, such as a writer or a speaker, is a device."""

    kind: Literal["natural"] = "natural"
    column: Text


class Iid(Section):
    """Samples are divided evenly and at random."""

    kind: Literal["iid"] = "iid"


class Resampled(Section):
    """Each device draws ``samples`` of all samples by itself, so that devices may have the same ones."""

    kind: Literal["resampled"] = "resampled"
    samples: Count = 10


class Flwr(Section):
    """A partitioner of the optional package flwr-datasets, by its class name. Its constructor gets ``options``."""

    kind: Literal["flwr"] = "flwr"
    partitioner: Text
    options: dict[str, JsonValue] = Field(default_factory=dict)


PartitionSpec = Annotated[
    Dirichlet | DirichletEqual | Shards | Natural | Iid | Resampled | Flwr, Field(discriminator="kind")
]


class Public(Section):
    """The public data: ``fraction`` of the training samples, drawn at random before devices get theirs.

    With a natural partition it is ``fraction`` of the values of its column, with all their samples. ``validation`` of
    the public data is not trained on, and tells when to stop. (Flashback takes 2.5 % and splits it 75 to 25.) With an
    ``imbalance`` above 1 the most frequent class has that many times as many public samples as the rarest.
    """

    fraction: Annotated[float, Field(ge=0, lt=1)] = 0.0
    validation: Annotated[float, Field(gt=0, lt=1)] = 0.25
    imbalance: Annotated[float, Field(ge=1)] = 1.0


class Texts(Section):
    """Which tokens of texts are predicted: ``masked`` ones, the ``next`` one, or none, if the data are no texts.

    With ``labels`` no token is predicted, but the label of each text.
    ``length`` is the number of tokens of a sample, ``vocabulary`` the largest number of different tokens.
    """

    kind: Literal["none", "masked", "next", "labels"] = "none"
    length: Annotated[int, Field(ge=4, le=4096)] = 32
    vocabulary: Annotated[int, Field(ge=16, le=2**20)] = 2000
    tokenizer: Literal["wordpiece", "characters"] = "wordpiece"
    column: Text = AUTO


class Data(Section):
    """The data set, and how its samples are divided. ``validation`` is the share held back at each device.

    ``train_split`` may join splits with ``+``. A data set without a test split gives ``test_fraction`` of each label to
    it, or of each value of the id column, as ``test_by`` says. Values of the id column with fewer than
    ``id_min_samples`` are left out, with all their samples. ``image_size`` is the width and height of all images in
    pixels; with 0 they stay as they are, and must have one size. ``regroup`` joins classes of ImageNet to larger ones.
    """

    dataset: Text = "digits"
    image_column: Text = AUTO
    label_column: Text = AUTO
    id_column: Text = AUTO
    id_min_samples: Annotated[int, Field(ge=0)] = 0
    train_split: Text = AUTO
    test_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.2
    test_by: Literal["label", "id"] = "label"
    image_size: Annotated[int, Field(ge=0, le=512)] = 0
    regroup: Literal["none", "superimagenet-s", "superimagenet-m", "superimagenet-l"] = "none"
    validation: Annotated[float, Field(ge=0, lt=1)] = 0.0
    partition: PartitionSpec = Dirichlet()
    public: Public = Public()
    text: Texts = Texts()

    @property
    def ids(self) -> str | None:
        """The column that tells people apart: ``id_column``, or the one of a natural partition.

        None if there is neither.
        """
        if self.id_column != AUTO:
            return self.id_column
        return self.partition.column if isinstance(self.partition, Natural) else None

    @model_validator(mode="after")
    def _has_ids_where_needed(self) -> Data:
        if self.ids is None and (self.test_by == "id" or self.id_min_samples):
            setting = 'test_by = "id"' if self.test_by == "id" else f"id_min_samples = {self.id_min_samples}"
            raise ValueError(f"data.{setting} needs a column that tells people apart; set data.id_column")
        return self


class ModelSpec(Section):
    """A model by its name, or as ``module:Name``.

    Every other key is an option, which the builder of the model checks.
    """

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, JsonValue]

    name: Text = "mlp"

    @property
    def options(self) -> dict[str, JsonValue]:
        """All keys but ``name``, for the builder of the model."""
        return dict(self.__pydantic_extra__)


class AlgorithmSpec(Section):
    """A method by its name, or as ``module:Name``. The method checks its ``options``.

    ``terms`` names local terms, each with a table of its options, which go with every method.
    """

    name: Text = "fedavg"
    loss: Text = "cross_entropy"
    options: dict[str, JsonValue] = Field(default_factory=dict)
    terms: dict[str, dict[str, JsonValue]] = Field(default_factory=dict)


class Local(Section):
    """Training at a device, by SGD. The learning rate is multiplied by ``lr_decay`` after each round.

    With ``lr_restart`` the learning rate begins again at ``lr`` in each period of the stream. With ``steps`` above 0 a
    device takes that many steps in a round, and ``epochs`` has no effect.

    With ``precision = "bfloat16"`` the products of matrices in training round inputs and results to 8 significant bits,
    at devices and in the coordinator's server jobs. Variables stay float32, and models are evaluated in float32.

    ``stack`` devices are computed at once where devices are stacked. 0 leaves the number to a table for each kind of
    model (``device/compute/rule.py``).
    """

    epochs: Count = 5
    steps: Annotated[int, Field(ge=0, le=2**31 - 1)] = 0
    batch_size: Count = 10
    lr: PositiveFloat32 = 0.1
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.0
    weight_decay: Annotated[float, Field(ge=0, le=1e38)] = 0.0
    lr_decay: Annotated[float, Field(gt=0, le=1)] = 1.0
    lr_restart: bool = False
    augment: tuple[Literal["crop", "flip", "cutout", "mask"], ...] = ()
    precision: Literal["float32", "tf32", "bfloat16"] = "float32"
    executor: Literal["auto", "serial", "vmapped", "checked", "plain"] = "auto"
    stack: Annotated[int, Field(ge=0, le=1024)] = 0

    @model_validator(mode="after")
    def _stacks_several(self) -> Local:
        if self.stack == 1:
            raise ValueError("local.stack = 1 is no stack; write local.executor = 'serial'")
        return self
