from __future__ import annotations

import pytest

from headrace.protocol.api_path import api_path


@pytest.mark.parametrize(
    ("given", "read"),
    [
        ("", "/v1"),
        ("/", "/v1"),
        ("/v1", "/v1"),
        ("/v1//", "/v1"),
        ("/openai", "/openai/v1"),
        ("/vllm", "/vllm/v1"),
        ("/av1", "/av1/v1"),
        ("/v1beta/openai", "/v1beta/openai"),
        ("/v1beta/openai/", "/v1beta/openai"),
        ("/api/paas/v4", "/api/paas/v4"),
        ("/api/v3", "/api/v3"),
    ],
)
def test_a_version_is_added_where_there_is_none(given: str, read: str) -> None:
    assert api_path(given) == read
