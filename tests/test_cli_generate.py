"""`jaxpar generate`: what is printed where, and that options reach the model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from command_line import run
from oracle_data import ROOT, load_oracle
from sample_models import write_model
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

import jaxpar
from jaxpar import MeshSpec, Plan, Token
from jaxpar.cli.prompts import chat_prompts, read_prompts
from jaxpar.runner import Runner

TEMPLATE = "{% for message in messages %}{{ message.role }} {{ message.content }} {% endfor %}w9"


@pytest.fixture(scope="module")
def worded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose token ids are the words w0, w1, ..., w100; it answers in a chat."""
    directory = write_model(tmp_path_factory.mktemp("worded"), eos_token_id=None)
    tokenizer = Tokenizer(WordLevel({"user": 0} | {f"w{i}": i for i in range(1, 101)}, unk_token="user"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return directory


@pytest.fixture(scope="module")
def two(worded: Path) -> dict[str, object]:
    """What two prompts of different lengths give, as JSON."""
    options = ("--prompt", "w1 w2 w3", "--token-ids", "4", "--max-new-tokens", "4", "--mesh", "dp=2,tp=2")
    done = run("generate", worded, *options, "--json")
    assert (done.status, done.err) == (0, "")
    return json.loads(done.out)


def test_json_has_each_prompt_with_its_tokens_text_and_log_probabilities(two: dict[str, object]) -> None:
    assert two["mesh"] == {"pp": 1, "dp": 2, "ep": 1, "cp": 1, "tp": 2}
    assert two["dtype"] == "float32"
    text, ids = two["completions"]
    assert (text["prompt"], ids["prompt"]) == ("w1 w2 w3", [4])
    for completion in (text, ids):
        assert completion["text"].split() == [f"w{token}" for token in completion["token_ids"]]
        assert len(completion["token_ids"]) == len(completion["logprobs"]) == 4
        assert all(logprob < 0 for logprob in completion["logprobs"])
        assert completion["finish_reason"] == "length"


def test_a_pipe_gets_the_text_alone_a_line_for_each_prompt(worded: Path, two: dict[str, object]) -> None:
    done = run("generate", worded, "--prompt", "w1 w2 w3", "--prompt", "w4", "--max-new-tokens", "4")
    assert (done.status, done.err) == (0, "")
    assert done.out == "".join(completion["text"] + "\n" for completion in two["completions"])


def test_without_a_tokenizer_token_ids_come_out_as_they_go_in() -> None:
    oracle = load_oracle("llama_9_3")
    ids = [",".join(map(str, prompt)) for prompt in oracle.prompts]
    options = [part for each in ids for part in ("--token-ids", each)]
    done = run("generate", oracle.dir, "--mesh", "dp=2,tp=4", *options, "--max-new-tokens", "5", "--ignore-eos")
    assert done.out.splitlines() == [",".join(map(str, greedy[:5])) for greedy in oracle.greedy]


def test_logprobs_are_printed_token_by_token(worded: Path, two: dict[str, object]) -> None:
    done = run("generate", worded, "--prompt", "w1 w2 w3", "--max-new-tokens", "4", "--logprobs")
    completion = two["completions"][0]
    rows = [line.split() for line in done.out.splitlines()[1:]]
    assert [row[0] for row in rows] == [str(token) for token in completion["token_ids"]]
    assert [float(row[1]) for row in rows] == pytest.approx(completion["logprobs"], abs=1e-3)
    assert [row[2] for row in rows] == [f"'w{token}'" for token in completion["token_ids"]]


def test_every_option_reaches_the_model(worded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, object] = {}

    def stream(runner: Runner, prompts: list[list[int]], **sampling: object) -> Iterator[Token]:
        seen.update(prompts=prompts, plan=runner.plan, sampling=sampling)
        return iter([Token(0, 7, "w7", -1.0, "length")])

    monkeypatch.setattr(Runner, "stream", stream)
    plan = ("--mesh", "tp=3", "--chunk", "2", "--page-size", "4", "--max-num-seqs", "1", "--dtype", "bfloat16")
    drawn = ("--temperature", "0.9", "--top-k", "20", "--top-p", "0.8", "--seed", "5", "--stop", "a", "--stop", "b")
    done = run("generate", worded, *plan, *drawn, "--max-new-tokens", "6", "--ignore-eos", "--prompt", "w5 w6")
    assert (done.status, done.out) == (0, "w7\n")
    assert seen["prompts"] == [[5, 6]]
    assert seen["plan"] == Plan(MeshSpec(tp=3), chunk=2, page_size=4, max_num_seqs=1, dtype="bfloat16")
    assert seen["sampling"] == {
        "max_new_tokens": 6,
        "temperature": 0.9,
        "top_k": 20,
        "top_p": 0.8,
        "seed": 5,
        "stop": ("a", "b"),
        "ignore_eos": True,
    }


def test_a_stop_text_ends_a_completion_before_it(worded: Path, two: dict[str, object]) -> None:
    whole = two["completions"][0]
    stop = f"w{whole['token_ids'][-1]}"
    options = ("--max-new-tokens", "4", "--stop", "nowhere", "--stop", stop, "--json")
    (completion,) = json.loads(run("generate", worded, "--prompt", "w1 w2 w3", *options).out)["completions"]
    assert completion["text"] == whole["text"][: whole["text"].index(stop)]
    assert completion["finish_reason"] == "stop"


def test_a_profile_is_of_a_run_in_which_nothing_compiles(worded: Path, tmp_path: Path) -> None:
    options = ("--max-new-tokens", "3", "--mesh", "tp=2", "--profile", tmp_path / "profile")
    done = run("generate", worded, "--token-ids", "1,2", *options, "--json")
    assert (done.status, done.err) == (0, "")
    mean = json.loads(done.out)["profile"]["mean"]
    assert mean["wall"] < 1, "a step takes milliseconds, and to compile one takes longer than all three"
    # Two steps of decode after one of prefill, one layer: each sums twice.
    calls = {row["scope"]: row["calls"] for row in mean["collectives"]}
    assert calls["attention:psum"] == calls["ffn:psum"] == 3


def test_prompts_are_taken_from_options_then_files_then_token_ids(tmp_path: Path) -> None:
    (tmp_path / "lines.txt").write_bytes("\ufeffone: é \r\ntwo\N{LINE SEPARATOR}\x0b2\n".encode())
    prompts, places = read_prompts(["zero"], tmp_path / "lines.txt", ["1, 2", "3"])
    assert prompts == ["zero", "one: é ", "two\N{LINE SEPARATOR}\x0b2", [1, 2], [3]]
    assert places == ["prompt 0", f"{tmp_path}/lines.txt:1", f"{tmp_path}/lines.txt:2", "prompt 3", "prompt 4"]


def test_json_lines_hold_prompts_of_several_lines_and_token_ids(tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "one\\ntwo"}\n{"prompt": [3, 4]}')
    assert read_prompts(None, tmp_path / "prompts.jsonl", None)[0] == ["one\ntwo", [3, 4]]


def test_a_chat_prompt_is_what_the_template_makes_of_it(worded: Path) -> None:
    checkpoint = jaxpar.load(worded).checkpoint
    assert chat_prompts(checkpoint, ["w7 w8"], ["prompt 0"]) == [[0, 7, 8, 9]]


def test_a_chat_refuses_token_ids(worded: Path) -> None:
    done = run("generate", worded, "--token-ids", "1", "--chat")
    assert done.status == 2 and "prompt 0 is token ids, and --chat takes text" in done.err


def test_a_model_of_gguf_is_generated_from_as_any_other() -> None:
    oracle = load_oracle("llama_gguf")
    ids = ",".join(map(str, oracle.prompts[1]))
    done = run("generate", ROOT / "llama_gguf" / "model.gguf", "--token-ids", ids, "--max-new-tokens", "2")
    assert json.loads(f"[{done.out}]".replace("\n", "")) == oracle.greedy[1][:2]
