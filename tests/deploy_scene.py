"""A checkout whose programs are stand-ins, for tests of the scripts in deploy/: what starts, ends, and stays behind."""

import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parent.parent
DEPLOY = ROOT / "deploy"

_AGENT = """#!{python}
import json, signal, socket, sys, threading
from pdtx.process import follow_parent
assert open(sys.argv[sys.argv.index("--key") + 1]).read().strip(), "no secret key"
assert open(sys.argv[sys.argv.index("--peer-key") + 1]).read().strip(), "no public key"
host = sys.argv[sys.argv.index("--listen") + 1].rpartition(":")[0]
stop = threading.Event()
signal.signal(signal.SIGTERM, lambda *_: stop.set())
follow_parent()
server = socket.create_server((host, 0))
print(json.dumps({{"event": "listening", "address": f"{{host}}:{{server.getsockname()[1]}}"}}), flush=True)
print("{mark}", file=sys.stderr, flush=True)
server.settimeout(0.05)
while not stop.is_set():
    try:
        connection, _ = server.accept()
    except TimeoutError:
        continue
    with connection:
        while data := connection.recv(1 << 20):
            pass
"""

_DRIVER = """#!{python}
import json, os, pathlib, socket, sys, time
words = sys.argv[1:]
if words[0] == "keygen":
    folder = pathlib.Path(words[words.index("--directory") + 1])
    for end in ("key", "key_secret"):
        (folder / f"{{words[1]}}.{{end}}").write_text(f"{{end}} of {{words[1]}}\\n")
    sys.exit()
assert words[0] == "bench", words
mark = "{mark}"
if "--wait" in words:
    print("driving", file=sys.stderr, flush=True)
    time.sleep(600)
nbytes = int(words[words.index("--bytes") + 1]) if "--bytes" in words else 1 << 20
for address in (words[words.index("--prefill") + 1] + "," + words[words.index("--decode") + 1]).split(","):
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), 10) as connection:
        connection.sendall(bytes(nbytes))
        connection.shutdown(socket.SHUT_WR)
        connection.recv(1)  # the other one's end: all has crossed the link
link = {{"claimed_bytes": nbytes * (3 if "--lie" in words else 1)}}
result = {{"cases": [{{"samples": [{{"links": [link]}}], "references": []}}]}}
pathlib.Path(words[words.index("--output") + 1]).write_text(json.dumps(result))
print("measured", *(words[at + 1] for at, word in enumerate(words) if word == "--label"))
sys.exit(int(os.environ.get("EXIT", "0")))
"""


def checkout(folder: Path, mark: str) -> Path:
    """Make the scripts of deploy/ and stand-ins for the programs in folder. mark: a word in each one's command line."""
    shutil.copytree(DEPLOY, folder / "deploy")
    programs = folder / ".venv" / "bin"
    programs.mkdir(parents=True)
    for name, text in (("pdtx-prefill", _AGENT), ("pdtx-decode", _AGENT), ("pdtx", _DRIVER)):
        path = programs / name
        path.write_text(text.format(python=sys.executable, mark=mark))
        path.chmod(0o755)
    (programs / "python").symlink_to(sys.executable)
    return folder


def processes_of(mark: str) -> list[str]:
    """Return the command lines of processes that have mark in them."""
    found = list[str]()
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            text = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if mark in text:
            found.append(text)
    return found


def wait_until_gone(mark: str, timeout_s: float) -> list[str]:
    """Wait for the processes with mark to be gone; return what is left after timeout_s."""
    until = time.monotonic() + timeout_s
    while (left := processes_of(mark)) and time.monotonic() < until:
        time.sleep(0.05)
    return left


def wait_for_line(process: subprocess.Popen[str], word: str) -> list[str]:
    """Read stderr up to a line with word, and return the lines; fail the test where there is none."""
    lines = list[str]()
    for line in process.stderr or ():
        lines.append(line)
        if word in line:
            return lines
    raise AssertionError(f"no {word!r} in: {''.join(lines)}")


def run(command: Sequence[str | Path], **settings: str) -> subprocess.CompletedProcess[str]:
    """Run a script of deploy/ to its end."""
    import os

    env = {**os.environ, **settings}
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=env)
