"""How much is begun ahead of what has arrived, on a clock of the test's own."""

from collections import deque

import pytest

from pdtx.transports.window import SendWindow

KIB, MIB = 1 << 10, 1 << 20


class Path:
    """A path of a rate and a delay, with all the buffers one likes; nothing waits in it but for its turn."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, rate: float, delay_s: float) -> None:
        self.now, self.free_at, self.rate, self.delay_s = 100.0, 100.0, rate, delay_s
        monkeypatch.setattr("pdtx.transports.window.time.monotonic", lambda: self.now)
        self.window = SendWindow(lambda: self.delay_s)
        self.under_way = deque[tuple[float, int, float, int]]()

    def begin(self, nbytes: int) -> bool:
        if not self.window.has_room(nbytes):
            return False
        self.free_at = max(self.free_at, self.now) + nbytes / self.rate
        self.under_way.append((self.free_at + self.delay_s, nbytes, self.now, self.window.begin(nbytes)))
        return True

    def end(self) -> bool:
        self.now, nbytes, begun_at, before = self.under_way.popleft()
        return self.window.end(nbytes, begun_at, before)

    def move(self, nbytes: int, count: int) -> float:
        """Move transfers as fast as the window lets them; returns the rate that came of it."""
        begun_at, left = self.now, count
        while left or self.under_way:
            while left and self.begin(nbytes):
                left -= 1
            self.end()
        return nbytes * count / (self.now - begun_at)


@pytest.mark.parametrize("nbytes", [1000, 32 * KIB, 4_000_000 // 31, 16 * MIB])
def test_a_slow_path_has_two_ahead_or_a_quarter_mebibyte(monkeypatch: pytest.MonkeyPatch, nbytes: int) -> None:
    path = Path(monkeypatch, rate=900_000, delay_s=0.001)
    for _ in range(50):
        while path.begin(nbytes):
            pass
        path.end()
        assert len(path.under_way) <= max(1, 256 * KIB // nbytes)


@pytest.mark.parametrize("nbytes", [32 * KIB, 4 * MIB])
@pytest.mark.parametrize(("rate", "delay_s"), [(900_000, 0.001), (3e9, 0.0001), (1.2e9, 0.01), (1.2e8, 0.2)])
def test_the_path_is_kept_busy(monkeypatch: pytest.MonkeyPatch, rate: float, delay_s: float, nbytes: int) -> None:
    """Whatever its round trip; after a while, for a long way, and again after an idle time."""
    path = Path(monkeypatch, rate, delay_s)
    for _ in range(2):
        path.move(nbytes, max(10, int(12 * delay_s * rate / nbytes)))
        assert path.move(nbytes, max(100, int(10 * delay_s * rate / nbytes))) > 0.8 * rate
        path.now += 60.0


def test_a_rate_that_falls_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    path = Path(monkeypatch, rate=1e9, delay_s=0.0001)
    path.move(MIB, 1000)
    path.rate = 900_000
    path.move(128 * KIB, 31)
    while path.begin(128 * KIB):
        pass
    assert len(path.under_way) == 2


def test_who_was_refused_is_told_of_room(monkeypatch: pytest.MonkeyPatch) -> None:
    path = Path(monkeypatch, rate=1e6, delay_s=0.001)
    assert path.begin(MIB)
    assert path.begin(MIB)
    path.end()
    assert not path.end()  # nobody was refused
    while path.begin(MIB):
        pass
    assert path.end()
    assert not path.end()


def test_an_end_between_the_two_looks_of_has_room_is_not_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    path = Path(monkeypatch, rate=1e6, delay_s=0.001)
    assert path.begin(MIB)
    assert path.begin(MIB)
    fits, told = path.window._fits, list[bool]()

    def fits_and_ends(nbytes: int) -> bool:
        fit = fits(nbytes)
        if not told:
            told.append(path.end())
        return fit

    monkeypatch.setattr(path.window, "_fits", fits_and_ends)
    assert path.window.has_room(MIB), "refused, and nobody says that there is room again"
    assert told == [False]
