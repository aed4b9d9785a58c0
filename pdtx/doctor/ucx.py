"""UCX: which libraries are here, whether they have verbs, and settings that change what is measured."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pdtx.doctor.finding import Finding, Level, Want
from pdtx.doctor.machine import Machine

_SUBJECT = "UCX"
_VERBS = "libuct_ib"
_VERBS_WORDS = ("rc", "ud", "dc", "ib", "srd")
_HOST_WORDS = ("self", "posix", "sysv", "cma", "knem", "xpmem", "sm", "shm", "mm")
_GET_VERBS = (
    "take a UCX built with verbs: --mover nixl (its wheel has one), --mover-option library=nixl, or a system UCX of "
    "1.18 or newer with RAPIDS_LIBUCX_PREFER_SYSTEM_LIBRARY=true"
)


@dataclass(frozen=True)
class Copy:
    """A libucp that could be loaded. origin: wheel, system or nixl."""

    origin: str
    path: Path

    def has_verbs(self, machine: Machine) -> bool:
        """Whether UCX finds the module for verbs cards: in UCX_MODULE_DIR, or in the folder ucx beside the library."""
        chosen = machine.environ.get("UCX_MODULE_DIR")
        folders = [Path(chosen)] if chosen else [self.path.parent / "ucx", self.path.resolve().parent / "ucx"]
        return any(folder.is_dir() and any(folder.glob(f"{_VERBS}.so*")) for folder in folders)


def find_copies() -> list[Copy]:
    """Return the UCX libraries that pdtx could load here, in the order in which it would."""
    from pdtx.transports.ucx import library

    finders = {library.WHEEL: library.wheel_path, library.SYSTEM: library.system_path, library.NIXL: library.nixl_path}
    return [Copy(origin, path) for origin, find in finders.items() if (path := find()) is not None]


def check_ucx(machine: Machine, copies: Sequence[Copy]) -> Iterator[Finding]:
    """Judge the libraries and the settings."""
    if not copies:
        fix = "pip install 'pdtx[ucx]' (ucxx-cu13 with CUDA 13), or a system UCX of 1.18 or newer"
        yield Finding(subject=_SUBJECT, name="libraries", value="none", fix=fix, stops=("ucx", "rdma"))
    verbs = {copy.origin: copy.has_verbs(machine) for copy in copies}
    for copy in copies:
        words = "with verbs" if verbs[copy.origin] else "without verbs: tcp and shared memory only, never RDMA"
        yield Finding(subject=_SUBJECT, name=f"library {copy.origin}", value=f"{copy.path} {words}")
    if copies and not any(verbs.values()):
        yield Finding(subject=_SUBJECT, name="verbs", value="in none of them", fix=_GET_VERBS, stops=("rdma",))
    elif copies and not verbs[copies[0].origin]:
        value = f"not in the one that --mover ucx takes ({copies[0].origin})"
        yield Finding(subject=_SUBJECT, name="verbs", value=value, fix=_GET_VERBS)
    usual = copies[0].origin if copies else "none"
    yield from check_settings(machine, usual, verbs)


def check_settings(machine: Machine, usual: str, verbs: Mapping[str, bool]) -> Iterator[Finding]:
    """Judge UCX_*. usual: the library that --mover ucx takes; verbs: which of them have verbs."""
    given = {name: value for name, value in sorted(machine.environ.items()) if name.startswith("UCX_")}
    value = " ".join(f"{name}={text}" for name, text in given.items()) or "none set"
    yield Finding(subject=_SUBJECT, name="settings", value=value)
    if "UCX_TLS" in given:
        yield _transports(given["UCX_TLS"], usual, verbs)
    yield _threshold(given.get("UCX_RNDV_THRESH"))
    yield _devices(machine, given.get("UCX_NET_DEVICES"))


def _setting(name: str, value: str, level: Level = "ok", fix: str = "", stops: tuple[Want, ...] = ()) -> Finding:
    return Finding(subject=_SUBJECT, name=name, value=value, level=level, fix=fix, stops=stops)


def _transports(text: str, usual: str, verbs: Mapping[str, bool]) -> Finding:
    name, words = "UCX_TLS", [word.strip().lower() for word in text.lstrip("^").split(",")]
    if text.startswith("^") or "all" in words:
        return _setting(name, text)
    rdma = [word for word in words if word.split("_")[0] in _VERBS_WORDS]
    if rdma and not verbs.get(usual):
        # The trap: with rc,tcp such a UCX starts on tcp, and figures of TCP would pass for RDMA's.
        value = f"{text}, but the UCX of --mover ucx ({usual}) has no {', '.join(rdma)} and takes what else is named"
        return _setting(name, value, "warning", _GET_VERBS, () if any(verbs.values()) else ("rdma",))
    if not rdma:
        value = f"{text}: no RDMA"
        if all(word in _HOST_WORDS for word in words):
            fix = "add tcp: without a network transport UCX cannot notice that a peer is gone, and refuses to connect"
            return _setting(name, value, "warning", fix, ("ucx", "rdma"))
        return _setting(name, value, fix="unset it, or add rc and ud, for RDMA", stops=("rdma",))
    return _setting(name, text)


def _threshold(text: str | None) -> Finding:
    name = "UCX_RNDV_THRESH"
    if text is None:
        return _setting(name, "not set; pdtx sets inf, which keeps puts and gets out of software")
    if text == "inf":
        return _setting(name, text)
    value = f"{text}: with peer error handling every put and get becomes an emulation, several times slower"
    return _setting(name, value, "warning", "unset UCX_RNDV_THRESH, or set it to inf")


def _devices(machine: Machine, text: str | None) -> Finding:
    name = "UCX_NET_DEVICES"
    cards = [
        card for card in machine.names("/sys/class/net") if machine.text(f"/sys/class/net/{card}/operstate") == "up"
    ]
    ports = machine.names("/sys/class/infiniband")
    if text is None:
        several = len(cards) + len(ports) > 1
        fix = f"choose one, for example UCX_NET_DEVICES={f'{ports[0]}:1' if ports else cards[0]}" if several else ""
        value = "not set: UCX chooses, and may divide the bytes among " + ", ".join([*ports, *cards])
        return _setting(name, value if several else "not set", "warning" if several else "ok", fix)
    known = {*machine.names("/sys/class/net"), *ports, "lo", "all"}
    unknown = [one for one in text.split(",") if one.partition(":")[0] not in known]
    if unknown:
        fix = f"name one of {', '.join(sorted(known - {'all'}))}"
        return _setting(name, f"{text}: there is no {', '.join(unknown)}", "warning", fix, ("ucx", "nixl", "rdma"))
    return _setting(name, text)
