"""One tree of exceptions.

ZbgrpoError
├── UserError              somebody can fix it: the message names the culprit and says what to change
│   ├── ConfigError        a flag, a YAML key or a combination of them
│   ├── DataError          a data set, a row, a gold answer
│   ├── ModelError         a model or tokenizer that cannot be loaded or used
│   └── RunFolderError     a run folder that is finished, foreign, locked or damaged
├── ResourceError          the machine lacks something: /dev/shm, memory, a GPU
├── ProtocolError          a message, frame or ring record that breaks the protocol
├── PeerLostError          another rank or the hub is gone, or silent for too long
├── WeightSyncError        names, shapes or digests of weights disagree; half a version is never used
├── NonFiniteError         too many steps in a row without a finite gradient
├── NoEffectiveGroupsError the filter kept nothing for a whole run
└── InfrastructureError    a response could not be scored or generated for reasons outside it; never a score
"""

from __future__ import annotations


class ZbgrpoError(Exception):
    """Root of everything this package raises on purpose."""


class UserError(ZbgrpoError):
    """An error that the person at the keyboard can fix; the message says how."""


class ConfigError(UserError):
    """A flag, a key or a combination of them is wrong."""


class DataError(UserError):
    """A data set or one of its rows is wrong; the message carries `file:line`."""


class ModelError(UserError):
    """A model or tokenizer cannot be loaded or is not supported."""


class RunFolderError(UserError):
    """The run folder is finished, belongs to another configuration, is in use or is damaged."""


class ResourceError(ZbgrpoError):
    """The machine lacks something; the message names how much is needed."""


class ProtocolError(ZbgrpoError):
    """A message, frame or record breaks the protocol and was not used."""


class PeerLostError(ZbgrpoError):
    """Another process of the run is gone or silent; the message names its role and rank.

    `reported`: the failure has been told on the screen already, by the rank where it happened.
    """

    def __init__(self, message: str, reported: bool = False) -> None:
        super().__init__(message)
        self.reported = reported


class WeightSyncError(ZbgrpoError):
    """Weights of two ranks do not agree in names, shapes or digests."""


class NonFiniteError(ZbgrpoError):
    """Too many optimizer steps in a row had a gradient that is not finite."""


class NoEffectiveGroupsError(ZbgrpoError):
    """Every group of the run was filtered out, so that no step could be trained."""


class InfrastructureError(ZbgrpoError):
    """Scoring or generation failed for a reason outside the response; it must never count as a score."""


EXIT_STOPPED = 85
"""Exit status of a run that was asked to stop (SIGTERM, SIGUSR1), saved its state and can be resumed."""

EXIT_USER_ERROR = 2
"""Exit status after a `UserError`."""
