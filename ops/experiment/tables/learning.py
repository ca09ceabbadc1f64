"""The tables of an experiment that say what is learnt: data, model, algorithm, local training."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field, JsonValue, model_validator

from fedemu.ops.experiment.tables.section import AUTO, Count, NotNegative, Positive, Section, Text


class Dirichlet(Section):
    """Each label's samples are shared out among the devices by a draw from Dirichlet(alpha).

    ``balanced`` gives nothing more to a device that already holds an even part of all samples; ``retry`` draws again
    until every device has ``min_samples``, instead of moving samples to those that lack some.
    """

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


class Flwr(Section):
    """A partitioner of flwr-datasets by its class name; ``options`` are the arguments of its constructor."""

    kind: Literal["flwr"] = "flwr"
    partitioner: Text
    options: dict[str, JsonValue] = Field(default_factory=dict)


PartitionSpec = Annotated[Dirichlet | DirichletEqual | Shards | Natural | Iid | Flwr, Field(discriminator="kind")]


class Public(Section):
    """Public data at the coordinator: ``fraction`` of the training samples, drawn at random before devices get theirs.

    Under a natural partition it is ``fraction`` of the column's values, with all their samples. ``validation`` of it
    is kept for stopping early. (Flashback takes 2.5 % and splits it 75 to 25.)
    """

    fraction: Annotated[float, Field(ge=0, lt=1)] = 0.0
    validation: Annotated[float, Field(gt=0, lt=1)] = 0.25


class Texts(Section):
    """What is to be predicted of texts: ``masked`` tokens, the ``next`` one, or nothing (``none``), as of images.

    ``length`` is the number of tokens of a sample, ``vocabulary`` how many different ones there are at most.
    """

    kind: Literal["none", "masked", "next"] = "none"
    length: Annotated[int, Field(ge=4, le=4096)] = 32
    vocabulary: Annotated[int, Field(ge=16, le=2**20)] = 2000
    tokenizer: Literal["wordpiece", "characters"] = "wordpiece"
    column: Text = AUTO


class Data(Section):
    """``validation`` is the part of each device's samples that is kept from training.

    ``train_split`` may join splits with ``+``. ``test_fraction`` applies where the data set has no test split of its
    own, to each label or to each value of the id column (``test_by``). Values of that column with fewer than
    ``id_min_samples`` are left out, with all their samples. ``image_size`` is what all images are brought to, in
    pixels; with 0 they stay as they are, and must be of one size. ``regroup`` makes other classes of ImageNet's.
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
        """The column that tells people apart: ``id_column``, or else that of a natural partition."""
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
    """Training at a device: SGD, whose learning rate is multiplied by ``lr_decay`` after each round.

    With ``lr_restart`` it is ``lr`` again at the beginning of each period of the stream.
    """

    epochs: Count = 5
    batch_size: Count = 10
    lr: Positive = 0.1
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.0
    weight_decay: NotNegative = 0.0
    lr_decay: Annotated[float, Field(gt=0, le=1)] = 1.0
    lr_restart: bool = False
    augment: tuple[Literal["crop", "flip", "cutout", "mask"], ...] = ()
    executor: Literal["auto", "serial", "vmapped", "checked"] = "auto"
