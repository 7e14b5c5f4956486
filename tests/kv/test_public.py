from __future__ import annotations

from headrace.kv.blob import blocks, fingerprint
from headrace.kv.public import PublicBlocks

ENGINE = fingerprint("x")


def test_only_what_is_allowed_and_kept_is_found() -> None:
    public = PublicBlocks()
    first, second = blocks(ENGINE, "", [1] * 300)
    other = blocks(ENGINE, "", [2] * 10)[0]
    public.entered(other)
    assert public.below(first.parent) == {}
    public.allow(first.key, 256, None)
    assert public.below(first.parent) == {}
    public.entered(first)
    public.allow(second.key, 40, second)
    public.allow(second.key, 30, second)
    assert public.below(first.parent) == {first.key: 256}
    assert public.below(first.key) == {second.key: 40}, "the most that anybody allowed"
    public.lost(first)
    public.lost(first)
    assert public.below(first.parent) == {}
    public.entered(first)
    assert public.below(first.parent) == {first.key: 256}, "it is allowed still"
    public.forbid(first.key, first)
    public.forbid(second.key, None)
    public.entered(first)
    assert public.below(first.parent) == {}
    assert repr(public) == "<PublicBlocks [0]>"
