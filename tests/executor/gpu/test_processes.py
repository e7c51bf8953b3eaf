"""Processes that are run together: what is known of those that fail, or wait in vain."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from executor.gpu.processes import run_together

SCRIPT = """
import os, sys, time
if sys.argv[1] == "waits":
    def in_vain():
        time.sleep(60)
    in_vain()
if sys.argv[1] == "fails":
    sys.exit("because")
os.close(int(sys.argv[3]))
os.read(int(sys.argv[2]), 1)  # until all have closed it
print(os.environ.get("OWN"))
"""


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return str(path)


def test_all_have_their_own_environment_and_see_the_end(script):
    reads, writes = os.pipe()
    given = [["prints", str(reads), str(writes)]] * 2
    printed = run_together(script, given, 20, [], [reads, writes], [{"OWN": "a"}, {"OWN": "b"}])
    assert printed == [b"a\n", b"b\n"]
    for file in (reads, writes):
        with pytest.raises(OSError, match="descriptor"):
            os.fstat(file)


@pytest.mark.parametrize(("what", "said"), [("fails", "because"), ("waits", "in in_vain")])
def test_who_fails_says_why_and_who_waits_says_where(what, said, script):
    with pytest.raises(AssertionError, match=said):
        run_together(script, [[what]], 5 if what == "fails" else 1, [])
