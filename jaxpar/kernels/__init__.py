"""What accelerators run in place of plain XLA code, and the one place that chooses by backend."""
