"""Generation: groups of requests run to their ends, tokens streamed as they come."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from jaxpar.checkpoint.tokenizer import Tokenizer
from jaxpar.engine.requests import Completion, FinishReason, SamplingParams, Token
from jaxpar.engine.session import Decoded, Session
from jaxpar.engine.sizes import groups_of
from jaxpar.engine.text import TextStream
from jaxpar.errors import JaxparError
from jaxpar.program import Programs, Weights


def stream_tokens(
    programs: Programs,
    weights: Weights,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    tokenizer: Tokenizer | None,
) -> Iterator[Token]:
    """Yield the tokens of every request as steps produce them, requests interleaved.

    At most `plan.max_num_seqs` requests a replica run at once; the others wait for the group before them to end.
    """
    for group in groups_of(len(prompts), programs.plan):
        for token in _run_group(programs, weights, [prompts[i] for i in group], params, tokenizer):
            yield replace(token, index=group[token.index])


def _run_group(
    programs: Programs,
    weights: Weights,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    tokenizer: Tokenizer | None,
) -> Iterator[Token]:
    # The last token is never stored: nothing follows it.
    capacity = [len(prompt) + params.max_new_tokens - 1 for prompt in prompts]
    session = Session(programs, weights, prompts, capacity, params)
    ends = () if params.ignore_eos else programs.config.eos_token_ids
    texts = [TextStream(tokenizer, params.stop) for _ in prompts]
    counts = [0] * len(prompts)
    latest: dict[int, int] = {}

    def emit(decoded: Decoded) -> Iterator[Token]:
        logprobs = np.asarray(decoded.output.logprob)
        for i, token in decoded.tokens.items():
            logprob = float(logprobs[decoded.rows[i]])
            if math.isnan(logprob):
                raise JaxparError(
                    f"request {i}: the logits of token {counts[i]} are not numbers in {programs.plan.dtype}: "
                    f"use float32 or bfloat16, or check the weights"
                )
            counts[i] += 1
            ended = token in ends
            text = "" if ended else texts[i].push(token)
            reason: FinishReason | None = None
            if ended or texts[i].stopped:
                reason = "stop"
            elif counts[i] == params.max_new_tokens:
                reason = "length"
            if reason is None:
                latest[i] = token
            else:
                text += texts[i].finish()
                latest.pop(i, None)
            yield Token(i, token, text, logprob, reason)

    for chunk in session.prefill():
        yield from emit(chunk.decoded)
    for step in session.turns(latest):
        yield from emit(step)


def collect(tokens: Iterator[Token], requests: int) -> list[Completion]:
    """Run a stream to its end: one Completion for each request, in order."""
    ids: list[list[int]] = [[] for _ in range(requests)]
    logprobs: list[list[float]] = [[] for _ in range(requests)]
    texts = [""] * requests
    reasons: list[FinishReason] = ["length"] * requests
    for token in tokens:
        ids[token.index].append(token.token_id)
        logprobs[token.index].append(token.logprob)
        texts[token.index] += token.text
        if token.finish_reason is not None:
            reasons[token.index] = token.finish_reason
    return [Completion(*parts) for parts in zip(ids, texts, logprobs, reasons, strict=True)]
