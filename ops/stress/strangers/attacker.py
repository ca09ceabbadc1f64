"""The process of an attacker: ``python -m fedemu.ops.stress.strangers.attacker``, with what it knows as JSON on stdin.

It ends when its stdin is closed.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import traceback
from typing import NoReturn

from fedemu.ops.stress.strangers.attacks import ATTACKS, Attack, Target
from fedemu.protocol.transport.curve import ClientKeys


def main() -> None:
    """Play the attacks of the first line of stdin, each in a thread. The process ends if one of them does."""
    said = json.loads(sys.stdin.readline())
    keys = ClientKeys(said["address"], **said["keys"]) if said["keys"] else None
    for name in said["attacks"]:
        server = keys.server if keys is not None else ""
        known = Target(said["address"], said["lease"], server, keys if ATTACKS[name].approved else None)
        threading.Thread(target=_play, args=(ATTACKS[name], known), daemon=True).start()
    sys.stdin.read()
    os._exit(0)


def _play(attack: Attack, known: Target) -> NoReturn:
    """Play an attack. None ends by itself, so whoever watches has to see that nobody attacks any more."""
    try:
        attack.play(known)
    except BaseException:
        traceback.print_exc()
    print(f"the attack {attack.name} has ended", file=sys.stderr, flush=True)
    os._exit(1)


if __name__ == "__main__":
    main()
