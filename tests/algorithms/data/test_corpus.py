"""Batches of a corpus: normalisation, padding and text."""

import subprocess
import sys

import numpy as np
import pytest
import torch

from fedemu.algorithms.data.corpus import Corpus, Split
from fedemu.protocol.ids import Digest


def corpus(x, mean, std):
    split = Split(x, np.arange(len(x), dtype=np.int64), {})
    return Corpus("tiny", split, split, ("a", "b"), x.shape[1:], np.array(mean), np.array(std), Digest("0" * 64))


@pytest.fixture
def coloured():
    """Two samples of two channels of 1 x 2 pixels."""
    return corpus(np.array([[[[0, 4]], [[10, 20]]], [[[8, 2]], [[30, 10]]]], dtype=np.uint8), [2.0, 10.0], [4.0, 5.0])


def test_a_batch_is_normalised_per_channel(coloured):
    x, y = coloured.batch(coloured.train, np.array([1, 0]))
    assert x.tolist() == [[[[1.5, 0.0]], [[4.0, 0.0]]], [[[-0.5, 0.5]], [[0.0, 2.0]]]]
    assert (x.dtype, y.dtype) == (torch.float32, torch.int64)
    assert y.tolist() == [1, 0]


def test_indices_of_any_shape_give_batches_of_that_shape(coloured):
    x, y = coloured.batch(coloured.train, np.array([[0, 1, 1], [1, 0, -1]]))
    assert x.shape == (2, 3, 2, 1, 2)
    assert y.tolist() == [[0, 1, 1], [1, 0, 1]]


def test_padding_reads_the_last_sample(coloured):
    padded, _ = coloured.batch(coloured.train, np.array([-1]))
    last, _ = coloured.batch(coloured.train, np.array([1]))
    assert torch.equal(padded, last)


def test_an_empty_batch_keeps_the_shape_of_a_sample(coloured):
    x, y = coloured.batch(coloured.train, np.array([], dtype=np.int64))
    assert (x.shape, y.shape) == ((0, 2, 1, 2), (0,))


def test_a_sample_is_the_same_whichever_samples_are_read_with_it(coloured):
    alone, _ = coloured.batch(coloured.train, np.array([1]))
    together, _ = coloured.batch(coloured.train, np.array([0, 1, 0]))
    assert torch.equal(alone[0], together[1])


def test_feature_rows_are_normalised_per_feature_and_left_as_they_are_on_disk():
    features = np.array([[1.0, 5.0], [3.0, 5.0]], dtype=np.float32)
    features.setflags(write=False)
    tiny = corpus(features, [2.0, 5.0], [1.0, 1.0])
    x, _ = tiny.batch(tiny.train, np.array([0, 1]))
    x += 1
    assert x.tolist() == [[0.0, 1.0], [2.0, 1.0]]
    assert features.tolist() == [[1.0, 5.0], [3.0, 5.0]]


def test_an_index_past_the_end_is_an_error(coloured):
    with pytest.raises(IndexError):
        coloured.batch(coloured.train, np.array([2]))


def test_classes_and_lengths_are_counted(coloured):
    assert coloured.classes == 2
    assert len(coloured.train) == 2


def test_looking_at_labels_does_not_import_torch():
    modules = "fedemu.algorithms.data.corpus, fedemu.algorithms.data.partitioners"
    code = f"import sys, {modules}; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
