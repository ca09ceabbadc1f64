"""Pictures of what a method generates are kept once a task, and the run does not depend on them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedemu.algorithms.data.corpus import Corpus, Split
from fedemu.algorithms.interface import Tree
from fedemu.coordinator.evaluation.album import Album, open_album
from fedemu.coordinator.plan import CoordinatorPlan
from fedemu.coordinator.record.run import read_generated, read_run
from fedemu.coordinator.serve import serve
from fedemu.protocol.errors import ConfigurationError
from fedemu.protocol.ids import Digest

MakePlan = Callable[..., CoordinatorPlan]
MakeFleet = Callable[..., Any]


def corpus_of(x: np.ndarray, names: str = "abc", mean: float = 4.0, std: float = 2.0) -> Corpus:
    """A corpus with samples of the classes 0, 1, 2, 0, and so on. Its test split is its training split."""
    split = Split(x, np.arange(len(x)) % len(names), {})
    means, stds = np.full(x.shape[1], mean), np.full(x.shape[1], std)
    return Corpus("made", split, split, tuple(names), x.shape[1:], means, stds, Digest("0" * 64))


GREY = corpus_of(np.arange(0, 17, dtype=np.uint8)[:, None, None, None] * np.ones((1, 1, 2, 2), np.uint8))
"""17 images of 2 × 2 pixels, each of one level from 0 to 16."""


class Painter:
    """A method that shows images of the classes 1 and 2 from its second call on. Their level tells the model."""

    def __init__(self, method: Any = None) -> None:
        self._method = method
        self.shown: list[tuple[float, int, int]] = []
        self.broken = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._method, name)

    def pictures(self, state: Any, samples: int, seed: int) -> Tree:
        level = float(state.model["w"][0])
        self.shown.append((level, samples, seed))
        if self.broken:
            raise MemoryError("too many images")
        if len(self.shown) == 1:
            return {}
        return {"x": torch.full((2, 1, 2, 2), level / 8), "y": torch.tensor([1, 2])}


@dataclass
class Showing:
    """Always shows the same images."""

    x: Tensor
    y: list[int]

    def pictures(self, state: Any, samples: int, seed: int) -> Tree:
        return {"x": self.x, "y": torch.tensor(self.y)}


def painted(plan: CoordinatorPlan) -> tuple[CoordinatorPlan, Painter]:
    painter = Painter(plan.algorithm)
    return replace(plan, algorithm=painter, album=Album(GREY)), painter


def test_pixels_go_from_the_darkest_to_the_brightest_of_the_training_samples() -> None:
    x = torch.tensor([-2.0, 0.0, 2.5, 6.0, 9.0, float("nan")]).view(6, 1, 1, 1).expand(6, 1, 2, 2)
    page = Album(GREY).page(Showing(x, [2, 2, 2, 1, 1, 1]), None, 1)
    assert page["x"].dtype == np.uint8
    assert page["x"].shape == (6, 1, 2, 2)
    assert page["x"][:, 0, 0, 0].tolist() == [0, 64, 143, 255, 255, 0]  # of 16: 0, 4, 9, 16, 22 and none
    assert page["y"].tolist() == [2, 2, 2, 1, 1, 1]
    assert page["real_y"].tolist() == [1, 2]
    assert page["real"][:, 0, 0, 0].tolist() == [16, 32]  # the first of each class: 1 and 2 of 16
    assert page["names"].tolist() == ["a", "b", "c"]


def test_colours_are_brought_back_channel_by_channel() -> None:
    x = np.zeros((3, 3, 1, 1), np.float32)
    x[1:] = 1.0
    corpus = replace(corpus_of(x), mean=np.array([0.25, 0.5, 0.75]), std=np.array([0.5, 0.25, 0.25]))
    page = Album(corpus).page(Showing(torch.full((1, 3, 1, 1), 0.5), [0]), None, 1)
    assert page["x"].ravel().tolist() == [128, 159, 223]  # 0.5, 0.625, 0.875
    assert page["real"].ravel().tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    ("classes", "channels", "size", "samples"), [(10, 1, 28, 8), (100, 3, 32, 8), (200, 3, 64, 8), (100, 3, 224, 2)]
)
def test_large_images_of_many_classes_are_few(classes: int, channels: int, size: int, samples: int) -> None:
    x = np.lib.stride_tricks.as_strided(np.zeros(1, np.uint8), (2, channels, size, size), (0, 0, 0, 0))
    assert Album(corpus_of(x, "a" * classes)).samples == samples


def test_there_is_no_album_of_samples_that_are_no_images() -> None:
    assert open_album(GREY) is not None
    assert open_album(corpus_of(np.zeros((3, 5), np.float32))) is None
    assert open_album(corpus_of(np.zeros((3, 2, 4, 4), np.uint8))) is None


TASKS: dict[str, Any] = {"task_of_round": lambda round: (round - 1) // 2, "task_begins": lambda task: 0.0, "rounds": 6}


async def test_pictures_are_kept_once_a_task_after_its_first_round(make_plan: MakePlan, make_fleet: MakeFleet) -> None:
    make_fleet()
    plan, painter = painted(make_plan(**TASKS))
    summary = await asyncio.wait_for(serve(plan), 60)
    assert [samples for _, samples, _ in painter.shown] == [8, 8, 8]
    assert {seed for *_, seed in painter.shown} == {1}
    pages = read_generated(plan.directory)
    assert list(pages) == [1, 2]
    for page, (level, *_) in zip(pages.values(), painter.shown[1:], strict=True):
        assert set(page["x"].ravel()) == {round(255 * (4 + 2 * level / 8) / 16)}
    assert {path.name for path in (plan.directory / "generated").iterdir()} == {"task-1.npz", "task-2.npz"}

    make_fleet(network=plan.network)
    bare = make_plan("bare", **TASKS)
    assert (await asyncio.wait_for(serve(bare), 60)).model_digest == summary.model_digest
    assert read_generated(bare.directory) == {}


async def test_a_run_goes_on_without_pictures_that_could_not_be_made_and_says_so(
    make_plan: MakePlan, make_fleet: MakeFleet
) -> None:
    make_fleet()
    plan, painter = painted(make_plan(**TASKS))
    painter.broken = True
    summary = await asyncio.wait_for(serve(plan), 60)
    assert (summary.outcome, summary.rounds) == ("completed", 6)
    failures = read_run(plan.directory).named("pictures_failed")
    assert [(event["task"], event["detail"]) for event in failures] == [
        (task, "MemoryError: too many images") for task in range(3)
    ]


async def test_a_run_goes_on_where_pictures_cannot_be_written(make_plan: MakePlan, make_fleet: MakeFleet) -> None:
    make_fleet()
    plan, _ = painted(make_plan(**TASKS))
    opened = replace(plan, opened=lambda address: (plan.directory / "generated").write_text("in the way"))
    summary = await asyncio.wait_for(serve(opened), 60)
    assert (summary.outcome, summary.rounds) == ("completed", 6)
    failures = read_run(plan.directory).named("pictures_failed")
    assert [event["task"] for event in failures] == [1, 2]
    assert all(event["detail"].startswith(f"{plan.directory / 'generated'}") for event in failures)


async def test_a_run_that_is_resumed_keeps_the_same_pictures(make_plan: MakePlan, make_fleet: MakeFleet) -> None:
    fleet = make_fleet()
    whole, _ = painted(make_plan("whole", **TASKS))
    summary = await asyncio.wait_for(serve(whole), 60)
    await fleet.close()

    make_fleet()
    begun, painter = painted(make_plan(**TASKS))
    first = asyncio.create_task(serve(begun))
    async with asyncio.timeout(60):
        while len(painter.shown) < 2:  # noqa: ASYNC110 - the round is not durable yet
            await asyncio.sleep(0)
    first.cancel()
    await asyncio.wait({first})
    assert (await asyncio.wait_for(serve(begun), 60)).model_digest == summary.model_digest
    for name in ("task-1.npz", "task-2.npz"):
        written, expected = (plan.directory / "generated" / name for plan in (begun, whole))
        assert written.read_bytes() == expected.read_bytes()


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 nonsense", b"nonsense"])
def test_a_damaged_file_is_one_sentence_that_names_it(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "generated").mkdir()
    (tmp_path / "generated" / "task-3.npz").write_bytes(content)
    with pytest.raises(ConfigurationError, match=r"task-3\.npz cannot be read: "):
        read_generated(tmp_path)
