"""Compare a GGUF file with its Hugging Face original, and write a GGUF file from an original.

Both tasks use the recipe of the architecture. To write a GGUF file, ckptkit copies an existing GGUF
file and replaces only the bytes of its tensors. The metadata, the tokenizer, and the order and
types of tensors do not change.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial
from glob import escape
from typing import NamedTuple

from ckptkit import quantized
from ckptkit.analysis import advice
from ckptkit.analysis.diff import Diff, Progress, kinds, selected
from ckptkit.analysis.explained import Origin, compare_with_original
from ckptkit.analysis.matching import Matching, PrefixChange, prefixes, shapes_of
from ckptkit.compute.arranged import contiguous
from ckptkit.compute.compare import compare
from ckptkit.compute.numbers import FLOATS, cast_record
from ckptkit.compute.quantize import q8_0_record
from ckptkit.core.bytesource import ByteSource, Range, Record
from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.errors import TensorError, UnsupportedError
from ckptkit.core.plan import OutputFile, Plan, Segment
from ckptkit.core.tensor import Shape, Tensor
from ckptkit.core.text import plural, quoted, shell_command, some
from ckptkit.edits.elements import cast
from ckptkit.edits.keys import select
from ckptkit.edits.rules import RuleOptions, check_like, metadata
from ckptkit.rules.notation import RuleError
from ckptkit.run import recipes
from ckptkit.run.recipes import gguf

# Weights that the script of llama.cpp does not convert: poolers, heads of other tasks, buffers that
# old versions saved, and layers for multi-token prediction.
NOT_CONVERTED = ("pooler.*", "cls.*", "*.rotary_emb.inv_freq", "*.attn.masked_bias",
                 "*h.*.attn.bias", "*.attention.bias", "*.attention.masked_bias",
                 "embeddings.position_ids", "mtp.*")  # fmt: skip
# Weights that the script converts only to another file, an mmproj file.
MMPROJ = ("*visual.*", "*vision.*", "*vision_*", "*audio.*", "*audio_*", "*projector.*")
# Prefixes of layers in transformers: the first in multimodal models, the second in models for text
# only.
NESTED = PrefixChange("model.language_model.", "model.")
# GGUF types that ckptkit writes, by dtype of the tensor.
WRITTEN = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "Q8_0": "Q8_0"}
EMBEDDING = "token_embd.weight"
# Weights from which the script of llama.cpp drops rows. `last` means the last rows, which exceed
# the vocabulary of the tokenizer (Gemma 3). `first` means the first rows of position embeddings
# (RoBERTa).
CUT = {EMBEDDING: "last", "output.weight": "last", "position_embd.weight": "first"}


class Paired(NamedTuple):
    """The tensors of a GGUF file and of its original, both with the names of the original."""

    gguf: Mapping[str, Tensor]
    original: Mapping[str, Tensor]
    name: str | None  # path of the original
    origins: Mapping[str, Origin]
    left: tuple[str, ...]  # descriptions of tensors that only one file has
    prefix: str | None  # a sentence on how the original's prefix differs from the recipe's
    swapped: bool  # True if file A is the original, and file B the GGUF file

    @property
    def nbytes(self) -> int:
        """The total number of bytes of all tensors in both files."""
        return sum(each.nbytes for side in (self.gguf, self.original) for each in side.values())

    def diff(
        self, values: bool, matches: Callable[[str], bool] | None, progress: Progress | None
    ) -> Diff:
        """Compare both files. In the result, A and B are the arguments `a` and `b` of `paired`."""
        found = compare_with_original(
            selected(self.gguf, matches),
            selected(self.original, matches),
            self.origins,
            values=values,
            name=self.name,
            progress=progress,
        )
        found = replace(found, uncompared=(*found.uncompared, *self.left))
        if self.prefix is not None:
            found = replace(found, advice=(self.prefix, *found.advice))
        if self.swapped:
            return found
        return replace(
            found,
            missing=found.unexpected,
            unexpected=found.missing,
            mismatched=tuple(each._replace(a=each.b, b=each.a) for each in found.mismatched),
            matching=Matching(),  # the tensors of the GGUF file already have the original's names
            advice=tuple(each for each in found.advice if "--write-map" not in each),
        )


def paired(a: Checkpoint, b: Checkpoint) -> Paired | None:
    """Give the tensors of a GGUF file and its original the same names.

    Return None if the files already have common names, or if no recipe fits the GGUF file.
    """
    swapped = b.format == "gguf"
    file, original = (b, a) if swapped else (a, b)
    if file.selection is None or original.selection is None:
        return None
    try:
        name = gguf.recipe_name(file, recipes.names())
    except UnsupportedError:
        return None
    if _common(file, original):
        return None
    try:
        made, origins = under_new_names(file, name)
    except (RuleError, TensorError) as error:
        error.hint = "--stored compares the stored names and tensors"
        raise
    kept = {each for origin in origins.values() for each in origin.names}
    left = [f"{each} (only in GGUF files)" for each in file.weights if each not in kept]
    _, original = quantized.dequantized_views(made, original)
    way = _prefix(made.weights, original.weights)
    back = {_moved(each, way): each for each in original.weights if each not in made.weights}
    converted = {back.get(each, each): tensor for each, tensor in made.weights.items()}
    origins = {back.get(each, each): origin for each, origin in origins.items()}
    embedding = next((new for new, each in origins.items() if EMBEDDING in each.names), None)
    weights: dict[str, Tensor] = {}
    beside: list[str] = []
    for each, tensor in original.weights.items():
        if each in converted:
            (first, *_) = origins[each].names
            cut = weights[each] = _cut(tensor, first, converted[each].shape)
            if cut is not tensor:
                rows = tensor.shape[0] - cut.shape[0]
                left.append(f"{rows:,} rows of {each} (dropped by llama.cpp)")
        elif why := _why_missing(each, original, embedding, way):
            left.append(f"{each} ({why})")
        elif any(fnmatchcase(each, glob) for glob in MMPROJ):
            beside.append(each)
        else:
            weights[each] = tensor
    if beside:
        left.append(f"{plural(len(beside), 'weight')} for an mmproj file: {some(beside, 2)}")
    prefix = _prefix_advice(way, original, made.weights)
    return Paired(converted, weights, original.name, origins, tuple(left), prefix, swapped)


def _common(file: Checkpoint, other: Checkpoint) -> set[str]:
    """Return the names that a checkpoint has in common with a GGUF file, except ``output.weight``.
    InternLM2 uses this name in both layouts."""
    return (file.weights.keys() & other.weights.keys()) - {"output.weight"}


def _prefix(converted: Mapping[str, Tensor], original: Mapping[str, Tensor]) -> PrefixChange:
    """Return the change of prefix that turns names of the original into names that the recipe
    writes. Names that both files have do not change."""
    ours, theirs = shapes_of(kinds(original)), shapes_of(kinds(converted))
    rest = {name: shape for name, shape in ours.items() if name not in theirs}
    way = prefixes(rest, {name: shape for name, shape in theirs.items() if name not in ours})
    if (way.strip and way.add) or not any(way):
        way = NESTED
    moved = {name: new for name in rest if (new := _moved(name, way)) != name}
    is_unique = ours.keys().isdisjoint(moved.values()) and theirs.keys() & moved.values()
    return way if is_unique else PrefixChange()


def _moved(name: str, way: PrefixChange) -> str:
    return way(name) if name.startswith(way.strip) else name


def _prefix_advice(
    way: PrefixChange, original: Checkpoint, converted: Collection[str]
) -> str | None:
    """Return a sentence that says how the prefix of the original's names differs from the prefix
    that the recipe writes. Return None if `way` changes no prefix."""
    path = original.name or ""
    if way.strip and way.add:
        return f"names in {path} start with {way.strip!r} instead of {way.add!r}"
    if way.strip:
        command = advice.strip_module(path, [way.strip], *original.chosen)
        return f"names in {path} have the additional prefix {way.strip!r}; to remove it: {command}"
    if not way.add:
        return None
    what = f"names in {path} lack the prefix {way.add!r}"
    if original.weights.keys() & converted:  # `add-module` would add the prefix to these names too
        return what
    return f"{what}; to add it: {advice.add_module(path, way.add, *original.chosen)}"


def _cut(tensor: Tensor, name: str, shape: Shape) -> Tensor:
    """Reduce a matrix to the rows that the GGUF tensor `name` of shape `shape` contains."""
    if name not in CUT or len(tensor.shape) != 2 or len(shape) != 2:
        return tensor
    more = tensor.shape[0] - shape[0]
    if more <= 0 or tensor.shape[1] != shape[1] or tensor.storage is None:
        return tensor
    offset = tensor.offset + (more * tensor.stride[0] if CUT[name] == "first" else 0)
    return replace(tensor, shape=shape, offset=offset)


def under_new_names(file: Checkpoint, name: str) -> tuple[Checkpoint, dict[str, Origin]]:
    """Apply the recipe `name` to a GGUF file, in float32. Return the result, and a dict from the
    names of its weights to their origins."""
    recipe = recipes.load(name, RuleOptions(dequantize="float32", reports=True))
    origins = {
        key: Origin((_type(tensor),), names=frozenset((key,)))
        for key, tensor in file.weights.items()
    }
    ck = gguf.with_matrices(file)
    for step, written in zip(recipe.steps, recipe.written, strict=True):
        if written.word == "gguf":  # the step `gguf` makes config.json
            continue
        before, ck = len(ck.reports), step(ck)
        if written.word == "compute":
            for glob, expression in written.given.items():
                for key in filter(partial(fnmatchcase, pat=glob), origins):
                    origins[key] = origins[key]._replace(computed=expression)
        for report in ck.reports[before:]:
            made: dict[str, Origin] = {}
            for old, new in report.pairs:
                one, other = origins[old], made.get(new, origins[old])
                types = tuple(sorted({*one.types, *other.types}))
                made[new] = Origin(types, one.computed or other.computed, one.names | other.names)
            origins = made
    return ck, {key: origins[key] for key in ck.weights}


def _type(tensor: Tensor) -> str:
    return WRITTEN.get(tensor.dtype.name, tensor.dtype.name)


def _why_missing(name: str, original: Checkpoint, embedding: str | None, way: PrefixChange) -> str:
    """Return the reason why a GGUF file lacks a weight of its original, or "" if unknown."""
    if any(fnmatchcase(_moved(name, way), glob) for glob in NOT_CONVERTED):
        return "llama.cpp does not convert it"
    weights = original.weights
    if embedding is None or embedding not in weights or name == embedding:
        return ""
    one, other = weights[name], weights[embedding]
    is_alike = (one.shape, one.dtype) == (other.shape, other.dtype)
    return f"equal to {embedding}" if is_alike and compare(one, other) is None else ""


# Write a checkpoint of Hugging Face into a copy of a GGUF file


def written_into(ck: Checkpoint, skeleton: Checkpoint) -> tuple[Checkpoint, Plan]:
    """Plan a copy of the GGUF file `skeleton` with the values of the weights of `ck`.

    The copy has the tensor names of `skeleton`.

    Raises TensorError if names or shapes differ. Raises UnsupportedError for big-endian files,
    for split models, and for types that are not in `WRITTEN`.
    """
    source = skeleton.source
    if skeleton.format != "gguf" or not isinstance(source, ByteSource):
        what = "is a split model" if skeleton.format == "gguf" else "is not a GGUF file"
        raise UnsupportedError(
            f"{what}; --like needs a single GGUF file",
            where=skeleton.name,
            hint="llama-gguf-split --merge of llama.cpp joins the files of a split model",
        )
    ranges = _ranges(skeleton)
    old = gguf.with_matrices(skeleton).weights
    has_names = _common(skeleton, ck)
    new = gguf.with_matrices(ck if has_names else _under_old_names(ck, skeleton))
    kept = [each for each in old if each not in new.weights and each in gguf.SCALING]
    weights = {
        key: _cut(tensor, key, old[key].shape) if key in old else tensor
        for key, tensor in new.weights.items()
    }
    cut = [key for key, tensor in weights.items() if tensor is not new.weights[key]]
    expected = {
        key: new.weights[key].shape if key in cut else tensor.shape
        for key, tensor in old.items()
        if key not in kept
    }
    check_like(new, expected, skeleton.name or "the GGUF file")
    odd = [
        f"{key} ({tensor.dtype})"
        for key, tensor in old.items()
        if key not in kept and tensor.dtype.name not in WRITTEN
    ]
    if odd:
        raise UnsupportedError(
            f"ckptkit writes only the types {', '.join(WRITTEN.values())}, not {some(odd, 4)}",
            where=skeleton.name,
            hint="use a GGUF file of one of these types, then run llama-quantize of llama.cpp",
        )
    segments: list[Segment] = []
    at = 0
    for key, extent in sorted(ranges, key=lambda pair: pair[1].offset):
        segments.append(Range(source, at, extent.offset - at))
        made = extent if key in kept else _encoded(key, weights[key], old[key]).locate()
        assert made.length == extent.length
        segments.append(made)
        at = extent.offset + extent.length
    segments.append(Range(source, at, source.size - at))
    segments = [each for each in segments if not isinstance(each, Range) or each.length]
    notes = [*ck.notes, f"copied metadata, tokenizer and types of {skeleton.name}"]
    if cut:
        notes.append(f"dropped rows that the GGUF file does not have: {quoted(cut)}")
    if kept:
        notes.append(f"copied the tensors {quoted(kept)} of the GGUF file")
    return replace(new, notes=tuple(notes)), Plan((OutputFile("", tuple(segments)),))


def _under_old_names(ck: Checkpoint, skeleton: Checkpoint) -> Checkpoint:
    """Apply the reversed recipe to a Hugging Face checkpoint. The result has the tensor names of
    the GGUF file `skeleton`."""
    name = gguf.recipe_name(skeleton, recipes.names())
    _, origins = under_new_names(skeleton, name)
    embedding = next((new for new, each in origins.items() if EMBEDDING in each.names), None)
    lacking = [each for each in ck.weights if each not in origins]
    drop = [each for each in lacking if _why_missing(each, ck, embedding, PrefixChange())]
    if drop:
        ck = select(ck, drop=drop)
    # The script of llama.cpp converts bfloat16 weights to float32 before it computes with them.
    narrow = {key for key, each in ck.weights.items() if each.dtype.name == "bfloat16"}
    if wide := [key for key in narrow if key in origins and origins[key].computed]:
        ck = cast(ck, dict.fromkeys(map(escape, wide), "float32"))
    options = RuleOptions(reverse=True, meta=metadata(skeleton))
    try:
        for step in recipes.load(name, options).steps:
            ck = step(ck)
    except (RuleError, TensorError) as error:
        places = (skeleton.name or "", ck.name or "")
        error.hint = f"`{shell_command(['ckptkit', 'diff', *places])}` compares the names"
        raise
    return ck


def _ranges(skeleton: Checkpoint) -> Sequence[tuple[str, Range]]:
    """Return (name, byte range) for each tensor of a GGUF file, except empty tensors."""
    found = []
    for key, tensor in skeleton.weights.items():
        assert tensor.storage is not None
        extent = tensor.storage.record.locate()
        if not isinstance(extent, Range) or tensor.storage.big_endian:
            raise UnsupportedError(
                "is big-endian; ckptkit writes only little-endian GGUF files",
                where=skeleton.name,
                hint="copy the file, and run `gguf-convert-endian COPY little` (package gguf). "
                "Then give COPY to --like, and run `gguf-convert-endian OUTPUT big`",
            )
        if extent.length:
            found.append((key, extent))
    return found


def _encoded(name: str, tensor: Tensor, like: Tensor) -> Record:
    """Convert the elements of a weight to the type of `like`, the tensor in the GGUF file."""
    record = contiguous(tensor)
    if tensor.dtype == like.dtype:
        return record
    if tensor.dtype.name not in FLOATS:
        raise TensorError(
            f"cannot write {name!r} as {_type(like)}: {tensor.dtype} is not a float dtype",
            hint="--dequantize float32 dequantizes weights",
        )
    if like.dtype.name == "Q8_0":
        return q8_0_record(record, tensor.dtype, name)
    return cast_record(record, tensor.dtype, like.dtype, big_endian=False)
