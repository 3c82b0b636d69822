import pytest
from oracle_checks import assert_logits, assert_tokens
from oracle_data import load_oracle
from sample_models import oracle_runner

pytestmark = pytest.mark.usefixtures("unwritten_pages_are_nan")


@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        ("llama_9_3", "tp=6"),
        ("qwen3", "tp=8"),
        ("qwen2_sliding", "dp=2,tp=4"),
        ("gpt_oss", "tp=6"),
        ("llama_mqa", "tp=4"),
    ],
)
def test_a(name, mesh):
    oracle, runner = load_oracle(name), oracle_runner(name, mesh, kv_split="head_dim", page_size=5, chunk=8)
    assert_logits(runner, oracle.prompts, oracle.logits)
    assert_tokens(runner, oracle.prompts, oracle.greedy)
