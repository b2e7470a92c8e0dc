"""Read DeepSpeed folders with tensor parallelism or pipeline parallelism.

In these file names, ``<TT>`` is the tensor-parallel rank and ``<LL>`` is the number of a pipeline
layer:

* ``<tag>/mp_rank_<TT>_model_states.pt`` contains the state_dict of one rank as ``module``. If there
  are layer files, ``module`` is None.
* ``<tag>/layer_<LL>-model_<TT>-model_states.pt`` contains the state_dict of one layer and rank.

Megatron-DeepSpeed and AutoTP write ``universal_checkpoint_info``. This entry describes how tensors
were split. Without the entry, ckptkit assumes the layout of gpt-neox. Tensor names begin with the
number of the layer: ``2.input_layernorm.weight``. The weights have the dtype of the training run.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ckptkit.core.bytesource import Folder, small_file_beside
from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.errors import CkptkitError, CorruptError, FormatError, UnsupportedError
from ckptkit.core.text import some, without
from ckptkit.core.tree import Node
from ckptkit.formats.distributed import deepspeed, table
from ckptkit.formats.distributed.joining import Joiner
from ckptkit.formats.distributed.meshes import attributes
from ckptkit.formats.distributed.parts import LAYER, TENSOR_RANK, ZERO
from ckptkit.formats.distributed.reading import Fields, RankReader
from ckptkit.formats.distributed.table import MEAN, SAME, SUM, TP, LayoutRow, cut
from ckptkit.formats.format import Probe

INFO = "universal_checkpoint_info"
# This expression matches the regular expressions that ckptkit accepts from a file. ckptkit refuses
# all other regular expressions, because a hostile expression can take very long to match.
_PLAIN = re.compile(r"\^?(?:[A-Za-z0-9_\-]|\\[.\-dw]\+?|\.[*+]?|\[[A-Za-z0-9\-]{1,8}\]\+?)*\$?")
_REPEATS = 4
_LAYER = "layer"


def matches(probe: Probe) -> bool:
    """Return whether the folder or its tag folder has layer files, or files of several ranks."""
    if not (deepspeed.is_tag(probe.names) or deepspeed.POINTERS[0] in probe.names):
        return False
    try:
        folder = deepspeed.find(probe.folder, probe.names)
    except CkptkitError:
        return False
    names = folder.list()
    if deepspeed.UNIVERSAL in names or any(map(deepspeed.EXPERT.fullmatch, names)):
        return False
    return any(map(LAYER.fullmatch, names)) or len(list(filter(TENSOR_RANK.fullmatch, names))) > 1


def read(probe: Probe) -> Checkpoint:
    """Return the weights, merged from all ranks, and the other entries of the first rank.

    Raises UnsupportedError if ckptkit does not know how a tensor was split. Raises CorruptError if
    the files do not match.
    """
    folder = deepspeed.find(probe.folder, probe.names)
    try:
        return _read(probe, folder)
    except CkptkitError as error:
        raise error.at(folder.name) from error.__cause__


def _read(probe: Probe, folder: Folder) -> Checkpoint:
    names, reader, joiner = folder.list(), RankReader(folder), Joiner(probe)
    models = [reader.fields(name).node for name in filter(TENSOR_RANK.fullmatch, names)]
    first = models[0] if models else {}
    layers = any(map(LAYER.fullmatch, names))
    parts = table.read_parts(reader, LAYER if layers else TENSOR_RANK, "" if layers else "module")
    axes = {TP: 1 + max(part.at[TP] for part in parts)}
    numbers = {part.at.get(_LAYER, 0) for part in parts}
    for number in sorted(numbers):
        held = [part for part in parts if part.at.get(_LAYER, 0) == number]
        table.check_grid(held, axes, {TP: "tensor rank"})
    if layers:
        parts = [
            replace(
                part,
                entries={f"{part.at[_LAYER]}.{key}": part.entries[key] for key in part.entries},
            )
            for part in parts
        ]
    args = _underscored(attributes(first.get("args")))
    _check_ranks(first, args, axes[TP], layers)
    if isinstance(first.get(INFO), dict):
        rows = tuple(_universal_rows(Fields(first[INFO], INFO)))
    else:
        configs = _configs(folder, probe.folder)
        known = {"gpt_j_residual": False} if configs else {}
        rows = _neox_rows({**known, **args, **configs})
    merged = table.merge(parts, axes[TP], table.ParallelLayout(rows), joiner)
    left = [name for name in names if ZERO.fullmatch(name)]
    if left:
        joiner.notes.append(f"dropped the optimizer and its fp32 weights: {some(left)}")
    kept = without(first, ("module", INFO, "mp_world_size"))
    what = f"TP {axes[TP]}" + (f", {len(numbers)} pipeline layers" if layers else "")
    root = {"module": merged, **kept}
    return joiner.checkpoint(root, reader, f"DeepSpeed: {what}", key="module")


def _check_ranks(
    first: Mapping[Node, Node], args: Mapping[str, Any], count: int, layers: bool
) -> None:
    """Raise CorruptError if the number of ranks differs from the training arguments.

    Raise UnsupportedError for several pipeline stages without layer files.
    """
    promised = args.get("model_parallel_size", args.get("tensor_model_parallel_size"))
    stages = args.get("pipe_parallel_size", args.get("pipeline_model_parallel_size"))
    if not layers and type(stages) is int and stages > 1:
        raise UnsupportedError(
            f"has {stages} pipeline stages, but no layer files (layer_*), so ckptkit cannot join "
            "the stages"
        )
    is_said = type(promised) is int and promised > 0
    expected = promised if is_said else first.get("mp_world_size")
    if type(expected) is int and expected != count and (not layers or promised is not None):
        raise CorruptError(
            f"has files of {count} tensor ranks, but {expected} ranks wrote the checkpoint",
            hint="copy the missing files from the same source",
        )


def _configs(*places: Folder) -> dict[str, Any]:
    """Return the settings of gpt-neox from the files in the folder ``configs``."""
    found: dict[str, Any] = {}
    for inner in [place.sub("configs") for place in places if "configs" in place.folders()]:
        for name in inner.list():
            if name.endswith((".yml", ".yaml", ".json")):
                data = small_file_beside(inner, name) or b""
                content = table.parse(data, f"{inner.name}/{name}")
                found |= content if isinstance(content, dict) else {}
    return _underscored(found)


def _underscored(values: Mapping[Node, Any]) -> dict[str, Any]:
    return {str(key).replace("-", "_"): value for key, value in values.items()}


def _neox_rows(config: Mapping[str, Any]) -> tuple[LayoutRow, ...]:
    """Return the rows for gpt-neox. `config` contains its settings and training arguments."""
    is_gated = config.get("activation") in ("swiglu", "geglu") or config.get("mlp_type") == "llama"
    parallel = config.get("gpt_j_residual")
    biases = SUM if parallel is True else SAME
    if parallel is None:
        biases = (
            "refuse configs/*.yml must set gpt_j_residual, which tells whether biases are summed"
        )
    return table.known_rows("gpt-neox", gated=2 if is_gated else 1, biases=biases)


def _universal_rows(info: Fields) -> Iterator[LayoutRow]:
    """Yield layout rows from the lists of patterns in ``universal_checkpoint_info``.

    The lists are used in the same order as in DeepSpeed's merge script. A pattern matches the
    beginning of a tensor name. The first pattern that matches is used.

    A SubparamShape describes fused parameters. A SubparamShape contains patterns, a shape, and
    ``partition_dim``, the index of the split dimension. At index ``partition_dim``, the shape
    contains a tuple with the size of each fused parameter. If all fused parameters have the same
    size, the shape may contain the number of fused parameters in place of the tuple.
    ``sub_param_shard_widths`` contains the width of each fused parameter on each rank.
    """
    unknown = info.names("autotp_unsupported_parameter_patterns")
    lists = [([text], f"refuse: {str(reason)[:200]}") for text, reason in unknown.items()]
    for key, how in (
        ("tp_replicated_parameter_patterns", SAME), ("parameter_to_average_patterns", MEAN),
        ("parameter_with_2_sub_params_cat_dim_0", cut(0, 2)),
    ):  # fmt: skip
        lists.append((info.listed(key), how))
    for texts, how in lists:
        yield from (LayoutRow(pattern, how) for pattern in _patterns(texts))
    widths = Fields(info.names("sub_param_shard_widths"), f"{INFO}: sub_param_shard_widths")
    for node in info.listed("parameter_with_sub_params"):
        state: Any = attributes(node)
        shape, dim = (state.get(key) for key in ("shape", "partition_dim"))
        texts = Fields(state, INFO).listed("patterns")
        sizes = None
        if isinstance(shape, (tuple, list)) and type(dim) is int and dim in range(len(shape)):
            sizes = shape[dim]
        several = sizes if isinstance(sizes, (tuple, list)) else (sizes,)
        if not all(type(n) is int and n > 0 for n in several):
            raise FormatError(f"its {INFO} has a parameter_with_sub_params of unknown form")
        how = cut(dim, sizes) if type(sizes) is int else cut(dim, sizes=several)
        for pattern, text in zip(_patterns(texts), texts, strict=False):
            rows = [Fields({text: each}, widths.place) for each in widths.listed(text)]
            given = tuple(tuple(row.integers(text)) for row in rows)
            yield LayoutRow(pattern, cut(dim), given) if given else LayoutRow(pattern, how)
    columns = _patterns(info.listed("parameter_with_row_parallelism_patterns"))
    yield from (LayoutRow(pattern, cut(1)) for pattern in columns)
    yield LayoutRow(re.compile(".*"), cut(0))


def _patterns(texts: Sequence[Node]) -> Iterator[re.Pattern[str]]:
    """Compile a list of regular expressions for the beginnings of tensor names.

    Raises UnsupportedError for expressions that could take very long to match.
    """
    for text in texts:
        plain = isinstance(text, str) and len(text) < 400 and _PLAIN.fullmatch(text)
        if not plain or text.count("*") + text.count("+") > _REPEATS:
            raise UnsupportedError(
                f"its {INFO} contains the unsupported pattern {str(text)[:80]!r}"
            )
        yield re.compile(f"(?:{text}).*", re.DOTALL)
