"""Mixture of experts: how loads are gathered, and which device holds which expert."""
