"""The tokenizer that a GGUF file's metadata describe."""

from __future__ import annotations

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, processors
from tokenizers.pre_tokenizers import PreTokenizer

from jaxpar.checkpoint.chat_template import ChatTemplate
from jaxpar.checkpoint.fields import Fields
from jaxpar.checkpoint.files import one_line
from jaxpar.checkpoint.gguf_file import GgufFile
from jaxpar.checkpoint.tokenizer import Tokenizer
from jaxpar.errors import CheckpointError

_CONTROL, _USER_DEFINED = 3, 4
_LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)


def _byte_level(use_regex: bool) -> PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)


# By the name in `tokenizer.ggml.pre`: how text is split before byte-pair encoding. `use_regex` is GPT-2's own split.
_PRE_TOKENIZERS = {
    "gpt-2": lambda: _byte_level(use_regex=True),
    "smollm": lambda: pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), _byte_level(use_regex=True)]
    ),
    "llama-bpe": lambda: pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(_LLAMA3_PATTERN), "isolated"), _byte_level(use_regex=False)]
    ),
}


def gguf_tokenizer(file: GgufFile) -> Tokenizer | None:
    """The tokenizer of a GGUF file, or None if it has none.

    Raises:
        CheckpointError: if the tokenizer is of a kind that is not read (only byte-level BPE is), or broken.
    """
    fields = Fields(file.metadata, file.path)
    if "tokenizer.ggml.model" not in fields:
        return None
    if fields.string("tokenizer.ggml.model", None) != "gpt2":
        raise fields.error("tokenizer.ggml.model", "gpt2 (byte-level BPE); give token ids, or the model's directory")
    pre = fields.choice("tokenizer.ggml.pre", _PRE_TOKENIZERS)
    tokens = fields.items("tokenizer.ggml.tokens", str)
    merges = fields.items("tokenizer.ggml.merges", str)
    if tokens is None or merges is None:
        raise fields.error("tokenizer.ggml.merges" if tokens else "tokenizer.ggml.tokens", "a list of strings")
    kinds = fields.items("tokenizer.ggml.token_type", int) or []
    if kinds and len(kinds) != len(tokens):
        raise fields.error("tokenizer.ggml.token_type", f"one entry for each of {len(tokens)} tokens")

    vocabulary = {token: number for number, token in enumerate(tokens)}
    pairs = [(first, second) for first, _, second in (merge.partition(" ") for merge in merges)]
    try:
        # Llama 3's merges do not reach every token: a word that is a token is taken whole.
        bpe = models.BPE(vocab=vocabulary, merges=pairs, ignore_merges=pre == "llama-bpe")
        core = tokenizers.Tokenizer(bpe)
    except Exception as error:  # the library raises nothing narrower
        raise CheckpointError(
            f"{file.path}: tokenizer.ggml.merges do not fit the tokens ({one_line(error)}); give token ids, or convert "
            "the model again"
        ) from error
    core.pre_tokenizer = _PRE_TOKENIZERS[pre]()
    core.decoder = decoders.ByteLevel()
    for special, kind in ((True, _CONTROL), (False, _USER_DEFINED)):
        added = [token for token, of_kind in zip(tokens, kinds, strict=False) if of_kind == kind]
        core.add_tokens([AddedToken(token, special=special, normalized=False) for token in added])

    special_tokens = {
        f"{name}_token": tokens[number]
        for name in ("bos", "eos")
        if (number := fields.integer(f"tokenizer.ggml.{name}_token_id", None, minimum=0, maximum=len(tokens) - 1))
        is not None
    }
    _add_begin_and_end(core, fields, special_tokens, begin_by_default=pre == "llama-bpe")
    template = fields.string("tokenizer.chat_template", None)
    chat_template = ChatTemplate(template, special_tokens, file.path) if template else None
    return Tokenizer(core, chat_template, file.path)


def _add_begin_and_end(
    core: tokenizers.Tokenizer, fields: Fields, special_tokens: dict[str, str], begin_by_default: bool
) -> None:
    """Make encoding add the tokens that the file wants before and after a text."""
    wanted = {
        "bos": fields.boolean("tokenizer.ggml.add_bos_token", begin_by_default),
        "eos": fields.boolean("tokenizer.ggml.add_eos_token", False),
    }
    around = {name: special_tokens.get(f"{name}_token") for name, is_wanted in wanted.items() if is_wanted}
    for name, token in around.items():
        if token is None:
            raise fields.error(f"tokenizer.ggml.{name}_token_id", f"a token id, since add_{name}_token is true")
    if around:
        before, after = around.get("bos"), around.get("eos")
        single = [token for token in (before, "$A", after) if token is not None]
        core.post_processor = processors.TemplateProcessing(
            single=single, special_tokens=[(token, core.token_to_id(token)) for token in (before, after) if token]
        )
