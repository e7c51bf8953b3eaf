"""Compiles kernels for Hopper (sm_90) as their launchers would, without a GPU: run as
`python ahead_of_time.py`, in a process of its own, since tests here may have Triton interpret.

Prints a line of JSON for each launch: name, registers, bytes of stack (spills), shared memory.
"""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.tools.tensor_descriptor import TensorDescriptor

from ringcast.kernels.gpu import (
    all_reduce,
    batch_linear,
    batch_linear_table,
    expert_routing,
    experts,
    few_linear,
    fp8_linear,
    int4_linear,
    rope,
    tile_linear,
)
from ringcast.kernels.gpu import decode_attention as decode
from ringcast.kernels.gpu import fused_decode_attention as fused
from ringcast.kernels.gpu import prefill_attention as prefill
from ringcast.kernels.gpu.decode_plan import choose_decode_config, plan_size

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
HOPPER = (9, 0)
TYPES = {
    BF16: "*bf16",
    FP8: "*fp8e4nv",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.uint8: "*u8",
}
CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


class Compiler:
    """Stands where a launcher has its kernel, and compiles instead of launching."""

    def __init__(self, kernel) -> None:
        self.kernel = kernel

    def __getitem__(self, grid):
        return self.compile

    def compile(self, *args, **named) -> None:
        names = self.kernel.arg_names
        values = dict(zip(names, args, strict=False)) | named
        options = {name: value for name, value in named.items() if name not in names}
        signature, constants, hints = {}, {}, {}
        for place, parameter in enumerate(self.kernel.params):
            kind, value = parameter.name, values[parameter.name]
            aligned = not parameter.do_not_specialize
            if parameter.is_constexpr or value is None:
                signature[kind], constants[(place,)] = "constexpr", value
                continue
            if isinstance(value, TensorDescriptor):
                size = ", ".join(map(str, value.block_shape))
                signature[kind] = f"tensordesc<{TYPES[value.base.dtype][1:]}[{size}]>"
                aligned = False
            elif isinstance(value, torch.Tensor):
                signature[kind] = TYPES[value.dtype]
            else:
                signature[kind] = "fp32" if isinstance(value, float) else "i32"
                aligned &= isinstance(value, int) and value % 16 == 0
            if aligned:
                hints[(place,)] = [["tt.divisibility", 16]]
        source = ASTSource(self.kernel, signature, constants, hints)
        compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
        report(self.kernel.__name__, compiled)


def report(name: str, compiled) -> None:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage = subprocess.check_output([CUOBJDUMP, "--dump-resource-usage", file.name], text=True)
    registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", usage).groups()
    figures = {"registers": int(registers), "stack": int(stack), "shared": compiled.metadata.shared}
    print(json.dumps({"name": name, **figures}), flush=True)


def ints(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int32)


def compile_attention(
    heads: int, kv_heads: int, size: int, window: int, block_size: int, cache: torch.dtype
) -> None:
    """The launches of a model in bfloat16: decode for some and for many, fused, prefill, and the
    write into the cache.
    """
    config = choose_decode_config(kv_heads, size, cache.itemsize, HOPPER)
    k = torch.zeros(2, kv_heads, block_size, size, dtype=cache)
    tables = ints(1, 128)
    how = {"scale": 1.0, "kv_heads": kv_heads, "window": window}
    for sequences in (1, 256):
        q = torch.zeros(sequences, heads * size, dtype=torch.bfloat16)
        scratch = decode.decode_scratch(sequences, heads, size, config.workers, "cpu")
        of_sequences = ints(sequences)
        rest = (k, k, tables, of_sequences, of_sequences)
        if sequences == 1:
            qkv = torch.zeros(1, (heads + 2 * kv_heads) * size, dtype=torch.bfloat16)
            cos, weight = torch.zeros(64, size // 2), torch.ones(size)
            before = (qkv, of_sequences, of_sequences, cos, cos)
            norms = {"heads": heads, "q_weight_D": weight, "k_weight_D": weight}
            fused.fused_decode_attention(*before, *rest, q, scratch, pdl=True, **norms, **how)
        else:
            plan = ints(plan_size(sequences, config))
            rest = (*rest, plan, q, scratch)
            decode.decode_attention(q, *rest, config=config, pdl=True, **how)
    rest = (k, k, tables, of_sequences)
    described = prefill.can_describe(k, q.dtype, heads // kv_heads)
    config = prefill.choose_prefill_config(size, 2, window > 0, described, HOPPER)
    rest = (*rest, ints(257), ints(256), ints(2, 5), q)
    prefill.prefill_attention(q, *rest, config=config, **how)
    rope.rope_and_cache(*before, k, k, q[:1], heads, kv_heads, pdl=True)


def compile_linears(outputs: int, inputs: int, group: int, dtype: torch.dtype) -> None:
    """Those with weights of 4 and 8 bits, for one token and for some."""
    w = torch.zeros(outputs, inputs // 2, dtype=torch.uint8)
    scales = torch.zeros(inputs // group, outputs, dtype=torch.float16)
    weight = int4_linear.Int4Weight(w, scales, scales.to(torch.uint8))
    scratch = int4_linear.int4_scratch(0, dtype, "cpu")
    for tokens in (1, 32, 64, 200):
        x, out = (torch.zeros(tokens, size, dtype=dtype) for size in (inputs, outputs))
        int4_linear.int4_linear(x, weight, out, scratch, bias_N=out[0], pdl=True)
    int4_linear.dequantize_int4(weight, torch.zeros(outputs, inputs, dtype=dtype))
    q, scale_T1 = x.to(FP8), torch.zeros(tokens, 1)
    fp8_linear.quantize_rows(x, q, scale_T1, pdl=True)
    w, scale_N, norm = torch.zeros(outputs, inputs).to(FP8), torch.zeros(outputs), x[0].float()
    for activation, size in ((None, outputs), ("silu", outputs // 2)):
        how = {"scale_N": scale_N, "norm_weight_K": norm, "activation": activation, "pdl": True}
        few_linear.few_linear(x[:1], w, out[:1, :size], **how)


def compile_tiles() -> None:
    """Products by descriptors: tiles that wait for their other splits, and gated ones."""
    tile_linear._multiprocessors = lambda device: 132
    x, up, down, q = (torch.zeros(n, 1024, dtype=BF16) for n in (256, 6144, 4096, 1024))
    inner, scratch = x.repeat(1, 3), batch_linear.batch_linear_scratch(256, 4096, "cpu")
    config = batch_linear_table.Config(128, 128, 64, 1, 8, 3, 4, swap=False, tma=True)
    how = {"activation": "silu", "config": config, "pdl": True}
    batch_linear.batch_linear(x, up, inner, scratch, **how)
    for changes in ({"splits": 4}, {"rows": 64, "tokens": 256, "splits": 2, "swap": True}):
        how = {"add_to_TN": x, "config": config._replace(**changes), "pdl": True}
        batch_linear.batch_linear(x.clone(), q, x, scratch, **how)
    config = batch_linear_table.Config(256, 64, 64, 8, 8, 4, 2, swap=True, tma=True)
    batch_linear.batch_linear(x[:64], down, x.repeat(1, 4)[:64], scratch, config=config)


def compile_experts(num: int, chosen: int, hidden: int, inner: int, dtype: torch.dtype) -> None:
    """All of a mixture's launches, by each plan."""
    gate_up = torch.zeros(num, 2 * inner, hidden, dtype=dtype, device="meta")
    down = torch.zeros(num, hidden, inner, dtype=dtype, device="meta")
    for tokens in (1, *(int(most * num / chosen) for most, _ in experts.PLANS), 8192):
        plan = experts.choose_plan(tokens * chosen, num, 2, HOPPER)
        count = experts.num_blocks(tokens, chosen, num, plan.rows)
        blocks = expert_routing.make_blocks(count, count * plan.rows, num, "cpu")
        x, y = (torch.zeros(n, hidden, dtype=dtype) for n in (tokens, tokens * chosen))
        of_slots = torch.zeros(count * plan.rows, inner, dtype=dtype, device="meta")
        chosen_TC, weights_TC = ints(tokens, chosen), torch.zeros(tokens, chosen)
        logits, loads = torch.zeros(tokens, num, dtype=dtype), torch.zeros(num, dtype=torch.int64)
        few, how = {}, {"num_tokens_N": ints(1), "loads_E": loads}
        if expert_routing.is_direct(tokens):
            few = {"blocks": blocks, "rows": plan.rows}
        else:
            expert_routing.dispatch(chosen_TC, blocks, rows=plan.rows, held=num, pdl=True)
        expert_routing.route(
            logits, chosen_TC, weights_TC, renormalize=True, pdl=True, **how, **few
        )
        shape = {"rows": plan.rows, "count": count, "pdl": True}
        up = {"chosen": chosen, "config": plan.gate_up, **shape}
        experts.expert_gate_up(x, gate_up, blocks, of_slots, "silu", **up)
        experts.expert_down(of_slots, down, blocks, weights_TC, y, config=plan.down, **shape)
        experts.combine(y, chosen_TC, x, pdl=True)


def compile_exchanges(tokens: int, num: int, chosen: int, hidden: int, dtype: torch.dtype) -> None:
    """What replicas that share experts launch beside."""
    peers = all_reduce.Peers(1, torch.zeros(2, dtype=torch.int64), ints(1024))
    x, norm = torch.zeros(tokens, hidden, dtype=dtype), torch.zeros(hidden)
    all_reduce.gather_rows(peers, 1 << 20, x.view(2, -1, hidden), pdl=True)
    all_reduce.all_reduce_add_rms_norm(peers, 1 << 20, x, norm, x, 1e-6, pdl=True)
    for count in (2, tokens):
        blocks = expert_routing.make_blocks(2 * chosen, 32 * chosen, num, "cpu")
        routes = expert_routing.Routes(ints(num, 3), ints(1))
        loads = torch.zeros(num, dtype=torch.int64)
        few = {"blocks": blocks, "rows": 16} if count == 2 else {}
        places = torch.zeros(count, num, dtype=dtype), ints(count, chosen), x[:count, :chosen]
        expert_routing.route(
            *places[:2], places[2].float(), renormalize=True, num_tokens_N=ints(2), pdl=True,
            routes=routes, loads_E=loads, **few,
        )  # fmt: skip


if __name__ == "__main__":
    products = (int4_linear, fp8_linear, few_linear, tile_linear)
    mixtures = (all_reduce, experts, expert_routing)
    for module in (decode, fused, prefill, rope, *products, *mixtures):
        for name in vars(module).copy():
            if name.endswith("_kernel"):
                setattr(module, name, Compiler(getattr(module, name)))
    for cache in (BF16, FP8):
        compile_attention(heads=16, kv_heads=8, size=128, window=0, block_size=64, cache=cache)
        compile_attention(heads=9, kv_heads=3, size=64, window=0, block_size=16, cache=cache)
        compile_attention(heads=4, kv_heads=1, size=256, window=512, block_size=64, cache=cache)
    compile_experts(num=128, chosen=8, hidden=2048, inner=768, dtype=BF16)
    compile_tiles()
    compile_exchanges(tokens=64, num=128, chosen=8, hidden=2048, dtype=BF16)
    for dtype in (BF16, torch.float16):
        compile_linears(6144, 4096, 128, dtype)
        compile_linears(960, 576, 32, dtype)
