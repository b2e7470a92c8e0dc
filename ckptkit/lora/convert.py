"""Convert adapters between the layouts of peft, diffusers, kohya and ComfyUI.

A conversion renames: tensors stay byte for byte, and the scale goes where the layout has it. Only
where one spelling of a model has a matrix of which the other has the parts, factors are cut and
stacked: a fused module has the A of all parts on top of each other, and their B on the diagonal.
"""

from __future__ import annotations

import json
import os
import re
import struct
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import isfinite
from typing import Any

from ckptkit.api import Conversion, open_checkpoint
from ckptkit.compute.arranged import contiguous, joined
from ckptkit.compute.mixing import WeightedSum
from ckptkit.core.arguments import checked
from ckptkit.core.bytesource import Memory, Pending, Range
from ckptkit.core.checkpoint import Source
from ckptkit.core.dtypes import BY_NAME
from ckptkit.core.errors import AmbiguousError, UnsupportedError, UsageError
from ckptkit.core.options import Options, made
from ckptkit.core.tensor import Shape, Storage, Tensor, contiguous_stride
from ckptkit.core.text import plural, quoted, some, typed
from ckptkit.lora import naming
from ckptkit.lora.changes import change_of
from ckptkit.lora.naming import DIFFUSERS, FLUX, ORIGINAL, UNET, BaseNames, Part, spelled
from ckptkit.lora.problems import problems
from ckptkit.lora.reading import METADATA, Adapter, Module, read_adapter
from ckptkit.lora.writing import PEFT, config_of, tensor_of, written

LAYOUTS = "peft", "diffusers", "kohya", "comfy"
_ORIGINALS = "kohya", "comfy"  # layouts that have the original spellings
_KOHYA = {
    "A": "lora_down.weight", "B": "lora_up.weight", "mid": "lora_mid.weight", "diff": "diff",
    "diff_b": "diff_b", "magnitude": "dora_scale", "alpha": "alpha",
}  # fmt: skip
_PEFT = {
    "A": "lora_A.weight", "B": "lora_B.weight", "B_bias": "lora_B.bias",
    "magnitude": "lora_magnitude_vector", "embedding_A": "lora_embedding_A",
    "embedding_B": "lora_embedding_B",
}  # fmt: skip
_PREFIXES = {
    "unet": "lora_unet_", "transformer": "lora_unet_", "text_encoder": "lora_te_",
    "text_encoder_2": "lora_te2_", "text_encoder_3": "lora_te3_", "prior": "lora_prior_unet_",
}  # fmt: skip
_IMAGES = "unet", "transformer", "prior"
_LANGUAGE = re.compile(r"(^|\.)((layers?|h|block)\.\d+\.|(lm_head|embed_tokens)$)")
_SD3 = 1536, 2432  # widths of SD 3 and 3.5, whose double blocks have the names of Flux's
_BLOCKS = "down_blocks.", "mid_block.", "up_blocks."
_SMALL = "down_blocks.0.attentions.", "down_blocks.3.", "up_blocks.3."  # of SD 1.5 and 2 alone
# Of SDXL alone: deeper attention, and the embedding of sizes; the width of its text.
_LARGE = re.compile(r"(.*\.)?(transformer_blocks\.[1-9]\.|add_embedding\.|label_emb\.)")
_TEXT = 2048

Place = tuple[tuple[int, ...], Tensor]  # where a tensor is in another


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
    """Write an adapter in another layout: ``peft`` (a folder), ``diffusers``, ``kohya``, ``comfy``.

    `base` tells which underscores of kohya's names were dots. `component` takes one component of a
    pipeline; for an adapter of peft, it says which component the adapter changes. `alpha` is that
    of an adapter whose files record no scale. With `bake`, the scale is multiplied into the
    factors, for readers that ignore it. Raises UnsupportedError for what the layout cannot hold,
    AmbiguousError for names that could be several, with nothing written.
    """
    if to not in LAYOUTS:
        raise UsageError(f"to {to!r} is not one of {some(LAYOUTS)}")
    asked, warnings = made(options, changes), list[str]()
    read = read_adapter(adapter, alpha=alpha)
    if component is not None and read.layout != "peft":
        read = read_adapter(adapter, component=component, alpha=alpha)
    names, config, extras = None, None, dict(read.metadata)
    extras.pop(METADATA, None)
    try:
        _check(read, to)
        if base is not None:
            with open_checkpoint(base) as held:
                shapes = {name: each.shape for name, each in held.required.tensors.items()}
            names = BaseNames(shapes, read.components)
        modules = [_dotted(each, read, to, component, names) for each in read.modules.values()]
        if any(each.component == "transformer" and _is_flux(each) for each in modules):
            # Flux has T5 as its second text encoder, where kohya and ComfyUI number all three.
            second = {"text_encoder_3": "text_encoder_2"} if to not in _ORIGINALS else {}
            modules = [replace(m, component=second.get(m.component, m.component)) for m in modules]
        modules = list(_respelled(modules, to, read, warnings))
        modules = [_baked(each) for each in modules] if bake else modules
        parts = list(dict.fromkeys(each.component for each in modules))
        if to == "peft":
            if len(parts) > 1:
                what = f"changes {plural(len(parts), 'component')} ({some(parts)})"
                hint = f"{typed('--component NAME', 'component=...')} takes one"
                raise UnsupportedError(f"{what}; a folder of peft changes one", hint=hint)
            config = _config(modules) | {"base_model_name_or_path": read.base}
        elif to == "diffusers" and not bake:
            configs = {each: _config(m for m in modules if m.component == each) for each in parts}
            entries = {
                f"{c}.{key}": v for c, config in configs.items() for key, v in config.items()
            }
            extras[METADATA] = json.dumps(entries, indent=2, sort_keys=True)
        # A pipeline of one text encoder has another name for it.
        single = {*parts} <= {"unet", "text_encoder"} and not _is_xl(modules)
        single = single and not any(key.startswith("lora_te1_") for key in read.modules)
        keys = [_key(each, to, single) for each in modules]
        if twice := [key for key, count in Counter(keys).items() if count > 1]:
            raise AmbiguousError(f"two modules would have the name {some(twice)}")
        tensors = dict(tensors_of(dict(zip(keys, modules, strict=True)), to))
    except (UnsupportedError, AmbiguousError) as error:
        error.hint = error.hint or "`ckptkit help lora` lists what each layout can hold"
        raise error.at(read.path) from error.__cause__
    notes = [f"{plural(len(modules), 'module')} as {to}"]
    if read.ignored:
        notes.append(f"left out {quoted(read.ignored)}, which have no effect")
    return written(
        tensors, path, asked, config=config, metadata=extras, source=read.checkpoint.source,
        notes=(*notes,), warnings=(*warnings,),
    )  # fmt: skip


def refuse_damaged(read: Adapter) -> None:
    """Raise UnsupportedError for an adapter that could not be merged either, wherever it fits."""
    for problem in problems(read, "residual"):
        raise UnsupportedError(problem.title, where=read.path, hint=problem.hint)
    for name, module in read.modules.items():
        if module.kind not in ("ia3", "tokens") and "diff_b" not in module.tensors:
            change_of(module, {})  # raises for factors that do not fit
        if not isfinite(module.scale or 0.0):
            raise UnsupportedError(f"the scale of {name} is not a finite number", where=read.path)


def _check(read: Adapter, to: str) -> None:
    """Raise UnsupportedError for what no conversion, or not this one, can express."""
    refuse_damaged(read)
    config = read.config or {}
    if read.layout == "peft" and read.method != "LORA":
        raise UnsupportedError(f"is an adapter of the method {read.method}: only LORA is converted")
    odd = ["fan_in_fan_out"] if config.get("fan_in_fan_out") else []
    for name, module in read.modules.items():
        known = (*_KOHYA, "hada", "lokr") if to in _ORIGINALS else (*_PEFT, "alpha")
        is_odd = module.parameter or module.kind == "attention_out"
        if is_odd or any(r not in known and r[:4] not in known for r in module.tensors):
            odd.append(f"{name} ({module.kind})")
    if odd := [*odd, *read.replaced]:
        raise UnsupportedError(f"the layout {to} has no place for {some(odd)}")


def _dotted(
    module: Module, read: Adapter, to: str, component: str | None, names: BaseNames | None
) -> Module:
    """Return a module with dots in its name, and its component as diffusers calls it."""
    part, path = naming.of_comfy(module.component, module.path)
    if read.layout == "kohya":
        shape = next(iter(module.tensors.values())).shape
        if module.kind == "lora":
            shape = module.tensors["B"].shape[0], *module.tensors["A"].shape[1:]
        path = (names and names.dots(part, path, shape)) or naming.dotted(path)
    family = (spelled(path) or ("",))[0]
    found = {UNET: "unet", FLUX: "transformer"}.get(family)
    if not part:
        part = component or found or ("" if _LANGUAGE.search(path) else "unet")
    if not part and to != "peft":
        hint = f"{typed('--component NAME', 'component=...')} says of which component it is"
        raise UnsupportedError(f"{path} looks like a module of a language model", hint=hint)
    return replace(module, component=found if part == "unet" and found else part, path=path)


def _is_flux(module: Module) -> bool:
    known = spelled(module.path)
    return known is not None and known[0] == FLUX


# Spellings


def _respelled(
    modules: list[Module], to: str, read: Adapter, warnings: list[str]
) -> Iterator[Module]:
    """Yield the modules in the spelling of a layout: renamed, cut into parts, or joined."""
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
        warnings.append(f"kept the names of {quoted(odd)}: no other spelling of them is known")
    unsure = not is_xl and not any(each.startswith(_SMALL) for each in paths)
    if to == "kohya" and unsure and any(each.startswith(_BLOCKS) for each in paths):
        warnings.append("took its U-Net for that of SD 1.5: nothing in it tells of SDXL")
    if fused and not any(each.startswith("single_transformer_blocks.") for each in paths):
        if any(module.tensors["A"].shape[1] in _SD3 for _, module in next(iter(fused.values()))):
            raise UnsupportedError("is of SD 3: its original names are not known")
        warnings.append("took its names for those of Flux: other models have such blocks too")


def _is_xl(modules: Iterable[Module]) -> bool:
    """Return whether a U-Net is that of SDXL: by its second text encoder, or its attention."""
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
    """Return which of two names an upsampler has: the second where its block has no attention."""
    block = path.partition(".upsamplers.")[0]
    if is_xl or any(each.startswith(f"{block}.attentions.") for each in paths):
        return 0
    if any(each.startswith(_SMALL) for each in paths):
        return int(block == "up_blocks.0")
    raise AmbiguousError(f"{path} has another number in SDXL than in SD 1.5; nothing tells which")


def _cut(module: Module, parts: tuple[Part, ...]) -> Iterator[Module]:
    """Yield the parts of a module: each has the whole A and its rows of B.

    Where B is block-diagonal, each has its own A. Parts of one name are one module again.
    """
    a, b = _factors(module)
    if b.shape[0] % parts[0].units:
        what = f"{module.path} has {b.shape[0]} rows, not divisible by {parts[0].units}"
        raise UnsupportedError(what)
    step, rank = b.shape[0] // parts[0].units, b.shape[1]
    spans = [(part.start * step, (part.start + part.length) * step) for part in parts]
    names = list(dict.fromkeys(part.name for part in parts))
    width = rank // len(names) if _is_diagonal(b, spans) and len(names) > 1 else 0
    for number, name in enumerate(names):
        own = sorted(
            (part.at, span) for part, span in zip(parts, spans, strict=True) if part.name == name
        )
        tensors = {"A": a}
        for role in ("B", "magnitude"):
            tensor = module.tensors.get(role)
            if tensor is not None:
                pieces = [((at * step,), _box(tensor, start, stop)) for at, (start, stop) in own]
                shape = sum(stop - start for _, (start, stop) in own), *tensor.shape[1:]
                tensors[role] = pieces[0][1] if len(pieces) == 1 else _put(shape, pieces)
        if width:
            tensors["A"] = _box(a, number * width, (number + 1) * width)
            tensors["B"] = _box(tensors["B"], number * width, (number + 1) * width, 1)
        yield replace(module, path=name, tensors=tensors, rank=width or rank)


def _is_diagonal(b: Tensor, spans: list[tuple[int, int]]) -> bool:
    """Return whether B is zero but for blocks of these rows, which share the columns evenly."""
    import numpy as np

    width, rest = divmod(b.shape[1], len(spans))
    array = np.array(b.numpy())
    for number, (start, stop) in enumerate(spans):
        array[start:stop, number * width : (number + 1) * width] = 0
    return not rest and not array.any()


def _fused(name: str, members: list[tuple[Part, Module]]) -> Module:
    """Return one module of several parts; rows of missing parts are zero."""
    parts, modules = zip(*members, strict=True)
    factors = [_factors(module) for module in modules]
    whole, step = parts[0].whole, factors[0][1].shape[0] // parts[0].length
    rows = [part.length * step for part in parts]
    if (
        len({(a.dtype, b.dtype, a.shape[1:]) for a, b in factors}) > 1
        or [b.shape[0] for _, b in factors] != rows
    ):
        raise UnsupportedError(f"the parts of {name} differ in dtype or size")
    scale = modules[0].scale
    if any(module.scale != scale for module in modules):
        pairs = zip(modules, factors, strict=True)
        factors, scale = [(a, _times(b, module.scale)) for module, (a, b) in pairs], 1.0
    rank, at = sum(a.shape[0] for a, _ in factors), 0
    stacked, diagonal = list[Place](), list[Place]()
    filled = {part.at + n for part in parts for n in range(part.length)}
    for part, (a, b) in zip(parts, factors, strict=True):
        stacked.append(((at,), a))
        diagonal.append(((part.at * step, at), b))
        for start, stop in ((0, at), (at + a.shape[0], rank)):
            diagonal.append(((part.at * step, start), _zeros(b, (b.shape[0], stop - start))))
        at += a.shape[0]
    for each in set(range(whole)) - filled:
        diagonal.append(((each * step, 0), _zeros(factors[0][1], (step, rank))))
    tensors = {
        "A": _put((rank, *factors[0][0].shape[1:]), stacked),
        "B": _put((whole * step, rank), [each for each in diagonal if each[1].numel]),
    }
    weights = [each.tensors["magnitude"] for each in modules if "magnitude" in each.tensors]
    if weights:
        if len(weights) < len(modules) or len(filled) < whole:
            raise UnsupportedError(f"{name} would be DoRA in some of its rows only")
        places = [((part.at * step,), each) for part, each in zip(parts, weights, strict=True)]
        tensors["magnitude"] = _put((whole * step, *weights[0].shape[1:]), places)
    made: Module = replace(modules[0], path=name, tensors=tensors, rank=rank, scale=scale)
    return made


def _factors(module: Module) -> tuple[Tensor, Tensor]:
    """Return A and B of a plain LoRA of a matrix. Raises UnsupportedError for other kinds."""
    if module.kind != "lora" or module.tensors["B"].ndim != 2:
        what = f"{module.path} ({module.kind}) is cut or joined by rows in the other spelling"
        raise UnsupportedError(f"{what}, which only LoRA can be")
    return module.tensors["A"], module.tensors["B"]


# Tensors


def _box(tensor: Tensor, start: int, stop: int, axis: int = 0) -> Tensor:
    shape = (*tensor.shape[:axis], stop - start, *tensor.shape[axis + 1 :])
    return replace(tensor, shape=shape, offset=tensor.offset + start * tensor.stride[axis])


def _zeros(like: Tensor, shape: Shape) -> Tensor:
    zero = Storage(Range(Memory(bytes(16), "zeros"), 0, 16))
    return Tensor(zero, like.dtype, shape, (0,) * len(shape))


def _put(shape: Shape, parts: Sequence[Place]) -> Tensor:
    """Return the tensor in which the parts are at these offsets, 0 along further dimensions."""
    dtype = parts[0][1].dtype
    places = [((*at, *(0 for _ in shape[len(at) :])), tensor) for at, tensor in parts]
    return Tensor(Storage(joined(dtype, shape, places)), dtype, shape, contiguous_stride(shape))


def _times(tensor: Tensor, factor: float | None) -> Tensor:
    """Return the elements times a factor of float32, rounded once."""
    if factor == 1:
        return tensor
    name, single = tensor.dtype.name, struct.unpack("f", struct.pack("f", factor))[0]
    product = WeightedSum(name, (name,), (single,), 1.0)
    held = Storage(Pending(product, (contiguous(tensor),), tensor.nbytes))
    return Tensor(held, tensor.dtype, tensor.shape, contiguous_stride(tensor.shape))


def _baked(module: Module) -> Module:
    """Return a module whose scale is 1: multiplied into A and B as diffusers does."""
    first, second = ("embedding_A", "embedding_B") if module.kind == "embedding" else ("A", "B")
    if first not in module.tensors or "mid" in module.tensors:
        raise UnsupportedError(f"{module.path} ({module.kind}): only scales of LoRA are baked in")
    down, up = module.scale or 0.0, 1.0
    while 0 < down * 2 < up:
        down, up = down * 2, up / 2
    factors = {
        first: _times(module.tensors[first], down),
        second: _times(module.tensors[second], up),
    }
    return replace(module, tensors={**module.tensors, **factors}, scale=1.0)


# Names and scales of a layout


def tensors_of(modules: Mapping[str, Module], to: str) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of modules, by their names in a layout, in the shapes that it has."""
    names = _KOHYA if to in _ORIGINALS else _PEFT
    for key, module in modules.items():
        for role, tensor in module.tensors.items():
            if role == "magnitude":
                tensor = _magnitude(tensor, module, to)
            if role != "alpha" or (to in _ORIGINALS and "A" not in module.tensors):
                yield f"{key}.{names.get(role, role)}", tensor
        if to in _ORIGINALS and "A" in module.tensors:
            yield f"{key}.alpha", _alpha(module)


def _key(module: Module, to: str, single: bool) -> str:
    """Return the name of a module in a layout."""
    component, path = module.component, module.path
    if to == "peft":
        return f"{PEFT}{path}"
    if to == "diffusers":
        return f"{component}.{path}"
    if component not in _PREFIXES:
        what = f"{to} has no component {component!r}: it has {some(_PREFIXES, 9)}"
        raise UnsupportedError(what)
    if to == "kohya":
        prefix = "lora_te1_" if component == "text_encoder" and not single else _PREFIXES[component]
        return f"{prefix}{naming.flat(path)}"
    if component in _IMAGES:
        return f"diffusion_model.{path}"
    encoder = next(name for name, each in naming.ENCODERS.items() if each == component)
    encoder = "t5xxl" if path.startswith(("encoder.block.", "shared")) else encoder
    return f"text_encoders.{encoder}.transformer.{path}"


def _magnitude(tensor: Tensor, module: Module, to: str) -> Tensor:
    """Return a magnitude in the shape of a layout. Raises UnsupportedError for one of columns."""
    out, ones = module.tensors["B"].shape[0], (1,) * (module.tensors["A"].ndim - 1)
    if tensor.numel != out:
        if to in _ORIGINALS:
            return tensor
        what = f"{module.path} has a magnitude for each column"
        raise UnsupportedError(f"{what}, for which the layout {to} has no place")
    shape: Shape = (out, *ones)
    if to not in _ORIGINALS:
        shape = (1, out, *ones[1:]) if ones[1:] else (out,)  # of convolutions, and of matrices
    held = Storage(contiguous(tensor))
    return Tensor(held, tensor.dtype, shape, contiguous_stride(shape))


def _alpha(module: Module) -> Tensor:
    """Return the tensor of alpha: in the dtype of A if that has the number, else in float32."""
    import numpy as np

    value = np.array(_number(module))
    own = tensor_of(value, module.tensors["A"].dtype)
    return own if own.numpy() == value else tensor_of(value, BY_NAME["float32"])


def _number(module: Module) -> float:
    """Return alpha: that of the file where it still says the scale."""
    rank, scale, alpha = module.rank or 0, module.scale or 0.0, module.alpha
    return alpha if alpha and rank and alpha / rank == scale else scale * rank


def _config(modules: Iterable[Module]) -> dict[str, Any]:
    """Return the configuration of the modules of one component."""
    found = {each.path: each for each in modules}
    return config_of(
        {name: each.rank or 0 for name, each in found.items()},
        {name: _number(each) for name, each in found.items()},
        use_dora=any("magnitude" in each.tensors for each in found.values()),
        lora_bias=any("B_bias" in each.tensors for each in found.values()),
    )
