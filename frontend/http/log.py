"""The API server's log, on stderr."""

from __future__ import annotations

import logging

_FORMAT = "%(asctime)s %(levelname)s %(message)s"


def log_to_stderr() -> None:
    """Write what this process logs from INFO on. Call it once."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter(_FORMAT, datefmt="%H:%M:%S"))
    logger = logging.getLogger("ringcast")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
