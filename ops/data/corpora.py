"""Opens the data of an experiment. They are decoded into the cache once per machine, and mapped by every process."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import Final

from fedemu.algorithms.data.corpus import Corpus
from fedemu.ops.data.cache import Coloured, locked, read, write
from fedemu.ops.data.readers import reader_of
from fedemu.ops.data.source import LABEL, DataSource, Place, TextSource, entry_of, locate
from fedemu.ops.experiment import AUTO, Data, Experiment, Flwr, Natural, Periods, Stream, Texts
from fedemu.ops.homes import cache_folder, data_folder
from fedemu.protocol.errors import DataError, FedemuError
from fedemu.protocol.host.files import is_of_disk, refusal_of
from fedemu.protocol.ids import Digest

SENT: Final = "FEDEMU_SENT"
"""The variable that names a folder with the decoded data, where an engine has sent them to this machine."""


def prepare(experiment: bytes) -> Digest:
    """Decode the data of an experiment, given as bytes, unless this machine's cache holds them. Returns their digest.

    Several processes may do this at once. Decoding imports much and leaves much in memory, so give it a process of its
    own. Raises DataError if the data cannot be decoded.
    """
    return open_corpus(Experiment.from_bytes(experiment)).digest


def open_corpus(experiment: Experiment) -> Corpus:
    """Map the data of an experiment, with the columns that it reads. They are decoded first if the cache lacks them.

    The environment names the folders: ``FEDEMU_DATA`` with data sets, ``FEDEMU_CACHE`` with the cache, and ``SENT``.
    Raises DataError if the data set or one of its columns is missing, or cannot be read.
    """
    if sent := os.environ.get(SENT):
        corpus = read(Path(sent))
        if corpus is None:
            raise DataError(f"the data that were sent to {sent} can't be read; run it again")
        return corpus
    return load_corpus(
        source_of(experiment.data, experiment.stream),
        cache=cache_folder(os.environ),
        data=data_folder(os.environ),
    )


def source_of(data: Data, stream: Stream | None = None) -> DataSource:
    """What is to be read for the table ``[data]``: its columns, those of its partition, and those of the stream.

    A column that tells people apart is not read as an order, also if the stream goes by it.
    """
    people = {data.ids} if data.test_by == "id" or data.id_min_samples else set()
    match data.partition:
        case Natural(column=column):
            people.add(column)
        case Flwr(options={"partition_by": str(column)}) if column != LABEL:
            people.add(column)
    streamed = () if stream is None else stream.columns
    wanted = {name for name in (data.id_column, *people, *streamed) if name not in (AUTO, None)}
    return DataSource(
        dataset=data.dataset,
        image_column=_chosen(data.image_column),
        label_column=_chosen(data.label_column),
        columns=tuple(sorted(wanted)),
        order=next((name for name in streamed if isinstance(stream, Periods) and name not in people), None),
        test_fraction=data.test_fraction,
        train_split=_chosen(data.train_split),
        test_by=data.ids if data.test_by == "id" else None,
        id_column=data.ids if data.id_min_samples else None,
        id_min_samples=data.id_min_samples,
        text=_text_source(data.text),
        image_size=data.image_size,
        regroup=None if data.regroup == "none" else data.regroup,
    )


def _text_source(text: Texts) -> TextSource | None:
    if text.kind == "none":
        return None
    return TextSource(text.kind, text.length, text.vocabulary, text.tokenizer, _chosen(text.column))


def _chosen(setting: str) -> str | None:
    return None if setting == AUTO else setting


def load_corpus(source: DataSource, *, cache: Path, data: Path | None = None) -> Corpus:
    """Map a data set from the folder ``cache``, after it is decoded into it if necessary.

    ``data`` is the folder in which the data set is looked for first. Raises DataError if the data set, a column or a
    file is missing or cannot be read, and FedemuError if the cache's disk is full.
    """
    place = locate(source.dataset, data)
    entry = entry_of(source, place, cache)
    if (corpus := read(entry)) is not None:
        return corpus
    with locked(entry):
        if (corpus := read(entry)) is None:
            shutil.rmtree(entry, ignore_errors=True)
            try:
                _store(entry, source, place)
            except OSError as error:
                refused = f"the data set {source.dataset!r} can't be stored in {entry.parent}"
                if is_of_disk(error):
                    raise FedemuError(f"{refused}: {refusal_of(error)}, or set FEDEMU_CACHE") from error
                raise DataError(f"{refused}: {error}") from error
            corpus = read(entry)
    if corpus is None:
        raise DataError(f"what was just stored in {entry} can't be read; check that disk or set FEDEMU_CACHE")
    return corpus


def _store(entry: Path, source: DataSource, place: Place) -> None:
    """Decode a data set into the cache: images with one channel first, and with three if one of them needs them."""
    reader = reader_of(source, place)
    with tempfile.TemporaryDirectory(prefix=f"{entry.name}.partial-", dir=entry.parent) as scratch:
        try:
            write(entry, source.name, reader.decode(source, place, Path(scratch), True))
        except Coloured:
            write(entry, source.name, reader.decode(source, place, Path(scratch), False))
