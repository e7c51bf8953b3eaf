"""BERT: an encoder with learned positions and a LayerNorm behind each addition.

What it is, and nothing of how it runs: executor/encoder.py runs what is declared here.
"""

from __future__ import annotations

from typing import Any

from ...mq.errors import ModelLoadError

# config.json's hidden_act: what torch's gelu calls its approximation.
GELUS = {
    "gelu": "none",
    "gelu_python": "none",
    "gelu_new": "tanh",
    "gelu_pytorch_tanh": "tanh",
}


class BertFamily:
    def check(self, hf_config: dict[str, Any]) -> BertConfig:
        return BertConfig(hf_config)


class BertConfig:
    """config.json, checked. Raises ModelLoadError naming what is missing or not supported.

    gelu: the approximation of the activation, "none" or "tanh".
    """

    def __init__(self, hf: dict[str, Any]) -> None:
        def whole(name: str, default: int | None = None) -> int:
            value = hf.get(name, default)
            if type(value) is not int or value < 1:
                raise ModelLoadError(
                    f"config.json: {name} must be a positive integer, got {value!r}"
                )
            return value

        self.vocab_size = whole("vocab_size")
        self.hidden_size = whole("hidden_size")
        self.intermediate_size = whole("intermediate_size")
        self.num_layers = whole("num_hidden_layers")
        self.heads = whole("num_attention_heads")
        self.num_positions = whole("max_position_embeddings")
        self.num_types = whole("type_vocab_size", 2)
        eps = hf.get("layer_norm_eps", 1e-12)
        if not isinstance(eps, int | float) or eps <= 0:
            raise ModelLoadError(f"config.json: layer_norm_eps must be positive, got {eps!r}")
        self.eps = float(eps)
        if self.hidden_size % self.heads:
            raise ModelLoadError(
                f"config.json: hidden_size {self.hidden_size} can't be split evenly into "
                f"{self.heads} heads"
            )
        self.head_size = self.hidden_size // self.heads
        self.gelu = self._gelu(hf.get("hidden_act", "gelu"))
        self._refuse_others(hf)

    @staticmethod
    def _gelu(name: Any) -> str:
        if name not in GELUS:
            raise ModelLoadError(
                f"config.json: hidden_act {name!r} is not supported; {', '.join(GELUS)} are"
            )
        return GELUS[name]

    @staticmethod
    def _refuse_others(hf: dict[str, Any]) -> None:
        positions = hf.get("position_embedding_type") or "absolute"
        if positions != "absolute":
            raise ModelLoadError(
                f"config.json: position_embedding_type {positions!r} is not supported; "
                "'absolute' is"
            )
        for name in ("is_decoder", "add_cross_attention", "quantization_config"):
            if hf.get(name):
                raise ModelLoadError(f"config.json: {name} is not supported in a BERT encoder")

    @staticmethod
    def ignored(name: str) -> bool:
        """Tensors of the files that an embedding has no use for."""
        return name.startswith("pooler.") or name == "embeddings.position_ids"


BERT = BertFamily()
