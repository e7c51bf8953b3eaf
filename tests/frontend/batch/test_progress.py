"""What a batch shows of itself."""

from __future__ import annotations

import io
import re

from rich.console import Console

from ringcast.frontend.batch.progress import BatchProgress
from ringcast.frontend.batch.run import Tally


def shown(terminal: bool) -> str:
    console = Console(file=io.StringIO(), force_terminal=terminal, width=100)
    tally = Tally(earlier=4, earlier_failed=1)
    with BatchProgress(tally, 10, console) as progress:
        tally.answered, tally.failed, tally.output_tokens = 2, 2, 50
        progress.update()
    return console.file.getvalue()  # type: ignore[attr-defined,no-any-return]


def test_a_terminal_has_a_bar() -> None:
    said = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown(True))
    last = said.splitlines()[-1]
    assert re.search(r"Batch .* 8/10 [\d,]+ tok/s 3 failed ", last)


def test_elsewhere_there_is_none() -> None:
    assert shown(False).strip() == ""


def test_the_summary() -> None:
    tally = Tally(answered=1200, failed=3, prompt_tokens=5000, output_tokens=60)
    said = BatchProgress(tally, 2000, Console(file=io.StringIO())).summary()
    assert re.fullmatch(
        r"1,200 answered, 3 failed; 5,000 prompt and 60 output tokens in \d+\.\d s, [\d,]+ tok/s",
        said,
    )
    tally.earlier, tally.output_tokens = 7, 0
    said = BatchProgress(tally, 2000, Console(file=io.StringIO())).summary()
    assert "3 failed (7 more in earlier runs);" in said
    assert not said.endswith(" 0 tok/s")  # those of prompts, where there are no others
