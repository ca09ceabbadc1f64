"""How each experiment of a comparison is drawn: a method has the same colour in every comparison."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from zlib import crc32

from fedemu.algorithms.names import LOSSES, METHODS, USUAL_LOSSES
from fedemu.ops.pages.style import PALETTE
from fedemu.ops.results.words import Table

COLOURS = len(PALETTE)


def places(experiments: Sequence[Table]) -> list[int]:
    """The place of each experiment among the looks of lines (``line_look``). No two are the same.

    The first experiment of a method has the colour of that method and its loss, whatever it is compared with. If two
    methods share a colour, their dashes and markers differ. Further experiments of a method take colours that are left.
    So do a user's own methods, each the one that follows from its name if that is left, and unknown experiments.
    """
    keys = [_key(experiment) for experiment in experiments]
    first = {key: number for number, key in reversed(list(enumerate(keys))) if key and key[0] in METHODS}
    taken: dict[int, int] = {}
    for key, number in sorted(first.items(), key=lambda item: _own_place(*item[0])):
        taken[number] = _free(_own_place(*key), taken)
    for number, named in enumerate(keys):
        if number not in taken:
            wished = crc32(named[0].encode()) if named and named[0] not in METHODS else 0
            used = Counter(place % COLOURS for place in taken.values())
            colour = min(range(COLOURS), key=lambda colour: (used[colour], (colour - wished) % COLOURS))
            taken[number] = _free(colour, taken)
    return [taken[number] for number in range(len(experiments))]


def _free(place: int, taken: Mapping[int, int]) -> int:
    """The place, or the next one of the same colour that is not taken."""
    while place in taken.values():
        place += COLOURS
    return place


def _key(experiment: Table) -> tuple[str, str] | None:
    """The names of the method and of its loss. None if they are not known."""
    algorithm = experiment.get("algorithm") or {}
    return (str(algorithm["name"]), str(algorithm.get("loss", LOSSES[0]))) if algorithm.get("name") else None


def _own_place(method: str, loss: str) -> int:
    """The place of a method with this loss."""
    place = METHODS.index(method)
    if loss in USUAL_LOSSES:
        return place
    shift = LOSSES.index(loss) - 1 if loss in LOSSES else crc32(loss.encode())
    row = place // COLOURS + 1  # another row of looks than that of the method with the usual loss
    return (place + 3 * shift) % COLOURS + COLOURS * row
