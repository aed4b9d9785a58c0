"""How the states of a recurrent layer divide over tensor-parallel ranks."""

from dataclasses import dataclass

from pdtx.errors import SpecError


@dataclass(frozen=True, kw_only=True)
class Segment:
    """A part of a convolution's channels that ranks share among themselves: Mamba 2's x, B and C, for example.

    channels: of the whole model. units: the heads or groups that they are made of, which are never cut; with more ranks
    than units, units are copied. Raises SpecError if units do not divide channels.
    """

    name: str
    channels: int
    units: int

    def __post_init__(self) -> None:
        if self.units < 1 or self.channels < 1 or self.channels % self.units:
            raise SpecError(f"segment {self.name}: {self.channels} channels are not {self.units} equal units")


@dataclass(frozen=True, kw_only=True)
class StateSharding:
    """What of a MambaSpec's states goes to which rank.

    A rank's convolution state holds the rank's share of each segment, one behind the other ([x | B | C] on every
    rank), so that the states of two tensor-parallel sizes differ by more than one cut.

    conv: the segments of each convolution state, in the order of the spec's shapes.
    heads: what the first dimension of the recurrent state counts, and ranks share; 0 where there is none.
    """

    conv: tuple[tuple[Segment, ...], ...]
    heads: int
