"""BERT for masked language modelling, from the package ``transformers``. It is built from a configuration, not loaded.

``tinybert`` has the size of TinyBERT's student (Jiao et al., "TinyBERT: Distilling BERT for Natural Language
Understanding", 2020): 4 layers of width 312 with 12 heads. ``tinybert_small`` is made for a CPU. Input and output
embeddings are the same leaf, and there is no dropout. The import of ``transformers`` takes seconds and about 150 MB, so
it happens only when such a model is built.
"""

from __future__ import annotations

import copy
from typing import Any, Literal

import torch
from pydantic import PositiveInt
from torch import Tensor, nn
from torch.func import functional_call

from fedemu.algorithms.data.language import PAD
from fedemu.algorithms.interface import Outputs, Tree
from fedemu.algorithms.models.torch_module import under_seed
from fedemu.protocol.errors import ConfigurationError

_INSTALL = "install it with pip install 'fedemu[language]'"


class MaskedBert:
    """A ``BertForMaskedLM`` as pure functions.

    Logits are ``[batch, length, vocabulary]``, features ``[batch, length, hidden]``. ``x [batch, 2, length]`` is as in
    ``Corpus``; the model reads its first row. There is no attention to ``[PAD]``.
    """

    kind: Literal["sequence"] = "sequence"
    buffers: frozenset[str] = frozenset()

    def __init__(self, configuration: Any) -> None:
        self._configuration = configuration
        self._module = _Reader(self._build(0)).eval().requires_grad_(False)

    def init(self, seed: int) -> Tree:
        return {name: leaf.detach().clone() for name, leaf in self._build(seed).named_parameters()}

    def apply(self, variables: Tree, x: Tensor, train: bool) -> tuple[Outputs, Tree]:
        named = {f"bert.{name}": leaf for name, leaf in variables.items()}
        logits, features = functional_call(self._module, named, (x.select(-2, 0),))
        return Outputs(logits, features, {}), {}

    def _build(self, seed: int) -> Any:
        from transformers import BertForMaskedLM

        return under_seed(lambda: BertForMaskedLM(copy.deepcopy(self._configuration)), seed)


class _Reader(nn.Module):
    """BERT with all of its inputs given, because a recorded step cannot use BERT's buffers or read values."""

    def __init__(self, bert: Any) -> None:
        super().__init__()
        self.bert = bert

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        lowest = torch.finfo(torch.float32).min
        attention = torch.where(tokens == PAD, lowest, 0.0)[:, None, None, :]
        positions = torch.arange(tokens.shape[-1], device=tokens.device)[None]
        features = self.bert.bert(
            input_ids=tokens,
            attention_mask=attention,
            position_ids=positions,
            token_type_ids=torch.zeros_like(tokens),
        ).last_hidden_state
        return self.bert.cls(features), features


def tinybert(
    input_shape: tuple[int, ...],
    outputs: int,
    layers: PositiveInt = 4,
    hidden: PositiveInt = 312,
    heads: PositiveInt = 12,
    feed_forward: PositiveInt = 1200,
) -> MaskedBert:
    """BERT in TinyBERT's size: 4 layers, 312 wide, 12 heads, feed-forward layers of 1,200.

    ``outputs`` is the size of the vocabulary. Raises ConfigurationError if samples are not texts, if ``transformers``
    is missing, or if the width cannot be divided by the number of heads.
    """
    length = token_length("tinybert", input_shape)
    if hidden % heads:
        raise ConfigurationError(
            f"model.hidden = {hidden} can't be divided by model.heads = {heads}; choose heads that divide it"
        )
    try:
        from transformers import BertConfig
    except ImportError:
        raise ConfigurationError(f"this model needs the package transformers; {_INSTALL}") from None
    # Attention is written out (eager), because torch's own function has no forward mode.
    chosen: dict[str, Any] = {"attn_implementation": "eager"}
    return MaskedBert(
        BertConfig(
            vocab_size=outputs,
            hidden_size=hidden,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            intermediate_size=feed_forward,
            max_position_embeddings=length,
            type_vocab_size=1,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            pad_token_id=PAD,
            tie_word_embeddings=True,
            **chosen,
        )
    )


def tinybert_small(
    input_shape: tuple[int, ...],
    outputs: int,
    layers: PositiveInt = 2,
    hidden: PositiveInt = 64,
    heads: PositiveInt = 2,
    feed_forward: PositiveInt = 256,
) -> MaskedBert:
    """``tinybert`` with 2 layers, 64 wide, 2 heads, feed-forward layers of 256. A step takes a tenth of the time."""
    return tinybert(input_shape, outputs, layers, hidden, heads, feed_forward)


def token_length(model: str, input_shape: tuple[int, ...]) -> int:
    """The number of tokens of a sample. Raises ConfigurationError if samples are not texts."""
    if len(input_shape) != 2 or input_shape[0] != 2:
        raise ConfigurationError(
            f"model {model!r} needs texts, but a sample has the shape {input_shape}; "
            "choose a data set of texts and set data.text.kind, or another model"
        )
    return input_shape[1]
