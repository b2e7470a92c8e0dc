"""The configuration of a training run, and errors for requests that cannot be met."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ckptkit import CkptkitError

MODELS = ("cnn", "mlp", "crnn", "densenet", "generator")
PARALLEL = ("none", "dp", "dp-balanced", "ddp", "fsdp")
FORMS = ("bare", "wrapped", "full")
SEGMENTED = ("mlp", "generator")  # models that checkpoint_sequential can cut
PREFIXED = ("dp", "dp-balanced", "ddp")  # wrappers that put `module.` before every key
LR = {
    "cnn": 0.03,
    "mlp": 0.001,
    "crnn": 0.1,
    "densenet": 0.05,
    "generator": 0.005,
}  # what suits the models
DATA = "digits, random or cifar10:DIR"


class RequestError(CkptkitError):
    """Options that exclude each other, or that this machine does not support."""

    exit_code = 2


class SavingError(CkptkitError):
    """A checkpoint could not be written; the previous one is intact."""

    exit_code = 4


@dataclass(frozen=True)
class Config:
    """One training run. Equal configs on the CPU give files of equal bytes.

    ``width`` is a factor on the channels of the model. Gradients are accumulated over
    ``accumulate`` batches of ``batch_size`` images before each step. ``segments`` is the number of
    parts of the model that keep only their input for the backward pass, 0 for none. A ``clip_norm``
    of 0 clips nothing, an ``lr_step`` of 0 keeps the learning rate, a ``save_every`` of 0 saves
    only at the end. Without ``lr``, a rate that suits the model; without ``devices``, the available
    GPUs, or the CPU.
    """

    model: str = "cnn"
    data: str = "digits"
    width: float = 1.0
    devices: tuple[str, ...] = ()
    parallel: str = "none"
    epochs: int = 10
    batch_size: int = 32
    accumulate: int = 1
    segments: int = 0
    memory_efficient: bool = False
    clip_norm: float = 0.0
    lr: float | None = None
    momentum: float = 0.9
    lr_step: int = 5
    lr_gamma: float = 0.3
    amp: bool = False
    seed: int = 0
    deterministic: bool = False
    save_form: str = "wrapped"
    keep_module_prefix: bool = False
    save_every: int = 0

    def __post_init__(self) -> None:
        if self.segments and self.model not in SEGMENTED:
            raise RequestError(
                f"{self.model} has no segments", hint=f"--model {' or '.join(SEGMENTED)} has"
            )
        if self.memory_efficient and self.model != "densenet":
            raise RequestError(
                f"{self.model} has no bottlenecks to recompute", hint="--model densenet has"
            )
        if self.keep_module_prefix and self.parallel not in PREFIXED:
            raise RequestError(
                f"--parallel {self.parallel} gives the keys no prefix to keep",
                hint=f"{', '.join(PREFIXED)} do",
            )

    @property
    def rate(self) -> float:
        """Return the initial learning rate."""
        return LR[self.model] if self.lr is None else self.lr

    def as_dict(self) -> dict[str, Any]:
        """Return plain values only, for the checkpoint."""
        return {**asdict(self), "devices": list(self.devices), "lr": self.rate}


@dataclass(frozen=True)
class Files:
    """Files that a run reads and writes beside its checkpoint; None for none."""

    resume: Path | None = None
    metrics: Path | None = None
    plot: Path | None = None
    memory_report: Path | None = None

    @property
    def written(self) -> list[Path]:
        """Return the files that the run writes."""
        return [path for path in (self.metrics, self.plot, self.memory_report) if path]
