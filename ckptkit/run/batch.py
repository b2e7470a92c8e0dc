"""Run one command over many files: find the jobs, skip the finished ones, run the others.

Inputs are files, folders that are checkpoints, and matches of patterns, local or remote. Each
output appears whole or not at all, as always. Finished jobs are recorded in the outputs' folder,
and skipped the next time. Jobs go to workers in groups, a few groups for each at a time. A worker
that dies loses its group: those jobs are run once more, one by one and with nothing in parallel, so
that the one that killed the worker is known when it kills the second.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
import re
import shutil
import stat
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Future, wait
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from time import monotonic
from typing import NamedTuple, Protocol

from ckptkit import formats
from ckptkit.api import Conversion
from ckptkit.core import __version__
from ckptkit.core.bytesource import Folder, LocalFile
from ckptkit.core.errors import (
    CkptkitError,
    LimitError,
    OutputError,
    OutputExistsError,
    PathError,
    UsageError,
    foreseen,
)
from ckptkit.core.plan import Plan
from ckptkit.core.text import in_folder, is_url, shell_word, shown_url, without_query
from ckptkit.formats.format import Format, Probe, open_unchecked
from ckptkit.publish.copying import checksums, in_order, write_all
from ckptkit.publish.preflight import check_folder
from ckptkit.run.workers import Pool

AHEAD = 2  # groups for each worker: a running one and a waiting one
GROUP = 32  # jobs at most
GROUP_BYTES = 64 << 20  # of input; a larger job is a group of its own
ROUNDS = 8  # groups for each worker in a batch, at least, so that all are busy to the end
DEATHS = 8  # in a row, for each worker, after which the batch is given up
BUG = 5  # exit code
MANIFEST = ".ckptkit-batch.jsonl"
LARGEST = 256 << 20  # bytes of a manifest
PAUSE = 30.0  # seconds between two uploads of the manifest
SHARE = 20  # the pause is at least this many times the duration of an upload

_CAREFUL = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
_TEMPORARY = re.compile(r"\.(.+)\.ckptkit-\d+-[0-9a-f]{16}\.tmp")  # see temporaries.temporary_name

# Size and time of change, or an object's ETag: by it, a later run recognizes that a file is the
# same. See remote.listing.
Mark = tuple[int, int | str]


@dataclass(frozen=True, slots=True)
class Input:
    """A file or folder to read. `mark` is None if it does not exist, which reading it reports.

    `name` is that of its output below the batch's folder, with slashes: its path below the fixed
    part of the pattern (``runs/**/*.pth``: below ``runs``), or its own last name.
    """

    path: str  # absolute, or a URL
    name: str
    mark: Mark | None
    is_folder: bool = False

    @property
    def size(self) -> int:
        """Bytes."""
        return self.mark[0] if self.mark else 0


@dataclass(frozen=True, slots=True)
class Job:
    """`input` becomes `output`, a name with slashes below the batch's folder."""

    input: Input
    output: str
    digest: str  # of all that the output depends on


class Work(Protocol):
    """Makes `destination` from `source`, or with `dry_run` only its plan; picklable for workers."""

    def __call__(
        self, source: str, destination: str, *, force: bool, dry_run: bool
    ) -> Conversion: ...


class Task(NamedTuple):
    """A job as workers see it: two paths, whether the output may be replaced, or only planned."""

    source: str
    destination: str
    force: bool
    dry_run: bool = False


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a job.

    ``state``: ``done``; ``skipped``: an earlier batch did it; ``found``: not in the manifest, but
    the output exists and is what this job makes; ``failed``; ``planned``, in a dry run. ``made`` is
    the output's mark.
    """

    state: str
    size: int = 0  # bytes of the output
    format: str | None = None
    notes: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    made: Mark | None = None
    error: str | None = None
    hint: str | None = None
    exit_code: int = 0
    code: str = ""  # of the error


_Item = tuple[Job, Task]
Results = Generator[tuple[Job, Outcome], None, None]


# The inputs


def find(sources: Iterable[str], into: str) -> list[Input]:
    """Return the inputs that `sources` name, in order and each once.

    Matches of a pattern that are below `into` are left out. Raises UsageError for a pattern that
    matches nothing, or nothing but files below `into`; PathError where a remote place cannot be
    listed.
    """
    found: dict[str, Input] = {}
    for source in sources:
        inputs: Iterable[Input]
        if is_url(source):
            inputs = _remote(source, into)
        elif glob.has_magic(source) and not os.path.lexists(source):
            inputs = _matching(source, into)
        else:
            path = os.path.abspath(source)
            name = _plain(os.path.basename(path), source)
            inputs = [Input(path, name, mark(path), os.path.isdir(path))]
        for each in inputs:
            found.setdefault(each.path, each)
    return list(found.values())


def mark(path: str) -> Mark | None:
    """Return the mark of the file or folder at `path`, a path or URL; None if it cannot be seen."""
    try:
        if is_url(path):
            from ckptkit.remote import files

            return files.look(path).mark
        info = os.stat(path)
    except (PathError, OSError, ValueError):
        return None
    if not os.path.isdir(path):
        return info.st_size, info.st_mtime_ns
    from ckptkit.remote.files import merged

    marks: dict[str, Mark] = {}
    for folder, _, names in os.walk(path):
        for name in names:
            place = os.path.join(folder, name)
            with suppress(FileNotFoundError):
                info = os.lstat(place)
                marks[os.path.relpath(place, path)] = info.st_size, info.st_mtime_ns
    return merged(marks)


def _matching(pattern: str, into: str) -> Iterator[Input]:
    fixed, rest = _split(pattern.split(os.sep))
    base = os.path.abspath(os.sep.join(fixed) + os.sep if fixed else ".")
    found = sorted(glob.iglob(os.sep.join(rest), root_dir=base, recursive=True))
    paths = [os.path.abspath(os.path.join(base, each)) for each in found]
    if not is_url(into):
        outputs = os.path.abspath(into) + os.sep
        paths = [path for path in paths if not (path + os.sep).startswith(outputs)]
    _check_found(pattern, into, len(found), len(paths))
    for path in paths:
        name = _plain(os.path.relpath(path, base).replace(os.sep, "/"), pattern)
        yield Input(path, name, mark(path), os.path.isdir(path))


def _remote(source: str, into: str) -> Iterator[Input]:
    from ckptkit.remote import files

    shown = shown_url(source)
    if not glob.has_magic(without_query(source)):
        name = _plain(without_query(source).rstrip("/").rpartition("/")[2], shown)
        try:
            entry = files.look(source)
        except PathError:
            yield Input(source, name, None)
        else:
            yield Input(source, name, entry.mark, entry.is_folder)
        return
    place, query, parameters = source.partition("?")
    fixed, rest = _split(place.split("/"))
    if len(fixed) < 3:
        hint = "name the host or bucket without wildcards"
        raise UsageError("the pattern has no fixed part to look below", where=shown, hint=hint)
    base = "/".join(fixed) + query + parameters
    entries = files.matching(base, "/".join(rest))
    outputs = without_query(into).rstrip("/") + "/"
    found = [(in_folder(base, each.name), each) for each in entries]
    found = [(url, each) for url, each in found if not without_query(url).startswith(outputs)]
    _check_found(shown, into, len(entries), len(found))
    for url, each in found:
        yield Input(url, _plain(each.name, shown), each.mark, each.is_folder)


def _split(parts: list[str]) -> tuple[list[str], list[str]]:
    """Split the parts of a path before the first one with a wildcard."""
    at = next(number for number, part in enumerate(parts) if glob.has_magic(part))
    return parts[:at], parts[at:]


def _plain(name: str, source: str) -> str:
    """Return `name` if it stays below a folder that it is joined to. Raises PathError.

    An object's key may contain ``..``.
    """
    for part in name.split("/"):
        drive = os.name == "nt" and ":" in part
        if part in ("", ".", "..") or "\0" in part or os.sep in part or drive:
            raise PathError(f"{name!r} cannot be the name of an output", where=source)
    return name


def _check_found(pattern: str, into: str, found: int, left: int) -> None:
    """Raise UsageError for a pattern that matches nothing, or nothing but outputs."""
    if not found:
        hint = "quote the pattern, as in 'runs/**/*.pth'"
        raise UsageError("nothing matches", where=pattern, hint=hint)
    if not left:
        why = f"everything that matches is below {shown_url(into)}, where the outputs go"
        raise UsageError(why, where=pattern, hint="name another folder with --into")


# The jobs


def plan(
    inputs: Iterable[Input], recipe: object, *, format: str | None = None, shards: bool = False
) -> list[Job]:
    """Return the jobs for `inputs`.

    `recipe` is plain data (JSON) that contains all that their outputs depend on. `format` is that
    of the outputs, None for one that depends on each input; `shards` means that each output is a
    folder of shards. Raises UsageError for an unknown format, and where two inputs would become one
    output, or one inside another.
    """
    given = formats.for_writing("", format, shards=shards) if format is not None else None
    jobs = []
    for each in inputs:
        facts = [__version__, recipe, shown_url(each.path), each.mark]
        digest = hashlib.sha256(json.dumps(facts).encode()).hexdigest()
        jobs.append(Job(each, _output(each, given, shards), digest))
    by_output: dict[str, Job] = {}
    for job in jobs:
        if (other := by_output.setdefault(job.output, job)) is not job:
            raise _collision(other, job)
    for job in jobs:
        for at in [found.start() for found in re.finditer("/", job.output)]:
            if (above := by_output.get(job.output[:at])) is not None:
                raise _collision(above, job)
    return jobs


def _output(each: Input, given: Format | None, shards: bool) -> str:
    """Return the input's name with the suffix of the output's format, where known and different."""
    if given is None and each.is_folder and not shards:
        try:  # the format in which a folder is written by default
            read = formats.identify(Probe(open_unchecked(each.path)))
            given = formats.for_writing(each.name, keep=read.name)
        except CkptkitError:  # reported again when it is read
            pass
    if shards:
        return formats.named(each.name, ())
    return each.name if given is None else formats.named(each.name, given.suffixes)


def _collision(first: Job, second: Job) -> UsageError:
    names = f"{shown_url(first.input.path)} and {shown_url(second.input.path)}"
    where = first.output if first.output == second.output else f"{first.output} and {second.output}"
    return UsageError(
        f"the outputs of {names} would collide, as {where}",
        hint="a pattern keeps the folders below its fixed part: 'runs/**/*.pth'; "
        "or run them as two batches",
    )


def run(
    work: Work,
    jobs: Sequence[Job],
    into: str,
    *,
    force: bool = False,
    pool: Pool | None = None,
    dry_run: bool = False,
) -> Results:
    """Run `jobs`, with outputs below the folder or URL `into`, and yield outcomes in any order.

    `work` is done in this process, or by the workers of `pool`, which are stopped if this generator
    is closed before its end. Outputs that an earlier batch made and that have not changed since may
    be replaced, others with `force`. With `dry_run`, `work` only plans each job and nothing is
    written: jobs that would succeed are ``planned``, the others fail as they would. Raises only for
    failures that are not a single job's: UsageError where another batch writes to `into`,
    OutputError where the manifest cannot be written or the workers do not work.
    """
    with manifest(into, reading=dry_run) as known:
        marks = known.marks(job.output for job in jobs if job.output in known.done)
        todo: list[_Item] = []
        for job in jobs:
            record = known.done.get(job.output)
            is_ours = record is not None and tuple(record.made) == marks.get(job.output)
            if is_ours and record is not None and record.job == job.digest and job.input.mark:
                yield job, Outcome("skipped")
            else:
                place = _joined(into, job.output)
                todo.append((job, Task(job.input.path, place, force or is_ours, dry_run)))
        if dry_run:
            yield from _spread(work, todo, pool)
            return
        if is_url(into):
            from ckptkit.remote import files

            files.make_folders(into, sorted({job.output.rpartition("/")[0] for job, _ in todo}))
        _sweep(into, todo)
        try:
            for job, outcome in _spread(work, todo, pool):
                if outcome.made is not None:
                    known.add(JobRecord(job.output, job.digest, outcome.made))
                yield job, outcome
        finally:
            _sweep(into, todo)


def _joined(into: str, name: str) -> str:
    if is_url(into):
        return in_folder(into, name)
    return os.path.join(os.path.abspath(into), *name.split("/"))


def _sweep(into: str, todo: Sequence[_Item]) -> None:
    """Remove stale temporaries that killed batches left beside the outputs of jobs."""
    if is_url(into):
        return
    outputs = {os.path.split(task.destination) for _, task in todo}
    for folder in {folder for folder, _ in outputs}:
        with suppress(OSError):
            for name in os.listdir(folder):
                found = _TEMPORARY.fullmatch(name)
                if found and (folder, found[1]) in outputs:
                    path = os.path.join(folder, name)
                    if os.path.isdir(path) and not os.path.islink(path):
                        shutil.rmtree(path, ignore_errors=True)
                    else:
                        with suppress(OSError):
                            os.unlink(path)


def _spread(work: Work, todo: Sequence[_Item], pool: Pool | None) -> Results:
    """Run the jobs; those of a worker that dies are run last, each alone."""
    if pool is None:
        for job, task in todo:
            yield job, attempt(work, [task], __version__)[0]
        return
    lost: list[_Item] = []
    try:
        yield from _together(pool, work, todo, lost)
        for job, task in lost:
            try:
                yield job, pool.submit(attempt, work, [task], __version__).result()[0]
            except BrokenExecutor:
                error = f"{shown_url(job.input.path)}: its worker was killed, twice"
                hint = "it may need more memory than there is; `dmesg` may say what killed it"
                yield job, failed(OutputError(error, hint=hint))
    except BaseException:
        pool.stop()
        raise


def _together(pool: Pool, work: Work, todo: Sequence[_Item], lost: list[_Item]) -> Results:
    """Run the jobs, in groups; those whose worker dies are put into `lost`."""
    groups = _groups(todo, pool.workers())
    waiting: dict[Future[list[Outcome]], list[_Item]] = {}
    deaths = 0
    while True:
        while len(waiting) < AHEAD * pool.workers() and (group := next(groups, None)):
            tasks = [task for _, task in group]
            waiting[pool.submit(attempt, work, tasks, __version__)] = group
        if not waiting:
            return
        for future in wait(waiting, return_when=FIRST_COMPLETED).done:
            group = waiting.pop(future)
            try:
                outcomes = future.result()
            except BrokenExecutor as error:
                lost += group
                deaths += 1
                if deaths > DEATHS * pool.workers():
                    raise OutputError("workers keep ending before their work is done") from error
                continue
            deaths = 0
            yield from ((job, outcome) for (job, _), outcome in zip(group, outcomes, strict=True))


def _groups(todo: Sequence[_Item], workers: int) -> Iterator[list[_Item]]:
    """Yield the groups of jobs that a worker runs in one call: many jobs where they are small."""
    most = max(1, min(GROUP, len(todo) // (ROUNDS * max(1, workers))))
    group: list[_Item] = []
    size = 0
    for job, task in todo:
        if group and (len(group) >= most or size + job.input.size > GROUP_BYTES):
            yield group
            group, size = [], 0
        group.append((job, task))
        size += job.input.size
    if group:
        yield group


# A worker's part: jobs, one after another


def attempt(work: Work, tasks: Sequence[Task], version: str) -> list[Outcome]:
    """Run `tasks`, and go on after failures.

    Raises OutputError if this is another version of ckptkit.
    """
    if version != __version__:
        raise OutputError(
            f"a worker has ckptkit {__version__}, and this is {version}",
            hint="install the same version on every worker",
        )
    outcomes = []
    for task in tasks:
        try:
            outcomes.append(_done(work, task))
        except CkptkitError as error:
            outcomes.append(failed(error.at(shown_url(task.source))))
        except Exception as error:
            outcomes.append(failed(error))
    return outcomes


def failed(error: Exception) -> Outcome:
    """Return the outcome of a job that ended in `error`."""
    known = foreseen(error)
    if isinstance(known, CkptkitError):
        return Outcome(
            "failed", error=str(known), hint=known.hint, exit_code=known.exit_code, code=known.code
        )
    message = f"a bug in ckptkit: {type(error).__name__}: {error}"
    return Outcome("failed", error=message, hint="please report it", exit_code=BUG, code="bug")


def _done(work: Work, task: Task) -> Outcome:
    state = "planned" if task.dry_run else "done"
    try:
        made = _planned(work, task) if task.dry_run else _made(work, task)
    except OutputExistsError as error:
        made = work(task.source, _beside(task.destination), force=False, dry_run=True)
        if not isinstance(made.plan, Plan) or not same(made.plan, task.destination):
            raise error from None
        state = "found"  # an earlier attempt made it, and ended before that was recorded
    return Outcome(
        state,
        made.plan.size,
        made.format,
        made.notes,
        made.plan.notes,
        made.warnings,
        None if task.dry_run else mark(task.destination),
    )


def _made(work: Work, task: Task) -> Conversion:
    """Run the job, in a folder that is made where it does not exist."""
    _for_folder(task, partial(os.makedirs, exist_ok=True))
    return work(task.source, task.destination, force=task.force, dry_run=False)


def _planned(work: Work, task: Task) -> Conversion:
    """Plan the job; where its folder does not exist yet, as if it wrote to the one above."""
    _for_folder(task, check_folder)
    folder, name = os.path.split(task.destination)
    if is_url(folder) or os.path.isdir(folder):
        return work(task.source, task.destination, force=task.force, dry_run=True)
    while not os.path.isdir(folder):
        folder = os.path.dirname(folder)
    place = _beside(os.path.join(folder, name))
    try:
        return work(task.source, place, force=False, dry_run=True)
    except CkptkitError as error:
        if error.where == place:
            error.where = task.destination
        raise


def _for_folder(task: Task, act: Callable[[str], None]) -> None:
    """Make or check the folder of an output. Raises OutputError."""
    folder = os.path.dirname(task.destination)
    try:
        if not is_url(folder):
            act(folder)
    except OSError as error:
        raise OutputError(f"cannot be made: {error.strerror}", where=folder) from error


def _beside(path: str) -> str:
    """Return a path in the same folder where nothing is, with the same suffix."""
    start = max(path.rfind("/"), path.rfind(os.sep)) + 1
    return f"{path[:start]}.{os.urandom(8).hex()}-{path[start:][-200:]}"  # names have 255 bytes


def same(plan: Plan, destination: str) -> bool:
    """Return whether the output at `destination` is, byte for byte, what `plan` would write."""
    place = open_unchecked(destination)
    if isinstance(place, Folder) != plan.is_folder:
        return False
    if isinstance(place, Folder):
        if place.list() != sorted(file.name for file in plan.files):
            return False
        sources = [place.open(file.name) for file in plan.files]
    else:
        sources = [place]
    pairs = list(zip(sources, plan.files, strict=True))
    if any(source.size != file.size for source, file in pairs):
        return False
    for source, file in pairs:
        at = 0
        for piece in in_order(file.segments, checksums(file.segments)):
            # startswith compares a buffer of any kind at the speed of memory
            if not source.read(at, len(piece)).startswith(piece):
                return False
            at += len(piece)
    return True


# The manifest: the list of finished jobs, kept in the folder of their outputs, to resume a batch
#
# A JSON object per line, ``{"output": NAME, "job": DIGEST, "made": [SIZE, VERSION]}``; of two for
# one output the later counts. On this machine lines are appended, so that a kill costs the last one
# at most, and the file is locked while a batch runs. An object in a store is rewritten now and
# then, and when the batch ends.


class JobRecord(NamedTuple):
    """A finished job: its digest, and the mark of the output as it was made."""

    output: str
    job: str
    made: Mark

    def line(self) -> bytes:
        return json.dumps(self._asdict()).encode() + b"\n"


@contextmanager
def manifest(into: str, *, reading: bool = False) -> Iterator[LocalManifest | RemoteManifest]:
    """Yield the manifest of the folder or URL `into`, created where missing unless `reading`.

    Raises UsageError where another batch writes there, OutputError where it cannot be written.
    """
    if is_url(into):
        remote = RemoteManifest(into)
        try:
            yield remote
        finally:
            remote.flush()
        return
    path = os.path.join(into, MANIFEST)
    try:
        if reading:
            check_folder(os.path.dirname(path))
            fd = -1
        else:
            os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | _CAREFUL, 0o666)
    except OSError as error:
        raise OutputError(f"cannot be written: {error.strerror}", where=path) from error
    try:
        if not reading:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise OutputError("cannot be written: it is not a regular file", where=path)
            _lock(fd, path)
        data = _read(path)
        if not reading and not data.endswith(b"\n"):
            os.ftruncate(fd, data.rfind(b"\n") + 1)  # a torn last line
        yield LocalManifest(into, data, fd)
    finally:
        if fd >= 0:
            os.close(fd)


class LocalManifest:
    """The finished jobs by output, in a file on this machine."""

    def __init__(self, into: str, data: bytes, fd: int) -> None:
        self.done = _parse(data)
        self._into, self._fd = into, fd

    def add(self, record: JobRecord) -> None:
        try:
            write_all(self._fd, record.line())
        except OSError as error:
            where = os.path.join(self._into, MANIFEST)
            raise OutputError(f"cannot be written: {error.strerror}", where=where) from error

    def marks(self, outputs: Iterable[str]) -> dict[str, Mark]:
        """Return the marks that outputs have now, without those that do not exist."""
        found = ((name, mark(os.path.join(self._into, name))) for name in outputs)
        return {name: each for name, each in found if each is not None}


class RemoteManifest:
    """The finished jobs by output, in an object of a store."""

    def __init__(self, into: str) -> None:
        from ckptkit.remote import files

        self._into, self._url = into, in_folder(into, MANIFEST)
        self.done = _parse(files.read_small(self._url))
        self._changed = False
        self._next = monotonic() + PAUSE

    def add(self, record: JobRecord) -> None:
        self.done[record.output] = record
        self._changed = True
        if monotonic() >= self._next:
            self.flush()

    def flush(self) -> None:
        """Write it, if there is something new."""
        if self._changed:
            from ckptkit.remote import files

            started = monotonic()
            files.write_small(self._url, b"".join(each.line() for each in self.done.values()))
            self._changed = False
            self._next = monotonic() + max(PAUSE, SHARE * (monotonic() - started))

    def marks(self, outputs: Iterable[str]) -> dict[str, Mark]:
        """Return the marks that outputs have now, without those that do not exist."""
        from ckptkit.remote import files

        found = files.below(self._into)
        return {name: found[name] for name in outputs if name in found}


def _parse(data: bytes) -> dict[str, JobRecord]:
    """Return the records of whole lines; torn lines and those of other programs are skipped."""
    found: dict[str, JobRecord] = {}
    for text in data.split(b"\n"):
        with suppress(ValueError, TypeError, KeyError, RecursionError):
            line = json.loads(text)
            output, job, (size, version) = line["output"], line["job"], line["made"]
            if isinstance(output, str) and isinstance(job, str) and isinstance(line["made"], list):
                found[output] = JobRecord(output, job, (size, version))
    return found


def _read(path: str) -> bytes:
    """Return the bytes of a manifest, empty if there is none.

    Raises OutputError if it is not a regular file, or too large.
    """
    try:
        with closing(LocalFile(path, follow=False)) as file:
            if file.size > LARGEST:
                what = f"has {file.size:,} bytes, more than the {LARGEST:,} of a manifest"
                raise LimitError(what)
            return file.read(0, file.size)
    except CkptkitError as error:
        if not os.path.lexists(path):
            return b""
        what = f"cannot be read: {error.message}"
        raise OutputError(what, where=path, hint=f"rm {shell_word(path)}") from error


def _lock(fd: int, path: str) -> None:
    try:
        import fcntl
    except ImportError:  # Windows
        return
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        where, hint = os.path.dirname(path), "wait for it, or name another --into"
        raise UsageError("another batch is writing there", where=where, hint=hint) from error
    except OSError:  # a file system without locks
        pass
