"""Tokenizers that are trained on the data set itself. Nothing is downloaded, and every machine gets the same one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from fedemu.algorithms.data.language import SPECIAL_TOKENS, UNKNOWN
from fedemu.ops.data.source import TextSource
from fedemu.ops.extras import require
from fedemu.protocol.errors import DataError
from fedemu.protocol.wording import counted


class Tokenizer(NamedTuple):
    """``vocabulary`` holds the tokens by number, the special ones first.

    ``encode`` turns a text into numbers of tokens.
    """

    vocabulary: tuple[str, ...]
    encode: Callable[[str], Sequence[int]]


def require_tokenizer(wanted: TextSource) -> None:
    """Raise ConfigurationError if the library of the tokenizer is not installed."""
    if wanted.tokenizer == "wordpiece":
        need, instead = "data.text.tokenizer = 'wordpiece'", "set data.text.tokenizer = 'characters'"
        require("tokenizers", "language", need, instead)


def train_tokenizer(wanted: TextSource, texts: Sequence[str]) -> Tokenizer:
    """Train the tokenizer on some texts.

    Raises ConfigurationError if its library is not installed, and DataError if the texts have too few tokens.
    """
    require_tokenizer(wanted)
    tokenizer = _characters(texts, wanted.vocabulary) if wanted.tokenizer == "characters" else _wordpiece(texts, wanted)
    if len(tokenizer.vocabulary) < len(SPECIAL_TOKENS) + 2:
        raise DataError("the texts are made of fewer than two different tokens, so there is nothing to predict")
    return tokenizer


def _characters(texts: Sequence[str], most: int) -> Tokenizer:
    """The tokens are the most frequent characters, upper and lower case, in the order of their code points."""
    counts = Counter(character for text in texts for character in text)
    frequent = sorted(counts, key=lambda character: (-counts[character], character))[: most - len(SPECIAL_TOKENS)]
    vocabulary = (*SPECIAL_TOKENS, *sorted(frequent))
    numbers = {character: number for number, character in enumerate(vocabulary)}
    return Tokenizer(vocabulary, lambda text: [numbers.get(character, UNKNOWN) for character in text])


def _wordpiece(texts: Sequence[str], wanted: TextSource) -> Tokenizer:
    """The tokens are words without case and accents, as in BERT.

    Rare words are cut into pieces. All characters are tokens, or the most frequent ones if not all have room. A word
    with any other character is unknown. Raises DataError if all words are.
    """
    from tokenizers import Tokenizer as Pieces
    from tokenizers import models, normalizers, pre_tokenizers, trainers

    def prepared(model: Any) -> Any:
        pieces = Pieces(model)
        pieces.normalizer = normalizers.BertNormalizer()
        pieces.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        return pieces

    unknown = SPECIAL_TOKENS[UNKNOWN]
    trained = prepared(models.WordPiece(unk_token=unknown))
    split, normalise = trained.pre_tokenizer.pre_tokenize_str, trained.normalizer.normalize_str
    words = Counter(word for text in texts for word, _ in split(normalise(text)))
    characters = _most_frequent(words, wanted.vocabulary - len(SPECIAL_TOKENS))
    if rare := {*"".join(words)} - characters:
        # The library would choose among equally frequent characters in the order of a hash table.
        texts = [" ".join(word for word, _ in split(normalise(text)) if not rare & {*word}) for text in texts]
        words = Counter({word: count for word, count in words.items() if not rare & {*word}})
        if not words:
            raise DataError(
                f"data.text.vocabulary = {wanted.vocabulary} has room for {counted(len(characters), 'character')}, and "
                "no word of the texts is made of these alone; raise it, or set data.text.tokenizer = 'characters'"
            )
    # The library would number these in the order of a hash table, and the numbers decide between equally frequent
    # pairs. As special tokens they get their numbers before the library looks at any word.
    inner = sorted(f"##{character}" for character in _inside(words))
    trainer = trainers.WordPieceTrainer(
        vocab_size=wanted.vocabulary,
        special_tokens=[*SPECIAL_TOKENS, *inner],
        limit_alphabet=max(1, len({*"".join(words)})),
        show_progress=False,
    )
    trained.train_from_iterator(texts, trainer)
    numbers = trained.get_vocab()
    pieces = prepared(models.WordPiece(numbers, unk_token=unknown))
    return Tokenizer(tuple(sorted(numbers, key=numbers.__getitem__)), lambda text: pieces.encode(text).ids)


def _inside(words: Iterable[str]) -> set[str]:
    """The characters that are tokens inside of words, too: all but marks that stand alone, such as commas."""
    return {character for word in words for character in word if character.isalnum() or len(word) > 1}


def _most_frequent(words: Counter[str], room: int) -> set[str]:
    """The most frequent characters of some words whose tokens, one or two of each, number at most ``room``."""
    counts: Counter[str] = Counter()
    for word, count in words.items():
        for character in word:
            counts[character] += count
    inside = _inside(words)
    frequent = sorted(counts, key=lambda character: (-counts[character], character))
    tokens = accumulate(2 if character in inside else 1 for character in frequent)
    return {character for character, number in zip(frequent, tokens, strict=True) if number <= room}
