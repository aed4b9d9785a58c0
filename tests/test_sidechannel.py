"""Both ends of the control plane over real sockets; faults are made with real processes and raw sockets."""

import contextlib
import logging
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgpack
import pytest
import zmq

from pdtx.address import is_loopback, numeric_host, parse_address
from pdtx.errors import AddressInUse, AuthenticationFailed, InputError, PeerUnreachable, ProtocolError
from pdtx.protocol import MAX_MESSAGE_BYTES, PROTOCOL_VERSION, Bye, Failure, Message, Reference, Reject, Release, decode
from pdtx.sidechannel import (
    Dialer,
    KeyPair,
    Listener,
    Security,
    generate_keys,
    load_public,
    load_secret,
)

PLAIN = Security()
BEAT, SILENCE = 0.1, 2.0
LOCAL = "127.0.0.1:0"
PATIENCE = 10.0
PROMPT_S = 5.0
"""More than what is done at once takes on a busy machine, and less than what it is told apart from."""

PEER = """
import sys, time
from pdtx.protocol import Release
from pdtx.sidechannel import Dialer, Listener, Security

options = {"security": Security(), "heartbeat_s": 0.1, "silence_s": 2.0}
if sys.argv[1] == "listen":
    end = Listener(sys.argv[2], lambda peer, message: end.send(peer, message), lambda peer, reason: None, **options)
    print(end.endpoint, flush=True)
else:
    end = Dialer(sys.argv[2], lambda message: None, lambda reason: print(reason, flush=True), **options)
    end.connect(5.0)
    end.send(Release(request_id="hello"))
    print("connected", flush=True)
time.sleep(60)
"""


def release(number: object) -> Release:
    return Release(request_id=str(number))


class Server:
    """A listener that keeps what it is told."""

    def __init__(
        self, address: str = LOCAL, security: Security = PLAIN, *, echo: bool = False, **options: float
    ) -> None:
        self.messages: queue.Queue[tuple[bytes, Message]] = queue.Queue()
        self.losses: queue.Queue[tuple[bytes, str]] = queue.Queue()
        self.echo = echo
        options = {"heartbeat_s": BEAT, "silence_s": SILENCE} | options
        self.end = Listener(address, self._on_message, self._on_lost, security=security, **options)
        self.address = self.end.endpoint.removeprefix("tcp://")

    def _on_message(self, peer: bytes, message: Message) -> None:
        self.messages.put((peer, message))
        if self.echo:
            self.end.send(peer, message)

    def _on_lost(self, peer: bytes, reason: str) -> None:
        self.losses.put((peer, reason))


class Client:
    """A dialer that keeps what it is told."""

    def __init__(
        self, address: str, security: Security = PLAIN, *, timeout_s: float = PATIENCE, **options: float
    ) -> None:
        self.messages: queue.Queue[Message] = queue.Queue()
        self.losses: queue.Queue[str] = queue.Queue()
        options = {"heartbeat_s": BEAT, "silence_s": SILENCE} | options
        self.end = Dialer(address, self.messages.put, self.losses.put, security=security, **options)
        self.end.connect(timeout_s)


Make = Callable[..., Any]


@pytest.fixture
def make() -> Iterator[Make]:
    """Build servers and clients that are closed after the test."""
    with contextlib.ExitStack() as stack:

        def build(kind: Callable[..., Any], *args: object, **options: object) -> Any:  # noqa: ANN401
            made = kind(*args, **options)
            stack.callback(made.end.close)
            return made

        yield build


@contextlib.contextmanager
def process(role: str, address: str) -> Iterator[tuple["subprocess.Popen[str]", str]]:
    """Run a peer as a process of its own; yields it and the first line it says."""
    with subprocess.Popen([sys.executable, "-c", PEER, role, address], stdout=subprocess.PIPE, text=True) as peer:
        try:
            assert peer.stdout is not None
            yield peer, peer.stdout.readline().strip()
        finally:
            peer.kill()


def eventually(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)


def pair(tmp_path: Path, name: str) -> KeyPair:
    return load_secret(generate_keys(tmp_path, name)[1])


# -- talking ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("address", [LOCAL, "tcp://127.0.0.1:0", "localhost:0", "[::1]:0"])
def test_request_and_answer(make: Make, address: str) -> None:
    try:
        server = make(Server, address, echo=True)
    except AddressInUse:
        pytest.skip("no IPv6 here") if "::1" in address else pytest.fail("cannot listen")
    assert server.end.endpoint.startswith("tcp://")
    client = make(Client, server.end.endpoint)
    client.end.send(release(1))
    assert client.messages.get(timeout=PATIENCE) == release(1)


def test_several_dialers_hear_only_their_own_answers(make: Make) -> None:
    server = make(Server, echo=True)
    clients = [make(Client, server.address) for _ in range(5)]
    for number, client in enumerate(clients):
        client.end.send(release(number))
    for number, client in enumerate(clients):
        assert client.messages.get(timeout=PATIENCE) == release(number)
        assert client.messages.empty()
    assert server.end.peers() == 5


def test_large_messages_pass_whole(make: Make) -> None:
    server = make(Server, echo=True)
    client = make(Client, server.address)
    message = Reference(request_id="r", buffer=0, layer=0, token_start=0, token_stop=1, data=os.urandom(8 << 20))
    client.end.send(message)
    assert client.messages.get(timeout=PATIENCE) == message


def test_eight_threads_of_a_thousand_messages_arrive_whole_and_in_order(make: Make) -> None:
    # Patient ends: this is about order, and eight busy threads may keep a heartbeat waiting.
    server = make(Server, silence_s=10 * PATIENCE)
    client = make(Client, server.address, silence_s=10 * PATIENCE)

    def send(thread: int) -> None:
        for number in range(1000):
            client.end.send(release(f"{thread}.{number}"))

    threads = [threading.Thread(target=send, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seen: dict[str, list[int]] = {}
    for _ in range(8000):
        _, message = server.messages.get(timeout=6 * PATIENCE)
        thread_id, _, number = message.request_id.partition(".")
        seen.setdefault(thread_id, []).append(int(number))
    assert seen == {str(thread): list(range(1000)) for thread in range(8)}
    assert server.messages.empty()


def test_heartbeats_keep_silent_peers_and_are_not_delivered(make: Make) -> None:
    server = make(Server)
    client = make(Client, server.address)
    time.sleep(1.5 * SILENCE)
    assert server.losses.empty()
    assert client.losses.empty()
    assert server.messages.empty()
    assert client.messages.empty()


def test_a_failing_callback_is_logged_and_survived(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    server = make(Server, echo=True)
    client = make(Client, server.address)
    server.messages.put = lambda _: 1 / 0
    client.end.send(release(1))
    eventually(lambda: "ZeroDivisionError" in caplog.text)
    del server.messages.put
    client.end.send(release(2))
    assert client.messages.get(timeout=PATIENCE) == release(2)


def test_a_message_that_cannot_be_sent_fails_where_it_is_made(make: Make) -> None:
    server = make(Server)
    client = make(Client, server.address)
    with pytest.raises(ProtocolError, match="Release"):
        client.end.send(release("not an id"))
    client.end.send(release("good"))
    assert server.messages.get(timeout=PATIENCE)[1] == release("good")


def test_a_slow_peer_gets_everything(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdtx.sidechannel.channel._HIGH_WATER", 4)
    server = make(Server)
    client = make(Client, server.address)
    for number in range(500):
        client.end.send(Failure(request_id=str(number), phase="x", reason="y" * 20_000))
    assert [server.messages.get(timeout=PATIENCE)[1].request_id for _ in range(500)] == [str(n) for n in range(500)]


# -- ending -----------------------------------------------------------------------------------------------------------


def test_close_sends_what_is_queued_and_says_goodbye(make: Make) -> None:
    server = make(Server)
    client = make(Client, server.address)
    client.end.send(release(0))
    peer, _ = server.messages.get(timeout=PATIENCE)
    for number in range(5000):
        server.end.send(peer, release(number))
    server.end.close()
    assert "closed: " in client.losses.get(timeout=PATIENCE)
    assert client.messages.qsize() == 5000
    client.end.close()


def test_close_lets_large_messages_leave(make: Make) -> None:
    # A large message keeps the heartbeats behind it waiting, so silence must be longer than it takes.
    server = make(Server, silence_s=PATIENCE)
    client = make(Client, server.address, silence_s=PATIENCE)
    client.end.send(release(0))
    peer, _ = server.messages.get(timeout=PATIENCE)
    message = Reference(request_id="r", buffer=0, layer=0, token_start=0, token_stop=1, data=bytes(60 << 20))
    server.end.send(peer, message)
    server.end.close(linger_s=PATIENCE)
    client.losses.get(timeout=PATIENCE)
    assert client.messages.qsize() == 1


def test_a_dialers_goodbye_is_told_promptly_and_once(make: Make) -> None:
    server = make(Server, silence_s=60.0)
    client = make(Client, server.address)
    client.end.send(release(0))
    peer, _ = server.messages.get(timeout=PATIENCE)
    begun = time.monotonic()
    client.end.close()
    assert server.losses.get(timeout=PATIENCE) == (peer, "closed: end of session")
    assert time.monotonic() - begun < PROMPT_S
    time.sleep(3 * BEAT)
    assert server.losses.empty()
    assert server.end.peers() == 0


def test_close_is_prompt_idempotent_and_leaves_nothing() -> None:
    def once() -> None:
        server = Server()
        client = Client(server.address)
        client.end.send(release(1))
        server.messages.get(timeout=PATIENCE)
        begun = time.monotonic()
        for end in (client.end, server.end, client.end, server.end):
            end.close(linger_s=2 * PROMPT_S)
        assert time.monotonic() - begun < PROMPT_S
        client.end.send(release(2))

    once()
    before = len(os.listdir("/proc/self/fd")), set(threading.enumerate())
    for _ in range(5):
        once()
    assert (len(os.listdir("/proc/self/fd")), set(threading.enumerate())) == before


def test_a_callback_may_close_its_own_channel(make: Make) -> None:
    server = make(Server)
    client = make(Client, server.address)
    server.messages.put = lambda _: server.end.close()
    client.end.send(release(1))
    assert "closed" in client.losses.get(timeout=PATIENCE)
    eventually(lambda: all(thread.name != "pdtx-listener" for thread in threading.enumerate()))


def test_a_channel_that_fails_itself_tells_its_owner_and_ends(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    server = make(Server)
    client = make(Client, server.address)
    client.end._tend = lambda _: 1 / 0
    assert "failed; see the log" in client.losses.get(timeout=PATIENCE)
    assert "ZeroDivisionError" in caplog.text
    eventually(lambda: all(thread.name != "pdtx-dialer" for thread in threading.enumerate()))
    client.end.send(release(1))


# -- peers that go ----------------------------------------------------------------------------------------------------


def test_a_killed_dialer_is_lost(make: Make) -> None:
    server = make(Server, silence_s=60.0)
    with process("dial", server.address) as (peer, said):
        assert said == "connected"
        name, _ = server.messages.get(timeout=PATIENCE)
        begun = time.monotonic()
        peer.send_signal(signal.SIGKILL)
        lost, reason = server.losses.get(timeout=PATIENCE)
        assert (lost, "not connected" in reason) == (name, True)
        assert time.monotonic() - begun < PROMPT_S


def test_a_stopped_dialer_is_lost_and_learns_it_when_it_goes_on(make: Make) -> None:
    server = make(Server)
    with process("dial", server.address) as (peer, _):
        name, _ = server.messages.get(timeout=PATIENCE)
        begun = time.monotonic()
        peer.send_signal(signal.SIGSTOP)
        assert server.losses.get(timeout=PATIENCE) == (name, f"nothing heard for {SILENCE:g} s")
        assert SILENCE - 2 * BEAT < time.monotonic() - begun < SILENCE + PROMPT_S
        peer.send_signal(signal.SIGCONT)
        assert peer.stdout is not None
        assert "nothing heard" in peer.stdout.readline()


@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGSTOP])
def test_a_listener_that_dies_or_stops_is_lost(make: Make, sign: signal.Signals) -> None:
    with process("listen", LOCAL) as (peer, endpoint):
        client = make(Client, endpoint)
        client.end.send(release(1))
        assert client.messages.get(timeout=PATIENCE) == release(1)
        peer.send_signal(sign)
        begun = time.monotonic()
        reason = client.losses.get(timeout=PATIENCE)
        assert reason == ("it closed the connection" if sign == signal.SIGKILL else f"nothing heard for {SILENCE:g} s")
        assert time.monotonic() - begun < SILENCE + PROMPT_S


def test_what_a_listener_said_before_it_died_is_heard(make: Make) -> None:
    context = zmq.Context()
    router = context.socket(zmq.ROUTER)
    router.setsockopt(zmq.SNDHWM, 0)  # or it drops what the client does not take at once
    try:
        client = make(Client, f"127.0.0.1:{router.bind_to_random_port('tcp://127.0.0.1')}")
        client.end.send(release(0))
        peer, _ = router.recv_multipart()
        for number in range(2000):
            router.send_multipart([peer, msgpack.packb({"type": "release", "request_id": str(number)})])
    finally:
        router.close(linger=2000)
        context.term()
    assert client.losses.get(timeout=PATIENCE) == "it closed the connection"
    assert client.messages.qsize() == 2000


def test_a_restarted_listener_is_not_taken_for_the_old_one(make: Make) -> None:
    with process("listen", LOCAL) as (peer, endpoint):
        old = make(Client, endpoint)
        peer.send_signal(signal.SIGKILL)
    server = make(Server, endpoint, echo=True)
    assert old.losses.get(timeout=PATIENCE) == "it closed the connection"
    old.end.send(release("old"))
    new = make(Client, endpoint)
    new.end.send(release("new"))
    assert new.messages.get(timeout=PATIENCE) == release("new")
    time.sleep(3 * BEAT)
    assert [message for _, message in list(server.messages.queue)] == [release("new")]
    assert server.end.peers() == 1
    assert old.losses.empty()


def test_a_peer_that_takes_nothing_is_lost(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdtx.sidechannel.channel._HIGH_WATER", 4)
    server = make(Server, silence_s=1.0)
    context = zmq.Context()
    raw = context.socket(zmq.DEALER)
    try:
        raw.setsockopt(zmq.RCVHWM, 1)
        raw.connect(server.end.endpoint)
        raw.send(msgpack.packb({"type": "heartbeat"}))
        eventually(lambda: server.end.peers() == 1)
        peer = server.end._peers()[0]
        for number in range(200):
            server.end.send(peer, Failure(request_id=str(number), phase="x", reason="y" * 200_000))
        while server.losses.empty():
            raw.send(msgpack.packb({"type": "heartbeat"}))
            time.sleep(0.05)
        assert server.losses.get() == (peer, "it took no messages for 1 s")
    finally:
        raw.close(linger=0)
        context.term()


# -- addresses --------------------------------------------------------------------------------------------------------


def test_nobody_listening_is_told_with_the_address_within_the_deadline() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    begun = time.monotonic()
    with pytest.raises(PeerUnreachable, match=f"127.0.0.1:{port}"):
        Client(f"127.0.0.1:{port}", timeout_s=0.4)
    assert time.monotonic() - begun < PROMPT_S


def test_something_that_accepts_and_says_nothing_is_unreachable() -> None:
    says = r"takes the connection but does not answer within 2 s"  # in which its connection must be seen
    with socket.create_server(("127.0.0.1", 0)) as server, pytest.raises(PeerUnreachable, match=says):
        Client(f"127.0.0.1:{server.getsockname()[1]}", timeout_s=2.0)


def http(stranger: socket.socket) -> None:
    stranger.recv(4096)
    stranger.sendall(b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n")


def banner(stranger: socket.socket) -> None:
    stranger.sendall(b"220 mail ready\r\n")
    stranger.recv(4096)
    stranger.recv(4096)


def hang_up(stranger: socket.socket) -> None:
    pass


@pytest.mark.parametrize("serve", [http, banner, hang_up])
def test_another_kind_of_server_is_told_within_the_deadline(serve: Callable[[socket.socket], None]) -> None:
    def run(server: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                with server.accept()[0] as stranger, contextlib.suppress(ConnectionError):
                    serve(stranger)

    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        thread = threading.Thread(target=run, args=(server,))
        thread.start()
        before = set(threading.enumerate())
        begun = time.monotonic()
        with pytest.raises((AuthenticationFailed, PeerUnreachable), match=address):
            Client(address, timeout_s=0.5)
        assert time.monotonic() - begun < PROMPT_S
        assert set(threading.enumerate()) == before
        server.shutdown(socket.SHUT_RDWR)
        thread.join()


@pytest.mark.parametrize("kind", [zmq.PUB, zmq.PULL])
def test_another_kind_of_socket_is_told_within_the_deadline(kind: int) -> None:
    context = zmq.Context()
    other = context.socket(kind)
    try:
        port = other.bind_to_random_port("tcp://127.0.0.1")
        with pytest.raises((AuthenticationFailed, PeerUnreachable), match=str(port)):
            Client(f"127.0.0.1:{port}", timeout_s=0.5)
    finally:
        other.close(linger=0)
        context.term()


def test_a_listener_that_comes_late_is_found(make: Make) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    late = threading.Timer(0.3, lambda: make(Server, f"127.0.0.1:{port}", echo=True))
    late.start()
    client = make(Client, f"127.0.0.1:{port}")
    late.join()
    client.end.send(release(1))
    assert client.messages.get(timeout=PATIENCE) == release(1)


def test_a_taken_port_is_named(make: Make) -> None:
    server = make(Server)
    with pytest.raises(AddressInUse, match=f"{server.address}: Address already in use"):
        make(Server, server.address)


def test_an_address_of_another_machine_cannot_be_listened_on() -> None:
    with pytest.raises(AddressInUse, match=r"192\.0\.2\.1:0.*this machine"):
        Server("192.0.2.1:0", Security(insecure=True))


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("127.0.0.1:5600", ("127.0.0.1", 5600)),
        ("tcp://host:0", ("host", 0)),
        ("[::1]:5600", ("::1", 5600)),
        ("tcp://[fe80::1%eth0]:1", ("fe80::1%eth0", 1)),
        ("*:5600", ("0.0.0.0", 5600)),
    ],
)
def test_addresses(text: str, parsed: tuple[str, int]) -> None:
    assert parse_address(text) == parsed


@pytest.mark.parametrize("text", ["", "host", "host:", ":5600", "::1:5600", "host:65536", "host:-1", "host:x", "h:٣"])
def test_what_is_no_address_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(InputError, match="not an address") as caught:
        parse_address(text)
    assert repr(text) in str(caught.value)


def test_loopback() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "127.9.9.9", "::1", "localhost")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "192.0.2.1", "2001:db8::1")))
    with pytest.raises(InputError, match=r"no-such-host\.invalid"):
        is_loopback("no-such-host.invalid")


def test_a_name_is_loopback_only_if_all_its_addresses_are(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [(0, 0, 0, "", ("127.0.0.1", 0)), (0, 0, 0, "", ("192.0.2.1", 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    assert not is_loopback("both")


def test_a_name_means_its_ipv4_address_where_it_has_one(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [(0, 0, 0, "", ("::1", 0, 0, 0)), (0, 0, 0, "", ("127.0.0.1", 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    assert numeric_host("both") == "127.0.0.1"
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found[:1])
    assert numeric_host("six") == "::1"


def test_port_zero_cannot_be_dialled() -> None:
    with pytest.raises(InputError, match="port 0"):
        Client("127.0.0.1:0")


# -- keys -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [Server, Client])
@pytest.mark.parametrize("address", ["0.0.0.0:5600", "[::]:5600", "192.0.2.1:5600"])
def test_off_loopback_keys_are_needed(kind: Callable[[str], object], address: str) -> None:
    with pytest.raises(InputError, match=r"pdtx keygen.*--key and --peer-key, or --insecure"):
        kind(address)


def test_insecure_is_allowed_with_a_warning(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    server = make(Server, "0.0.0.0:0", Security(insecure=True), echo=True)
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    client = make(Client, f"127.0.0.1:{parse_address(server.address)[1]}")
    client.end.send(release(1))
    assert client.messages.get(timeout=PATIENCE) == release(1)


def test_right_keys_work_also_off_loopback(make: Make, tmp_path: Path) -> None:
    decode_keys, prefill_keys = pair(tmp_path, "decode"), pair(tmp_path, "prefill")
    server = make(Server, "0.0.0.0:0", Security(decode_keys, [prefill_keys.public]), echo=True)
    client = make(Client, f"127.0.0.1:{parse_address(server.address)[1]}", Security(prefill_keys, [decode_keys.public]))
    client.end.send(release(1))
    assert client.messages.get(timeout=PATIENCE) == release(1)


@pytest.mark.parametrize("case", ["stranger", "wrong server key", "dialer without keys", "listener without keys"])
def test_wrong_keys_are_refused_both_ways(make: Make, tmp_path: Path, case: str) -> None:
    decode_keys, prefill_keys, stranger = (pair(tmp_path, name) for name in ("decode", "prefill", "stranger"))
    guarded, known = Security(decode_keys, [prefill_keys.public]), Security(prefill_keys, [decode_keys.public])
    listening, dialling = {
        "stranger": (guarded, Security(stranger, [decode_keys.public])),
        "wrong server key": (guarded, Security(prefill_keys, [stranger.public])),
        "dialer without keys": (guarded, PLAIN),
        "listener without keys": (PLAIN, known),
    }[case]
    server = make(Server, LOCAL, listening)
    begun = time.monotonic()
    with pytest.raises(AuthenticationFailed, match=server.address):
        Client(server.address, dialling, timeout_s=6 * PROMPT_S)
    assert time.monotonic() - begun < PROMPT_S
    assert server.messages.empty()
    if listening is guarded:
        client = make(Client, server.address, known)
        client.end.send(release(1))
        assert server.messages.get(timeout=PATIENCE)[1] == release(1)


def test_half_given_or_broken_keys_are_refused(tmp_path: Path) -> None:
    own = pair(tmp_path, "own")
    broken = KeyPair(own.public, b"secret" * 6)
    for security, says in (
        (Security(own), "--peer-key"),
        (Security(None, [own.public]), "--key"),
        (Security(own, [b"short"]), "a peer's public key"),
        (Security(broken, [own.public]), "our secret key"),
    ):
        for kind in (Server, Client):
            with pytest.raises(InputError, match=says) as caught:
                kind("127.0.0.1:5600", security)
            assert "secretsecret" not in str(caught.value)


def test_key_files(tmp_path: Path) -> None:
    public, secret = generate_keys(tmp_path / "keys", "decode")
    assert secret.stat().st_mode & 0o777 == 0o600
    keys = load_secret(secret)
    assert keys.public == load_public(public) == load_public(secret)
    assert keys.secret.decode() not in repr(Security(keys))
    with pytest.raises(InputError, match="holds no secret key"):
        load_secret(public)
    with pytest.raises(InputError, match="exists"):
        generate_keys(tmp_path / "keys", "decode")
    assert load_secret(secret) == keys
    secret.chmod(0o644)
    generate_keys(tmp_path / "keys", "decode", force=True)
    assert load_secret(secret) != keys
    assert secret.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("name", ["", "a/b", "..", "a\0b", "a b"])
def test_key_names_are_checked(tmp_path: Path, name: str) -> None:
    with pytest.raises(InputError, match="not a name for a key"):
        generate_keys(tmp_path, name)


@pytest.mark.parametrize("text", [None, "", "\xff", 'public-key = "short"', 'public-key = "' + "~" * 40 + '"'])
def test_broken_key_files_are_named(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "broken.key"
    if text is not None:
        path.write_text(text, encoding="latin-1")
    with pytest.raises(InputError, match=r"broken\.key"):
        load_public(path)


# -- strangers --------------------------------------------------------------------------------------------------------


@pytest.fixture
def raw() -> Iterator[Callable[[str], "zmq.Socket[bytes]"]]:
    """Build raw DEALER sockets."""
    context = zmq.Context()
    made: list[zmq.Socket[bytes]] = []

    def build(endpoint: str) -> "zmq.Socket[bytes]":
        dealer = context.socket(zmq.DEALER)
        made.append(dealer)
        dealer.connect(endpoint)
        return dealer

    yield build
    for dealer in made:
        dealer.close(linger=0)
    context.term()


def works(make: Make, server: Server) -> bool:
    client = make(Client, server.address)
    client.end.send(release("still-there"))
    return bool(client.messages.get(timeout=PATIENCE) == release("still-there"))


def test_garbage_is_counted_logged_once_and_not_answered(
    make: Make, raw: Callable[[str], "zmq.Socket[bytes]"], caplog: pytest.LogCaptureFixture
) -> None:
    server = make(Server, echo=True)
    stranger = raw(server.end.endpoint)
    for frames in ([b"\xc1"], [b""], [b"a", b"b"], [os.urandom(100_000)], [b"\x91" * 100_000]):
        stranger.send_multipart(frames)
    eventually(lambda: server.end.rejected == 5)
    assert not stranger.poll(int(3 * BEAT * 1000))
    assert server.end.peers() == 0
    assert server.messages.empty()
    assert len(caplog.records) == 1
    assert works(make, server)
    assert server.losses.empty()


def test_raw_tcp_does_not_hurt(make: Make) -> None:
    server = make(Server, echo=True)
    address = parse_address(server.address)
    for data in (b"", b"GET / HTTP/1.1\r\n\r\n", bytes(1000), b"\xff" * 1000, os.urandom(100_000)):
        # The listener may hang up while we talk.
        with contextlib.suppress(ConnectionError), socket.create_connection(address) as stranger:
            stranger.sendall(data)
    assert works(make, server)


def test_oversize_frames_are_not_taken_in(make: Make, raw: Callable[[str], "zmq.Socket[bytes]"]) -> None:
    server = make(Server, echo=True)
    raw(server.end.endpoint).send(bytes(MAX_MESSAGE_BYTES + 1))
    time.sleep(1.0)  # long enough to take it in, if it were
    assert server.end.rejected == 0
    assert server.messages.empty()
    assert works(make, server)


def test_another_version_is_rejected_by_field(make: Make, raw: Callable[[str], "zmq.Socket[bytes]"]) -> None:
    server = make(Server)
    stranger = raw(server.end.endpoint)
    stranger.send(msgpack.packb({"type": "hello", "protocol": 9, "of_the_future": True}))
    assert stranger.poll(int(PATIENCE * 1000))
    answer = decode(stranger.recv())
    assert isinstance(answer, Reject)
    assert (answer.field, answer.producer, answer.consumer) == ("protocol", "9", str(PROTOCOL_VERSION))


def test_a_listener_of_another_version_is_named_to_the_dialer(make: Make) -> None:
    context = zmq.Context()
    router = context.socket(zmq.ROUTER)
    try:
        port = router.bind_to_random_port("tcp://127.0.0.1")
        client = make(Client, f"127.0.0.1:{port}")
        client.end.send(Bye(reason="hello"))
        future = msgpack.packb({"type": "welcome", "protocol": 9, "of_the_future": True})
        router.send_multipart([router.recv_multipart()[0], future])
        answer = client.messages.get(timeout=PATIENCE)
        assert isinstance(answer, Reject)
        assert (answer.field, answer.producer, answer.consumer) == ("protocol", str(PROTOCOL_VERSION), "9")
        assert answer.advice
    finally:
        router.close(linger=0)
        context.term()


def test_a_listener_that_talks_garbage_is_lost(make: Make) -> None:
    context = zmq.Context()
    router = context.socket(zmq.ROUTER)
    try:
        port = router.bind_to_random_port("tcp://127.0.0.1")
        client = make(Client, f"127.0.0.1:{port}")
        client.end.send(Bye(reason="hello"))
        router.send_multipart([router.recv_multipart()[0], b"garbage"])
        assert "not msgpack" in client.losses.get(timeout=PATIENCE)
    finally:
        router.close(linger=0)
        context.term()


# -- floods -----------------------------------------------------------------------------------------------------------


HELLO = msgpack.packb({"type": "release", "request_id": "hello"})
GOODBYE = msgpack.packb({"type": "bye", "reason": "enough"})
FLOOD = 12_000


def spans(end: Any, does: str, monkeypatch: pytest.MonkeyPatch) -> list[int]:  # noqa: ANN401
    """Count how often an end's method returns from one look at its timers to the next; the last count goes on."""
    counts, method, tend = [0], getattr(end, does), end._tend

    def counted(*args: object) -> object:
        result = method(*args)
        counts[-1] += 1
        return result

    def tended(now: float) -> None:
        counts.append(0)
        tend(now)

    monkeypatch.setattr(end, does, counted)
    monkeypatch.setattr(end, "_tend", tended)
    return counts


def hold(server: Server, monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, threading.Event]:
    """Stop the channel's thread at the message "hold"; returns the events of that and of going on."""
    held, go_on, put = threading.Event(), threading.Event(), server.messages.put

    def stop(item: tuple[bytes, Message]) -> None:
        if item[1] == release("hold"):
            held.set()
            go_on.wait(6 * PATIENCE)
        put(item)

    monkeypatch.setattr(server.messages, "put", stop)
    return held, go_on


def test_what_comes_after_a_goodbye_is_dropped_in_turns(
    make: Make, raw: Callable[[str], "zmq.Socket[bytes]"], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A peer says Bye and then 12,000 hellos: none is delivered, and timers are looked at among them."""
    server = make(Server, silence_s=6 * PATIENCE)
    other = make(Client, server.address, silence_s=6 * PATIENCE)
    held, go_on = hold(server, monkeypatch)
    other.end.send(release("hold"))
    assert held.wait(PATIENCE)
    talker = raw(server.end.endpoint)
    talker.setsockopt(zmq.SNDHWM, 0)
    counts = spans(server.end, "_receive_one", monkeypatch)
    for frame in (HELLO, GOODBYE, *[HELLO] * FLOOD):
        talker.send(frame)
    go_on.set()
    assert server.messages.get(timeout=PATIENCE)[1] == release("hold")
    peer, message = server.messages.get(timeout=PATIENCE)
    assert message == release("hello")
    assert server.losses.get(timeout=PATIENCE) == (peer, "closed: enough")
    eventually(lambda: sum(counts) >= FLOOD + 2)
    assert max(counts) <= 256
    assert server.messages.empty()
    assert server.losses.empty()
    assert server.end.peers() == 1
    other.end.send(release("still-there"))
    assert server.messages.get(timeout=PATIENCE)[1] == release("still-there")


def test_a_loss_waits_for_what_the_peer_sent_and_keeps_no_one_waiting(
    make: Make, raw: Callable[[str], "zmq.Socket[bytes]"], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A peer sends many messages and vanishes without a Bye: the loss comes last, and timers are looked at before."""
    server = make(Server, silence_s=6 * PATIENCE)
    other = make(Client, server.address, silence_s=6 * PATIENCE)
    talker = raw(server.end.endpoint)
    talker.setsockopt(zmq.SNDHWM, 0)
    talker.send(HELLO)
    peer, _ = server.messages.get(timeout=PATIENCE)
    held, go_on = hold(server, monkeypatch)
    other.end.send(release("hold"))
    assert held.wait(PATIENCE)
    counts = spans(server.end, "_receive_one", monkeypatch)
    for _ in range(900):  # fewer than ZeroMQ takes in for one peer: it also sees the end then
        talker.send(HELLO)
    talker.close(linger=int(PATIENCE * 1000))
    told: list[int] = []
    monkeypatch.setattr(server.losses, "put", lambda _: told.append(server.messages.qsize()))
    eventually(lambda: gone(server, peer))
    server.end._beat_at = 0.0  # a heartbeat is due: it finds nobody there
    go_on.set()
    eventually(lambda: bool(told))
    assert told == [901]
    assert max(counts) <= 256


def gone(server: Server, peer: bytes) -> bool:
    """Whether ZeroMQ has seen a peer's end; asked while the channel's thread is held, for the socket is its own."""
    try:
        server.end._socket.send_multipart((peer, msgpack.packb({"type": "heartbeat"})), zmq.NOBLOCK)
    except zmq.ZMQError:
        return True
    return False


def test_a_full_outbox_is_sent_in_turns(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also what one peer has left waiting: timers are looked at among the messages."""
    monkeypatch.setattr("pdtx.sidechannel.channel._HIGH_WATER", 2000)
    server = make(Server, silence_s=6 * PATIENCE)
    client = make(Client, server.address, silence_s=6 * PATIENCE)
    client.end.send(release(0))
    peer, _ = server.messages.get(timeout=PATIENCE)
    counts = spans(server.end, "_transmit", monkeypatch)
    server.end.send_many(peer, [release(number) for number in range(FLOOD)])
    assert [client.messages.get(timeout=PATIENCE).request_id for _ in range(FLOOD)] == [str(n) for n in range(FLOOD)]
    assert max(counts) <= 2 * 256 + 1  # of the backlog, of the outbox, and one that found no room


def test_a_batch_with_a_message_that_cannot_be_sent_is_not_sent(make: Make) -> None:
    server = make(Server)
    client = make(Client, server.address)
    with pytest.raises(ProtocolError, match="Release"):
        client.end.send_many([release("a"), release("not an id")])
    client.end.send_many([release("b"), release("c")])
    assert [server.messages.get(timeout=PATIENCE)[1] for _ in range(2)] == [release("b"), release("c")]


def test_what_a_peer_leaves_waiting_is_bounded_in_bytes(
    make: Make, raw: Callable[[str], "zmq.Socket[bytes]"], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pdtx.sidechannel.channel._HIGH_WATER", 4)
    monkeypatch.setattr("pdtx.sidechannel.channel._MAX_BACKLOG_BYTES", 1 << 20)
    server = make(Server, silence_s=6 * PATIENCE)
    idle = raw(server.end.endpoint)
    idle.setsockopt(zmq.RCVHWM, 1)
    idle.send(HELLO)
    peer, _ = server.messages.get(timeout=PATIENCE)
    large = Failure(request_id="r", phase="x", reason="y" * 500_000)
    while server.losses.empty():
        server.end.send(peer, large)
        eventually(lambda: not server.end._outbox)
    assert server.losses.get()[0] == peer
    assert server.end._backlogs == {}


@pytest.mark.thorough
@pytest.mark.parametrize("goodbye", [True, False])
def test_heartbeats_keep_their_time_under_a_flood(
    make: Make, raw: Callable[[str], "zmq.Socket[bytes]"], monkeypatch: pytest.MonkeyPatch, goodbye: bool
) -> None:
    """12,000 hellos, each of which keeps the owner for 0.4 ms: the other peer hears something every 2 s."""
    server = make(Server, heartbeat_s=1.0, silence_s=5.0)
    monkeypatch.setattr(server.messages, "put", lambda item, put=server.messages.put: time.sleep(0.0004) or put(item))  # type: ignore[func-returns-value]
    quiet, talker = raw(server.end.endpoint), raw(server.end.endpoint)
    talker.setsockopt(zmq.SNDHWM, 0)
    quiet.send(HELLO)
    server.messages.get(timeout=PATIENCE)
    last, gaps = time.monotonic(), list[float]()
    for frame in (HELLO, *[GOODBYE] * goodbye, *[HELLO] * FLOOD):
        talker.send(frame)
    if not goodbye:
        talker.close(linger=int(PATIENCE * 1000))
    while sum(gaps) < 8:
        assert quiet.poll(int(PATIENCE * 1000))
        quiet.recv()
        gaps.append(time.monotonic() - last)
        last = time.monotonic()
        quiet.send(msgpack.packb({"type": "heartbeat"}))
    assert max(gaps) < 2
