"""The errors that fedemu raises on purpose. Rooms have a few more, which are kinds of these.

FedemuError
├── ConfigurationError      exit 2: a setting, a file or an argument is wrong
│   └── DataError           exit 2: a data set, a column or a partition is wrong
├── ProtocolError           a message that cannot be used; it is counted, answered and dropped
│   ├── MalformedMessage    not decodable, of the wrong type, too large, too deep
│   ├── VersionMismatch     the peer speaks another protocol version
│   ├── HandshakeFailed     the two sides of a connection do not understand each other, or not accept each other's keys
│   ├── KeyRevoked          the peer's key was approved, and is not any more
│   ├── UnknownPeer         the peer has no session, and says more than it needs to get one
│   └── TooMuch             the peer sends more than it may
├── BlobError               a blob is missing or does not match its digest
│   └── UnwritableError     the disk of this machine does not take a blob
├── RefusedError            exit 3: the coordinator refused a peer, with a named reason
├── QuorumError             exit 3: too few replies in every attempt of a round
├── UnreachableError        exit 3: the other side never came, or is gone for good
├── Interrupted             exit 4: stopped by a signal; the run can be resumed from its checkpoint
├── TrainingError           a program failed on a device's data; the outcome is ``failed``
└── MachineFault            there was no memory, or a GPU failed; another process does the job

A run that diverges is not an error: it ends with the outcome ``diverged``.
"""

from __future__ import annotations


class FedemuError(Exception):
    """The base of all errors. The text is one sentence that says what was wrong and what to do.

    ``exit_code`` is the exit code of a command that ends with the error.
    """

    exit_code = 5


class ConfigurationError(FedemuError):
    """A setting, a file or an argument is wrong."""

    exit_code = 2


class DataError(ConfigurationError):
    """A data set, a column or a partition is wrong."""


class ProtocolError(FedemuError):
    """A message that cannot be used. ``reason`` is the label under which it is counted."""

    reason = "protocol"


class MalformedMessage(ProtocolError):
    """A message that cannot be decoded, is of the wrong type, too large, or nested too deep."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


class VersionMismatch(ProtocolError):
    """The peer speaks another version of the protocol."""

    reason = "version"


class HandshakeFailed(ProtocolError):
    """The two sides of a connection do not understand each other, or do not accept each other's keys.

    ``final``: it needs a new connection.
    """

    reason = "handshake"

    def __init__(self, detail: str, final: bool = False) -> None:
        super().__init__(detail)
        self.final = final


class KeyRevoked(ProtocolError):
    """A message came from a peer whose key was approved when it connected, and is not any more."""

    reason = "revoked"

    def __init__(self) -> None:
        super().__init__("The key of this connection is not approved any more; ask whoever runs the coordinator.")


class UnknownPeer(ProtocolError):
    """A message of a peer without a session that is no question for one. It was not decoded."""

    reason = "unknown_peer"

    def __init__(
        self, detail: str = "This connection is not known, and its message is long; enrol, or say Hello, first."
    ) -> None:
        super().__init__(detail)


class TooMuch(ProtocolError):
    """A message beyond what its connection may send. It was not decoded, and is not answered."""

    reason = "too_much"

    def __init__(self, detail: str = "This connection sends more than a run needs.") -> None:
        super().__init__(detail)


class BlobError(FedemuError):
    """A blob is missing, or does not match its digest."""


class UnwritableError(BlobError):
    """The disk of this machine does not take a blob, mostly because it is full. To fetch the blob again is no help."""


class RefusedError(FedemuError):
    """The coordinator refused a peer. ``reason`` is the reason on the wire."""

    exit_code = 3

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason

    @classmethod
    def misunderstood(cls, address: str, detail: str) -> RefusedError:
        """The error of a peer that cannot read a message of its coordinator, or that is not understood itself."""
        return cls(
            VersionMismatch.reason,
            f"The coordinator at {address} and this machine do not understand each other ({detail}); install the same "
            "version of fedemu on both, which fedemu --version tells.",
        )

    @classmethod
    def shut_out(cls, reason: str, seconds: float, why: str) -> RefusedError:
        """The error of a peer that was not let in for so many seconds."""
        return cls(reason, f"No way in within {seconds:g} s: {why}.")


class QuorumError(FedemuError):
    """Too few devices replied in every attempt of a round."""

    exit_code = 3


class UnreachableError(FedemuError):
    """The other side never came, or is gone for good."""

    exit_code = 3

    @classmethod
    def unanswered(cls, address: str, seconds: float) -> UnreachableError:
        """The error of a peer that no coordinator has answered at an address for so many seconds."""
        return cls(
            f"No coordinator answered at {address} within {seconds:g} s; start one there, or give the right address "
            "with --connect."
        )


class Interrupted(FedemuError):
    """A signal stopped the run. It can be resumed from its checkpoint."""

    exit_code = 4


class TrainingError(FedemuError):
    """A program failed on a device's data."""


class MachineFault(FedemuError):
    """The machine could not do a job, which another process may be able to do: there was no memory, or a GPU failed."""


def lacks_memory(error: BaseException) -> bool:
    """Whether an error means that host memory is exhausted. Neither torch nor the loader has a type for that."""
    return isinstance(error, MemoryError) or any(words in str(error) for words in _WITHOUT_MEMORY)


_WITHOUT_MEMORY = (
    "can't allocate memory",
    "Cannot allocate memory",  # the system, in an OSError
    "failed to map segment from shared object",  # its loader, in an ImportError
    "Storage size calculation overflowed",
)
