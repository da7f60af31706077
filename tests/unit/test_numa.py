"""Lists of processors, as the kernel writes them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from v100ctl.plan.numa import format_cpus, parse_cpus


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("", set()),
        ("0", {0}),
        ("0-3,8", {0, 1, 2, 3, 8}),
        ("7,0-1", {0, 1, 7}),
        ("x", set()),
        ("3-1", set()),
        ("1-", {1}),
        (" 4 ", {4}),
        ("\u00b2", set()),
        ("9" * 5000, set()),
        ("0-4294967295", set()),
        ("65530-999999", {65530, 65531, 65532, 65533, 65534, 65535, 65536}),
    ],
)
def test_reading(text: str, numbers: set[int]) -> None:
    assert parse_cpus(text) == numbers


@given(st.sets(st.integers(0, 4096)))
def test_writing_is_what_reading_takes(numbers: set[int]) -> None:
    text = format_cpus(numbers)
    assert parse_cpus(text) == numbers
    # Neighbours are one range: two lists are equal where their numbers are.
    assert format_cpus(parse_cpus(text)) == text
