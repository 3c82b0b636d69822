"""Generation: where texts end, how they stream, and that a request's tokens depend on nothing around it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from sample_models import END, write_model, write_script

import jaxpar
from jaxpar.engine.requests import Completion
from jaxpar.errors import RequestError
from jaxpar.runner import Runner
from jaxpar.vocabulary.sampling import gumbel_noise

# No byte occurs twice: what follows a byte is fixed.
TEXT = "Go é🙂(end)!"
AFTER = "ZYX"
SCRIPT = [*TEXT.encode(), END, *AFTER.encode()]
ROOM = {"page_size": 64}


@pytest.fixture(scope="module")
def speaker(tmp_path_factory: pytest.TempPathFactory) -> Runner:
    """Says TEXT, ends, and would go on with AFTER."""
    return jaxpar.load(write_script(tmp_path_factory.mktemp("speaker"), SCRIPT), mesh="dp=2,tp=2", **ROOM)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Runner]:
    """A model of random weights, on any mesh; a runner is made once for each."""
    directory = write_model(tmp_path_factory.mktemp("model"), num_attention_heads=4, num_key_value_heads=2)
    runners: dict[str, Runner] = {}

    def on(mesh: str, **plan: Any) -> Runner:
        key = f"{mesh} {plan}"
        if key not in runners:
            runners[key] = jaxpar.load(directory, mesh=mesh, **ROOM | plan)
        return runners[key]

    return on


def one(runner: Runner, prompt: str = "G", **options: Any) -> Completion:
    return runner.generate([prompt], **options)[0]


def pieces(runner: Runner, prompt: str = "G", **options: Any) -> list[str]:
    return [token.text for token in runner.stream([prompt], **options)]


# Where a text ends


def test_a_request_ends_at_the_end_token_which_is_no_text(speaker: Runner) -> None:
    said = one(speaker)
    assert said.text == TEXT[1:]
    assert said.finish_reason == "stop"
    assert said.token_ids == SCRIPT[1 : SCRIPT.index(END) + 1]
    assert len(said.logprobs) == len(said.token_ids)


def test_a_request_that_ignores_the_end_token_goes_on_to_its_last_token(speaker: Runner) -> None:
    said = one(speaker, ignore_eos=True, max_new_tokens=len(SCRIPT) - 1)
    assert said.text == TEXT[1:] + AFTER
    assert said.token_ids == SCRIPT[1:]
    assert said.finish_reason == "length"


def test_a_request_ends_after_max_new_tokens_and_an_end_token_there_is_a_stop(speaker: Runner) -> None:
    assert one(speaker, max_new_tokens=1) == Completion([ord("o")], "o", one(speaker).logprobs[:1], "length")
    to_the_end = SCRIPT.index(END)
    assert one(speaker, max_new_tokens=to_the_end).finish_reason == "stop"
    cut = one(speaker, max_new_tokens=to_the_end - 1)
    assert (cut.finish_reason, cut.text) == ("length", TEXT[1:])


def test_any_of_several_end_tokens_ends_a_request(tmp_path: Path) -> None:
    runner = jaxpar.load(write_script(tmp_path, SCRIPT, eos_token_id=[ord("!"), ord("(")]), **ROOM)
    said = one(runner)
    assert (said.text, said.token_ids[-1], said.finish_reason) == ("o é🙂", ord("("), "stop")


@pytest.mark.parametrize(
    ("stop", "text", "tokens"),
    [
        ("(end", "o é🙂", "o é🙂(end"),  # spread over four tokens
        ("(", "o é🙂", "o é🙂("),
        ("🙂", "o é", "o é🙂"),  # one character of four tokens
        ("o", "", "o"),  # at once
        (["!", "d)", "nd"], "o é🙂(e", "o é🙂(end"),  # the first that the text holds
        (["end)", "en"], "o é🙂(", "o é🙂(en"),
        (["d)", "end)"], "o é🙂(", "o é🙂(end)"),  # two that end together
    ],
)
def test_a_text_ends_where_the_first_stop_string_begins(
    speaker: Runner, stop: str | list[str], text: str, tokens: str
) -> None:
    said = one(speaker, stop=stop)
    assert (said.text, said.finish_reason) == (text, "stop")
    assert said.token_ids == list(tokens.encode())


@pytest.mark.parametrize("stop", ["(enx", "🙂)", "Go", "Z", "!!"])
def test_what_only_begins_like_a_stop_string_is_said_in_full(speaker: Runner, stop: str) -> None:
    assert one(speaker, stop=stop).text == TEXT[1:]


def test_a_prompt_and_its_new_tokens_may_fill_the_context_and_no_more(tmp_path: Path) -> None:
    runner = jaxpar.load(write_model(tmp_path, max_position_embeddings=16), page_size=16)
    assert len(runner.generate([[1] * 12], max_new_tokens=4, ignore_eos=True)[0].token_ids) == 4
    with pytest.raises(RequestError, match=r"^prompt 1 has 13 tokens; with max_new_tokens=4 that is 17, .* is 16"):
        runner.generate([[1] * 12, [1] * 13], max_new_tokens=4)


# Streams


@pytest.mark.parametrize(
    "options", [{}, {"stop": "(end"}, {"stop": "(enx"}, {"ignore_eos": True}, {"max_new_tokens": 3}]
)
def test_the_pieces_of_a_stream_are_the_text(speaker: Runner, options: dict[str, Any]) -> None:
    assert "".join(pieces(speaker, **options)) == one(speaker, **options).text


def test_a_character_of_several_tokens_comes_whole_with_its_last_one(speaker: Runner) -> None:
    assert pieces(speaker, max_new_tokens=9) == ["o", " ", "", "é", "", "", "", "🙂", "("]


def test_what_may_be_a_stop_string_is_held_back_until_it_is_not(speaker: Runner) -> None:
    assert pieces(speaker, "(", stop="ndx") == ["e", "", "", "nd)", "!", ""]


def test_a_character_that_the_last_token_cuts_is_a_replacement_character(speaker: Runner) -> None:
    assert pieces(speaker, max_new_tokens=6) == ["o", " ", "", "é", "", "\N{REPLACEMENT CHARACTER}"]


def test_a_stream_says_which_request_each_token_is_of_and_ends_each_once(speaker: Runner) -> None:
    tokens = list(speaker.stream(["G", "(", "!"], max_new_tokens=6))
    for index, (text, reason) in enumerate([("o é", "length"), ("end)!", "stop"), ("", "stop")]):
        mine = [token for token in tokens if token.index == index]
        assert "".join(token.text for token in mine).rstrip("\N{REPLACEMENT CHARACTER}") == text
        assert [token.finish_reason for token in mine] == [None] * (len(mine) - 1) + [reason]


def test_tokens_are_streamed_as_steps_produce_them(speaker: Runner) -> None:
    stream = speaker.stream(["G", "(", "o"], max_new_tokens=4)
    assert [next(stream).index for _ in range(6)] == [0, 1, 2, 0, 1, 2]


def test_a_request_that_has_ended_leaves_the_others_as_they_are(speaker: Runner) -> None:
    prompts = ["!", "G", ")", "(", "d"]
    together = speaker.generate(prompts)
    assert [said.text for said in together] == ["", TEXT[1:], "!", "end)!", ")!"]
    for prompt, said in zip(prompts, together, strict=True):
        alone = one(speaker, prompt)
        assert (alone.text, alone.token_ids, alone.finish_reason) == (said.text, said.token_ids, said.finish_reason)


# Nothing around a request matters

PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [12], [13, 14, 15], [16, 17], [18, 19, 20, 21, 22]]
DRAWN = {"max_new_tokens": 12, "temperature": 1.3, "top_k": 40, "seed": 11, "ignore_eos": True}
OPTIONS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.7},
    {"temperature": 1.5, "seed": 2**32 - 1},
    {"temperature": 1.0, "top_k": 5},
    {"temperature": 1.0, "top_p": 0.5},
    DRAWN | {"top_p": 0.95},
]


def tokens_of(completions: list[Completion]) -> list[list[int]]:
    return [completion.token_ids for completion in completions]


def margin_of(runner: Runner, prompt: list[int], said: Completion) -> float:
    """The smallest gap to a second best score (kept logits / temperature + noise of the token's own position).

    Every token must be the one of the best score.
    """
    logits = runner.logits([[*prompt, *said.token_ids[:-1]]])[0, len(prompt) - 1 :].astype(np.float64)
    positions = len(prompt) + np.arange(len(logits))
    seeds = np.full(len(logits), DRAWN["seed"], np.uint32)
    noise = gumbel_noise(jnp.asarray(seeds), jnp.asarray(positions), jnp.arange(logits.shape[1]))
    scaled = logits / DRAWN["temperature"]
    scores = np.where(scaled >= np.sort(scaled)[:, [-DRAWN["top_k"]]], scaled + np.asarray(noise), -np.inf)
    assert scores.argmax(axis=1).tolist() == said.token_ids
    best = np.sort(scores)[:, -2:]
    return float((best[:, 1] - best[:, 0]).min())


def test_drawn_tokens_are_the_same_alone_in_a_batch_in_any_lane_and_in_any_chunks_on_every_mesh(
    model: Callable[..., Runner], record_property: Callable[[str, object], None]
) -> None:
    runner = model("tp=1")
    expected = runner.generate(PROMPTS, **DRAWN)
    margin = min(margin_of(runner, prompt, said) for prompt, said in zip(PROMPTS, expected, strict=True))
    record_property("margin", margin)
    # Logits differ by up to 1e-5 between meshes here: no tie explains a token that differs.
    assert margin > 1e-3
    tokens = tokens_of(expected)
    assert len({tuple(row) for row in tokens}) == len(PROMPTS)
    for i in (0, 4):
        assert tokens_of(runner.generate([PROMPTS[i]], **DRAWN)) == [tokens[i]]
    assert tokens_of(runner.generate(PROMPTS[::-1], **DRAWN)) == tokens[::-1]
    for mesh, chunk in (("dp=2,tp=4", 512), ("dp=4,tp=2", 2), ("dp=2,cp=2,tp=2", 5)):
        assert tokens_of(model(mesh, chunk=chunk).generate(PROMPTS, **DRAWN)) == tokens, (mesh, chunk)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_every_option_gives_on_dp_x_tp_what_it_gives_on_one_device(
    model: Callable[..., Runner], options: dict[str, Any]
) -> None:
    alone, spread = (
        model(mesh).generate(PROMPTS[:3], **{"max_new_tokens": 12} | options) for mesh in ("tp=1", "dp=2,tp=4")
    )
    for a, b in zip(alone, spread, strict=True):
        assert asdict(a) | {"logprobs": None} == asdict(b) | {"logprobs": None}
        np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-4)


def test_another_seed_draws_other_tokens_and_the_same_seed_the_same(model: Callable[..., Runner]) -> None:
    runner = model("dp=2,tp=4")
    first, other, again = (tokens_of(runner.generate(PROMPTS[:3], **DRAWN | {"seed": seed})) for seed in (1, 2, 1))
    assert first == again
    assert all(a != b for a, b in zip(first, other, strict=True))


def test_equal_prompts_with_the_same_seed_get_the_same_text(model: Callable[..., Runner]) -> None:
    first, other, again = tokens_of(model("dp=2,tp=4").generate([PROMPTS[0], PROMPTS[1], PROMPTS[0]], **DRAWN))
    assert first == again != other


@pytest.mark.parametrize("options", [{"max_new_tokens": 12}, DRAWN], ids=["greedy", "drawn"])
def test_log_probabilities_are_the_log_softmax_of_the_models_own_logits(
    model: Callable[..., Runner], options: dict[str, Any]
) -> None:
    for prompt, said in zip(PROMPTS[:2], model("dp=2,tp=4").generate(PROMPTS[:2], **options), strict=True):
        logits = model("tp=1").logits([[*prompt, *said.token_ids[:-1]]])[0, len(prompt) - 1 :].astype(np.float64)
        logprobs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
        chosen = logprobs[np.arange(len(said.token_ids)), said.token_ids]
        np.testing.assert_allclose(said.logprobs, chosen, atol=1e-4)


def test_the_same_completions_come_in_waves_of_any_size(model: Callable[..., Runner]) -> None:
    whole = model("dp=2,tp=2").generate(PROMPTS, max_new_tokens=5, ignore_eos=True)
    for at_once in (1, 2):
        waves = model("dp=2,tp=2", max_num_seqs=at_once).generate(PROMPTS, max_new_tokens=5, ignore_eos=True)
        assert tokens_of(waves) == tokens_of(whole)


def test_requests_that_wait_are_streamed_under_their_own_number(model: Callable[..., Runner]) -> None:
    stream = model("dp=2,tp=2", max_num_seqs=1).stream(PROMPTS, max_new_tokens=2, ignore_eos=True)
    assert [token.index for token in stream] == [0, 1, 0, 1, 2, 3, 2, 3, 4, 4]


def test_logits_that_are_not_numbers_are_refused_instead_of_sampled(tmp_path: Path) -> None:
    norm = {"model.norm.weight": np.full(24, np.nan, np.float32)}
    runner = jaxpar.load(write_model(tmp_path, tensors=norm), mesh="tp=2")
    with pytest.raises(jaxpar.JaxparError, match="request 0: the logits of token 0 are not numbers in float32"):
        runner.generate([[1, 2, 3]], max_new_tokens=2)
