"""Feeds step programs with requests: lanes, pages, chunks, and what comes back."""
