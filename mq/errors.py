"""Every exception that Ringcast raises on purpose.

RingcastError
├── InvalidRequestError (ValueError)   a request that can't be served as asked: HTTP 400
│   └── UnknownModelError              no such model here: HTTP 404
├── ConfigError (ValueError)           options that can't work
│   └── ModelLoadError                 a model's files missing, truncated or unknown
├── OverloadedError                    refused for now, try later: HTTP 503
├── RequestFailedError                 an accepted request failed in the engine: HTTP 500
│   └── PoisonousRequestError          it seems to kill engines, and is not tried again
├── StepTimeoutError                   a step on the device doesn't end; ends its worker
├── NodeEndError                       a headless host's engines end, all of them
│   ├── NoMasterError                  it has found no master for too long
│   └── JoinAgainError                 its master has been started anew: it joins again
├── EngineDeadError                    an actor died; ends with the child's own traceback
└── ChannelError
    ├── ChannelTimeout                 a deadline passed; names the edge and who is slow
    ├── ChannelClosed                  this end was closed
    ├── PeerDeadError                  the other end is gone, and nothing is left to read
    │   └── NodeLostError              it was on another host; ends the gateway to it
    └── CorruptRecordError             what was read is not what was written
"""


class RingcastError(Exception):
    """The root of the tree."""


class InvalidRequestError(RingcastError, ValueError):
    """The user's mistake in one request.

    param: the field's name as the user wrote it. code: OpenAI's short name for what is wrong.
    """

    status = 400

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class UnknownModelError(InvalidRequestError):
    status = 404


class ConfigError(RingcastError, ValueError):
    """The user's mistake in the options."""


class ModelLoadError(ConfigError):
    """The model's files can't be served."""


class OverloadedError(RingcastError):
    status = 503

    def __init__(self, message: str, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class RequestFailedError(RingcastError):
    status = 500


class PoisonousRequestError(RequestFailedError):
    """Actors died twice while this request was under way, and nothing came of it in between."""


class StepTimeoutError(RingcastError):
    """A step isn't done so long after its launch: the device hangs, or its driver does."""


class NodeEndError(RingcastError):
    """The end of all engines of a headless host: its exit status is `exit_code`."""

    exit_code = 1


class NoMasterError(NodeEndError):
    """No master has answered for --data-parallel-join-timeout."""


class JoinAgainError(NodeEndError):
    """The master has a new session, with options that may be others."""

    exit_code = 75  # EX_TEMPFAIL


class EngineDeadError(RingcastError):
    """An actor died. `traceback` is the child's own text, to its last line."""

    status = 500

    def __init__(self, message: str, traceback: str = "") -> None:
        super().__init__(f"{message}\n{traceback}" if traceback else message)
        self.traceback = traceback


class ChannelError(RingcastError):
    """Something about a channel between two actors."""


class ChannelTimeout(ChannelError):
    pass


class ChannelClosed(ChannelError):
    pass


class PeerDeadError(ChannelError):
    pass


class NodeLostError(PeerDeadError):
    """The link with another host is gone. Says by itself what happened.

    from_outside: hardly by what its engine computed.
    """

    def __init__(self, message: str, from_outside: bool) -> None:
        super().__init__(message)
        self.from_outside = from_outside


class CorruptRecordError(ChannelError):
    pass
