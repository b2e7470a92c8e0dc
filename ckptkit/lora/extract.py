"""Extract the difference of two checkpoints as a low-rank adapter, or resize an adapter.

For each matrix, ``D = TUNED - BASE`` is computed in float64. With ``D = U S V``, the factors are
``B = U sqrt(S)`` and ``A = sqrt(S) V``. The scale is 1. Only some rows of D are in memory at once.

For a large matrix, this module computes only the largest singular values, by a randomized method
(Halko, Martinsson and Tropp 2011, algorithm 4.4). The squared error is exactly
``|D|^2 - sum(S^2)``, because B A is a projection of D.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import fsum, isfinite, prod, sqrt
from typing import TYPE_CHECKING, Any

from ckptkit.api import Conversion, open_checkpoint
from ckptkit.compute.operation import import_numpy
from ckptkit.core.arguments import checked, count, texts
from ckptkit.core.bytesource import FileObject, Range
from ckptkit.core.checkpoint import Checkpoint, Source
from ckptkit.core.dtypes import BY_NAME
from ckptkit.core.errors import NothingToDoError, TensorError, UnsupportedError, UsageError
from ckptkit.core.options import Options, made
from ckptkit.core.tensor import Tensor
from ckptkit.core.text import plural, quoted, shape, shell_command, some, typed
from ckptkit.edits import quantized_names
from ckptkit.lora.arithmetic import as_matrix
from ckptkit.lora.changes import made_of
from ckptkit.lora.convert import (
    PEFT,
    config_of,
    refuse_damaged,
    tensor_of,
    tensors_of,
    written,
)  # fmt: skip
from ckptkit.lora.merge import same_bytes
from ckptkit.lora.naming import EMBEDDINGS, HEADS
from ckptkit.lora.reading import Module, read_adapter

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

_EMBEDDINGS = (
    *EMBEDDINGS, "wpe", "embed_positions", "position_embeddings", "token_type_embeddings",
    "token_embedding", "position_embedding",
)  # fmt: skip
# In transformers, a weight of Conv1D has the shape [in, out]. In other models, linear layers of the
# same names have the shape [out, in].
_WIDE = re.compile(r"(.*\.)?h\.\d+\.(attn\.c_attn|mlp\.c_fc)\.weight")
_CONV1D = re.compile(r"(.*\.)?h\.\d+\.(attn|crossattention|mlp)\.(c_attn|q_attn|c_proj|c_fc)")
# If a matrix has at most this number of rows or columns, all its singular vectors are computed.
_SMALL = 256
_EXTRA, _POWERS = 8, 2  # oversampling and power iterations of the randomized method
_BLOCK = 1 << 20  # maximum number of elements of a difference in memory at once
_LEAST = 1e-6  # singular values below this fraction of the largest singular value become zero
_RANKS = ("r", "lora_alpha", "rank_pattern", "alpha_pattern")


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
        """Return B and A of the best approximation with at most rank `most`.

        `svd` contains U, S and V. `norm` is the squared norm of the difference.
        """
        import numpy as np

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
        tensors |= {f"{before}{name}": each for name, each in whole.items()}
        self.conversion = written(tensors, *given, notes=(self.note,), **more)
        return self

    @property
    def note(self) -> str:
        whole = f", {plural(len(self.saved), 'tensor')} stored completely" if self.saved else ""
        count = plural(len(self.modules), "module")
        return f"{count}{whole}, relative error {self.error:.3g}"


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
        import numpy as np

        if turned == self.is_turned:
            return np.concatenate([block @ other for _, block in self.blocks()])
        parts = (block.T @ other[row : row + len(block)] for row, block in self.blocks())
        total: Array = sum(parts)  # type: ignore[assignment]
        return total

    def svd(self, rank: int) -> tuple[Array, Array, Array]:
        """Return U, S and V for at least the `rank` largest singular values."""
        import numpy as np

        sizes = as_matrix(self.new.shape)
        if min(sizes) <= max(_SMALL, rank * 8):
            whole = np.concatenate([block for _, block in self.blocks()])
            left, values, right = np.linalg.svd(
                whole.T if self.is_turned else whole, full_matrices=False
            )
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
        raise UsageError("a rank is at least 1")
    asked, found = made(options, changes), ExtractReport()
    import_numpy()
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
            names = [each.name for each in (after, before) if each.name]
            command = f"`{shell_command(('ckptkit', 'diff', '--values', *names))}` compares values"
            what, hint = f"no matrix differs from {before.name}{rest}", command
            raise NothingToDoError(what, where=after.name, hint=hint if len(names) == 2 else None)
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

    Add the names of other tensors to `found`.
    """
    news, olds = after.required.tensors, before.required.tensors
    unused = [each for each in save if not any(_is_in(name, each) for name in news)]
    gone = [name for name in olds if name not in news]
    if gone or unused:
        what = f"lacks {quoted(gone)} of {before.name}" if gone else f"has no {quoted(unused)}"
        raise UsageError(what, where=after.name)
    seen: set[object] = set()
    embedding: _Difference | None = None
    for name, new in news.items():
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
        end, tied = module.rpartition(".")[2], embedding
        if tied and end in HEADS and same_bytes(tied.new, new) and same_bytes(tied.old, old):
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
    import_numpy()
    import numpy as np

    if not count("rank", rank):
        raise UsageError("a rank is at least 1")
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
    # diffusers sets alpha to the rank if the file does not contain its metadata.
    config = None
    if read.layout == "peft":
        kept = {key: value for key, value in (read.config or {}).items() if key not in _RANKS}
        config = config_of(modules.values()) | kept | {"use_rslora": False}
    return found.written(
        modules, read.replaced, read.layout, path, asked, config=config,
        metadata=read.metadata, source=read.checkpoint.source,
    )  # fmt: skip
