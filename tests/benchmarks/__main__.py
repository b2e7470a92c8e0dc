"""A table for the README: ``python -m tests.benchmarks [--dir /dev/shm] [--gib 2] [--pairs 7] [--only TEXT]``.

Needs three times ``--gib`` of room in ``--dir``, best a tmpfs, and leaves nothing there.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
from datetime import datetime, timezone
from importlib.metadata import version
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from tabulate import tabulate

from tests.benchmarks.measure import Compared, compare, remove, run
from tests.benchmarks.works import INPUTS, WORKS, Work


class Row(NamedTuple):
    """A work as measured: ckptkit beside `cp` of its input, and the plain way with torch beside that."""

    work: Work
    ckptkit: Compared
    torch: Compared | None

    @property
    def within(self) -> bool:
        """Whether time and memory keep to the budget."""
        seconds, ratio = self.work.seconds, self.work.ratio
        fast = (seconds is None or self.ckptkit.seconds <= seconds) and (ratio is None or self.ckptkit.ratio <= ratio)
        return fast and self.ckptkit.mib <= self.work.mib

    def cells(self) -> list[str]:
        """The row of the table: work, ckptkit, budget, torch, within."""
        work = self.work
        budget = f"{work.seconds} s" if work.ratio is None else f"{work.ratio} x cp"
        within = "yes" if self.within else "NO"
        return [
            work.name,
            _cost(work, self.ckptkit),
            f"{budget}, {work.mib} MiB",
            _cost(work, self.torch) if self.torch else "",
            within,
        ]


def _cost(work: Work, cost: Compared) -> str:
    """Against `cp` the median of the pairs, and best against best."""
    time = f"{cost.seconds:.2f} s" if work.ratio is None else f"{cost.ratio:.2f} ({cost.best:.2f}) x cp"
    return f"{time}, {cost.mib:.0f} MiB"


def measure(folder: Path, gib: float, pairs: int, only: str) -> list[Row]:
    """Every work whose name has `only` in it, on one input after another."""
    rows = []
    chosen = [work for work in WORKS if only in work.name]
    for source, works in groupby(chosen, key=lambda work: work.source):
        print(f"making {source}", file=sys.stderr)
        run([sys.executable, "-c", INPUTS[source], source, str(gib)], folder)
        copy = ["cp", "-r", source, "out.copy"]
        for _ in range(2):
            run(copy, folder)
        for work in works:
            print(work.name, file=sys.stderr)
            ours = compare([*ckptkit(), *work.command.split()], copy, folder, pairs)
            plain = work.plain and compare([sys.executable, "-c", work.plain, source], copy, folder, max(1, pairs // 2))
            rows.append(Row(work, ours, plain or None))
        for file in folder.iterdir():
            remove(file)
    return rows


def ckptkit() -> list[str]:
    """The command that is installed beside this Python."""
    script = Path(sys.executable).with_name("ckptkit")
    return [str(script)] if script.exists() else [sys.executable, "-m", "ckptkit"]


def machine() -> dict[str, object]:
    """What the numbers depend on."""
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "date": datetime.now(timezone.utc).date().isoformat(),
        "cores": os.cpu_count(),
        "memory_gib": round(pages / 2**30, 1),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        **{name: version(name) for name in ("torch", "safetensors")},
    }


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks", description=__doc__)
    parser.add_argument("--dir", default="/dev/shm" if os.path.isdir("/dev/shm") else None, help="where the files go")
    parser.add_argument("--gib", type=float, default=2.0, help="size of the big inputs")
    parser.add_argument("--pairs", type=int, default=7, help="runs of each command; half as many of torch")
    parser.add_argument("--only", default="", metavar="TEXT", help="works with this in their names")
    parser.add_argument("--json", metavar="FILE", help="also write all figures there")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.dir, prefix="ckptkit-benchmarks-") as folder:
        rows = measure(Path(folder), options.gib, options.pairs, options.only)
    about = {**machine(), "gib": options.gib, "pairs": options.pairs}
    print(", ".join(f"{name} {value}" for name, value in about.items()), end="\n\n")
    heads = ["work", "ckptkit", "budget", "torch", "within"]
    print(tabulate([row.cells() for row in rows], headers=heads, tablefmt="github"))
    if options.json:
        figures = [
            {
                "work": r.work.name,
                "ckptkit": r.ckptkit._asdict(),
                "torch": r.torch and r.torch._asdict(),
                "within": r.within,
            }
            for r in rows
        ]
        Path(options.json).write_text(json.dumps({"machine": about, "rows": figures}, indent=2) + "\n")
    return 0 if all(row.within for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
