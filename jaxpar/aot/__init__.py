"""Ahead of time: step programs compiled for accelerators that need not be there."""
