"""Extract an adapter: the difference of two checkpoints as matrices of low rank; and resize one.

``D = TUNED - BASE`` in float64; ``B = U sqrt(S)`` and ``A = sqrt(S) V``, so that the scale is 1. Of
large matrices only a part of the singular vectors is computed, in the span of random products
(Halko, Martinsson and Tropp 2011, algorithm 4.4); the error is exact all the same: it is
``|D|^2 - sum(S^2)``, because B A is a projection of D.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import prod, sqrt
from typing import TYPE_CHECKING, Any, BinaryIO

from ckptkit.api import Conversion, open_checkpoint
from ckptkit.compute.operation import import_numpy
from ckptkit.core.arguments import checked, count, texts
from ckptkit.core.bytesource import FileObject, Range
from ckptkit.core.checkpoint import Checkpoint, Source
from ckptkit.core.dtypes import BY_NAME
from ckptkit.core.errors import NothingToDoError, TensorError, UnsupportedError, UsageError
from ckptkit.core.options import Options, made
from ckptkit.core.tensor import Shape, Storage, Tensor, contiguous_stride
from ckptkit.core.text import plural, quoted, shape, shell_command, some, typed
from ckptkit.edits import groups
from ckptkit.lora.convert import refuse_damaged, tensors_of
from ckptkit.lora.reading import METADATA, Module, read_adapter
from ckptkit.lora.writing import PEFT, config_of, tensor_of, written

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

_EMBEDDING = re.compile(
    r"(.*\.)?(embed_tokens|wte|wpe|tok_embeddings|embed_in|shared|embed_positions"
    r"|(word|position|token_type)_embeddings|(token|position)_embedding)"
)
_HEAD = re.compile(r"(.*\.)?(lm_head|embed_out|output)")
# Conv1D of transformers is [in, out]; models with linear layers of the same names are [out, in].
_WIDE = re.compile(r"(.*\.)?h\.\d+\.(attn\.c_attn|mlp\.c_fc)\.weight")
_CONV1D = re.compile(r"(.*\.)?h\.\d+\.(attn|crossattention|mlp)\.(c_attn|q_attn|c_proj|c_fc)")
_SMALL = 256  # rows or columns up to which all singular vectors are computed
_EXTRA = 8  # random products beyond the rank
_POWERS = 2
_ROWS = 256  # of a matrix, whose difference is taken at a time
_LEAST = 1e-6  # of the largest singular value: below it, there is none


@dataclass(slots=True)
class ExtractReport:
    """The result of an extraction: by module, the rank and the relative error (Frobenius) left.

    ``saved`` are tensors that are stored whole, ``left`` those that differ and are left out;
    ``error`` is that of all modules together.
    """

    modules: dict[str, tuple[int, float]] = field(default_factory=dict)
    saved: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    conversion: Conversion | None = None
    norm: float = 0.0  # the square of that of all changes
    rest: float = 0.0  # of it, what is left

    @property
    def error(self) -> float:
        return sqrt(self.rest / self.norm) if self.norm else 0.0

    def best(self, name: str, svd: tuple[Array, Array, Array], most: int, norm: float) -> Any:
        """Return B and A of the best approximation; `norm` is the square of that of the change."""
        import numpy as np

        left, values, right = svd
        kept = max(1, min(most, int((values > _LEAST * values[0]).sum())))
        rest = max(0.0, norm - float(np.square(values[:kept]).sum()))
        self.norm, self.rest = self.norm + norm, self.rest + rest
        self.modules[name] = kept, sqrt(rest / norm) if norm else 0.0
        roots = np.sqrt(values[:kept])
        return left[:, :kept] * roots, right[:kept] * roots[:, None]

    @property
    def note(self) -> str:
        count = plural(len(self.modules), "module")
        whole = f", {plural(len(self.saved), 'tensor')} stored whole" if self.saved else ""
        return f"{count}{whole}, relative error {self.error:.3g}"


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
    """Write the folder `path`: an adapter of peft that makes `tuned` of `base`, as far as it can.

    Each matrix that differs becomes one of `rank`, or of fewer where it has fewer; a convolution
    with a kernel larger than 1 gets `conv_rank`. Tensors of the modules `save_modules` are stored
    whole. One tensor at a time is in memory. Raises UnsupportedError for a difference that has no
    such form, NothingToDoError if nothing differs.
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
            groups.refuse(each.require_complete(), None, "codes have no difference")
        places: dict[str, tuple[Shape, int]] = {}
        is_conv1d = any(
            _WIDE.fullmatch(name) and each.ndim == 2 and each.shape[1] > each.shape[0]
            for name, each in before.required.tensors.items()
        )
        for name, difference in _differences(after, before, save_modules, found):
            turned = is_conv1d and _CONV1D.fullmatch(name) is not None
            for key, array in _factors(name, difference, turned, rank, conv_rank, found):
                places[f"{PEFT}{name}.{key}"] = array.shape, spool.tell()
                spool.write(array.astype("f4").tobytes())
        if not found.modules and not found.saved:
            rest = f": {quoted(found.left)} differ" if found.left else ""
            names = [each.name for each in (after, before) if each.name]
            command = shell_command(("ckptkit", "diff", "--values", *names))
            raise NothingToDoError(
                f"no matrix differs from {before.name}{rest}",
                where=after.name,
                hint=f"`{command}` compares them" if len(names) == 2 else None,
            )
        tensors = _spooled(spool, places)
        tensors |= {f"{PEFT}{name}": after.weights[name] for name in found.saved}
        ranks = {name: each for name, (each, _) in found.modules.items()}
        config = config_of(
            ranks, ranks, fan_in_fan_out=is_conv1d, base_model_name_or_path=before.name,
            modules_to_save=[*save_modules] or None,
        )  # fmt: skip
        others = {name.rpartition(".")[0] for name in before.weights} - ranks.keys()
        if any(other.endswith(f".{name}") for other in others for name in ranks):
            config["target_modules"] = "|".join(map(re.escape, ranks))  # else peft adapts others
        warnings = [] if not found.left else [
            f"left out: {quoted(found.left)} differ, and are no matrices; "
            f"{typed('--save-module NAME', 'save_modules=[...]')} stores a module whole"
        ]  # fmt: skip
        found.conversion = written(
            tensors, path, asked, config=config, source=after.source, notes=(found.note,),
            warnings=(*warnings,),
        )  # fmt: skip
    return found


def _spooled(spool: BinaryIO, places: dict[str, tuple[Shape, int]]) -> dict[str, Tensor]:
    source, dtype = FileObject(spool), BY_NAME["float32"]
    return {
        name: Tensor(
            Storage(Range(source, at, dtype.nbytes(prod(sizes)))), dtype, sizes,
            contiguous_stride(sizes),
        )
        for name, (sizes, at) in places.items()
    }  # fmt: skip


def _differences(
    after: Checkpoint, before: Checkpoint, save: Sequence[str], found: ExtractReport
) -> Iterator[tuple[str, Array]]:
    """Yield the difference of each matrix that differs, tied ones once; sort out other tensors."""
    import numpy as np

    news, olds = after.required.tensors, before.required.tensors
    unused = [each for each in save if not any(_is_in(name, each) for name in news)]
    gone = [name for name in olds if name not in news]
    if gone or unused:
        what = f"lacks {quoted(gone)} of {before.name}" if gone else f"has no {quoted(unused)}"
        raise UsageError(what, where=after.name)
    seen: set[object] = set()
    embedding: tuple[Tensor, Tensor] | None = None
    for name, new in news.items():
        old, module = olds.get(name), name.removesuffix(".weight")
        if any(_is_in(name, each) for each in save):
            found.saved.append(name)
            continue
        if old is None or old.shape != new.shape:
            was = "is new" if old is None else f"was {shape(old.shape)} and is {shape(new.shape)}"
            raise _refusal(name, was, after)
        key = new.elements_key, old.elements_key
        array, other = new.numpy(), old.numpy()
        if key in seen or np.array_equal(array, other):
            continue
        seen.add(key)
        is_matrix = module != name and 2 <= new.ndim <= 5 and new.dtype.kind == "float"
        if new.ndim > 1 and (not is_matrix or (new.ndim == 3 and ".experts." in name)):
            raise _refusal(name, f"differs, and is {new.dtype} {shape(new.shape)}", after)
        if not is_matrix:
            found.left.append(name)
            continue
        if embedding and _HEAD.fullmatch(module) and _is_same(embedding, (new, old)):
            continue  # tied, and stored twice
        if _EMBEDDING.fullmatch(module):
            embedding = embedding or (new, old)
        difference = array.astype("f8")
        for row in range(0, len(other), _ROWS):
            difference[row : row + _ROWS] -= other[row : row + _ROWS].astype("f8")
        if not np.isfinite(difference).all():
            raise TensorError(f"{name} has numbers that are not finite", where=after.name)
        del array, other
        yield module, difference


def _is_in(name: str, module: str) -> bool:
    return f".{module}." in f".{name}."


def _is_same(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    import numpy as np

    pairs = zip(one, other, strict=True)
    return all(a.shape == b.shape and np.array_equal(a.numpy(), b.numpy()) for a, b in pairs)


def _refusal(name: str, what: str, ck: Checkpoint) -> UnsupportedError:
    module = name.rpartition(".")[0] or name
    stored = typed(f"--save-module {module}", f"save_modules=[{module!r}]")
    return UnsupportedError(f"{name} {what}", where=ck.name, hint=f"{stored} stores it whole")


def _factors(
    module: str,
    difference: Array,
    turned: bool,
    rank: int,
    conv_rank: int | None,
    found: ExtractReport,
) -> Iterator[tuple[str, Array]]:
    """Yield the factors of a difference, by their names in peft."""
    import numpy as np

    sizes, flat = difference.shape, difference.reshape(-1)
    is_embedding = len(sizes) == 2 and _EMBEDDING.fullmatch(module) is not None
    matrix = difference.reshape(sizes[0], -1)
    if is_embedding or turned:
        matrix = matrix.T
    most = conv_rank if conv_rank is not None and prod(sizes[2:]) > 1 else rank
    outer, inner = found.best(module, _svd(matrix, most), most, float(np.vdot(flat, flat)))
    if is_embedding:
        yield "lora_embedding_A", inner
        yield "lora_embedding_B", outer
        return
    yield "lora_A.weight", inner.reshape(-1, *sizes[1:]) if sizes[2:] else inner
    yield "lora_B.weight", outer.reshape(*outer.shape, *(1 for _ in sizes[2:]))


def _svd(matrix: Array, rank: int) -> tuple[Array, Array, Array]:
    """Return singular vectors and values of a matrix, at least `rank` of them."""
    import numpy as np

    if min(matrix.shape) <= max(_SMALL, rank * 8):
        left, values, right = np.linalg.svd(matrix, full_matrices=False)
        return left, values, right
    random = np.random.default_rng(0).standard_normal((matrix.shape[1], rank + _EXTRA))
    span = np.linalg.qr(matrix @ random)[0]
    for _ in range(_POWERS):
        span = np.linalg.qr(matrix @ np.linalg.qr(matrix.T @ span)[0])[0]
    left, values, right = np.linalg.svd(span.T @ matrix, full_matrices=False)
    return span @ left, values, right


@checked
def resize_lora(
    adapter: Source,
    path: str | os.PathLike[str],
    *,
    rank: int,
    options: Options | None = None,
    **changes: Any,
) -> ExtractReport:
    """Write an adapter with matrices of at most `rank`, in the same layout and dtypes.

    Each change ``s B A`` becomes the nearest of that rank, with the scale 1. Raises
    UnsupportedError for what is not plain LoRA.
    """
    import_numpy()
    import numpy as np

    if not count("rank", rank):
        raise UsageError("a rank is at least 1")
    asked, found = made(options, changes), ExtractReport()
    read = read_adapter(adapter)
    refuse_damaged(read)
    modules: dict[str, Module] = {}
    for key, module in read.modules.items():
        first, second = ("embedding_A", "embedding_B") if module.kind == "embedding" else ("A", "B")
        is_odd = module.kind not in ("lora", "embedding") or module.parameter
        if is_odd or not module.tensors.keys() <= {first, second, "alpha"}:
            what = f"{key} ({module.kind or some(module.tensors)}) is not plain LoRA with a scale"
            raise UnsupportedError(what, where=read.path, hint=_PLAIN)
        a, b = (module.tensors[role].numpy().astype("f8") for role in (first, second))
        outer, upper = np.linalg.qr(b.reshape(b.shape[0], -1) * (module.scale or 0.0))
        inner, lower = np.linalg.qr(a.reshape(a.shape[0], -1).T)
        core = upper @ lower.T
        if not np.isfinite(core).all():
            raise TensorError(f"{key} has numbers that are not finite", where=read.path)
        left, values, right = np.linalg.svd(core)
        svd = outer @ left, values, right @ inner.T
        new_b, new_a = found.best(key, svd, rank, float(np.square(values).sum()))
        new = new_a.reshape(-1, *a.shape[1:]), new_b.reshape(*new_b.shape, *b.shape[2:])
        factors = {
            role: tensor_of(array, module.tensors[role].dtype)
            for role, array in zip((first, second), new, strict=True)
        }
        modules[key] = replace(
            module, tensors={**module.tensors, **factors}, rank=len(new_a), alpha=None, scale=1.0
        )
    before = PEFT if read.layout == "peft" else ""
    named = {f"{before}{key}": each for key, each in modules.items()}
    tensors = dict(tensors_of(named, read.layout))
    tensors |= {f"{before}{name}": tensor for name, tensor in read.replaced.items()}
    ranks = {each.path: each.rank or 0 for each in modules.values()}
    extras, config = dict(read.metadata), None
    if read.layout == "peft":
        same = {key: value for key, value in (read.config or {}).items() if key not in _RANKS}
        config = config_of(ranks, ranks) | same | {"use_rslora": False}
    elif extras.pop(METADATA, None) is not None:
        pass  # alpha is the rank again, as without it
    found.conversion = written(
        tensors, path, asked, config=config, metadata=extras, source=read.checkpoint.source,
        notes=(found.note,),
    )  # fmt: skip
    return found


_PLAIN = "`ckptkit help lora` lists what can be resized"
_RANKS = ("r", "lora_alpha", "rank_pattern", "alpha_pattern")
