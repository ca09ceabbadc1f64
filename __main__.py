"""``python -m fedemu`` is the command ``fedemu``."""

from __future__ import annotations

from fedemu.ops.cli.__main__ import main

if __name__ == "__main__":
    main()
