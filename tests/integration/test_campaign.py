"""Cases of a campaign: random accidents to runs of several methods, which end as if nothing had happened."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil
import pytest

from fedemu.ops.stress.campaign.accidents import ACCIDENTS, TO_EDGES
from fedemu.ops.stress.campaign.cases import COMMON, MACHINES, METHODS, case
from fedemu.ops.stress.campaign.play import play_case
from fedemu.ops.stress.undisturbed import Undisturbed, undisturbed
from fedemu.ops.stress.warm import WarmStart

SEED = 1
CASES = 6


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory, warm: WarmStart) -> dict[str, Undisturbed]:
    """The undisturbed runs, by method. Each is played when it is first needed."""

    class Played(dict[str, Undisturbed]):
        def __missing__(self, method: str) -> Undisturbed:
            experiment, settings = METHODS[method]
            directory = tmp_path_factory.mktemp("calm") / "run"
            return self.setdefault(method, undisturbed(experiment, (*COMMON, *settings), directory, warm.start))

    return Played()


@pytest.mark.parametrize("number", range(CASES))
def test_a_run_ends_as_if_nothing_had_happened(
    number: int, tmp_path: Path, calm: dict[str, Undisturbed], warm: WarmStart
) -> None:
    played = case(SEED, number)
    result = play_case(played, tmp_path, calm[played.method], warm)
    assert result.complaints == (), f"{played.text}: {result.done}"


def test_the_cases_of_a_seed_are_always_the_same_and_reach_every_method_and_accident() -> None:
    cases = [case(SEED, number) for number in range(400)]
    assert cases[:5] == [case(SEED, number) for number in range(5)]
    assert {each.method for each in cases} == set(METHODS)
    assert {each.machine for each in cases} == set(MACHINES)
    assert {accident.name for each in cases for accident in each.accidents} == {*ACCIDENTS, *TO_EDGES}
    assert 80 < sum(each.edge for each in cases) < 120, "a quarter is behind an edge"
    assert case(2, 0) != cases[0]


def test_a_command_from_the_warm_start_reads_writes_and_ends_as_one_of_a_shell(
    tmp_path: Path, warm: WarmStart, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "log"
    wrong = warm.start(["validate", "digits", "--set", "local.speed=1"], log, os.environ)
    assert wrong.wait(300) == 2
    assert log.read_text().startswith("fedemu: ")
    monkeypatch.chdir(tmp_path)
    Path("mine.toml").write_text("rounds = 3\n")
    reading, writing = os.pipe()
    read = warm.start(["validate", "mine.toml"], Path(f"/dev/fd/{writing}"), os.environ)
    os.close(writing)
    with open(reading) as pipe:
        assert "rounds       3," in pipe.read()
    assert read.wait(300) == 0
    waiting = warm.start(["device", "--connect", "tcp://127.0.0.1:9", "--state", str(tmp_path)], log, os.environ)
    assert os.getsid(waiting.pid) == waiting.pid
    blanks = psutil.wait_procs(waiting.children(), timeout=0)[1]
    waiting.send_signal(signal.SIGKILL)
    assert waiting.wait(300) == -signal.SIGKILL
    assert psutil.wait_procs(blanks, timeout=300)[1] == []
