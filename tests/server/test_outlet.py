"""What a stream writes into a log, and what of it is only for those who read here."""

from __future__ import annotations

from headrace.core.timeline import Timeline
from headrace.observe.record import Record
from headrace.protocol.sse import COMMENT, DONE
from headrace.server.outlet import LogOutlet
from server.asgi_driver import on_loop
from server.test_streamlog import block, log_of


def outlet_of(begun: bool = False) -> LogOutlet:
    log, _ = log_of()
    if begun:
        log.begin(())
    timeline = Timeline(0.0)
    outlet = LogOutlet(log, "r", Record("r", "POST", "/", timeline), timeline)
    assert outlet.channel is not None
    return outlet


@on_loop
async def test_head_and_events_go_into_the_log_and_heartbeats_do_not() -> None:
    outlet = outlet_of()
    log = outlet._log
    assert not outlet.started
    await outlet.start(200, [(b"a", b"b")])
    assert (log.begun, log.headers, outlet.record.status) == (True, ((b"a", b"b"),), 200)
    await outlet.write(COMMENT, more=True)
    await outlet.write(block("ab") + block("c"), more=True)
    channel = outlet.channel
    assert channel is not None
    assert channel.ready()
    channel.write(block("d"))
    await outlet.write(block("e") + DONE, more=False)
    assert [data for _, data in log.since(0)] == [*map(block, ("ab", "c", "d", "e")), DONE]
    log.end("done")
    assert not channel.ready()


@on_loop
async def test_who_passes_a_stream_on_keeps_the_last_word_to_itself() -> None:
    outlet = outlet_of(begun=True)
    assert outlet.started
    outlet.passing_on = lambda: True
    await outlet.write(block("a"), more=True)
    await outlet.write(block("b") + block("goodbye"), more=False)
    assert [data for _, data in outlet._log.since(0)] == [block("a"), block("b")]
    assert outlet.farewell == block("goodbye")
