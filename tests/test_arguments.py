"""What callers may give where a number, several or a time is asked for."""

from typing import Any

import numpy as np
import pytest
import torch

from pdtx.arguments import integer, integers, seconds
from pdtx.errors import InputError


@pytest.mark.parametrize("value", [40, np.int64(40), np.uint8(40), np.array(40), torch.tensor(40), torch.tensor([40])])
def test_integers_of_all_kinds_become_an_int(value: object) -> None:
    found = integer("n", value, 0, 40)
    assert (type(found), found) == (int, 40)


@pytest.mark.parametrize(
    "value", [40.0, "40", b"40", None, [40], torch.tensor(40.0), torch.tensor([4, 0]), torch.empty((), device="meta")]
)
def test_what_is_no_integer_is_refused(value: object) -> None:
    with pytest.raises(InputError, match=r"^n is .*; give an integer$"):
        integer("n", value, 0, 40)


@pytest.mark.parametrize("value", [-1, 41, 2**70, torch.tensor(-1)])
def test_an_integer_outside_its_bounds_is_refused(value: object) -> None:
    with pytest.raises(InputError, match=r"^n is -?[0-9]+; give 0 to 40$"):
        integer("n", value, 0, 40)


@pytest.mark.parametrize("values", [[3, 4], (3, 4), np.array([3, 4]), torch.tensor([3, 4]), [np.int64(3), 4]])
def test_lists_of_all_kinds_become_a_list_of_int(values: object) -> None:
    found = integers("ids", values, 3, 4)
    assert found == [3, 4]
    assert [type(each) for each in found] == [int, int]


@pytest.mark.parametrize("values", [None, 3, "34", [3.0], [[3], [4]], np.zeros((1, 1), int), torch.ones(2), [3, None]])
def test_what_is_no_list_of_integers_is_refused(values: object) -> None:
    with pytest.raises(InputError, match=r"^ids is .*; give a list of integers$"):
        integers("ids", values, 0, 9)


@pytest.mark.parametrize("values", [[3, -1], [10, 3]])
def test_each_integer_of_a_list_must_be_in_bounds(values: list[int]) -> None:
    with pytest.raises(InputError, match=r"^one of ids is -?[0-9]+; give 0 to 9$"):
        integers("ids", values, 0, 9)


@pytest.mark.parametrize("value", [3, 3.0, np.float32(3), np.int64(3), torch.tensor(3.0)])
def test_times_of_all_kinds_become_a_float(value: object) -> None:
    found = seconds("t", value)
    assert (type(found), found) == (float, 3.0)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1, -0.1, 2e9, 10**400, "3", b"3", None, 3j, [3.0]])
def test_what_is_no_time_is_refused(value: Any) -> None:  # noqa: ANN401
    with pytest.raises(InputError, match=r"^t is .*; give seconds from 0 to 1e\+09$"):
        seconds("t", value)
