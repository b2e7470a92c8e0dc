"""safetensors: named tensors, contiguous, little-endian, without views.

    u64 N | N bytes of JSON | buffer

    {"__metadata__": {text: text},
     "name": {"dtype": "F32", "shape": [2, 3], "data_offsets": [begin, end]}, ...}

Offsets count from 8 + N. The ranges of all tensors tile the buffer from its first byte to the end
of the file: no hole, no overlap, no range with two names. N is at most 100,000,000; the header
begins with ``{`` and may be padded with white space. Two elements of F4 are one of torch's
float4_e2m1fn_x2: the last dimension is half as long there. Source:
https://github.com/huggingface/safetensors (safetensors/src/tensor.rs).

Read more strictly than by the library: a repeated name, a field that the format does not have, more
than 64 dimensions and the dialects of :mod:`strict_json` are refused. A size of 2**63 or more is
refused, also next to a size of 0.

Written as the library writes it, larger types first and then by name, the buffer 8-byte aligned;
but the header lists the tensors in the order of the state_dict. All else that a header cannot
express is in ``__metadata__``: see :mod:`ckptkit.formats.common.saved_record`.
"""

from __future__ import annotations

from ckptkit.core.checkpoint import Checkpoint
from ckptkit.formats import table
from ckptkit.formats.common.saved_record import WHOLE, restore
from ckptkit.formats.format import Probe
from ckptkit.formats.safetensors.header import read_tensors, read_text


def read(probe: Probe) -> Checkpoint:
    """Read the tensors in header order, then what ckptkit or the hub left in the metadata."""
    source = probe.source
    text = read_text(source)
    restored = restore(*read_tensors(text, source))
    warnings = restored.warnings
    if not text.startswith(b"{"):
        warnings = ("the header begins with white space", *warnings)
    return Checkpoint(
        restored.root, table.SAFETENSORS.name, source, restored.metadata, restored.globals,
        warnings, origin=WHOLE if restored.is_whole else None,
    )  # fmt: skip
