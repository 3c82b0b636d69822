"""The model as Flax NNX modules in the local view: each holds its rank's slice of every weight."""
