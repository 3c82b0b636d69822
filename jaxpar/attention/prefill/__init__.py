"""Prefill attention over cp: every rank has some of a chunk's tokens, and their keys with all it cached before."""
