"""Log lines: one line an event, quoted so that a parser and a person both read them."""

from __future__ import annotations

import logging

import pytest

from tsqp.cli.logs import OWN_LOGGERS, LogfmtFormatter, configure


@pytest.mark.parametrize(
    ("fields", "want"),
    [
        ({}, "info ready"),
        (
            {"endpoint": "tcp://127.0.0.1:1", "start_s": 1.5},
            "endpoint=tcp://127.0.0.1:1 start_s=1.5",
        ),
        ({"detail": "got a, expected b"}, 'detail="got a, expected b"'),
        ({"detail": 'a"b\nc=d'}, r'detail="a\"b\nc=d"'),
        ({"detail": ""}, 'detail=""'),
        ({"detail": "\x1b[31m"}, r'detail="\x1b[31m"'),
    ],
)
def test_fields_are_rendered_in_one_line(fields: dict[str, object], want: str) -> None:
    record = logging.LogRecord("x", logging.INFO, "f", 1, "ready", None, None)
    record.fields = fields
    line = LogfmtFormatter().format(record)
    assert line.endswith(want)
    assert "\n" not in line


def test_the_level_is_that_of_our_own_loggers(capsys: pytest.CaptureFixture[str]) -> None:
    root = logging.getLogger()
    names = (None, *OWN_LOGGERS)
    handlers, levels = root.handlers[:], {n: logging.getLogger(n).level for n in names}
    try:
        configure("info")
        logging.getLogger("some_library").info("from_a_library")
        logging.getLogger("some_library").warning("warning_of_a_library")
        logging.getLogger("gpu_service").info("ready")
        configure("error")
        logging.getLogger("gpu_service").warning("refused")
    finally:
        root.handlers[:] = handlers
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)
    err = capsys.readouterr().err
    assert [line.split(" ", 1)[1] for line in err.splitlines()] == [
        "warning warning_of_a_library",
        "info ready",
    ]
