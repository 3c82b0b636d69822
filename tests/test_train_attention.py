"""Attention as training runs it: no cache, and all scores at once."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from jaxpar.train.attention import ChunkOnly


def test_without_a_cache_the_bag_is_what_is_new() -> None:
    new = {"k": jnp.arange(2.0 * 5 * 3 * 4).reshape(2, 5, 3, 4)}
    positions = jnp.arange(10, dtype=jnp.int32).reshape(2, 5)
    only = ChunkOnly(positions)
    planes, read = only.update({}, new)
    bag = read()
    assert planes == {}
    assert only.key_positions is positions
    np.testing.assert_array_equal(bag["k"][2, 1, 4], new["k"][1, 4, 2])
