"""The reference is what the code says, and names everything public."""

from __future__ import annotations

import ckptkit
from tests import edits_pages, reference


def test_it_is_current() -> None:
    """`python -m tests.reference` writes it anew."""
    assert reference.PAGE.read_text(encoding="utf-8") == reference.page()


def test_pages_of_options_and_edits_are_current() -> None:
    """`python -m tests.edits_pages` writes them anew."""
    assert edits_pages.PAGE.read_text(encoding="utf-8") == edits_pages.page()
    assert edits_pages.RECIPES.read_text(encoding="utf-8") == edits_pages.recipes()


def test_every_public_name_is_in_a_group() -> None:
    named = {name for names in reference.GROUPS.values() for name in names}
    assert {*ckptkit.__all__} - {"__version__", "CkptkitError"} <= named


def test_everything_public_has_a_docstring() -> None:
    assert "\n```\n\n\n" not in reference.page()
