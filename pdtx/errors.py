"""The exception tree. Every error a user can cause or meet is a PdtxError with one clear line.

PdtxError                        exit code 1
├── InputError                   exit code 2: what was given cannot be used
│   ├── ConfigError              a field of a node's config that cannot be used
│   ├── SpecError                a KV cache spec with impossible numbers
│   ├── LayoutError              an unknown or impossible layout
│   ├── ParallelError            ranks that cannot share what they would have to
│   ├── PlanError                two sides that cannot be matched, or a plan that failed its audit
│   ├── WrongTransport           another transport than the required one would carry the payload
│   ├── PoolTooSmall             memory that does not hold one request
│   └── ModelError               a model that cannot be found, read or run
├── CacheError
│   ├── OutOfBlocks              the pool has fewer free blocks than asked for
│   └── StaleBlocks              a block was freed, and perhaps given to another request, meanwhile
├── TierError                    what goes wrong in a tier that keeps blocks
│   ├── TierBusy                 it has too much to do already
│   ├── TierNotReady             what is to be kept has not all arrived, or was not verified
│   └── TierInUse                another process keeps its blocks there
├── ProtocolError                a peer's message that is malformed, too large or of another version
│   └── IncompatiblePeer         the handshake found a field that differs
├── PeerError
│   ├── PeerUnreachable          nobody answers at the address
│   │   └── PeerSilent           somebody is there and says nothing
│   ├── PeerLost                 the peer was there and is gone
│   ├── AddressInUse             the port to listen on is taken
│   └── AuthenticationFailed     keys or tokens do not match
├── TransferError                a payload did not arrive, with how far it came
│   ├── TransferAborted          cancelled before it was finished
│   ├── TransferRefused          the receiver granted no such transfer
│   ├── LeaseExpired             an offered request was not read within its lease
│   └── DeadlineExceeded         a wait ended by its deadline; names phase and peer
├── VerificationError            bytes arrived that are not the source's
└── EngineError                  an error of pdtx itself; please report it
    ├── IllegalTransition        a request was to go from one state to another that cannot follow
    └── NotTheOwner              a record was changed by another thread than its owner (debug runs)
"""


class PdtxError(Exception):
    """Root of all errors raised on purpose; its text is one line fit for a terminal."""

    exit_code = 1


class InputError(PdtxError):
    """Something given by the user cannot be used as it is."""

    exit_code = 2


class ConfigError(InputError):
    """A field of a node's config cannot be used as it is.

    field: its name, of which the flag is `--field-name`.
    """

    def __init__(self, field: str, text: str) -> None:
        self.field = field
        super().__init__(text)


class SpecError(InputError):
    """A KV cache spec with impossible numbers."""


class LayoutError(InputError):
    """An unknown or impossible layout."""


class ParallelError(InputError):
    """Tensor-parallel ranks that cannot share what they would have to."""


class PlanError(InputError):
    """Two sides that cannot be matched, or a plan that failed its audit."""


class PoolTooSmall(InputError):
    """The memory does not hold one request of max_model_len tokens.

    needed, available: bytes. fitting_model_len: tokens of the longest request that fits; 0 where none does.
    """

    def __init__(self, text: str, *, needed: int, available: int, fitting_model_len: int) -> None:
        self.needed, self.available, self.fitting_model_len = needed, available, fitting_model_len
        super().__init__(text)


class WrongTransport(InputError):
    """Another kind of transport than the required one would carry the payload.

    required, found: kinds; possible: those that this mover could use between the two nodes.
    """

    def __init__(self, required: str, found: str, possible: tuple[str, ...], detail: str) -> None:
        self.required, self.found, self.possible = required, found, possible
        could = ", ".join(possible) or found
        super().__init__(
            f"{required} is required, but the payload would go over {detail}; possible with this mover here: {could}; "
            "choose another mover, or its options"
        )


class ModelError(InputError):
    """A model that cannot be found, read or run."""


class CacheError(PdtxError):
    """Root of what goes wrong inside one paged cache."""


class OutOfBlocks(CacheError):
    """The pool has fewer free blocks than asked for."""


class StaleBlocks(CacheError):
    """A block was freed, and perhaps given to another request, since it was handed out."""


class TierError(PdtxError):
    """Root of what goes wrong in a tier that keeps blocks."""


class TierBusy(TierError):
    """The tier has too much to do already; what was asked for has not been begun."""


class TierNotReady(TierError):
    """A request is to be kept that has not all arrived, or was not verified; nothing was copied."""


class TierInUse(TierError):
    """Another process keeps its blocks in that directory."""


class ProtocolError(PdtxError):
    """A peer's message is malformed, too large or of another protocol version."""


class IncompatiblePeer(ProtocolError):
    """The handshake found a field in which the two sides differ.

    field: the name of the field; producer, consumer: what each side has, as text.
    """

    exit_code = 2

    def __init__(self, field: str, producer: str, consumer: str, advice: str = "") -> None:
        self.field, self.producer, self.consumer, self.advice = field, producer, consumer, advice
        text = f"incompatible peers: {field} is {producer} on the prefill side and {consumer} on the decode side"
        super().__init__(f"{text}; {advice}" if advice else text)


class PeerError(PdtxError):
    """Root of what goes wrong with a peer as a whole."""


class PeerUnreachable(PeerError):
    """Nobody answers at the address."""


class PeerSilent(PeerUnreachable):
    """Somebody takes the connection and says nothing: it may be busy, or stopped."""


class PeerLost(PeerError):
    """The peer was connected and is gone or silent."""


class AddressInUse(PeerError):
    """The address to listen on is taken or not ours."""


class AuthenticationFailed(PeerError):
    """A key or a session token does not match."""


class TransferError(PdtxError):
    """A payload did not arrive."""


class TransferAborted(TransferError):
    """The transfer was cancelled before it was finished."""


class TransferRefused(TransferError):
    """The receiver granted no such transfer, or of another size."""


class DeadlineExceeded(TransferError):
    """A wait ended by its deadline.

    phase: what was waited for; peer: for whom; seconds: how long.
    """

    def __init__(self, phase: str, peer: str, seconds: float, detail: str = "") -> None:
        self.phase, self.peer, self.seconds = phase, peer, seconds
        text = f"deadline of {seconds:g} s exceeded while waiting for {phase} from {peer}"
        super().__init__(f"{text} ({detail})" if detail else text)


class LeaseExpired(TransferError):
    """An offered request was not read within its lease.

    seconds: of the lease. reader: who had begun to read it; "" for nobody.
    """

    def __init__(self, request_id: str, seconds: float, reader: str) -> None:
        self.seconds, self.reader = seconds, reader
        what = f"{reader} did not read all of it, nor renew the lease" if reader else "nobody has pulled it"
        super().__init__(f"the lease of request {request_id} ended after {seconds:g} s: {what}")


class VerificationError(PdtxError):
    """Bytes arrived that are not the source's; the text names the first wrong coordinate.

    wrong: how many elements are wrong.
    """

    def __init__(self, text: str, wrong: int) -> None:
        self.wrong = wrong
        super().__init__(text)


class EngineError(PdtxError):
    """An error of pdtx itself, which is logged and counted; please report it."""


class IllegalTransition(EngineError):
    """A request was to go from one state to another that cannot follow."""


class NotTheOwner(EngineError):
    """A record was changed by another thread than its owner; found in debug runs."""
