"""UCX's own benchmark program, ucx_perftest, where it is installed on both sides."""

import ctypes
import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import threading
import time
from pathlib import Path

from pdtx.address import join_address, numeric_host, parse_address
from pdtx.errors import DeadlineExceeded, InputError, PeerUnreachable, TransferError

_MESSAGE_BYTES = 1 << 20
_LEAST_MESSAGES = 64
_WARMUPS = 8
_MIB = 1 << 20
_CONNECT_S = 10.0
_PAUSE_S = 0.05
_PROGRAM = "ucx_perftest"
_TEST = "ucp_put_bw"
_PR_SET_PDEATHSIG = 1


class UcxServer:
    """Keeps a server of ucx_perftest running: each serves one round, and another one takes its place.

    The program knows no token, and listens at every address of the host while it runs; it moves its own buffers only.
    """

    token = b""

    def __init__(self, host: str) -> None:
        """Raises InputError where the program is not installed."""
        self._command, self._environment = _program()
        self.detail = f"{_TEST}, one buffer of {_MESSAGE_BYTES:,} bytes again and again"
        self.address = join_address(numeric_host(host), _free_port())
        self._lock, self._closing = threading.Lock(), False
        self._process: subprocess.Popen[bytes] | None = None
        self._thread = threading.Thread(target=self._run, name="pdtx-ucx-perftest", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        _, port = parse_address(self.address)
        while True:
            with self._lock:
                if self._closing:
                    return
                # In this thread: a child dies with the thread that has made it.
                self._process = _spawn([self._command, "-p", str(port)], self._environment, subprocess.DEVNULL)
            self._process.wait()
            time.sleep(_PAUSE_S)

    def close(self) -> None:
        """End the server. Idempotent."""
        with self._lock:
            self._closing = True
            if self._process is not None:
                self._process.kill()
        self._thread.join()


class UcxSide:
    """Runs the client once a round; the time of a round is that of nbytes at the rate that it reports."""

    def __init__(self, address: str, nbytes: int, timeout_s: float) -> None:
        """Raises InputError where the program is not installed."""
        self._command, self._environment = _program()
        self._host, self._port = parse_address(address)
        self._nbytes, self._timeout_s = nbytes, timeout_s
        self.detail = f"{_TEST}, one buffer of {_MESSAGE_BYTES:,} bytes again and again"
        self._process: subprocess.Popen[bytes] | None = None

    def round(self) -> float:
        """Return the seconds of nbytes. Raises PeerUnreachable, DeadlineExceeded, TransferError."""
        return self._nbytes / overall_rate(self._client())

    def _client(self) -> str:
        """Run the client until the server listens; return what it prints."""
        number = max(_LEAST_MESSAGES, self._nbytes // _MESSAGE_BYTES)
        arguments = ["-t", _TEST, "-s", str(_MESSAGE_BYTES), "-n", str(number), "-w", str(_WARMUPS), "-f", "-v"]
        command = [self._command, self._host, "-p", str(self._port), *arguments]
        begun = time.monotonic()
        while True:
            self._process = process = _spawn(command, self._environment, subprocess.PIPE)
            try:
                printed, _ = process.communicate(timeout=max(0.1, begun + self._timeout_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                self.close()
                raise DeadlineExceeded(f"a round of {_PROGRAM}", self._host, self._timeout_s) from None
            if process.returncode == 0:
                return printed.decode(errors="replace")
            if time.monotonic() > begun + min(_CONNECT_S, self._timeout_s):
                raise PeerUnreachable(f"no {_PROGRAM} answers at {join_address(self._host, self._port)}")
            time.sleep(_PAUSE_S)

    def close(self) -> None:
        """End a client that is running. Idempotent."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            if self._process.stdout is not None:
                self._process.stdout.close()


def _spawn(command: list[str], environment: dict[str, str], output: int) -> subprocess.Popen[bytes]:
    """Start a program that is killed when the thread ends that has started it, however that ends."""
    prctl = ctypes.CDLL(None).prctl  # before the fork: nothing is loaded after it

    def tie() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

    try:
        return subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.DEVNULL, preexec_fn=tie
        )  # fmt: skip
    except OSError as error:
        raise InputError(f"{command[0]} cannot be run: {error.strerror or error}") from None


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
    return port


def overall_rate(printed: str) -> float:
    """Return bytes/s of the last line of comma-separated output, whose head names the columns.

    Raises TransferError for output of another kind.
    """
    lines = [line.split(",") for line in printed.splitlines() if "," in line]
    try:
        head, values = lines[0], lines[-1]
        rate = float(values[head.index("overall_bw")]) * _MIB
    except (ValueError, IndexError):
        rate = 0.0
    if rate <= 0:
        raise TransferError(f"{_PROGRAM} printed no rate: {' '.join(printed.split())[:200]!r}")
    return rate


def _program() -> tuple[str, dict[str, str]]:
    """Return the program, of PATH or of the wheel of UCX, and its environment. Raises InputError if there is none."""
    environment = os.environ | {"UCX_LOG_LEVEL": "error"}
    found = shutil.which(_PROGRAM)
    if found is not None:
        return found, environment
    wheel = importlib.util.find_spec("libucx")
    if wheel is not None and wheel.origin is not None:
        folder = Path(wheel.origin).parent
        if os.access(folder / "bin" / _PROGRAM, os.X_OK):
            return str(folder / "bin" / _PROGRAM), environment | {"LD_LIBRARY_PATH": str(folder / "lib")}
    raise InputError(f"{_PROGRAM} is not on PATH; it comes with UCX, or with pip install 'pdtx[ucx]'")
