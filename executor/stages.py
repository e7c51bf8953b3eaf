"""Which part of a model a stage of a pipeline-parallel engine has: its layers, and the ends.

The first stage has the embedding, the last one the norm and the head; where these are tied both
have the table. What stages hand on is in pipeline.py for processors, in gpu/stages.py for devices.
"""

from __future__ import annotations

from collections import Counter
from itertools import accumulate
from typing import NamedTuple

from ..mq.errors import ConfigError
from ..mq.kv_groups import Group as LayerGroup
from ..mq.kv_groups import deal, window_of

_ENDS = "model.embed_tokens.", "model.norm.", "lm_head."


class Position(NamedTuple):
    """Stage `number` of `count`."""

    number: int = 0
    count: int = 1

    @property
    def is_first(self) -> bool:
        return not self.number

    @property
    def is_last(self) -> bool:
        return self.number == self.count - 1

    def layers(self, num_layers: int) -> range:
        return split(num_layers, self.count)[self.number]


WHOLE = Position()


def split(num_layers: int, stages: int) -> list[range]:
    """The layers of each stage, as even as can be. The first ones have one more, since the last
    one makes the logits. Raises ConfigError if a stage would have none.
    """
    if stages > num_layers:
        raise ConfigError(
            f"pipeline_parallel_size = {stages}: the model has {num_layers} layers, and each stage "
            f"needs one; at most {num_layers} is possible"
        )
    few, more = divmod(num_layers, stages)
    ends = [0, *accumulate(few + (stage < more) for stage in range(stages))]
    return [range(ends[i], ends[i + 1]) for i in range(stages)]


def deal_stage(windows: list[int], layers: range) -> list[LayerGroup]:
    """The model's groups of layers (mq/kv_groups.py) with those of `layers` alone. Every stage has
    the same kinds of groups in the same order, so one block table is right for all; each deals its
    own layers of a kind evenly. A group may have none.
    """
    groups = deal(windows)
    if len(layers) == len(windows):
        return groups
    number = Counter(group.spec for group in groups)
    dealt: list[LayerGroup] = []
    for spec, count in number.items():
        own = [layer for layer in layers if windows[layer] == window_of(spec)]
        size = -(-len(own) // count)
        dealt += [LayerGroup(spec, own[i * size : (i + 1) * size]) for i in range(count)]
    return dealt


def may_be_left(name: str, layers: range, num_layers: int, tied: bool) -> bool:
    """Whether a weight that nobody has taken may be there, for a stage that has `layers` of
    `num_layers`.
    """
    if name.endswith("rotary_emb.inv_freq") or (tied and name == "lm_head.weight"):
        return True
    if len(layers) == num_layers:
        return False
    others = [f"model.layers.{i}." for i in range(num_layers) if i not in layers]
    return name.startswith((*_ENDS, *others))
