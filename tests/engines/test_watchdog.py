from __future__ import annotations

from headrace.engines.watchdog import Verdict, Watchdog


def test_silence_is_pinged_then_killed() -> None:
    watchdog = Watchdog(60.0)
    watchdog.heard(100.0)
    assert watchdog.look(130.0, busy=True) == (Verdict.REST, 30.0)
    assert watchdog.look(160.0, busy=True) == (Verdict.PING, 60.0)
    assert watchdog.look(219.0, busy=True) == (Verdict.REST, 1.0)
    assert watchdog.look(220.0, busy=True) == (Verdict.KILL, 60.0)


def test_a_late_look_leaves_the_whole_time_to_answer() -> None:
    watchdog = Watchdog(60.0)
    watchdog.heard(0.0)
    assert watchdog.look(1000.0, busy=True) == (Verdict.PING, 60.0)
    assert watchdog.look(1059.0, busy=True) == (Verdict.REST, 1.0)


def test_any_sign_begins_anew() -> None:
    watchdog = Watchdog(60.0)
    watchdog.heard(0.0)
    watchdog.look(60.0, busy=True)
    watchdog.heard(61.0)
    assert watchdog.look(120.0, busy=True) == (Verdict.REST, 1.0)
    assert watchdog.look(121.0, busy=True) == (Verdict.PING, 60.0)


def test_a_worker_without_work_may_be_silent() -> None:
    watchdog = Watchdog(60.0)
    for now in (0.0, 1e3, 1e6):
        assert watchdog.look(now, busy=False) == (Verdict.REST, 60.0)
    assert watchdog.look(1e6 + 59, busy=True) == (Verdict.REST, 1.0)


def test_work_that_ends_before_the_answer_is_forgiven() -> None:
    watchdog = Watchdog(60.0)
    watchdog.heard(0.0)
    assert watchdog.look(60.0, busy=True)[0] is Verdict.PING
    assert watchdog.look(120.0, busy=False) == (Verdict.REST, 60.0)
    assert watchdog.look(121.0, busy=True)[0] is Verdict.REST


def test_it_says_what_it_waits_for() -> None:
    watchdog = Watchdog(1.5)
    assert repr(watchdog) == "<Watchdog [1.5 s, quiet]>"
    watchdog.look(2.0, busy=True)
    assert repr(watchdog) == "<Watchdog [1.5 s, pinged]>"
