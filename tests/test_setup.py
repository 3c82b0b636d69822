"""What an installation carries, and which Python the set-up picks."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from jaxpar.assets import mesh_dir, model_dir, model_names
from jaxpar.checkpoint.hf_config import read_config
from jaxpar.errors import CheckpointError

REPOSITORY = Path(__file__).parent.parent
CARDS = ("deepseek-v3", "llama-3-70b", "llama-3.1-8b", "mistral-7b", "qwen2.5-7b", "qwen3-235b-a22b")


def find_python(*folders: Path) -> subprocess.CompletedProcess[str]:
    """Run tools/find-python with nothing but these folders on PATH."""
    path = ":".join(map(str, folders))
    command = ["/bin/sh", str(REPOSITORY / "tools" / "find-python")]
    return subprocess.run(command, env={"PATH": path}, capture_output=True, text=True, timeout=60)


def fake_python(folder: Path, name: str, version: str | None) -> Path:
    """An executable that passes the probe as Python `version`, or does not start at all."""
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text("#!/bin/sh\nexit 127\n" if version is None else f'#!/bin/sh\n[ "$4" = {version} ]\n')
    path.chmod(0o755)
    return path


def test_the_newest_suitable_python_on_the_path_is_picked(tmp_path: Path):
    fake_python(tmp_path / "a", "python3.11", "3.11")
    newest = fake_python(tmp_path / "b", "python3.12", "3.12")
    assert find_python(tmp_path / "a", tmp_path / "b").stdout.splitlines() == [str(newest)]


def test_a_shim_of_a_python_that_does_not_start_is_passed_over(tmp_path: Path):
    fake_python(tmp_path / "shims", "python3.13", None)
    fake_python(tmp_path / "shims", "python3.12", None)
    real = fake_python(tmp_path / "bin", "python3.12", "3.12")
    assert find_python(tmp_path / "shims", tmp_path / "bin").stdout.splitlines() == [str(real)]


def test_a_plain_python3_counts_by_its_version(tmp_path: Path):
    newer = fake_python(tmp_path, "python3", "3.12")
    fake_python(tmp_path, "python3.11", "3.11")
    assert find_python(tmp_path).stdout.splitlines() == [str(newer)]


def test_folders_with_spaces_may_hold_the_python(tmp_path: Path):
    real = fake_python(tmp_path / "my tools", "python3.11", "3.11")
    assert find_python(tmp_path / "my tools").stdout.splitlines() == [str(real)]


def test_without_a_suitable_python_the_set_up_says_what_to_install(tmp_path: Path):
    fake_python(tmp_path, "python3.13", None)
    fake_python(tmp_path, "python3", "3.10")
    found = find_python(tmp_path)
    assert (found.returncode, found.stdout) == (1, "")
    assert "put Python 3.11, 3.12 or 3.13 with its venv module on PATH" in found.stderr


def test_the_running_python_passes_the_real_probe(tmp_path: Path):
    (tmp_path / "python").symlink_to(Path(sys.base_prefix) / "bin" / "python3")
    assert find_python(tmp_path).stdout.splitlines() == [str(tmp_path / "python")]


def test_a_bundled_model_is_found_by_its_name():
    assert set(CARDS) <= set(model_names())
    assert (model_dir("llama-3-70b") / "config.json").is_file()


def test_a_directory_or_a_file_is_a_model_by_its_path(tmp_path: Path):
    weights = tmp_path / "model.gguf"
    weights.touch()
    assert model_dir(tmp_path) == tmp_path
    assert model_dir(str(weights)) == weights


def test_a_bundled_name_wins_over_a_folder_of_that_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "llama-3-70b").mkdir()
    monkeypatch.chdir(tmp_path)
    assert (model_dir("llama-3-70b") / "config.json").is_file()
    assert model_dir("./llama-3-70b").resolve() == tmp_path / "llama-3-70b"


@pytest.mark.parametrize("name", ["", "gpt-9", "../models/llama-3-70b/absent", "bad\0name", "x" * 5000])
def test_a_model_that_is_not_there_lists_the_bundled_ones(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match=r"bundled model \(.*llama-3-70b.*\)"):
        model_dir(name)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("llama-3-70b", 70_553_706_496),
        ("llama-3.1-8b", 8_030_261_248),
        ("mistral-7b", 7_241_732_096),
        ("qwen2.5-7b", 7_615_616_512),
    ],
)
def test_a_card_has_the_shapes_of_its_model(name: str, parameters: int):
    card = read_config(model_dir(name))
    hidden, head_dim = card.hidden_size, card.head_dim
    q_width, kv_width = card.num_attention_heads * head_dim, card.num_key_value_heads * head_dim
    attention = 2 * hidden * q_width + 2 * hidden * kv_width + (q_width + 2 * kv_width if card.qkv_bias else 0)
    layer = attention + 3 * hidden * card.intermediate_size + 2 * hidden
    assert not card.tie_word_embeddings
    assert 2 * card.vocab_size * hidden + card.num_hidden_layers * layer + hidden == parameters


def test_the_card_of_qwen3_235b_has_235_g_parameters():
    card = read_config(model_dir("qwen3-235b-a22b"))
    assert card.moe is not None and all(card.moe.layers)
    hidden, head_dim = card.hidden_size, card.head_dim
    attention = 2 * hidden * head_dim * (card.num_attention_heads + card.num_key_value_heads) + 2 * head_dim
    experts = card.moe.num_experts * (3 * hidden * card.moe.intermediate_size + hidden)
    layers = card.num_hidden_layers * (attention + experts + 2 * hidden)
    assert 2 * card.vocab_size * hidden + layers + hidden == 235_093_634_560


def test_the_card_of_deepseek_v3_has_671_g_parameters():
    card = read_config(model_dir("deepseek-v3"))
    assert card.mla is not None and card.moe is not None and card.mla.q_lora_rank is not None
    hidden, heads, mla, moe = card.hidden_size, card.num_attention_heads, card.mla, card.moe
    latents = mla.q_lora_rank + mla.kv_lora_rank
    attention = hidden * (latents + mla.qk_rope_head_dim) + latents + mla.q_lora_rank * heads * card.head_dim
    attention += mla.kv_lora_rank * heads * (mla.qk_nope_head_dim + mla.v_head_dim) + hidden * heads * mla.v_head_dim
    experts = 3 * hidden * (moe.num_experts * moe.intermediate_size + moe.shared_intermediate_size)
    ffn = sum(experts + moe.num_experts * (hidden + 1) if routed else 3 * hidden * card.intermediate_size
              for routed in moe.layers)  # fmt: skip
    layers = card.num_hidden_layers * (attention + 2 * hidden) + ffn
    assert 2 * card.vocab_size * hidden + layers + hidden == 671_026_419_200


def test_the_kv_cache_of_llama_3_70b_is_what_its_card_says():
    card = read_config(model_dir("llama-3-70b"))
    values = 2 * 8192 * card.num_hidden_layers * card.num_key_value_heads * card.head_dim
    assert values * 2 == 2_684_354_560, "bytes in bf16 for one request of 8192 tokens"


def test_the_wheel_carries_meshes_and_models_and_finds_them_from_anywhere(tmp_path: Path, fresh_python):
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(command, cwd=REPOSITORY, check=True, capture_output=True, timeout=120)
    (wheel,) = tmp_path.glob("*.whl")
    installed = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(installed)
    assert (installed / "jaxpar" / "py.typed").exists(), "users' type checkers would ignore every type"
    code = """
from jaxpar.assets import mesh_dir, model_dir, model_names
from jaxpar.presets import resolve_mesh
print(mesh_dir())
print(resolve_mesh("h20-32")[0])
print(*model_names())
print(model_dir("llama-3-70b"))
"""
    folder, mesh, models, model = fresh_python(code, PYTHONPATH=str(installed)).splitlines()
    assert folder == str(installed / "jaxpar" / "_data" / "meshes")
    assert mesh == "dp=4,tp=8"
    assert tuple(models.split()) == model_names()
    assert model == str(installed / "jaxpar" / "_data" / "models" / "llama-3-70b")


def test_a_source_checkout_uses_its_own_folders():
    assert mesh_dir() == REPOSITORY / "meshes"
