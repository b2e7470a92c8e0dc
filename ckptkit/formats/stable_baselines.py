"""A model of Stable-Baselines3: a zip archive of files, of which policy.pth is the state_dict.

    policy.pth                    torch.save of the policy's state_dict: what is read
    policy.optimizer.pth          torch.save of its optimizer's state_dict
    pytorch_variables.pth         other tensors, if any
    data, system_info.txt         JSON with pickles in Base64, and text
    _stable_baselines3_version    the library's version

The members are stored. Source: stable_baselines3/common/save_util.py, `save_to_zip_file`.
"""

from __future__ import annotations

from dataclasses import replace

from ckptkit.core.bytesource import Range, Section
from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.errors import FormatError, UnsupportedError
from ckptkit.core.text import some
from ckptkit.formats import table
from ckptkit.formats.format import Probe

POLICY, VERSION = "policy.pth", "_stable_baselines3_version"


def matches(probe: Probe) -> bool:
    return probe.zip is not None and POLICY in probe.zip and VERSION in probe.zip


def read(probe: Probe) -> Checkpoint:
    """Read policy.pth; a warning names the other members.

    Raises UnsupportedError if it is compressed, FormatError if it is not a file of torch.save, and
    the errors of its own format.
    """
    archive = probe.zip
    assert archive is not None
    extent = archive.locate(POLICY)
    if not isinstance(extent, Range):
        raise UnsupportedError(f"{POLICY} in it is compressed", hint="unpack it, and name the file")
    inner = Probe(Section(*extent))
    for format in (table.TORCH_ZIP, table.TORCH_LEGACY):
        if format.matches(inner):
            found = format.read(inner)
            break
    else:
        raise FormatError(f"{POLICY} in it is not a file of torch.save")
    others = [name for name in archive.entries if name != POLICY]
    left = f"only {POLICY} is read, not {some(others, 8)}"
    return replace(
        found,
        format=table.STABLE_BASELINES.name,
        source=probe.source,
        origin=None,
        warnings=(*found.warnings, left),
    )
