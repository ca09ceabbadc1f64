"""A split that lies on the device gives the bits that the corpus gives."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from fedemu.algorithms.data.corpus import Corpus, Split
from fedemu.algorithms.data.resident import Resident
from fedemu.protocol.ids import Digest

DEVICES = [
    pytest.param("cpu", id="processor"),
    pytest.param("cuda", id="gpu", marks=pytest.mark.gpu),
]


def corpus(x: np.ndarray, mean: list[float], std: list[float]) -> Corpus:
    x.setflags(write=False)
    split = Split(x, np.arange(len(x)) % 3, {})
    names = ("a", "b", "c")
    return Corpus("noise", split, split, names, x.shape[1:], np.array(mean), np.array(std), Digest("0" * 64))


def images() -> Corpus:
    x = np.random.default_rng(0).integers(0, 256, (50, 2, 4, 4), np.uint8)
    return corpus(x, [127.5, 90.1], [73.9, 60.7])


def numbers() -> Corpus:
    x = np.random.default_rng(1).standard_normal((50, 7)).astype(np.float32)
    return corpus(x, [0.1] * 7, [0.3] * 7)


def words() -> Corpus:
    x = np.random.default_rng(2).integers(0, 9, (50, 2, 5), np.int16)
    return replace(corpus(x, [0.0], [1.0]), vocabulary=tuple("abcdefghi"))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("make", [images, numbers, words])
def test_a_resident_split_gives_the_bits_of_the_corpus(make: type, device: str) -> None:
    made = make()
    resident = Resident(made, made.train, torch.device(device))
    for indices in (np.array([3, 49, 3, -1]), np.arange(50, dtype=np.int32), np.array([], np.int64)):
        for found, expected in zip(resident.batch(indices), made.batch(made.train, indices), strict=True):
            assert found.device.type == device
            assert found.dtype == expected.dtype
            assert torch.equal(found.cpu(), expected)
