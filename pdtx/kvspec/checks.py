"""Checks that every spec makes of its fields, with errors that name class, field and value."""

from collections.abc import Collection

from pdtx.errors import SpecError


def require_positive(spec: object, *fields: str, least: int = 1) -> None:
    """Raise SpecError unless every named field of spec is an int of `least` or more."""
    for field in fields:
        value = getattr(spec, field)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise SpecError(f"{type(spec).__name__}.{field} must be an int of {least} or more, not {value!r}")


def require_positive_or_none(spec: object, *fields: str) -> None:
    """Raise SpecError unless every named field of spec is None or an int of 1 or more."""
    require_positive(spec, *(field for field in fields if getattr(spec, field) is not None))


def require_one_of(spec: object, field: str, known: Collection[object]) -> None:
    """Raise SpecError unless the named field of spec has one of the known values."""
    value = getattr(spec, field)
    if value not in known:
        raise SpecError(f"{type(spec).__name__}.{field} must be one of {', '.join(map(str, known))}, not {value!r}")


def require_page(spec: object, unpadded: int, padded: int | None) -> None:
    """Raise SpecError unless a page has a byte at least and its padding does not cut it off."""
    if unpadded < 1:
        raise SpecError(f"{type(spec).__name__}: a page of {unpadded} bytes holds nothing; check its sizes")
    if padded is None:
        return
    require_positive(spec, "page_size_padded")
    if padded < unpadded:
        raise SpecError(f"page_size_padded {padded} is smaller than the page, {unpadded} bytes")
