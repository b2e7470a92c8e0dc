"""The cost of the commands: ``python -m tests.benchmarks``.

A full run takes ten minutes where nothing else runs, --quick three. It needs room in --dir, best a
tmpfs, for the largest input and outputs, and leaves nothing there. Exit code 1: a budget was missed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import shlex
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from tests.benchmarks import peers
from tests.benchmarks.measure import Contestant, FailedError, copy, ready, remove, run, take_turns
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
            names = ", ".join(case.work.name for case in same)
            notes.append(f"{names} on {source.gib:g} GiB were skipped: {lacks}")
            continue
        what = f"{source.kind}: {source.gib:g} GiB, {source.tensors:,} tensors"
        print(f"making {what}", file=sys.stderr)
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


def _row(case: Case, settings: Settings) -> Row:
    work, source = case.work, case.input
    suffix = Path(source.path).suffix
    files = {"src": source.path, "twin": f"twin{suffix}", "fresh": f"out{suffix}"}
    named = [files["src"]]
    if "{twin}" in work.command:
        named.append(files["twin"])
        if not (settings.folder / files["twin"]).exists():
            run(copy(source.path, files["twin"]), settings.folder)
    others: dict[str, list[str]] = {}
    skipped = {
        "who is not cp": f"above {TOP:g} GiB, where torch needs memory for the input as well"
    }
    if case.peers:
        others, skipped = peers.commands(work.job, settings.peer_pythons, named)
    fresh = files["fresh"] if "{fresh}" in work.command else ""
    every = 1 if case.budget.to_cp or source.gib > TOP else RARELY
    contestants = [Contestant(OURS, ours(work, files), source.path, fresh)]
    if work.job != "start":
        contestants.append(Contestant(CP, copy(source.path, "out.copy"), every=every))
    contestants += [Contestant(name, command, every=RARELY) for name, command in others.items()]
    rounds = min(settings.pairs, LARGE_PAIRS) if source.gib > TOP else settings.pairs
    taken = take_turns(contestants, settings.folder, rounds)
    return Row(work.name, source.gib, source.tensors, case.budget, taken, skipped)


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
    """The rows so far, kept in a folder after each, so that what was measured survives whatever
    comes."""

    def __init__(self, folder: Path | None, about: dict[str, Any]) -> None:
        self.folder, self.about = folder, about
        self.rows: dict[Any, Row] = {}
        self.notes: list[str] = []

    def load(self) -> None:
        """Take over what is in the folder."""
        assert self.folder is not None
        facts = json.loads((self.folder / RESULTS).read_text())
        self.about, self.notes = facts["machine"], facts["notes"]
        self.rows = {row.key: row for row in map(from_json, facts["rows"])}

    def add(self, row: Row) -> None:
        """Add a row, or its rounds to those that are there; keep all, with a line for each."""
        before = self.rows.get(row.key)
        self.rows[row.key] = row if before is None else before.plus(row)
        self.save()

    def save(self) -> None:
        if self.folder is None:
            return
        facts = {"schema": SCHEMA, "machine": self.about, "notes": self.notes}
        rows = ",\n".join(json.dumps(to_json(row)) for row in self.rows.values())
        self.folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(facts, indent=1)[:-2] + f',\n "rows": [\n{rows}\n]\n}}\n'
        (self.folder / RESULTS).write_text(text)

    def draw(self) -> None:
        from tests.benchmarks.picture import draw

        try:
            if self.folder is not None:
                draw(list(self.rows.values()), self.heading(), self.folder / PICTURE)
        except ImportError:
            self.notes.append("no picture was drawn: matplotlib is not installed")

    def heading(self) -> str:
        """Return where and when the figures were taken, in one line."""
        about = self.about
        return (
            f"{about['date']}: {about['cores']} cores, {about['memory_gib']} GiB, {about['system']}, "
            f"{about['folder']}, Python {about['python']}, torch {about['torch']}; medians"
        )

    def text(self) -> str:
        return report(self.about, list(self.rows.values()), self.notes)


def refresh(root: Path, book: Book) -> None:
    """Put the results between the marks in each document: all of them, those for users, the most
    telling. Raises ValueError for a document without marks."""
    rows = list(book.rows.values())
    texts = book.text(), f"{book.heading()}\n\n{brief(rows)}", brief(rows, FRONT)
    start, end = MARKS
    for name, text in zip(DOCUMENTS, texts, strict=True):
        old = (root / name).read_text(encoding="utf-8")
        before, found, rest = old.partition(start)
        _, ends, after = rest.partition(end)
        if not (found and ends):
            raise ValueError(f"{root / name} has no {start} ... {end}")
        made = f"{before}{start}\n{text}\n{end}{after}"
        (root / name).write_text(made, encoding="utf-8")


def arguments(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    memory = "/dev/shm" if os.path.isdir("/dev/shm") else None
    counts = [1_000, 10_000, 69_120, 100_000, 500_000]
    add("--dir", default=memory, help="where the files go")
    add("--sizes", type=float, nargs="*", default=[2], help="GiB of the inputs of 400 tensors")
    add("--tensors", type=int, nargs="*", default=counts, help="of the inputs of small tensors")
    add("--pairs", type=int, default=3, help="rounds; others than cp run in every third")
    add("--only", default="", metavar="TEXT", help="works with this in their names")
    add("--quick", action="store_true", help="three minutes: 256 MiB, 10,000 tensors, 2 rounds")
    add("--peer-python", nargs="+", default=[sys.executable], help="those that have other programs")
    add("--out", type=Path, metavar="DIR", help=f"for {RESULTS} and {PICTURE}")
    add("--append", action="store_true", help="add rounds to those that are there")
    add("--show", action="store_true", help="measure nothing: print what is there, and draw it")
    add(
        "--refresh", type=Path, nargs="?", const=ROOT, help="then put the tables into the documents"
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
        if not options.show:
            settings = Settings(folder, options.pairs, tuple(options.peer_python))
            found = list(cases(options.sizes, options.tensors, options.only))
            for row in measure(found, settings, book.notes):
                book.add(row)
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
            book.notes.append(f"this process held {peak:.0f} MiB: no peak can be smaller")
            book.save()
    book.draw()
    print(book.text())
    if options.refresh:
        refresh(options.refresh, book)
    return 0 if kept(list(book.rows.values())) else 1


if __name__ == "__main__":
    sys.exit(main())
