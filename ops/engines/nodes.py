"""Which place is on which node: decisions without I/O. An engine tells which nodes live, and performs the changes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence


def settle(at: Mapping[int, str | None], homes: Mapping[int, str], nodes: Sequence[str]) -> dict[int, str]:
    """The places that have to go to another node, and where to.

    ``at`` tells where each place is, None for one that is nowhere, and ``homes`` which node is kept for it. A place
    goes to its home where this lives. Without one it stays where it is, or goes to the living node with the fewest
    places.
    """
    living = {place: node for place, node in homes.items() if node in nodes}
    load = Counter(dict.fromkeys(nodes, 0))
    load.update(node for place, node in at.items() if node is not None and node in load and place not in living)
    load.update(living[place] for place in at if place in living)
    changes: dict[int, str] = {}
    for place, node in sorted(at.items()):
        if place in living:
            if node != living[place]:
                changes[place] = living[place]
        elif nodes and node not in nodes:
            changes[place] = min(nodes, key=lambda one: load[one])
            load[changes[place]] += 1
    return changes
