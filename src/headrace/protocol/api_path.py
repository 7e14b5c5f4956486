"""Where the OpenAI API of a server begins: what comes before `/chat/completions` in the path of its URL."""

from __future__ import annotations

import re

_VERSION = re.compile(r"/v\d[^/]*(/|$)")


def api_path(path: str) -> str:
    """`path`, of a URL as a person gave it, without a slash at its end; `/v1` is added unless a part of it is a version
    already: `/v1beta/openai` and `/api/paas/v4` stay as they are."""
    path = path.rstrip("/")
    return path if _VERSION.search(path) else path + "/v1"
