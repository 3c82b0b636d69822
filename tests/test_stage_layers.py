"""Layers of several stages in one slot: what a stage holds, and windows that are data."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sample_models import oracle_runner

from jaxpar.attention.partial import NO_WINDOW
from jaxpar.attention.tiles import attend


def test_a_stage_holds_its_layers_and_its_part_of_the_vocabulary_and_nothing_else() -> None:
    staged, alone = oracle_runner("gpt_oss", "pp=3"), oracle_runner("gpt_oss", "tp=1")
    config = staged.config
    of_ranks = [
        sum(
            shard.data.nbytes
            for array in staged.weights.values()
            for shard in array.addressable_shards
            if shard.device == device
        )
        for device in staged.programs.mesh.devices.flat
    ]
    layers = sum(array.nbytes for name, array in alone.weights.items() if name.startswith("slots."))
    outside = 4 * (config.vocab_size * config.hidden_size + config.hidden_size)
    assert of_ranks == [layers // 3 + outside] * 3
    vocabulary = np.asarray(staged.weights["vocabulary"])
    np.testing.assert_array_equal(vocabulary[0], alone.weights["embedding"])
    np.testing.assert_array_equal(vocabulary[2], alone.weights["head"])
    assert not vocabulary[1].any()


@pytest.mark.parametrize(("queries", "window"), [(1, 5), (7, 5), (300, 5), (300, 150), (300, None)])
def test_attention_with_a_window_that_is_data_is_that_with_the_number(queries: int, window: int | None) -> None:
    rng, keys = np.random.default_rng(0), 1100
    q, k, v = (
        rng.standard_normal(s).astype(np.float32) for s in ((1, 2, queries, 2, 4), (1, 2, keys, 4), (1, 2, keys, 4))
    )
    q_positions = np.stack([np.arange(keys - queries, keys), np.full(queries, -1)]).astype(np.int32)
    k_positions = np.tile(rng.permutation(keys).astype(np.int32) - 3, (2, 1))
    arrays = q, k, v, q_positions, np.maximum(k_positions, -1)

    as_data = jax.jit(lambda window: attend(*map(jnp.asarray, arrays), window, 0.5))(
        NO_WINDOW if window is None else window
    )
    expected = jax.jit(lambda: attend(*map(jnp.asarray, arrays), window, 0.5))()
    np.testing.assert_array_equal(as_data.lse, expected.lse)
    np.testing.assert_allclose(as_data.out[:, 0], expected.out[:, 0], rtol=0, atol=1e-6)
    assert np.isneginf(as_data.lse[:, 1]).all()
