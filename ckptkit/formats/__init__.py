"""Read a file or folder into a Checkpoint, and plan the output files of a Checkpoint.

Each family of formats is a module. ``format.py`` defines the interface of a format. ``table.py``
lists the formats. Uses core, remote, compute, rules, pickles, quantized and publish.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from ckptkit.core.bytesource import ByteSource, Folder, LocalFile
from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.errors import (
    CkptkitError,
    CorruptError,
    TruncatedError,
    UnsafeGlobalError,
    UnsupportedError,
    UsageError,
    placed,
)
from ckptkit.core.options import DEFAULT, LAYOUT, Options
from ckptkit.core.plan import Patch, Plan
from ckptkit.core.text import (
    and_more,
    argument,
    behind_page,
    flatten,
    plural,
    shell_command,
    shown,
    shown_url,
    typed,
)
from ckptkit.formats.format import (
    RECOVER,
    UNVERIFIED,
    CheckedPart,
    Defect,
    Format,
    Probe,
    Recovered,
)
from ckptkit.formats.table import (
    BY_NAME,
    BY_SUFFIX,
    COMPRESSED,
    FORMATS,
    GGUF,
    NONE,
    PARALLEL,
    SHARDED,
    TORCH_ZIP,
)

# Values of `Format.everything` for formats that can store the whole tree.
WHOLE = ("always", "asked")


def match(probe: Probe) -> Format | None:
    """Return the format that recognizes a file or folder.

    Return None if no format recognizes the file or folder.

    Raises UsageError if the option `parts` is set and the probe is a file. Raises CorruptError if a
    container that several formats share, such as a zip file, is damaged.
    """
    if probe.options.parts is not None:
        if probe.is_folder:
            return PARALLEL
        raise UsageError(
            f"is a file; {typed('--parts', 'parts')} describes the files of a folder",
            where=probe.name,
        )
    return next((format for format in FORMATS if format.matches(probe)), None)


def identify(probe: Probe) -> Format:
    """Return the format of a file or folder, recognized by its content.

    If no format recognizes the file, raises an InputError that describes the content of the file.
    """
    found = match(probe)
    if found is not None:
        return found
    from ckptkit.formats import whats_inside

    refusal = whats_inside.refusal(probe)
    if elsewhere := behind_page(probe.name):
        refusal.hint = f"the file itself is at {elsewhere}"
    raise refusal


def read(place: ByteSource | Folder, options: Options = DEFAULT) -> Checkpoint:
    """Read the headers of a file or folder into a Checkpoint. Every error names the file."""
    probe = Probe(place, options)
    try:
        checkpoint = identify(probe).read(probe)
        source = checkpoint.source
        if probe.is_folder and isinstance(source, ByteSource) and checkpoint.folder is None:
            inside = source.folder_and_name()  # `source` is the only file that was read
            folder = None if inside is None else inside[0]
            checkpoint = replace(checkpoint, folder=folder)
        checkpoint = _with_part(checkpoint)
        return replace(checkpoint, words=options.words) if options.words else checkpoint
    except CkptkitError as error:
        if isinstance(error, (TruncatedError, CorruptError)) and (command := recoverable(probe)):
            error.hint = "; ".join(filter(None, (error.hint, _SAVES[command])))
        raise error.at(place.name) from error.__cause__


# Signs that a file may be one rank's shard: its file name, entries of its root dict, or classes in
# its pickle.
_PART_NAMES = re.compile(
    r"world_size_[0-9]+_rank_|layer_[0-9]+-model_|zero_pp_rank_|mp_rank_"
    r"|consolidated\.[0-9]{2}\.pth|model-rank-[0-9]+-part-"
)
_PART_ENTRIES = frozenset({"args", "mp_world_size", "shard_metadata"})
_PIECES = ("DTensor", "ShardedTensor")


def _with_part(checkpoint: Checkpoint) -> Checkpoint:
    """Set `Checkpoint.part` if the file contains only one rank's shard. Return the checkpoint."""
    root, source = checkpoint.root, checkpoint.source
    if not isinstance(source, ByteSource) or not (
        _PART_NAMES.search(os.path.basename(source.name))
        or (isinstance(root, dict) and any(key in root for key in _PART_ENTRIES))
        or any(each.name in _PIECES for each in checkpoint.globals)
    ):
        return checkpoint
    from ckptkit.formats.distributed.parts import with_part

    return with_part(checkpoint)


def check(probe: Probe) -> Iterator[CheckedPart | Defect]:
    """Yield each byte range that has a checksum, and each defect.

    If the format has no `check` function, yield nothing.
    """
    check_format = identify(probe).check
    return iter(()) if check_format is None else check_format(probe)


# `recoverable` tests a command only on a damaged file of at most this size in bytes.
TRIED = 64 << 20
_SAVES = {
    RECOVER: f"`ckptkit {RECOVER} {{where}} {{new}}` saves the intact tensors",
    UNVERIFIED: f"`ckptkit {UNVERIFIED} {{where}} {{new}}` saves tensors that may be garbage",
}


def recoverable(probe: Probe) -> str:
    """Return the command that recovers some tensors of a damaged file, or "".

    If the file is local and at most `TRIED` bytes long, this function runs the recovery in memory
    to test the command. Otherwise, this function reads headers only. Without the test, the returned
    command may fail because no tensor is intact.
    """
    if probe.is_folder:
        return ""
    is_large = probe.source.remote or probe.source.size > TRIED
    works = _begins if is_large else salvaged
    commands = (RECOVER, UNVERIFIED)
    return next((each for each in commands if works(probe.source, each == UNVERIFIED)), "")


def _begins(place: ByteSource, unverified: bool) -> bool:
    """Return whether a recovery finds the names and shapes of tensors. Read headers only."""
    probe = Probe(place)
    tests = (format.recoverable or format.recover for format in FORMATS)
    try:
        return any(test(probe, unverified) is not None for test in tests if test is not None)
    except CkptkitError:
        return False


def salvaged(place: ByteSource, unverified: bool = False) -> Recovered | None:
    """Return the result of `recover` for a damaged file, or None if every tensor is lost."""
    try:
        found = recover(place, unverified=unverified)
        format = for_writing(place.name, keep=found.checkpoint.format)
        layout(found.checkpoint, format, DEFAULT)
    except CkptkitError:
        return None
    return found


def recover(place: ByteSource | Folder, *, unverified: bool = False) -> Recovered:
    """Recover the intact tensors of a damaged file.

    If `unverified` is true, also recover tensors that cannot be verified. Raises CorruptError if no
    tensor can be recovered. Raises UnsupportedError if ckptkit cannot recover files of this
    format.
    """
    probe = Probe(place)
    try:
        for format in FORMATS:
            if not format.readable and format.matches(probe):
                format.read(probe)  # raises an error that says why ckptkit cannot read the format
            if (
                format.recover is not None
                and (found := format.recover(probe, unverified)) is not None
            ):
                return replace(found, checkpoint=_with_part(found.checkpoint))
    except CkptkitError as error:
        if UNVERIFIED in (error.hint or "") and isinstance(place, ByteSource):
            from ckptkit.formats.recovering import AGAIN

            error.hint = error.hint if not unverified and salvaged(place, True) else AGAIN
        raise error.at(place.name) from error.__cause__
    able = ", ".join(format.name for format in FORMATS if format.recover is not None)
    raise UnsupportedError(
        "has a format that cannot be recovered", where=place.name, hint=f"formats that can: {able}"
    )


def writable() -> Iterator[Format]:
    """Return the formats that ckptkit can write."""
    return (format for format in FORMATS if format.layout is not None)


def by_name(name: str | None) -> Format | None:
    """Return the format called `name`, or None."""
    return BY_NAME.get(name or "")


def is_folder(name: str) -> bool:
    """Return whether `name` is a format that ckptkit writes as a folder."""
    format = by_name(name)
    return format is not None and format.is_folder and format.layout is not None


def for_writing(
    path: str | os.PathLike[str],
    name: str | None = None,
    keep: str | None = None,
    *,
    shards: bool = False,
) -> Format:
    """Choose the format of the output `path`.

    If `name` is given, use the format called `name`. If `name` is None, use the format of the
    suffix of `path`. If the suffix belongs to no format, use the input's format. `keep` is the name
    of the input's format.

    If `shards` is true, the format must write a folder of shards (by default safetensors). Raises
    UsageError if ckptkit cannot write the format.
    """
    name = _chosen(path, keep, shards) if name is None else name
    format = by_name(name)
    if format is None or format.layout is None:
        names = ", ".join(each.name for each in writable())
        known = "cannot be written" if format is not None else "is not a format of ckptkit"
        instead = "" if format is None or not format.unwritten else f"{format.unwritten}; "
        hint = f"{instead}formats that can be written: {names}"
        raise UsageError(f"{name!r} {known}", hint=hint)
    if shards and not format.shards:
        able = ", ".join(each.name for each in writable() if each.shards)
        raise UsageError(
            f"{name} writes a single file; {typed('--shard-size', 'shard_size')} needs a folder",
            hint=f"formats of folders: {able}",
        )
    return format


def _chosen(path: str | os.PathLike[str], keep: str | None, shards: bool) -> str:
    """Return the name of the format of the output `path`, as `for_writing` describes."""
    by_suffix, only_read, kept = of_suffix(path), suffixed(path), BY_NAME.get(keep or "")
    if only_read is not None and only_read.layout is None:
        return only_read.name
    if shards and by_suffix is not None and not by_suffix.shards:
        raise UsageError(
            f"is the name of a {by_suffix.name} file; shards need a folder",
            where=shown_url(os.fspath(path)),
            hint=f"name a folder, or omit {typed('--shard-size', 'shard_size')}",
        )
    if shards:
        return kept.name if kept is not None and kept.shards else SHARDED.name
    if by_suffix is not None:
        return by_suffix.name
    if kept is None:
        raise unknown_suffix(path)
    return kept.name if kept.layout is not None else kept.rewrite_as or TORCH_ZIP.name


def unknown_suffix(path: str | os.PathLike[str]) -> UsageError:
    """Return the error for an output path whose suffix belongs to no format."""
    known = ", ".join(BY_SUFFIX)
    return UsageError(
        "the suffix does not name a format",
        where=shown_url(os.fspath(path)),
        hint=f"use one of {known}; {typed('--format torch-zip', 'format=')} accepts any suffix; "
        f"{typed('--shard-size 5GB', 'shard_size=5 * 10**9')} writes a folder",
    )


def in_folder(name: str) -> str | None:
    """Return the name of the format of a folder whose shards have the format `name`.

    Return None if ckptkit has no format for such a folder.
    """
    format = by_name(name)
    return None if format is None else format.folder_as


def of_suffix(path: str | os.PathLike[str]) -> Format | None:
    """Return the format that ckptkit writes for the suffix of a path, or None."""
    lower = os.fspath(path).lower()
    return next((each for suffix, each in BY_SUFFIX.items() if lower.endswith(suffix)), None)


def suffixed(path: str | os.PathLike[str]) -> Format | None:
    """Return the first format with the suffix of a path, even if ckptkit cannot write it."""
    lower = os.fspath(path).lower()
    return next((each for each in FORMATS if lower.endswith(each.suffixes)), None)


def named(name: str, suffixes: Sequence[str]) -> str:
    """Return `name` if it ends in one of the suffixes; otherwise append the first suffix.

    If `suffixes` is empty, return `name` without its suffix, as the name of a folder.
    """
    if suffixes and name.lower().endswith(tuple(suffixes)):
        return name
    stem = _stem(_stem(name, COMPRESSED.suffixes), (*BY_SUFFIX, *GGUF.suffixes))
    return stem + suffixes[0] if suffixes else stem


def _stem(name: str, suffixes: Iterable[str]) -> str:
    """Remove the suffix from `name`. If several of `suffixes` match, remove the longest suffix."""
    longest = max((each for each in suffixes if name.lower().endswith(each)), key=len, default="")
    stem = name[: len(name) - len(longest)]
    return name if not stem or stem.endswith("/") else stem


def layout(checkpoint: Checkpoint, format: Format, options: Options) -> Plan:
    """Plan the output of `checkpoint` in `format`. Every error names the checkpoint."""
    assert format.layout is not None
    if options.all and not options.extras:
        raise UsageError(
            f"{typed('--all', 'all=True')} needs ckptkit's own metadata entry, which "
            f"{typed('--no-extras', 'extras=False')} drops: use only one of them"
        )
    if options.all and format.everything not in WHOLE:
        able = ", ".join(each.name for each in writable() if each.everything in WHOLE)
        raise UsageError(
            f"{format.name} cannot store a whole checkpoint ({typed('--all', 'all=True')})",
            hint=f"formats that can: {able}",
        )
    try:
        if checkpoint.format == GGUF.name != format.name:
            _refuse_blocks(checkpoint, format)
        # If the output cannot store DTensor and ShardedTensor objects, write plain tensors instead.
        keeps = options.all or format.everything == "always"
        keeps = keeps and options.objects != "drop"
        if not keeps or format.name != checkpoint.format:
            if not options.all:
                checkpoint.require_complete()
            if not keeps and any(each.name in _PIECES for each in checkpoint.globals):
                from ckptkit.formats.distributed.parts import plain

                checkpoint = plain(checkpoint)
        if not holds_program(checkpoint):
            return format.layout(checkpoint, options)
        from ckptkit.formats.whats_inside import notes, without_program

        plain_weights = without_program(checkpoint)
        plan = format.layout(plain_weights, options)
        return replace(plan, notes=(*notes(checkpoint, plain_weights), *plan.notes))
    except CkptkitError as error:
        if isinstance(error, UnsafeGlobalError) and checkpoint.name and _is_module(checkpoint):
            words = _converting(checkpoint.name, "-weights")
            error.hint = f"to write only the weights: {shell_command(words)}"
        raise error.at(checkpoint.name or "") from error.__cause__


def _converting(name: str, ending: str = "") -> list[str]:
    """Return the command that converts the file `name` to safetensors."""
    stem = os.path.splitext(os.path.basename(name.rstrip("/")))[0]
    return ["ckptkit", "convert", *argument(name), f"{stem}{ending}.safetensors"]


def _refuse_blocks(checkpoint: Checkpoint, format: Format) -> None:
    """Raise UnsupportedError if `format` cannot store the quantized blocks of a GGUF file."""
    if not checkpoint.selection:
        return
    blocks = Counter(
        each.dtype.name for each in checkpoint.selection.tensors.values() if each.dtype.block > 1
    )
    from ckptkit import quantized  # imported only for GGUF files

    unread = quantized.find(checkpoint).unread
    if not blocks and not unread:
        return
    command = [*_converting(checkpoint.name or "model.gguf"), "--dequantize", "bfloat16"]
    command += ["--part-only"] * checkpoint.part_only
    if not unread:
        raise UnsupportedError(
            f"{plural(blocks.total(), 'tensor')} of GGUF types ({', '.join(blocks)}); "
            f"{format.name} cannot store these types",
            hint=f"`{shell_command(command)}` dequantizes them",
        )
    drops = flatten(("--drop", each.name) for each in unread)
    hint = f"`{shell_command((*command, *drops))}` drops such tensors"
    if len(unread) > 4 or len(unread) == len(checkpoint.selection.tensors):
        hint = "--drop drops such tensors"
    raise UnsupportedError(
        f"{shown(unread[0].name)} cannot be dequantized: {unread[0].reason}"
        + and_more(len(unread) - 1),
        hint=hint,
    )


def _is_module(checkpoint: Checkpoint) -> bool:
    """Return whether the weights are a pickled module.

    `--objects drop` drops the module, and with it the weights.
    """
    try:
        return checkpoint.selection is not None and checkpoint.selection.is_module
    except CkptkitError:
        return False


def patch(before: Checkpoint, after: Checkpoint, format: Format, options: Options) -> Patch | None:
    """Plan an in-place edit that turns the file of `before` into `after`.

    Return None if the format has no `patch` function, or if the edit changes too many bytes. Every
    error names the checkpoint.
    """
    if format.patch is None:
        return None
    is_plain = all(getattr(options, name) == getattr(DEFAULT, name) for name in LAYOUT)
    unchanged = after.root is before.root and after.extras == before.extras and is_plain
    if unchanged and isinstance(before.source, LocalFile):
        return Patch(before.source, None, (), None, before.source.size)
    with placed(before.name or ""):
        return format.patch(before, after, options)


def holds_program(checkpoint: Checkpoint) -> bool:
    """Return whether the file contains a program. ckptkit writes only the weights of a program."""
    return BY_NAME.get(checkpoint.format, NONE).program
