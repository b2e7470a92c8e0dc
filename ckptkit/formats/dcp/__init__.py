"""torch.distributed.checkpoint (DCP): a folder where each process writes its part of the tensors.

    .metadata                  the entries, their chunks and the place of each: :mod:`metadata`
    __<rank>_<n>.distcp        the chunks and values: :mod:`items`
    meta.pt                    written by Lightning next to them: a torch file with all the rest

Without collectives each rank writes a ``__<rank>.metadata`` of its own instead.
HuggingFaceStorageWriter writes nothing but ``shard-<rank>-model-<file>-of-<files>.safetensors``:
:mod:`hub`. A ``.metadata.tmp`` remains after an interrupted save.

A state_dict is flattened to be saved: :mod:`nesting`. Read back, it is what torch's
`dcp_to_torch_save` gives: dicts and lists, and tensors on the CPU, assembled from their chunks.
Values that are not tensors are as they were saved.
"""

from __future__ import annotations

import os
import re

from ckptkit.formats.dcp.metadata import NAME
from ckptkit.formats.format import Probe

_OURS = re.compile(
    r"(__[0-9]{1,9})?\.metadata(\.tmp)?|.*\.distcp"
    r"|shard-[0-9]{5}-model-[0-9]{5}-of-[0-9]{5}\.safetensors"
)


def matches(probe: Probe) -> bool:
    """Return whether this is a DCP folder, finished or not, or the `.metadata` in it."""
    if probe.is_folder:
        return any(map(_OURS.fullmatch, probe.names))
    return os.path.basename(probe.name) == NAME and probe.source.folder_and_name() is not None
