"""The command that resumes a run repeats what belongs to the machine, and nothing of the experiment."""

from pathlib import Path

import pytest

from fedemu.ops.live.breaking import resume_words


@pytest.mark.parametrize(
    ("started", "resumed"),
    [
        ("python -m fedemu.ops.cli run digits --out x --seed 3 --page", "run --resume DIR"),
        (
            "fedemu run --trainers 2 digits --bind=tcp://127.0.0.1:99",
            "run --resume DIR --trainers 2 --bind tcp://127.0.0.1:99",
        ),
        (
            "fedemu coordinator --insecure --bind tcp://0.0.0.0:9 --set local.lr=1 --set runtime.report=false",
            "coordinator --resume DIR --insecure --bind tcp://0.0.0.0:9 --set runtime.report=false",
        ),
        (
            "fedemu run digits --on ray --nodes=2 --set track.to=tensorboard --set=runtime.trainers=2",
            "run --resume DIR --on ray --nodes 2 --set track.to=tensorboard --set runtime.trainers=2",
        ),
        ("python notebook.py", "run --resume DIR"),
    ],
)
def test_the_settings_of_the_machine_are_kept(started: str, resumed: str) -> None:
    assert resume_words(started.split(), Path("DIR")) == resumed.split()
