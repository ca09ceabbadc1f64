"""Every error that fedemu raises on purpose.

FedemuError
├── ConfigurationError      exit 2: a setting, a file or an argument is wrong
│   └── DataError           exit 2: a data set, a column or a partition is wrong
├── ProtocolError           a message that can't be used; counted, answered, dropped
│   ├── MalformedMessage    not decodable, of the wrong type, too large, too deep
│   └── VersionMismatch     the peer speaks another protocol version
├── BlobError               a blob is missing or does not match its digest
├── RefusedError            exit 2 or 3: the coordinator refused a peer, with a named reason
├── QuorumError             exit 3: too few replies after every try
├── UnreachableError        exit 3: the other side never came, or is gone for good
├── Interrupted             exit 4: stopped by a signal; a checkpoint is at hand
└── TrainingError           a program failed on a device's data; becomes the outcome ``failed``

A run that diverges is no error: it ends with the outcome ``diverged``.
"""

from __future__ import annotations


class FedemuError(Exception):
    """Base of all; the text is one sentence that says what was wrong and what to do."""

    exit_code = 5


class ConfigurationError(FedemuError):
    exit_code = 2


class DataError(ConfigurationError):
    pass


class ProtocolError(FedemuError):
    reason = "protocol"


class MalformedMessage(ProtocolError):
    """``reason`` is the label under which the message is counted."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


class VersionMismatch(ProtocolError):
    reason = "version"


class BlobError(FedemuError):
    pass


class RefusedError(FedemuError):
    """``reason`` is the reason named on the wire."""

    exit_code = 3

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


class QuorumError(FedemuError):
    exit_code = 3


class UnreachableError(FedemuError):
    exit_code = 3


class Interrupted(FedemuError):
    exit_code = 4


class TrainingError(FedemuError):
    pass
