"""Bad input: one line that names the numbers, exit status 2, nothing on standard output, no traceback."""

from __future__ import annotations

import json
import os
from pathlib import Path

import jax
import pytest
from command_line import run
from oracle_data import ROOT
from safetensors.numpy import load_file, save_file
from sample_models import write_model

LLAMA = ROOT / "llama"  # 97 token ids, a context of 128, no tokenizer


def refusal(*arguments: object) -> str:
    """The line with which a command refuses its arguments."""
    done = run(*arguments)
    assert (done.status, done.out) == (2, "")
    assert done.err.startswith("jaxpar: ") and done.err.endswith("\n") and done.err.count("\n") == 1, done.err
    return done.err


@pytest.mark.parametrize(
    ("mesh", "said"),
    [
        ("", "mesh '' is empty"),
        ("dp=2;tp=4", "is not a whole number from 1 to 65536"),
        ("xx=2", "unknown axis in 'xx=2'; the axes are pp, dp, ep, cp, tp"),
        ("tp=0", "the size in 'tp=0' is not a whole number from 1"),
        ("h900-8", "nor a preset (h20-32, h200-8"),
        ("absent.toml", "absent.toml: cannot be read"),
        ("tp=999", "needs 999 devices: at most 512 can be faked"),
        ("dp=100000", "more than 65536 ranks"),
    ],
)
@pytest.mark.parametrize("command", ["generate", "verify", "demo"])
def test_a_mesh_that_cannot_run_is_refused(command: str, mesh: str, said: str) -> None:
    ids = ("--token-ids", "1") if command == "generate" else ()
    assert said in refusal(command, LLAMA, "--mesh", mesh, *ids)


def test_more_devices_than_jax_has_started_with_are_refused() -> None:
    assert len(jax.devices()) == 8
    line = refusal("generate", LLAMA, "--token-ids", "1", "--mesh", "dp=3,tp=4")
    assert "mesh dp=3,tp=4 needs 12 devices and JAX has already started with 8" in line


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([], "no prompt was given"),
        (["--prompt", ""], "prompt 0 is empty"),
        (["--token-ids", ""], "prompt 0 is empty"),
        (["--token-ids", "1", "--token-ids", "3,97"], "prompt 1: token id 97 is outside the vocabulary"),
        (["--token-ids", "-1"], "prompt 0: token id -1 is outside the vocabulary; use ids from 0 to 96"),
        (["--token-ids", "1,x"], "'1,x' is not a list of whole numbers"),
        (["--token-ids", ",".join(["1"] * 120)], "prompt 0 has 120 tokens; with max_new_tokens=32 that is 152"),
        (["--prompt", "hello"], "has no tokenizer; give token ids"),
        (["--token-ids", "1", "--chat"], "has no tokenizer"),
        (["--token-ids", "1", "--stop", "x"], "no text to look for 'x' in"),
        (["--token-ids", "1", "--stop", ""], "an empty text would stop at once"),
        (["--token-ids", "1", "--max-new-tokens", "0"], "max_new_tokens=0: ask for at least 1"),
        (["--token-ids", "1", "--max-new-tokens", "-3"], "max_new_tokens=-3"),
        (["--token-ids", "1", "--temperature", "-0.1"], "temperature=-0.1: it must be 0 (greedy)"),
        (["--token-ids", "1", "--temperature", "nan"], "temperature=nan"),
        (["--token-ids", "1", "--temperature", "1e-30"], "temperature=1e-30"),
        (["--token-ids", "1", "--top-k", "-1"], "top_k=-1"),
        (["--token-ids", "1", "--top-k", "3000000000"], "top_k=3000000000"),
        (["--token-ids", "1", "--top-p", "0"], "top_p=0.0: it must be above 0"),
        (["--token-ids", "1", "--seed", "-1"], "seed=-1: it must be from 0 to 4294967295"),
        (["--token-ids", "1", "--dtype", "int8"], "dtype='int8' is unknown: use one of float32"),
        (["--token-ids", "1", "--chunk", "0"], "chunk=0: it must be a whole number of at least 1"),
        (["--token-ids", "1", "--page-size", "129"], "page_size=129: the model's context needs pages of at most 128"),
        (["--token-ids", "1", "--max-num-seqs", "0"], "max_num_seqs=0"),
        (["--token-ids", "1", "--platform", "abacus"], "JAX has no abacus devices"),
        (["--token-ids", "1", "--profile", "/dev/null/x"], "profile directory /dev/null/x"),
        (["--prompt-file", "/absent"], "prompt file /absent cannot be read: No such file"),
    ],
)
def test_a_request_that_cannot_be_served_is_refused(options: list[str], said: str) -> None:
    assert said in refusal("generate", LLAMA, *options)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("p.txt", b"", "p.txt is empty: give one prompt a line"),
        ("p.txt", b"one\n\nthree\n", "p.txt:2 is an empty prompt"),
        ("p.txt", b"\xff\xfe", "not UTF-8 at byte 0"),
        ("p.jsonl", b'{"prompt": [1]}\nhello\n', "p.jsonl:2 is not JSON"),
        ("p.jsonl", b'{"prompt": 3}\n', "p.jsonl:1 is not a prompt"),
        ("p.jsonl", b'{"prompt": [1], "id": 7}\n', "p.jsonl:1 is not a prompt"),
        ("p.jsonl", b'{"prompt": [1, 2.5]}\n', "p.jsonl:1 is neither text nor a list of token ids (2.5)"),
        ("p.jsonl", b'{"prompt": [1]}\n{"prompt": [true]}', "p.jsonl:2 is neither text nor a list of token ids (True)"),
        ("p.jsonl", b'{"prompt": [1]}\n{"prompt": [97]}', "p.jsonl:2: token id 97 is outside the vocabulary"),
        ("p.jsonl", b'{"prompt": []}\n', "p.jsonl:1 is empty: give at least one token"),
        ("p.jsonl", b'{"prompt": "\\ud800"}\n', "p.jsonl:1 is not Unicode text at character 0"),
    ],
)
def test_a_prompt_file_that_is_none_is_refused(tmp_path: Path, name: str, content: bytes, said: str) -> None:
    (tmp_path / name).write_bytes(content)
    assert said in refusal("generate", LLAMA, "--prompt-file", tmp_path / name)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--tolerance", "-1"], "tolerance=-1.0: it must be 0 or above"),
        (["--tolerance", "nan"], "tolerance=nan"),
        (["--max-new-tokens", "0"], "max_new_tokens=0"),
        (["--max-new-tokens", "128"], "prompt 0 has 1 tokens; with max_new_tokens=128 that is 129"),
        (["--token-ids", "97"], "token id 97 is outside the vocabulary"),
    ],
)
def test_a_comparison_that_cannot_be_made_is_refused(options: list[str], said: str) -> None:
    assert said in refusal("verify", LLAMA, "--mesh", "tp=2", *options)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"model_type": "gpt9"}, "model_type is 'gpt9', expected one of llama"),
        ({"rope_scaling": {"rope_type": "magic"}}, "rope_scaling.rope_type is 'magic', expected one of default"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0, expected an integer from 1"),
        ({"hidden_size": -3}, "hidden_size is -3"),
        ({"vocab_size": 10**12}, "vocab_size is 1000000000000"),
        ({"num_key_value_heads": 2}, "3 attention heads and 2 key-value heads"),
        (
            {"hidden_size": 32},
            "tensor model.embed_tokens.weight has shape [101, 24], but config.json asks for [101, 32]",
        ),
        ({"model_type": "\x1b[31m\n"}, r"model_type is '\x1b[31m\n'"),
    ],
)
def test_a_configuration_that_cannot_be_is_refused(tmp_path: Path, config: dict[str, object], said: str) -> None:
    directory = write_model(tmp_path / "model")
    right = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(right | config))
    assert said in refusal("generate", directory, "--token-ids", "1", "--mesh", "tp=2")


def test_weights_that_are_not_what_the_configuration_says_are_refused(tmp_path: Path) -> None:
    directory = write_model(tmp_path / "model")
    file, name = directory / "model.safetensors", "model.layers.0.mlp.up_proj.weight"
    weights = load_file(file)
    command = ("generate", directory, "--token-ids", "1", "--mesh", "tp=2")

    save_file({key: value for key, value in weights.items() if key != name}, file)
    assert f"tensor {name} is missing" in refusal(*command)
    save_file(weights | {name: weights[name][:3]}, file)
    assert f"tensor {name} has shape [3, 24], but config.json asks for [34, 24]" in refusal(*command)
    save_file({key + "\x1b[31m\n" if key == name else key: value for key, value in weights.items()}, file)
    assert f"tensor {name} is missing" in refusal(*command)
    save_file(weights, file)
    os.truncate(file, file.stat().st_size - 100)
    assert "it is truncated" in refusal(*command)
    file.unlink()
    assert "has no model.safetensors" in refusal(*command)
    index = {"weight_map": {name: "model-00001-of-00002.safetensors"}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    assert (
        f"model-00001-of-00002.safetensors is absent, and model.safetensors.index.json names it for tensor {name}"
        in (refusal(*command))
    )


def test_what_is_no_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "model.gguf").write_bytes(b"GARBAGE")
    (tmp_path / "note.txt").write_text("hello")
    said = {
        "absent": "it is neither a directory or file here nor a bundled model",
        "empty": "is not a model directory: no config.json, it is empty",
        "model.gguf": "is not a GGUF file",
        "note.txt": "is not a model; give a Hugging Face model directory",
    }
    for name, text in said.items():
        assert text in refusal("generate", tmp_path / name, "--token-ids", "1")
    assert "has no model.safetensors" in refusal("verify", "llama-3-70b", "--mesh", "tp=8")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["mesh", "dp=2,xx=1"], "unknown axis in 'xx=1'"),
        (["mesh", "dp=2", "--experts-over", "pp"], "a pipeline stage keeps its own experts"),
        (["mesh", "dp=2", "--experts-over", "ep,ep"], "axis ep is given twice"),
        (["mesh", "nosuch"], "nor a preset"),
        (["fly"], "No such command 'fly'"),
        (["generate"], "Missing argument 'MODEL'"),
        (["generate", "tiny", "--bogus"], "No such option: --bogus (see jaxpar generate --help)"),
        (["generate", "tiny", "--mesh"], "Option '--mesh' requires an argument"),
        (["generate", "tiny", "--top-k", "x"], "Invalid value for '--top-k'"),
        (["verify", "tiny"], "verify needs --mesh, such as --mesh dp=2,tp=4, or --all for every strategy"),
        (["verify", "tiny", "--devices", "4"], "verify needs --mesh"),
        (["verify", "tiny", "--mesh", "tp=2", "--all"], "--mesh is one mesh, and --all, --devices and --budget are"),
        (["verify", "tiny", "--mesh", "tp=2", "--devices", "4"], "give either"),
        (["verify", "tiny", "--mesh", "tp=2", "--budget", "4"], "give either"),
        (["verify", "tiny", "--all", "--devices", "1"], "devices=1: a model is split over 2 at least; give 2 or more"),
        (["verify", "tiny", "--all", "--devices", "600"], "at most 512 can be faked"),
        (["verify", "tiny", "--all", "--budget", "-1"], "budget=-1.0: it must be 0 or above, and finite"),
        (["verify", "tiny", "--all", "--budget", "nan"], "budget=nan"),
        (["verify", "tiny", "--all", "--expert-slots", "8"], "expert_slots=8: this llama has no experts; leave it out"),
    ],
)
def test_a_command_line_that_is_wrong_is_refused_in_one_line(arguments: list[str], said: str) -> None:
    assert said in refusal(*arguments)


@pytest.mark.parametrize("place", [0, 1, 3])
def test_debug_shows_the_traceback_and_the_line_wherever_it_stands(place: int) -> None:
    arguments = ["mesh", "tp=0", "--json"]
    arguments.insert(place, "--debug")
    done = run(*arguments)
    assert (done.status, done.out) == (2, "")
    assert done.err.startswith("Traceback") and "MeshError: mesh 'tp=0'" in done.err
    assert done.err.splitlines()[-1].startswith("jaxpar: mesh 'tp=0'")
