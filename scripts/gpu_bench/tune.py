"""scripts/tune: which configurations of the kernels are fastest on the GPU that this runs on.

    scripts/tune dense --budget 150 --models qwen3-0.6b --tokens 64,128,256
    scripts/tune dense --shapes 960x576,576x576:add,3072x576:silu
    scripts/tune few                           the products of one token (few_linear)

The tables that the engine reads (kernels/gpu/*_table.py) are rewritten: other shapes and numbers of
tokens keep their entries. --output puts changed tables there instead, beside the log, which has
each time, and the report. Within --budget seconds it ends, with what it has by then.

The block sizes of experts and the splits of decode attention are rules, made by hand from what
scripts/gpu_bench/experts.py --tune and attention.py print.
"""

from __future__ import annotations

import argparse
import os
import shutil
import threading
import time
from pathlib import Path

import dense_search
import few_linear
import torch
from compile_pool import CompilePool, say
from dense_space import MODELS, Case

from ringcast.kernels.gpu import few_linear_table

ROOT = Path(__file__).resolve().parents[2]
TABLES = {
    "dense": ROOT / "kernels/gpu/batch_linear_table.py",
    "few": ROOT / "kernels/gpu/few_linear_table.py",
}
TOKENS = "2,8,16,32,64,96,128,192,256,384,512"
LATE = 5.0  # seconds after the budget when a search that is stuck is ended


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def shapes(text: str) -> list[dense_search.Shape]:
    return [dense_search.parse_shape(part) for part in text.split(",")]


def model_names(text: str) -> list[str]:
    names = text.split(",")
    if unknown := set(names) - set(MODELS):
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)}; known: {', '.join(MODELS)}")
    return names


def place(name: str, output: Path | None) -> Path:
    """The table to rewrite."""
    if output is None:
        return TABLES[name]
    return Path(shutil.copy(TABLES[name], output / TABLES[name].name))


def tune_dense(options: argparse.Namespace, end: float) -> None:
    names = options.models or ([] if options.shapes else list(MODELS))
    wanted = [*options.shapes, *(shape for name in names for shape in MODELS[name])]
    if options.no_heads:
        wanted = [shape for shape in wanted if shape.rows < 65536]
    cases = [Case(shape, t) for shape in dict.fromkeys(wanted) for t in options.tokens]
    folder = options.output or ROOT / "build"
    path = place("dense", options.output)
    pool = CompilePool(options.processes)
    with open(folder / "dense.jsonl", "w") as log:
        search = dense_search.Search(cases, options.most, pool, end, log)

        def finish() -> None:
            text = dense_search.report(search, names)
            (folder / "dense.md").write_text(text + "\n")
            say(text)
            dense_search.write_table(path, dense_search.table(search))
            say(f"written: {path}")

        def give_up() -> None:
            say("the time is up")
            finish()
            pool.stop()
            os._exit(0)

        watchdog = threading.Timer(end + LATE - time.monotonic(), give_up)
        watchdog.daemon = True
        watchdog.start()
        try:
            search.run()
        finally:
            watchdog.cancel()
            pool.stop()
            finish()


def tune_few(options: argparse.Namespace, end: float) -> None:
    settings = argparse.Namespace(
        dtype="bfloat16", bandwidth=4.3, threads=options.processes, no_pdl=False, all=False
    )
    few_names = {"qwen3-0.6b": "qwen3-0.6b", "llama-3.1-8b": "llama-8b"}
    wanted = [s for n in options.models or few_names for s in few_linear.MODELS[few_names[n]]]
    tuned = dict(few_linear_table.TUNED)
    path = place("few", options.output)
    for shape in dict.fromkeys(wanted):
        if time.monotonic() > end:
            say("the time is up")
            break
        row, config = few_linear.measure(shape, settings)
        say(f"| {' | '.join(row)} |")
        key = (shape.rows, shape.inputs, shape.gated)
        tuned.pop(key, None)
        if config:
            tuned[key] = config
    dense_search.replace_tuned(path, [f"    {key}: Config{tuple(c)}," for key, c in tuned.items()])
    say(f"written: {path}")


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="scripts/tune", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("what", choices=["dense", "few"])
    parser.add_argument("--budget", type=float, default=600, help="seconds, of all")
    parser.add_argument("--models", type=model_names, default=[], help=", ".join(MODELS))
    parser.add_argument("--shapes", type=shapes, default=[], help="dense: ROWSxINPUTS[:part],...")
    parser.add_argument("--tokens", type=numbers, default=numbers(TOKENS), help=f"dense: {TOKENS}")
    parser.add_argument("--most", type=int, default=32, help="dense: of a first round")
    parser.add_argument("--no-heads", action="store_true", help="dense: without vocabularies")
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--output", type=Path, help="a folder for tables, log and report")
    began = time.monotonic()
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a CUDA device")
    (options.output or ROOT / "build").mkdir(parents=True, exist_ok=True)
    say(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, bfloat16")
    tune = {"dense": tune_dense, "few": tune_few}[options.what]
    tune(options, began + options.budget)


if __name__ == "__main__":
    main()
