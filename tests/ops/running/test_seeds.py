"""Several seeds of one experiment: claimed together, run one after another, gone on with, and compared."""

import json
from pathlib import Path
from typing import Any

import pytest

from fedemu.coordinator.record.records import write_record
from fedemu.ops.cli import commands
from fedemu.ops.experiment import Experiment, Runtime
from fedemu.ops.experiment.sources import read_frozen
from fedemu.ops.running import folder
from fedemu.ops.running import seeds as seeds_module
from fedemu.ops.running.codes import INTERNAL_ERROR, INTERRUPTED
from fedemu.ops.running.folder import give_back
from fedemu.ops.running.seeds import Member, is_group, new_group, parse_seeds
from fedemu.ops.terminal import say
from fedemu.protocol.errors import ConfigurationError, FedemuError


class FakeRuns:
    """Replaces ``run_together``: a run ends at once, with code 0 or the code that is set for its seed."""

    def __init__(self) -> None:
        self.codes: dict[int, int] = {}
        self.ran: list[tuple[int, bool]] = []
        self.outcome = "completed"
        self.begun = False
        """Whether a run that ends with code 2 has played a round before."""

    def __call__(
        self, directory: Path, experiment: Experiment, runtime: Runtime, *, new: bool, print_summary: bool, heading: str
    ) -> int:
        assert not print_summary
        self.ran.append((experiment.seed, new))
        code = self.codes.get(experiment.seed, 0)
        if code != 2:
            say(heading)
        if code == 2 and self.begun:
            (directory / "metrics.jsonl").write_text(json.dumps({"round": 1}) + "\n")
        elif code == 2 and new:
            give_back(directory)
        elif code == 0:
            row = {"round": experiment.rounds, "accuracy": 0.5 + experiment.seed / 4}
            (directory / "metrics.jsonl").write_text(json.dumps(row) + "\n")
            summary = {"outcome": self.outcome, "rounds": experiment.rounds, "seed": experiment.seed}
            (directory / "summary.json").write_text(json.dumps(summary))
        return code


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeRuns:
    fake = FakeRuns()
    monkeypatch.setattr(seeds_module, "run_together", fake)
    monkeypatch.setattr("fedemu.ops.compare.page.page.COMPARISON_PLOTS", {})
    monkeypatch.setattr("fedemu.ops.compare.page.page.WIDE_COMPARISON_PLOTS", {})
    monkeypatch.chdir(tmp_path)
    return fake


def call(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        commands.command(["run", *arguments], prog_name="fedemu")
    return int(ended.value.code or 0)


@pytest.mark.parametrize(
    ("text", "seeds"),
    [("0", [0]), ("0,1,2", [0, 1, 2]), ("0-3", [0, 1, 2, 3]), ("7, 1-2", [7, 1, 2])],
)
def test_seeds_are_a_list_with_ranges(text: str, seeds: list[int]) -> None:
    assert parse_seeds(text) == seeds


@pytest.mark.parametrize("text", ["", "a", "1,", "3-1", "-1", "1.5"])
def test_a_text_that_is_no_list_of_seeds_is_refused(text: str) -> None:
    with pytest.raises(ConfigurationError, match="is no list of seeds; write it as in 0,1,2 or 0-4"):
        parse_seeds(text)


@pytest.mark.parametrize(("text", "seed"), [("0,0", 0), ("7,1-2,2", 2)])
def test_a_seed_that_is_named_twice_is_refused(text: str, seed: int) -> None:
    with pytest.raises(ConfigurationError, match=f"the seeds {text} have {seed} more than once"):
        parse_seeds(text)


@pytest.mark.parametrize("text", ["0-100000000", "0-999,2000"])
def test_more_seeds_than_a_thousand_are_refused(text: str) -> None:
    with pytest.raises(ConfigurationError, match=f"the seeds {text} are more than 1,000; name fewer"):
        parse_seeds(text)


def test_a_seed_that_no_experiment_can_have_is_refused() -> None:
    assert parse_seeds("4294967295") == [2**32 - 1]
    with pytest.raises(ConfigurationError, match="the seeds 0,4294967296 have 4294967296, and a seed is below"):
        parse_seeds("0,4294967296")


def test_a_thousand_seeds_are_no_more_than_a_thousand() -> None:
    assert len(parse_seeds("0-998,2000")) == 1000


def test_every_seed_is_a_run_of_its_own_and_the_group_ends_with_their_comparison(
    runs: FakeRuns, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call("digits-small", "--seeds", "0-2", "--rounds", "3", "--out", "group") == 0
    assert [seed for seed, _ in runs.ran] == [0, 1, 2]
    assert [read_frozen(Path(f"group/seed-{seed}")).seed for seed in range(3)] == [0, 1, 2]
    assert json.loads(Path("group/compare/compare.json").read_text())["rows"][0]["final_accuracy"]["values"] == [
        0.5,
        0.75,
        1.0,
    ]
    said = capsys.readouterr()
    assert said.out == ""
    lines = said.err.splitlines()
    assert lines[:3] == ["seed 0 (1 of 3)", "seed 1 (2 of 3)", "seed 2 (3 of 3)"]
    assert lines[4].startswith("fedavg         3   75.0 ± 25.0 %")
    assert lines[-1] == "plots and numbers are in group/compare/compare.html"


def test_programs_get_a_list_of_summaries(runs: FakeRuns, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("digits-small", "--seeds", "4,3", "--out", "group", "--format", "json") == 0
    assert [summary["directory"] for summary in json.loads(capsys.readouterr().out)] == ["group/seed-4", "group/seed-3"]


def test_without_a_folder_groups_are_numbered(runs: FakeRuns) -> None:
    for _ in range(2):
        assert call("digits-small", "--seeds", "0") == 0
    assert sorted(path.name for path in Path("runs").iterdir()) == ["digits-small-seeds-1", "digits-small-seeds-2"]


@pytest.mark.parametrize("code", [3, INTERRUPTED, 5])
def test_a_run_that_fails_stops_the_group_with_its_code_and_the_command_that_goes_on(
    runs: FakeRuns, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    runs.codes = {1: code}
    assert call("digits-small", "--seeds", "0-2", "--out", "my group") == code
    assert [seed for seed, _ in runs.ran] == [0, 1]
    assert capsys.readouterr().err.splitlines()[-1] == "fedemu run --resume 'my group'"
    runs.codes, runs.ran = {}, []
    assert call("--resume", "my group") == 0
    assert runs.ran == [(1, False), (2, False)]
    assert "seed 0 (1 of 3): finished already, in my group/seed-0" in capsys.readouterr().err


def test_a_seed_that_diverged_is_not_run_again(runs: FakeRuns) -> None:
    runs.outcome = "diverged"
    assert call("digits-small", "--seeds", "0,1", "--out", "group") == 0
    assert call("--resume", "group") == 0
    assert len(runs.ran) == 2


def test_a_group_may_grow_by_rounds_and_by_seeds(runs: FakeRuns) -> None:
    assert call("digits-small", "--seeds", "0,1", "--rounds", "3", "--out", "group", "--set", "local.lr=0.5") == 0
    runs.ran = []
    assert call("--resume", "group", "--rounds", "4", "--set", "track.to=['nobody']") == 2
    assert call("--resume", "group", "--seeds", "1,5", "--rounds", "4") == 0
    assert runs.ran == [(1, False), (5, False)]
    grown = read_frozen(Path("group/seed-5"))
    assert (grown.seed, grown.rounds, grown.local.lr) == (5, 4, 0.5)
    assert [read_frozen(Path(f"group/seed-{seed}")).rounds for seed in (0, 1)] == [3, 4]


def test_what_does_not_compare_is_told_at_the_end_of_a_group(
    runs: FakeRuns, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("net.py").write_text("")
    loss = ("--set", "algorithm.loss=net.py:loss")
    assert call("digits-small", "--seeds", "0,1", "--out", "group", *loss) == 0
    for seed in (0, 1):
        Path(f"group/seed-{seed}/code.json").write_text(json.dumps({"net.py": str(seed) * 64}))
    capsys.readouterr()
    assert call("--resume", "group") == 0
    assert "fedemu: warning: the runs differ in the code of net.py (digest 000000000000..." in capsys.readouterr().err


def test_a_seed_whose_experiment_is_gone_still_belongs_to_its_group(runs: FakeRuns) -> None:
    assert call("digits-small", "--seeds", "0,1", "--rounds", "2", "--out", "group") == 0
    for seed in (0, 1):
        directory = Path(f"group/seed-{seed}")
        (directory / "checkpoint").mkdir()
        write_record(directory / "checkpoint", 2, {"round": 2, "record": {}, "experiment": ""})
    assert sorted(seeds_module._claimed(Path("group"))) == [0, 1]
    Path("group/seed-0/config.toml").unlink()
    assert sorted(seeds_module._claimed(Path("group"))) == [0, 1]
    assert is_group(Path("group"))


def test_a_seed_whose_claim_was_cut_off_by_a_kill_can_be_had_again(runs: FakeRuns) -> None:
    Path("group").mkdir()
    assert call("digits-small", "--seeds", "0", "--out", "group") == 0
    Path("group/seed-1").mkdir()
    for name in (".lock", "config.toml.partial"):
        Path("group/seed-1", name).touch()
    assert call("--resume", "group", "--seeds", "0,1") == 0
    assert read_frozen(Path("group/seed-1")).seed == 1


def test_a_group_goes_on_beside_leftovers_and_whatever_the_environment_says(
    runs: FakeRuns, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert call("digits-small", "--seeds", "1,2", "--out", "group") == 0
    Path("group/seed-0").mkdir()
    Path("group/seed-0.log").write_text("lines of a run\n")
    monkeypatch.setenv("FEDEMU_SEED", "7")
    runs.ran = []
    assert call("--resume", "group", "--rounds", "6") == 0
    assert runs.ran == [(1, False), (2, False)]


@pytest.mark.parametrize("place", [[], ["--out", "group"]], ids=["numbered", "named"])
def test_a_group_that_could_not_begin_leaves_nothing_and_says_no_more_than_why(
    runs: FakeRuns, tmp_path: Path, place: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    runs.codes = {0: 2}
    assert call("digits-small", "--seeds", "0-2", *place) == 2
    assert capsys.readouterr().err == ""
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("error", [KeyboardInterrupt(), FedemuError("the disk is full")])
def test_a_group_of_which_a_folder_cannot_be_made_leaves_none(
    runs: FakeRuns, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    def claim(experiment: Experiment, out: Path) -> Path:
        if experiment.seed == 2:
            raise error
        return folder.claim(experiment, out)

    monkeypatch.setattr(seeds_module, "claim", claim)
    assert call("digits-small", "--seeds", "0-2") in (INTERRUPTED, INTERNAL_ERROR)
    assert list(tmp_path.iterdir()) == []
    assert call("digits-small", "--seeds", "0", "--out", "group") == 0
    assert call("--resume", "group", "--seeds", "0-2") in (INTERRUPTED, INTERNAL_ERROR)
    assert not Path("group/seed-1").exists()
    assert runs.ran == [(0, True)]


def test_the_command_that_goes_on_names_the_places_that_were_named_for_the_group(
    runs: FakeRuns, capsys: pytest.CaptureFixture[str]
) -> None:
    runs.codes = {0: INTERRUPTED}
    places = ("--bind", "tcp://127.0.0.1:5600", "--metrics-port", "9464", "--keys", "my keys")
    assert call("digits-small", "--seeds", "0,1", "--out", "group", *places) == INTERRUPTED
    assert capsys.readouterr().err.splitlines()[-1] == (
        "fedemu run --bind tcp://127.0.0.1:5600 --keys 'my keys' --metrics-port 9464 --resume group"
    )


@pytest.mark.parametrize(("seed", "begun"), [(1, False), (0, True)])
def test_a_group_that_has_begun_keeps_what_is_left_to_do(
    runs: FakeRuns, seed: int, begun: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    runs.codes, runs.begun = {seed: 2}, begun
    assert call("digits-small", "--seeds", "0-2", "--out", "group") == 2
    assert sorted(path.name for path in Path("group").iterdir()) == ["seed-0", "seed-1", "seed-2"]
    assert "fedemu run --resume group" in capsys.readouterr().err


def test_ctrl_c_between_two_runs_says_how_to_go_on(
    runs: FakeRuns, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*arguments: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("fedemu.ops.compare.page.page.write_comparison", interrupted)
    assert call("digits-small", "--seeds", "0", "--out", "group") == INTERRUPTED
    assert capsys.readouterr().err.splitlines()[-1] == "fedemu run --resume group"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--seeds", "0,1", "--seed", "3"), "--seed is for one run, and here are several seeds; leave out --seed"),
        (
            ("--seeds", "0,1", "--set", "seed=3"),
            "--set seed is for one run, and here are several seeds; leave out --set seed",
        ),
        (("--seeds", "zero"), "zero is no list of seeds"),
        (("--seeds", "0", "--out", "group"), "choose another --out, or go on with its seeds by --resume group"),
        (("--seeds", "0", "--out", "group/seed-0/config.toml"), "exists and is not a folder; choose another --out"),
        (("--seeds", "0", "--resume", "no where"), "no where holds no group of seeds; start one with --out 'no where'"),
        (("--seeds", "0", "--resume", "."), ". holds no group of seeds; start one in another folder with --out"),
        (
            ("--seeds", "0-1", "--resume", "group/seed-0"),
            "group/seed-0 is the run of one seed; leave out --seeds, or start a group in another folder with --out",
        ),
        (("digits", "--resume", "group"), "leave out an experiment"),
        (("--resume", "group", "--set", "local.lr=9"), "local.lr can't change"),
        (("--seeds", "0", "--rounds", "0"), "rounds = 0 must be at least 1"),
    ],
)
def test_options_that_do_not_go_with_several_seeds_are_refused_in_one_sentence(
    runs: FakeRuns, arguments: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call("digits-small", "--seeds", "0", "--out", "group") == 0
    capsys.readouterr()
    assert call(*arguments) == 2
    complaint = capsys.readouterr().err
    assert said in complaint
    assert complaint.count("\n") == 1
    assert len(runs.ran) == 1


def test_a_run_directory_is_no_group(runs: FakeRuns) -> None:
    assert call("digits-small", "--seeds", "0", "--out", "group") == 0
    assert is_group(Path("group"))
    assert not is_group(Path("group/seed-0"))
    assert not is_group(Path("absent"))


def test_groups_that_begin_at_the_same_time_have_folders_of_their_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    claim, meanwhile = seeds_module._claim, []

    def slowly(folder: Path, experiment: Experiment) -> Member:
        if experiment.seed == 3:
            meanwhile.append(new_group("digits-small", [7], None, [], {}))
        return claim(folder, experiment)

    monkeypatch.setattr(seeds_module, "_claim", slowly)
    first = new_group("digits-small", [3], None, [], {})
    assert first.folder == Path("runs/digits-small-seeds-1")
    assert [group.folder for group in meanwhile] == [Path("runs/digits-small-seeds-2")]
