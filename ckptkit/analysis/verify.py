"""Verify the structure, lengths, checksums, digests and values of a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from ckptkit import formats, quantized
from ckptkit.analysis.digests import (
    DAMAGE,
    Matches,
    Progress,
    compare_ids,
    digest,
    summed,
    with_tensors,
)
from ckptkit.api import PathLike
from ckptkit.compute.ggml import GgmlDequantize
from ckptkit.compute.packing import Blocks, Numbers
from ckptkit.compute.tallies import nonfinite, zeros
from ckptkit.compute.workers import ordered
from ckptkit.core.bytesource import ByteSource, Folder
from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.dtypes import BY_NAME
from ckptkit.core.errors import (
    NO_CHECKSUM,
    AmbiguousError,
    CkptkitError,
    TensorError,
    TruncatedError,
    coded,
)
from ckptkit.core.options import DEFAULT, Options
from ckptkit.core.tensor import Tensor
from ckptkit.core.text import some
from ckptkit.formats.format import CheckedPart, Defect, Format, Probe, open_place, steady
from ckptkit.formats.recovering import tensors

_EXPONENTS = ("exponent", "ldexp")  # encodings of scales whose stored bytes are exponents


COMPARED = 1_000  # maximum number of findings to compare in `_without_implied`


@dataclass(frozen=True, slots=True)
class Verdict:
    """The findings in a file or folder, and the amount of checked data.

    - ``records``: number of records with a checksum
    - ``nbytes``: number of bytes with a checksum
    - ``tensors``: number of tensors, or 0 for an unreadable file
    - ``notes``: warnings of the reader, and notes about data without checksums
    """

    path: str
    format: str | None
    tensors: int
    records: int
    nbytes: int
    findings: tuple[Defect, ...]
    notes: tuple[str, ...] = ()
    damaged: bool = False  # False if the findings are only about values or digests
    recoverable: str = ""  # command that may save intact tensors

    @property
    def ok(self) -> bool:
        return not self.findings


def verify(
    path: PathLike,
    options: Options = DEFAULT,
    *,
    expected: Mapping[str, str] | None = None,
    matches: Matches | None = None,
    values: bool = False,
    progress: Progress | None = None,
) -> Verdict:
    """Check the structure, lengths and checksums of a checkpoint.

    `expected` maps names to tensor ids. With `expected`, `verify` compares the ids of the weights
    that `matches` selects. With `values`, NaN and infinities in tensors and scales are findings
    too. If bytes are damaged, `verify` does not compare ids or check values.

    Raises PathError for a path that cannot be opened, UnsupportedError for an unsupported format,
    LimitError for an exceeded limit, and FormatError for a file that is not a checkpoint.
    """
    place = open_place(path)
    try:
        verifier = _Verifier(place, options, progress)
        with steady(place, remote=True):
            checkpoint = verifier.check_bytes()
            if checkpoint is not None and values:
                verifier.check_values(checkpoint)
                verifier.check_scales(checkpoint)
            if checkpoint is not None and expected is not None:
                found = digest(
                    checkpoint, key=options.key, matches=matches, sums=False, progress=progress
                )
                verifier.findings += compare_ids(found.ids, expected, matches).findings()
            return verifier.verdict()
    except CkptkitError as error:
        raise error.at(place.name) from error.__cause__
    finally:
        place.close()


class _Verifier:
    """The state of the verification of one file or folder."""

    def __init__(
        self, place: ByteSource | Folder, options: Options, progress: Progress | None
    ) -> None:
        self.place = place
        self.probe = Probe(place, options)
        self.tell = progress or (lambda count, total: None)
        self.format: Format | None = None
        self.checkpoint: Checkpoint | None = None
        self.tensors: list[tuple[str, Tensor]] = []
        self.findings: list[Defect] = []
        self.remarks: list[str] = []
        self.damaged = True  # `check_bytes` sets this to False if the bytes are intact
        self.records = self.nbytes = self.unsummed = 0

    def check_bytes(self) -> Checkpoint | None:
        """Check structure and checksums. Return the checkpoint, or None if the file is damaged."""
        try:
            self.format = formats.match(self.probe)
        except DAMAGE as error:
            self._wrong(error)
            return None
        try:
            # If the file is not a checkpoint, `identify` raises an error that describes the file.
            self.format = self.format or formats.identify(self.probe)
        except TruncatedError as error:
            self._wrong(error)
            return None
        try:
            self.checkpoint = self.format.read(self.probe)
        except DAMAGE as error:
            if self.format.chooses and isinstance(error, AmbiguousError):
                raise  # several checkpoints in a folder are not damage
            self._wrong(error)
        parts: list[CheckedPart] = []
        try:
            for each in self.format.check(self.probe) if self.format.check is not None else ():
                if isinstance(each, CheckedPart):
                    parts.append(each)
                else:
                    self.findings.append(each)
        except DAMAGE as error:
            self._wrong(error)
        damaged, total = [], sum(part.record.length for part in parts if part.crc32 is not None)
        for part, why in summed(parts, lambda count: self.tell(count, total)):
            if part.crc32 is None:
                self.unsummed += 1
            else:
                self.records += 1
                self.nbytes += part.record.length
            if why is not None:
                damaged.append((part, why))
        if self.checkpoint is not None:
            self.tensors = list(tensors(self.checkpoint.root))
        self.findings += with_tensors(damaged, self.tensors)
        self.damaged = bool(self.findings)
        return None if self.damaged else self.checkpoint

    def _wrong(self, error: CkptkitError) -> None:
        """Add an error as a finding. In a folder, the finding contains the name of the affected
        file."""
        below = ""
        if self.format is not None and error.where not in (None, self.place.name):
            below = str(error.where).removeprefix(self.place.name.rstrip("/") + "/")
        self.findings.append(Defect(error.message, below, hint=error.hint))

    def check_values(self, checkpoint: Checkpoint) -> None:
        """Add a finding for each tensor with NaN or infinite elements. Dequantize GGML types
        first."""
        found = quantized.find(checkpoint)
        numbers = {
            id(group.inputs[0]): group.tensor(BY_NAME["float32"])
            for group in found.groups
            if isinstance(group.layout, GgmlDequantize)
        }
        unread = [each.name for each in found.unread if each.family == "gguf"]
        if unread:
            what = "ckptkit cannot dequantize these tensors, and did not check their values"
            self.remarks.append(f"{what}: {some(unread)}")
        seen = [(name, numbers.get(id(tensor), tensor)) for name, tensor in self.tensors]
        total = self.nbytes + sum(tensor.nbytes for _, tensor in seen)
        rows = ordered(_nonfinite, seen, lambda row: row[1].nbytes)
        for name, tensor, nan, infinite in rows:
            if nan or infinite:
                what = f"{nan:,} NaN and {infinite:,} infinite of {tensor.numel:,} elements"
                self.findings.append(Defect(what, tensors=(name,)))
            self.tell(tensor.nbytes, total)

    def check_scales(self, checkpoint: Checkpoint) -> None:
        """Add a finding for scales that are NaN or infinite.

        If dequantization divides by the scale, a scale of 0 is also a finding. Otherwise, a note
        lists the scales of 0.
        """
        zero = []
        for name, tensor, numbers in _scales(checkpoint):
            odd, total = 0, tensor.numel
            if tensor.dtype.name == "uint8":  # float8 scales stored as bytes
                dtype = "float8_e8m0fnu" if numbers.dtype in _EXPONENTS else numbers.dtype
                tensor = replace(tensor, dtype=BY_NAME[dtype])
                odd = sum(nonfinite(tensor))
            if odd:
                what = f"{odd:,} of {total:,} scales are NaN or infinite"
                self.findings.append(Defect(what, tensors=(name,)))
            count = zeros(tensor)
            if count and numbers.combine == "divide":  # zero is a divisor
                what = f"{count:,} of {total:,} scales are 0, and weights are divided by them"
                self.findings.append(Defect(what, tensors=(name,)))
            elif count:
                zero.append(f"{name} ({count:,} of {total:,})")
        if zero:
            self.remarks.append(f"scales are zero, so these weights are zero too: {some(zero)}")

    def verdict(self) -> Verdict:
        known = self.format.name if self.format is not None else None
        notes: list[str] = []
        if self.checkpoint is not None:
            known, warnings = self.checkpoint.format, self.checkpoint.warnings
            if not self.records:
                notes.append(f"{known} has no checksums: only structure and lengths were checked")
            notes += (*self.remarks, *warnings)
            if self.records and self.unsummed and not coded(warnings, NO_CHECKSUM):
                what = f"{self.unsummed:,} records have no checksum"
                notes.append(f"{what}: damage to these records cannot be detected")
        return Verdict(
            path=self.place.name,
            format=known,
            tensors=len(self.tensors),
            records=self.records,
            nbytes=self.nbytes,
            findings=tuple(_without_implied(self.findings)),
            notes=tuple(notes),
            damaged=self.damaged,
            recoverable=formats.recoverable(self.probe) if self.damaged else "",
        )


def _scales(ck: Checkpoint) -> Iterator[tuple[str, Tensor, Numbers]]:
    """Yield (name, scales, encoding of the scales) for each quantized weight with a known
    layout."""
    found = quantized.find(ck)
    names = {id(tensor): name for name, tensor in ck.weights.items()} if found else {}
    for group in found.groups:
        for numbers in group.layout.scales if isinstance(group.layout, Blocks) else ():
            tensor = group.inputs[numbers.input]
            if numbers.dtype != "map":  # "map": the scales are themselves quantized
                yield names.get(id(tensor), group.name), tensor, numbers


def _without_implied(findings: list[Defect]) -> Iterator[Defect]:
    """Yield the findings that no other finding implies.

    For example, the error of the reader and a wrong CRC-32 often report the same damage.
    """

    def implies(other: Defect, one: Defect, before: bool) -> bool:
        if other.what not in one.what or (one.file and other.file and one.file != other.file):
            return False
        if other.what != one.what or len(other.tensors) > len(one.tensors):
            return True
        return before and other.tensors == one.tensors

    others = list(enumerate(findings if len(findings) <= COMPARED else ()))
    for number, one in enumerate(findings):
        if not any(implies(each, one, n < number) for n, each in others if n != number):
            yield one


def _nonfinite(row: tuple[str, Tensor]) -> tuple[str, Tensor, int, int]:
    name, tensor = row
    try:
        return name, tensor, *nonfinite(tensor)
    except TensorError:  # the tensor is on meta or sparse
        return name, tensor, 0, 0
