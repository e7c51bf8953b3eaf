"""The API server's log, on stderr."""

from __future__ import annotations

import logging

from aiohttp.http_exceptions import HttpProcessingError

_FORMAT = "%(asctime)s %(levelname)s %(message)s"


def log_to_stderr() -> None:
    """Write what this process logs from INFO on. Call it once."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter(_FORMAT, datefmt="%H:%M:%S"))
    logger = logging.getLogger("ringcast")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)


class _NothingOfTheirs(logging.Filter):
    """Of what can't be read as HTTP, aiohttp would log a traceback and the bytes, keys included."""

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, HttpProcessingError):
            who = record.args[0] if isinstance(record.args, tuple) and record.args else "a client"
            record.msg, record.args = "%s sent what is no HTTP: %s", (who, type(error).__name__)
            record.levelno, record.levelname = logging.INFO, "INFO"
            record.exc_info = record.exc_text = None
        return True


_filter = _NothingOfTheirs()


def connection_logger() -> logging.Logger:
    """Where aiohttp says what goes wrong with connections; nothing that clients sent is in it."""
    logger = logging.getLogger("ringcast.http.connection")
    logger.addFilter(_filter)
    return logger
