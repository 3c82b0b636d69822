"""`psum` gradients: each weight's gradient is summed once, over exactly the axes on which the weight is replicated.

Differentiating with respect to a replicated value inside `shard_map` gives a gradient that JAX has summed already, at
a place of its choosing. So every weight is cast to varying first, one copy a rank; its gradient is then what this rank
contributes, and the sum is written here.

    weight            replicated over   a rank's gradient is                       summed over
    q/k/v, up, down   dp, ep            that of its requests                       dp, ep
    norm, row bias    dp, ep, tp        that of its requests and of its width      dp, ep, tp
    experts over ep   dp                that of what came from its replica of dp   dp
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P

from jaxpar.collectives import all_sum
from jaxpar.ledger.traffic import Traffic, merge
from jaxpar.mesh import AXES
from jaxpar.nn.decoder import Decoder
from jaxpar.plan import Plan
from jaxpar.strategies import Step, Strategy


def split_axes(spec: P) -> tuple[str, ...]:
    """The axes over which an array with this PartitionSpec is split."""
    entries = [entry if isinstance(entry, tuple) else (entry,) for entry in spec if entry is not None]
    return tuple(axis for entry in entries for axis in entry)


def replicated_axes(spec: P, plan: Plan) -> tuple[str, ...]:
    """The axes of more than one rank over which an array with this PartitionSpec is replicated."""
    split = split_axes(spec)
    return tuple(axis for axis in plan.active(AXES) if axis not in split)


def sum_gradients(
    gradients: Mapping[str, jax.Array], specs: Mapping[str, P], plan: Plan
) -> tuple[dict[str, jax.Array], jax.Array]:
    """Each rank's contributions by weight -> the gradients, laid out like the weights, and their global 2-norm.

    The square of a slice counts on the rank that holds it, that of a replicated gradient once.
    """
    with jax.named_scope("gradient:psum"):
        total = {name: all_sum(gradient, replicated_axes(specs[name], plan)) for name, gradient in gradients.items()}
        squares: dict[tuple[str, ...], list[jax.Array]] = {}
        for name, gradient in total.items():
            squares.setdefault(split_axes(specs[name]), []).append(jnp.vdot(gradient, gradient))
        norm = jnp.sqrt(sum(all_sum(jnp.stack(values).sum(), axes) for axes, values in squares.items()))
    return total, norm


def traffic(step: Step) -> list[Traffic]:
    """One all-reduce of each weight's local gradient, and one of 4 bytes for the norm of those that are split."""
    _, state = nnx.split(Decoder(step.config, step.plan))
    weights = [weight for _, weight in nnx.to_flat_state(state)]
    messages = []
    for weight in weights:
        axes = replicated_axes(weight.spec, step.plan)
        local = weight.abstract.size // step.ranks(split_axes(weight.spec))
        messages.append((axes, local * weight.abstract.dtype.itemsize))
    messages += [(axes, 4) for axes in {split_axes(weight.spec) for weight in weights}]
    return merge(step.sends(("gradient", "psum"), "all_reduce", axes, 1, size) for axes, size in messages if axes)


def check(step: Step) -> str | None:
    """Every KV head must be on one rank only: copies would each learn from their own queries and drift apart."""
    heads = step.heads
    copied = len(set(heads.kv_heads)) < len([head for head in heads.kv_heads if head >= 0])
    if not copied:
        return None
    return (
        f"tp={heads.tp} stores copies of the {step.config.num_key_value_heads} KV heads, whose gradients would differ: "
        f"train with tp up to {step.config.num_key_value_heads}"
    )


STRATEGY = Strategy(
    name="psum",
    sublayer="gradient",
    axes=("dp", "ep", "tp"),
    collectives=("all_reduce",),
    needs="no copied KV heads",
    run=sum_gradients,
    traffic=traffic,
    check=check,
)
