"""The options of the load balancer of experts (executor/expert_balancer.py): --eplb-config."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta


class EplbConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """window_size: the steps whose loads count. step_interval: the steps from one placement to the
    next. num_redundant_experts: replicas in each layer beside its experts, of all ranks together.
    log_balancedness: say how even the ranks' loads were, every log_balancedness_interval steps.
    """

    window_size: Annotated[int, Meta(ge=1)] = 1000
    step_interval: Annotated[int, Meta(ge=1)] = 3000
    num_redundant_experts: Annotated[int, Meta(ge=0)] = 0
    log_balancedness: bool = False
    log_balancedness_interval: Annotated[int, Meta(ge=1)] = 1
