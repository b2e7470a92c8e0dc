"""TorchScript archives: recognised, so that nobody takes them for a checkpoint. They are programs with their weights.

<top>/constants.pkl        torch.jit.save; this name alone makes torch.load hand the file to torch.jit.load
<top>/bytecode.pkl         the same for the mobile runtime (.ptl)
<top>/code/, data.pkl, data/, constants/        the container is that of zip_archive
"""

from __future__ import annotations

from ckptkit.checkpoint import Checkpoint
from ckptkit.errors import UnsupportedError
from ckptkit.formats.format import Format, Probe


def matches(probe: Probe) -> bool:
    archive = probe.zip
    return archive is not None and any(f"{archive.top}/{name}.pkl" in archive for name in ("constants", "bytecode"))


def read(probe: Probe) -> Checkpoint:
    """Raises UnsupportedError."""
    raise UnsupportedError(
        "is a TorchScript archive, a program with its weights, which ckptkit does not read yet",
        where=probe.name,
        hint="torch.save(torch.jit.load(FILE, map_location='cpu').state_dict(), 'weights.pth') runs it, if you trust "
        "it, and keeps its weights",
    )


FORMAT = Format(name="torchscript", title="TorchScript: torch.jit.save", matches=matches, read=read, readable=False)
