"""scripts/tune: which configurations of the kernels are fastest on the GPU that this runs on.

    scripts/tune dense --budget 150 --models qwen3-0.6b --tokens 64,128,256
    scripts/tune dense --shapes 960x576,576x576:add,3072x576:silu
    scripts/tune few                             products of one token (few_linear)
    scripts/tune attention --budget 100          decode and prefill attention
    scripts/tune experts --budget 100            the products of a mixture of experts

The tables that the engine reads (kernels/gpu/*_table.py) are rewritten: what wasn't measured keeps
its entries. --output puts changed tables there instead, beside the log, which has each time, and
the report. Within --budget seconds it ends, with what it has by then.
"""

from __future__ import annotations

import argparse
import os
import shutil
import threading
import time
from collections.abc import Callable, Collection
from pathlib import Path
from types import ModuleType
from typing import Any

import attention_space
import dense_space
import expert_space
import few_space
import torch
import tune_attention
import tune_dense
import tune_experts
import tune_few
from compile_pool import CompilePool, say
from search import Search, report
from spaces import Limits
from tables import replace_tuned
from triton.runtime import driver

from ringcast.kernels.gpu import (
    batch_linear_table,
    decode_table,
    expert_table,
    few_linear_table,
    prefill_table,
)
from ringcast.kernels.gpu.architecture import architecture_of

ROOT = Path(__file__).resolve().parents[2]
TOKENS = "2,8,16,32,64,96,128,192,256,384,512"
LATE = 5.0  # seconds after the budget when a search that is stuck is ended
Tables = dict[ModuleType, dict[Any, Any]]
Found = Callable[[Search], tuple[Tables, str]]  # what the tables become, and a report


def dense(options: argparse.Namespace, limits: Limits) -> tuple[list[Any], Found]:
    names = options.models or ([] if options.shapes else list(dense_space.MODELS))
    of_models = (shape for name in names for shape in dense_space.MODELS[name])
    shapes = dict.fromkeys([*options.shapes, *of_models])
    if options.no_heads:
        shapes = [shape for shape in shapes if shape.rows < 65536]

    def found(search: Search) -> tuple[Tables, str]:
        tuned = tune_dense.table(search)
        return {batch_linear_table: tuned}, tune_dense.summary(search, names)

    return [tune_dense.Dense(shape, options.tokens) for shape in shapes], found


def few(options: argparse.Namespace, limits: Limits) -> tuple[list[Any], Found]:
    names = options.models or ([] if options.shapes else list(few_space.MODELS))
    shapes = [*options.shapes, *(shape for name in names for shape in few_space.MODELS[name])]

    def found(search: Search) -> tuple[Tables, str]:
        tuned = tune_few.table(search, few_linear_table.TUNED)
        return {few_linear_table: tuned}, summary(search, "rule")

    return [tune_few.Few(shape) for shape in dict.fromkeys(shapes)], found


def attention(options: argparse.Namespace, limits: Limits) -> tuple[list[Any], Found]:
    names = options.models or list(attention_space.MODELS)
    decode = attention_space.decode_cases(names, options.cache_bytes)
    prefill = attention_space.prefill_cases(names)
    wanted = {"decode": decode, "prefill": prefill, "both": [*decode, *prefill]}[options.of]

    def found(search: Search) -> tuple[Tables, str]:
        kinds = {
            decode_table: attention_space.DecodeCase,
            prefill_table: attention_space.PrefillCase,
        }
        tables = {
            module: tune_attention.table(search, module.TUNED, limits, kind)
            for module, kind in kinds.items()
        }
        return tables, summary(search, "in use")

    return [tune_attention.Attention(case, names, limits) for case in wanted], found


def experts(options: argparse.Namespace, limits: Limits) -> tuple[list[Any], Found]:
    names = options.models or list(expert_space.MODELS)

    def found(search: Search) -> tuple[Tables, str]:
        tuned = tune_experts.table(search, expert_table.TUNED, limits)
        return {expert_table: tuned}, summary(search, "in use")

    return [tune_experts.Experts(names, limits)], found


def summary(search: Search, baseline: str) -> str:
    return "\n".join(report(search, search.cases, baseline))


def tune(options: argparse.Namespace, end: float) -> None:
    """end: of time.monotonic()."""
    folder = options.output or ROOT / "build"
    folder.mkdir(parents=True, exist_ok=True)
    pool = CompilePool(options.processes)
    subjects, found = WHAT[options.what](options, limits_here())
    with open(folder / f"{options.what}.jsonl", "w") as log:
        search = Search(subjects, options.most, pool, end, log)

        def finish() -> None:
            tables, text = found(search)
            text += f"\n{search.left_out} configurations were left out; the log says why."
            (folder / f"{options.what}.md").write_text(text + "\n")
            say(text)
            for module, tuned in tables.items():
                path = place(Path(module.__file__), options.output)
                replace_tuned(path, tuned)
                say(f"{'as it was' if tuned == module.TUNED else 'changed'}: {path}")

        def give_up() -> None:
            say("the time is up")
            finish()
            pool.stop()
            os._exit(0)

        watchdog = threading.Timer(end + LATE - time.monotonic(), give_up)
        watchdog.daemon = True
        watchdog.start()
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                search.run()
        finally:
            watchdog.cancel()
            pool.stop()
            finish()


def place(table: Path, output: Path | None) -> Path:
    """The table to rewrite."""
    return Path(shutil.copy(table, output / table.name)) if output else table


def limits_here() -> Limits:
    device = torch.cuda.current_device()
    found = driver.active.utils.get_device_properties(device)
    return Limits(
        architecture_of(torch.device("cuda", device)),
        found["multiprocessor_count"],
        found["max_shared_mem"],
        found["max_num_regs"],
    )


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def many(parse: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    return lambda text: [parse(part) for part in text.split(",")]


def among(known: Collection[Any], parse: Callable[[str], Any] = str) -> Callable[[str], list[Any]]:
    def parse_list(text: str) -> list[Any]:
        given = many(parse)(text)
        if unknown := [each for each in given if each not in known]:
            raise argparse.ArgumentTypeError(
                f"{', '.join(map(str, unknown))}; known: {', '.join(map(str, known))}"
            )
        return given

    return parse_list


WHAT = {"dense": dense, "few": few, "attention": attention, "experts": experts}


def parse_arguments(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/tune", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    kinds = parser.add_subparsers(dest="what", required=True)
    spaces = (dense_space, few_space, attention_space, expert_space)
    made = {}
    for name, space in zip(WHAT, spaces, strict=True):
        made[name] = one = kinds.add_parser(name)
        one.add_argument("--budget", type=float, default=600, help="seconds, of all")
        known = ", ".join(space.MODELS)
        one.add_argument("--models", type=among(space.MODELS), default=[], help=known)
        one.add_argument("--most", type=int, default=32, help="of a round, about")
        one.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
        one.add_argument("--output", type=Path, help="a folder for tables, log and report")
    for name, parse, text in (
        ("dense", tune_dense.parse_shape, "ROWSxINPUTS[:part],..."),
        ("few", tune_few.parse_shape, "ROWSxINPUTS[:part+part],..."),
    ):
        made[name].add_argument("--shapes", type=many(parse), default=[], help=text)
    tokens = {"type": numbers, "default": numbers(TOKENS), "help": TOKENS}
    made["dense"].add_argument("--tokens", **tokens)
    made["dense"].add_argument("--no-heads", action="store_true", help="without vocabularies")
    made["attention"].add_argument("--of", choices=["decode", "prefill", "both"], default="both")
    sizes = {"type": among([2, 1], int), "default": [2, 1], "help": "decode: of a cache's element"}
    made["attention"].add_argument("--cache-bytes", **sizes)
    return parser.parse_args(given)


def main() -> None:
    began = time.monotonic()
    options = parse_arguments()
    if not torch.cuda.is_available():
        raise SystemExit("scripts/tune needs a CUDA device")
    say(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, bfloat16")
    tune(options, began + options.budget)


if __name__ == "__main__":
    main()
