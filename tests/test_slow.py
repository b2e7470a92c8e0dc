"""The table of slow cases: every test in it exists, and no test is left out without another."""

from __future__ import annotations

import ast

from tests.conftest import ROOT
from tests.slow import KEPT, is_slow, unmatched


def test_every_test_of_the_table_exists() -> None:
    for test in KEPT:
        file, _, name = test.partition("::")
        tree = ast.parse((ROOT / "tests" / file).read_text())
        assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, test


def test_cases_that_are_kept_and_cases_that_are_slow() -> None:
    test = "tests/test_cost_model.py::test_bytes"
    assert [is_slow(f"{test}[{case}]") for case in ("large-pth", "small-pth")] == [False, True]
    assert not is_slow("tests/test_cost_model.py::test_calls_of_an_upload")
    assert is_slow("tests/run/test_batch.py::test_thousands_of_small_files")


def test_a_case_that_is_gone_is_named() -> None:
    kept = "core/test_tree.py::test_rebuild_any_depth"
    assert unmatched([f"tests/{kept}[{kind}]" for kind in ("dict", "list", "tuple")]) == [
        f"{kept}[state]"
    ]


def test_continuous_integration_runs_them() -> None:
    assert "run .venv/bin/python -m pytest -m slow" in (ROOT / ".ci/run").read_text().splitlines()
