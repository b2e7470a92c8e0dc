"""Refuse adapters where whole models are combined.

An adapter (LoRA, LoHa, LoKr...) holds factors of changes to a base model. Beside the tensors of a
model they mean nothing, and the mean of factors is not the mean of the changes that they make.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from ckptkit.core.bytesource import ByteSource
from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.errors import CkptkitError, UnsupportedError

CONFIG = "adapter_config.json"  # of peft
# The factors, as peft, diffusers, kohya and LyCORIS name them: matched from the end.
_FACTOR = re.compile(
    r"(.*?)[._](lora_(A|B|down|up|mid|embedding_A|embedding_B|magnitude_vector)"
    r"|lora(_linear_layer)?\.(down|up)|hada_[wt][12](_[ab])?|lokr_[wt][12](_[ab])?)"
    r"(\.[^.]+)?(\.weight|\.bias)?"
)


def refuse(ck: Checkpoint, why: str) -> None:
    """Raise UnsupportedError for an adapter: `why` ends the sentence."""
    found = next(_factors(ck), None)
    if found is None and not _is_configured(ck):
        return
    seen = f"{CONFIG} is beside it" if found is None else f"it has {found!r}"
    raise UnsupportedError(
        f"is an adapter of a model, such as LoRA ({seen}): {why}",
        where=ck.name,
        hint="peft adds an adapter to its base model: "
        "PeftModel.from_pretrained(base, folder).merge_and_unload()",
    )


def _factors(ck: Checkpoint) -> Iterator[str]:
    """Yield the factors whose base weight is not in the checkpoint."""
    names = ck.required.nodes
    for name in names:
        found = _FACTOR.fullmatch(name)
        if found is not None:
            bases = (f"{found[1]}.base_layer.weight", f"{found[1]}.weight")
            if not any(base in names for base in bases):
                yield name


def _is_configured(ck: Checkpoint) -> bool:
    """Return whether peft wrote it: by its name, and the configuration beside it."""
    source = ck.source
    place = source.folder_and_name() if isinstance(source, ByteSource) else None
    try:
        return place is not None and place[1].startswith("adapter_") and CONFIG in place[0]
    except CkptkitError:  # a web server does not list files
        return False
