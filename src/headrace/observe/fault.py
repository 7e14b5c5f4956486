"""Writes a fault of ours to the log: where it happened and of what kind, never with the data that it met."""

from __future__ import annotations

import logging
import traceback


def report_fault(log: logging.Logger, error: BaseException, request_id: str) -> None:
    """One ERROR record. An exception's own text may hold a piece of a request, so only its type is written."""
    where = "".join(traceback.format_tb(error.__traceback__))
    log.error("request %s: internal error, %s at\n%s", request_id, type(error).__name__, where)
