"""Training, as an SPMD program of the same modules: how the bundled model was made."""
