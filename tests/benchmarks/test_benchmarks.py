"""The benchmarks themselves: their arithmetic, that contestants take turns, and that every command
does its work."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import ckptkit
from tests.benchmarks import inputs, peers
from tests.benchmarks.__main__ import DOCUMENTS, MARKS, RESULTS, ROOT, main, ours, put_into
from tests.benchmarks.inputs import SMALL, Input
from tests.benchmarks.measure import Contestant, Cost, FailedError, Taken, run, take_turns
from tests.benchmarks.picture import STYLES, panel
from tests.benchmarks.places import AT_HAND, PLACES, SPARE, Place, UnavailableError, prepared
from tests.benchmarks.report import brief, kept, report, verdict
from tests.benchmarks.results import CP, OURS, Row, from_json, growths, to_json
from tests.benchmarks.works import ANYWHERE, WORKS, Budget, Work, cases
from tests.conftest import Run


def taken(*seconds: float | None, mib: float = 20.0) -> Taken:
    return Taken([None if each is None else Cost(each, each, mib) for each in seconds])


ROW = Row(
    work="strip-module",
    gib=2.0,
    tensors=400,
    moves=True,
    budget=Budget(to_cp=1.25, mib=40),
    taken={OURS: taken(1.2, 0.9, 1.0), CP: taken(1.0, 1.0, 0.5), "torch": taken(8.0, None, 6.0)},
    skipped={"mergekit": "not installed"},
)


# arithmetic


def test_medians_and_ratios() -> None:
    assert ROW.seconds() == 1.0
    assert ROW.ratio() == 1.2  # of 1.2, 0.9 and 2.0
    assert ROW.best() == 0.9 / 0.5
    assert ROW.ratio("torch") == (8.0 + 12.0) / 2  # of the rounds in which both ran
    assert ROW.mib() == 20
    assert ROW.torch == "torch"
    assert ROW.ratio("nobody") is None
    assert ROW.seconds("nobody") is None


@pytest.mark.parametrize(
    ("budget", "within"),
    [
        (Budget(to_cp=1.2), True),
        (Budget(to_cp=1.19), False),
        (Budget(seconds=1.0), True),
        (Budget(seconds=0.99), False),
        (Budget(mib=20), True),
        (Budget(mib=19), False),
        (Budget(to_torch=0.16), True),
        (Budget(to_torch=0.15), False),
        (Budget(to_cp=1.2, mib=19), False),
        (Budget(disk=0), True),
        (Budget(disk=-1), False),
        (Budget(stretch=0.1), None),
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
    failed = replace(
        ROW,
        budget=Budget(),
        taken={OURS: Taken([Cost(1, 1, 1), None], "boom"), CP: taken(1.0, 1.0)},
    )
    assert failed.within is False
    assert not kept([[failed]])
    assert "strip-module, 2 GiB: ckptkit failed: boom" in report({}, [[failed]])


def test_who_took_no_part_did_not_fail() -> None:
    """In one run the peer failed, in another it was not there, in the last it took part."""
    base = {OURS: taken(2.0), CP: taken(2.0)}
    peers = [{"peer": Taken([None], "boom")}, {}, {"peer": taken(5.0)}]
    runs = [[replace(ROW, taken={**base, **peer})] for peer in peers]
    assert "peer: failed / - / 2.50 x cp, 20 MiB" in report({}, runs)
    assert "peer: failed / - / 2.50 x cp, 20 MiB" in brief(runs)


def test_time_grows_with_bytes_and_with_tensors() -> None:
    large = replace(ROW, gib=8.0, taken={OURS: taken(4.5, 4.5, 4.5), CP: taken(4.0, 4.0, 4.0)})
    many = [replace(ROW, gib=SMALL, tensors=count, taken={OURS: taken(time)}) for count, time in
            ((10_000, 0.5), (100_000, 5.0))]  # fmt: skip
    found = {growth.label: growth for growth in growths([*many, large, ROW])}
    by_bytes = found["time of strip-module, 8 GiB to 2 GiB"]
    assert (by_bytes.value, round(by_bytes.limit, 6), by_bytes.cp, by_bytes.within) == (
        4.5,
        4.4,
        4.0,
        False,
    )
    by_tensors = found["time of strip-module, 100,000 to 10,000 tensors"]
    assert (by_tensors.value, round(by_tensors.limit, 6), by_tensors.within) == (10.0, 11.0, True)


@pytest.mark.parametrize(("mib", "within"), [(214.5, True), (214.6, False)])
def test_memory_grows_with_tensors(mib: float, within: bool) -> None:
    """2 KiB for each of 99,600 tensors more are 194.5 MiB."""
    many = replace(
        ROW, gib=SMALL, tensors=100_000, budget=Budget(), taken={OURS: taken(1.0, mib=mib)}
    )
    found = {growth.label: growth for growth in growths([ROW, many])}
    assert found["memory per tensor of strip-module, 100,000 tensors"].within is within
    assert found["peak memory of strip-module, 2 GiB"].within
    assert kept([[ROW, many]]) is within


@pytest.mark.parametrize("place", ["", "xfs"])
def test_results_survive_as_json(place: str) -> None:
    row = replace(ROW, place=place, taken={OURS: Taken([Cost(1.0, 1.0, 20.0, 0.5)])})
    assert from_json(json.loads(json.dumps(to_json(row)))) == row


def test_results_of_places_have_a_table_of_their_own() -> None:
    took = {OURS: Taken([Cost(0.1, 0.1, 20.0, 5.0)]), CP: taken(0.5)}
    away = replace(ROW, place="xfs", budget=Budget(seconds=0.2, disk=4), taken=took, skipped={})
    text = report({}, [[ROW, away]])
    (line,) = [each for each in text.splitlines() if "xfs" in each]
    cells = [each.strip() for each in line.strip("|").split("|")]
    assert cells == [
        "strip-module, 2 GiB, xfs",
        "0.10 s, 20 MiB, 5.0 MiB of disk",
        "0.50 s, 0.0 MiB of disk",
        "0.2 s, 4 MiB of disk",
        "NO",
    ]
    assert "xfs" not in brief([[ROW, away]])
    assert [each.label for each in growths([ROW, away])] == ["peak memory of strip-module, 2 GiB"]


@pytest.mark.parametrize(
    ("kept", "said"),
    [
        ([True, True], "yes"),
        ([True, None], "yes"),
        ([None], ""),
        ([False], "NO"),
        ([True, False, True], "NO in 1 of 3"),
        ([False, False], "NO"),
    ],
)
def test_verdicts(kept: list[bool | None], said: str) -> None:
    assert verdict(kept) == said


def test_runs_stand_beside_each_other() -> None:
    slower = replace(ROW, taken={**ROW.taken, OURS: taken(3.0, 3.0, 3.0, mib=50)})
    text = report({"cores": 2}, [[ROW], [slower]], ["a note"])
    assert "1.20 / 3.00 (1.80 / 6.00) x cp, 50 MiB" in text
    assert "1.25 x cp, 40 MiB" in text
    assert "NO in 1 of 2" in text
    assert "torch: 10.00 / 10.00 x cp, 20 MiB" in text
    assert "- mergekit was skipped: not installed" in text
    assert "- a note" in text
    assert not kept([[ROW], [slower]])


# turns


def test_contestants_take_turns(tmp_path: Path) -> None:
    (tmp_path / "input").write_text("as it was")

    def says(name: str, script: str = "", **options: object) -> Contestant:
        return Contestant(
            name,
            ["sh", "-c", f"test ! -e out.txt && {script or 'true'}; echo {name} >> log"],
            **options,
        )  # type: ignore[arg-type]

    rounds = take_turns(
        [
            says(
                "one",
                "echo changed >> out.copy; cp out.copy seen",
                source="input",
                fresh="out.copy",
            ),
            says("two", "touch out.txt"),
            says("rare", every=2),
            Contestant("bad", ["sh", "-c", "echo bad >> log; echo why >&2; exit 3"]),
        ],
        tmp_path,
        3,
        memory=0.01,
    )
    order = (tmp_path / "log").read_text().split()
    assert order == ["one", "two", "rare", "bad", "two", "one", "one", "two", "rare"]
    assert (tmp_path / "seen").read_text() == "as it waschanged\n"  # a fresh copy each time
    assert [cost is None for cost in rounds["rare"].costs] == [False, True, False]
    assert rounds["bad"] == Taken([None, None, None], "why")
    cost = rounds["one"].costs[0]
    assert cost is not None
    assert cost.seconds > 0
    assert cost.mib > 0


def test_a_failure_says_why(tmp_path: Path) -> None:
    with pytest.raises(FailedError, match="exit code 3"):
        run(["sh", "-c", "exit 3"], tmp_path)


# what is measured


def test_cases() -> None:
    found = list(cases([8, 2, 0.5], [1_000, 100_000], ""))
    inputs_in_order = [case.input for case in found]
    assert inputs_in_order == sorted(
        inputs_in_order, key=lambda each: list(dict.fromkeys(inputs_in_order)).index(each)
    )
    strips = {case.input.gib: case.peers for case in found if case.work.name == "strip-module"}
    assert strips == {0.5: True, 2: True, 8: False}
    assert [case.input.gib for case in found if case.work.name == "digest"] == [2]
    assert {case.input.tensors for case in found if case.work.name == "inspect"} == {
        400,
        1_000,
        100_000,
    }
    assert {case.work.name for case in cases([2], [], "in-place, safe")} == {
        "strip-module --in-place, safetensors"
    }


@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.name)
def test_cases_of_places(place: Place) -> None:
    found = list(cases([8, 2, 0.5], [1_000], "", place))
    assert {case.work.name for case in found} == {
        "strip-module", "remap", "extract", ".pth to safetensors", "safetensors to .pth",
        "legacy to zip",
    }  # fmt: skip
    assert {(case.input.gib, case.peers) for case in found} == {(2, False)}
    assert {case.budget for case in found} == {ANYWHERE}


def test_places(tmp_path: Path) -> None:
    with prepared(AT_HAND, tmp_path, 1) as folder:
        assert folder == tmp_path
    before = _children()
    with prepared(Place("busy", busy=1), tmp_path, 1) as folder:
        assert folder == tmp_path
        assert len(_children() - before) == 1
    assert _children() == before
    for place, why in [
        (Place("odd", ("mkfs.no-such-command",)), "there is no mkfs.no-such-command here"),
        (Place("failing", ("false",)), "false is not permitted here"),
        (Place("big", ("true",)), "needs 99000 GiB"),
    ]:
        room = 99_000 - SPARE if place.name == "big" else 0.01 - SPARE
        with pytest.raises(UnavailableError, match=why), prepared(place, tmp_path, room):
            pass
    assert not list(tmp_path.iterdir())


def _children() -> set[str]:
    return set(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())


def test_a_file_system_of_its_own(tmp_path: Path) -> None:
    try:
        with prepared(PLACES[0], tmp_path, 0.1 - SPARE) as folder:
            (folder / "file").write_bytes(bytes(1 << 20))
            assert os.stat(folder).st_dev != os.stat(tmp_path).st_dev
    except UnavailableError as error:
        pytest.skip(str(error))
    assert not list(tmp_path.iterdir())


def test_what_has_no_room_says_so(tmp_path: Path) -> None:
    assert not Input("pth", 0.001, 400).lacks(tmp_path, 1)
    lacks = Input("pth", 1e9, 400).lacks(tmp_path, 1)
    assert lacks.startswith("needs 2000000000.5 GiB, ")
    assert lacks.endswith(" are free")


def test_peers_that_are_not_there_are_named() -> None:
    assert peers.missing("no_such_module_at_all", sys.executable).endswith(
        "No module named 'no_such_module_at_all'"
    )
    assert not peers.missing("json", sys.executable)


TENSORS = 5


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the small inputs, each made when a test asks for it."""
    return tmp_path_factory.mktemp("inputs")


def source(folder: Path, kind: str) -> Path:
    """Return a small input of this kind, made unless it is there."""
    made = Input(kind, SMALL, TENSORS)
    if not (folder / made.path).exists():
        run([sys.executable, *made.program], folder)
    return folder / made.path


OF_PROCESSES = ("dcp", "ranks")  # inputs that several processes make


@pytest.mark.parametrize(
    "work", [each for each in WORKS if each.kind not in OF_PROCESSES], ids=lambda work: work.name
)
def test_our_commands(work: Work, folder: Path, tmp_path: Path, run: Run) -> None:
    path = source(folder, work.kind)
    fresh = tmp_path / f"out{path.suffix}"
    if "{fresh}" in work.command:
        fresh.write_bytes(path.read_bytes())
    if not work.command:
        command = ours(work, {"src": str(path)})
        subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
        return
    words = [word.format(src=path, twin=path, fresh=fresh) for word in shlex.split(work.command)]
    done = run(*words, cwd=tmp_path)
    assert done.code == 0, done.stderr
    assert len(list(tmp_path.glob("out*"))) == (
        1 if "out" in work.command or "{fresh}" in work.command else 0
    )
    if "{fresh}" in work.command:
        assert fresh.read_bytes() != path.read_bytes()


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
    names = [f"module.layers.{i}.weight" for i in range(TENSORS)]
    outs = list(tmp_path.iterdir())
    nothing = (
        "list",
        "list safetensors",
        "list shards",
        "digest",
        "equal",
        "stats",
        "close",
        *peers.LIBRARY,
    )
    assert len(outs) == (job not in nothing)
    for out in outs:
        state = (
            load_file(out) if out.suffix == ".safetensors" else torch.load(out, map_location="cpu")
        )
        stripped = [each.removeprefix("module.") if "strip" in job else each for each in names]
        assert list(state) == (["w"] if kind == "matrix" else stripped)
        dtype = {"cast": torch.bfloat16, "transpose": torch.uint8}.get(job, torch.float32)
        assert {each.dtype for each in state.values()} == {dtype}


def test_optional_peers_are_valid_programs() -> None:
    for job, programs in peers.PROGRAMS.items():
        for name, program in programs.items():
            compile(program, f"{job}: {name}", "exec")
    assert (
        r"""move: {from: "module\\\\.(.+)", to: "\\\\1"}"""
        in peers.PROGRAMS["strip"]["brainsurgery"]
    )


def test_inputs_have_their_size(tmp_path: Path) -> None:
    made = Input("safetensors", 1 / 64, 4)
    run([sys.executable, *made.program], tmp_path)
    state = load_file(tmp_path / made.path)
    assert sum(tensor.nbytes for tensor in state.values()) == 16 << 20
    assert len(state) == 4
    assert set(inputs.PROGRAMS) >= {work.kind for work in WORKS}


def test_names_of_experts_are_listed_by_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made = Input("shards", SMALL, 400)
    run([sys.executable, *made.program], tmp_path)
    monkeypatch.setattr(sys, "argv", ["-c", str(tmp_path / made.path)])
    exec(peers.PROGRAMS["list shards"]["safetensors"], {})
    listed = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert len(set(listed)) == 400
    assert set(ckptkit.open(tmp_path / made.path).weights) == set(listed)


# the whole


def test_a_small_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "room").mkdir()
    only = ["--only", "inspect, a small file", "--pairs", "2", "--dir", str(tmp_path / "room")]
    assert main([*only, "--runs", "2", "--out", str(tmp_path)]) in (0, 1)
    assert not list((tmp_path / "room").iterdir())
    facts = json.loads((tmp_path / RESULTS).read_text())
    assert facts["schema"] == "ckptkit.benchmarks/1"
    assert [[row["work"] for row in run] for run in facts["runs"]] == [
        ["inspect, a small file"]
    ] * 2
    costs = [from_json(row).costs(OURS) for run in facts["runs"] for row in run]
    assert [len(each) for each in costs] == [2, 2]
    assert all(cost.cpu > 0 for each in costs for cost in each)
    shown = capsys.readouterr().out
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
    assert "medians of 2 run(s)" in users
    assert "small file" not in front
    assert "| best of the others" in front


def test_what_is_kept_is_what_was_measured(tmp_path: Path) -> None:
    """A figure beside a boundary (0.13496) would be shown as 0.13, and as 0.14 when read again."""
    close = replace(ROW, taken={OURS: Taken([Cost(0.13496, 0.13496, 20.00996)])})
    assert from_json(json.loads(json.dumps(to_json(close)))) == close
    said = [sys.executable, "-c", "import sys; print('took 0.134961234 0.5', file=sys.stderr)"]
    cost = take_turns([Contestant("it", said)], tmp_path, 1)["it"].costs[0]
    assert cost is not None
    assert cost.seconds == 0.135
    assert list(cost) == [round(each, 4) for each in cost]


def test_the_best_of_the_others() -> None:
    text = brief([[ROW]], ["strip-module"])
    assert "| strip-module, 2 GiB | 1.20 x cp, 20 MiB | torch: 10.00 x cp, 20 MiB" in text
    assert "strip-module" not in brief([[ROW]], ["inspect"])


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


def test_a_readme_without_a_place(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("nothing")
    with pytest.raises(ValueError, match="has no <!-- benchmarks -->"):
        put_into(tmp_path / "README.md", "text")


def test_nobody_looks_like_another() -> None:
    drawn = (each for job, each in peers.PROGRAMS.items() if job != "start")  # copies nothing
    assert set(STYLES) == {OURS}.union(*drawn, *peers.COMMANDS.values())
    assert len({(marker, color) for marker, _, color in STYLES.values()}) == len(STYLES)


def test_a_small_difference_looks_small() -> None:
    """An axis shows a decade at least, with numbers on it."""
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    axes = Figure().subplots()
    took = {OURS: taken(4.8), "safetensors": taken(3.8)}
    panel(axes, [[replace(ROW, taken=took, tensors=500_000)]], seconds=True)
    assert axes.get_xlim() == (1, 10)
    labels = axes.get_xticklabels(which="both")
    shown = {label.get_text() for label in labels if 1 <= label.get_position()[0] <= 10}
    assert shown == {"", "1", "2", "5", "10"}


def test_the_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from tests.benchmarks.picture import draw

    many = replace(ROW, work="inspect", gib=SMALL, tensors=100_000, budget=Budget(seconds=2.5))
    for name in ("one.svg", "two.svg"):
        draw([[ROW, many], [ROW]], "a machine", tmp_path / name)
    first, second = ((tmp_path / name).read_bytes() for name in ("one.svg", "two.svg"))
    assert first == second
    assert b"<svg" in first
    draw([[]], "nothing", tmp_path / "none.svg")
    assert not (tmp_path / "none.svg").exists()
