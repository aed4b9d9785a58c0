"""Boxes: parts of a layout that are copied without the rest."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Cut:
    """Copy count steps of an axis, from step src on at the source to step dst on at the destination."""

    axis: str
    src: int
    dst: int
    count: int


@dataclass(frozen=True)
class Box:
    """One block of elements: what the cuts say of their axes, and all of the others.

    part: name of the layout's part, see pdtx.layout.Part; "" is every part.
    """

    cuts: tuple[Cut, ...] = ()
    part: str = ""
