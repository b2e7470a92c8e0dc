"""The command that helps, ready to paste."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import repeat

from ckptkit.analysis.summary import Summary
from ckptkit.core.errors import RUNS_CODE, coded
from ckptkit.core.text import NAMES, argument, flatten, output_name, shell_command, some
from ckptkit.core.tree import join
from ckptkit.core.weights import WRAPPERS
from ckptkit.formats.table import BY_NAME, NONE, SAFETENSORS, TORCH_SUFFIXES

MOST = 8  # wrappers inside one another
WASTE = 1 << 20  # bytes that no tensor uses, from which on they are worth a line


def advise(summary: Summary) -> tuple[str, ...]:
    """Return sentences with a command, for what stops it from loading or makes it too large."""
    if summary.part is not None:
        return (summary.part.hint,)
    # Some values run code: without dropping them no command writes the file.
    drop = ("--objects", "drop") if coded(summary.warnings, RUNS_CODE) else ()
    found: list[str] = []
    if not drop or summary.survives_dropping():
        found += _edits(summary, drop)
    return (*found, *_objects(summary), *_others(summary))


def _edits(summary: Summary, drop: tuple[str, ...]) -> Iterator[str]:
    """Yield the edits that help: other keys, other devices, fewer bytes, weights of numbers."""
    path, names = summary.path, [row.name for row in summary.rows if row.name is not None]
    if found := wrappers(names):
        having = sum(name.startswith(found[0]) for name in names)
        how_many = "all" if having == len(names) else f"{having:,} of {len(names):,}"
        command = strip_module(path, found, *summary.chosen, *drop)
        yield f"{how_many} keys start with {''.join(found)!r}: {command}"
    held = [row.tensor.storage for row in summary.rows]
    devices = dict.fromkeys([each.device for each in held if each is not None])
    away = [device for device in devices if device.partition(":")[0] not in ("cpu", "meta")]
    if away:
        command = edit("remap", path, "cpu", *drop, "--to", "cpu", *summary.words)
        yield f"saved on {some(away)}; to load without: {command}"
    unused = summary.totals.unused_nbytes
    if unused > max(WASTE, summary.totals.nbytes // 10):
        command = convert(path, "compact", *drop, "--compact", *summary.words)
        yield f"{unused:,} bytes of its storages belong to no tensor; to leave them out: {command}"
    if number := packed(summary):
        command = convert(path, "float", *summary.chosen, *drop, "--dequantize")
        yield (
            f"{number:,} quantized tensors are not in the state_dict; to make weights of them: "
            f"{command}"
        )


def strip_module(path: str, prefixes: Sequence[str] = ("module.",), *options: str) -> str:
    """The command that removes `prefixes`, the outer ones first, from the keys of `path`."""
    return edit("strip-module", path, "stripped", *options, *prefix_options(prefixes))


def prefix_options(prefixes: Sequence[str]) -> tuple[str, ...]:
    """Return the options of `strip-module` that name these prefixes."""
    words = flatten(("--prefix", each) for each in prefixes)
    return () if [*prefixes] == ["module."] else tuple(words)


def wrappers(names: Sequence[str]) -> list[str]:
    """Return the prefixes of wrappers before more than half of the names, from the outside in."""
    found: list[str] = []
    while len(found) < MOST and (prefix := _common(names)):
        found.append(prefix)
        names = [name.removeprefix(prefix) for name in names]
    return found


def _common(names: Sequence[str]) -> str:
    wrapped = [name for name in names if name.startswith(tuple(WRAPPERS))]
    counts = {each: sum(map(str.startswith, wrapped, repeat(each))) for each in WRAPPERS}
    return next((each for each, count in counts.items() if 2 * count > len(names)), "")


def add_module(path: str, prefix: str = "module.", *options: str) -> str:
    """The command that puts `prefix` before the keys of the file `path`."""
    option = () if prefix == "module." else ("--prefix", prefix)
    return edit("add-module", path, "wrapped", *options, *option)


def rename(path: str, mapping: str, *options: str) -> str:
    """The command that renames the weights in `path` by the file `mapping`."""
    return edit("rename", path, "renamed", "--map", mapping, *options)


def recover(path: str, unverified: bool = False) -> str:
    """The command that saves the intact tensors of the file `path`."""
    return edit("recover", path, "recovered", *(("--unverified",) if unverified else ()))


def fixed(path: str) -> str:
    """The name of a fixed copy of `path`."""
    return output_name(
        path,
        "fixed",
        None if path.lower().endswith((*TORCH_SUFFIXES, *SAFETENSORS.suffixes)) else ".pth",
    )


def edit(command: str, path: str, mark: str, *options: str, suffix: str | None = None) -> str:
    """Return a command that makes ``run-<mark>.pth`` of ``run.pth``, or a file with `suffix`."""
    output = output_name(path, mark, suffix)
    words = (command, *options, *argument(path), output)
    return shell_command(("ckptkit", *words))


def convert(path: str, mark: str, *options: str) -> str:
    """Return a `convert` command; a folder, or a file without a suffix of torch, becomes a .pth."""
    return edit("convert", path, mark, *options, suffix=suffix_for_torch(path))


def suffix_for_torch(path: str) -> str | None:
    """Return the suffix of a file of torch.save made from `path`, None to keep that of `path`."""
    return None if path.lower().endswith(TORCH_SUFFIXES) else ".pth"


def packed(summary: Summary) -> int:
    """The number of quantized tensors that are not in the state_dict."""
    others = [row for row in summary.rows if row.name is None]
    return sum(row.tensor.dtype.kind == "quantized" for row in others)


def _objects(summary: Summary) -> Iterator[str]:
    """Yield what torch.load refuses by default, and the command that leaves it out.

    Files that torch.load does not read (safetensors that hold everything, folders, plain pickles)
    get no such advice.
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
        yield f"{refusal}; for the weights alone: {edit(*words, suffix='.safetensors')}"
    elif summary.objects and summary.survives_dropping() and not has_subclass:
        command = convert(path, "plain", "--objects", "drop", *summary.words)
        yield f"{refusal}; to leave such values out: {command}"
    else:
        yield refusal


def _others(summary: Summary) -> Iterator[str]:
    """Yield how to look into byte strings that are files, and into other weights."""
    path = argument(summary.path)
    if summary.inner:  # checkpoints that a library packed into its own
        places = [
            f"{join(each.path)} ({each.kind}, {each.nbytes:,} bytes)" for each in summary.inner
        ]
        yield (
            f"byte strings that are files of their own, not looked into here: {some(places)}; "
            f"{shell_command(('ckptkit', 'scan', *path))} does"
        )
    for key in map(join, summary.others[:NAMES]):
        command = shell_command(("ckptkit", "inspect", "--key", key, *path))
        yield f"{key} holds weights too: {command}"
