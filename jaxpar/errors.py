"""Every error that a user can cause. The command line prints one as a single line and exits with status 2."""


class JaxparError(Exception):
    """Base of all errors that name what is wrong, the numbers, and the remedy."""


class MeshError(JaxparError):
    """A mesh that does not parse, or that this machine cannot hold."""


class PlanError(JaxparError):
    """A plan whose parts do not fit each other, the mesh, or the model."""


class CheckpointError(JaxparError):
    """A model directory or file that is not what its configuration says."""


class RequestError(JaxparError):
    """A prompt or a sampling option that cannot be served."""
