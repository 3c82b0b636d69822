"""Requests from Python: what prompts and options may be, and one-line refusals of the rest."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import pytest
from sample_models import write_model

import jaxpar
from jaxpar import CheckpointError, PlanError, RequestError, SamplingParams
from jaxpar.engine.prompts import encode_prompts
from jaxpar.engine.requests import SamplingOptions


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> jaxpar.Runner:
    """101 token ids, a context of 256, no tokenizer."""
    return jaxpar.load(write_model(tmp_path_factory.mktemp("model")))


@pytest.mark.parametrize(
    "prompts", [[[1, 2], [3]], [(1, 2), (3,)], [np.array([1, 2]), np.array([3], np.uint8)], iter([[1, 2], [3]])]
)
def test_token_ids_may_be_any_sequence_of_whole_numbers(runner: jaxpar.Runner, prompts: Any) -> None:
    assert encode_prompts(runner.checkpoint, prompts) == [[1, 2], [3]]


def test_an_array_is_a_batch_of_prompts(runner: jaxpar.Runner) -> None:
    assert runner.logits(np.array([[1, 2, 3], [4, 5, 6]])).shape == (2, 3, 101)


@pytest.mark.parametrize(
    ("prompts", "said"),
    [
        (None, "prompts=None: give a text, or a list of texts and lists of token ids"),
        (3, "prompts=3: give a text"),
        (b"one", "prompts=b'one': give a text"),
        (np.array(3), r"prompts=array\(3\): give a text"),
        ([], "no prompt was given"),
        ([[]], "prompt 0 is empty"),
        ([1, 2, 3], "prompt 0 is neither text nor a list of token ids"),
        (
            [[1], [1] * 9 + [1.5]],
            r"prompt 1 is neither text nor a list of token ids \(1.5\): give a text or whole numbers",
        ),
        ([[1], None], "prompt 1 is neither text nor a list of token ids"),
        ([[1, True]], r"prompt 0 is neither text nor a list of token ids \(True\)"),
        ([np.array([True])], r"prompt 0 is neither text nor a list of token ids \(np.True_\)"),
        ([b"one"], r"prompt 0 is neither text nor a list of token ids \(b'one'\)"),
        ([["1"]], "prompt 0 is neither text nor a list of token ids"),
        ([[101]], "prompt 0: token id 101 is outside the vocabulary; use ids from 0 to 100"),
        ([[-1]], "prompt 0: token id -1 is outside"),
        ([[1] * 257], "prompt 0 has 257 tokens.* the model's context is 256: shorten the prompt by"),
    ],
)
def test_what_is_no_prompt_is_refused(runner: jaxpar.Runner, prompts: Any, said: str) -> None:
    for use in (runner.generate, runner.logits):
        with pytest.raises(RequestError, match="^" + said):
            use(prompts)


@pytest.mark.parametrize(
    ("length", "new", "remedy"),
    [(250, 10, "by 4, or use max_new_tokens=6"), (256, 1, "by 1"), (300, 0, "by 44")],
)
def test_a_prompt_that_is_too_long_is_told_by_how_much(
    runner: jaxpar.Runner, length: int, new: int, remedy: str
) -> None:
    with pytest.raises(RequestError, match=f"context is 256: shorten the prompt {remedy}$"):
        runner.encode([[1] * length], new)


def test_rows_of_different_lengths_have_no_logits_as_one_array(runner: jaxpar.Runner) -> None:
    with pytest.raises(RequestError, match=r"^token_ids has rows of \[1, 2\] tokens"):
        runner.logits([[1], [2, 3]])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"max_tokens": 3}, "no sampling option 'max_tokens': use max_new_tokens, temperature"),
        ({"max_new_tokens": 2.0}, "max_new_tokens=2.0: it must be a whole number"),
        ({"max_new_tokens": True}, "max_new_tokens=True: it must be a whole number"),
        ({"temperature": "hot"}, "temperature='hot': it must be a number"),
        ({"temperature": None}, "temperature=None"),
        ({"temperature": float("inf")}, "temperature=inf: it must be 0"),
        ({"top_k": 1.5}, "top_k=1.5: it must be a whole number"),
        ({"top_p": float("nan")}, "top_p=nan: it must be above 0"),
        ({"seed": 2**32}, "seed=4294967296: it must be from 0"),
        ({"ignore_eos": "no"}, "ignore_eos='no': it must be True or False"),
        ({"stop": 5}, "stop: 5 is not a text"),
        ({"stop": ["a", None]}, "stop: None is not a text"),
        ({"stop": ["a", ""]}, "stop: an empty text"),
        ({"stop": "a"}, "stop: there is no text to look for 'a' in"),
    ],
)
def test_an_option_that_cannot_be_is_refused(runner: jaxpar.Runner, options: dict[str, Any], said: str) -> None:
    with pytest.raises(RequestError, match="^" + said):
        runner.generate([[1]], **options)


def test_numbers_of_numpy_are_numbers() -> None:
    options = SamplingParams(max_new_tokens=np.int64(3), temperature=np.float32(0.5), seed=np.uint32(7))
    assert (options.max_new_tokens, options.temperature, options.seed) == (3, 0.5, 7)


def test_a_checkpoint_that_is_open_is_loaded_as_its_path_would_be(runner: jaxpar.Runner, tmp_path: Path) -> None:
    again = jaxpar.load(runner.checkpoint, mesh="tp=2")
    assert again.checkpoint is runner.checkpoint
    np.testing.assert_allclose(again.logits([[1, 2, 3]]), runner.logits([[1, 2, 3]]), atol=1e-4)


def test_the_options_that_a_type_checker_and_help_show_are_those_there_are() -> None:
    hints = get_type_hints(SamplingParams) | {"stop": str | Iterable[str]}
    assert get_type_hints(SamplingOptions) == hints
    for field in fields(SamplingParams):
        assert f"{field.name}={field.default!r}" in " ".join(jaxpar.Runner.generate.__doc__.split())


@pytest.mark.parametrize("model", [None, 3, b"tiny", ["tiny"]])
def test_what_is_no_name_of_a_model_is_refused(model: Any) -> None:
    with pytest.raises(CheckpointError, match=r"^model=.*: give a model directory, a GGUF file, or a bundled model's"):
        jaxpar.load(model)


def test_no_dtype_is_the_default_one(runner: jaxpar.Runner) -> None:
    assert jaxpar.load(runner.checkpoint, dtype=None).plan == runner.plan
    assert runner.plan.dtype == "float32"


@pytest.mark.parametrize(
    ("step", "said"),
    [
        ({"batch": 2.5}, "batch=2.5: it must be a whole number of at least 1"),
        ({"batch": "a"}, "batch='a': it must be a whole number of at least 1"),
        ({"batch": 0}, "batch=0: it must be a whole number of at least 1"),
        ({"seq": 0}, "seq=0: it must be a whole number of at least 1"),
        ({"seq": True}, "seq=True: it must be a whole number of at least 1"),
        ({"phase": 3}, "phase=3 is unknown: use prefill or decode"),
    ],
)
def test_a_step_that_is_none_has_no_ledger(runner: jaxpar.Runner, step: dict[str, Any], said: str) -> None:
    with pytest.raises(PlanError, match=f"^{said}"):
        runner.ledger(**step)


def test_whole_numbers_of_numpy_count_a_step(runner: jaxpar.Runner) -> None:
    counted = runner.ledger("decode", batch=np.int64(3), seq=np.int32(20), sampled=True)
    assert (counted.batch, counted.seq, counted.steps[0].step.sampled) == (3, 20, True)
    assert type(counted.batch) is type(counted.seq) is int
