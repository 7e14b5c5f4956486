from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from headrace.core.errors import Draining, EngineFailed, EngineUnavailable, HeadraceError, Overloaded
from headrace.core.events import Admitted, Delta, Failed, Finished, Marks
from headrace.core.request import Generation, Told
from headrace.core.timeline import Timeline
from headrace.gateway.backend import Work
from headrace.server.exchange import ClientGone
from headrace.server.live import Live
from server.asgi_driver import on_loop, settle
from server.hand_engine import HandEngine, model


def job(*ns: int) -> Work:
    """A prompt of ten tokens for each of `ns`, continued so many times; rids from 1."""
    generations = tuple(Generation(rid, [0] * 10, 5, n) for rid, n in enumerate(ns, 1))
    return Work(generations, sum(ns), 10 * len(ns))


def live(*, max_pending: int = 256) -> Live:
    return Live(Timeline(0.0), lambda: 3.0, max_pending=max_pending)


def book_all(one: Live) -> list[int]:
    return [one.book(event) for event in one.mailbox.take()]


def test_choices_are_numbered_over_all_prompts() -> None:
    engine = HandEngine()
    one = live()
    one.submit(model(engine), job(2, 3))
    for rid, index in ((2, 2), (1, 1), (2, 0), (1, 0)):
        engine.say("x", rid=rid, index=index)
    assert book_all(one) == [4, 1, 2, 0]


def test_tokens_are_counted_once() -> None:
    engine = HandEngine()
    one = live()
    one.submit(model(engine), job(2, 1))
    for rid, index, cached in ((1, 0, 4), (1, 1, 9), (2, 0, 3)):
        engine.admit(cached, rid=rid, index=index)
    engine.emit(Delta(1, 0, "abc", 3))
    book_all(one)
    usage = one.usage()
    assert (usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens) == (20, 7, 3)
    engine.finish("length", 5, rid=1, index=0)
    engine.finish("stop", 2, rid=1, index=1)
    assert one.remaining == 3
    book_all(one)
    assert one.remaining == 1
    assert one.usage().completion_tokens == 7, "a finished choice counts what the engine drew, the end token too"
    assert one.timeline.cached_tokens == 7
    assert one.timeline.tokenized == 3.0


def test_takes_the_marks_of_the_first_text_and_maps_them() -> None:
    engine = HandEngine(clock_offset=100.0)
    one = live()
    one.submit(model(engine), job(2))
    engine.say("a", index=1, marks=Marks(0.5, 1.0, 2.0, 3.0, 4.0))
    engine.say("b", index=0, marks=Marks(0.5, 5.0, 6.0, 7.0, 8.0))
    book_all(one)
    assert (one.timeline.scheduled, one.timeline.sampled) == (101.0, 104.0)


@pytest.mark.parametrize(
    ("code", "kind", "status"),
    [
        ("overloaded", Overloaded, 503),
        ("engine_unavailable", EngineUnavailable, 503),
        ("draining", Draining, 503),
        ("engine_failed", EngineFailed, 500),
        ("something new", EngineFailed, 500),
    ],
)
def test_a_failure_becomes_its_error(code: str, kind: type[HeadraceError], status: int) -> None:
    engine = HandEngine()
    one = live()
    one.submit(model(engine), job(1))
    engine.fail(code, "no")
    assert book_all(one) == [-1]
    assert type(one.failure) is kind
    assert one.failure.status == status
    with pytest.raises(kind, match="no"):
        one.check()


def test_cancel_stops_what_is_not_finished() -> None:
    engine = HandEngine()
    one = live()
    one.submit(model(engine), job(1, 2, 1))
    engine.finish(rid=1)
    engine.finish(rid=2, index=0)
    book_all(one)
    one.cancel()
    assert sorted(engine.cancelled) == [2, 3]
    one.cancel()
    assert sorted(engine.cancelled) == [2, 3]


def test_a_refused_submit_leaves_nothing_behind() -> None:
    engine = HandEngine()
    one = live()

    def refuse_second(generation: Generation, sink: Any) -> None:
        HandEngine.submit(engine, generation, sink)
        engine.refusal = EngineUnavailable("gone")

    engine.submit = refuse_second  # type: ignore[method-assign]
    with pytest.raises(EngineUnavailable):
        one.submit(model(engine), job(1, 1))
    assert engine.live == {}


def test_without_generations_every_choice_is_complete() -> None:
    one = live()
    one.submit(model(HandEngine()), Work((), 2, 10))
    assert one.mailbox.take() == [Finished(0, 0, "length", 0), Finished(0, 1, "length", 0)]


def test_a_full_mailbox_pauses_all_that_run_and_resumes_them() -> None:
    engine = HandEngine()
    one = live(max_pending=4)
    one.submit(model(engine), job(1, 1, 1))
    engine.finish(rid=2)
    book_all(one)
    one.mailbox.written()
    for _ in range(5):
        engine.say("x", rid=1)
    assert engine.paused == {1, 3}
    one.mailbox.take()
    one.mailbox.written()
    assert engine.paused == set()


def test_an_engine_that_comes_while_the_reader_is_slow_is_paused_at_once() -> None:
    first, second = HandEngine(), HandEngine()
    one = live(max_pending=4)
    one.submit(model(first), job(1))
    for _ in range(5):
        first.say("x")
    one.give_up(forget=True)
    one.submit(model(second), job(1, 1))
    assert second.paused == {1, 2}
    one.mailbox.take()
    one.mailbox.written()
    assert second.paused == set()


def test_only_the_engine_that_answers_says_what_the_prompt_was() -> None:
    engine = HandEngine()
    one = live()
    engine.refusal = Overloaded("full")
    with pytest.raises(Overloaded):
        one.submit(model(engine), job(1, 1))
    assert one.usage().prompt_tokens == 0
    one.submit(model(engine), job(1, 1))
    assert one.usage().prompt_tokens == 20
    one.give_up(forget=True)
    assert one.usage().prompt_tokens == 0
    one.submit(model(engine), job(1))
    assert one.usage().prompt_tokens == 10
    # The answer goes on elsewhere, where the prompt may be counted in another way.
    one.timeline.delivered = 4.0
    one.submit(model(engine), job(1, 1))
    assert one.usage().prompt_tokens == 10


@pytest.mark.parametrize(("known", "said", "prompt"), [(0, 7, 7), (0, 0, 0), (3, 7, 3)])
def test_an_engine_that_alone_can_tell_the_prompt_tells_it_with_the_end(known: int, said: int, prompt: int) -> None:
    engine = HandEngine()
    one = live()
    one.submit(model(engine), replace(job(1), prompt_tokens=known))
    engine.emit(Finished(1, 0, "stop", 2, said))
    book_all(one)
    assert one.usage().prompt_tokens == prompt


@pytest.mark.parametrize("holds", [False, True])
def test_who_goes_on_hears_whether_the_tokens_say_just_the_text(holds: bool) -> None:
    engine = HandEngine()
    one = live()
    one.submit(model(engine), job(1))
    engine.emit(Delta(1, 0, "a", 2, ids=(97, 98), holds=holds))
    book_all(one)
    assert one.told == Told("a", (97, 98), 2, exact=not holds)
    other = live()
    other.prime(one.told)
    other.submit(model(HandEngine()), job(1))
    assert other.told == one.told


def test_it_is_over_when_an_engine_has_ended_it() -> None:
    engine = HandEngine()
    one = live()
    assert not one.over
    one.submit(model(engine), job(1))
    assert not one.over
    engine.finish(rid=1)
    book_all(one)
    assert one.over
    one.give_up(forget=True)
    assert not one.over


@on_loop
async def test_a_client_that_leaves_stops_the_engine_at_once() -> None:
    engine = HandEngine()
    one = live()
    gone = asyncio.Event()

    async def receive() -> dict[str, Any]:
        await gone.wait()
        return {"type": "http.disconnect"}

    one.watch(receive)
    one.submit(model(engine), job(1))
    waiting = asyncio.create_task(one.mailbox.wait())
    await settle()
    one.check()
    gone.set()
    await waiting
    assert engine.cancelled == [1]
    with pytest.raises(ClientGone):
        one.check()
    await one.close()


@on_loop
async def test_a_server_that_tells_of_leaving_needs_no_task_for_it() -> None:
    engine, told = HandEngine(), list[Any]()

    async def receive() -> dict[str, Any]:
        raise AssertionError("nobody receives")

    one = live()
    before = asyncio.all_tasks()
    one.watch(receive, told.append)
    assert asyncio.all_tasks() == before
    one.submit(model(engine), job(1))
    told[0]()
    assert engine.cancelled == [1]
    with pytest.raises(ClientGone):
        one.check()
    await one.close()
    assert told[1:] == [None], "it wants to hear no more"


@on_loop
async def test_a_server_that_fails_in_receive_has_lost_its_client() -> None:
    async def receive() -> dict[str, Any]:
        raise RuntimeError("broken")

    one = live()
    one.watch(receive)
    await settle()
    assert one.gone
    await one.close()


@on_loop
async def test_close_ends_the_watcher_and_the_generations() -> None:
    engine = HandEngine()
    one = live()

    async def receive() -> dict[str, Any]:
        await asyncio.Event().wait()
        raise AssertionError

    one.watch(receive)
    one.submit(model(engine), job(1, 1))
    await settle()
    await one.close()
    assert sorted(engine.cancelled) == [1, 2]


def test_the_first_failure_stands() -> None:
    engine = HandEngine()
    one = live()
    one.submit(model(engine), job(1))
    one.fail(Draining("first"))
    one.fail(Draining("second"))
    assert engine.cancelled == [1]
    with pytest.raises(Draining, match="first"):
        one.check()


def test_books_events_of_all_kinds() -> None:
    one = live()
    one.submit(model(HandEngine()), job(1))
    events = (Admitted(1, 0, 2), Delta(1, 0, "a", 1), Finished(1, 0, "stop", 1), Failed(1, "overloaded", "x"))
    assert [one.book(event) for event in events] == [0, 0, 0, -1]
