"""Samples of what the two ends of each link have told."""

from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from pdtx.bench.clock import Clock
from pdtx.bench.work import LinkChecked, LinkMoved
from pdtx.results.model import LinkSample, Sample, Transfer


def make_sample(
    iteration: int,
    warmup: bool,
    moved: Sequence[LinkMoved],
    checked: Mapping[int, LinkChecked],
    clocks: Mapping[int, Clock],
    *,
    one_by_one: bool = False,
) -> Sample:
    """Return the sample of an iteration. checked: by link; clocks: of who posted each link.

    one_by_one: links moved one after the other; the time in which nothing moved, while the next one was told to, is
    left out: a link begins where the one before it has ended.
    """
    begun = _begins(moved, clocks, one_by_one)
    links = [_link_sample(one, checked[one.link], begun[one.link]) for one in moved]
    looked = [checked[one.link].wrong for one in moved]
    wrong = sum(number for number in looked if number is not None) if None not in looked else None
    return Sample(
        iteration=iteration,
        warmup=warmup,
        wall_s=max(link.ended for link in links) - min(link.begun for link in links),
        links=links,
        wrong=wrong,
        first_wrong=_first_wrong(iteration, [checked[one.link] for one in moved]),
        transfers=[_shifted(transfer, begun[one.link]) for one in moved for transfer in one.transfers],
        error=next(filter(None, (_miscount(link) for link in links)), None),
    )


def _begins(moved: Sequence[LinkMoved], clocks: Mapping[int, Clock], one_by_one: bool) -> dict[int, float]:
    """Return when each link began: seconds since the iteration's begin, which is the first link's."""
    if one_by_one:
        begins, at = dict[int, float](), 0.0
        for one in moved:
            begins[one.link] = at
            at += one.ended - one.begun
        return begins
    here = {one.link: clocks[one.link].here(one.begun) for one in moved}
    first = min(here.values())
    return {link: at - first for link, at in here.items()}


def _link_sample(moved: LinkMoved, checked: LinkChecked, begun: float) -> LinkSample:
    return LinkSample(
        link=moved.link,
        begun=begun,
        ended=begun + moved.ended - moved.begun,
        prepare_s=moved.prepare_s,
        post_s=moved.post_s,
        move_s=moved.move_s,
        claimed_bytes=moved.claimed_bytes,
        received_bytes=checked.received_bytes,
        posts=moved.posts,
        deliveries=checked.deliveries,
    )


def _shifted(transfer: Transfer, by: float) -> Transfer:
    return replace(
        transfer,
        ready=transfer.ready + by,
        posted=transfer.posted + by,
        sent=transfer.sent + by,
        ended=transfer.ended + by,
    )


def _miscount(link: LinkSample) -> str | None:
    """Return what does not add up between a link's two ends, if anything does not."""
    if link.deliveries != link.posts:
        return f"link {link.link}: delivered {link.deliveries} of {link.posts}"
    if link.received_bytes != link.claimed_bytes:
        return (
            f"link {link.link}: the sender says it moved {link.claimed_bytes} bytes and the receiver has counted "
            f"{link.received_bytes}"
        )
    return None


def _first_wrong(iteration: int, checked: Sequence[LinkChecked]) -> str:
    text = next((one.first_wrong for one in checked if one.first_wrong), "")
    return text if not text or "iteration" in text else f"iteration {iteration}: {text}"
