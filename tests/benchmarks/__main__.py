"""The cost of the commands: ``python -m tests.benchmarks``.

A full run takes ten minutes where nothing else runs, --quick three. It needs room in --dir, best a
tmpfs, for the largest input and outputs, and leaves nothing there. Exit code 1: a budget was missed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import resource
import shlex
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from tests.benchmarks import peers
from tests.benchmarks.measure import Contestant, FailedError, copy, ready, remove, run, take_turns
from tests.benchmarks.places import AT_HAND, PLACES, UnavailableError, prepared
from tests.benchmarks.report import brief, kept, report, short
from tests.benchmarks.results import CP, OURS, SCHEMA, Row, from_json, to_json
from tests.benchmarks.works import TOP, Case, Work, cases

HERE = Path(__file__).parent
RESULTS, PICTURE = "results.json", "results.svg"
ROOT = HERE.parents[1]
# Documents that show results, below the folder of the project.
DOCUMENTS = ("tests/benchmarks/README.md", "ckptkit/help/speed.md", "README.md")
FRONT = ("inspect", "strip-module", ".pth to safetensors", "strip-module --in-place")
MARKS = ("<!-- benchmarks -->", "<!-- end of benchmarks -->")
LARGE_PAIRS = 3  # rounds of an input above TOP, at most
RARELY = 3  # others than cp run in every third round; cp too where no ratio to it is judged


class Settings(NamedTuple):
    """Settings of a measurement."""

    folder: Path
    pairs: int
    peer_pythons: tuple[str, ...]


def measure(found: Sequence[Case], settings: Settings, notes: list[str]) -> Iterator[Row]:
    """Each case in turn, on one input after another. What there is no room for is noted."""
    for source, group in groupby(found, key=lambda case: case.input):
        same = list(group)
        os.sync()  # else removed files that are being written still take room
        if lacks := source.lacks(settings.folder, max(case.work.copies for case in same)):
            notes.append(
                f"{', '.join(case.work.name for case in same)} on {source.gib:g} GiB were skipped: {lacks}"
            )
            continue
        print(
            f"making {source.kind}: {source.gib:g} GiB, {source.tensors:,} tensors", file=sys.stderr
        )
        try:
            run([sys.executable, *source.program], settings.folder)
            for _ in range(2):
                ready(Contestant("warm up", [], source.path, "out.copy"), settings.folder)
            for case in same:
                row = _row(case, settings)
                print(short(row), file=sys.stderr)
                yield row
        except FailedError as error:
            notes.append(f"{source.kind} of {source.gib:g} GiB could not be made: {error}")
        finally:
            for file in settings.folder.iterdir():
                remove(file)


def everywhere(options: argparse.Namespace, settings: Settings, notes: list[str]) -> Iterator[Row]:
    """The works at each place in turn. A place that cannot be had is noted."""
    for place in (AT_HAND, *PLACES) if options.places else (AT_HAND,):
        found = list(cases(options.sizes, options.tensors, options.only, place))
        if not found:
            continue
        room = 2 * max(case.input.gib for case in found)
        try:
            with prepared(place, settings.folder, room) as folder:
                yield from measure(found, settings._replace(folder=folder), notes)
        except UnavailableError as error:
            notes.append(f"{place.name} was skipped: {error}")


def _row(case: Case, settings: Settings) -> Row:
    work, source = case.work, case.input
    suffix = Path(source.path).suffix
    files = {"src": source.path, "twin": f"twin{suffix}", "fresh": f"out{suffix}"}
    if "{twin}" in work.command and not (settings.folder / files["twin"]).exists():
        run(copy(source.path, files["twin"]), settings.folder)
    others, skipped = _peers(case, files, settings)
    fresh = files["fresh"] if "{fresh}" in work.command else ""
    every = 1 if case.budget.to_cp or source.gib > TOP else RARELY
    contestants = [Contestant(OURS, ours(work, files), source.path, fresh)]
    if work.job != "start":
        contestants.append(Contestant(CP, copy(source.path, "out.copy"), every=every))
    contestants += [Contestant(name, command, every=RARELY) for name, command in others.items()]
    rounds = min(settings.pairs, LARGE_PAIRS) if source.gib > TOP else settings.pairs
    is_copied = case.place.make and case.budget.to_cp  # to memory, and to its file system there
    memory = 2 * source.gib if is_copied else 0
    taken = take_turns(contestants, settings.folder, rounds, memory)
    return Row(
        work.name, source.gib, source.tensors, work.moves, case.budget, taken, skipped,
        case.place.name,
    )  # fmt: skip


def _peers(
    case: Case, files: dict[str, str], settings: Settings
) -> tuple[dict[str, list[str]], dict[str, str]]:
    """Return the other programs that do the same work.

    There are none at other places, which are measured against cp, and none above TOP: torch would
    need memory for the whole input.
    """
    if case.place != AT_HAND:
        return {}, {}
    if not case.peers:
        return {}, {
            "who is not cp": f"above {TOP:g} GiB, where torch needs memory for the input beside input and output"
        }
    named = [files["src"], files["twin"]] if "{twin}" in case.work.command else [files["src"]]
    return peers.commands(case.work.job, settings.peer_pythons, named)


def ours(work: Work, files: Mapping[str, str]) -> list[str]:
    """Return what does the work with ckptkit: a command, or a program that uses the library."""
    if not work.command:
        return [sys.executable, "-c", peers.LIBRARY[work.job], files["src"]]
    return [*ckptkit(), *(word.format(**files) for word in shlex.split(work.command))]


def ckptkit() -> list[str]:
    """The command that is installed beside this Python."""
    script = Path(sys.executable).with_name("ckptkit")
    return [str(script)] if script.exists() else [sys.executable, "-m", "ckptkit"]


def machine(folder: Path) -> dict[str, Any]:
    """Return the facts of the machine that the figures depend on."""
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "cores": os.cpu_count(),
        "memory_gib": round(pages / 2**30, 1),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "folder": str(folder.parent),
        "python": platform.python_version(),
        **{name: _version(name) for name in ("torch", "safetensors")},
    }


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


class Book:
    """The runs so far, kept in a folder after every row, so that what was measured survives
    whatever comes."""

    def __init__(self, folder: Path | None, about: dict[str, Any]) -> None:
        self.folder = folder
        self.about = about
        self.runs: list[list[Row]] = []
        self.notes: list[str] = []

    def load(self) -> None:
        """Take over what is in the folder."""
        assert self.folder is not None
        facts = json.loads((self.folder / RESULTS).read_text())
        self.about, self.notes = facts["machine"], facts["notes"]
        self.runs = [[from_json(row) for row in run] for run in facts["runs"]]

    def save(self) -> None:
        if self.folder is None:
            return
        runs = [[to_json(row) for row in run] for run in self.runs]
        facts = {"schema": SCHEMA, "machine": self.about, "notes": self.notes, "runs": runs}
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / RESULTS).write_text(_compact(facts) + "\n")

    def draw(self) -> None:
        from tests.benchmarks.picture import draw

        try:
            if self.folder is not None:
                draw(self.runs, self.heading(), self.folder / PICTURE)
        except ImportError:
            self.notes.append("no picture was drawn: matplotlib is not installed")

    def heading(self) -> str:
        """Return where and when the figures were taken, in one line."""
        about = self.about
        return (
            f"{about['date']}: {about['cores']} cores, {about['memory_gib']} GiB, {about['system']}, "
            f"{about['folder']}, Python {about['python']}, torch {about['torch']}; "
            f"medians of {len(self.runs)} run(s)"
        )

    def text(self) -> str:
        return report(self.about, self.runs, self.notes)


def _compact(facts: dict[str, Any]) -> str:
    """JSON with a line for each row."""
    head = {name: value for name, value in facts.items() if name != "runs"}
    runs = ",\n".join("[\n" + ",\n".join(map(json.dumps, run)) + "\n]" for run in facts["runs"])
    return json.dumps(head, indent=1)[:-2] + f',\n "runs": [{runs}]\n}}'


def put_into(readme: Path, text: str) -> None:
    """Replace what stands between the marks in a README. Raises ValueError where they are not."""
    start, end = MARKS
    old = readme.read_text(encoding="utf-8")
    new, count = re.subn(
        f"{start}.*{end}", lambda _: f"{start}\n{text}\n{end}", old, flags=re.DOTALL
    )
    if count != 1:
        raise ValueError(f"{readme} has no {start} ... {end}")
    readme.write_text(new, encoding="utf-8")


def refresh(root: Path, book: Book) -> None:
    """Put the results into each document: all of them, those for users, the most telling."""
    texts = book.text(), f"{book.heading()}\n\n{brief(book.runs)}", brief(book.runs, FRONT)
    for name, text in zip(DOCUMENTS, texts, strict=True):
        put_into(root / name, text)


def arguments(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--dir",
        default="/dev/shm" if os.path.isdir("/dev/shm") else None,
        help="where the files go",
    )
    add(
        "--sizes",
        type=float,
        nargs="*",
        default=[2],
        metavar="GIB",
        help="of the inputs of 400 tensors; 0.0625 and 8 show what depends on the size",
    )
    add(
        "--tensors",
        type=int,
        nargs="*",
        default=[1_000, 10_000, 69_120, 100_000, 500_000],
        help="of the inputs of small tensors",
    )
    add("--pairs", type=int, default=3, help="rounds; others than cp run in every third")
    add("--runs", type=int, default=1, help="the whole suite so many times")
    add("--only", default="", metavar="TEXT", help="works with this in their names")
    add(
        "--places",
        action="store_true",
        help="also on ext4, xfs and btrfs, which only root may mount, and with one core idle",
    )
    add("--quick", action="store_true", help="three minutes: 256 MiB, 10,000 tensors, 2 rounds")
    add(
        "--peer-python",
        nargs="+",
        default=[sys.executable],
        metavar="PYTHON",
        help="those that have mergekit, brainsurgery and the libraries of the formats",
    )
    add(
        "--out",
        type=Path,
        metavar="DIR",
        help=f"for {RESULTS} and {PICTURE}; a full run has tests/benchmarks",
    )
    add("--append", action="store_true", help="add to the runs that are there")
    add("--show", action="store_true", help="measure nothing: print what is there, and draw it")
    add(
        "--refresh",
        type=Path,
        nargs="?",
        const=ROOT,
        metavar="DIR",
        help=f"then put the tables into {', '.join(DOCUMENTS)} (of another folder: DIR)",
    )
    options = parser.parse_args(given)
    if options.quick:
        options.sizes, options.tensors, options.pairs = [0.25], [1_000, 10_000], 2
    if options.out is None and not (options.only or options.quick):
        options.out = HERE
    if options.out is None and (options.append or options.show):
        parser.error("--append and --show need --out DIR here")
    return options


def main(given: Sequence[str] | None = None) -> int:
    options = arguments(given)
    with tempfile.TemporaryDirectory(dir=options.dir, prefix="ckptkit-benchmarks-") as name:
        folder = Path(name)
        book = Book(options.out, machine(folder))
        if options.append or options.show:
            book.load()
        settings = Settings(folder, options.pairs, tuple(options.peer_python))
        for _ in range(0 if options.show else options.runs):
            book.runs.append([])
            began = time.monotonic()
            for row in everywhere(options, settings, book.notes):
                book.runs[-1].append(row)
                book.save()
            book.notes.append(
                f"run {len(book.runs)} took {(time.monotonic() - began) / 60:.0f} minutes"
            )
            book.notes.append(
                f"this process held {_peak():.0f} MiB while it measured: no peak can be smaller"
            )
            book.save()
    book.draw()
    print(book.text())
    if options.refresh:
        refresh(options.refresh, book)
    return 0 if kept(book.runs) else 1


def _peak() -> float:
    """MiB that this process had at most; on Linux."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    sys.exit(main())
