"""Cases of a campaign: random accidents to runs of several methods, which end as if nothing had happened."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedemu.ops.stress.campaign import METHODS, case, play_case, undisturbed

SEED = 1
CASES = 20


@pytest.fixture(scope="module")
def digests(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The digests of undisturbed runs, by method. Each is found when it is first needed."""

    class Found(dict[str, str]):
        def __missing__(self, method: str) -> str:
            return self.setdefault(method, undisturbed(method, tmp_path_factory.mktemp("calm")))

    return Found()


@pytest.mark.parametrize("number", range(CASES))
def test_a_run_ends_as_if_nothing_had_happened(number: int, tmp_path: Path, digests: dict[str, str]) -> None:
    played = case(SEED, number)
    result = play_case(played, tmp_path, digests[played.method], seconds=100.0)
    assert result.complaints == (), f"{played.text}: {result.done}"


def test_the_cases_of_a_seed_are_always_the_same_and_reach_every_method() -> None:
    cases = [case(SEED, number) for number in range(200)]
    assert cases[:5] == [case(SEED, number) for number in range(5)]
    assert {each.method for each in cases} == set(METHODS)
    assert case(2, 0) != cases[0]
