"""Run one command on many files: find the jobs, skip finished jobs, and run all other jobs.

An input is a file, a checkpoint folder or a match of a pattern, local or remote. Each output is
written atomically. A manifest in the output folder lists the finished jobs, and the next batch
skips these jobs. A worker runs a group of jobs in one call. If a worker dies, the jobs of its group
run again at the end, one at a time. If a worker dies again, its only job is the cause.
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
    SeveralError,
    UsageError,
    foreseen,
)
from ckptkit.core.plan import Plan
from ckptkit.core.text import in_folder, is_url, shell_word, shown_url, without_query
from ckptkit.formats.format import Format, Probe, open_unchecked
from ckptkit.publish.copying import checksums, in_order, write_all
from ckptkit.publish.preflight import check_folder
from ckptkit.run.workers import Pool

AHEAD = 2  # number of groups submitted per worker: one running, one waiting
GROUP = 32  # maximum number of jobs in a group
GROUP_BYTES = 64 << 20  # maximum input bytes of a group; a larger job is its own group
# Minimum number of groups per worker. With many groups, all workers stay busy to the end.
ROUNDS = 8
DEATHS = 8  # number of consecutive deaths per worker after which the batch fails
BUG = 5  # exit code of a job that failed because of a bug in ckptkit
MANIFEST = ".ckptkit-batch.jsonl"
LARGEST = 256 << 20  # maximum size of a manifest in bytes
PAUSE = 30.0  # minimum seconds between two uploads of the manifest
SHARE = 20  # minimum pause between two uploads, divided by the duration of an upload

_CAREFUL = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
_TEMPORARY = re.compile(r"\.(.+)\.ckptkit-\d+-[0-9a-f]{16}\.tmp")  # see temporaries.temporary_name

# Version of a file: its size, and its modification time or ETag. If a file has the same mark in a
# later batch, the batch treats the file as unchanged. See remote.files.
Mark = tuple[int, int | str]


@dataclass(frozen=True, slots=True)
class Input:
    """A file or folder to read. `mark` is None if the file does not exist; reading the file then
    fails.

    `name` is the name of the output relative to the output folder, with slashes. The name is the
    path of the input below the fixed part of the pattern (``runs`` in ``runs/**/*.pth``). Without a
    pattern, the name is the file name of the input.
    """

    path: str  # absolute path, or URL
    name: str
    mark: Mark | None
    is_folder: bool = False

    @property
    def size(self) -> int:
        """The size of the input in bytes."""
        return self.mark[0] if self.mark else 0


@dataclass(frozen=True, slots=True)
class Job:
    """A job that makes `output` from `input`. `output` is relative to the output folder, with
    slashes."""

    input: Input
    output: str
    digest: str  # digest of everything that the output depends on


class Work(Protocol):
    """A callable that writes `destination` from `source`. With `dry_run`, the callable only plans
    the output.

    Workers receive the callable as a pickle.
    """

    def __call__(
        self, source: str, destination: str, *, force: bool, dry_run: bool
    ) -> Conversion: ...


class Task(NamedTuple):
    """A job for a worker. With `force`, the job may replace the output. With `dry_run`, the job is
    only planned."""

    job: Job
    destination: str
    force: bool
    dry_run: bool = False


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a job.

    ``state`` is one of:

    - ``done``: the job wrote the output
    - ``skipped``: an earlier batch finished the job
    - ``found``: the manifest lacks the job, but an output with the expected bytes exists
    - ``failed``: the job raised an error
    - ``planned``: a dry run planned the job

    ``made`` is the mark of the output.
    """

    state: str
    size: int = 0  # number of bytes of the output
    format: str | None = None
    notes: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    made: Mark | None = None
    error: str | None = None
    hint: str | None = None
    exit_code: int = 0
    code: str = ""  # code of the error


Results = Generator[tuple[Job, Outcome], None, None]


# The inputs


def find(sources: Iterable[str], into: str) -> list[Input]:
    """Return the inputs for paths, URLs and patterns, in order, without duplicates.

    For a folder of several checkpoints, the result contains each checkpoint.

    Matches below the output folder `into` are ignored. Raises UsageError if a pattern matches
    nothing, or only files below `into`. Raises PathError if a remote folder cannot be listed.
    """
    found: dict[str, Input] = {}
    for source in sources:
        inputs: Iterable[Input]
        remote = is_url(source)
        has_magic = glob.has_magic(without_query(source) if remote else source)
        if has_magic and (remote or not os.path.lexists(source)):
            inputs = _matching(source, into)
        elif remote:
            inputs = [_remote(source)]
        else:
            whole = os.path.abspath(source)
            paths = [os.path.join(whole, name) for name in _several(whole)] or [whole]
            inputs = [
                Input(path, _plain(os.path.basename(path), source), mark(path), os.path.isdir(path))
                for path in paths
            ]
        for each in inputs:
            found.setdefault(each.path, each)
    return list(found.values())


def _several(path: str) -> tuple[str, ...]:
    """Return the names of the checkpoints in a folder. For a single checkpoint, return ()."""
    try:
        if os.path.isdir(path):
            formats.read(Folder(path))
    except SeveralError as error:
        return error.files
    except CkptkitError:  # the job of this input reports the error
        pass
    return ()


def mark(path: str) -> Mark | None:
    """Return the mark of the file or folder at a path or URL. Return None if access fails."""
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
    """Yield the inputs that match a pattern, except for those below the output folder `into`."""
    from ckptkit.remote import files

    remote, shown = is_url(pattern), shown_url(pattern)
    place, query, parameters = pattern.partition("?") if remote else (pattern, "", "")
    separator = "/" if remote else os.sep
    parts = place.split(separator)
    at = next(number for number, part in enumerate(parts) if glob.has_magic(part))
    fixed, rest = separator.join(parts[:at]), separator.join(parts[at:])
    found: list[Input] = []
    if remote:
        if at < 3:
            hint = "write the host or bucket without wildcards"
            what = "the pattern has a wildcard in its host or bucket"
            raise UsageError(what, where=shown, hint=hint)
        base = fixed + query + parameters
        for entry in files.matching(base, rest):
            url = in_folder(base, entry.name)
            found.append(Input(url, entry.name, entry.mark, entry.is_folder))
    else:
        base = os.path.abspath(fixed + os.sep if fixed else ".")
        for match in sorted(glob.iglob(rest, root_dir=base, recursive=True)):
            path = os.path.abspath(os.path.join(base, match))
            name = os.path.relpath(path, base).replace(os.sep, "/")
            found.append(Input(path, name, mark(path), os.path.isdir(path)))
    outputs = without_query(into).rstrip("/") if is_url(into) else os.path.abspath(into)
    left = []
    for each in found:
        path = without_query(each.path) if remote else each.path
        if not (path + separator).startswith(outputs + separator):
            left.append(each)
    if not found:
        hint = "quote the pattern, as in 'runs/**/*.pth'"
        raise UsageError("nothing matches", where=shown, hint=hint)
    if not left:
        why = f"all matches are in the output folder {shown_url(into)}"
        raise UsageError(why, where=shown, hint="use another folder with --into")
    for each in left:
        _plain(each.name, shown)
        yield each


def _remote(url: str) -> Input:
    from ckptkit.remote import files

    name = _plain(without_query(url).rstrip("/").rpartition("/")[2], shown_url(url))
    try:
        entry = files.look(url)
    except PathError:
        return Input(url, name, None)
    return Input(url, name, entry.mark, entry.is_folder)


def _plain(name: str, source: str) -> str:
    """Return `name` unchanged. Raises PathError if `name` is outside the output folder.

    For example, the key of a remote object may contain ``..``.
    """
    for part in name.split("/"):
        drive = os.name == "nt" and ":" in part
        if part in ("", ".", "..") or "\0" in part or os.sep in part or drive:
            raise PathError(f"{name!r} is not a valid output name", where=source)
    return name


# The jobs


def plan(
    inputs: Iterable[Input], recipe: object, *, format: str | None = None, shards: bool = False
) -> list[Job]:
    """Return the jobs for `inputs`.

    `recipe` is JSON data with all settings that the outputs depend on. `format` is the format of
    all outputs. If `format` is None, each input determines a format. With `shards`, each output is
    a folder of shards. Raises UsageError for an unknown format. Also raises UsageError if two
    outputs have the same path, or if one output is a parent folder of another output.
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
    """Return the name of the output: the input's name with the suffix of the output format."""
    if given is None and each.is_folder and not shards:
        try:  # a folder is written in its own format by default
            read = formats.identify(Probe(open_unchecked(each.path)))
            given = formats.for_writing(each.name, keep=read.name)
        except CkptkitError:  # reading the input in the job raises the same error
            pass
    if shards:
        return formats.named(each.name, ())
    return each.name if given is None else formats.named(each.name, given.suffixes)


def _collision(first: Job, second: Job) -> UsageError:
    names = f"{shown_url(first.input.path)} and {shown_url(second.input.path)}"
    where = first.output if first.output == second.output else f"{first.output} and {second.output}"
    return UsageError(
        f"the outputs of {names} would overwrite each other: {where}",
        hint="use a pattern such as 'runs/**/*.pth', which keeps the folders below runs; "
        "or run two batches",
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
    """Run `jobs`, and write outputs to the folder or URL `into`. Yield outcomes in any order.

    `work` runs in this process or in the workers of `pool`. Closing this generator early stops the
    workers. A job may replace an unchanged output of an earlier batch. With `force`, a job may
    replace any file. With `dry_run`, `work` only plans each job and writes nothing. A failed job
    yields an outcome too. Raises UsageError if another batch writes to `into`. Raises OutputError
    if the manifest cannot be written, or if workers keep dying.
    """
    with manifest(into, reading=dry_run) as known:
        marks = _marks(into, [job.output for job in jobs if job.output in known.done])
        todo: list[Task] = []
        for job in jobs:
            record = known.done.get(job.output)
            is_ours = record is not None and tuple(record.made) == marks.get(job.output)
            if is_ours and record is not None and record.job == job.digest and job.input.mark:
                yield job, Outcome("skipped")
                continue
            place = os.path.join(os.path.abspath(into), *job.output.split("/"))
            place = in_folder(into, job.output) if is_url(into) else place
            todo.append(Task(job, place, force or is_ours, dry_run))
        if dry_run:
            yield from _spread(work, todo, pool)
            return
        if is_url(into):
            from ckptkit.remote import files

            folders = {task.job.output.rpartition("/")[0] for task in todo}
            files.make_folders(into, sorted(folders))
        _sweep(into, todo)
        try:
            for job, outcome in _spread(work, todo, pool):
                if outcome.made is not None:
                    known.add(JobRecord(job.output, job.digest, outcome.made))
                yield job, outcome
        finally:
            _sweep(into, todo)


def _marks(into: str, outputs: Iterable[str]) -> dict[str, Mark]:
    """Map the outputs that exist to their current marks."""
    if is_url(into):
        from ckptkit.remote import files

        found = files.below(into)
        return {name: found[name] for name in outputs if name in found}
    marks = ((name, mark(os.path.join(into, name))) for name in outputs)
    return {name: each for name, each in marks if each is not None}


def _sweep(into: str, todo: Sequence[Task]) -> None:
    """Remove the temporary files that killed batches left next to the outputs in `todo`."""
    if is_url(into):
        return
    outputs = {os.path.split(task.destination) for task in todo}
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


def _spread(work: Work, todo: Sequence[Task], pool: Pool | None) -> Results:
    """Run the jobs. Jobs of a worker that died run last, one at a time."""
    if pool is None:
        for task in todo:
            yield task.job, attempt(work, [task], __version__)[0]
        return
    lost: list[Task] = []
    try:
        yield from _together(pool, work, todo, lost)
        for task in lost:
            try:
                outcome = pool.submit(attempt, work, [task], __version__).result()[0]
            except BrokenExecutor:
                error = f"{shown_url(task.job.input.path)}: its worker was killed twice"
                hint = "the job may need more memory; `dmesg` may show what killed the worker"
                outcome = failed(OutputError(error, hint=hint))
            yield task.job, outcome
    except BaseException:
        pool.stop()
        raise


def _together(pool: Pool, work: Work, todo: Sequence[Task], lost: list[Task]) -> Results:
    """Run the jobs in groups. If a worker dies, add its jobs to `lost`."""
    groups = _groups(todo, pool.workers())
    waiting: dict[Future[list[Outcome]], list[Task]] = {}
    deaths = 0
    while True:
        while len(waiting) < AHEAD * pool.workers() and (group := next(groups, None)):
            waiting[pool.submit(attempt, work, group, __version__)] = group
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
                    raise OutputError("workers keep dying before they finish a job") from error
                continue
            deaths = 0
            yield from zip((task.job for task in group), outcomes, strict=True)


def _groups(todo: Sequence[Task], workers: int) -> Iterator[list[Task]]:
    """Yield groups of jobs. A worker runs each group in one call. Small jobs share a group."""
    most = max(1, min(GROUP, len(todo) // (ROUNDS * max(1, workers))))
    group: list[Task] = []
    size = 0
    for task in todo:
        if group and (len(group) >= most or size + task.job.input.size > GROUP_BYTES):
            yield group
            group, size = [], 0
        group.append(task)
        size += task.job.input.size
    if group:
        yield group


# In a worker: run a group of jobs


def attempt(work: Work, tasks: Sequence[Task], version: str) -> list[Outcome]:
    """Run `tasks` in order. Continue after failures.

    Raises OutputError if `version`, the ckptkit version of the caller, is not the version of this
    worker.
    """
    if version != __version__:
        raise OutputError(
            f"a worker has ckptkit {__version__}, but this batch needs {version}",
            hint="install the same version on every worker",
        )
    outcomes = []
    for task in tasks:
        try:
            outcomes.append(_done(work, task))
        except CkptkitError as error:
            outcomes.append(failed(error.at(shown_url(task.job.input.path))))
        except Exception as error:
            outcomes.append(failed(error))
    return outcomes


def failed(error: Exception) -> Outcome:
    """Return the outcome of a job that raised `error`."""
    known = foreseen(error)
    if isinstance(known, CkptkitError):
        return Outcome(
            "failed", error=str(known), hint=known.hint, exit_code=known.exit_code, code=known.code
        )
    message = f"a bug in ckptkit: {type(error).__name__}: {error}"
    return Outcome("failed", error=message, hint="please report it", exit_code=BUG, code="bug")


def _done(work: Work, task: Task) -> Outcome:
    """Run or plan a job. If the output folder is missing, create it. If the job is only planned,
    plan the output in the nearest existing parent folder."""
    state = "planned" if task.dry_run else "done"
    source, place = task.job.input.path, task.destination
    folder, name = os.path.split(place)
    try:
        if not is_url(folder):
            check_folder(folder) if task.dry_run else os.makedirs(folder, exist_ok=True)
    except OSError as error:
        raise OutputError(f"cannot be created: {error.strerror}", where=folder) from error
    if not is_url(folder) and not os.path.isdir(folder):
        while not os.path.isdir(folder):
            folder = os.path.dirname(folder)
        place = _beside(os.path.join(folder, name))
    try:
        made = work(source, place, force=task.force, dry_run=task.dry_run)
    except OutputExistsError as error:
        made = work(source, _beside(place), force=False, dry_run=True)
        if not isinstance(made.plan, Plan) or not same(made.plan, place):
            raise error from None
        # an earlier batch wrote the output, but was killed before it recorded the job
        state = "found"
    except CkptkitError as error:
        if error.where == place:
            error.where = task.destination
        raise
    return Outcome(
        state,
        made.plan.size,
        made.format,
        made.notes,
        made.plan.notes,
        made.warnings,
        None if task.dry_run else mark(task.destination),
    )


def _beside(path: str) -> str:
    """Return an unused path in the folder of `path`, with the suffix of `path`."""
    start = max(path.rfind("/"), path.rfind(os.sep)) + 1
    # File names have at most 255 bytes.
    return f"{path[:start]}.{os.urandom(8).hex()}-{path[start:][-200:]}"


def same(plan: Plan, destination: str) -> bool:
    """Return True if the bytes at `destination` equal the bytes that `plan` would write."""
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
            # startswith compares any buffer without a copy.
            if not source.read(at, len(piece)).startswith(piece):
                return False
            at += len(piece)
    return True


# The manifest lists the finished jobs of an output folder, so that a batch can resume. Each line is
# a JSON object ``{"output": NAME, "job": DIGEST, "made": [SIZE, VERSION]}``. If an output has
# several lines, the last line counts. A local manifest is locked while a batch runs. Lines are
# appended, so a kill loses at most the last line. A remote manifest is rewritten from time to time,
# and when the batch ends.


class JobRecord(NamedTuple):
    """A finished job: its output, its digest, and the mark that the output had after the job."""

    output: str
    job: str
    made: Mark

    def line(self) -> bytes:
        return json.dumps(self._asdict()).encode() + b"\n"


class Manifest(NamedTuple):
    """A dict from each output to its finished job, and a function that adds a finished job."""

    done: dict[str, JobRecord]
    add: Callable[[JobRecord], None]


@contextmanager
def manifest(into: str, *, reading: bool = False) -> Iterator[Manifest]:
    """Yield the manifest of the folder or URL `into`. Create a missing manifest, unless `reading`.

    Raises UsageError if another batch writes to the folder, and OutputError if the manifest cannot
    be written.
    """
    if is_url(into):
        with _remote_manifest(in_folder(into, MANIFEST)) as remote:
            yield remote
        return
    path = os.path.join(into, MANIFEST)

    def failure(error: OSError) -> OutputError:
        return OutputError(f"cannot be written: {error.strerror}", where=path)

    fd = -1
    try:
        if reading:
            check_folder(os.path.dirname(path))
        else:
            os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | _CAREFUL, 0o666)
    except OSError as error:
        raise failure(error) from error

    def add(record: JobRecord) -> None:
        try:
            write_all(fd, record.line())
        except OSError as error:
            raise failure(error) from error

    try:
        if not reading:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise OutputError("cannot be written: it is not a regular file", where=path)
            _lock(fd, path)
        data = _read(path)
        if not reading and not data.endswith(b"\n"):
            os.ftruncate(fd, data.rfind(b"\n") + 1)  # remove an incomplete last line
        yield Manifest(_parse(data), add)
    finally:
        if fd >= 0:
            os.close(fd)


@contextmanager
def _remote_manifest(url: str) -> Iterator[Manifest]:
    """Yield the manifest at a URL. Write it from time to time, and at the end."""
    from ckptkit.remote import files

    done = _parse(files.read_small(url))
    has_changed, due = False, monotonic() + PAUSE

    def add(record: JobRecord) -> None:
        nonlocal has_changed, due
        done[record.output] = record
        has_changed = True
        if monotonic() >= due:
            started = monotonic()
            flush()
            due = monotonic() + max(PAUSE, SHARE * (monotonic() - started))

    def flush() -> None:
        nonlocal has_changed
        if has_changed:
            files.write_small(url, b"".join(each.line() for each in done.values()))
            has_changed = False

    try:
        yield Manifest(done, add)
    finally:
        flush()


def _parse(data: bytes) -> dict[str, JobRecord]:
    """Map each output to its record. Skip incomplete lines, and lines of other programs."""
    found: dict[str, JobRecord] = {}
    for text in data.split(b"\n"):
        with suppress(ValueError, TypeError, KeyError, RecursionError):
            line = json.loads(text)
            output, job, (size, version) = line["output"], line["job"], line["made"]
            if isinstance(output, str) and isinstance(job, str) and isinstance(line["made"], list):
                found[output] = JobRecord(output, job, (size, version))
    return found


def _read(path: str) -> bytes:
    """Return the bytes of a manifest, or no bytes if the manifest is missing.

    Raises OutputError if the manifest is not a regular file, or is too large.
    """
    try:
        with closing(LocalFile(path, follow=False)) as file:
            if file.size > LARGEST:
                raise LimitError(
                    f"has {file.size:,} bytes; a manifest may have at most {LARGEST:,} bytes"
                )
            return file.read(0, file.size)
    except CkptkitError as error:
        if not os.path.lexists(path):
            return b""
        what = f"cannot be read: {error.message}"
        raise OutputError(what, where=path, hint=f"rm {shell_word(path)}") from error


def _lock(fd: int, path: str) -> None:
    try:
        import fcntl
    except ImportError:  # Windows lacks fcntl
        return
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        where, hint = os.path.dirname(path), "wait for the other batch, or use another --into"
        raise UsageError(
            "another batch is writing to this folder", where=where, hint=hint
        ) from error
    except OSError:  # a file system without locks
        pass
