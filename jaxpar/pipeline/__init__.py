"""Layers split over pp: which stage has which, and when each works."""
