"""What a coordinator counts that refuses or closes something, and what it has to count under each attack."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from fedemu.ops.stress.fleet import LiveFleet
from fedemu.protocol.host.paths import is_file

REFUSED: Final[Mapping[str, tuple[str, str]]] = {
    "messages": ("too_much", "too_much"),
    "arrays": ("too_much", "too_much"),
    "garbage": ("encoding", "encoding"),
    "enrolling": ("lease_unknown", "lease_unknown"),
    "endless-message": ("unfinished", "handshake"),
    "large-frame": ("", "handshake"),
    "idle-connections": ("connections", "connections"),
    "half-handshakes": ("", "handshake"),
    "taken-names": ("", ""),
    "strange-keys": ("", "key"),
    "bundles": ("too_much", "no_edge"),
    "channels": ("lease_unknown", "no_edge"),
    "stolen-lease": ("", "lease_unknown"),
}
"""What a coordinator has to count under each attack, without keys and with keys. Empty if nothing need be counted.

The run goes on in its pace also if it lets an attack through. That it was refused is seen here alone.
"""
_COUNTED = re.compile(r"a (?:message was rejected|connection was closed): (\S+) \((\d+) so far\)")


def counted(fleet: LiveFleet) -> dict[str, int]:
    """How often the logs say that something was refused or closed, by reason: to the last power of ten."""
    logs = [fleet.run_directory / "logs" / "coordinator.log", *map(fleet.log_of, fleet.edges)]
    text = "".join(log.read_text(errors="replace") for log in logs if is_file(log))
    counts = {reason: int(count) for reason, count in _COUNTED.findall(text)}
    if found := re.findall(r"broke off in the handshake so far: (\d+)", text):
        counts["handshake"] = int(found[-1])
    if refused := len(re.findall(r"a machine with the key .{40} was refused", text)):
        counts["key"] = refused
    return counts


def not_refused(attacks: Sequence[str], keys: bool, counts: Mapping[str, int]) -> Iterator[str]:
    """A complaint for each attack on a coordinator that has counted nothing of what it has to refuse."""
    for name in attacks:
        reason = REFUSED[name][keys]
        if reason and not counts.get(reason):
            yield f"the coordinator refused nothing of the attack {name}: it counted no {reason}"
