"""Requests whose block tables the caller has given, until a producer asks for them; and how they ended."""

from pdtx.cache import AllocatingBlockPool, CallerBlocks
from pdtx.engine.inbound import Arrived, Expectation, InboundRequest
from pdtx.engine.waking import Ended
from pdtx.errors import DeadlineExceeded, InputError, PdtxError


class Expectations:
    """What a consumer over its caller's blocks expects. Changed by the consumer's control thread alone.

    expected: without a request as yet. unmatched: requests without an expectation as yet. arrived: for poll().
    """

    def __init__(self, pool: AllocatingBlockPool | CallerBlocks) -> None:
        self._pool = pool
        self.expected: dict[str, Expectation] = {}
        self.unmatched: dict[str, InboundRequest] = {}
        self.arrived = Ended[Arrived]()

    def add(self, expected: Expectation) -> None:
        """Expect a request. Raises InputError for a request id in use."""
        if expected.request_id in self.expected:
            raise InputError(f"request id {expected.request_id!r} is in use")
        self.expected[expected.request_id] = expected

    def note_clean(self, expected: Expectation, error: PdtxError | None) -> None:
        """Note that nothing fills the blocks with poison any more: they may be granted, or are given back.

        error: why they are not full of it, so that the request is not to be expected any more.
        """
        # By object: another request of that name may be expected by now.
        if error is not None and self.expected.get(expected.request_id) is expected:
            self.drop(expected.request_id, error)
        expected.clean = True
        if expected.error is not None:
            self._give_back(expected, expected.error)

    def match(self, request_id: str) -> tuple[Expectation, InboundRequest] | None:
        """Return an expectation and its request, once there are both and the blocks may be granted."""
        expected, request = self.expected.get(request_id), self.unmatched.get(request_id)
        if expected is None or request is None or not expected.clean:
            return None
        del self.expected[request_id], self.unmatched[request_id]
        return expected, request

    def forget(self, request: InboundRequest) -> None:
        """Wait no more for an expectation of a request that has ended."""
        if self.unmatched.get(request.request_id) is request:
            del self.unmatched[request.request_id]

    def drop(self, request_id: str, error: PdtxError) -> None:
        """Expect a request no more; its blocks are the caller's again once they are not being filled with poison."""
        expected = self.expected.pop(request_id, None)
        if expected is not None:
            expected.error = error
            if expected.clean:
                self._give_back(expected, error)

    def drop_all(self, error: PdtxError) -> None:
        """Expect nothing any more."""
        for request_id in list(self.expected):
            self.drop(request_id, error)

    def tick(self, now: float) -> None:
        """Drop what no producer has asked for by its deadline."""
        for expected in [expected for expected in self.expected.values() if expected.deadline < now]:
            waited = round(expected.deadline - expected.begun, 3)
            self.drop(expected.request_id, DeadlineExceeded("a request for it", "any prefill node", waited))

    def _give_back(self, expected: Expectation, error: PdtxError) -> None:
        self._pool.retire(expected.blocks)
        if not expected.reported:
            self.arrived.add(Arrived(expected.request_id, error, None))
