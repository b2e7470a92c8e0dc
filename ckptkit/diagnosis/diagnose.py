"""Diagnose a checkpoint that does not load, apply all fixes in one pass, and report."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, cast

from ckptkit import edits, formats, quantized
from ckptkit.analysis.matching import Kind, prefixes, shapes_of
from ckptkit.analysis.summary import summarize
from ckptkit.analysis.verify import Verdict, verify
from ckptkit.api import Conversion, PathLike, convert
from ckptkit.core.bytesource import ByteSource, Folder
from ckptkit.core.checkpoint import Checkpoint, Source
from ckptkit.core.errors import (
    NO_VERSION,
    AmbiguousError,
    CkptkitError,
    CorruptError,
    FormatError,
    LimitError,
    SeveralError,
    TensorError,
    UnsafeGlobalError,
    UnsupportedError,
    UsageError,
    coded,
)  # fmt: skip
from ckptkit.core.options import DEFAULT, Options
from ckptkit.core.text import is_url, shown_url, without
from ckptkit.core.tree import children, key_text
from ckptkit.core.weights import locate
from ckptkit.diagnosis import container, content, fit
from ckptkit.diagnosis.cause import Cause, Facts, Fix, cause, some, together
from ckptkit.edits import keys
from ckptkit.formats.dcp import part_of
from ckptkit.formats.folder import INDEX
from ckptkit.formats.format import Loss, Probe, Recovered, open_place, steady
from ckptkit.formats.table import BY_NAME, DCP_SHARD, FORMATS, NONE
from ckptkit.loading import building
from ckptkit.loading.model import is_implied, seen_by
from ckptkit.quantized.group import configured
from ckptkit.scanning.find import refused_by_weights_only

if TYPE_CHECKING:
    from torch import nn

    from ckptkit.analysis.json_types import DoctorReport

# Maximum size of a file whose tensors are verified, in bytes. Larger files would take too long.
READ = 256 << 20
REFUSALS = (  # errors about the content of a file
    FormatError, AmbiguousError, UnsupportedError, LimitError, TensorError, UnsafeGlobalError,
)  # fmt: skip
FOLDERS = 16  # maximum number of folders in which to look for a complete checkpoint
_NUMBER = re.compile("[0-9]+")
# Classes and functions that all versions of torch have
_OLD = ("_rebuild_tensor_v2", "_rebuild_parameter", "OrderedDict", "Size", "device")


@dataclass(frozen=True)
class Diagnosis:
    """The causes found in a checkpoint.

    For a damaged file, ``checkpoint`` contains only the intact tensors. ``checkpoint`` is None if
    ckptkit cannot read any tensor.
    """

    path: str
    causes: tuple[Cause, ...]
    checkpoint: Checkpoint | None
    readable: bool  # True if reading succeeded
    lost: tuple[Loss, ...] = ()  # Damaged tensors that `checkpoint` does not contain.
    words: tuple[str, ...] = ()  # Command line options that select the model and the key.

    @property
    def fix(self) -> Fix | None:
        """Return one fix for all causes. Return None if no cause has a fix."""
        return None if self.checkpoint is None else together(self.causes)

    @property
    def unfixed(self) -> tuple[Cause, ...]:
        """Return the causes that have no fix."""
        return tuple(cause for cause in self.causes if cause.fix is None)


def examine(
    path: PathLike,
    options: Options = DEFAULT,
    *,
    model: nn.Module | None = None,
    words: tuple[str, ...] = (),
) -> Diagnosis:
    """Return all reasons why this machine or `model` cannot load the checkpoint `path`.

    `options` are the options for reading. `words` are the command line options that select the
    model and the key. This function reads headers. It also verifies the tensors of local files
    smaller than `READ`.

    Raises PathError for a path that cannot be opened, UsageError for a `key` that does not exist,
    and SeveralError for a folder of several checkpoints. If a remote file cannot be read,
    also raises the error of the read.
    """
    place = open_place(path)
    with steady(place, remote=True):
        found = _examine(shown_url(os.fspath(path)), place, options, model, words)
    return replace(found, words=words)


def _examine(
    typed: str,
    place: ByteSource | Folder,
    options: Options,
    model: nn.Module | None,
    words: tuple[str, ...],
) -> Diagnosis:
    try:
        checkpoint = formats.read(place, options)
    except SeveralError:
        raise
    except REFUSALS as error:
        return _examine_refused(typed, place, error)
    damage: Verdict | None = None
    if isinstance(place, ByteSource) and not place.remote and place.size <= READ:
        with suppress(*REFUSALS):
            verdict = verify(place.name, options)
            damage = verdict if verdict.damaged else None
    recovered = None if damage is None else _recovered(place)
    lost: tuple[Loss, ...] = ()
    if recovered is not None:
        checkpoint, lost = recovered.checkpoint, recovered.lost
    checkpoint = checkpoint if options.key is None else checkpoint.with_key(options.key)
    if checkpoint.part is not None:
        found = [container.part(checkpoint.part)]
    else:
        found = _content(typed, checkpoint, model, place)
        if model is not None and not any(cause.code == "ambiguous" for cause in found):
            found += _fit(typed, checkpoint, model, words)
    if damage is not None:
        what = [
            f"{each.what} ({some(each.tensors)})" if each.tensors else each.what
            for each in damage.findings[:3]
        ]
        refusal = container.Refusal(
            typed, CorruptError("; ".join(what)), known=True, recoverable=recovered is not None,
            opens=BY_NAME.get(damage.format or "", NONE).loaded_by_torch,
        )  # fmt: skip
        found = [container.refused(refusal), *_beside_damage(found, recovered)]
    return Diagnosis(typed, tuple(found), checkpoint, readable=True, lost=lost)


def apply_fixes(
    found: Diagnosis,
    destination: PathLike,
    *,
    force: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Conversion:
    """Apply `found.fix` and write the result to `destination`, whose suffix selects the format.

    Raises UsageError if no cause has a fix. Also raises the errors that `convert` raises.
    """
    if found.checkpoint is not None:
        found.checkpoint.require_complete()
    fix = found.fix
    if fix is None or found.checkpoint is None:
        raise UsageError("ckptkit has no fix for any of the problems", where=found.path)
    given = dict(fix)
    options = Options(**given.pop(edits.OPTIONS, {}), force=force, progress=progress)
    steps = [edits.step(word, **arguments) for word, arguments in given.items()]
    return convert(found.checkpoint, destination, *steps, options=options)


# A file that cannot be read


def _examine_refused(path: str, place: ByteSource | Folder, error: CkptkitError) -> Diagnosis:
    probe = Probe(place)
    if DCP_SHARD.matches(probe):
        return Diagnosis(path, (container.part(part_of(probe)),), None, readable=False)
    try:
        known = formats.match(probe) is not None
    except CkptkitError:
        known = True
    damaged = known and isinstance(error, FormatError)
    recovered = _recovered(place) if damaged else None
    unverified = damaged and recovered is None and _recovered(place, unverified=True) is not None
    whole = None
    if known and isinstance(place, Folder) and not is_url(place.name):
        whole = _whole_beside(place)
    refusal = container.Refusal(
        path, error, b"" if isinstance(place, Folder) else probe.head, isinstance(place, Folder),
        known, recovered is not None, unverified, whole=whole,
    )  # fmt: skip
    found = [container.refused(refusal)]
    if recovered is None:
        return Diagnosis(path, tuple(found), None, readable=False)
    found += _beside_damage(_content(path, recovered.checkpoint, None, place), recovered)
    return Diagnosis(path, tuple(found), recovered.checkpoint, readable=False, lost=recovered.lost)


def _recovered(place: ByteSource | Folder, unverified: bool = False) -> Recovered | None:
    """Return the intact tensors of a local file. Return None if no tensor is intact.

    If `unverified` is True, also return the tensors that ckptkit cannot verify.
    """
    if isinstance(place, Folder) or place.remote:
        return None
    return formats.salvaged(place, unverified)


def _whole_beside(place: Folder) -> str | None:
    """Return the latest readable checkpoint folder of the same training run.

    The function first searches inside `place`, and then in the parent folder of `place`. It assumes
    that the folder names of one training run differ only in numbers or suffixes.
    """
    path, name = os.path.abspath(place.name), os.path.basename(os.path.abspath(place.name))
    start = os.path.dirname(place.name.rstrip(os.sep))
    inside = [os.path.join(place.name, each) for each in place.folders()]
    try:
        beside = Folder(os.path.dirname(path)).folders()
    except CkptkitError:
        beside = ()
    related = [
        os.path.join(start, each)
        for each in beside
        if each != name
        and (
            _NUMBER.sub("#", each) == _NUMBER.sub("#", name)
            or each.partition(".")[0] == name.partition(".")[0]
        )
    ]
    for each in (*_latest(inside), *_latest(related)):
        try:
            formats.read(Folder(each))
        except CkptkitError:
            continue
        return each
    return None


def _latest(paths: Any) -> list[str]:
    """Return at most FOLDERS folders. Folders with the highest numbers in their names are first."""
    numbers = {path: [int(n) for n in _NUMBER.findall(os.path.basename(path))] for path in paths}
    return sorted(numbers, key=lambda path: (numbers[path], path), reverse=True)[:FOLDERS]


# A file that can be read


def _beside_damage(causes: Iterable[Cause], recovered: Recovered | None) -> list[Cause]:
    """Remove the commands from `causes`, because these commands would fail on a damaged file.

    If some tensors are intact, keep the fixes. `doctor --fix` fixes a copy of the intact tensors.
    """
    kept = recovered is not None
    return [replace(each, command=None, fix=each.fix if kept else None) for each in causes]


def _content(
    path: str, checkpoint: Checkpoint, model: nn.Module | None, place: ByteSource | Folder
) -> list[Cause]:
    codes = quantized.find(checkpoint)
    summary = summarize(checkpoint)
    source = checkpoint.source
    format = BY_NAME.get(checkpoint.format, NONE)
    outer, step = None, None
    if not isinstance(place, Folder):
        holders = (each for each in FORMATS if each.chooses and not each.is_folder)
        outer = next((each for each in holders if each.matches(Probe(place))), None)
    # Another check reports classes and functions that `torch.load` rejects.
    if isinstance(source, ByteSource) and checkpoint.globals and format.loaded_by_torch:
        step = refused_by_weights_only(source)
    devices: tuple[str, ...] | None = ("cpu",)
    if not {row.tensor.device for row in summary.rows} <= {"cpu", "meta"}:
        here: Any = building.environment()
        devices = tuple(here["devices"]) if here["torch"] else None
    names = [
        (each.module, each.name)
        for each in checkpoint.globals
        if each.module.partition(".")[0] == "torch"
        and "." not in each.name
        and each.name not in _OLD
        and not each.name.endswith("Storage")
    ]
    facts = Facts(
        path,
        summary,
        checkpoint.root,
        devices=devices,
        lacking=tuple(building.torch_lacks(names)) if names else (),
        ambiguous=tuple(_ambiguous(checkpoint)),
        no_index=isinstance(source, Folder)
        and format.shards
        and not any(name.endswith(INDEX) for name in source.list()),
        no_version=bool(coded(checkpoint.warnings, NO_VERSION)),
        with_model=model is not None,
        quantized=codes,
        needs_floats=model is not None and bool(codes.foreign_to(building.model_shapes(model))),
        method=configured(source),
        checkpoint=checkpoint,
        container=outer,
        step=step,
    )
    return content.causes(facts)


def _ambiguous(checkpoint: Checkpoint) -> Iterator[str]:
    """Yield the names of the entries that could be the weights, if the choice is ambiguous."""
    try:
        checkpoint.selection  # noqa: B018  raises
    except AmbiguousError:
        for key, node in children(checkpoint.root):
            with suppress(AmbiguousError):
                if locate(node) is not None and key_text(key):
                    yield key_text(key)


def _fit(
    path: str, checkpoint: Checkpoint, model: nn.Module, words: tuple[str, ...]
) -> list[Cause]:
    weights = checkpoint.selection
    if weights is None:
        return [cause("no-weights")]
    shapes = building.model_shapes(model)
    theirs = {name: Kind(*kind) for name, kind in shapes.items()}
    seen = seen_by(checkpoint, shapes).weights
    ours = {name: Kind(tensor.dtype.name, tensor.shape) for name, tensor in seen.items()}
    way = prefixes(*map(shapes_of, (ours, theirs)))
    versions: Mapping[str, Any] = keys.paths_of(weights.node) or {}
    implied = {
        name for name in theirs if is_implied(way.strip + name.removeprefix(way.add), versions)
    }
    expected = without(theirs, implied.difference(way(name) for name in ours))
    for name, kind in ours.items():  # torch before 0.4 saved scalars with shape (1,)
        if kind.shape == (1,) and way(name) in expected and expected[way(name)].shape == ():
            ours[name] = Kind(kind.dtype, ())
    ties = [[name for name in same if name in expected] for same in building.model_ties(model)]
    is_quantized = bool(quantized.find(checkpoint))
    chosen = checkpoint.chosen
    return fit.causes(fit.Fitting(path, ours, expected, way, ties, words, is_quantized, chosen))


# The report, as JSON values


def doctor(
    source: Source, *, model: nn.Module | str | None = None, key: str | None = None
) -> DoctorReport:
    """Return the reasons why a file does not load, and the commands that fix the file.

    The result is the JSON object of ``ckptkit doctor --json``. `model` is the torch.nn.Module for
    the weights, or the name of a class. The name has the form ``package.module:Class`` or
    ``path/to/file.py:Class``. `doctor` imports the class and builds a model. Raises SeveralError if
    `source` is a folder of several checkpoints.
    """
    from ckptkit.analysis.reports import file_of, listed
    from ckptkit.core import arguments

    path, read = file_of(source), Options(key=key)
    name = model if isinstance(model, str) else type(model).__qualname__
    options = ("--model", model) if isinstance(model, str) else ()
    if model is not None:
        model = building.model_from(model) if isinstance(model, str) else model
        arguments.module("model", model)
    words = (*options, *(("--key", key) if key and options else ()))
    found = examine(path, read, model=model, words=words)
    facts = report(found, None, found, None if model is None else name)
    return cast("DoctorReport", listed(facts))


def report(
    found: Diagnosis, done: Conversion | None, left: Diagnosis, model: str | None
) -> dict[str, Any]:
    """Return the JSON object of `doctor`, with the causes and the applied fixes.

    `model` is the name of the model. `left` contains the causes that remain after the fixes.
    """
    fixed = None
    if done is not None:
        fixed = {
            "output": done.path,
            "format": done.format,
            "done": list(done.notes),
            "left_out": list(done.plan.notes),
            "lost": list(map(asdict, found.lost)),
            "warnings": list(done.warnings),
            "remaining": list(map(_facts, left.causes)),
        }
    return {
        "file": found.path,
        "model": model,
        "readable": found.readable,
        "format": None if found.checkpoint is None else found.checkpoint.format,
        "causes": list(map(_facts, found.causes)),
        "fixed": fixed,
    }


def _facts(cause: Cause) -> dict[str, Any]:
    facts = {name: getattr(cause, name) for name in ("code", "level", "title", "explanation")}
    return {**facts, "command": cause.command, "fixable": cause.fix is not None}
