"""What a master and its launcher of replicas on Ray say to each other.

The launcher (frontend/launch/ray_driver.py) is a child of the master's process, over a socket pair,
whose end of file is the other side's death:

    master -> launcher     Place, first and once: find room for these ranks
    launcher -> master     Notice ...; Placed, or CannotLaunch and the end
    master -> launcher     Launch, once all are placed
    launcher -> master     Notice ..., HostEnded ...

It says nothing more when the master closes its end; it ends what it has started, and then itself.
"""

from __future__ import annotations

from typing import Any

from .message import Message
from .supervision import Notice as Notice


class Place(Message, tag="place"):
    """ask: what Ray is asked for by its own names ("CPU", "GPU"), for each rank on one of its
    nodes. timeout: seconds to find room for all."""

    ray_address: str
    ranks: list[int]
    ask: dict[str, float]
    timeout: float


class Placed(Message, tag="placed"):
    """Every rank has its room. address: of this host, as the Ray cluster knows it."""

    address: str


class Launch(Message, tag="launch"):
    """options: of `ringcast serve` on each host; data_parallel_start_rank comes to them. secret: of
    the cluster. variables: of the environment."""

    options: dict[str, Any]
    secret: str
    variables: dict[str, str]


class HostEnded(Message, tag="host-ended"):
    """The `ringcast serve --headless` of a rank has ended, and is started again in so many seconds.

    hopeless: by what it says, it will end like this every time.
    """

    rank: int
    error: str
    hopeless: bool
    seconds: float


class CannotLaunch(Message, tag="cannot-launch"):
    """The launcher ends. user_error: the user can change that."""

    error: str
    user_error: bool


MasterToLauncher = Place | Launch
LauncherToMaster = Notice | Placed | HostEnded | CannotLaunch
