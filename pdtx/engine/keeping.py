"""What a decode node puts into its tiers: requests that have all arrived, and are verified where that is asked for."""

from collections.abc import Sequence
from concurrent.futures import Future

from pdtx.engine.inbound import InboundRequest
from pdtx.errors import TierError, TierNotReady
from pdtx.tiers import Fence, Holder, Moved
from pdtx.tiers.prefix import PrefixCache, Request
from pdtx.units import ceil_div


def keep_request(
    prefix: PrefixCache,
    request: InboundRequest,
    token_ids: Sequence[int],
    *,
    holder: Holder,
    verifies: bool,
    fence: Fence,
) -> "Future[Moved] | None":
    """Put the whole blocks of a request into a node's tiers, in the background.

    token_ids: those that the cache holds, of prompt and answer. verifies: whether the node verifies requests; then the
    prompt alone is kept, with content hashes, for what is computed here, token by token, has no source to be verified
    with. Returns None where nothing is kept. Raises TierNotReady, and TierError for tokens that are not the request's.
    """
    check_ready(request, verifies=verifies)
    if request.blocks is None or request.has_ended:
        return None
    size, kept = prefix.block_tokens, token_ids
    if list(token_ids[: request.num_tokens]) != list(request.ask.token_ids):
        raise TierError(f"request {request.request_id} is not kept: the tokens to keep are not those of its prompt")
    if verifies:
        kept = token_ids[: request.num_tokens]
    first = [ceil_div(need.positions.start, size) for need in request.needs]
    prompt = Request(prefix.keys(kept), request.tables, request.blocks, holder)
    # A state that has gone on to the answer's tokens is not the prompt's any more.
    states = len(kept) == len(token_ids)
    return prefix.keep(prompt, first, len(kept), fence, states=states, hashed=request.verified)


def check_ready(request: InboundRequest, *, verifies: bool) -> None:
    """Raise TierNotReady for a request that has not all arrived, or was not verified where verifies asks for that."""
    what = f"request {request.request_id} is not kept"
    if request.complete is None:
        raise TierNotReady(f"{what}: it has not all arrived: {request.lacking()}")
    if verifies and not request.verified:
        raise TierNotReady(f"{what}: it has arrived and was not verified; call verify() before")
