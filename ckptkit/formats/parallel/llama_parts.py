"""Writes the weights of a Llama model, under Meta's names, as the parts of a release: the inverse
of :mod:`llama`."""

from __future__ import annotations

from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.errors import UsageError
from ckptkit.core.options import Options
from ckptkit.core.plan import OutputFile, Plan
from ckptkit.formats.format import Probe
from ckptkit.formats.parallel.cutting import cut, file, ranks_of
from ckptkit.formats.parallel.llama import EMBEDDING, PARAMS, read_params, table
from ckptkit.formats.table import LLAMA_PARTS


def layout(checkpoint: Checkpoint, options: Options) -> Plan:
    """A folder of ``consolidated.<NN>.pth`` and ``params.json``.

    Raises UsageError for weights of other names, and where nothing says along which dimension the
    embedding is cut.
    """
    count = ranks_of(options, LLAMA_PARTS.name)
    tensors = dict(checkpoint.required.tensors)
    text = checkpoint.extras.get(PARAMS, "")
    params = read_params(text.encode())
    parts = cut(tensors, table(params, by_rows=_is_by_rows(checkpoint, count)), count)
    files = [file(f"consolidated.{rank:02d}.pth", part, options) for rank, part in enumerate(parts)]
    if text:
        return Plan((*files, OutputFile(PARAMS, (text.encode(),))), (), len(tensors))
    note = f"there is no {PARAMS} to write: the loaders of Meta's code need it"
    return Plan(tuple(files), (note,), len(tensors))


def _is_by_rows(checkpoint: Checkpoint, count: int) -> bool:
    """Return whether to split the embedding into rows: as its parts were, or from version 3 on as
    its parameters tell.
    """
    recorded = checkpoint.extras.get(EMBEDDING)
    if recorded in ("0", "1"):
        return recorded == "0"
    vocabulary = read_params(checkpoint.extras.get(PARAMS, "").encode()).get("vocab_size")
    if type(vocabulary) is int and (vocabulary == -1 or vocabulary >= 100_000):
        return vocabulary != -1
    if count > 1:
        raise UsageError(
            "nothing says along which dimension the embedding is cut: 1 in Llama 1 and 2, 0 since",
            hint="convert from the folder of the release, or from what ckptkit made of it",
        )
    return True


def matches(probe: Probe) -> bool:
    """Never: the format is written, and its folders are read as `parallel`."""
    return False
