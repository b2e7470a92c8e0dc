"""The benchmarks themselves: their arithmetic, that contestants take turns, and that every command
does its work."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests import forked
from tests.benchmarks import inputs, peers
from tests.benchmarks.__main__ import DOCUMENTS, MARKS, RESULTS, ROOT, main, ours
from tests.benchmarks.inputs import SMALL, Input
from tests.benchmarks.measure import Contestant, Cost, FailedError, Taken, run, take_turns
from tests.benchmarks.picture import STYLES
from tests.benchmarks.report import brief, kept, report
from tests.benchmarks.results import CP, OURS, Row, from_json, to_json
from tests.benchmarks.works import WORKS, Budget, Work, cases
from tests.conftest import Run


def taken(*seconds: float | None, mib: float = 20.0) -> Taken:
    return Taken([None if each is None else Cost(each, each, mib) for each in seconds])


ROW = Row(
    work="strip-module",
    gib=2.0,
    tensors=400,
    budget=Budget(to_cp=1.25, mib=40),
    taken={OURS: taken(1.2, 0.9, 1.0), CP: taken(1.0, 1.0, 0.5), "torch": taken(8.0, None, 6.0)},
    skipped={"mergekit": "not installed"},
)


# arithmetic


def test_medians_and_ratios() -> None:
    assert ROW.seconds() == 1.0
    assert ROW.ratio() == 1.2  # of 1.2, 0.9 and 2.0
    assert ROW.ratio("torch") == (8.0 + 12.0) / 2  # of the rounds in which both ran
    assert ROW.mib() == 20
    assert ROW.torch == "torch"
    assert ROW.ratio("nobody") is None
    assert ROW.seconds("nobody") is None


@pytest.mark.parametrize(
    ("budget", "within"),
    [
        *((Budget(to_cp=limit), limit >= 1.2) for limit in (1.2, 1.19)),
        *((Budget(seconds=limit), limit >= 1.0) for limit in (1.0, 0.99)),
        *((Budget(mib=limit), limit >= 20) for limit in (20, 19)),
        *((Budget(to_torch=limit), limit >= 0.16) for limit in (0.16, 0.15)),
        (Budget(to_cp=1.2, mib=19), False),
        (Budget(), None),
    ],
)
def test_budgets(budget: Budget, within: bool | None) -> None:
    assert replace(ROW, budget=budget).within is within


def test_ratios_of_small_inputs_are_not_judged() -> None:
    small = replace(ROW, gib=0.5, budget=Budget(to_cp=0.1, to_torch=0.1))
    assert small.within is None
    assert replace(small, budget=Budget(seconds=0.1)).within is False


def test_what_failed_kept_no_budget() -> None:
    ran = {OURS: Taken([Cost(1, 1, 1), None], "boom"), CP: taken(1.0, 1.0)}
    failed = replace(ROW, budget=Budget(), taken=ran)
    assert failed.within is False
    assert not kept([failed])
    assert "strip-module, 2 GiB: ckptkit failed: boom" in report({}, [failed])


def test_the_rounds_of_two_runs_are_one_row() -> None:
    """Who took no part in one of them did not fail."""
    slower = {**ROW.taken, OURS: taken(3.0, 3.0, 3.0, mib=50), "peer": taken(5.0)}
    both = ROW.plus(replace(ROW, taken=slower))
    assert (both.seconds(), both.mib(), both.within) == (2.1, 50, False)
    assert both.ratio() == (2.0 + 3.0) / 2
    assert both.ratio("peer") == 5.0
    assert from_json(json.loads(json.dumps(to_json(both)))) == both
    text = report({"cores": 2}, [both], ["a note"])
    assert "| 2.50 x cp, 50 MiB" in text and "| 1.25 x cp, 40 MiB" in text and "| NO" in text
    assert "torch: 10.00 x cp, 20 MiB" in text and "peer: 5.00 x cp, 20 MiB" in text
    assert "- mergekit was skipped: not installed" in text and "- a note" in text
    assert not kept([both])


# turns


def test_contestants_take_turns(tmp_path: Path) -> None:
    (tmp_path / "input").write_text("as it was")
    log = "test ! -e out.txt && {}; echo {} >> log"

    def says(name: str, script: str = "true", **options: Any) -> Contestant:
        return Contestant(name, ["sh", "-c", log.format(script, name)], **options)

    change = "echo changed >> out.copy; cp out.copy seen"
    contestants = [
        says("one", change, source="input", fresh="out.copy"),
        says("two", "touch out.txt"),
        says("rare", every=2),
        Contestant("bad", ["sh", "-c", "echo bad >> log; echo why >&2; exit 3"]),
    ]
    rounds = take_turns(contestants, tmp_path, 3)
    order = (tmp_path / "log").read_text().split()
    assert order == ["one", "two", "rare", "bad", "two", "one", "one", "two", "rare"]
    assert (tmp_path / "seen").read_text() == "as it waschanged\n"  # a fresh copy each time
    assert [cost is None for cost in rounds["rare"].costs] == [False, True, False]
    assert rounds["bad"] == Taken([None, None, None], "why")
    cost = rounds["one"].costs[0]
    assert cost is not None and cost.seconds > 0 and cost.mib > 0


def test_a_failure_says_why(tmp_path: Path) -> None:
    with pytest.raises(FailedError, match="exit code 3"):
        run(["sh", "-c", "exit 3"], tmp_path)


# what is measured


def test_cases() -> None:
    found = list(cases([8, 2, 0.5], [1_000, 100_000], ""))
    inputs_in_order = [case.input for case in found]
    firsts = list(dict.fromkeys(inputs_in_order))
    assert inputs_in_order == sorted(inputs_in_order, key=firsts.index)
    strips = {case.input.gib: case.peers for case in found if case.work.name == "strip-module"}
    assert strips == {0.5: True, 2: True, 8: False}
    assert [case.input.gib for case in found if case.work.name == "digest"] == [2]
    inspected = {case.input.tensors for case in found if case.work.name == "inspect"}
    assert inspected == {400, 1_000, 100_000}
    (only,) = cases([2], [], "in-place, safe")
    assert only.work.name == "strip-module --in-place, safetensors"


def test_what_has_no_room_says_so(tmp_path: Path) -> None:
    assert not Input("pth", 0.001, 400).lacks(tmp_path, 1)
    lacks = Input("pth", 1e9, 400).lacks(tmp_path, 1)
    assert lacks.startswith("needs 2000000000.5 GiB, ")
    assert lacks.endswith(" are free")


TENSORS = 5


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the small inputs, each made when a test asks for it."""
    return tmp_path_factory.mktemp("inputs")


def source(folder: Path, kind: str, gib: float = SMALL, tensors: int = TENSORS) -> Path:
    """Return an input of this kind, made unless it is there."""
    made = Input(kind, gib, tensors)
    if not (folder / made.path).exists():
        done = forked.program(*made.program[1:], cwd=folder)
        assert done.returncode == 0, done.output
    return folder / made.path


OF_PROCESSES = ("dcp", "ranks")  # inputs that several processes make


@pytest.mark.parametrize(
    "work", [each for each in WORKS if each.kind not in OF_PROCESSES], ids=lambda work: work.name
)
def test_our_commands(work: Work, folder: Path, tmp_path: Path, alone: Run) -> None:
    path = source(folder, work.kind)
    fresh = tmp_path / f"out{path.suffix}"
    if "{fresh}" in work.command:
        (shutil.copytree if path.is_dir() else shutil.copy)(path, fresh)
    if not work.command:
        command = ours(work, {"src": str(path)})
        subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
        return
    words = [word.format(src=path, twin=path, fresh=fresh) for word in shlex.split(work.command)]
    done = alone(*words, cwd=tmp_path)
    assert done.code == ("differ" in work.name), done.stderr
    assert len(list(tmp_path.glob("out*"))) == (
        1 if "out" in work.command or "{fresh}" in work.command else 0
    )
    if "{fresh}" in work.command:
        assert content(fresh) != content(path)


def content(path: Path) -> list[bytes]:
    """Return the bytes of a file, or of all files of a folder, in order."""
    files = sorted(each for each in path.rglob("*") if each.is_file()) if path.is_dir() else [path]
    return [each.read_bytes() for each in files]


RAN_HERE = [
    (work.job, work.kind, name)
    for work in WORKS
    for name in peers.PROGRAMS[work.job]
    if name in peers.TORCH and work.kind not in OF_PROCESSES
]


@pytest.mark.parametrize(("job", "kind", "name"), dict.fromkeys(RAN_HERE))
def test_what_torch_does(
    job: str, kind: str, name: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plain ways, in this process: what they write is what the work is about."""
    path = source(folder, kind)
    monkeypatch.setattr(sys, "argv", ["-c", str(path), str(path)])
    monkeypatch.chdir(tmp_path)
    exec(peers.PROGRAMS[job][name], {})
    stem = "l" if kind == "lora" else "module.layers"
    names = [f"{stem}.{i}.weight" for i in range(TENSORS)]
    outs = list(tmp_path.iterdir())
    nothing = (*peers.LIBRARY, "digest", "equal", "stats", "close", "differ")
    assert len(outs) == (job not in nothing and not job.startswith("list"))
    for out in outs:
        state = (
            load_file(out) if out.suffix == ".safetensors" else torch.load(out, map_location="cpu")
        )
        stripped = [each.removeprefix("module.") if "strip" in job else each for each in names]
        assert list(state) == (["w"] if kind == "matrix" else stripped)
        dtypes = {"cast": torch.bfloat16, "lora": torch.bfloat16, "transpose": torch.uint8}
        dtype = dtypes.get(job, torch.float32)
        if job.startswith("cast to "):
            dtype = getattr(torch, job.removeprefix("cast to "))
        assert {each.dtype for each in state.values()} == {dtype}


def test_optional_peers_are_valid_programs() -> None:
    for job, programs in peers.PROGRAMS.items():
        for name, program in programs.items():
            compile(program, f"{job}: {name}", "exec")
    moved = r"""move: {from: "module\\\\.(.+)", to: "\\\\1"}"""
    assert moved in peers.PROGRAMS["strip"]["brainsurgery"]


def test_inputs_have_their_size(tmp_path: Path) -> None:
    state = load_file(source(tmp_path, "safetensors", 1 / 64, 4))
    assert sum(tensor.nbytes for tensor in state.values()) == 16 << 20
    assert len(state) == 4
    assert set(inputs.PROGRAMS) >= {work.kind for work in WORKS}


# the whole


def test_a_small_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "room").mkdir()
    only = ["--only", "inspect, a small file", "--pairs", "2", "--dir", str(tmp_path / "room")]
    for more in ([], ["--append"]):
        assert main([*only, *more, "--out", str(tmp_path)]) in (0, 1)
        shown = capsys.readouterr().out
    assert not list((tmp_path / "room").iterdir())
    facts = json.loads((tmp_path / RESULTS).read_text())
    assert facts["schema"] == "ckptkit.benchmarks/1"
    (row,) = map(from_json, facts["rows"])
    assert row.work == "inspect, a small file"
    assert len(row.costs(OURS)) == 4 and all(cost.cpu > 0 for cost in row.costs(OURS))
    assert all(list(cost) == [round(each, 4) for each in cost] for cost in row.costs(OURS))
    for name in DOCUMENTS:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(
            "before <!-- benchmarks -->old<!-- end of benchmarks --> after"
        )
    main(["--show", "--out", str(tmp_path), "--refresh", str(tmp_path)])
    assert capsys.readouterr().out == shown
    full, users, front = ((tmp_path / name).read_text() for name in DOCUMENTS)
    assert full == f"before <!-- benchmarks -->\n{shown.rstrip()}\n<!-- end of benchmarks --> after"
    assert "| inspect, a small file | " in users
    assert "small file" not in front
    assert "| fastest alternative" in front


def test_the_best_of_the_others() -> None:
    text = brief([ROW], ["strip-module"])
    assert "| strip-module, 2 GiB | 1.20 x cp, 20 MiB | torch: 10.00 x cp, 20 MiB" in text
    assert "strip-module" not in brief([ROW], ["inspect"])


def test_the_documents_have_a_place() -> None:
    for name in DOCUMENTS:
        text = (ROOT / name).read_text(encoding="utf-8")
        assert [text.count(mark) for mark in MARKS] == [1, 1], name


def test_a_program_that_measures_its_own_part(tmp_path: Path) -> None:
    said = "import sys; print('warning: x', 'took 0.25 1e-3', sep=chr(10), file=sys.stderr)"
    cost = run([sys.executable, "-c", said], tmp_path)
    assert (cost.seconds, cost.cpu) == (0.25, 0.001)
    assert cost.mib > 1


def test_a_peer_runs_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    there = {("transformers", "b"): ""}
    monkeypatch.setattr(peers, "missing", lambda module, python: there.get((module, python), "no"))
    found, skipped = peers.commands("shards", ["a", "b"], ["in"])
    assert found["transformers"][0] == "b"
    assert not skipped
    assert peers.commands("shards", ["a"], ["in"]) == ({}, {"transformers": "no"})


def test_nobody_looks_like_another() -> None:
    drawn = (each for job, each in peers.PROGRAMS.items() if job != "start")  # copies nothing
    assert set(STYLES) == {OURS}.union(*drawn, *peers.COMMANDS.values())
    assert len({(marker, color) for marker, _, color in STYLES.values()}) == len(STYLES)


def test_the_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from tests.benchmarks.picture import draw

    many = replace(ROW, work="inspect", gib=SMALL, tensors=100_000, budget=Budget(seconds=2.5))
    for name in ("one.svg", "two.svg"):
        draw([ROW, many], "a machine", tmp_path / name)
    first, second = ((tmp_path / name).read_bytes() for name in ("one.svg", "two.svg"))
    assert first == second
    assert b"<svg" in first
    draw([], "nothing", tmp_path / "none.svg")
    assert not (tmp_path / "none.svg").exists()
