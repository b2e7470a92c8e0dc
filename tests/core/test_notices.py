"""Codes of warnings and of errors: what code asks instead of reading messages."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Iterator

import pytest

from ckptkit.core.errors import CkptkitError, FormatError, Notice, __name__, coded, within

NOTICE = Notice("some-code", "3 of them are odd", count=3)


def test_a_notice_is_its_text() -> None:
    assert NOTICE == "3 of them are odd" and f"{NOTICE}" == "3 of them are odd"
    assert json.dumps([NOTICE]) == '["3 of them are odd"]'
    assert {NOTICE: 1}["3 of them are odd"] == 1


@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, lambda it: pickle.loads(pickle.dumps(it))])  # fmt: skip
def test_a_copy_keeps_code_and_facts(again: object) -> None:
    made = again(NOTICE)  # type: ignore[operator]
    assert (made, made.code, made.facts) == (NOTICE, "some-code", {"count": 3})


def test_a_place_before_a_notice_keeps_its_code() -> None:
    found = within("a.bin", NOTICE)
    assert found == "a.bin: 3 of them are odd"
    assert coded(["some-code", found, Notice("other", "x")], "some-code") == [found]
    assert type(within("a.bin", "plain")) is str


def classes(base: type[CkptkitError] = CkptkitError) -> Iterator[type[CkptkitError]]:
    yield base
    for each in base.__subclasses__():
        yield from classes(each)


def test_every_class_of_errors_has_a_code_of_its_own() -> None:
    codes = [each.code for each in {*classes()} if each.__module__ == __name__]
    assert len(codes) > 15 and len({*codes}) == len(codes)


def test_an_error_may_say_more_than_its_class() -> None:
    error = pickle.loads(pickle.dumps(FormatError("x", where="y", code="odd")))
    assert (error.code, error.where, FormatError("x").code) == ("odd", "y", "format")


def test_the_hint_is_a_note_beside_others() -> None:
    error = FormatError("x", hint="first")
    error.add_note("of the caller")
    error.hint = "second"
    for each in (error, copy.copy(error), pickle.loads(pickle.dumps(error))):
        assert (each.hint, each.__notes__) == ("second", ["hint: second", "of the caller"])
    error.hint = None
    assert error.__notes__ == ["of the caller"]


def test_a_hint_without_a_file_prints_no_command_line() -> None:
    error = CkptkitError("is wrong", hint="`ckptkit convert {where} {new} --compact` mends it")
    assert error.hint == "`convert --compact` mends it"
    assert error.at("a.pth").hint == "`ckptkit convert a.pth a-new.pth --compact` mends it"


def test_a_hint_names_the_file_once_it_is_known() -> None:
    error = CkptkitError("is wrong", hint="`convert {where} {new}` mends it")
    error.add_note("of the caller")
    assert error.hint == "`convert` mends it"
    hint = "`convert 'a b.pth.tar' 'a b-new.pth.tar'` mends it"
    assert error.at("a b.pth.tar").hint == hint
    again = pickle.loads(pickle.dumps(error))
    assert error.__notes__ == again.__notes__ == [f"hint: {hint}", "of the caller"]
    error.where = "-x.pth"  # else an option
    assert error.hint == "`convert ./-x.pth ./-x-new.pth` mends it"
    error.where = "s3://bucket/run.pth.gz"
    assert error.hint == "`convert s3://bucket/run.pth.gz run-new.pth` mends it"
    error.hint = None
    assert error.__notes__ == ["of the caller"]
