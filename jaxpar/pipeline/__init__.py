"""Layers split over pp: which layers a stage runs, and in which of its slots."""
