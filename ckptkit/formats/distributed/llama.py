"""Read and write Meta's releases of Llama: shards ``consolidated.<NN>.pth`` and ``params.json``.

Llama 1 and 2 split the embedding along its second dimension. In Llama 1 and 2, a shard of the
embedding therefore has fewer than ``dim`` columns. Since Llama 3, the embedding is split along its
first dimension. Llama 4 has fused projections, all experts in one tensor, and an image encoder.
Each file is one shard. The ``wq`` tensors of all shards together have ``dim`` rows. The function
:func:`layout` splits a model with Meta's tensor names into such shards.

Sources:

* Meta's code for Llama uses the parallel layers of fairscale.
* ``convert_llama4_weights_to_hf.py`` of transformers joins the shards of Llama 4.
* ``convert_meta_to_dcp.py`` of torchtitan also joins the shards of Llama 4.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import gcd
from typing import Any

from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.errors import CorruptError, FormatError, UnsupportedError, UsageError
from ckptkit.core.options import Options
from ckptkit.core.plan import OutputFile, Plan
from ckptkit.core.tree import Node
from ckptkit.core.weights import as_tensor
from ckptkit.formats import strict_json
from ckptkit.formats.distributed import table
from ckptkit.formats.distributed.joining import Joiner
from ckptkit.formats.distributed.parts import CONSOLIDATED
from ckptkit.formats.distributed.reading import reader_of
from ckptkit.formats.distributed.table import TP
from ckptkit.formats.format import Probe
from ckptkit.formats.table import LLAMA_PARTS

PARAMS = "params.json"
# Metadata key of the dimension along which the embedding was split.
EMBEDDING = "llama.embedding_cut"
_BYTES = 1 << 20  # maximum size of params.json


def layout_of(params: Mapping[str, Any], *, by_rows: bool) -> table.ParallelLayout:
    """Return the layout of all versions of Llama.

    Set `by_rows` if the embedding is split along its first dimension (since Llama 3).
    """
    heads, groups = table.positive(params, "n_heads"), table.positive(params, "n_kv_heads")
    inner = params.get("moe_args")
    experts = table.positive(inner if isinstance(inner, dict) else params, "num_experts") or 1
    fused = "cut 0 blocks 3"
    if heads and groups:  # the query has more heads than the key and the value
        unit = gcd(heads, groups)
        ratio = f"{heads // unit}|{groups // unit}|{groups // unit}"
        fused = f"[(p n o) ...] -> [(p tp n o) ...] with p=3 n={ratio}"
    embedding = 0 if by_rows else 1
    return table.ParallelLayout(
        table.known_rows("llama", embedding=embedding, fused=fused, experts=experts)
    )


def matches(probe: Probe) -> bool:
    """Return whether the folder contains a shard with a number above 00."""
    found = set(filter(CONSOLIDATED.fullmatch, probe.names))
    return bool(found - {"consolidated.00.pth"})


def read(probe: Probe) -> Checkpoint:
    """Return the merged state_dict, with Meta's tensor names.

    Raises CorruptError if the shards do not match.
    """
    folder, reader, joiner = probe.folder, reader_of(probe), Joiner(probe)
    text = b""
    if PARAMS in folder:
        source = folder.open(PARAMS)
        text = source.read(0, min(source.size, _BYTES))
    params = read_params(text)
    parts = table.read_parts(reader, CONSOLIDATED)
    names = "norm", "tok_embeddings", "layers.0.attention.wq", "layers.0.attention.wo"
    tensors = (as_tensor(parts[0].entries.get(f"{name}.weight")) for name in names)
    norm, embedding, query, output = tensors
    dim = table.positive(params, "dim")
    width = norm.shape[0] if norm is not None and len(norm.shape) == 1 else None
    if dim and width and dim != width:
        raise CorruptError(f"{PARAMS} has dim {dim:,}, but the norms have {width:,} elements")
    dim = dim or width
    count = 1 + max(part.at[TP] for part in parts)
    if dim and output is not None and len(output.shape) == 2:
        # The shards of a query projection together have `dim` rows.
        held = query.shape[0] if query is not None and query.shape else output.shape[1]
        count = max(count, dim // held if held and dim % held == 0 else 0)
    table.check_grid(parts, {TP: count}, {TP: "consolidated"})
    # If a shard of the embedding has `dim` columns, the embedding is split along its first
    # dimension.
    by_rows = embedding is None or dim is None or dim in embedding.shape[-1:]
    merged = table.merge(parts, count, layout_of(params, by_rows=by_rows), joiner)
    _check_totals(merged, params)
    kept = {PARAMS: text.decode()} if text else {}
    if text and count > 1:
        kept[EMBEDDING] = "0" if by_rows else "1"
    about = f"Llama release of Meta: {count} of {count} shards"
    return joiner.checkpoint(merged, reader, about, extras=kept)


def read_params(text: bytes) -> dict[str, Any]:
    """Parse the bytes of ``params.json``. Return an empty dict if `text` is empty."""
    found = strict_json.parse(text, PARAMS) if text else {}
    if not isinstance(found, dict):
        raise FormatError(f"{PARAMS} is not a JSON object")
    inner = found.get("model")  # version 4
    return inner if isinstance(inner, dict) else found


def _check_totals(tensors: Mapping[str, Node], params: Mapping[str, Any]) -> None:
    """Raise CorruptError if the sizes of the merged model contradict ``params.json``."""
    dim, heads = table.positive(params, "dim"), table.positive(params, "n_heads")
    groups = table.positive(params, "n_kv_heads") or heads
    layers = {name.split(".")[1] for name in tensors if name.startswith("layers.")}
    layer_count = table.positive(params, "n_layers")
    if layer_count and len(layers) != layer_count:
        raise CorruptError(f"has {len(layers):,} layers, but {PARAMS} has {layer_count:,}")
    key = as_tensor(tensors.get("layers.0.attention.wk.weight"))
    if not (dim and heads and groups) or key is None:
        return
    expected = dim // heads * groups
    if key.shape[0] > expected and key.shape[0] % expected == 0:
        raise UnsupportedError(
            f"its shards contain each of the {groups} key heads {key.shape[0] // expected} times "
            "(MP16), which ckptkit cannot merge",
            hint="use the release with fewer shards (MP8)",
        )
    if key.shape[0] != expected:
        raise CorruptError(
            f"its keys have {key.shape[0]:,} rows, but {PARAMS} implies {expected:,}: a shard is "
            "missing"
        )


def layout(checkpoint: Checkpoint, options: Options) -> Plan:
    """Plan the files ``consolidated.<NN>.pth`` and ``params.json``.

    Raises UnsupportedError if a tensor does not have one of Meta's names. Raises UsageError if
    ckptkit does not know along which dimension to split the embedding.
    """
    count = table.ranks_of(options, LLAMA_PARTS.name)
    tensors = dict(checkpoint.required.tensors)
    text = checkpoint.extras.get(PARAMS, "")
    params = read_params(text.encode())
    # Split the embedding along the same dimension as in the input. If the dimension in the input is
    # unknown, infer the version from vocab_size: -1 in Llama 1 and 2, and 100,000 or more since
    # Llama 3.
    recorded, vocabulary = checkpoint.extras.get(EMBEDDING), params.get("vocab_size")
    by_rows = recorded != "1"
    if recorded not in ("0", "1"):
        if type(vocabulary) is int and (vocabulary == -1 or vocabulary >= 100_000):
            by_rows = vocabulary != -1
        elif count > 1:
            raise UsageError(
                "the dimension along which the embedding is split is unknown: 1 in Llama 1 and 2, "
                "0 since Llama 3",
                hint="convert from the folder of the release, or from a file that ckptkit wrote",
            )
    parts = table.cut_all(tensors, layout_of(params, by_rows=by_rows), count)
    files = [
        table.file(f"consolidated.{rank:02d}.pth", part, options) for rank, part in enumerate(parts)
    ]
    if text:
        return Plan((*files, OutputFile(PARAMS, (text.encode(),))), (), len(tensors))
    note = f"no {PARAMS} was written, because the input has none: Meta's code needs this file"
    return Plan(tuple(files), (note,), len(tensors))
