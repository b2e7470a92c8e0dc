"""Plans: what they are made of."""

from __future__ import annotations

import pickle
from dataclasses import replace

from ckptkit.compute.operation import Swap
from ckptkit.core.bytesource import Derived, Memory, Range
from ckptkit.core.plan import OutputFile, Plan


def test_a_plan_says_what_it_is_made_of() -> None:
    source = Memory(bytes(100))
    derived = Derived(Swap(4), (Range(source, 0, 8),), 8)
    plan = Plan((OutputFile("", (b"abc", Range(source, 0, 50), derived)),))
    assert str(plan) == "output: 61 bytes: 50 copied, 8 computed, 3 written in 3 segments"


def test_the_size_of_a_file_goes_with_it() -> None:
    file = OutputFile("a", (b"12", Range(Memory(bytes(9)), 1, 5)))
    assert (file.size, pickle.loads(pickle.dumps(file)).size) == (7, 7)
    assert replace(file, segments=(b"1",)).size == 1
