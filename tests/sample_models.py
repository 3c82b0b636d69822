"""Models that several tests share: the oracles on meshes, and tiny checkpoints written on the spot."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from oracle_data import GGUF_ORACLES, ROOT
from safetensors.numpy import save_file
from tokenizers import decoders, pre_tokenizers

import jaxpar
from jaxpar.engine.requests import SamplingParams
from jaxpar.engine.session import Decoded, Session
from jaxpar.runner import Runner

GREEDY = SamplingParams(ignore_eos=True)

SMALL = {
    "model_type": "llama",
    "vocab_size": 101,
    "hidden_size": 24,
    "intermediate_size": 34,
    "num_hidden_layers": 1,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e4,
    "tie_word_embeddings": False,
    "eos_token_id": 2,
}
"""One layer, so that programs compile in a moment; a vocabulary and a width that hardly any tp divides."""


# A program takes about a hundred of the 65,530 memory maps that Linux gives a process: only the latest are kept.
@lru_cache(maxsize=4)
def oracle_runner(name: str, mesh: str, **plan: Any) -> Runner:
    """An oracle's model on a mesh, with what it has compiled."""
    return jaxpar.load(ROOT / name / "model.gguf" if name in GGUF_ORACLES else ROOT / name, mesh=mesh, **plan)


def write_model(directory: Path, seed: int = 0, tensors: Mapping[str, np.ndarray] = {}, **config: Any) -> Path:
    """Write SMALL, changed by `config`, with random weights; `tensors` replaces some of them."""
    sizes = SMALL | config
    rng = np.random.default_rng(seed)
    weights = {
        name: (1.2 / shape[-1] ** 0.5 * rng.standard_normal(shape)).astype(np.float32)
        if len(shape) == 2
        else np.ones(shape, np.float32)
        for name, shape in _shapes(sizes)
    }
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(sizes))
    save_file(weights | dict(tensors), directory / "model.safetensors")
    return directory


def _shapes(sizes: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, width, head = sizes["hidden_size"], sizes["intermediate_size"], sizes["head_dim"]
    queries, keys = sizes["num_attention_heads"] * head, sizes["num_key_value_heads"] * head
    yield "model.embed_tokens.weight", (sizes["vocab_size"], hidden)
    yield "model.norm.weight", (hidden,)
    if not sizes["tie_word_embeddings"]:
        yield "lm_head.weight", (sizes["vocab_size"], hidden)
    for layer in range(sizes["num_hidden_layers"]):
        name = f"model.layers.{layer}."
        yield f"{name}input_layernorm.weight", (hidden,)
        yield f"{name}post_attention_layernorm.weight", (hidden,)
        yield f"{name}self_attn.q_proj.weight", (queries, hidden)
        yield f"{name}self_attn.k_proj.weight", (keys, hidden)
        yield f"{name}self_attn.v_proj.weight", (keys, hidden)
        yield f"{name}self_attn.o_proj.weight", (hidden, queries)
        yield f"{name}mlp.gate_proj.weight", (width, hidden)
        yield f"{name}mlp.up_proj.weight", (width, hidden)
        yield f"{name}mlp.down_proj.weight", (hidden, width)


def open_session(
    runner: Runner, prompts: Sequence[Sequence[int]], new_tokens: int, params: SamplingParams = GREEDY
) -> Session:
    """A session with room for `new_tokens` after each prompt."""
    capacity = [len(prompt) + new_tokens for prompt in prompts]
    return Session(runner.programs, runner.weights, prompts, capacity, params)


def rank_logits(
    runner: Runner, prompts: Sequence[Sequence[int]]
) -> Iterator[tuple[int, int, np.ndarray, slice, np.ndarray]]:
    """Prefill `prompts`, and give what every rank holds of their logits.

    Yields (rank, request, tokens, ids, logits), of stages the last: logits of those tokens of the request, for the
    vocabulary ids of the rank's slice; padded ids are cut off after it is checked that they are -inf.
    """
    session = open_session(runner, prompts, 0)
    ranks = {device: rank for rank, device in enumerate(runner.programs.mesh.devices.flat)}
    for chunk in session.prefill(logits=True):
        logits = chunk.output.logits
        for shard in logits.addressable_shards:
            lanes, columns, ids = (range(*s.indices(n)) for s, n in zip(shard.index, logits.shape, strict=True))
            if ranks[shard.device] < len(ranks) - len(ranks) // runner.plan.mesh.pp:
                continue  # only the last stage has logits
            held, real = np.asarray(shard.data), max(runner.config.vocab_size - ids.start, 0)
            assert np.isneginf(held[:, :, real:]).all()
            for request, (row, at) in enumerate(zip(chunk.rows, chunk.columns, strict=True)):
                is_mine = (row >= lanes.start) & (row < lanes.stop) & (at >= columns.start) & (at < columns.stop)
                mine = np.flatnonzero(is_mine)
                if len(mine):
                    part = held[row[mine] - lanes.start, at[mine] - columns.start, :real]
                    here = slice(ids.start, ids.start + part.shape[1])
                    yield ranks[shard.device], request, chunk.offset + mine, here, part


def rank_tokens(
    runner: Runner, prompts: Sequence[Sequence[int]], count: int, params: SamplingParams = GREEDY
) -> list[dict[int, list[int]]]:
    """Generate `count` tokens after each prompt: for each request what every rank of its replica chose."""
    session = open_session(runner, prompts, count - 1, params)
    ranks = {device: rank for rank, device in enumerate(runner.programs.mesh.devices.flat)}
    chosen: list[dict[int, list[int]]] = [{} for _ in prompts]
    latest: dict[int, int] = {}

    def keep(decoded: Decoded) -> None:
        tokens, rows = decoded.output.token, decoded.rows
        for shard in tokens.addressable_shards:
            lanes = range(*shard.index[0].indices(tokens.shape[0]))
            for request, row in rows.items():
                if row in lanes:
                    token = int(np.asarray(shard.data)[lanes.index(row)])
                    on_rank = chosen[request].setdefault(ranks[shard.device], [])
                    on_rank.append(token)
                    if len(on_rank) < count:
                        latest[request] = token

    for chunk in session.prefill():
        keep(chunk.decoded)
    for step in session.turns(latest):
        keep(step)
    return chosen


END = 256
"""The end token of `write_script`'s tokenizer."""


def write_script(directory: Path, script: Sequence[int], **config: Any) -> Path:
    """Write a model that says `script`: each of its tokens is followed by the next one.

    Attention and FFN are zero, embeddings are one-hot, and the head maps a token to its successor. Tokens 0 to 255 are
    bytes and END the end of a text, as its tokenizer has it; a token must not occur twice.
    """
    vocab = END + 1
    head = np.zeros((vocab, vocab), np.float32)
    for token, following in itertools.pairwise(script):
        head[following, token] = 1.0
    sizes = {"vocab_size": vocab, "hidden_size": vocab, "eos_token_id": END} | config
    zeros = {name: np.zeros(shape, np.float32) for name, shape in _shapes(SMALL | sizes) if "proj" in name}
    tensors = zeros | {"model.embed_tokens.weight": np.eye(vocab, dtype=np.float32), "lm_head.weight": head}
    _byte_tokenizer().save(str(write_model(directory, tensors=tensors, **sizes) / "tokenizer.json"))
    return directory


def _byte_tokenizer() -> tokenizers.Tokenizer:
    """Token i is byte i, END is special."""
    characters = pre_tokenizers.ByteLevel.alphabet()
    # In byte-level BPE printable bytes stand for themselves and the others, in order, for characters from 256 on.
    printable = [byte for byte in range(256) if chr(byte) in characters]
    others = iter(range(256, 512))
    vocab = {chr(byte if byte in printable else next(others)): byte for byte in range(256)}
    assert set(vocab) == set(characters)
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([tokenizers.AddedToken("<end>", special=True)])
    return tokenizer
