"""Ways to divide labelled samples over devices. Each returns one ascending int64 index array per device.

Every sample goes to exactly one device, except with ``resampled``. The result is a function of the arguments and the
generator's state.
``docs/data.md`` lists the partitioners of flwr-datasets that mean the same.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedemu.algorithms.data.flat import Indices
from fedemu.protocol.errors import ConfigurationError, DataError

MOST_DRAWS = 1000
"""The number of draws after which ``dirichlet(retry=True)`` gives up."""

Labels = NDArray[np.integer[Any]]
Counts = NDArray[np.int64]


def dirichlet(
    labels: Labels,
    devices: int,
    *,
    alpha: float,
    min_samples: int,
    generator: np.random.Generator,
    retry: bool = False,
    balanced: bool = False,
) -> list[Indices]:
    """Label skew with free sizes: each class is spread over the devices by proportions from Dir(alpha).

    The proportions are drawn once (Yurochkin et al., arXiv:1905.12022). Then, in index order, each device with fewer
    than ``min_samples`` takes random samples from the device that is the largest at that moment (the lowest index of
    equals). With ``retry``, as in NIID-Bench (Li et al., arXiv:2102.02079), the proportions of all classes are instead
    drawn again until every device has ``min_samples``, at most MOST_DRAWS times; then it raises DataError. With
    ``balanced``, a device that holds ``samples / devices`` or more gets nothing of the classes that follow, and the
    other proportions are renormalised. FedNTD's partition has ``retry`` and ``balanced``, with ``min_samples`` 10.
    """
    _check_alpha(alpha)
    _check_minimum(len(labels), devices, min_samples)
    sizes = np.bincount(labels)
    for _ in range(MOST_DRAWS):
        proportions = generator.dirichlet(np.full(devices, alpha), size=len(sizes))
        counts = _spread(sizes, proportions, balanced)
        if not retry or counts.sum(axis=1).min() >= min_samples:
            break
    else:
        raise DataError(
            f"none of {MOST_DRAWS} draws of Dirichlet({alpha:g}) gave each of {devices} devices {min_samples} samples; "
            "raise alpha, lower devices or min_samples, or leave out retry"
        )
    shares = [generator.permutation(share) for share in _deal(labels, counts, generator)]
    return [np.sort(share) for share in _fill_up(shares, min_samples)]


def dirichlet_equal(labels: Labels, devices: int, *, alpha: float, generator: np.random.Generator) -> list[Indices]:
    """Label skew with equal sizes: each device draws class proportions from Dir(alpha), and then its samples by them.

    Samples are drawn without replacement. A class without samples left is dropped, and the other proportions are
    renormalised, so later devices take the rest (Hsu et al., arXiv:1909.06335, and the WSM paper's code). If a device's
    proportions are zero for all classes that are left, it draws in proportion to their samples. The first ``samples %
    devices`` devices hold one sample more.
    """
    _check_alpha(alpha)
    _check_minimum(len(labels), devices, 1)
    left = np.bincount(labels).astype(np.int64)
    counts = np.zeros((devices, len(left)), dtype=np.int64)
    size, larger = divmod(len(labels), devices)
    for device in range(devices):
        proportions = generator.dirichlet(np.full(len(left), alpha))
        wanted = size + (device < larger)
        while wanted:
            weights = np.where(left > 0, proportions, 0.0)
            if not weights.sum() > 0.0:
                weights = left.astype(np.float64)
            taken = np.minimum(generator.multinomial(wanted, weights / weights.sum()), left)
            counts[device] += taken
            left -= taken
            wanted -= int(taken.sum())
    return [np.sort(share) for share in _deal(labels, counts, generator)]


def shards(labels: Labels, devices: int, *, shards_per_device: int, generator: np.random.Generator) -> list[Indices]:
    """Pathological skew: each class is cut into equal shards, and each device gets ``shards_per_device`` of them.

    The choice is random, so a device may get two shards of one class (FedNTD's code, after McMahan et al.,
    arXiv:1602.05629). If a class does not divide evenly, its first shards have one sample more. If the shards do not
    divide evenly among the classes, the lowest labels have one shard more.
    """
    if shards_per_device < 1:
        raise ConfigurationError(f"shards_per_device is {shards_per_device}; it must be at least 1")
    _check_minimum(len(labels), devices, 1)
    present = np.unique(labels)
    total = devices * shards_per_device
    if total < len(present):
        raise ConfigurationError(
            f"{devices} devices with {shards_per_device} shards each make {total} shards, "
            f"too few for {len(present)} classes; raise fleet.devices or data.partition.per_device"
        )
    pieces: list[Indices] = []
    for position, label in enumerate(present):
        members = generator.permutation(np.flatnonzero(labels == label))
        count = total // len(present) + (position < total % len(present))
        if len(members) < count:
            raise ConfigurationError(
                f"class {label} has {len(members)} samples, too few for its {count} shards; "
                "lower fleet.devices or data.partition.per_device"
            )
        pieces.extend(np.array_split(members, count))
    order = generator.permutation(total).reshape(devices, shards_per_device)
    return [np.sort(np.concatenate([pieces[piece] for piece in row])) for row in order]


def by_id(column: NDArray[Any], devices: int) -> list[Indices]:
    """Natural devices: one for each distinct value of the column, in sorted order.

    With fewer devices than values, neighbouring values share a device; the first devices then have one value more.
    """
    values, position = np.unique(column, return_inverse=True)
    if devices > len(values):
        raise ConfigurationError(
            f"{devices} devices are more than the {len(values)} distinct ids; "
            f"lower fleet.devices to {len(values)} at most, or choose another data.partition"
        )
    group = np.repeat(np.arange(devices), [len(part) for part in np.array_split(values, devices)])
    return _members(group[position], devices)


def iid(samples: int, devices: int, *, generator: np.random.Generator) -> list[Indices]:
    """A uniformly random partition. Sizes differ by at most one; the first devices hold one sample more."""
    _check_minimum(samples, devices, 1)
    return [np.sort(part) for part in np.array_split(generator.permutation(samples), devices)]


def resampled(samples: int, devices: int, *, per_device: int, generator: np.random.Generator) -> list[Indices]:
    """Each device has ``per_device`` different samples, drawn by itself: devices may have the same samples.

    So there may be more devices than samples, a million for instance.
    """
    if per_device > samples:
        raise ConfigurationError(
            f"each device is to have {per_device} samples, but there are {samples}; lower data.partition.samples"
        )
    # Ascending numbers that may be equal become different ones if each is moved by its place.
    drawn = np.sort(generator.integers(0, samples - per_device + 1, size=(devices, per_device)), axis=1)
    return list(drawn + np.arange(per_device))


def _spread(sizes: Counts, proportions: NDArray[np.float64], balanced: bool) -> Counts:
    """Cut each class at its cumulative proportions: ``[devices, classes]`` counts from ``[classes, devices]``."""
    classes, devices = proportions.shape
    counts = np.zeros((devices, classes), dtype=np.int64)
    full = sizes.sum() / devices
    for label in range(classes):
        share = proportions[label]
        if balanced:
            open_ = counts.sum(axis=1) < full
            share = np.where(open_, share, 0.0)
            # If the proportions of all devices that are not full are 0, these share the class evenly.
            share = share / share.sum() if share.sum() > 0.0 else open_ / open_.sum()
        cuts = (np.cumsum(share) * sizes[label]).astype(np.int64)[:-1]
        counts[:, label] = np.diff(cuts, prepend=0, append=sizes[label])
    return counts


def _deal(labels: Labels, counts: Counts, generator: np.random.Generator) -> list[Indices]:
    """Give each class's samples, shuffled, to the devices by ``counts [devices, classes]``."""
    owner = np.empty(len(labels), dtype=np.int64)
    devices = len(counts)
    for label in range(counts.shape[1]):
        members = generator.permutation(np.flatnonzero(labels == label))
        owner[members] = np.repeat(np.arange(devices), counts[:, label])
    return _members(owner, devices)


def _members(owner: Indices, devices: int) -> list[Indices]:
    """The samples of each device, ascending, from ``owner [samples]``."""
    order = np.argsort(owner, kind="stable")
    return np.split(order, np.cumsum(np.bincount(owner, minlength=devices))[:-1])


def _fill_up(shares: Sequence[Indices], least: int) -> list[Indices]:
    """The shares, after devices below ``least`` took the last samples of the largest device, in index order."""
    held = [share.tolist() for share in shares]
    # A filled-up device has ``least`` samples, and a giver always has more. So an outdated entry never comes first.
    largest = [(-len(share), device) for device, share in enumerate(held)]
    heapq.heapify(largest)
    for share in held:
        while len(share) < least:
            _, giver = largest[0]
            share.append(held[giver].pop())
            heapq.heapreplace(largest, (-len(held[giver]), giver))
    return [np.array(share, dtype=np.int64) for share in held]


def _check_alpha(alpha: float) -> None:
    if not 0.0 < alpha < float("inf"):
        raise ConfigurationError(f"the Dirichlet concentration alpha is {alpha}; it must be positive and finite")


def _check_minimum(samples: int, devices: int, min_samples: int) -> None:
    if devices < 1:
        raise ConfigurationError(f"{devices} devices are asked for; there must be at least 1")
    if devices > samples:
        raise ConfigurationError(f"{devices} devices are more than the {samples} training samples; lower fleet.devices")
    if devices * min_samples > samples:
        raise ConfigurationError(
            f"{devices} devices with at least {min_samples} samples each need {devices * min_samples}, "
            f"but there are {samples}; lower fleet.devices or data.partition.min_samples"
        )
