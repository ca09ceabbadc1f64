"""The data of an experiment: decoded once per machine into the cache, and mapped by every process."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Collection
from pathlib import Path

from fedemu.algorithms.data.corpus import Corpus
from fedemu.ops.data.cache import Decoded, ReportShare, cache_folder, locked, read, write
from fedemu.ops.data.leaf import decode_leaf, leaf_files
from fedemu.ops.data.made import built_in, own
from fedemu.ops.data.source import LABEL, DataSource, Place, TextSource, entry_of, locate
from fedemu.ops.data.texts import decode_texts
from fedemu.ops.experiment import AUTO, Data, Experiment, Flwr, Natural, Texts
from fedemu.protocol.errors import DataError
from fedemu.protocol.ids import Digest


def prepare(experiment: bytes, progress: ReportShare | None = None) -> Digest:
    """Decode the experiment's data unless this machine's cache holds them; returns their digest.

    Safe in several processes at once. Decoding leaves imports and memory behind, so give it a short-lived process.
    """
    return load(experiment, progress).digest


def load(experiment: bytes, progress: ReportShare | None = None) -> Corpus:
    """Map the experiment's data; decodes first what is not in the cache."""
    return open_corpus(Experiment.from_bytes(experiment), progress)


def open_corpus(experiment: Experiment, progress: ReportShare | None = None) -> Corpus:
    """The data set of an experiment, with the columns that it reads, in the folders that the environment names."""
    folder = os.environ.get("FEDEMU_DATA")
    return load_corpus(
        source_of(experiment.data, experiment.stream.columns),
        cache=cache_folder(os.environ),
        data=Path(folder).expanduser() if folder else None,
        progress=progress,
    )


def source_of(data: Data, columns: Collection[str] = ()) -> DataSource:
    """What is to be decoded: the data set, with the columns that its partition reads and those that are named."""
    wanted = {data.id_column, *columns} - {AUTO}
    match data.partition:
        case Natural(column=column):
            wanted.add(column)
        case Flwr(options={"partition_by": str(column)}) if column != LABEL:
            wanted.add(column)
    return DataSource(
        dataset=data.dataset,
        image_column=_chosen(data.image_column),
        label_column=_chosen(data.label_column),
        columns=tuple(sorted(wanted)),
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


def load_corpus(
    source: DataSource, *, cache: Path, data: Path | None = None, progress: ReportShare | None = None
) -> Corpus:
    """Map a data set from ``cache``, where it is stored first if need be; ``data`` is the folder to look in first.

    Raises DataError where the data set, a column or a file is missing or can't be read.
    """
    place = locate(source.dataset, data)
    entry = entry_of(source, place, cache)
    if (corpus := read(entry)) is not None:
        return corpus
    with locked(entry):
        if (corpus := read(entry)) is None:
            shutil.rmtree(entry, ignore_errors=True)
            try:
                _store(entry, source, place, progress)
            except OSError as error:
                raise DataError(
                    f"the data set {source.dataset!r} can't be stored in {entry.parent}: {error}"
                ) from error
            corpus = read(entry)
    if corpus is None:
        raise DataError(f"what was just stored in {entry} can't be read; check that disk or set FEDEMU_CACHE")
    return corpus


def _store(entry: Path, source: DataSource, place: Place, progress: ReportShare | None) -> None:
    leaf = leaf_files(place)
    if source.train_split is not None and (leaf or place.kind in ("built_in", "function")):
        raise DataError(f"the data set {source.dataset!r} has no splits to choose from; leave out data.train_split")
    if source.text is not None and (leaf or place.kind in ("built_in", "function")):
        raise DataError(f"the data set {source.dataset!r} holds no texts; set data.text.kind = 'none'")
    fixed = leaf or source.text is not None or place.kind in ("built_in", "function", "file")
    if fixed and (source.image_size or source.regroup is not None):
        setting = "image_size" if source.image_size else "regroup"
        raise DataError(f"data.{setting} goes with folders and hub data sets of images, not with {source.dataset!r}")
    if source.text is None and place.kind == "file":
        raise DataError(f"{source.dataset!r} is a file of texts; set data.text.kind to what is to be predicted of them")
    with tempfile.TemporaryDirectory(prefix=f"{entry.name}.partial-", dir=entry.parent) as scratch:
        if source.text is not None:
            write(entry, source.name, decode_texts(source, source.text, place, Path(scratch)), progress)
        elif place.kind == "built_in":
            write(entry, source.name, built_in(place, source), progress)
        elif place.kind == "function":
            write(entry, source.name, own(place.where, source), progress)
        elif leaf:
            write(entry, source.name, decode_leaf(source, leaf, Path(scratch)), progress)
        else:
            _store_images(entry, source, place, Path(scratch), progress)


def _store_images(entry: Path, source: DataSource, place: Place, scratch: Path, progress: ReportShare | None) -> None:
    """Images, or columns of numbers, by one channel first, and by three where an image turns out to need them."""
    # Kept out of every process that finds the data decoded: they import datasets, pyarrow and Pillow.
    from fedemu.ops.data.imagenet import decode_imagenet, imagenet_folder
    from fedemu.ops.data.images import Coloured

    folder = imagenet_folder(place)

    def decoded(grey: bool) -> Decoded:
        if folder is not None:
            return decode_imagenet(source, place, folder, grey)
        from fedemu.ops.data.hugging_face import decode

        return decode(source, place, scratch, grey)

    try:
        write(entry, source.name, decoded(grey=True), progress)
    except Coloured:
        write(entry, source.name, decoded(grey=False), progress)
