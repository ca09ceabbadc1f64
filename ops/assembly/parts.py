"""The parts of an experiment: its data, model, method, partition and stream. Every process puts them together here."""

from __future__ import annotations

from functools import cached_property
from typing import Any

from fedemu.algorithms.data.corpus import Corpus
from fedemu.algorithms.data.partition import Partition
from fedemu.algorithms.interface import Algorithm, Context, Model, PublicData, Tree
from fedemu.algorithms.streams.period_tests import PeriodTests
from fedemu.algorithms.streams.plan import StreamPlan
from fedemu.ops.assembly.learning import initial_variables, open_algorithm, within_memory
from fedemu.ops.assembly.partition import build_partition, open_public
from fedemu.ops.assembly.stream import open_stream
from fedemu.ops.data.corpora import open_corpus
from fedemu.ops.experiment import Experiment


class Parts:
    """The parts of one experiment. Each is made when it is first asked for, and kept.

    All parts are functions of the experiment and its data alone, so every process gets the same ones. A process that
    needs few of them, such as a trainer, does not make the others. A part that cannot be made raises
    ConfigurationError or DataError. With ``corpus`` the data are those, which were opened before.
    """

    def __init__(self, experiment: Experiment, corpus: Corpus | None = None) -> None:
        self.experiment = experiment
        if corpus is not None:
            self.corpus = corpus

    @cached_property
    def corpus(self) -> Corpus:
        """The data set. It is decoded first if this machine's cache does not hold it."""
        return open_corpus(self.experiment)

    @property
    def model(self) -> Model:
        """The network, which grows with the tasks of a class-incremental stream."""
        return self._learning[0]

    @property
    def algorithm(self) -> Algorithm[Any]:
        """The method, with replay if the experiment's devices keep samples."""
        return self._learning[1]

    @cached_property
    def variables(self) -> Tree:
        """The global model before the first round."""
        return initial_variables(self.experiment, self.model)

    @cached_property
    def partition(self) -> Partition:
        """Which training samples each device has."""
        experiment, devices = self.experiment, self.experiment.fleet.devices
        with within_memory(f"a fleet of {devices:,} devices", "lower fleet.devices"):
            return build_partition(self.corpus, experiment.data, devices=devices, seed=experiment.seed)

    @property
    def stream(self) -> StreamPlan:
        """Which sample arrives at which device, in which period, and when."""
        return self._streaming[0]

    @property
    def tests(self) -> PeriodTests:
        """The test samples of each period."""
        return self._streaming[1]

    @cached_property
    def public(self) -> PublicData | None:
        """The samples that only the coordinator has. None if the experiment asks for none."""
        return open_public(self.corpus, self.experiment.data, self.experiment.seed)

    @property
    def context(self) -> Context:
        """What a script is told before the first round."""
        return Context(0, 0, self.experiment.seed, self.corpus.classes, self.public)

    @cached_property
    def _learning(self) -> tuple[Model, Algorithm[Any]]:
        return open_algorithm(self.experiment, self.corpus)

    @cached_property
    def _streaming(self) -> tuple[StreamPlan, PeriodTests]:
        return open_stream(self.experiment, self.corpus, self.partition)
