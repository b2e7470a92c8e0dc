"""The objects that functions of the library return, and ``--json`` prints.

Made of the schemas by ``python -m tests.schemas``.
"""

from __future__ import annotations

from typing import Any, NotRequired, TypedDict, final

@final
class DiffKind(TypedDict):
    """Dtype and shape of a tensor."""

    dtype: str
    shape: list[int | str]

@final
class DiffPair(TypedDict):
    """A key of A and a key of B that are probably the same parameter."""

    old: str
    new: str
    a: DiffKind
    b: DiffKind
    confidence: float
    why: str

@final
class DiffMismatch(TypedDict):
    """A key whose dtype or shape differs."""

    name: str
    a: DiffKind
    b: DiffKind
    tolerance: float | None
    difference: DiffDifference | None

@final
class DiffDifference(TypedDict):
    """Measures of the difference between the values of two tensors."""

    count: int
    first: int
    largest: float | str | None
    relative: float | str | None
    cosine: float | str | None
    distance: float | str | None

@final
class DiffChanged(TypedDict):
    """A key whose values differ."""

    name: str
    count: int
    first: int
    largest: float | str | None
    relative: float | str | None
    cosine: float | str | None
    distance: float | str | None
    type: NotRequired[str]
    explained: NotRequired[bool]

@final
class DiffEntry(TypedDict):
    """A different value outside of the weights."""

    path: str
    a: str | None
    b: str | None

@final
class DiffStrictFalse(TypedDict):
    """Numbers of tensors that load_state_dict(strict=False) silently ignores or does not fill."""

    skipped: int
    parameters: int
    kept: int
    kept_parameters: int
    all_parameters: int

@final
class DiffFacts(TypedDict):
    """The differences between two checkpoints, or between a checkpoint and a model."""

    equal: bool
    values_compared: bool
    missing: list[str]
    unexpected: list[str]
    mismatched: list[DiffMismatch]
    changed: list[DiffChanged]
    renamed: list[DiffPair]
    reshaped: list[DiffPair]
    strict_false: DiffStrictFalse | None
    entries: list[DiffEntry]
    uncompared: list[str]
    advice: list[str]

@final
class DigestFileWithout(TypedDict):
    """A tensor without digest."""

    name: str
    why: str

@final
class DigestFile(TypedDict):
    """The digests of one file."""

    file: str
    format: str
    digest: str
    tensors: list[DigestTensor]
    without: list[DigestFileWithout]

@final
class DigestTensor(TypedDict):
    """A tensor and its digest."""

    name: str
    dtype: str
    shape: list[int | str]
    digest: str

@final
class DoctorCause(TypedDict):
    """A reason why loading fails or can fail."""

    code: str
    level: str
    title: str
    explanation: str
    command: str | None
    fixable: bool

@final
class DoctorFixed(TypedDict):
    """The output of --fix."""

    output: str
    format: str
    done: list[str]
    left_out: list[str]
    lost: list[DoctorLost]
    warnings: list[str]
    remaining: list[DoctorCause]

@final
class DoctorLost(TypedDict):
    """An entry that ckptkit could not recover."""

    path: str
    what: str
    why: str

@final
class DoctorReport(TypedDict):
    """The reasons why a checkpoint does not load."""

    file: str
    model: str | None
    readable: bool
    format: str | None
    causes: list[DoctorCause]
    fixed: DoctorFixed | None

@final
class InspectFile(TypedDict):
    """A checkpoint."""

    file: str
    format: str
    size: int
    weights: str | None
    tensors: list[InspectTensor]
    values: list[InspectValue]
    objects: list[InspectObject]
    globals: list[str]
    metadata: dict[str, str]
    warnings: list[str]
    totals: InspectTotals
    selected: InspectSelected | None
    about: str | None
    adapter: InspectAdapter | None
    part: InspectPart | None

@final
class InspectTensor(TypedDict):
    """A tensor."""

    name: str | None
    path: str
    keys: list[str | int]
    dtype: str
    shape: list[int | str]
    nbytes: int | str
    device: str
    stride: list[int | str]
    offset: int | str
    storage: int | None
    requires_grad: bool
    kind: str
    layout: str
    local_shapes: list[list[int | str]] | None
    quantization: InspectQuantization | None
    sha256: NotRequired[str | None]

@final
class InspectQuantization(TypedDict):
    """A quantized weight, which consists of one or more stored tensors."""

    weight: str
    family: str
    label: str
    shape: list[int | str]
    parts: list[str]
    dropped: list[str]
    reason: str | None

@final
class InspectValue(TypedDict):
    """A number, string or other plain value."""

    path: str
    keys: list[str | int]
    type: str
    of: NotRequired[str]
    count: NotRequired[int]
    truncated: NotRequired[bool]
    value: Any

# A pickled Python object other than a tensor or a plain value.
InspectObject = TypedDict("InspectObject", {"path": str, "keys": list[str | int], "global": str})

@final
class InspectAdapter(TypedDict):
    """A LoRA adapter or another adapter of a model."""

    layout: str
    method: str
    modules: int
    ranks: list[int]
    alphas: list[float]
    targets: list[str]
    base_model: str | None

@final
class InspectPart(TypedDict):
    """The rank or shard in this file, which is only a part of a larger checkpoint."""

    kind: str
    name: str
    detail: str
    folder: bool

@final
class InspectTotals(TypedDict):
    """Totals of the file."""

    tensor_count: int
    parameters: int | str
    nbytes: int | str
    storage_nbytes: int | str

@final
class InspectSelected(TypedDict):
    """Totals of the tensors that --keys selects."""

    tensor_count: int
    parameters: int | str
    nbytes: int | str

@final
class ScanFileRemarks(TypedDict):
    """An unusual fact."""

    where: str
    reason: str

@final
class ScanFilePrograms(TypedDict):
    """TorchScript code; scan does not judge it."""

    where: str
    functions: int
    files: list[str]

@final
class ScanFile(TypedDict):
    """The result for one file."""

    file: str
    size: int
    verdict: str
    label: str
    pickles: list[ScanPickle]
    remarks: list[ScanFileRemarks]
    programs: list[ScanFilePrograms]

@final
class ScanPickleWeightsOnly(TypedDict):
    """The result of torch.load(weights_only=True)."""

    loads: bool
    refused: str | None

@final
class ScanPickle(TypedDict):
    """A pickle in a file."""

    where: str
    offset: int
    file_offset: int | None
    length: int
    protocol: int
    loader: str
    nested: bool
    verdict: str
    weights_only: ScanPickleWeightsOnly
    versions: list[str]
    globals: list[str]
    needs: list[str]
    held: list[str]
    calls: list[ScanCall]
    runs: list[ScanCall]
    reasons: list[str]
    error: str | None

@final
class ScanCall(TypedDict):
    """A call that loading the pickle makes."""

    name: str
    opcode: str
    kind: str
    arguments: str
    offset: int
    count: int

@final
class ScanFailed(TypedDict):
    """A file that ckptkit cannot read."""

    file: str | None
    error: ScanError

@final
class ScanError(TypedDict):
    """A failure and the next command to type."""

    code: str
    message: str
    hint: str | None
    command: str | None

@final
class StatsStatsHistogram(TypedDict):
    """Histogram with bins of equal width."""

    start: float
    width: float
    counts: list[int]

@final
class StatsStats(TypedDict):
    """Statistics of a tensor, of a group of tensors, or of all tensors with one kind of number."""

    name: str
    path: str | None
    keys: list[str | int] | None
    shape: list[int | str] | None
    kind: str
    dtypes: list[str]
    tensor_count: int
    count: int
    nan: int
    inf: int
    zeros: int
    sparsity: float | str | None
    mean: float | str | list[Any] | None
    std: float | str | None
    norm: float | str | None
    min: float | str | None
    max: float | str | None
    abs_max: float | str | None
    histogram: StatsStatsHistogram | None

@final
class StatsFactsSkipped(TypedDict):
    """A tensor without statistics."""

    name: str
    dtype: str
    why: str

@final
class StatsFacts(TypedDict):
    """The statistics of the values of tensors."""

    file: str
    format: str
    tensors: NotRequired[list[StatsStats]]
    groups: NotRequired[list[StatsStats]]
    totals: list[StatsStats]
    skipped: list[StatsFactsSkipped]

@final
class VerifyFile(TypedDict):
    """The result for one file."""

    file: str
    format: str | None
    ok: bool
    tensor_count: int
    records: int | None
    nbytes: int
    findings: list[VerifyFinding]
    notes: list[str]

@final
class VerifyFinding(TypedDict):
    """Damage in one place, and the damaged tensors."""

    part: str | None
    what: str
    names: list[str]
