from __future__ import annotations

import logging

import msgspec
import pytest

from headrace.core.timeline import Timeline
from headrace.observe.accesslog import LOGGER, AccessLog
from headrace.observe.record import Record


def record(request_id: str = "id") -> Record:
    timeline = Timeline(1.0, body=1.001, routed=1.0015, tokenized=1.004, prompt_tokens=5)
    return Record(
        request_id, "POST", "/v1/chat/completions", timeline, status=200, outcome="ok", model="m", stream=True,
        prompt_tokens=5, cached_tokens=2, completion_tokens=3, total_s=0.25,
    )  # fmt: skip


def test_a_request_is_one_json_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger=LOGGER)
    AccessLog(lambda: 1234.5678).write(record())
    (line,) = [one.getMessage() for one in caplog.records]
    assert msgspec.json.decode(line) == {
        "ts": 1234.568,
        "request_id": "id",
        "method": "POST",
        "path": "/v1/chat/completions",
        "status": 200,
        "outcome": "ok",
        "model": "m",
        "engine": None,
        "attempts": 0,
        "key": None,
        "stream": True,
        "prompt_tokens": 5,
        "cached_tokens": 2,
        "completion_tokens": 3,
        "stages": {"receive": 1.0, "route": 0.5, "tokenize": 2.5},
        "ttft_ms": None,
        "total_ms": 250.0,
    }


def test_a_line_stays_a_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger=LOGGER)
    AccessLog(lambda: 0.0).write(record('a\r\nb\x1b[31m"%s'))
    line = caplog.records[0].getMessage()
    assert not any(ord(character) < 32 for character in line)
    assert msgspec.json.decode(line)["request_id"] == 'a\r\nb\x1b[31m"%s'


def test_nothing_is_made_when_nobody_listens(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, logger=LOGGER)

    def wall() -> float:
        raise AssertionError

    AccessLog(wall).write(record())
    assert caplog.records == []
