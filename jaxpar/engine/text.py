"""From tokens to text, as they come: whole characters, and an end at the first stop string."""

from __future__ import annotations

from jaxpar.checkpoint.tokenizer import Tokenizer


class TextStream:
    """The text of one request. Without a tokenizer it stays empty."""

    def __init__(self, tokenizer: Tokenizer | None, stop: tuple[str, ...]) -> None:
        """The text ends with the first token that completes one of `stop`, before whichever of those begins first."""
        self._decoder = None if tokenizer is None else tokenizer.stream()
        self._stop = stop
        # What may be the beginning of a stop string is held back until it is known not to be.
        self._held = ""
        self.stopped = False

    def push(self, token: int) -> str:
        """What a token adds to the text; empty while a character or a possible stop string is incomplete."""
        return "" if self._decoder is None else self._release(self._decoder.push(token))

    def finish(self) -> str:
        """The rest of the text, once no token follows."""
        if self._decoder is None or self.stopped:
            return ""
        text = self._release(self._decoder.finish())
        text, self._held = text + self._held, ""
        return text

    def _release(self, new: str) -> str:
        text = self._held + new
        found = [at for at in (text.find(stop) for stop in self._stop) if at >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)]
        beginnings = (stop[:size] for stop in self._stop for size in range(1, len(stop)))
        keep = max((len(beginning) for beginning in beginnings if text.endswith(beginning)), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]
