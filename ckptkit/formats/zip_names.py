"""Tell the zip formats of torch.save and torch.jit.save apart by names of members alone.

Every file is asked this, and no room of a format is opened for it.
"""

from __future__ import annotations

from ckptkit.formats.format import Probe

# Of the members in the top folder; either of the scripts makes torch.load pass the file on.
_DATA, _SCRIPTS = "data.pkl", frozenset(("constants.pkl", "bytecode.pkl"))
_OLD_SCRIPT = frozenset(("model.json", "version"))  # before torch 1.3; without data.pkl


def is_torchscript(probe: Probe) -> bool:
    """Return whether a file is an archive of torch.jit.save. Raises what is wrong with a zip."""
    there = _there(probe)
    return bool(there & _SCRIPTS) or there == _OLD_SCRIPT


def is_torch_zip(probe: Probe) -> bool:
    """Return whether a file is an archive of torch.save. Raises what is wrong with a zip."""
    there = _there(probe)
    return _DATA in there and not there & _SCRIPTS


def _there(probe: Probe) -> frozenset[str]:
    archive = probe.zip
    if archive is None:
        return frozenset()
    telling = (_DATA, *_SCRIPTS, *_OLD_SCRIPT)
    return frozenset(name for name in telling if f"{archive.top}/{name}" in archive)
