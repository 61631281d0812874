"""Tests of the error tree: what is retryable, what a message says and what it never quotes."""

from __future__ import annotations

from protocol import errors
from protocol.errors import ErrorCode, ProtocolError, ServiceError, TsqpError, describe
from tests.kit.rows import each_row

RETRYABLE_CODES = {ErrorCode.DEADLINE_EXCEEDED, ErrorCode.SHUTTING_DOWN, ErrorCode.QUEUE_FULL}


def test_message_reads_where_got_expected() -> None:
    error = ProtocolError("reply.shape", got="[3]", expected="[4]", code=ErrorCode.INVALID_FIELD)
    assert str(error) == "reply.shape: got [3], expected [4]"
    assert (error.where, error.got, error.expected) == ("reply.shape", "[3]", "[4]")
    assert error.code is ErrorCode.INVALID_FIELD


@each_row("code", list(ErrorCode))
def test_service_error_is_retryable_by_its_code(code: ErrorCode) -> None:
    error = ServiceError("Linear at tcp://h:1", code=code)
    assert error.retryable is (code in RETRYABLE_CODES)
    assert code.value in str(error)
    assert code.value == code.name


@each_row(
    ("error", "parent", "retryable"),
    [
        (errors.SettingsError, errors.InputError, False),
        (errors.ModelError, errors.InputError, False),
        (errors.PolicyError, errors.InputError, False),
        (errors.PromptError, errors.InputError, False),
        (errors.PadBankError, errors.InputError, False),
        (errors.CalibrationError, errors.InputError, False),
        (errors.FeatureKeyError, errors.InputError, False),
        (errors.ManifestError, errors.InputError, False),
        (errors.SealError, errors.InputError, False),
        (errors.KeyFileError, errors.InputError, False),
        (errors.VerificationError, TsqpError, False),
        (errors.LimitError, TsqpError, True),
        (errors.InputError, TsqpError, False),
        (errors.EndpointError, TsqpError, True),
        (errors.AbsentError, errors.EndpointError, True),
        (errors.DeadlineExceededError, TsqpError, True),
        (errors.ProtocolError, TsqpError, False),
        (errors.ServiceError, TsqpError, False),
        (errors.ReplyError, TsqpError, False),
        (errors.EvidenceError, TsqpError, False),
        (errors.ModelMismatchError, TsqpError, False),
        (errors.KernelError, TsqpError, False),
        (errors.MaskError, TsqpError, False),
        (errors.ActivationRangeError, TsqpError, False),
        (errors.PadsExhaustedError, TsqpError, True),
    ],
)
def test_error_tree(error: type[TsqpError], parent: type[TsqpError], retryable: bool) -> None:
    assert error.__bases__ == (parent,)
    assert error.retryable is retryable
    assert errors.__doc__ is not None
    assert error.__name__ in errors.__doc__


@each_row(
    ("value", "text"),
    [
        (None, "None"),
        (True, "True"),
        (-1, "-1"),
        (1.5, "1.5"),
        ("Linear", "'Linear'"),
        ([1, -1, 2], "[1, -1, 2]"),
        ((4, 5), "[4, 5]"),
        (list(range(100, 120)), "[100, 101, 102, 103, 104, 105, 106, 107]..."),
        (b"secret", "a value of type bytes"),
        (bytearray(b"secret"), "a value of type bytearray"),
        (memoryview(b"secret"), "a value of type memoryview"),
        ({"secret": 1}, "a value of type dict"),
        ([0.5, 0.25], "a value of type list"),
        ([b"secret"], "a value of type list"),
        (["secret"], "a value of type list"),
    ],
)
def test_describe(value: object, text: str) -> None:
    assert describe(value) == text


def test_describe_cuts_long_text() -> None:
    text = describe("x" * 1000)
    assert len(text) == 60
    assert text.endswith("...")
