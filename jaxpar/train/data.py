"""Training data: a text file as token ids, its validation part, and batches that depend on the step alone."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from jaxpar.errors import RequestError
from jaxpar.train.tokenizer import BOS_ID, EOS_ID

VALIDATION_SHARE = 0.05


def read_documents(path: Path) -> list[str]:
    """The documents of a UTF-8 text file: what its form feeds (page breaks, U+000C) separate, without empty ones.

    Raises:
        RequestError: the file is missing, cannot be read, is not UTF-8, or holds no text.
    """
    try:
        # Not read_text: it would turn \r\n into \n.
        text = path.read_bytes().decode("utf-8")
    except OSError as error:
        raise RequestError(f"{path}: {error.strerror or error}; name a text file") from error
    except UnicodeDecodeError as error:
        raise RequestError(f"{path}: not UTF-8 at byte {error.start}; convert the file to UTF-8") from error
    documents = [document for document in text.split("\f") if document.strip()]
    if not documents:
        raise RequestError(f"{path}: no text in {len(text)} characters; name a file that has some")
    return documents


def encode(documents: list[str], tokenizer: Tokenizer) -> np.ndarray:
    """All documents one after the other, each between BOS and EOS: [tokens] int32."""
    encodings = tokenizer.encode_batch_fast(documents, add_special_tokens=False)
    return np.concatenate([np.array([BOS_ID, *encoding.ids, EOS_ID], np.int32) for encoding in encodings])


def split(ids: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    """The training part and the validation part, the last 5 % of the tokens: [tokens] -> [training], [validation].

    Raises:
        RequestError: a part is too short for one sequence of `length` tokens and their targets.
    """
    cut = len(ids) - round(len(ids) * VALIDATION_SHARE)
    parts = ids[:cut], ids[cut:]
    if min(map(len, parts)) <= length:
        raise RequestError(
            f"{len(ids)} tokens of text leave {len(parts[1])} for validation, and a sequence of {length} needs "
            f"{length + 1}: give more text or shorter sequences"
        )
    return parts


def batches(ids: np.ndarray, batch: int, length: int, seed: int, start_step: int = 0) -> Iterator[np.ndarray]:
    """Yield, without end, the batches of steps `start_step`, `start_step` + 1, ...: [batch, length + 1].

    Columns [:-1] are inputs and [1:] their targets. A step's batch depends on the arguments and the step alone, so that
    a resumed run sees what an unbroken one would. The text is cut into windows of `length` tokens; an epoch visits each
    once, in an order and from an offset of its own, and is followed by the next in the middle of a batch if need be.

    Args:
        ids: [tokens] int32, at least `length` + 1 (`split` sees to it).
        batch: sequences in a batch.
        length: tokens of a sequence that have a target.
        seed: of the order.
        start_step: first step.
    """
    count = max(1, len(ids) // length - 1)
    slack = len(ids) - (count * length + 1)
    columns = np.arange(length + 1)
    epoch, starts = -1, np.empty(0, np.int64)
    for step in itertools.count(start_step):
        rows = []
        for sequence in range(step * batch, (step + 1) * batch):
            if sequence // count != epoch:
                epoch = sequence // count
                random = np.random.default_rng((seed, epoch))
                starts = random.integers(slack + 1) + length * random.permutation(count)
            rows.append(starts[sequence % count] + columns)
        yield ids[np.stack(rows)]
