"""Text of tokens as they come, one by one."""

from __future__ import annotations

import tokenizers

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class StreamDecoder:
    """Turns a request's tokens into pieces of text; all pieces together are the text of all tokens.

    A character of several bytes may be spread over several tokens: it comes with the last of them, never in part.
    Each step decodes the tokens since the last piece together with those of that piece, since a decoder may treat the
    first token differently (SentencePiece drops its leading space).
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._said: list[int] = []
        self._pending: list[int] = []

    def push(self, token_id: int) -> str:
        """The text that `token_id` completes, possibly empty."""
        self._pending.append(token_id)
        return self._advance(is_last=False)

    def finish(self) -> str:
        """What is left when the request ends: nothing, or replacement characters for the bytes of a cut one."""
        return self._advance(is_last=True) if self._pending else ""

    def _advance(self, is_last: bool) -> str:
        text = self._decode(self._said + self._pending)
        if text.endswith(_REPLACEMENT) and not is_last:
            return ""
        piece = text[len(self._decode(self._said)) :]
        if piece:  # a token without text, such as a special one, gives the next no context
            self._said, self._pending = self._pending, []
        return piece

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=self._skip_special_tokens)
