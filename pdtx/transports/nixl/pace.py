"""How often to look at what NIXL does: it has no descriptor to wait for, and its own thread would spin."""

import time

_EAGER_S = 0.05
_AWAKE_S = 5.0
_EAGER_REST_S = 20e-6
_AWAKE_REST_S = 200e-6
_IDLE_REST_S = 0.02


class Pace:
    """Rests between looks: very short ones for 50 ms, short ones for 5 s, longer ones then."""

    def __init__(self) -> None:
        self._begun = time.monotonic()

    def next(self) -> float:
        """Return how many seconds to rest."""
        waited = time.monotonic() - self._begun
        if waited < _EAGER_S:
            return _EAGER_REST_S
        return _AWAKE_REST_S if waited < _AWAKE_S else _IDLE_REST_S

    def rest(self) -> None:
        """Rest once."""
        time.sleep(self.next())
