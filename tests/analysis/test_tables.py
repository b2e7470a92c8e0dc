"""The table of tensors: one row for those that differ in an index and in nothing that is shown."""

from __future__ import annotations

from dataclasses import replace

from ckptkit.analysis import columns, view_model
from ckptkit.analysis.summary import summarize
from ckptkit.core.dtypes import BY_NAME
from ckptkit.core.tensor import Tensor
from tests.analysis.made import checkpoint, tensor, view


def odd_ones() -> list[Tensor]:
    """Return tensors that differ from a plain one in one thing that is shown, and in no other."""
    plain, pair, wide = tensor(1, 2), tensor(1, 2), tensor(1, 2, 3)
    return [
        replace(plain, storage=tensor(1, 2, device="cuda:1").storage),
        replace(plain, dtype=BY_NAME["int32"]),
        tensor(1, 2, shape=(2, 1)),
        replace(tensor(1, 2), kind="ndarray"),
        replace(tensor(1, 2), neg=True),
        replace(tensor(1, 2), storage=None),
        view(wide, (2,)),
        *(pair, replace(pair)),
    ]


def test_rows_that_show_something_else_are_rows_of_their_own() -> None:
    made = [tensor(1, 2), *odd_ones(), tensor(1, 2)]
    found = summarize(checkpoint({f"l.{i}": each for i, each in enumerate(made)}))
    shown, *_ = view_model.of_checkpoint(found, found.rows).tables
    assert [name for name, *_ in shown.rows] == [
        "l.{0,10}",
        *[f"l.{i}" for i in range(1, 8)],
        "l.{8..9}",
    ]


def test_what_is_found_once_for_many_is_that_of_each() -> None:
    """What is shown of plain tensors follows from dtype, shape and device: also new facts."""
    made = [tensor(1, 2), replace(tensor(3, 4), requires_grad=True, kind="parameter")]
    made += [*odd_ones(), tensor(5, 6), replace(tensor(7, 8), offset=0, stride=(1,))]
    rows = summarize(checkpoint({f"l.{i}": each for i, each in enumerate(made)})).rows
    (flat,) = columns.tables(rows, flat=True)
    titles = [fact.title for fact in columns.BRIEF]
    shown = [dict(zip(flat.headers, row, strict=True)) for row in flat.rows]
    each = [dict(zip(titles, columns.brief(row).values(), strict=True)) for row in rows]
    assert [{title: row[title] for title in titles} for row in shown] == each


def test_selected_tensors_fold_by_the_kinds_of_all_modules() -> None:
    names = ["0.weight", "0.bias", "1.weight", "2.weight", "2.bias"]
    root = {"model": {name: tensor(1) for name in names}, "moments": {"0.bias": tensor(1)}}
    found = summarize(checkpoint(root))
    selected = [row for row in found.rows if row.label.endswith("weight")]
    shown, *_ = view_model.of_checkpoint(found, selected).tables
    assert [name for name, *_ in shown.rows] == ["{0,2}.weight", "1.weight"]


def test_weights_and_others_are_not_one_row() -> None:
    found = summarize(checkpoint({"model": {"x.0": tensor(1)}, "x": {"1": tensor(1)}}))
    weights, others, *_ = view_model.of_checkpoint(found, found.rows).tables
    assert (weights.title, weights.total, weights.rows[0][0]) == ("", 1, "x.0")
    assert (others.title, others.total, others.rows[0][0]) == ("other tensors", 1, "x.1")
