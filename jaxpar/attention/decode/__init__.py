"""Decode attention over cp: every rank has the new token of every request and some of the cached keys, which stay."""
