"""Every way in which Perdure fails towards its caller. A fault of the cluster is not here: it is an `Event`."""


class PerdureError(Exception):
    """Root of all errors that Perdure raises on purpose. Its text is one sentence: what, where, what to do."""


class ConfigError(PerdureError):
    """The user asked for something that cannot be done as asked: a flag, a value, a file."""


class BackendError(PerdureError):
    """The engine that starts processes (local machine, Slurm, Kubernetes) refused."""


class HostError(PerdureError):
    """Something on this machine failed: a command, a file, a port."""


class WireError(PerdureError):
    """A peer could not be reached, or answered with something that is not in the protocol."""


class AccessDeniedError(WireError):
    """The peer refused our token."""


class UntrustedError(WireError):
    """No TLS with the peer: we do not accept its certificate, or it speaks plain HTTP. Trying again does not help."""


class IllegalMove(PerdureError):
    """A state machine was given an event that its table does not allow; nothing was changed."""


class EventLogError(PerdureError):
    """The event log cannot be read or written."""


class CorruptCheckpointError(PerdureError):
    """A checkpoint, or a part of one, is not what was written."""


class BadCheckpointError(PerdureError):
    """What was restored is bad, as the script's own check says. It is set aside; the next start takes an older one."""


class NoCheckpointError(PerdureError):
    """Checkpoints exist and none can be restored. Training does not start from random weights unless it is told to."""
