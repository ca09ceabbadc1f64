"""An experiment is put together once, and only as far as somebody asks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from fedemu.ops.assembly import parts as parts_module
from fedemu.ops.assembly.parts import Parts
from fedemu.ops.experiment.sources import load_experiment
from fedemu.protocol.errors import ConfigurationError, DataError

DRIFT = ("stream.kind=drift", "stream.periods=4", "data.public={fraction=0.1}")


@pytest.fixture(autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDEMU_CACHE", str(Path(tmp_path_factory.getbasetemp()) / "parts-cache"))


def parts_of(*settings: str) -> Parts:
    return Parts(load_experiment("digits-small", list(settings), {})[0])


def test_a_part_is_made_once() -> None:
    parts = parts_of(*DRIFT)
    assert parts.public is not None
    for name in ("corpus", "model", "algorithm", "variables", "partition", "stream", "tests", "public"):
        assert getattr(parts, name) is getattr(parts, name)


def test_equal_experiments_have_equal_parts() -> None:
    one, other = parts_of(*DRIFT), parts_of(*DRIFT)
    assert all(torch.equal(leaf, other.variables[name]) for name, leaf in one.variables.items())
    arrays = other.stream.to_arrays()
    assert all(np.array_equal(array, arrays[name]) for name, array in one.stream.to_arrays().items())
    assert one.tests.indices.tolist() == other.tests.indices.tolist()


def test_a_fleet_that_needs_more_memory_than_there_is_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def lacks(*given: object, **more: object) -> None:
        raise MemoryError("Unable to allocate 149. GiB")

    monkeypatch.setattr(parts_module, "build_partition", lacks)
    with pytest.raises(ConfigurationError) as caught:
        _ = parts_of().partition
    assert str(caught.value) == (
        "a fleet of 20 devices does not fit into this machine's memory; lower fleet.devices, or use a larger machine"
    )


def test_nothing_is_made_before_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    for name in ("open_corpus", "open_algorithm", "initial_variables", "build_partition", "open_public", "open_stream"):
        real = getattr(parts_module, name)

        def noted(*given: object, name: str = name, real: object = real, **more: object) -> object:
            made.append(name)
            return real(*given, **more)  # type: ignore[operator]

        monkeypatch.setattr(parts_module, name, noted)
    parts = parts_of()
    assert made == []
    assert parts.model is not None
    assert made == ["open_corpus", "open_algorithm"]
    assert parts.stream is not None
    assert made == ["open_corpus", "open_algorithm", "build_partition", "open_stream"]


def test_a_script_is_told_the_seed_the_classes_and_the_public_data_before_the_first_round() -> None:
    parts = parts_of("seed=7", "data.public={fraction=0.1}")
    context = parts.context
    assert (context.round, context.task, context.seed, context.classes) == (0, 0, 7, 10)
    assert context.public is parts.public


def test_data_that_are_nowhere_are_an_error_of_the_first_part_that_reads_them(tmp_path: Path) -> None:
    parts = parts_of(f"data.dataset={tmp_path}/nowhere")
    with pytest.raises(DataError, match="there is no data set"):
        _ = parts.model
