"""The rotary parameters of a `config.json`: under `rope_parameters` or `rope_scaling`, or at the top level alone."""

from __future__ import annotations

from dataclasses import replace

from jaxpar.checkpoint.architectures import Architecture
from jaxpar.checkpoint.config import RopeConfig
from jaxpar.checkpoint.fields import Fields

ROPE_TYPES = ("default", "linear", "llama3", "yarn")


def read_rope(fields: Fields, architecture: Architecture, max_positions: int) -> RopeConfig:
    """The rotary parameters of a model whose context is `max_positions`.

    Raises:
        CheckpointError: a kind of rope that is not computed here, or numbers that cannot be.
    """
    rope = _stretched(fields, architecture, max_positions)
    interleaved = architecture.latent and fields.boolean("rope_interleave", True)
    return replace(rope, interleaved=interleaved)


def _stretched(fields: Fields, architecture: Architecture, max_positions: int) -> RopeConfig:
    scaling = fields.section("rope_scaling")
    parameters = scaling if scaling is not None and scaling.values else fields.section("rope_parameters")
    if parameters is None:
        parameters = Fields(architecture.rope_parameters, fields.file, "rope_parameters.")
    for place in (fields, parameters):
        if place.number("partial_rotary_factor", 1.0) != 1.0:
            raise place.error("partial_rotary_factor", "1: rotary embeddings over the whole head")
    if nested := sorted({"full_attention", "sliding_attention"} & set(parameters.values)):
        raise parameters.error(nested[0], "one set of rotary parameters for all layers")

    theta = fields.number("rope_theta", architecture.rope_theta, above=1)
    theta = parameters.number("rope_theta", theta, above=1)
    rope_type = parameters.choice("rope_type" if "rope_type" in parameters else "type", ROPE_TYPES, "default")
    if rope_type == "default":
        return RopeConfig(theta=theta)
    factor = parameters.number("factor", minimum=1)
    if rope_type == "linear":
        return RopeConfig("linear", theta=theta, factor=factor)

    # The top level wins, and the context length stands in, as in transformers.
    place = fields if "original_max_position_embeddings" in fields else parameters
    original = place.integer("original_max_position_embeddings", max_positions)
    if rope_type == "llama3":
        low = parameters.number("low_freq_factor", above=0)
        return RopeConfig(
            "llama3",
            theta=theta,
            factor=factor,
            low_freq_factor=low,
            high_freq_factor=parameters.number("high_freq_factor", above=low),
            original_max_position_embeddings=original,
        )
    # YaRN (Peng et al. 2023, arXiv:2309.00071); 0 means absent for the options, as in transformers.
    beta_fast = parameters.number("beta_fast", None, minimum=0) or 32.0
    beta_slow = parameters.number("beta_slow", None, minimum=0) or 1.0
    if beta_fast <= beta_slow:
        raise parameters.error("beta_fast", f"a number > beta_slow {beta_slow:g}")
    return RopeConfig(
        "yarn",
        theta=theta,
        factor=factor,
        original_max_position_embeddings=original,
        beta_fast=beta_fast,
        beta_slow=beta_slow,
        mscale=parameters.number("mscale", None, minimum=0) or None,
        mscale_all_dim=parameters.number("mscale_all_dim", None, minimum=0) or None,
        attention_factor=parameters.number("attention_factor", None, above=0),
        truncate=parameters.boolean("truncate", True),
    )
