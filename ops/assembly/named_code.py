"""The code that an experiment names beside what comes with fedemu, and the digests of its source.

The coordinator puts the digests into the experiment that it sends. A machine that gets its experiment over the network
runs such code only if it was told to (``fedemu device --allow-code``), and only if its own source has the digest.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from shlex import quote
from typing import Any

from fedemu.ops.experiment import Experiment
from fedemu.ops.results.code_of_run import CODE_FILE, EARLIER_FILE, earlier_code, known_code
from fedemu.protocol.code.named import SHOWN, expect, is_name, is_open, is_restricted, place_of, require
from fedemu.protocol.code.source import digest_of_source
from fedemu.protocol.errors import ConfigurationError
from fedemu.protocol.host.files import write_whole
from fedemu.protocol.host.paths import is_file
from fedemu.protocol.ids import Digest


def named_places(experiment: Experiment) -> dict[str, str]:
    """Each module and file whose code the experiment is sure to run, with the setting that names it."""
    algorithm = experiment.algorithm
    named = [
        ("data.dataset", experiment.data.dataset if is_name(experiment.data.dataset) else ""),
        ("model.name", experiment.model.name),
        ("algorithm.name", algorithm.name),
        ("algorithm.loss", algorithm.loss),
        *(("algorithm.terms", term) for term in algorithm.terms),
    ]
    return {place_of(name): setting for setting, name in reversed(named) if ":" in name}


def allowing(experiment: Experiment) -> str:
    """The options that allow ``fedemu device`` to run the code which the experiment names. Each follows a space."""
    return "".join(f" --allow-code {quote(place)}" for place in named_places(experiment))


def with_digests(experiment: Experiment) -> Experiment:
    """The experiment with the digests of the code that it names, in options as well. Nothing is imported.

    A place without a source file gets no digest.
    """
    options = (experiment.model.options, experiment.algorithm.options, experiment.algorithm.terms)
    places = {*named_places(experiment), *(place_of(text) for text in _texts(options) if is_name(text))}
    found: dict[str, Digest] = {}
    for place in sorted(places):
        try:
            found[place] = digest_of_source(place)
        except (ConfigurationError, OSError):
            continue
    return experiment.model_copy(update={"code": found})


def received(content: bytes) -> Experiment:
    """An experiment that was sent as bytes. From now on this process expects the digests that it names.

    Raises ConfigurationError if the bytes are no experiment, if it names code that this process may not run, or if the
    code is not that with which the run was started.
    """
    experiment = Experiment.from_bytes(content)
    expect(experiment.code)
    places = {**dict.fromkeys(experiment.code, "an option"), **named_places(experiment)}
    barred = [place for place in places if not is_open(place)]
    if barred:
        named = ", ".join(f"{place} ({places[place]})" for place in barred)
        options = " ".join(f"--allow-code {place}" for place in barred)
        raise ConfigurationError(
            f"the coordinator's experiment names code that does not come with fedemu: {named}; this machine was not "
            f"told to run it; read it, and start these devices with {options}"
        )
    for place in places:
        require(place)
    if not is_restricted():
        _require_unchanged(experiment.code)
    return experiment


def _require_unchanged(digests: Mapping[str, Digest]) -> None:
    """Raise ConfigurationError if the source of a place is not that of these digests any more.

    A trainer that takes the place of another one loads the code anew, perhaps hours after the run was started.
    """
    for place, digest in digests.items():
        if (now := digest_of_source(place)) != digest:
            raise ConfigurationError(
                f"{place} is not what it was when this run was started (digest {digest[:SHOWN]}... then, "
                f"{now[:SHOWN]}... now); bring its source back, and resume the run"
            )


def record(directory: Path, found: Mapping[str, str], say: Callable[[str], None]) -> None:
    """Write the digests into a run directory. ``say`` gets a line if they are not those of the last time.

    If rounds have been played with other digests, these are kept in ``EARLIER_FILE``.
    """
    known = known_code(directory)
    changed = {place: digest for place, digest in known.items() if found.get(place, digest) != digest}
    for place, digest in changed.items():
        say(
            f"{place} was changed since this run was last started (digest {digest[:SHOWN]}... then, "
            f"{found[place][:SHOWN]}... now); the run goes on with what it is now"
        )
    if changed and is_file(rows := directory / "metrics.jsonl") and rows.stat().st_size:
        earlier = earlier_code(directory)
        for place, digest in changed.items():
            if earlier.setdefault(place, [])[-1:] != [digest]:  # a kill may have come between the two files
                earlier[place].append(digest)
        write_whole(directory / EARLIER_FILE, json.dumps(earlier, indent=1, sort_keys=True) + "\n")
    if known != dict(found):
        write_whole(directory / CODE_FILE, json.dumps(dict(found), indent=1, sort_keys=True) + "\n")


def changed_code(directory: Path, experiment: Experiment) -> list[str]:
    """The modules and files that have another content now than when the run of a directory was last started."""
    known = known_code(directory)
    found = with_digests(experiment).code if known else {}
    return [place for place, digest in known.items() if found.get(place, digest) != digest]


def _texts(value: Any) -> Iterator[str]:
    """All texts in a tree of lists and tables."""
    match value:
        case str():
            yield value
        case Mapping():
            for part in value.values():
                yield from _texts(part)
        case list() | tuple():
            for part in value:
                yield from _texts(part)
