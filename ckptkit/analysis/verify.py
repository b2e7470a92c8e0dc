"""Verify the structure, lengths, checksums, digests and values of a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

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


@dataclass(slots=True)
class Verdict:
    """The findings in a file or folder, and the amount of checked data.

    - ``records``: number of records with a checksum
    - ``nbytes``: number of bytes with a checksum
    - ``tensors``: number of tensors, or 0 for an unreadable file
    - ``notes``: warnings of the reader, and notes about data without checksums
    """

    path: str
    format: str | None = None
    tensors: int = 0
    records: int = 0
    nbytes: int = 0
    findings: list[Defect] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
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
    tell = progress or (lambda count, total: None)
    try:
        probe, verdict, remarks = Probe(place, options), Verdict(place.name), list[str]()
        with steady(place, remote=True):
            checkpoint, unsummed = _check_bytes(probe, verdict, tell)
            verdict.damaged = bool(verdict.findings)
            if checkpoint is not None and values and not verdict.damaged:
                remarks = [*_check_values(checkpoint, verdict, tell)]
                remarks += _check_scales(checkpoint, verdict)
            if checkpoint is not None and expected is not None and not verdict.damaged:
                found = digest(
                    checkpoint, key=options.key, matches=matches, sums=False, progress=progress
                )
                verdict.findings += compare_ids(found.ids, expected, matches).findings()
            if checkpoint is not None:
                known, warnings = checkpoint.format, checkpoint.warnings
                verdict.format, verdict.notes = known, [*remarks, *warnings]
                if not verdict.records:
                    what = f"{known} has no checksums: only structure and lengths were checked"
                    verdict.notes.insert(0, what)
                elif unsummed and not coded(warnings, NO_CHECKSUM):
                    what = f"{unsummed:,} records have no checksum"
                    verdict.notes.append(f"{what}: damage to these records cannot be detected")
            verdict.findings = list(_without_implied(verdict.findings))
            verdict.recoverable = formats.recoverable(probe) if verdict.damaged else ""
        return verdict
    except CkptkitError as error:
        raise error.at(place.name) from error.__cause__
    finally:
        place.close()


def _check_bytes(probe: Probe, verdict: Verdict, tell: Progress) -> tuple[Checkpoint | None, int]:
    """Check structure and checksums.

    Return the checkpoint, or None if it is unreadable, and the number of records without a
    checksum.
    """
    format: Format | None = None
    checkpoint: Checkpoint | None = None

    def add(error: CkptkitError) -> None:
        """Add an error as a finding. In a folder, the finding names the affected file."""
        below = ""
        if format is not None and error.where not in (None, verdict.path):
            below = str(error.where).removeprefix(verdict.path.rstrip("/") + "/")
        verdict.findings.append(Defect(error.message, below, hint=error.hint))

    try:
        format = formats.match(probe)
    except DAMAGE as error:
        add(error)
        return None, 0
    try:
        # If the file is not a checkpoint, `identify` raises an error that describes the file.
        format = format or formats.identify(probe)
    except TruncatedError as error:
        add(error)
        return None, 0
    verdict.format = format.name
    try:
        checkpoint = format.read(probe)
    except DAMAGE as error:
        if format.chooses and isinstance(error, AmbiguousError):
            raise  # several checkpoints in a folder are not damage
        add(error)
    parts: list[CheckedPart] = []
    try:
        for each in format.check(probe) if format.check is not None else ():
            if isinstance(each, CheckedPart):
                parts.append(each)
            else:
                verdict.findings.append(each)
    except DAMAGE as error:
        add(error)
    damaged, total = [], sum(part.record.length for part in parts if part.crc32 is not None)
    for part, why in summed(parts, lambda count: tell(count, total)):
        if part.crc32 is not None:
            verdict.records += 1
            verdict.nbytes += part.record.length
        if why is not None:
            damaged.append((part, why))
    found = [] if checkpoint is None else list(tensors(checkpoint.root))
    verdict.tensors = len(found)
    verdict.findings += with_tensors(damaged, found)
    return checkpoint, len(parts) - verdict.records


def _check_values(checkpoint: Checkpoint, verdict: Verdict, tell: Progress) -> Iterator[str]:
    """Add a finding for each tensor with NaN or infinite elements. Dequantize GGML types first.

    Yield a note about tensors that ckptkit cannot dequantize.
    """
    found = quantized.find(checkpoint)
    numbers = {
        id(group.inputs[0]): group.tensor(BY_NAME["float32"])
        for group in found.groups
        if isinstance(group.layout, GgmlDequantize)
    }
    unread = [each.name for each in found.unread if each.family == "gguf"]
    if unread:
        what = "ckptkit cannot dequantize these tensors, and did not check their values"
        yield f"{what}: {some(unread)}"
    seen = [(name, numbers.get(id(tensor), tensor)) for name, tensor in tensors(checkpoint.root)]
    total = verdict.nbytes + sum(tensor.nbytes for _, tensor in seen)
    for name, tensor, nan, infinite in ordered(_nonfinite, seen, lambda row: row[1].nbytes):
        if nan or infinite:
            what = f"{nan:,} NaN and {infinite:,} infinite of {tensor.numel:,} elements"
            verdict.findings.append(Defect(what, tensors=(name,)))
        tell(tensor.nbytes, total)


def _check_scales(checkpoint: Checkpoint, verdict: Verdict) -> Iterator[str]:
    """Add a finding for scales that are NaN or infinite.

    If dequantization divides by the scale, a scale of 0 is also a finding. Otherwise, yield a note
    that lists the scales of 0.
    """
    zero = []
    for name, tensor, numbers in _scales(checkpoint):
        odd, total, wrong = 0, tensor.numel, list[str]()
        if tensor.dtype.name == "uint8":  # float8 scales stored as bytes
            dtype = "float8_e8m0fnu" if numbers.dtype in _EXPONENTS else numbers.dtype
            tensor = replace(tensor, dtype=BY_NAME[dtype])
            odd = sum(nonfinite(tensor))
        if odd:
            wrong.append(f"{odd:,} of {total:,} scales are NaN or infinite")
        count = zeros(tensor)
        if count and numbers.combine == "divide":  # zero is a divisor
            wrong.append(f"{count:,} of {total:,} scales are 0, and weights are divided by them")
        elif count:
            zero.append(f"{name} ({count:,} of {total:,})")
        verdict.findings += [Defect(what, tensors=(name,)) for what in wrong]
    if zero:
        yield f"scales are zero, so these weights are zero too: {some(zero)}"


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
