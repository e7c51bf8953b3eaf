"""Every option, once: its name, type, default, bounds and one line of help.

The command line is made from this.
"""

from __future__ import annotations

import functools
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from .devices import BY_DEVICE, DEVICE_DEFAULTS, check_device_options, find_device
from .eplb_config import EplbConfig
from .errors import ConfigError

DEFAULT_MODEL = "smollm2-135m-instruct"
MAX_TEXT_ACTORS = 16  # tokenizers, and detokenizers: an `LLM` gets all its ends in one packet
MAX_WORKERS = 64  # of one engine: as many as a broadcast channel has readers (board.py)

T = TypeVar("T", bound=msgspec.Struct)


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What an engine is made from.

    Build it with `build`, which checks bounds and names the option at fault. Once made, it has a
    device that isn't "auto" and the defaults of that device (devices.py).
    """

    model: Annotated[
        str, Meta(description="a name from `ringcast models`, a folder, a .gguf file, or a hub id")
    ] = DEFAULT_MODEL
    tokenizer: Annotated[
        str | None, Meta(description="take the tokenizer from this model instead")
    ] = None
    revision: Annotated[str | None, Meta(description="branch, tag or commit of a hub id")] = None
    skip_tokenizer_init: Annotated[
        bool,
        Meta(description="have no tokenizer: prompts are token ids, and outputs have no text"),
    ] = False
    chat_template: Annotated[
        str | None, Meta(description="a file with a jinja chat template, or the template itself")
    ] = None
    generation_config: Annotated[
        str,
        Meta(description="'auto': the model's own sampling defaults; 'none': ours"),
    ] = "auto"
    trust_remote_code: Annotated[
        bool, Meta(description="refused: no code from a model's repository is ever run")
    ] = False
    dtype: Annotated[
        Literal["auto", "bfloat16", "float16", "float32"],
        Meta(
            description="of weights and KV cache; auto is bfloat16 on CUDA, and on processors that "
            "have it, or AVX2 to widen it"
        ),
    ] = "auto"
    quantization: Annotated[
        Literal["none", "int8", "int4", "fp8"],
        Meta(
            description="of weights at load, and of each step's activations: int8 and int4 on cpu, "
            "fp8 on cuda; none: as the checkpoint is"
        ),
    ] = "none"
    kv_cache_dtype: Annotated[
        Literal["auto", "bfloat16", "float16", "float32", "fp8", "fp8_e4m3"],
        Meta(
            description="of keys and values in the KV cache; auto is the model's, on cpu it may be "
            "another. fp8 and fp8_e4m3 are the same and halve it, on cuda alone"
        ),
    ] = "auto"
    deterministic: Annotated[
        bool,
        Meta(
            description="a request with a seed gets the same tokens alone and in any batch; "
            "prompts take longer where there are no matrix tiles"
        ),
    ] = False
    pooling_type: Annotated[
        Literal["auto", "mean", "cls", "last"],
        Meta(description="of embedding models: how tokens become a vector; auto: as it was made"),
    ] = "auto"
    load_format: Annotated[
        Literal["auto", "dummy"], Meta(description="dummy: random weights from the config alone")
    ] = "auto"
    device: Annotated[
        Literal["auto", "cpu", "cuda", "fake"],
        Meta(
            description="auto: cuda where there is a device and a torch for it, else cpu; fake: no "
            "model at all, tokens are a function of the prompt (for tests)"
        ),
    ] = "auto"
    tensor_parallel_size: Annotated[
        int,
        Meta(
            ge=1,
            le=64,
            description="workers that have a part of each weight, and compute each step together",
            extra={"short": "-tp"},
        ),
    ] = 1
    enable_expert_parallel: Annotated[
        bool,
        Meta(
            description="deal whole experts to the ranks of tensor_parallel_size in all replicas "
            "of data_parallel_size, which then step together"
        ),
    ] = False
    enable_eplb: Annotated[
        bool,
        Meta(
            description="balance the load of experts (EPLB): place them anew now and then, by how "
            "many tokens each has had. With enable_expert_parallel, devices cpu and cuda"
        ),
    ] = False
    eplb_config: Annotated[
        EplbConfig,
        Meta(
            description="of enable_eplb, as JSON: any of window_size, step_interval, "
            "num_redundant_experts, log_balancedness, log_balancedness_interval"
        ),
    ] = EplbConfig()
    data_parallel_size: Annotated[
        int,
        Meta(
            ge=1,
            le=64,
            description="replicas of the model on this host, each with its own scheduler, workers "
            "and KV cache; each request goes to one of them",
            extra={"short": "-dp"},
        ),
    ] = 1
    data_parallel_routing: Annotated[
        Literal["score", "prefix"],
        Meta(
            description="which replica a request goes to: score: the one with least to do; prefix: "
            "rather one that has had the prompt's beginning. Several replicas alone"
        ),
    ] = "score"
    pipeline_parallel_size: Annotated[
        int,
        Meta(
            ge=1,
            le=64,
            description="stages, each of tensor_parallel_size workers with a part of the layers, "
            "that compute several steps at a time",
            extra={"short": "-pp"},
        ),
    ] = 1
    tokenizer_count: Annotated[
        int,
        Meta(
            ge=1,
            le=MAX_TEXT_ACTORS,
            description="tokenizer processes; each request goes by one of them",
        ),
    ] = 1
    detokenizer_count: Annotated[
        int,
        Meta(
            ge=1,
            le=MAX_TEXT_ACTORS,
            description="detokenizer processes; all of a request's output goes by one of them",
        ),
    ] = 1
    enforce_eager: Annotated[
        bool,
        Meta(description="no CUDA graphs: starts sooner, decodes slower. Device cuda alone"),
    ] = False
    seed: Annotated[
        int | None,
        Meta(description="of dummy weights, and of the seeds drawn for requests that have none"),
    ] = None
    max_model_len: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(description="context length; the model's own by default"),
    ] = None
    max_num_seqs: Annotated[int, Meta(ge=1, description="most sequences in one step")] = BY_DEVICE
    max_num_batched_tokens: Annotated[int, Meta(ge=1, description="token budget of one step")] = (
        BY_DEVICE
    )
    scheduling_policy: Annotated[
        Literal["fcfs", "priority"],
        Meta(description="who is served first: who came first, or by the requests' priority"),
    ] = "fcfs"
    long_prefill_token_threshold: Annotated[
        int, Meta(ge=0, description="most tokens of one prompt in one step; 0 is only the budget")
    ] = 0
    max_num_partial_prefills: Annotated[
        int,
        Meta(ge=0, description="most prompts that are computed in parts at a time; 0: no limit"),
    ] = 0
    max_long_partial_prefills: Annotated[
        int,
        Meta(
            ge=0,
            description="most of them longer than long_prefill_token_threshold: shorter prompts "
            "pass the others; 0: no limit",
        ),
    ] = 0
    max_steps_in_flight: Annotated[
        int,
        Meta(
            ge=1,
            description="steps planned and sent before the first is back (async scheduling); "
            "1: the device waits for each plan",
        ),
    ] = 2
    block_size: Annotated[
        int,
        Meta(ge=1, le=256, description="tokens in one KV-cache block; on cuda a power of two"),
    ] = BY_DEVICE
    enable_prefix_caching: Annotated[
        bool, Meta(description="reuse the KV blocks of prompts that begin alike")
    ] = True
    prefix_caching_hash_algo: Annotated[
        Literal["blake2b", "sha256", "xxh3_128"],
        Meta(description="names KV blocks; xxh3_128 needs the package xxhash, can be forged"),
    ] = "blake2b"
    num_gpu_blocks_override: Annotated[
        Annotated[int, Meta(ge=2)] | None, Meta(description="KV-cache blocks, instead of measuring")
    ] = None
    kv_cache_memory_bytes: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(description="bytes for each worker's KV cache, instead of a share"),
    ] = None
    memory_utilization: Annotated[
        float,
        Meta(
            gt=0.0,
            le=1.0,
            description="share of the memory that is free after loading that the KV cache may "
            "take. Device cpu alone",
        ),
    ] = 0.5
    gpu_memory_utilization: Annotated[
        float,
        Meta(
            gt=0.0,
            le=1.0,
            description="share of the device's memory for this engine: weights, work space and KV "
            "cache. Device cuda alone",
        ),
    ] = 0.9
    num_threads: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(
            description="threads of each worker; by default they share all cores. Device cpu alone"
        ),
    ] = None
    torch_profiler_dir: Annotated[
        str | None,
        Meta(
            description="folder for traces of torch's profiler, from POST /start_profile to "
            "/stop_profile; without it both are refused"
        ),
    ] = None
    max_num_queued_reqs: Annotated[
        int,
        Meta(
            ge=1,
            description="requests in the engine, running and waiting, before new ones get a 503",
        ),
    ] = 2048
    logits_processors: Annotated[
        list[str],
        Meta(description="your own LogitsProcessor classes (module:Class), applied in this order"),
    ] = []
    transport: Annotated[
        Literal["ring", "zmq"],
        Meta(description="how actors of one host talk: shared-memory rings, or ZeroMQ over ipc"),
    ] = "ring"
    ring_bytes: Annotated[int, Meta(ge=65536, description="size of each shared-memory ring")] = (
        1 << 20
    )
    step_timeout: Annotated[
        float,
        Meta(
            gt=0,
            description="seconds after which an actor that takes nothing in, or a worker whose "
            "step isn't done, is ended and named",
        ),
    ] = 60.0
    startup_timeout: Annotated[
        float, Meta(gt=0, description="seconds for all actors to become ready")
    ] = 600.0
    shutdown_timeout: Annotated[
        float,
        Meta(ge=0, description="seconds that a server's running requests get to end at SIGTERM"),
    ] = 30.0
    max_restarts: Annotated[
        int,
        Meta(
            ge=0,
            description="restarts in a row of what dies within a second of being ready; "
            "0: any death ends everything",
        ),
    ] = 5

    @property
    def num_workers(self) -> int:
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def output_rank(self) -> int:
        """The worker that samples and answers: the first one of the last stage."""
        return self.num_workers - self.tensor_parallel_size

    @property
    def most_steps_in_flight(self) -> int:
        """Every stage has one, at least."""
        return max(self.max_steps_in_flight, self.pipeline_parallel_size)

    def __post_init__(self) -> None:
        self._settle_device()
        self._check_workers()
        self._check_eplb()
        self._check_partial_prefills()
        self._check_tokenizer()
        self._check_routing()

    @property
    def lockstep(self) -> bool:
        """Whether the replicas step together: each has a part of the experts."""
        return self.enable_expert_parallel and self.data_parallel_size > 1

    def _check_routing(self) -> None:
        if self.data_parallel_routing != "score" and self.data_parallel_size == 1:
            raise ValueError(
                f"data_parallel_routing = {self.data_parallel_routing!r}: needs "
                "data_parallel_size of 2 or more; one replica takes every request"
            )
        if self.data_parallel_routing == "prefix" and not self.enable_prefix_caching:
            raise ValueError(
                "data_parallel_routing = 'prefix': needs enable_prefix_caching; without it no "
                "replica has anything to prefer it for"
            )

    def _check_tokenizer(self) -> None:
        for other in ("tokenizer", "chat_template"):
            if self.skip_tokenizer_init and getattr(self, other) is not None:
                raise ValueError(
                    f"{other} = {getattr(self, other)!r}: of no use with skip_tokenizer_init"
                )

    def _check_eplb(self) -> None:
        if not self.enable_eplb:
            if self.eplb_config != EplbConfig():
                raise ValueError(f"eplb_config = {self.eplb_config}: needs enable_eplb")
        elif not self.enable_expert_parallel:
            raise ValueError(
                "enable_eplb = True: needs enable_expert_parallel, which deals whole experts to "
                "ranks; without it there is nothing to balance"
            )
        elif self.deterministic:
            raise ValueError(
                "enable_eplb = True: with deterministic it must be False: a token's sum is made in "
                "the order of the ranks that have its experts, which changes"
            )
        elif self.pipeline_parallel_size > 1:
            raise ValueError(
                f"pipeline_parallel_size = {self.pipeline_parallel_size}: with enable_eplb it must "
                "be 1"
            )

    def _check_workers(self) -> None:
        if self.lockstep and self.pipeline_parallel_size > 1:
            raise ValueError(
                f"pipeline_parallel_size = {self.pipeline_parallel_size}: with "
                "enable_expert_parallel and several replicas, which step together, it must be 1"
            )
        if self.num_workers > MAX_WORKERS:
            raise ValueError(
                f"pipeline_parallel_size = {self.pipeline_parallel_size}: with "
                f"tensor_parallel_size = {self.tensor_parallel_size} these are {self.num_workers} "
                f"workers, and an engine has at most {MAX_WORKERS}"
            )

    def _settle_device(self) -> None:
        found = self.device == "auto"
        if found:
            msgspec.structs.force_setattr(self, "device", find_device())
        for option, value in DEVICE_DEFAULTS.get(self.device, {}).items():
            if getattr(self, option) is BY_DEVICE:
                msgspec.structs.force_setattr(self, option, value)
        values = msgspec.structs.asdict(self)
        check_device_options(self.device, found, values, _defaults(type(self)))

    def _check_partial_prefills(self) -> None:
        most, long = self.max_num_partial_prefills, self.max_long_partial_prefills
        if long and not self.long_prefill_token_threshold:
            raise ValueError(
                f"max_long_partial_prefills = {long}: needs long_prefill_token_threshold, above "
                "which a prompt is long"
            )
        if 0 < most < long:
            raise ValueError(
                f"max_long_partial_prefills = {long}: must be at most max_num_partial_prefills, "
                f"which is {most}"
            )


class PoolingSpec(msgspec.Struct, frozen=True, kw_only=True):
    """How an embedding model's vector comes about: the mean of its tokens' last hidden states, the
    first's or the last's.

    normalize: to length 1. dimension: of the vector.
    """

    kind: Literal["mean", "cls", "last"]
    normalize: bool
    dimension: int


class ModelSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a model once its files are found, before it is loaded. Made by frontend/hub.

    name: as the user wrote it. path: the folder with config.json and the weights. tokenizer_path:
    the folder with tokenizer.json; empty with skip_tokenizer_init. hf_config: config.json as it is.
    max_model_len: resolved. eos_token_ids: from generation_config.json, else config.json.
    sampling_defaults: what generation_config.json sets of SamplingParams' fields. pooling: of a
    pooling model, which makes vectors and generates nothing; None for all others.
    """

    name: str
    path: str
    tokenizer_path: str
    architecture: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: list[int]
    hf_config: dict[str, Any]
    bos_token_id: int | None = None
    chat_template: str | None = None
    sampling_defaults: dict[str, Any] = {}
    pooling: PoolingSpec | None = None


@functools.cache
def _defaults(kind: type[msgspec.Struct]) -> dict[str, Any]:
    """By field."""
    return {field.name: field.default for field in msgspec.structs.fields(kind)}


def build(kind: type[T], options: dict[str, Any]) -> T:
    """Make a config of `kind` from options by name.

    Raises ConfigError that names the option and what it accepts.
    """
    known = _defaults(kind)
    unknown = sorted(options.keys() - known.keys())
    if unknown:
        raise ConfigError(
            f"unknown option {unknown[0]!r}; the options are {', '.join(sorted(known))}"
        )
    try:
        return msgspec.convert(options, kind)
    except msgspec.ValidationError as error:
        reason, _, path = str(error).partition(" - at `$.")
        name = path.rstrip("`").split("[")[0]
        value: Any = options
        for part in name.split("."):
            value = value.get(part) if isinstance(value, dict) else getattr(value, part, None)
        shown = f"{name} = {value!r}: " if name else ""
        raise ConfigError(f"{shown}{reason}") from None
