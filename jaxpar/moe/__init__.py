"""Mixture of experts: routing, dispatch to the ranks that hold the experts, their products, and their placement."""
