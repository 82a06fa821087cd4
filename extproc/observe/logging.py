"""Structured logs: one event, its fields, no prompts. JSON lines where nobody watches, readable on a terminal."""

from __future__ import annotations

import logging
import sys

import structlog


def configure_logging(level: str, form: str) -> None:
    """Set level and form (`observe.log`) for the process. Logs go to stderr, so that stdout stays for answers."""
    console = sys.stderr.isatty() if form == "auto" else form == "console"
    # Plain tracebacks: the pretty ones print the variables of every frame, and with them prompts and keys.
    renderer: structlog.typing.Processor = (
        structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)
        if console
        else structlog.processors.JSONRenderer()
    )
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info if not console else structlog.stdlib.PositionalArgumentsFormatter(),
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=False,
    )
