"""Mixture of experts: routing, dispatch to the ranks that hold the experts, and their products."""
