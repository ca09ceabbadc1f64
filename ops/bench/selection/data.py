"""Random vectors in place of gradients, and the best subset of them, found by trying all subsets.

Good et al., "Coordinated Replay Sample Selection for Continual Federated Learning", appendix C.1.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from fedemu.algorithms.replay.selection.candidates import Candidates
from fedemu.algorithms.replay.selection.diversity import directions

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Size:
    """The size of a problem, by default the paper's: ``budget`` of ``samples`` vectors with ``dimensions`` are kept."""

    samples: int = 50
    budget: int = 5
    dimensions: int = 300


def mixture(size: Size, generator: np.random.Generator) -> tuple[Floats, NDArray[np.int64]]:
    """Vectors ``[samples, dimensions]`` of a Gaussian mixture as the paper's, and the centre ``[samples]`` of each.

    There are ``1 + Poisson(4)`` centres with weights drawn from Dir(1). Both the centres and the vectors are brought to
    mean 0 and standard deviation 1 in each dimension. A single centre becomes 0.
    """
    count = 1 + int(generator.poisson(4))
    centres = _standardised(generator.normal(size=(count, size.dimensions)))
    origins = generator.choice(count, size=size.samples, p=generator.dirichlet(np.ones(count)))
    return _standardised(centres[origins] + generator.normal(size=(size.samples, size.dimensions))), origins


def _standardised(rows: Floats) -> Floats:
    centred = rows - rows.mean(axis=0)
    deviations = centred.std(axis=0)
    scaled: Floats = np.divide(centred, deviations, out=np.zeros_like(centred), where=deviations > 0.0)
    return scaled


def cosines(vectors: Floats) -> Floats:
    """The cosine of each pair of vectors, ``[samples, samples]``."""
    rows = directions(vectors)
    return rows @ rows.T


def candidates(vectors: Floats, origins: NDArray[np.int64], gram: Floats) -> Candidates:
    """Candidates of one period. Their classes are the centres, their gradients and features are the vectors."""
    fresh = np.ones(len(vectors), dtype=bool)
    return Candidates(fresh, len(vectors), labels=origins, gram=lambda: gram, features=lambda: vectors)


def least_objective(gram: Floats, budget: int) -> float:
    """The least sum of ``gram [n, n]`` over the pairs of ``budget`` samples, of all subsets. ``budget`` is at least 3.

    A subset is split into its last two positions and the head before them. The heads that end at the same position can
    be followed by the same pairs, so that their sums form one table. So the 2.1 million subsets of 5 out of 50 samples
    take about 50 operations. Raises ValueError for a smaller budget.
    """
    if budget < 3:
        raise ValueError(f"budget {budget}")
    heads = np.array(list(combinations(range(len(gram) - 2), budget - 2)))
    rows = gram[heads].sum(axis=1)
    within = np.take_along_axis(rows, heads, axis=1).sum(axis=1)
    least = np.inf
    for end in range(budget - 3, len(gram) - 2):
        ending = heads[:, -1] == end
        first, second = (end + 1 + each for each in np.triu_indices(len(gram) - end - 1, 1))
        pairs = gram[first, first] + gram[second, second] + 2.0 * gram[first, second]
        sums = 2.0 * (rows[ending][:, first] + rows[ending][:, second]) + pairs + within[ending, None]
        least = min(least, float(sums.min()))
    return least


def fleet(devices: int, size: Size, common: float, own: float, generator: np.random.Generator) -> Floats:
    """Directions ``[devices, samples, dimensions]``: a mixture for each device, moved by two random vectors.

    ``common`` times a standard normal vector moves the vectors of all devices. ``own`` times another one, drawn for
    each device, moves those of the device. Both are 0 in the paper. Then the vectors of every device add up to zero.
    """
    shared = common * generator.normal(size=size.dimensions)
    return np.array(
        [
            directions(mixture(size, generator)[0] + shared + own * generator.normal(size=size.dimensions))
            for _ in range(devices)
        ]
    )
