"""Suggest shell commands that fix problems of a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import repeat

from ckptkit.analysis.summary import Summary
from ckptkit.core.errors import RUNS_CODE, coded
from ckptkit.core.text import NAMES, argument, flatten, output_name, shell_command, some
from ckptkit.core.tree import join
from ckptkit.core.weights import WRAPPERS
from ckptkit.formats.table import BY_NAME, NONE, SAFETENSORS, TORCH_SUFFIXES

MAX_WRAPPERS = 8  # maximum number of nested prefixes, such as "module."
MIN_UNUSED = 1 << 20  # minimum number of unused bytes for a hint


def advise(summary: Summary) -> tuple[str, ...]:
    """Return one hint for each problem, such as unused bytes or a ``module.`` prefix.

    Most hints contain a command that solves the problem.
    """
    if summary.part is not None:
        return (summary.part.hint,)
    # If unpickling the file would run code, the commands need --objects drop.
    drop = ("--objects", "drop") if coded(summary.warnings, RUNS_CODE) else ()
    found: list[str] = []
    if not drop or summary.survives_dropping():
        found += _edits(summary, drop)
    return (*found, *_objects(summary), *_others(summary))


def _edits(summary: Summary, drop: tuple[str, ...]) -> Iterator[str]:
    """Yield hints: commands to rename keys, change devices, drop unused bytes, or dequantize."""
    path, names = summary.path, [row.name for row in summary.rows if row.name is not None]
    if found := wrappers(names):
        count = sum(name.startswith(found[0]) for name in names)
        how_many = "all" if count == len(names) else f"{count:,} of {len(names):,}"
        command = strip_module(path, found, *summary.chosen, *drop)
        yield f"{how_many} keys start with {''.join(found)!r}: {command}"
    held = [row.tensor.storage for row in summary.rows]
    devices = dict.fromkeys([each.device for each in held if each is not None])
    away = [device for device in devices if device.partition(":")[0] not in ("cpu", "meta")]
    if away:
        command = edit("remap", path, "cpu", *drop, "--to", "cpu", *summary.words)
        yield f"saved on {some(away)}; to load it without that device: {command}"
    unused = summary.totals.unused_nbytes
    if unused > max(MIN_UNUSED, summary.totals.nbytes // 10):
        command = convert(path, "compact", *drop, "--compact", *summary.words)
        yield f"{unused:,} bytes of storages belong to no tensor; to drop these bytes: {command}"
    if number := packed(summary):
        command = convert(path, "float", *summary.chosen, *drop, "--dequantize")
        yield (
            f"{number:,} quantized tensors are outside the state_dict; to add dequantized "
            f"copies to the state_dict: {command}"
        )


def strip_module(path: str, prefixes: Sequence[str] = ("module.",), *options: str) -> str:
    """Return the command that removes `prefixes` (the outermost first) from the keys of the file
    `path`."""
    return edit("strip-module", path, "stripped", *options, *prefix_options(prefixes))


def prefix_options(prefixes: Sequence[str]) -> tuple[str, ...]:
    """Return the options of `strip-module` that select these prefixes."""
    words = flatten(("--prefix", each) for each in prefixes)
    return () if [*prefixes] == ["module."] else tuple(words)


def wrappers(names: Sequence[str]) -> list[str]:
    """Return the wrapper prefixes, such as ``module.``, that more than half of the names have.

    If several prefixes are nested, the outermost prefix is first.
    """
    found: list[str] = []
    while len(found) < MAX_WRAPPERS:
        wrapped = [name for name in names if name.startswith(tuple(WRAPPERS))]
        counts = {each: sum(map(str.startswith, wrapped, repeat(each))) for each in WRAPPERS}
        common = [each for each, count in counts.items() if 2 * count > len(names)]
        if not common:
            break
        found.append(common[0])
        names = [name.removeprefix(common[0]) for name in names]
    return found


def add_module(path: str, prefix: str = "module.", *options: str) -> str:
    """Return the command that adds `prefix` to the keys of the file `path`."""
    option = () if prefix == "module." else ("--prefix", prefix)
    return edit("add-module", path, "wrapped", *options, *option)


def rename(path: str, mapping: str, *options: str) -> str:
    """Return the command that renames the weights of `path` with the JSON file `mapping`."""
    return edit("rename", path, "renamed", "--map", mapping, *options)


def recover(path: str, unverified: bool = False) -> str:
    """Return the command that saves the intact tensors of the file `path`."""
    return edit("recover", path, "recovered", *(("--unverified",) if unverified else ()))


def fixed(path: str) -> str:
    """Return the name of a fixed copy of `path`."""
    return output_name(
        path,
        "fixed",
        None if path.lower().endswith((*TORCH_SUFFIXES, *SAFETENSORS.suffixes)) else ".pth",
    )


def edit(command: str, path: str, mark: str, *options: str, suffix: str | None = None) -> str:
    """Return a command that reads ``run.pth`` and writes ``run-<mark>.pth``.

    `suffix` replaces the suffix of the output.
    """
    output = output_name(path, mark, suffix)
    words = (command, *options, *argument(path), output)
    return shell_command(("ckptkit", *words))


def convert(path: str, mark: str, *options: str) -> str:
    """Return a `convert` command. If `path` has no suffix of torch.save, the output is a .pth
    file."""
    return edit("convert", path, mark, *options, suffix=suffix_for_torch(path))


def suffix_for_torch(path: str) -> str | None:
    """Return ``.pth``, or None if `path` already has a suffix of torch.save."""
    return None if path.lower().endswith(TORCH_SUFFIXES) else ".pth"


def packed(summary: Summary) -> int:
    """Return the number of quantized tensors outside the state_dict, such as torch's packed
    parameters."""
    return sum(row.name is None and row.tensor.dtype.kind == "quantized" for row in summary.rows)


def _objects(summary: Summary) -> Iterator[str]:
    """Yield a hint that lists the classes that torch.load refuses by default.

    If a command can drop the values of these classes, the hint contains the command. For formats
    that torch.load cannot read (safetensors, folders, plain pickles), there is no hint.
    """
    format, path = BY_NAME.get(summary.format, NONE), summary.path
    refused = summary.refused if format.loaded_by_torch else []
    if not refused:
        return
    what = "TorchScript" if format.program else some(refused)
    refusal = f"torch.load(weights_only=True) refuses {what}"
    has_subclass = any(row.inside for row in summary.rows)
    if summary.weights is not None and summary.is_module:
        options = ["--dequantize"] * (packed(summary) > 0)
        words = ("convert", path, "weights", *summary.chosen, *options)
        yield f"{refusal}; to write only the weights: {edit(*words, suffix='.safetensors')}"
    elif summary.objects and summary.survives_dropping() and not has_subclass:
        command = convert(path, "plain", "--objects", "drop", *summary.words)
        yield f"{refusal}; to drop these values: {command}"
    else:
        yield refusal


def _others(summary: Summary) -> Iterator[str]:
    """Yield hints for files inside byte strings, and for other state_dicts in the file."""
    path = argument(summary.path)
    if summary.inner:  # byte strings that contain complete files
        places = [
            f"{join(each.path)} ({each.kind}, {each.nbytes:,} bytes)" for each in summary.inner
        ]
        yield (
            f"byte strings contain complete files, which are not listed here: {some(places)}; "
            f"to scan these files: {shell_command(('ckptkit', 'scan', *path))}"
        )
    for key in map(join, summary.others[:NAMES]):
        command = shell_command(("ckptkit", "inspect", "--key", key, *path))
        yield f"{key} also contains weights: {command}"
