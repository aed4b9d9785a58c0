import pytest

from pdtx.errors import InputError
from pdtx.units import format_bytes, format_rate, format_seconds, gb_per_s, parse_bytes


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1, "1 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (65_536, "64 KiB"),
        (1_536, "1.50 KiB"),
        (4_128_768, "3.94 MiB"),
        (2**30, "1 GiB"),
        (2**40, "1 TiB"),
        (2**50, "1024 TiB"),
        (-2048, "-2 KiB"),
    ],
)
def test_format_bytes(nbytes: int, text: str) -> None:
    assert format_bytes(nbytes) == text


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("0", 0),
        ("17", 17),
        ("17B", 17),
        ("64KiB", 65_536),
        ("64k", 65_536),
        (" 64 K ", 65_536),
        ("1kb", 1000),
        ("256M", 256 * 2**20),
        ("1MB", 10**6),
        ("1.5GB", 1_500_000_000),
        ("1.5GiB", 3 * 2**29),
        ("2T", 2**41),
    ],
)
def test_parse_bytes(text: str, nbytes: int) -> None:
    assert parse_bytes(text) == nbytes


@pytest.mark.parametrize("text", ["", "KiB", "-1", "1.2.3", "12 parsecs", "0x10", "1e6", "1 2"])
def test_parse_bytes_refuses(text: str) -> None:
    with pytest.raises(InputError, match=r"not a size: .*64KiB"):
        parse_bytes(text)


@pytest.mark.parametrize("exponent", range(0, 50, 7))
def test_what_is_formatted_whole_parses_back(exponent: int) -> None:
    assert parse_bytes(format_bytes(2**exponent)) == 2**exponent


def test_rate_in_the_fields_units() -> None:
    """2^30 bytes in 0.1 s: the row that confuses GB, GiB and Gb."""
    assert format_rate(2**30, 0.1) == "10.737 GB/s = 10.000 GiB/s = 85.899 Gb/s"
    assert gb_per_s(2**30, 0.1) == pytest.approx(10.737, abs=5e-4)


@pytest.mark.parametrize("seconds", [0.0, -1.0])
def test_no_rate_without_time(seconds: float) -> None:
    assert gb_per_s(1, seconds) == 0.0
    assert format_rate(1, seconds) == "n/a"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(2.0, "2 s"), (61.25, "61.2 s"), (0.00123, "1.23 ms"), (4.5e-5, "45 us"), (7e-9, "7 ns"), (0.0, "0 ns")],
)
def test_format_seconds(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text
