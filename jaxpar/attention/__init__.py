"""Attention as pure functions: partial results, the paged cache, and one module for each strategy."""
