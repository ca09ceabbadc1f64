"""The runs of a comparison: where they are, which belong to one experiment, and how each experiment is called."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from fedemu.coordinator.record.run import Run, read_run
from fedemu.ops.compare.comparable import data_named, data_of, incomparable, tested_in_other_rounds, untested
from fedemu.ops.compare.entry import cut_short
from fedemu.ops.compare.replay_label import NAMED, replay_label
from fedemu.ops.compare.settings import differing, most_common, short_name, usual
from fedemu.ops.experiment import Experiment
from fedemu.ops.experiment.read_toml import read_toml
from fedemu.ops.experiment.sources import CONFIG_FILE
from fedemu.ops.experiment.traces import TRACES_FILE
from fedemu.ops.results.code_of_run import earlier_code, known_code
from fedemu.ops.results.listing import counting_order, find
from fedemu.ops.results.words import Keys, Table, at, shown, without_settings
from fedemu.protocol.code.named import SHOWN, without_cells
from fedemu.protocol.errors import ConfigurationError
from fedemu.protocol.host.paths import is_file, is_folder
from fedemu.protocol.ids import digest_of_file

_NOT_SCIENCE = ("name", "seed", "diagnose")
"""Experiments that differ only in these settings count as one. What is measured in a run does not change the run."""
_REPLAY = {("replay", key) for key in NAMED}
_METHOD = ("algorithm", "name")
_TERMS = ("algorithm", "terms")
_NAMED_OTHERWISE = {_METHOD, ("algorithm", "loss"), ("rounds",), *_REPLAY}
_LONGEST_LABEL = 60

_NO_REPLAY = replay_label({})


@dataclass(frozen=True)
class Group:
    """The runs of one experiment, which differ in their seeds. ``experiment`` is empty without a ``config.toml``.

    ``place`` is the run directory if that was named for the comparison, or the folder that holds it. ``code`` are the
    digests of the code that the experiment names, by module and file, each with those that it had in earlier rounds.
    """

    place: Path
    experiment: Table
    runs: tuple[Run, ...]
    seeds: tuple[int | None, ...]
    code: Mapping[str, str] = field(default_factory=dict)


def find_runs(path: Path) -> list[Path]:
    """The run directory ``path``, or those directly inside it and those further below, as groups of seeds leave them.

    Raises ConfigurationError if there is none.
    """
    if not is_folder(path):
        raise ConfigurationError(f"{path} is no folder; name run directories, or folders of run directories")
    if is_run(path):
        return [path]
    inside = sorted((child for child in path.iterdir() if is_run(child)), key=lambda child: counting_order(child.name))
    below = [run for run in find(path) if run.parent != path and is_run(run)]
    if not inside and not below:
        raise ConfigurationError(f"{path} holds neither a run nor a group of runs; name run directories")
    return [*inside, *below]


def is_run(path: Path) -> bool:
    """Whether a folder is a run directory."""
    return is_file(path / CONFIG_FILE) or is_file(path / "metrics.jsonl")


def grouped(paths: Iterable[Path]) -> tuple[list[Group], list[str]]:
    """The runs of all ``paths`` by experiment, in the order of their first run, and warnings as sentences.

    Runs with other code, other traces or other data are another experiment. A run that tells of no code, or not of its
    data, goes with the first one that does. If there are several runs of one experiment and seed, the one that got
    furthest counts, or the first of those.
    """
    every = list(_each(paths))
    usual_code = {found.key: found.code for found in reversed(every) if found.code}
    usual_data = {found.key: found.data for found in reversed(every) if found.data}
    by_experiment: dict[tuple[str, str, str], dict[int | None, _Found]] = {}
    warnings = [lacking for found in every if (lacking := without_settings(found.run.path))]
    for found in every:
        code = found.code or usual_code.get(found.key, {})
        data = found.data or usual_data.get(found.key, "")
        alike = by_experiment.setdefault((found.key, data, json.dumps(code, sort_keys=True)), {})
        twin = alike.get(found.seed)
        kept, left_out = (found, twin) if twin is None or found.reached > twin.reached else (twin, found)
        alike[found.seed] = kept
        if left_out is not None:
            got = ", which got further" if kept is found else ""
            warnings.append(
                f"{left_out.run.path} is left out: it is the same experiment and seed as {kept.run.path}{got}"
            )
    groups = [
        Group(first.place, first.experiment, tuple(one.run for one in alike.values()), tuple(alike), json.loads(code))
        for (_, _, code), alike in by_experiment.items()
        for first in [next(iter(alike.values()))]
    ]
    warnings += incomparable([group.experiment for group in groups if group.experiment])
    warnings += _other_diagnosis(every)
    warnings += [*_cut_short(groups), *untested([run for group in groups for run in group.runs])]
    warnings += [told for group in groups if (told := tested_in_other_rounds(group.experiment, group.runs))]
    return groups, [*warnings, *_other_code(groups), *_other_traces(every), *_other_data(every)]


def labels(groups: Sequence[Group]) -> list[str]:
    """A label for each group: its method, loss and local terms, its replay, and the settings in which groups differ.

    No two labels are the same. Values that are usual among the groups are not named. Rounds are named only if nothing
    else tells two groups apart. If the label would be long, or nothing is known, the folder's name is used.
    """
    tables = [group.experiment for group in groups if group.experiment]
    differ = differing(tables)
    named = [_label(group, tables, differ) for group in groups]
    further: list[Callable[[Group], str]] = [_folder, lambda group: str(group.runs[0].path)]
    if ("rounds",) in differ:
        further.insert(0, _rounds)
    for more in further:
        told = [(label, more(group)) for label, group in zip(named, groups, strict=True)]
        suffixes: dict[str, set[str]] = {}
        for label, suffix in told:
            suffixes.setdefault(label, set()).add(suffix)
        # What all rows of one label share tells none of them apart.
        named = [f"{label} ({suffix})" if len(suffixes[label]) > 1 else label for label, suffix in told]
    return named


@dataclass(frozen=True)
class _Found:
    """A run, where it was found, and its experiment with all defaults, but without the settings ``_NOT_SCIENCE``.

    ``code`` is empty if the experiment names none, or if it is not known (yet). ``traces`` is the digest of what the
    run keeps of the trace files that the experiment names, empty if it names none. ``diagnosed`` is the table
    ``[diagnose]``, empty if no round is diagnosed.
    """

    run: Run
    place: Path
    experiment: Table
    seed: int | None
    code: Mapping[str, str]
    traces: str
    diagnosed: Table

    @property
    def settings(self) -> str:
        """A text that is the same for all runs with the same settings. A run without a known experiment has its own."""
        return json.dumps(self.experiment, sort_keys=True) if self.experiment else str(self.run.path)

    @property
    def key(self) -> str:
        """A text that is the same for all runs with the same settings and traces."""
        return f"{self.settings} {self.traces}"

    @property
    def data(self) -> str:
        """The digest of the run's data, empty if the run does not tell it."""
        return data_of([self.run])

    @property
    def reached(self) -> tuple[bool, int]:
        """How far the run got: whether it was completed, and its rounds."""
        return self.run.outcome == "completed", len(self.run.rows)


def _each(paths: Iterable[Path]) -> Iterator[_Found]:
    """The runs of all ``paths``, each once."""
    seen: set[Path] = set()
    for place in paths:
        for directory in find_runs(place):
            if directory.resolve() not in seen:
                seen.add(directory.resolve())
                yield _read(directory, place if place in (directory, directory.parent) else directory.parent)


def _read(directory: Path, place: Path) -> _Found:
    # No figure of a comparison depends on events. Those of many runs would fill the memory.
    run = replace(read_run(directory), events=(), diagnosis=())
    table = read_toml(directory / CONFIG_FILE) if run.config else {}
    if table:
        with contextlib.suppress(ConfigurationError):  # another version has frozen it; the table is compared as it is
            table = Experiment.parse(table).table()
    experiment = {key: value for key, value in table.items() if key not in _NOT_SCIENCE}
    traces = directory / TRACES_FILE
    digest = digest_of_file(traces) if is_file(traces) else ""
    diagnose = table.get("diagnose") or {}
    diagnosed = diagnose if diagnose.get("every") else {}
    return _Found(run, place, experiment, table.get("seed"), _code(directory), digest, diagnosed)


def _code(directory: Path) -> dict[str, str]:
    """The digests of a run's code. One that was changed while the run went on is followed by those before it."""
    earlier = earlier_code(directory)
    return {place: " ".join([digest, *earlier.get(place, [])]) for place, digest in known_code(directory).items()}


def _other_diagnosis(every: Sequence[_Found]) -> list[str]:
    """A warning if runs were diagnosed at other intervals, or on other numbers of samples.

    What training loses is most in the first rounds. It is a mean of losses alone, which few samples make larger.
    """
    ways = dict.fromkeys(shown(found.diagnosed) for found in every if found.diagnosed)
    figures = "their local forgetting, aggregation forgetting and alignments do not compare"
    return [f"the runs differ in diagnose ({', '.join(ways)}), so {figures}"] if len(ways) > 1 else []


def _cut_short(groups: Sequence[Group]) -> list[str]:
    """A warning if runs diverged, or have not got, or not yet, to the round of others."""
    short = cut_short((run, group.experiment.get("rounds")) for group in groups for run in group.runs)
    told = ", ".join(f"{len(run.rows)} of {most} in {run.path}" for run, most in short)
    lasts = "so the figures of their last models do not compare"
    return [f"the runs differ in the rounds that they got through ({told}), {lasts}"] if told else []


def _other_code(groups: Sequence[Group]) -> list[str]:
    """A warning for each module and file whose source was not the same for all runs, or for all rounds of a run."""
    codes = [(place, digest, group.runs[0].path) for group in groups for place, digest in group.code.items()]
    return [
        *(
            f"the code of {place} was changed while {path} went on, so its figures are those of several methods"
            for place, digest, path in codes
            if " " in digest
        ),
        *(
            f"the runs differ in the code of {place} ({_digests(paths)}), so those of one experiment are rows of their "
            "own"
            for place, paths in _with_several(codes)
        ),
    ]


def _other_traces(every: Sequence[_Found]) -> list[str]:
    """A warning for each experiment whose trace files had not the same content for all runs."""
    return [
        "the runs differ in the content of their trace files "
        f"({TRACES_FILE} in {', '.join(map(str, paths.values()))}), "
        "so those with the same settings are rows of their own"
        for _, paths in _with_several((found.settings, found.traces, found.run.path) for found in every)
    ]


def _other_data(every: Sequence[_Found]) -> list[str]:
    """A warning for each data set that had not the same content for all runs."""
    known = [found for found in every if found.data and found.experiment]
    return [
        f"the runs differ in the content of their data set ({_digests(paths)}), so their figures do not compare, and "
        "those with the same settings are rows of their own"
        for _, paths in _with_several((data_named(found.experiment), found.data, found.run.path) for found in known)
    ]


def _with_several(digests: Iterable[tuple[str, str, Path]]) -> list[tuple[str, dict[str, Path]]]:
    """What has several digests, and the first run with each. ``digests`` are what has one, the digest, and the run."""
    places: dict[str, dict[str, Path]] = {}
    for what, digest, run in digests:
        places.setdefault(what, {}).setdefault(digest, run)
    return [(what, runs) for what, runs in places.items() if len(runs) > 1]


def _digests(places: Mapping[str, Path]) -> str:
    """Where each digest is. One of code may be followed by those before it."""
    told = ((f"{digest[:SHOWN]}...{' after others' if ' ' in digest else ''}", path) for digest, path in places.items())
    return ", ".join(f"digest {short} in {path}" for short, path in told)


def _label(group: Group, tables: Sequence[Table], differ: set[Keys]) -> str:
    """The label of one group. ``differ`` are the settings in which the ``tables`` of all groups differ."""
    own = group.experiment
    if not own:
        return _folder(group)
    algorithm = own.get("algorithm") or {}
    label = without_cells(str(algorithm.get("name")))
    if algorithm.get("loss", "cross_entropy") != "cross_entropy":
        label += f" + {without_cells(str(algorithm['loss']))}"
    label += "".join(f" + {without_cells(term)}" for term in algorithm.get("terms") or {})
    names = {path: short_name(path) for path in sorted(differ - _NAMED_OTHERWISE)}
    settings = []
    if differ & _REPLAY:
        replays = [replay_label(table.get("replay") or {}) for table in tables]
        replay = replay_label(own.get("replay") or {})
        if not replay == most_common(replays) == _NO_REPLAY:
            settings.append(replay)
    for path, name in names.items():
        value = at(own, path)
        if value is not None and value != usual(_sharing(path, own, tables), path):
            whole = " ".join(map(without_cells, path[2:])) if path[:2] == _TERMS else ".".join(path)
            unique = list(names.values()).count(name) == 1
            settings.append(f"{name if unique else whole} {without_cells(shown(value))}")
    told = ", ".join([label, *settings])
    return told if len(told) <= _LONGEST_LABEL else f"{label} ({_folder(group)})"


def _sharing(path: Keys, own: Table, tables: Sequence[Table]) -> Sequence[Table]:
    """The tables among which a setting counts as usual.

    Methods and local terms are always named, so these are the tables with the same method or with the same term.
    """
    if path[:2] == _TERMS:
        return [table for table in tables if at(table, path[:3]) is not None]
    if path[0] == "algorithm":
        return [table for table in tables if at(table, _METHOD) == at(own, _METHOD)]
    return tables


def _rounds(group: Group) -> str:
    rounds = group.experiment.get("rounds")
    return f"{rounds} round{'' if rounds == 1 else 's'}"


def _folder(group: Group) -> str:
    """The name of the folder that holds the seeds of one experiment. With a single run, the name of its folder.

    A folder that is named by its seed says nothing, so it is the one above it. Bytes that are no UTF-8 are escaped.
    """
    own = len(group.runs) > 1 and not is_run(group.place)
    folder = (group.place if own else group.runs[0].path).resolve()
    name = (folder.parent if re.fullmatch(r"seed-\d+", folder.name) else folder).name
    return name.encode(errors="backslashreplace").decode()
