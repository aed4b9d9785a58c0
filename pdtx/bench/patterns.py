"""Who sends to whom: the links of a case between N prefill and M decode agents, and the work of each."""

from dataclasses import dataclass

from pdtx.bench.work import LinkWork, Role, StationWork
from pdtx.errors import InputError
from pdtx.models import layer_specs, load_config, state_sharding
from pdtx.parallel import transfers
from pdtx.results.model import Case


@dataclass(frozen=True)
class Ends:
    """A link by its number, and the agents at its ends, each counted among those of its role."""

    number: int
    prefill: int
    decode: int


@dataclass(frozen=True)
class Pattern:
    """What all agents do in a case. prefill, decode: work of each agent; None for one that has nothing to do."""

    links: tuple[Ends, ...]
    prefill: tuple[StationWork | None, ...]
    decode: tuple[StationWork | None, ...]

    def posts(self, link: Ends, op: str) -> tuple[Role, int]:
        """Return who connects and posts: prefill pushes, decode pulls."""
        return ("prefill", link.prefill) if op == "push" else ("decode", link.decode)

    def listens(self, link: Ends, op: str) -> tuple[Role, int]:
        """Return who listens: the other end."""
        return ("decode", link.decode) if op == "push" else ("prefill", link.prefill)


def plan_pattern(case: Case, prefill: int, decode: int, *, verify: bool = True) -> Pattern:
    """Return who sends what to whom between so many prefill and decode agents.

    pairs: i to i. fan-in: prefill agent i to decode agent i % decode. fan-out: prefill agent i % prefill to decode
    agent i. In these three every agent has all ranks of its side. tp: an agent has an equal, contiguous share of its
    side's ranks, and there is a link for every two agents of which one has what the other needs.

    Requests are numbers in pools that are alike at both ends of a link, so agents with several links have different
    requests for each, and all have pools for as many as the busiest of them.
    Raises InputError for numbers that do not go together, ModelError or ParallelError for ranks that cannot be.
    """
    if prefill < 1 or decode < 1:
        raise InputError(f"there must be a prefill and a decode agent, not {prefill} and {decode}")
    if case.batch < 1:
        raise InputError(f"batch {case.batch} moves nothing; it must be 1 or more")
    if case.pattern == "tp":
        return _of_ranks(case, prefill, decode, verify)
    ends = _ends(case.pattern, prefill, decode)
    places = _places(ends)
    whole = [
        LinkWork(end.number, _requests(place, case.batch), range(case.tp[0]), range(case.tp[1]))
        for end, place in zip(ends, places, strict=True)
    ]
    return _pattern(
        case, ends, whole, [range(case.tp[0])] * prefill, [range(case.tp[1])] * decode, max(places) + 1, verify
    )


def _ends(pattern: str, prefill: int, decode: int) -> list[Ends]:
    """Return the links of a pattern of whole agents."""
    if pattern == "pairs":
        if prefill != decode:
            raise InputError(
                f"pattern pairs needs as many decode as prefill agents, not {decode} and {prefill}; "
                "take fan-in, fan-out or tp"
            )
        return [Ends(number, number, number) for number in range(prefill)]
    if pattern == "fan-in":
        if prefill < decode:
            raise InputError(
                f"pattern fan-in needs no more decode than prefill agents, not {decode} and {prefill}; take fan-out"
            )
        return [Ends(number, number, number % decode) for number in range(prefill)]
    if pattern == "fan-out":
        if decode < prefill:
            raise InputError(
                f"pattern fan-out needs no more prefill than decode agents, not {prefill} and {decode}; take fan-in"
            )
        return [Ends(number, number % prefill, number) for number in range(decode)]
    raise InputError(f"unknown pattern {pattern!r}; one of pairs, fan-in, fan-out, tp")


def _places(ends: list[Ends]) -> list[int]:
    """Return of each link how many come before it at the end that has several."""
    seen: dict[tuple[Role, int], int] = {}
    places = list[int]()
    for end in ends:
        keys: tuple[tuple[Role, int], ...] = (("prefill", end.prefill), ("decode", end.decode))
        place = max(seen.get(key, 0) for key in keys)
        places.append(place)
        seen.update(dict.fromkeys(keys, place + 1))
    return places


def _requests(place: int, batch: int) -> range:
    return range(place * batch, (place + 1) * batch)


def _pattern(
    case: Case,
    ends: list[Ends],
    links: list[LinkWork],
    prefill_ranks: list[range],
    decode_ranks: list[range],
    places: int,
    verify: bool,
) -> Pattern:
    def work(role: Role, agent: int, ranks: range) -> StationWork | None:
        own = tuple(
            link
            for end, link in zip(ends, links, strict=True)
            if (end.prefill if role == "prefill" else end.decode) == agent
        )
        return StationWork(case, role, ranks, places * case.batch, own, verify) if own else None

    return Pattern(
        tuple(ends),
        tuple(work("prefill", agent, ranks) for agent, ranks in enumerate(prefill_ranks)),
        tuple(work("decode", agent, ranks) for agent, ranks in enumerate(decode_ranks)),
    )


def _of_ranks(case: Case, prefill: int, decode: int, verify: bool) -> Pattern:
    """Return the pattern in which agents share the ranks of their side."""
    sources, targets = _shares(case.tp[0], prefill, "prefill"), _shares(case.tp[1], decode, "decode")
    moves = _rank_pairs(case)
    ends, links = list[Ends](), list[LinkWork]()
    for at, own in enumerate(sources):
        for to, theirs in enumerate(targets):
            if any(src in own and dst in theirs for src, dst in moves):
                ends.append(Ends(len(ends), at, to))
                links.append(LinkWork(len(links), range(case.batch), own, theirs))
    return _pattern(case, ends, links, sources, targets, 1, verify)


def _shares(tp_size: int, agents: int, role: Role) -> list[range]:
    """Return the ranks of each agent. Raises InputError where they cannot be shared out evenly."""
    if tp_size % agents:
        raise InputError(
            f"tp {tp_size} of the {role} side cannot be shared out over {agents} {role} agents; "
            f"take a tp that is a multiple of {agents}"
        )
    share = tp_size // agents
    return [range(agent * share, (agent + 1) * share) for agent in range(agents)]


def _rank_pairs(case: Case) -> set[tuple[int, int]]:
    """Return (source rank, destination rank) of everything that moves in the case's model."""
    config = load_config(case.model)
    specs = layer_specs(config, block_size=case.block_size[0], kv_cache_dtype=case.kv_cache_dtype)
    chosen = list(specs.values())[: case.layers]
    sharding = state_sharding(config)

    found = set(chosen)
    return {(move.src_rank, move.dst_rank) for spec in found for move in transfers(spec, *case.tp, sharding)}
