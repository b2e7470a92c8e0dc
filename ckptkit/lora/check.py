"""Check an adapter, alone and against its base: what would be refused, or have no effect.

`lora check` and `doctor` show the findings. Names and shapes are read from headers; the elements of
the adapter are read, and with a base those of the weights that it changes, for their norms.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import sqrt
from typing import Any, NamedTuple

from ckptkit import quantized
from ckptkit.compute.arranged import contiguous
from ckptkit.compute.numbers import FLOATS, decode
from ckptkit.compute.operation import flow, import_numpy
from ckptkit.core.arguments import checked
from ckptkit.core.checkpoint import Checkpoint, Source, opened
from ckptkit.core.errors import AmbiguousError, CkptkitError, UnsupportedError, UsageError
from ckptkit.core.tensor import Tensor
from ckptkit.core.text import argument, output_name, plural, quoted, shell_command, some
from ckptkit.lora.changes import change_of
from ckptkit.lora.merge import merge_lora
from ckptkit.lora.naming import BaseNames
from ckptkit.lora.placing import HEADS, PeftNames, Rename, renamed
from ckptkit.lora.reading import Adapter, Module, problems, read_adapter

ERROR, WARNING = "error", "warning"
TARGETS = ("vllm",)
_NO_FACTORS = "alpha", "magnitude", "B_bias", "diff_b", "ia3", "tokens"
_INSIDE = {"pair", "rank", "empty", "shape", "method", "no-config"}  # merge refuses these first
_VLLM_RANK = 16  # the default of --max-lora-rank


class AdapterFinding(NamedTuple):
    """One thing that is wrong: its code, level and sentence, the modules, and what mends it."""

    code: str
    level: str
    title: str
    modules: tuple[str, ...] = ()
    command: str | None = None


@dataclass(frozen=True, slots=True)
class LoraReport:
    """An adapter and the findings about it, errors first."""

    adapter: Adapter
    findings: tuple[AdapterFinding, ...]

    def as_json(self) -> dict[str, Any]:
        """Return the object of ``lora check --json``, without its schema."""
        each = self.adapter
        facts = {"layout": each.layout, "method": each.method, "modules": len(each.modules)}
        return {
            "adapter": {**facts, "ranks": each.ranks},
            "findings": [finding._asdict() for finding in self.findings],
        }


@checked
def check_lora(
    adapter: Source,
    *,
    base: Source | None = None,
    target: str | None = None,
    component: str | None = None,
) -> LoraReport:
    """Return what is wrong with an adapter: alone, with `base`, and for a `target` (``vllm``).

    `component` takes one component of a pipeline. Raises UsageError for what is no adapter.
    """
    if target not in (None, *TARGETS):
        raise UsageError(f"target {target!r} is not one of {quoted(TARGETS)}")
    read = read_adapter(adapter, component=component)
    where = os.fspath(adapter) if isinstance(adapter, (str, os.PathLike)) else read.path
    under = None if base is None else opened(base)
    name = os.fspath(base) if isinstance(base, (str, os.PathLike)) else under and under.name

    def merging(*options: str) -> str | None:
        """Return the command that merges, if the base has a name."""
        if not name:
            return None
        names = *argument(name), *argument(where), output_name(name, "merged")
        return shell_command(("ckptkit", "lora", "merge", *options, *names))

    found = list(alone(read, merging("--base-is", "residual")))
    if under is not None:
        found += _with_base(read, under, name or "BASE", merging, found)
        if under is not base:
            under.close()
    if target is not None:
        convert = "ckptkit", "lora", "convert", "--to", "peft", *argument(where)
        peft = shell_command((*convert, output_name(where, "peft", "")))
        found += _for_vllm(read, merging(), peft)
    return LoraReport(read, tuple(sorted(found, key=lambda each: each.level != ERROR)))


def alone(read: Adapter, residual: str | None = None) -> Iterator[AdapterFinding]:
    """Yield what the files of the adapter tell by themselves.

    `residual` is the command for one that was trained on a residual base.
    """
    import_numpy()
    import numpy as np

    kinds: dict[str, list[Any]] = {}
    for each in problems(read):
        kinds.setdefault(each.code if each.modules else each.title, []).append(each)
    for first, *others in kinds.values():
        more = f", and {len(others):,} more" if others else ""
        title = f"{first.title}{more}" + (f"; {first.hint}" if first.hint else "")
        modules = dict.fromkeys(name for each in (first, *others) for name in each.modules)
        command = residual if first.code == "residual" else None
        yield AdapterFinding(first.code, ERROR, title, tuple(modules), command)
    odd, empty, unfit = [], [], []
    for key, module in read.modules.items():
        try:
            _shape(module)
        except UnsupportedError as error:
            unfit.append((key, error.message))
        floats = {r: each for r, each in module.tensors.items() if each.dtype.name in FLOATS}
        arrays = {role: tensor.numpy().astype("f4") for role, tensor in floats.items()}
        if not all(np.isfinite(each).all() for each in arrays.values()):
            odd.append(key)
        factors = [each for role, each in arrays.items() if role not in _NO_FACTORS and each.size]
        if not all(each.any() for each in factors):
            empty.append(key)
    if unfit:
        names, titles = zip(*unfit, strict=True)
        yield AdapterFinding("shape", ERROR, some(titles, 2), names)
    if odd:
        yield AdapterFinding(
            "nonfinite", ERROR, f"has NaN or infinity in {quoted(odd)}", tuple(odd)
        )
    if empty and len(empty) == len(read.modules):
        title = "every change is zero: it was not trained, or saved from another object"
        yield AdapterFinding("zero", WARNING, title, tuple(empty))


def _with_base(
    read: Adapter, base: Checkpoint, where: str, merging: Any, found: Sequence[AdapterFinding]
) -> Iterator[AdapterFinding]:
    """Yield what names, shapes and numbers of the base tell."""
    group = next(iter(quantized.find(base).groups), None)
    if group is not None:
        words = "ckptkit", "convert", *argument(where), output_name(where, "new")
        command = shell_command((*words, "--dequantize", "bfloat16"))
        title = f"{group.name} of the base is quantized as {group.label} ({group.family})"
        yield AdapterFinding("quantized", ERROR, title, (), command)
        return
    places, renames, missing = _places(read, base, merging)
    refusal, is_sound = None, not _INSIDE & {each.code for each in found}
    if is_sound:
        refusal = _refusal(read, base, merging)
        missing = missing if refusal and refusal.code == "no-module" else None
    if missing or refusal:
        yield missing or refusal  # type: ignore[misc]
    if renames and not missing:
        said = some(map(str, renames))
        title = f"all modules exist after a rename that other programs do not make: {said}"
        one = f"^{re.escape(renames[0].old)}={renames[0].new}"
        options = ("--sub", one) if len(renames) == 1 else ()
        yield AdapterFinding("prefix", ERROR, title, tuple(places), merging(*options))
    if not is_sound:
        return
    large = []
    for key, place in places.items():
        change, weight = _norm(read.modules[key]), _norm_of(base.weights[place])
        if change is not None and change > weight > 0:
            large.append(f"{key} ({change:.3g} of {weight:.3g})")
    if large:
        title = f"the norm of the change is above that of the weight in {some(large)}"
        yield AdapterFinding(
            "norm", WARNING, title, tuple(each.partition(" ")[0] for each in large)
        )
    rows = {own: (renamed(own, renames), each.shape[:1]) for own, each in read.replaced.items()}
    for key, place in places.items():
        tensors = read.modules[key].tensors
        if "embedding_A" in tensors:
            rows[key] = place, tensors["embedding_A"].shape[1:2]
        elif key.endswith(HEADS) and "B" in tensors:
            rows[key] = place, tensors["B"].shape[:1]
    for own, (place, count) in rows.items():
        old = base.weights.get(place)
        if old is not None and old.ndim == 2 and old.shape[:1] != count:
            title = f"{own} has {count[0]:,} rows, and {old.shape[0]:,} in the base"
            yield AdapterFinding("vocab", WARNING, title, (own,))


def _refusal(read: Adapter, base: Checkpoint, merging: Any) -> AdapterFinding | None:
    """Return why the merge is refused, None if it is not; nothing of it is computed."""
    try:
        merge_lora(base, read, base_is="residual")
    except CkptkitError as error:
        if error.code == "tied":
            return AdapterFinding("tied", WARNING, error.message, (), merging("--tied", "untie"))
        code = {"shape": "shape", "ambiguous": "no-module"}.get(error.code, "method")
        return AdapterFinding(
            "no-module" if error.code == "no-module" else code, ERROR, error.message
        )
    return None


def _places(
    read: Adapter, base: Checkpoint, merging: Any
) -> tuple[dict[str, str], tuple[Rename, ...], AdapterFinding | None]:
    """Return the weight of the base by module, where it has one; renames; what is missing."""
    shapes = {name: tensor.shape for name, tensor in base.required.tensors.items()}
    if read.layout == "peft":
        names = PeftNames(shapes)
        paths = [each.path for each in read.modules.values()]
        try:
            renames = names.renames(paths, None)
        except UnsupportedError as error:
            gone = tuple(path for path in paths if not names.has(path))
            return {}, (), AdapterFinding("no-module", ERROR, error.message, gone)
        paths = [renamed(path, renames) for path in paths]
        found = {
            key: names.tensors[path]
            for key, path in zip(read.modules, paths, strict=True)
            if path in names.tensors
        }
        return found, renames, None
    dialect, missing, places = BaseNames(shapes, read.components), [], dict[str, str]()
    for key, module in read.modules.items():
        with suppress(AmbiguousError, UnsupportedError):  # which the merge refuses
            is_flat = read.layout == "kohya"
            at = dialect.find(module.component, module.path, _shape(module), underscores=is_flat)
            if not at:
                missing.append(key)
            elif len(at) == 1 and at[0].at == 0:
                places[key] = at[0].tensor
    if not missing:
        return places, (), None
    lacking = {read.modules[key].component for key in missing}
    whole = [each for each in read.components if each not in lacking]
    title = f"{len(missing):,} of {plural(len(read.modules), 'module')} are not in the base"
    command = merging("--component", whole[0]) if whole else None
    title = f"{title}: {quoted(missing)}"
    return places, (), AdapterFinding("no-module", ERROR, title, tuple(missing), command)


def _shape(module: Module) -> tuple[int, ...]:
    if module.kind and not module.tensors.keys() & {"diff_b", "ia3", "tokens"}:
        change = change_of(module, {}, 1.0)
        return change.rows, change.columns
    shapes = (each.shape for role, each in module.tensors.items() if role != "alpha")
    return next(shapes, ()) or (1,)


def _norm(module: Module) -> float | None:
    """Return the Frobenius norm of a change ``s B A``, None for another kind."""
    pair = ("embedding_A", "embedding_B") if module.kind == "embedding" else ("A", "B")
    if module.kind not in ("lora", "embedding") or module.scale is None or module.is_dora:
        return None
    a, b = (module.tensors[role].numpy().astype("f8") for role in pair)
    a, b = a.reshape(a.shape[0], -1), b.reshape(b.shape[0], -1)
    if a.shape[0] != b.shape[1]:
        return None
    return abs(module.scale) * sqrt(max(0.0, float(((b.T @ b) * (a @ a.T)).sum())))


def _norm_of(tensor: Tensor) -> float:
    import numpy as np

    if tensor.dtype.name not in FLOATS:
        return 0.0
    pieces = flow(contiguous(tensor).locate())
    return sqrt(
        sum(float(np.square(decode(each, tensor.dtype).astype("f8")).sum()) for each in pieces)
    )


def _for_vllm(read: Adapter, merge: str | None, convert: str) -> Iterator[AdapterFinding]:
    """Yield what vLLM refuses, or scales in another way: it reads only r and lora_alpha.

    Source: vllm/lora/peft_helper.py and lora_model.py.
    """
    config = read.config or {}
    if read.layout != "peft" or read.config is None:
        title = f"vLLM loads folders of peft, not the layout {read.layout} without a configuration"
        yield AdapterFinding("vllm-layout", ERROR, title, (), convert)
        return
    patterns = [name for name in ("rank_pattern", "alpha_pattern") if config.get(name)]
    dora = tuple(key for key, each in read.modules.items() if each.is_dora)
    biases = tuple(key for key, each in read.modules.items() if "B_bias" in each.tensors)
    rows = (
        ("vllm-method", read.method != "LORA", f"does not load {read.method}", ()),
        ("vllm-dora", config.get("use_dora") or dora, "does not load DoRA", dora),
        ("vllm-modules-to-save", config.get("modules_to_save"), "does not load modules_to_save",
         tuple(read.replaced)),
        ("vllm-bias", config.get("bias", "none") != "none" or biases, "does not load biases",
         biases),
        ("vllm-pattern", patterns, f"ignores {some(patterns)}: it gets other scales", ()),
    )  # fmt: skip
    for code, is_so, why, modules in rows:
        if is_so:
            yield AdapterFinding(
                code, ERROR, f"vLLM {why}; merged into the base, it works", modules, merge
            )
    said = config.get("r")
    rank = max([*read.ranks, said if isinstance(said, int) else 0], default=0)
    if rank > _VLLM_RANK:
        title = f"vLLM loads ranks to {_VLLM_RANK} by default, and this has {rank}"
        yield AdapterFinding("vllm-rank", WARNING, title, (), f"vllm serve --max-lora-rank {rank}")
