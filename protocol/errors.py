"""Every error that this project raises on purpose.

    TsqpError
    ├── InputError          what a person gave us; nothing has been computed yet
    │   ├── SettingsError   command line, environment variable, TOML file
    │   ├── ModelError      model directory: configuration, weights, tokenizer
    │   ├── PolicyError     placement policy
    │   ├── PromptError     prompt text or token ids
    │   ├── PadBankError    bank, key or state file of pads
    │   ├── FeatureKeyError     key of a feature mask
    │   ├── ManifestError       manifest of a model directory
    │   ├── SealError           sealed model directory
    │   ├── PluginError         a user's own Python file or installed package
    │   └── KeyFileError        key of a channel, or list of allowed ones
    ├── EndpointError           nothing can be bound or reached there      (retry helps)
    │   └── AbsentError     nobody is there, yet or for a moment           (retry helps)
    ├── DeadlineExceededError   no reply in time                           (retry helps)
    ├── ProtocolError           bytes that do not follow the wire schema; has an ErrorCode
    ├── ServiceError            an error reply; has an ErrorCode           (retry: by code)
    ├── SessionLostError        a service lost keys and values it kept  (retry helps)
    ├── ReplyError              a well-formed reply that is not what was asked for
    ├── VerificationError       a reply of the right form that is a wrong result
    ├── LimitError              a limit of the trusted side itself      (retry helps)
    ├── EngineError             the engine runs no more
    ├── UnseededError           random numbers that could be guessed
    ├── ResumedError            this VM was resumed from a snapshot, and may use secrets twice
    ├── EvidenceError           evidence of attestation that is malformed or not genuine
    ├── ModelMismatchError      the service holds another model than the TEE's own directory
    ├── KernelError             this processor's int8 products are not exact
    ├── MaskError               a mask that cannot be applied or undone
    ├── ActivationRangeError    activations that are not finite
    └── PadsExhaustedError      no pad is left                             (retry helps)

The message always reads *where: got X, expected Y*. Only codes cross the wire, never a message.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from typing import Any


class ErrorCode(StrEnum):
    """The fixed list of codes that an error reply may carry."""

    MALFORMED_MESSAGE = "MALFORMED_MESSAGE"
    UNSUPPORTED_VERSION = "UNSUPPORTED_VERSION"
    UNKNOWN_METHOD = "UNKNOWN_METHOD"
    INVALID_FIELD = "INVALID_FIELD"
    LIMIT_EXCEEDED = "LIMIT_EXCEEDED"
    DEADLINE_EXCEEDED = "DEADLINE_EXCEEDED"
    SHUTTING_DOWN = "SHUTTING_DOWN"
    # More waits than the service keeps, of this client or of all together.
    QUEUE_FULL = "QUEUE_FULL"
    # The service does not hold what this needs.
    UNAVAILABLE = "UNAVAILABLE"
    # It has lost a session of a Segment, or part of it: the client sends all tokens once more.
    UNKNOWN_SESSION = "UNKNOWN_SESSION"
    # The sessions of a Segment do not fit into the memory that it keeps for the client.
    SESSIONS_FULL = "SESSIONS_FULL"
    INTERNAL = "INTERNAL"

    @property
    def retryable(self) -> bool:
        """Whether the same request may succeed when it is sent again."""
        return self in (ErrorCode.DEADLINE_EXCEEDED, ErrorCode.SHUTTING_DOWN, ErrorCode.QUEUE_FULL)


# Of each of the three parts of a message; a path may be long, a list of what is expected as well.
_MAX_PART = 1000
# Of a name from a file.
_SHOWN = 120


def one_line(text: str) -> str:
    """Keep a part of a message short and printable.

    Names in it may come from a file or a peer: no control sequences for the terminal that shows it,
    no second line for the log.
    """
    if not text.isprintable():
        text = "".join(c if c.isprintable() else "?" for c in text)
    return text if len(text) <= _MAX_PART else f"{text[: _MAX_PART - 3]}..."


class TsqpError(Exception):
    """Root of the tree; reads *where: got X, expected Y*."""

    retryable: bool = False

    def __init__(self, where: str, got: str, expected: str) -> None:
        self.where, self.got, self.expected = map(one_line, (where, got, expected))
        super().__init__(self.where, self.got, self.expected)

    def __str__(self) -> str:
        return f"{self.where}: got {self.got}, expected {self.expected}"

    @classmethod
    def unless(cls, holds: object, where: str, got: str, expected: str, **more: Any) -> None:
        """Raise an error of this class unless `holds`; `more`: what else the class takes."""
        if not holds:
            raise cls(where, got=got, expected=expected, **more)

    @classmethod
    @contextmanager
    def for_os(
        cls,
        where: str,
        expected: str,
        others: type[Exception] | tuple[type[Exception], ...] = (),
        got: str = "",
    ) -> Iterator[None]:
        """Raise an error of this class in place of an OSError, and say what the system said.

        Likewise in place of `others`, of which `got` is said; "" for their own words.
        """
        try:
            yield
        except OSError as error:
            # An ssl.SSLError has a reason, which is shorter.
            said = getattr(error, "reason", None) or error.strerror
            raise cls(where, said or type(error).__name__, expected) from None
        except others as error:
            raise cls(where, got or str(error), expected) from None

    @classmethod
    @contextmanager
    def instead_of(
        cls,
        kinds: type[Exception] | tuple[type[Exception], ...],
        where: str,
        got: str,
        expected: str,
    ) -> Iterator[None]:
        """Raise an error of this class in place of others, whose own words are not shown."""
        try:
            yield
        except kinds:
            raise cls(where, got, expected) from None


class _RetryableError(TsqpError):
    """Base of what the same request may succeed after."""

    retryable = True


class InputError(TsqpError):
    """Something that a person gave us is wrong; retrying the same input never helps."""


class SettingsError(InputError):
    """A setting from the command line, the environment or a TOML file."""


class ModelError(InputError):
    """A model directory that is missing, incomplete, inconsistent or not supported."""


class PolicyError(InputError):
    """A placement policy that is unknown, malformed or does not fit."""


class PromptError(InputError):
    """A prompt that is empty, too long or holds token ids that the model has not."""


class PadBankError(InputError):
    """A pad bank, its key or its state: missing, damaged, tampered, in use, of another model."""


class FeatureKeyError(InputError):
    """The key of a feature mask that is missing, malformed or of another model."""


class ManifestError(InputError):
    """A manifest that is missing, malformed or of another model than the directory holds."""


class PluginError(InputError):
    """A user's own file or package that cannot be loaded, or lacks what it is loaded for."""


class SealError(InputError):
    """A sealed model that was changed, is of another seal, or is sealed for another key."""


class KeyFileError(InputError):
    """A key of a channel, or a list of allowed ones: missing, malformed or readable by others."""


class EndpointError(_RetryableError):
    """An endpoint that is malformed, in use or does not answer."""


class AbsentError(EndpointError):
    """Nobody listens or shakes hands there, yet or for a moment: a start waits for that."""


class DeadlineExceededError(_RetryableError):
    """The peer did not answer in time; it may be dead, slow or cut off."""


class ProtocolError(TsqpError):
    """Bytes from the peer that do not follow the wire schema."""

    def __init__(
        self,
        where: str,
        got: str,
        expected: str,
        *,
        code: ErrorCode = ErrorCode.MALFORMED_MESSAGE,
    ) -> None:
        super().__init__(where, got, expected)
        self.code = code

    @classmethod
    def at_most(cls, limit: int, where: str, size: int) -> None:
        """Refuse more than `limit` bytes."""
        if size > limit:
            raise cls(where, f"{size} bytes", f"at most {limit}", code=ErrorCode.LIMIT_EXCEEDED)


class ServiceError(TsqpError):
    """An error reply; the detail is in the service's own log. `known`: what we know of it."""

    def __init__(self, where: str, *, code: ErrorCode, known: str = "") -> None:
        super().__init__(
            where,
            got=f"error reply {code.value}" + (f" ({known})" if known else ""),
            expected="a result (see the service's log)",
        )
        self.code = code
        self.retryable = code.retryable


class SessionLostError(_RetryableError):
    """A service has lost the keys and values of a sequence, which begins anew."""


class ReplyError(TsqpError):
    """A reply whose operator, shape or dtype is not the one that was asked for."""


class VerificationError(TsqpError):
    """A reply that passed every check of its form, and is not the product that was asked for.

    Retrying with the same service never helps: it computes wrongly, or lies.
    """


class LimitError(_RetryableError):
    """A limit of the trusted side: names the limit, what was asked for and what is available."""


class EngineError(TsqpError):
    """The engine runs no more: it ends with the program, or by a mistake of ours."""


class UnseededError(TsqpError):
    """The operating system's generator has no seed yet: what it gives could be guessed."""


class ResumedError(TsqpError):
    """A VM that was resumed from a snapshot, or may have been: its pads and keys may be used twice.

    None of them is used from then on. Only a new process helps.
    """


class EvidenceError(TsqpError):
    """Evidence of what runs that is malformed, or that its maker did not sign."""


class ModelMismatchError(TsqpError):
    """The service was started with another model than the TEE's own directory."""


class KernelError(TsqpError):
    """The int8 products of this processor are not exact."""


class MaskError(TsqpError):
    """A mask that cannot be applied to a tensor, or undone on what came back."""


class ActivationRangeError(TsqpError):
    """A row of activations that is not finite: no integers stand for it."""


class PadsExhaustedError(_RetryableError):
    """No pad is left; more can be made."""


def shown(name: str) -> str:
    """Return a name from a file as it can stand in a message: short, and printable."""
    if len(name) <= _SHOWN and name.isprintable():
        return name
    return f"{name[: _SHOWN // 2]!r}..."


def describe(value: object) -> str:
    """Say what a value from a person's own file is: short ones are quoted."""
    if isinstance(value, bool | int | float | str) or value is None:
        text = repr(value)
        return text if len(text) <= 60 else f"{text[:57]}..."
    if isinstance(value, list | tuple) and all(isinstance(item, int) for item in value):
        return f"{list(value[:8])}{'...' if len(value) > 8 else ''}"
    return f"a value of type {type(value).__name__}"


def describe_untrusted(value: object) -> str:
    """Say what a value from the wire is, without quoting text or bytes: messages are logged.

    Tensor contents, token ids or a prompt may stand anywhere in a message by mistake.
    """
    if isinstance(value, bool | float) or value is None:
        return repr(value)
    if isinstance(value, int):
        return str(value) if abs(value) < 2**16 else "a large integer"
    if isinstance(value, str):
        return f"a string of {len(value)} characters"
    if isinstance(value, list | tuple | dict):
        return f"a {type(value).__name__} of {len(value)} items"
    return f"a value of type {type(value).__name__}"
