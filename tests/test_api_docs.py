"""docs/python.md and examples/: every program runs, and says what it should."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import pdtx

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "python.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python in a process of its own, with warnings as errors."""
    command = [sys.executable, "-W", "error", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=110, cwd=ROOT)


def test_every_example_of_the_page_runs(tmp_path: Path) -> None:
    assert len(BLOCKS) >= 12
    program = tmp_path / "page.py"
    # What a child process imports again must do nothing.
    program.write_text("\n\n".join(BLOCKS))
    done = run(str(program))
    assert done.returncode == 0, done.stderr
    shown = PAGE.partition("It prints\n\n```\n")[2].partition("```")[0]
    for line in shown.splitlines():
        assert line.strip() == "..." or line in done.stdout.splitlines(), line


@pytest.mark.parametrize("name", [name for name in pdtx.__all__ if name != "__version__"])
def test_every_public_name_is_used_or_explained(name: str) -> None:
    explained = re.findall(rf"`(?:pdtx\.)?{name}\b", PAGE)
    used = any(re.search(rf"\bpdtx\.{name}\b", block) for block in BLOCKS)
    assert explained
    assert used or issubclass(getattr(pdtx, name), Exception)


def test_nothing_private_is_shown() -> None:
    for block in (*BLOCKS, *(path.read_text() for path in (ROOT / "examples").glob("*.py"))):
        assert "pdtx.testing" not in block
        assert not re.search(r"pdtx[.\w]*\._(?!_)", block)


def test_the_connector_s_mistake_is_found_and_named() -> None:
    done = run("examples/verify_my_connector.py")
    assert (done.returncode, done.stderr) == (1, "")
    assert "wrong in layer 0 K, layer 1 K\n" in done.stdout
    # Row 1 of head 0's page is where NHD has head 1 of token 0.
    assert (
        "layer 0 K token 1 head 0 channels 0..63 (block 2), 64 elements: the values of layer 0 K token 0 head 1\n"
        in (done.stdout)
    )


def test_the_connector_without_the_mistake_is_clean() -> None:
    done = run("examples/verify_my_connector.py", "--fixed")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("40,960 elements compared, 0 wrong")
    assert done.stdout.count("\n") == 1


def test_two_processes_move_and_compare() -> None:
    done = run("examples/two_processes.py")
    assert (done.returncode, done.stderr) == (0, "")
    assert re.search(r"^sent 327,680 bytes in 1,280 runs over tcp ", done.stdout, re.MULTILINE)
    assert "received 327,680 bytes; 0 of 524,288 elements wrong" in done.stdout
