"""Which stream killed the worker? Found out without a second victim.

    working ──crash──► suspect ──one at a time──► on trial ──next token──► cleared: working again
                                                     └──crash──► guilty

Rules: a crash makes suspects of all that were being computed, for one of them may be the cause. The next worker gets
them one by one, each only when the one before has given a token, so that a second crash has one possible cause beside
those that have proved harmless. Streams that no step has worked on wait until nobody is suspected. A trial goes on from
the very token before the crash, so whoever is the cause cannot be cleared.
Pure: it knows ids and events, no process and no socket.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from headrace.core.events import Delta, Event, Failed, Finished


class Quarantine:
    """The suspects of one engine."""

    def __init__(self) -> None:
        self.suspects: list[int] = []
        """In the order of their trials."""
        self.on_trial: int | None = None
        self._owing: set[int] = set()
        """Choices of the one on trial that have given nothing yet."""

    def __repr__(self) -> str:
        return f"<Quarantine [{self.on_trial} on trial, {len(self.suspects)} suspects]>"

    def __bool__(self) -> bool:
        """Is anybody under suspicion?"""
        return self.on_trial is not None or bool(self.suspects)

    def crash(self, working: Sequence[int]) -> int | None:
        """The worker died: the id of the one that killed it, None if that is not known and all `working` are suspects.

        One on trial is guilty by then, and nobody else falls under suspicion.
        """
        guilty, self.on_trial = self.on_trial, None
        if guilty is None:
            self.suspects += [rid for rid in working if rid not in self.suspects]
        return guilty

    def next(self) -> int | None:
        """Whom to try now; None while one is on trial, or when there is no suspect left."""
        if self.on_trial is not None or not self.suspects:
            return None
        self.on_trial = self.suspects.pop(0)
        self._owing = set()
        return self.on_trial

    def charge(self, choices: Iterable[int]) -> None:
        """These choices of the one on trial must all give something; none given: any choice will do."""
        self._owing = set(choices)

    def hear(self, events: Iterable[Event]) -> int | None:
        """Take the worker's events into account; the id of the one on trial if that clears it."""
        for event in events:
            if event.rid != self.on_trial:
                continue
            if isinstance(event, Delta | Finished):
                self._owing.discard(event.index)
            elif not isinstance(event, Failed):  # a failed step is no crash
                continue
            if isinstance(event, Failed) or not self._owing:
                cleared, self.on_trial = self.on_trial, None
                return cleared
        return None

    def drop(self, rid: int) -> None:
        """A stream is over."""
        if rid == self.on_trial:
            self.on_trial = None
        elif rid in self.suspects:
            self.suspects.remove(rid)

    def acquit(self) -> None:
        """All streams are over."""
        self.suspects.clear()
        self.on_trial = None
