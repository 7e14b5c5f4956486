from __future__ import annotations

import logging

import pytest

from headrace.observe.fault import report_fault


def test_says_where_and_what_kind_but_not_with_which_data(caplog: pytest.LogCaptureFixture) -> None:
    words = "".join(["the user", "'s words"])
    try:
        dict[str, str]()[words]
    except KeyError as error:
        report_fault(logging.getLogger("headrace.test"), error, "id-7")
    (record,) = caplog.records
    assert record.levelno == logging.ERROR
    assert "id-7" in record.getMessage()
    assert "KeyError" in record.getMessage()
    assert "test_fault.py" in record.getMessage()
    assert words not in caplog.text
