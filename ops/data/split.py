"""Chooses the samples of a data set that are trained on, those that are tested on, and those that are left out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedemu.algorithms.data.partition import share_of
from fedemu.ops.data.cache import Decoded, Samples
from fedemu.ops.data.source import DataSource
from fedemu.protocol.errors import DataError
from fedemu.protocol.wording import counted

Rows = NDArray[np.int64]

_TESTS = ("test", "validation", "valid", "val", "dev")


class Part(NamedTuple):
    """One split before samples are left out: labels ``y [n]`` from 0, and columns ``[n]`` by name.

    ``read`` takes ascending rows and returns the samples in blocks, see ``Samples``.
    """

    y: NDArray[np.int64]
    columns: Mapping[str, NDArray[Any]]
    read: Callable[[Rows], Iterable[NDArray[Any]]]

    def samples(self, rows: Rows, columns: Mapping[str, NDArray[Any]]) -> Samples:
        """The samples at some rows, with the values of ``columns`` ``[n]`` at these rows."""
        return Samples(self.read(rows), self.y[rows], {name: values[rows] for name, values in columns.items()})


def chosen_splits(
    source: DataSource,
    known: Iterable[str],
    is_secret: Callable[[Sequence[str], Sequence[str]], bool] = lambda test, train: False,
) -> tuple[list[str], list[str]]:
    """Choose among the ``known`` splits. Returns those to train on, and those to test on (empty: there is none).

    Training uses the splits that the source names, or ``train``, or the only one. Testing uses one name. Splits whose
    names differ only by capital letters and spaces around them are one split, and all of them are returned. A test
    split is passed over whose labels were kept secret, as ``is_secret(test splits, training splits)`` tells. Raises
    DataError if there is none to train on, or if samples would be left out that the source does not leave out by name:
    because there is none to test on, or because they are of no split.
    """
    spellings: dict[str, list[str]] = {}
    for split in dict.fromkeys(known):
        spellings.setdefault(plain_name(split), []).append(split)
    if "" in spellings and len(spellings) > 1 and source.train_split is None:
        raise DataError(
            f"the data set {source.dataset!r} has rows that name no split; name it in the column of the splits, or set "
            "data.train_split to leave these rows out"
        )
    listed = ", ".join(split for alike in spellings.values() for split in alike)
    training = _training_names(source, spellings, listed)
    train = [split for name in training for split in spellings[name]]
    tests = [spellings[name] for name in _TESTS if name in spellings and name not in training]
    if not tests and len(spellings) > len(training) and source.train_split is None:
        raise DataError(
            f"the data set {source.dataset!r} has the splits {listed}, and none to test on is called "
            f"{', '.join(_TESTS[:-1])} or {_TESTS[-1]}; rename one, or set data.train_split to leave the others out"
        )
    return train, next((test for test in tests if not is_secret(test, train)), [])


def plain_name(split: str) -> str:
    """The name of a split without capital letters and spaces around it, which do not count."""
    return split.strip().lower()


def _training_names(source: DataSource, spellings: Mapping[str, Sequence[str]], listed: str) -> list[str]:
    """The plain names of the splits to train on. ``listed`` are all splits, for an error."""
    if source.train_split is not None:
        names = [name.strip() for name in source.train_split.split("+")]
        if missing := [name for name in names if plain_name(name) not in spellings]:
            raise DataError(f"the data set {source.dataset!r} has no split {missing[0]!r}; its splits are {listed}")
        return list(dict.fromkeys(map(plain_name, names)))
    if "train" in spellings:
        return ["train"]
    if len(spellings) == 1:
        return [*spellings]
    raise DataError(
        f"the data set {source.dataset!r} has no split train; its splits are {listed}, so set data.train_split"
    )


def divided(source: DataSource, names: tuple[str, ...], train: Part, test: Part | None = None) -> Decoded:
    """Make the two splits of a data set whose classes are called ``names``.

    Without ``test``, a part of ``train`` becomes the test split. With it, the test split keeps the columns that it has.
    Raises DataError if no test split can be taken, if nothing is left, or if a sample has no id where ids count.
    """
    train_rows, test_rows = _of_large_ids(source, train, test)
    if test is not None:
        splits = train.samples(train_rows, train.columns), test.samples(test_rows, test.columns)
        return Decoded(names, *splits, own_test_split=True)
    if source.test_by is None:
        chosen = stratified(train.y[train_rows], source.test_fraction)
    else:
        require_ids(source.dataset, source.test_by, train.columns[source.test_by], "data.test_by divides", "training")
        _, strata = np.unique(train.columns[source.test_by][train_rows], return_inverse=True)
        chosen = stratified(strata, source.test_fraction, "ids")
    kept, held_out = train_rows[~chosen], train_rows[chosen]
    return Decoded(names, train.samples(kept, train.columns), train.samples(held_out, train.columns))


def require_ids(dataset: str, name: str, ids: NDArray[Any], use: str, part: str) -> None:
    """Raise DataError if a sample has no value in the column ``name``: NaN, or an empty text.

    Samples of nobody would otherwise be those of one person. ``ids`` ``[n]`` are the values of a ``part`` of the
    samples, and ``use`` says what goes by them.
    """
    if empty := int(np.count_nonzero(ids == "" if ids.dtype.kind == "U" else ids != ids)):
        raise DataError(
            f"the column {name!r} of {dataset!r}, by which {use}, is empty for {counted(empty, f'{part} sample')}; "
            "fill it in, or leave out the samples without a value"
        )


def stratified(strata: NDArray[np.int64], fraction: float, what: str = "classes") -> NDArray[np.bool_]:
    """Choose ``ceil(fraction * n)`` of ``n`` samples for the test split. Returns a mask ``[n]``.

    ``strata`` are the labels or the writers of the samples, ``[n]`` from 0. Each stratum gives its share, by largest
    remainder, and keeps at least one sample for training. The choice is the same in every experiment, whatever its
    seed. ``what`` names the strata in an error. Raises DataError if no sample can be chosen.
    """
    counts = np.bincount(strata)
    exact = share_of(fraction, counts)
    take = np.minimum(np.floor(exact).astype(np.int64), np.maximum(counts - 1, 0))
    missing = int(np.ceil(share_of(fraction, len(strata)))) - int(take.sum())
    # Rounded, so that remainders that differ in their last bits only are equal. Then the lower label comes first.
    for stratum in np.argsort(np.round(np.floor(exact) - exact, 9), kind="stable"):
        if missing > 0 and take[stratum] < counts[stratum] - 1:
            take[stratum] += 1
            missing -= 1
    if not take.any():
        raise DataError(
            f"no test split can be taken from {len(strata)} samples of {np.count_nonzero(counts)} {what}; "
            "use more data, or raise data.test_fraction"
        )
    # RandomState, because its streams never change between versions of numpy.
    random = np.random.RandomState(0)
    chosen = np.zeros(len(strata), dtype=bool)
    members = np.split(np.argsort(strata, kind="stable"), np.cumsum(counts)[:-1])
    for rows, count in zip(members, take, strict=True):
        chosen[random.permutation(rows)[:count]] = True
    return chosen


def _of_large_ids(source: DataSource, train: Part, test: Part | None) -> tuple[Rows, Rows]:
    """The rows of both splits whose ids have enough samples.

    Samples are counted in both splits if both have the column of ids. A test split without it stays whole.
    """
    name, least = source.id_column, source.id_min_samples
    test_rows = np.arange(0 if test is None else len(test.y))
    if name is None or not least:
        return np.arange(len(train.y)), test_rows
    ids = [train.columns[name]] + ([test.columns[name]] if test is not None and name in test.columns else [])
    for column, part in zip(ids, ("training", "test"), strict=False):
        require_ids(source.dataset, name, column, "data.id_min_samples counts", part)
    _, position, counts = np.unique(np.concatenate(ids), return_inverse=True, return_counts=True)
    if counts.max() < least:
        raise DataError(
            f"none of the {len(counts)} values of {name!r} has {least} samples, the largest has {counts.max()}; "
            "lower data.id_min_samples"
        )
    kept = (counts >= least)[position]
    train_rows = np.flatnonzero(kept[: len(train.y)])
    if len(ids) == 2:
        test_rows = np.flatnonzero(kept[len(train.y) :])
    if not len(train_rows) or (test is not None and not len(test_rows)):
        raise DataError(f"no sample is left for a split once {name!r} has at least {least}; lower data.id_min_samples")
    return train_rows, test_rows
