"""ImageNet regrouped into fewer and larger classes: SuperImageNet (Babakniya et al., 2023, section 4).

``superimagenet_mapping.json`` comes from its authors (``docs/data.md`` names the source). It has 461 classes of
ImageNet in 100 superclasses, and the superclasses of each version. The numbers of training samples are those of the
paper (table 2), the numbers of test samples those of the authors' code.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedemu.ops.data.source import DataSource
from fedemu.ops.data.split import Part, Rows
from fedemu.protocol.errors import DataError

MAPPING = Path(__file__).parent / "superimagenet_mapping.json"
_PREFIX = "superimagenet-"
_SIZES = {"S": (2500, 100), "M": (5000, 200), "L": (7500, 300)}
"""Training and test samples of a superclass."""


class Regrouping(NamedTuple):
    """New classes, each of which joins several classes of ImageNet.

    ``groups`` are the new classes by name, each with the WordNet ids and the names of the classes that it joins.
    ``train`` and ``test`` are the largest numbers of samples that a group gets from each split.
    """

    name: str
    groups: Mapping[str, Mapping[str, str]]
    train: int
    test: int

    @property
    def members(self) -> dict[str, str]:
        """The names of all classes that are joined, by WordNet id."""
        return {wnid: name for group in self.groups.values() for wnid, name in group.items()}


def regrouping(name: str) -> Regrouping:
    """Read one of the versions ``superimagenet-s``, ``superimagenet-m`` and ``superimagenet-l``."""
    stored = json.loads(MAPPING.read_text(encoding="utf-8"))
    version = name.removeprefix(_PREFIX).upper()
    groups = {group["id"]: group for group in stored["superclasses"]}
    chosen = [groups[number] for number in stored["versions"][version]]
    members = {group["name"]: {one["wnid"]: one["name"] for one in group["classes"]} for group in chosen}
    return Regrouping(name, members, *_SIZES[version])


def regrouped(
    source: DataSource, names: tuple[str, ...], train: Part, test: Part | None = None, by: Regrouping | None = None
) -> tuple[tuple[str, ...], Part, Part | None]:
    """Make new classes by ``by``, or by ``source.regroup``. Returns the names, the training and the test samples.

    Without a regrouping they are returned as they are. ``names`` are WordNet ids, or lists of synonyms as in the
    Hugging Face form. A group takes its samples evenly from its classes, and all samples of a class that has too few.
    The draw is the same in every experiment. Raises DataError if a class has no samples.
    """
    if by is None:
        if source.regroup is None:
            return names, train, test
        by = regrouping(source.regroup)
    found = _positions(names, by)
    splits = {"training": train} if test is None else {"training": train, "test": test}
    for what, part in splits.items():
        counts = np.bincount(part.y, minlength=len(names))
        if missing := [wnid for wnid in by.members if wnid not in found or not counts[found[wnid]]]:
            listed = ", ".join(missing[:5]) + (", ..." if len(missing) > 5 else "")
            raise DataError(
                f"{by.name} needs {len(by.members)} classes of ImageNet, but {source.dataset!r} has no {what} images "
                f"of {len(missing)} of them: {listed}; add them, or leave out data.regroup"
            )
    groups = [np.array([found[wnid] for wnid in group]) for group in by.groups.values()]
    kept = _part(train, groups, by.train)
    return tuple(by.groups), kept, None if test is None else _part(test, groups, by.test)


def _positions(names: Sequence[str], by: Regrouping) -> dict[str, int]:
    """The position among ``names`` of each class that the regrouping joins, by WordNet id.

    A name is an id, or a list of synonyms that begins with the name of the class. If two lists begin with it (maillot),
    the one that consists of nothing else is meant.
    """
    whole = {name: number for number, name in enumerate(names)}
    first: dict[str, int] = {}
    for number, name in enumerate(names):
        first.setdefault(name.partition(",")[0], number)
    found: dict[str, int] = {}
    for wnid, name in by.members.items():
        words = name.replace("_", " ")
        if (place := whole.get(wnid, whole.get(words, first.get(words)))) is not None:
            found[wnid] = place
    return found


def _part(part: Part, groups: Sequence[NDArray[np.int64]], most: int) -> Part:
    """The samples of ``part`` that the groups take, in order. ``groups`` are the classes of each group."""
    # RandomState, because its streams never change between versions of numpy.
    random = np.random.RandomState(0)
    members = np.split(np.argsort(part.y, kind="stable"), np.cumsum(np.bincount(part.y))[:-1])
    group_of = np.full(len(members), -1)
    rows: list[Rows] = []
    for group, classes in enumerate(groups):
        group_of[classes] = group
        shares = even_shares([len(members[one]) for one in classes], most)
        rows += [random.permutation(members[one])[:share] for one, share in zip(classes, shares, strict=True)]
    kept = np.sort(np.concatenate(rows))
    columns = {name: values[kept] for name, values in part.columns.items()}
    return Part(group_of[part.y[kept]], columns, lambda wanted: part.read(kept[wanted]))


def even_shares(counts: Sequence[int], most: int) -> list[int]:
    """How many to take of each, so that there are ``most`` together, as evenly as the counts allow.

    If all counts together are fewer than ``most``, all are taken. A rest that cannot be divided goes to the first ones
    that have more.
    """
    shares = [0] * len(counts)
    left = min(most, sum(counts))
    while left:
        able = [place for place, count in enumerate(counts) if count > shares[place]]
        each = left // len(able)
        for place in able if each else able[:left]:
            given = min(max(each, 1), counts[place] - shares[place])
            shares[place] += given
            left -= given
    return shares
