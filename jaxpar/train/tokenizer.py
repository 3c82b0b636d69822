"""A byte-level BPE tokenizer, trained on the text that the model will be trained on (Sennrich et al. 2016; GPT-2)."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from jaxpar.errors import RequestError

BOS, EOS = "<|begin|>", "<|end|>"
BOS_ID, EOS_ID = 0, 1
MIN_VOCAB_SIZE = 2 + 256
"""The two special tokens and one token for each byte, so that no text is unknown."""


def train_bpe(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Learn a vocabulary of exactly `vocab_size` tokens; ids 0 and 1 are `BOS` and `EOS`, which encoding never adds.

    Any text comes back from its ids unchanged, also text that spells a special token if special tokens are not skipped
    in decoding. The same texts in the same order give the same tokenizer.

    Raises:
        RequestError: a vocabulary too small for all bytes, or larger than the texts have pairs to merge for.
    """
    if vocab_size < MIN_VOCAB_SIZE:
        raise RequestError(
            f"vocabulary size {vocab_size}: bytes and special tokens take some; ask for at least {MIN_VOCAB_SIZE}"
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BOS, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    learned = tokenizer.get_vocab_size()
    if learned != vocab_size:
        raise RequestError(
            f"vocabulary size {vocab_size}: the text gives {learned} tokens; ask for {learned}, or give more text"
        )
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, directory: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json as Hugging Face's AutoTokenizer reads them."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "clean_up_tokenization_spaces": False,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
