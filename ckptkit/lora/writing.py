"""Write adapters: convert them between layouts, extract them from two models, and resize them.

A conversion between the layouts of peft, diffusers, kohya and ComfyUI renames tensors without
changing their bytes. The new layout may store the scale in another place. If only one of the
layouts fuses matrices such as q, k and v, the factors are split or joined. The matrix A of a fused
module contains the rows of the A of every part. The matrix B of a fused module is block-diagonal.
Each block is the B of one part.

An extraction computes ``D = TUNED - BASE`` in float64 for each matrix. With ``D = U S V``, the
factors are ``B = U sqrt(S)`` and ``A = sqrt(S) V``. The scale is 1. Only some rows of D are in
memory at once. For a large matrix, only the largest singular values are computed, by a randomized
method (Halko, Martinsson and Tropp 2011, algorithm 4.4). The squared error is exactly
``|D|^2 - sum(S^2)``, because B A is a projection of D.
"""

from __future__ import annotations

import json
import os
import re
import struct
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from math import fsum, isfinite, prod, sqrt
from typing import Any

from ckptkit import formats
from ckptkit.api import Conversion, open_checkpoint
from ckptkit.compute.arranged import contiguous
from ckptkit.compute.lazy import Array, np
from ckptkit.compute.mixing import WeightedSum
from ckptkit.compute.numbers import encode
from ckptkit.core import arguments
from ckptkit.core.arguments import checked, count, texts
from ckptkit.core.bytesource import ByteSource, FileObject, Folder, Memory, Pending, Range
from ckptkit.core.checkpoint import Checkpoint, Source
from ckptkit.core.dtypes import BY_NAME, DType
from ckptkit.core.errors import (
    AmbiguousError,
    NothingToDoError,
    TensorError,
    UnsupportedError,
    UsageError,
)
from ckptkit.core.options import Options, made
from ckptkit.core.plan import OutputFile
from ckptkit.core.tensor import Tensor
from ckptkit.core.text import WRITTEN, plural, quoted, shape, shell_command, shown_url, some, typed
from ckptkit.core.tree import OrderedMapping
from ckptkit.edits import quantized_names
from ckptkit.formats.table import SAFETENSORS
from ckptkit.lora import naming
from ckptkit.lora.changes import (
    as_matrix,
    box,
    is_of_columns,
    made_of,
    matrix,
    placed,
    problems,
    turn,
    zeros,
)
from ckptkit.lora.naming import DIFFUSERS, FLUX, ORIGINAL, UNET, BaseNames, Part, spelled
from ckptkit.lora.reading import (
    CONFIG,
    METADATA,
    WEIGHTS,
    Adapter,
    Module,
    read_adapter,
    same_bytes,
    table,
)
from ckptkit.publish.publish import publish

LAYOUTS = "peft", "diffusers", "kohya", "comfy"
PEFT = "base_model.model."  # prefix of tensor names in peft
_ORIGINALS = "kohya", "comfy"  # layouts with the original module names, not those of diffusers
_IMAGES = "unet", "transformer", "prior"
_LANGUAGE = re.compile(r"(^|\.)((layers?|h|block)\.\d+\.|(lm_head|embed_tokens)$)")
# Widths of SD 3 and 3.5. The double blocks of SD 3 and Flux have the same names.
_SD3 = 1536, 2432
# Modules of HunyuanVideo that Flux does not have. In diffusers, the other modules of the two models
# have the same names.
_HUNYUAN = re.compile(
    r"context_embedder\..*token_refiner|transformer_blocks\.(19|[2-9]\d)\.|"
    r"single_transformer_blocks\.(3[89]|[4-9]\d)\."
)
_BIASES = "B_bias", "diff_b"  # roles with one number for each row
_BLOCKS = "down_blocks.", "mid_block.", "up_blocks."
# Modules that only SD 1.5 and 2 have
_SMALL = "down_blocks.0.attentions.", "down_blocks.3.", "up_blocks.3."
# Modules that only SDXL has: further attention layers, and embeddings of image sizes
_LARGE = re.compile(r"(.*\.)?(transformer_blocks\.[1-9]\.|add_embedding\.|label_emb\.)")
_TEXT = 2048  # width of the text encoder output in SDXL

_EMBEDDINGS = (
    *naming.EMBEDDINGS, "wpe", "embed_positions", "position_embeddings", "token_type_embeddings",
    "token_embedding", "position_embedding",
)  # fmt: skip
# In transformers, a weight of Conv1D has the shape [in, out]. In other models, linear layers of the
# same names have the shape [out, in].
_WIDE = re.compile(r"(.*\.)?h\.\d+\.(attn\.c_attn|mlp\.c_fc)\.weight")
_CONV1D = re.compile(r"(.*\.)?h\.\d+\.(attn|crossattention|mlp)\.(c_attn|q_attn|c_proj|c_fc)")
# If a matrix has at most this number of rows or columns, all its singular vectors are computed.
_COMPLETE = 256
_EXTRA, _POWERS = 8, 2  # oversampling and power iterations of the randomized method
_BLOCK = 1 << 20  # maximum number of elements of a difference in memory at once
_LEAST = 1e-6  # singular values below this fraction of the largest singular value become zero
_RANKS = ("r", "lora_alpha", "rank_pattern", "alpha_pattern")
# Fields of a configuration, apart from `_RANKS`, that change the result of a merge. Only peft
# folders store all of these fields.
_KEPT = ("init_lora_weights", "fan_in_fan_out", "layer_replication", "ensure_weight_tying")


@checked
def convert_lora(
    adapter: Source,
    path: str | os.PathLike[str],
    to: str,
    *,
    base: Source | None = None,
    component: str | None = None,
    alpha: float | None = None,
    bake: bool = False,
    options: Options | None = None,
    **changes: Any,
) -> Conversion:
    """Write an adapter in another layout.

    `to` is ``peft``, ``diffusers``, ``kohya`` or ``comfy``. For ``peft``, the output is a folder.
    Underscores in kohya's names can represent dots. The names of `base` show which underscores are
    dots. `component` selects one component of a pipeline. For an adapter of peft, `component` names
    the component that the adapter changes. `alpha` is the alpha of adapters without a scale. With
    `bake`, ckptkit multiplies the scale into the factors, for programs that ignore scales.

    Raises UnsupportedError if the layout cannot store the adapter, and AmbiguousError for ambiguous
    names. In these cases, `convert_lora` writes nothing.
    """
    if to not in LAYOUTS:
        raise UsageError(f"to {to!r} is not one of {some(LAYOUTS)}")
    asked, warnings = made(options, changes), list[str]()
    read = read_adapter(adapter, alpha=alpha)
    if component is not None and read.layout != "peft":
        read = read_adapter(adapter, component=component, alpha=alpha)
    names, config, extras = None, None, dict(read.metadata)
    try:
        _check(read, to)
        if base is not None:
            with open_checkpoint(base) as held:
                shapes = {name: each.shape for name, each in held.required.tensors.items()}
            names = BaseNames(shapes, read.components)
        modules = [_dotted(each, read, to, component, names) for each in read.modules.values()]
        is_flux = any((spelled(each.path) or ("",))[0] == FLUX for each in modules)
        if is_flux and to not in _ORIGINALS:
            # In diffusers, T5 is the second text encoder of Flux. In kohya and ComfyUI, T5 always
            # has the number 3.
            second = {"text_encoder_3": "text_encoder_2"}
            modules = [replace(m, component=second.get(m.component, m.component)) for m in modules]
        modules = list(_respelled(modules, to, read, warnings))
        modules = [_baked(each) for each in modules] if bake else modules
        configs = {}
        for part in dict.fromkeys(each.component for each in modules):
            group = [each for each in modules if each.component == part]
            own = read.configs.get("", read.configs.get(part, {}))
            configs[part] = config_of(group, **{n: own[n] for n in _KEPT if own.get(n)})
            plain = [each.path for each in group if not each.is_dora]
            if to not in _ORIGINALS and 0 < len(plain) < len(group):
                what = f"{plain[0]} has no DoRA magnitude, but other modules have"
                raise UnsupportedError(f"{what}; the layout {to} stores DoRA for all modules")
        parts = [*configs]
        if to == "peft" and len(parts) > 1:
            what = f"changes {plural(len(parts), 'component')} ({some(parts)})"
            hint = f"{typed('--component NAME', 'component=...')} selects one component"
            raise UnsupportedError(f"{what}; a peft folder changes only one", hint=hint)
        if to == "peft":
            config = configs[parts[0]] | {"base_model_name_or_path": read.base}
        elif to == "diffusers" and not bake:
            flat = {f"{part}.{key}": v for part, each in configs.items() for key, v in each.items()}
            extras[METADATA] = json.dumps(flat, indent=2, sort_keys=True)
        # In a pipeline with a single text encoder, kohya uses another prefix for the text encoder.
        single = {*parts} <= {"unet", "text_encoder"} and not _is_xl(modules)
        single = single and not any(key.startswith("lora_te1_") for key in read.modules)
        keys = [_key(each, to, single) for each in modules]
        if twice := [key for key, count in Counter(keys).items() if count > 1]:
            raise AmbiguousError(f"two modules would have the name {some(twice)}")
        tensors = dict(tensors_of(dict(zip(keys, modules, strict=True)), to))
    except (UnsupportedError, AmbiguousError) as error:
        error.hint = error.hint or "`ckptkit help lora` lists the adapters that each layout stores"
        raise error.at(read.path) from error.__cause__
    for each in problems(read):  # only a residual base: `_check` raises all other problems
        warnings.append(f"the adapter {each.title}; it fits only this base")
    notes = [f"{plural(len(modules), 'module')} as {to}"]
    if read.ignored:
        notes.append(f"dropped unused tensors: {quoted(read.ignored)}")
    return written(
        tensors, path, asked, config=config, metadata=extras, source=read.checkpoint.source,
        notes=(*notes,), warnings=(*warnings,),
    )  # fmt: skip


def refuse_damaged(read: Adapter) -> None:
    """Raise UnsupportedError for an adapter that ckptkit cannot convert or resize."""
    for problem in problems(read, "residual"):
        raise problem.error.at(read.path)
    if (read.config or {}).get("use_bdlora"):
        what = "is a BD-LoRA with block-diagonal matrices; ckptkit can only merge such an adapter"
        raise UnsupportedError(what, where=read.path)
    for name, module in read.modules.items():
        if not isfinite(module.scale or 0.0):
            raise UnsupportedError(f"the scale of {name} is not a finite number", where=read.path)


def _check(read: Adapter, to: str) -> None:
    """Raise UnsupportedError for an adapter that the layout cannot store."""
    refuse_damaged(read)
    if read.layout == "peft" and read.method != "LORA":
        raise UnsupportedError(f"has the method {read.method}; ckptkit converts only LORA")
    known = table("stored")["original" if to in _ORIGINALS else "peft"]
    odd = [n for n in _KEPT[1:] if to != "peft" and (read.config or {}).get(n)]
    for name, module in read.modules.items():
        kind = "of experts" if module.parameter else module.kind
        roles = [r for r in module.tensors if r not in known]
        if roles or kind in ("of experts", "attention_out"):
            odd.append(f"{name} ({some(roles) if kind == 'lora' else kind})")
    if odd := [*odd, *read.replaced]:
        raise UnsupportedError(f"ckptkit cannot convert {some(odd)} to {to}")


def _dotted(
    module: Module, read: Adapter, to: str, component: str | None, names: BaseNames | None
) -> Module:
    """Return a module with dots in its name, and with the diffusers name of its component."""
    part, path = naming.of_comfy(module.component, module.path)
    if read.layout == "kohya":
        shape = next(iter(module.tensors.values())).shape
        if module.kind == "lora":
            shape = module.tensors["B"].shape[0], *module.tensors["A"].shape[1:]
        path = (names and names.dots(part, path, shape)) or naming.dotted(path)
    found = {UNET: "unet", FLUX: "transformer"}.get((spelled(path) or ("",))[0])
    part = part or component or found or ("" if _LANGUAGE.search(path) else "unet")
    if not part and to != "peft":
        hint = f"{typed('--component NAME', 'component=...')} sets the component"
        raise UnsupportedError(f"{path} looks like a module of a language model", hint=hint)
    tensors = dict(module.tensors)
    if to in _ORIGINALS and "B_bias" in tensors:  # peft multiplies the bias by the scale
        tensors["diff_b"] = _times(tensors.pop("B_bias"), module.scale, "float32")
    part, kind = found if part == "unet" and found else part, module.kind
    is_embedding = module.is_lycoris and path.rpartition(".")[2] in _EMBEDDINGS
    if kind == "embedding" if to in _ORIGINALS else kind == "lora" and is_embedding:
        if module.is_dora:
            raise UnsupportedError(f"ckptkit cannot convert {path} (DoRA of an embedding) to {to}")
        # peft stores the factors of an embedding transposed.
        a, b = (matrix(turn(tensors.pop(role))) for role in module.pair)
        module = replace(module, kind="lora" if kind == "embedding" else "embedding")
        tensors |= dict(zip(module.pair, (b, a), strict=True))
    return replace(module, component=part, path=path, tensors=tensors)


# Spellings


def _respelled(
    modules: list[Module], to: str, read: Adapter, warnings: list[str]
) -> Iterator[Module]:
    """Yield the modules with the names of a layout. Modules are split or fused if necessary."""
    is_xl, paths = _is_xl(modules), [each.path for each in modules]
    fused: dict[str, list[tuple[Part, Module]]] = {}
    odd = []
    for module in modules:
        known = spelled(module.path) if module.component in _IMAGES else None
        wanted = ORIGINAL if to in _ORIGINALS else DIFFUSERS
        if known and known[0] == UNET and to == "kohya" and not is_xl:
            wanted = DIFFUSERS
        if known is None and module.component in _IMAGES:
            odd.append(module.path)
        if known is None or known[1] == wanted:
            yield module
            continue
        parts = known[2][_place(module.path, paths, is_xl) if len(known[2]) > 1 else 0]
        if len(parts) == 1 and parts[0].whole > parts[0].length:
            fused.setdefault(parts[0].name, []).append((parts[0], module))
        elif len(parts) == 1:
            yield replace(module, path=parts[0].name)
        else:
            yield from _cut(module, parts)
    for name, members in fused.items():
        yield _fused(name, sorted(members, key=lambda each: each[0].at))
    if odd and (read.layout in _ORIGINALS) != (to in _ORIGINALS):
        warnings.append(f"kept the names of {quoted(odd)}, for which ckptkit has no other names")
    unsure = not is_xl and not any(each.startswith(_SMALL) for each in paths)
    if to == "kohya" and unsure and any(each.startswith(_BLOCKS) for each in paths):
        warnings.append("wrote the names of SD 1.5, but the adapter may be for SDXL")
    flux = [
        each for each in modules if each.component in _IMAGES and each.kind == "lora"
        and to in _ORIGINALS and (spelled(each.path) or ())[:2] == (FLUX, DIFFUSERS)
    ]  # fmt: skip
    if flux and not any(each.startswith("single_transformer_blocks.") for each in paths):
        if any({*each.tensors["A"].shape, *each.tensors["B"].shape} & {*_SD3} for each in flux):
            raise UnsupportedError("is for SD 3; ckptkit does not support its original names")
        warnings.append(
            "wrote the original names of Flux, but the adapter may be for another model"
        )
    if flux and (odd := [*filter(_HUNYUAN.match, paths)]):
        what = f"is not for Flux, which has no {odd[0]}; ckptkit does not support"
        raise UnsupportedError(f"{what} the original names of HunyuanVideo and other models")


def _is_xl(modules: Iterable[Module]) -> bool:
    """Return whether the adapter is for SDXL.

    SDXL has a second text encoder, further attention layers, and wider text embeddings.
    """
    return any(
        each.component == "text_encoder_2"
        or (each.component == "unet" and _LARGE.match(each.path) is not None)
        or (
            each.path.endswith("attn2.to_k")
            and next(iter(each.tensors.values())).shape[-1:] == (_TEXT,)
        )
        for each in modules
    )


def _place(path: str, paths: list[str], is_xl: bool) -> int:
    """Return which of the two alternatives of `spelled` is the original name of an upsampler.

    Return 1 if the block of the upsampler has no attention layers, otherwise 0.
    """
    block = path.partition(".upsamplers.")[0]
    if is_xl or any(each.startswith(f"{block}.attentions.") for each in paths):
        return 0
    if any(each.startswith(_SMALL) for each in paths):
        return int(block == "up_blocks.0")
    raise AmbiguousError(
        f"{path} has different names in SDXL and SD 1.5, and the adapter may be for either model"
    )


def _cut(module: Module, parts: tuple[Part, ...]) -> Iterator[Module]:
    """Split a fused module into the modules of its parts.

    Each part gets the complete A and some rows of B. If B is block-diagonal, each part instead gets
    one block of B, and only the rows of A that belong to this block. Parts with the same name
    become one module.
    """
    a, b = _factors(module)
    if b.shape[0] % parts[0].units:
        what = f"{module.path} has {b.shape[0]} rows, not divisible by {parts[0].units}"
        raise UnsupportedError(what)
    step, rank = b.shape[0] // parts[0].units, b.shape[1]
    spans = [(part.start * step, (part.start + part.length) * step) for part in parts]
    names = list(dict.fromkeys(part.name for part in parts))
    width, array = rank // len(spans), b.numpy().copy()
    for number, (start, stop) in enumerate(spans):
        array[start:stop, number * width : (number + 1) * width] = 0
    is_diagonal = len(names) > 1 and not rank % len(spans) and not array.any()
    for number, name in enumerate(names):
        own = [(n, part) for n, part in enumerate(parts) if part.name == name]
        height = sum(part.length for _, part in own) * step
        tensors = {"A": a}
        for role in {"B", "magnitude", *_BIASES} & module.tensors.keys():
            whole = matrix(module.tensors[role])
            pieces = ((part.at * step, 0, box(whole, *spans[n])) for n, part in own)
            tensors[role] = placed(zeros(whole, (height, whole.shape[1])), pieces)
        if is_diagonal:
            start, stop = number * width, (number + 1) * width
            tensors |= {"A": box(a, start, stop), "B": box(tensors["B"], start, stop, 1)}
        yield replace(module, path=name, tensors=tensors, rank=width if is_diagonal else rank)


def _fused(name: str, members: list[tuple[Part, Module]]) -> Module:
    """Fuse several parts into one module. The rows of missing parts are zero."""
    parts, modules = zip(*members, strict=True)
    factors = [_factors(module) for module in modules]
    whole, step = parts[0].whole, factors[0][1].shape[0] // parts[0].length
    heights = [b.shape[0] for _, b in factors] == [part.length * step for part in parts]
    if len({(a.dtype, b.dtype, a.shape[1:]) for a, b in factors}) > 1 or not heights:
        raise UnsupportedError(f"the parts of {name} differ in dtype or size")
    scale = modules[0].scale
    if any(module.scale != scale for module in modules):
        pairs = zip(modules, factors, strict=True)
        factors, scale = [(a, _times(b, module.scale)) for module, (a, b) in pairs], 1.0
    lefts = [0, *accumulate(a.shape[0] for a, _ in factors)]
    rank, rows = lefts[-1], [part.at * step for part in parts]
    stacked = ((at, 0, matrix(a)) for at, (a, _) in zip(lefts, factors, strict=False))
    diagonal = ((row, at, b) for row, at, (_, b) in zip(rows, lefts, factors, strict=False))
    (a, b), count = factors[0], sum(part.length for part in parts)
    tensors = {
        "A": placed(zeros(a, (rank, prod(a.shape[1:]))), stacked),
        "B": placed(zeros(b, (whole * step, rank)), diagonal),
    }
    for role in ("magnitude", "diff_b"):
        both = zip(rows, modules, strict=True)
        own = [(row, 0, matrix(m.tensors[role])) for row, m in both if role in m.tensors]
        if role == "magnitude" and own and (len(own) < len(modules) or count < whole):
            raise UnsupportedError(f"only some rows of {name} would have DoRA magnitudes")
        if len({each.dtype for *_, each in own}) > 1:
            raise UnsupportedError(f"the parts of {name} differ in dtype or size")
        if own:
            tensors[role] = placed(zeros(own[0][2], (whole * step, 1)), own)
    fused: Module = replace(modules[0], path=name, tensors=tensors, rank=rank, scale=scale)
    return fused


def _factors(module: Module) -> tuple[Tensor, Tensor]:
    """Return A and B of a module that is a LoRA of a matrix.

    Raises UnsupportedError for other modules, and for magnitudes of columns.
    """
    b = module.tensors.get("B")
    is_row = is_of_columns(module, 0 if b is None else b.shape[0])
    if module.kind != "lora" or b is None or b.ndim != 2 or is_row:
        kind = "magnitudes of columns" if is_row else module.kind
        what = f"the other layout splits or fuses {module.path} ({kind})"
        raise UnsupportedError(f"{what}; ckptkit supports this only for LoRA of a matrix")
    return module.tensors["A"], b


# Tensors


def _times(tensor: Tensor, factor: float | None, dtype: str = "") -> Tensor:
    """Return a tensor multiplied by a float32 factor. Each element is rounded once to `dtype`.

    The default of `dtype` is the dtype of the tensor. With this default, the factor 1 returns the
    tensor itself.
    """
    if factor == 1 and not dtype:
        return tensor
    name, single = tensor.dtype.name, struct.unpack("f", struct.pack("f", factor))[0]
    made = BY_NAME[dtype or name]
    product = WeightedSum(made.name, (name,), (single,), 1.0)
    record = Pending(product, (contiguous(tensor),), tensor.numel * made.itemsize)
    return made_of(record, made, tensor.shape)


def _baked(module: Module) -> Module:
    """Multiply A and B by two factors whose product is the scale, like diffusers.

    Return the module with the scale 1.
    """
    first, second = module.pair
    if first not in module.tensors or "mid" in module.tensors:
        what = f"{module.path} ({module.kind}) is not a LoRA; ckptkit cannot bake in its scale"
        raise UnsupportedError(what)
    down, up = module.scale or 0.0, 1.0
    while 0 < down * 2 < up:
        down, up = down * 2, up / 2
    pair = {first: _times(module.tensors[first], down), second: _times(module.tensors[second], up)}
    if "B_bias" in module.tensors:
        pair["B_bias"] = _times(module.tensors["B_bias"], module.scale, "float32")
    return replace(module, tensors={**module.tensors, **pair}, scale=1.0)


# Names and scales of a layout


def tensors_of(modules: Mapping[str, Module], to: str) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of modules with the names and shapes of a layout."""
    is_original = to in _ORIGINALS
    names = table("written")["original" if is_original else "peft"]
    for key, module in modules.items():
        has_rank = is_original and "A" in module.tensors
        for role, tensor in module.tensors.items():
            if role == "magnitude":
                tensor = _magnitude(tensor, module, to)
            elif role in _BIASES:
                tensor = made_of(contiguous(tensor), tensor.dtype, (prod(tensor.shape),))
            if role != "alpha" or (is_original and not has_rank):
                yield f"{key}.{names.get(role, role)}", tensor
        if has_rank:  # alpha gets the dtype of A if this dtype represents alpha exactly
            value = np.array(_number(module))
            if to == "kohya" and not value:
                hint = f"{typed('--bake', 'bake=True')} writes factors of zeros"
                what = f"{module.path} has alpha 0"
                why = "programs that read kohya files use the rank instead"
                raise UnsupportedError(f"{what}; {why}", hint=hint)
            own = tensor_of(value, module.tensors["A"].dtype)
            exact = own if own.numpy() == value else tensor_of(value, BY_NAME["float32"])
            yield f"{key}.alpha", exact


def _key(module: Module, to: str, single: bool) -> str:
    """Return the name of a module in a layout."""
    component, path, prefixes = module.component, module.path, table("written")["kohya"]
    if to in ("peft", "diffusers"):
        return f"{PEFT}{path}" if to == "peft" else f"{component}.{path}"
    if component.startswith("text_encoder") and path.startswith(("encoder.block.", "shared")):
        component = "text_encoder_3"  # T5, which is the second text encoder of Flux in diffusers
    if component not in prefixes:
        what = f"{to} has no component {component!r}; its components are {some(prefixes, 9)}"
        raise UnsupportedError(what)
    if to == "kohya":
        prefix = "lora_te1_" if component == "text_encoder" and not single else prefixes[component]
        return f"{prefix}{naming.flat(path)}"
    if component in _IMAGES:
        return f"diffusion_model.{path}"
    encoder = next(name for name, each in naming.ENCODERS.items() if each == component)
    return f"text_encoders.{encoder}.transformer.{path}"


def _magnitude(tensor: Tensor, module: Module, to: str) -> Tensor:
    """Return a DoRA magnitude in the shape of a layout.

    Raises UnsupportedError for magnitudes of columns if the layout does not support them.
    """
    if "B" not in module.tensors:
        return tensor
    out, ones = module.tensors["B"].shape[0], (1,) * (module.tensors["A"].ndim - 1)
    is_row = is_of_columns(module, out)
    if is_row and to not in _ORIGINALS:
        what = f"{module.path} has a magnitude for each column"
        raise UnsupportedError(f"{what}; the layout {to} cannot store such magnitudes")
    shape = (out, *ones)
    if to not in _ORIGINALS:
        shape = (1, out, *ones[1:]) if ones[1:] else (out,)  # convolution, or matrix
    return made_of(contiguous(tensor), tensor.dtype, tensor.shape if is_row else shape)


def _number(module: Module) -> float:
    """Return an alpha that results in the scale of the module, preferably the stored alpha."""
    rank, scale, alpha = module.rank or 0, module.scale or 0.0, module.alpha
    return alpha if alpha and rank and alpha / rank == scale else scale * rank


# Output files


def written(
    tensors: Mapping[str, Tensor],
    path: str | os.PathLike[str],
    options: Options,
    *,
    config: Mapping[str, Any] | None = None,
    metadata: Mapping[str, str] | None = None,
    source: ByteSource | Folder | None = None,
    notes: tuple[str, ...] = (),
    warnings: tuple[str, ...] = (),
) -> Conversion:
    """Write a safetensors file. If `config` is not None, write a peft folder instead.

    Raises UsageError if `path` is the path of `source`.
    """
    path = arguments.path("destination", path)
    if config is not None and path.endswith(WRITTEN):
        what = "is the name of a file, but a peft adapter is a folder"
        raise UsageError(what, where=path, hint=f"use the name {os.path.splitext(path)[0]}")
    if config is None:
        chosen = formats.for_writing(path, options.format, SAFETENSORS.name)
        if chosen is not SAFETENSORS:
            what = f"ckptkit writes adapters as safetensors, not as {chosen.name}"
            raise UsageError(what, where=path, hint="use a name that ends in .safetensors")
    held = Checkpoint(
        OrderedMapping(dict(tensors)), SAFETENSORS.name, source, metadata or {}, notes=notes,
        warnings=warnings,
    )  # fmt: skip
    # Programs that read adapters do not support shared tensors. If several modules share a matrix,
    # the file contains one copy per module.
    layout = replace(options, ties="duplicate", extras=False, allow_expand=True, format=None)
    plan = replace(formats.layout(held, SAFETENSORS, layout), notes=())
    if config is not None:
        text = json.dumps(dict(config), indent=2, sort_keys=True).encode()
        files = replace(plan.files[0], name=WEIGHTS[0]), OutputFile(CONFIG, (text,))
        plan = replace(plan, files=files)
    done = publish(plan, path, layout, origin=source)
    kind = "peft" if config is not None else SAFETENSORS.name
    return Conversion(held, plan, kind, shown_url(path), None if options.dry_run else done)


def config_of(modules: Iterable[Module], **others: Any) -> dict[str, Any]:
    """Return the peft configuration for the modules of one component.

    The most frequent rank becomes `r`. The most frequent alpha becomes `lora_alpha`. The fields
    `rank_pattern` and `alpha_pattern` contain the other values.
    """
    found = {each.path: each for each in modules}
    ranks = {name: each.rank or 0 for name, each in found.items()}
    numbers = {name: _number(each) for name, each in found.items()}
    alphas = {name: int(each) if each == int(each) else each for name, each in numbers.items()}
    counts = [Counter[float](each.values()) for each in (ranks, alphas)]
    rank, alpha = (max(each, key=each.__getitem__, default=1) for each in counts)
    return {
        **table("written")["config"],
        **dict.fromkeys(("base_model_name_or_path", "modules_to_save", "task_type")),
        "r": rank,
        "lora_alpha": alpha,
        "rank_pattern": {_exactly(n): each for n, each in ranks.items() if each != rank},
        "alpha_pattern": {_exactly(n): each for n, each in alphas.items() if each != alpha},
        "target_modules": sorted(ranks),
        "lora_bias": any("B_bias" in each.tensors for each in found.values()),
        "use_dora": any(each.is_dora for each in found.values()),
        **others,
    }


def _exactly(name: str) -> str:
    """Return a pattern that matches only this module."""
    return f"^{re.escape(name)}"


def tensor_of(values: Any, dtype: DType) -> Tensor:
    """Convert a NumPy float array to a tensor. Round the elements to `dtype`."""
    data = bytes(encode(values.reshape(-1), dtype))
    return made_of(Range(Memory(data), 0, len(data)), dtype, tuple(map(int, values.shape)))


# Extract and resize


@dataclass(slots=True)
class ExtractReport:
    """The result of an extraction.

    ``modules`` maps each module to its rank and its relative error in the Frobenius norm.
    ``error`` is the relative error of all modules together. ``saved`` lists tensors that the
    adapter stores completely. ``left`` lists tensors that differ but are missing from the adapter.
    """

    modules: dict[str, tuple[int, float]] = field(default_factory=dict)
    saved: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    conversion: Conversion | None = None
    norm: float = 0.0  # squared norm of all differences
    rest: float = 0.0  # squared norm of the differences that the adapter does not reproduce

    @property
    def error(self) -> float:
        return sqrt(self.rest / self.norm) if self.norm else 0.0

    def best(self, name: str, svd: tuple[Array, Array, Array], most: int, norm: float) -> Any:
        """Return B and A of the best approximation of a difference, with rank `most` or lower.

        `svd` contains U, S and V. `norm` is the squared norm of the difference.
        """
        left, values, right = svd
        kept = max(1, min(most, int((values > _LEAST * values[0]).sum())))
        rest = max(0.0, norm - float(np.square(values[:kept]).sum()))
        self.norm, self.rest = self.norm + norm, self.rest + rest
        self.modules[name] = kept, sqrt(rest / norm) if norm else 0.0
        roots = np.sqrt(values[:kept])
        return left[:, :kept] * roots, right[:kept] * roots[:, None]

    def written(
        self,
        modules: Mapping[str, Module],
        whole: Mapping[str, Tensor],
        layout: str,
        *given: Any,
        **more: Any,
    ) -> ExtractReport:
        """Write `modules` and the complete tensors `whole` as an adapter. Return this report."""
        tensors = dict(tensors_of(modules, layout))
        before = PEFT if layout == "peft" else ""
        for name, each in whole.items():
            module, _, end = name.rpartition(".")
            # peft loads the bias or weight of a LoRA module only under the name of its base layer
            inside = ".base_layer" if f"{PEFT}{module}" in modules else ""
            tensors[f"{before}{module}{inside}.{end}" if module else f"{before}{end}"] = each
        note = plural(len(self.modules), "module")
        note += f", {plural(len(self.saved), 'tensor')} stored completely" if self.saved else ""
        note += f", relative error {self.error:.3g}"
        self.conversion = written(tensors, *given, notes=(note,), **more)
        return self


@dataclass
class _Difference:
    """The difference of two tensors as a float64 matrix. `is_turned` transposes the matrix."""

    new: Tensor
    old: Tensor
    is_turned: bool = False

    def blocks(self) -> Iterator[tuple[int, Array]]:
        """Yield blocks of rows. Each item is (index of the first row, rows)."""
        rows, columns = as_matrix(self.new.shape)
        step = max(1, _BLOCK // max(1, columns))
        for row in range(0, rows, step):
            block = self.new[row : row + step].astype("f8")
            block -= self.old[row : row + step].astype("f8")
            yield row, block.reshape(len(block), -1)

    @cached_property
    def square(self) -> float:
        """Return the square of the Frobenius norm."""
        return fsum(float((block * block).sum()) for _, block in self.blocks())

    def product(self, other: Array, *, turned: bool = False) -> Array:
        """Return the matrix times `other`. If `turned` is True, transpose the matrix first."""
        if turned == self.is_turned:
            return np.concatenate([block @ other for _, block in self.blocks()])
        parts = (block.T @ other[row : row + len(block)] for row, block in self.blocks())
        total: Array = sum(parts)  # type: ignore[assignment]
        return total

    def svd(self, rank: int) -> tuple[Array, Array, Array]:
        """Return U, S and V for at least the `rank` largest singular values."""
        sizes = as_matrix(self.new.shape)
        if min(sizes) <= max(_COMPLETE, rank * 8):
            whole = np.concatenate([block for _, block in self.blocks()])
            whole = whole.T if self.is_turned else whole
            left, values, right = np.linalg.svd(whole, full_matrices=False)
            return left, values, right
        width = sizes[0] if self.is_turned else sizes[1]
        random = np.random.default_rng(0).standard_normal((width, rank + _EXTRA))
        span = np.linalg.qr(self.product(random))[0]
        for _ in range(_POWERS):
            span = np.linalg.qr(self.product(span, turned=True))[0]
            span = np.linalg.qr(self.product(span))[0]
        left, values, right = np.linalg.svd(self.product(span, turned=True).T, full_matrices=False)
        return span @ left, values, right


@checked
def extract_lora(
    tuned: Source,
    base: Source,
    path: str | os.PathLike[str],
    *,
    rank: int,
    conv_rank: int | None = None,
    save_modules: Sequence[str] = (),
    options: Options | None = None,
    **changes: Any,
) -> ExtractReport:
    """Write a peft adapter to the folder `path` that approximates the difference `tuned` - `base`.

    For each changed matrix, the rank of the adapter is `rank`, or the rank of the difference if
    that is lower. For a convolution with a kernel larger than 1, the rank is at most `conv_rank`.
    The adapter contains the complete tensors of the modules in `save_modules`. Only one tensor is
    in memory at a time. Raises UnsupportedError for a difference that no adapter can store. Raises
    NothingToDoError if no tensor differs.
    """
    save_modules = texts("save_modules", save_modules)
    if not count("rank", rank) or count("conv_rank", conv_rank) == 0:
        raise UsageError("the rank must be at least 1")
    asked, found = made(options, changes), ExtractReport()
    with (
        open_checkpoint(tuned) as after,
        open_checkpoint(base) as before,
        tempfile.TemporaryFile() as spool,
    ):
        for each in (after, before):
            quantized_names.refuse(each.require_complete(), None, "codes have no difference")
        olds = before.required.tensors
        wide = (each for name, each in olds.items() if _WIDE.fullmatch(name) and each.ndim == 2)
        is_conv1d = any(each.shape[1] > each.shape[0] for each in wide)
        modules: dict[str, Module] = {}
        for name, difference in _differences(after, before, save_modules, found):
            sizes = difference.new.shape
            is_embedding = len(sizes) == 2 and name.rpartition(".")[2] in _EMBEDDINGS
            turned = is_conv1d and _CONV1D.fullmatch(name) is not None
            difference.is_turned = is_embedding or turned
            most = conv_rank if conv_rank is not None and prod(sizes[2:]) > 1 else rank
            b, a = found.best(name, difference.svd(most), most, difference.square)
            if sizes[2:]:
                a, b = a.reshape(-1, *sizes[1:]), b.reshape(*b.shape, *(1 for _ in sizes[2:]))
            kind = "embedding" if is_embedding else "lora"
            module = Module("", "", name, kind, {}, len(a), scale=1.0)
            factors: dict[str, Tensor] = {}
            for role, array in zip(module.pair, (a, b), strict=True):
                start = spool.seek(0, os.SEEK_END)
                length = spool.write(array.astype("f4").tobytes())
                record = Range(FileObject(spool), start, length)
                factors[role] = made_of(record, BY_NAME["float32"], array.shape)
            modules[f"{PEFT}{name}"] = replace(module, tensors=factors)
        if not found.modules and not found.saved:
            rest = f": {quoted(found.left)} differ" if found.left else ""
            what, names = f"no matrix differs from {before.name}{rest}", [after.name, before.name]
            command = shell_command(("ckptkit", "diff", "--values", *map(str, names)))
            hint = f"`{command}` compares values" if all(names) else None
            raise NothingToDoError(what, where=after.name, hint=hint)
        whole = {name: after.weights[name] for name in found.saved}
        config = config_of(
            modules.values(), fan_in_fan_out=is_conv1d, base_model_name_or_path=before.name,
            modules_to_save=[*save_modules] or None,
        )  # fmt: skip
        others = {name.rpartition(".")[0] for name in before.weights} - found.modules.keys()
        if any(other.endswith(f".{name}") for other in others for name in found.modules):
            # peft compares `target_modules` with the ends of module names. A regular expression
            # prevents a match with other modules.
            config["target_modules"] = "|".join(map(re.escape, found.modules))
        store = f"{typed('--save-module NAME', 'save_modules=[...]')} stores a complete module"
        lost = f"dropped changes of tensors that are not matrices: {quoted(found.left)}; {store}"
        return found.written(
            modules, whole, "peft", path, asked, config=config, source=after.source,
            warnings=(lost,) if found.left else (),
        )  # fmt: skip


def _differences(
    after: Checkpoint, before: Checkpoint, save: Sequence[str], found: ExtractReport
) -> Iterator[tuple[str, _Difference]]:
    """Yield the difference of each changed matrix. Yield the difference of tied matrices once.

    Add the names of other changed tensors to ``found.left``. Add the names of tensors in the
    modules `save` to ``found.saved``.
    """
    news, olds = after.required.tensors, before.required.tensors
    unused = [each for each in save if not any(_is_in(name, each) for name in news)]
    gone = [name for name in olds if name not in news]
    if gone or unused:
        what = f"lacks {quoted(gone)} of {before.name}" if gone else f"has no {quoted(unused)}"
        raise UsageError(what, where=after.name)
    seen: set[object] = set()
    embedding: _Difference | None = None
    ends = {name: naming.end_of(name) for name in news}
    for name, new in sorted(news.items(), key=lambda each: ends[each[0]] not in _EMBEDDINGS):
        old, module = olds.get(name), name.removesuffix(".weight")
        if any(_is_in(name, each) for each in save):
            found.saved.append(name)
            continue
        if old is None or old.shape != new.shape:
            was = "is new" if old is None else f"was {shape(old.shape)} and is {shape(new.shape)}"
            raise _refusal(name, was, after)
        key = new.elements_key, old.elements_key
        if key in seen or same_bytes(new, old):
            continue
        seen.add(key)
        is_matrix = module != name and 2 <= new.ndim <= 5 and new.dtype.kind == "float"
        if new.ndim > 1 and (not is_matrix or (new.ndim == 3 and ".experts." in name)):
            raise _refusal(name, f"differs, and is {new.dtype} {shape(new.shape)}", after)
        if not is_matrix:
            found.left.append(name)
            continue
        difference = _Difference(new, old)
        if not isfinite(difference.square):
            raise TensorError(f"{name} has numbers that are not finite", where=after.name)
        end, tied = ends[name], embedding
        if tied and end in naming.HEADS and same_bytes(tied.new, new) and same_bytes(tied.old, old):
            continue  # the head equals the embedding
        if end in _EMBEDDINGS:
            embedding = embedding or difference
        if difference.square:
            yield module, difference


def _is_in(name: str, module: str) -> bool:
    return f".{module}." in f".{name}."


def _refusal(name: str, what: str, ck: Checkpoint) -> UnsupportedError:
    module = name.rpartition(".")[0] or name
    stored = typed(f"--save-module {module}", f"save_modules=[{module!r}]")
    return UnsupportedError(f"{name} {what}", where=ck.name, hint=f"{stored} stores it completely")


@checked
def resize_lora(
    adapter: Source,
    path: str | os.PathLike[str],
    *,
    rank: int,
    options: Options | None = None,
    **changes: Any,
) -> ExtractReport:
    """Write an adapter whose updates have at most rank `rank`.

    The layout and dtypes stay the same. Each weight update ``s B A`` becomes its best approximation
    with at most this rank. The scale becomes 1. Raises UnsupportedError for adapters other than
    plain LoRA.
    """
    if not count("rank", rank):
        raise UsageError("the rank must be at least 1")
    asked, found = made(options, changes), ExtractReport()
    read = read_adapter(adapter)
    refuse_damaged(read)
    before = PEFT if read.layout == "peft" else ""
    modules: dict[str, Module] = {}
    for key, module in read.modules.items():
        is_odd = module.kind not in ("lora", "embedding") or module.parameter
        if is_odd or not module.tensors.keys() <= {*module.pair, "alpha"}:
            what = f"{key} ({module.kind or some(module.tensors)}) is not plain LoRA with a scale"
            hint = "`ckptkit help lora` lists the adapters that ckptkit can resize"
            raise UnsupportedError(what, where=read.path, hint=hint)
        a, b = (module.tensors[role].numpy().astype("f8") for role in module.pair)
        outer, upper = np.linalg.qr(b.reshape(b.shape[0], -1) * (module.scale or 0.0))
        inner, lower = np.linalg.qr(a.reshape(a.shape[0], -1).T)
        core = upper @ lower.T
        if not np.isfinite(core).all():
            raise TensorError(f"{key} has numbers that are not finite", where=read.path)
        left, values, right = np.linalg.svd(core)
        svd, square = (outer @ left, values, right @ inner.T), float(np.square(values).sum())
        new_b, new_a = found.best(key, svd, rank, square)
        new = new_a.reshape(-1, *a.shape[1:]), new_b.reshape(*new_b.shape, *b.shape[2:])
        pairs = zip(module.pair, new, strict=True)
        pair = {role: tensor_of(array, module.tensors[role].dtype) for role, array in pairs}
        modules[f"{before}{key}"] = replace(
            module, tensors={**module.tensors, **pair}, rank=len(new_a), alpha=None, scale=1.0
        )
    # diffusers sets alpha to the rank if the file does not contain the metadata of diffusers.
    config = None
    if read.layout == "peft":
        kept = {key: value for key, value in (read.config or {}).items() if key not in _RANKS}
        config = config_of(modules.values()) | kept | {"use_rslora": False}
        if config.get("init_lora_weights") == "orthogonal":
            config["init_lora_weights"] = True  # peft supports orthogonal only for even ranks
    return found.written(
        modules, read.replaced, read.layout, path, asked, config=config,
        metadata=read.metadata, source=read.checkpoint.source,
    )  # fmt: skip
