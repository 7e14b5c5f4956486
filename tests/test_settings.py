from __future__ import annotations

import pytest

from headrace.settings import SECTIONS, SETTINGS, Config, Setting


def test_every_section_is_part_of_the_config() -> None:
    assert {name: type(getattr(Config(), name)) for name in SECTIONS} == dict(SECTIONS)


@pytest.mark.parametrize("row", SETTINGS.values(), ids=lambda row: row.name)
def test_a_default_is_within_its_own_bounds(row: Setting) -> None:
    if row.choices:
        assert row.default in row.choices
    if row.low is not None and row.high is not None:
        assert not isinstance(row.default, str)
        assert row.low <= row.default <= row.high
    assert row.help.endswith(".")


def test_a_secret_is_not_shown() -> None:
    secrets = [row.name for row in SETTINGS.values() if row.secret]
    assert secrets == ["server.key", "server.admin_key", "tiers.redis_url", "shared.redis_url"]
    assert "redis_url" not in repr(Config().tiers)
