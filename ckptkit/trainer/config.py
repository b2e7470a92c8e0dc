"""The configuration of a training run, and errors for requests that cannot be met."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from ckptkit import CkptkitError
from ckptkit.core.text import without

MODELS = ("cnn", "mlp", "crnn", "densenet", "generator")
PARALLEL = ("none", "dp", "dp-balanced", "ddp", "fsdp")
OPTIMIZERS = ("sgd", "adam", "adamw")
FORMS = ("bare", "wrapped", "full")
SEGMENTED = ("mlp", "generator")  # models that checkpoint_sequential can split
PREFIXED = ("dp", "dp-balanced", "ddp")  # wrappers that put `module.` before every key
LR = {  # of SGD
    "cnn": 0.03,
    "mlp": 0.001,
    "crnn": 0.1,
    "densenet": 0.05,
    "generator": 0.005,
}
ADAM_LR = 0.001
DATA = "digits, random or cifar10:DIR"

# What a resumed run may change: where it computes, how much memory that takes, what it saves.
CHANGEABLE = (
    "devices", "parallel", "epochs", "segments", "memory_efficient", "preserve_rng",
    "save_form", "keep_module_prefix", "save_every", "save_best", "eval_every",
)  # fmt: skip
# Recorded in a checkpoint only where they are not the default: runs that do not use them still give
# the bytes that they gave before these options were added.
RECORDED_IF_USED = (
    "optimizer", "weight_decay", "dropout", "preserve_rng", "eval_every", "save_best",
)  # fmt: skip


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
    ``accumulate`` micro-batches of ``batch_size`` images before each step. ``segments`` is the
    number of parts of the model that keep only their input for the backward pass, 0 for none. A
    ``clip_norm`` of 0 clips nothing, an ``lr_step`` of 0 keeps the learning rate, a ``save_every``
    of 0 saves only at the end, an ``eval_every`` of 0 evaluates only after each epoch. Without
    ``lr``, a learning rate that suits the model; without ``weight_decay``, torch's default; without
    ``devices``, the available GPUs, or the CPU.
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
    optimizer: str = "sgd"
    weight_decay: float | None = None
    dropout: float = 0.0
    preserve_rng: bool = True
    eval_every: int = 0
    save_best: bool = False

    def __post_init__(self) -> None:
        if self.segments and self.model not in SEGMENTED:
            raise RequestError(
                f"{self.model} has no segments", hint=f"--model {' or '.join(SEGMENTED)} has"
            )
        if self.memory_efficient and self.model != "densenet":
            raise RequestError(
                f"{self.model} has no bottlenecks to recompute", hint="--model densenet has"
            )
        if self.dropout and self.model != "densenet":
            raise RequestError(f"{self.model} has no dropout", hint="--model densenet has")
        if self.dropout and not self.preserve_rng:
            raise RequestError(
                "--no-preserve-rng would recompute with another dropout mask, and give wrong "
                "gradients",
                hint="without --dropout",
            )
        if self.keep_module_prefix and self.parallel not in PREFIXED:
            raise RequestError(
                f"--parallel {self.parallel} gives the keys no prefix to keep",
                hint=f"{', '.join(PREFIXED)} do",
            )

    @property
    def initial_lr(self) -> float:
        """Return the learning rate of the first epoch."""
        if self.lr is not None:
            return self.lr
        return LR[self.model] if self.optimizer == "sgd" else ADAM_LR

    def as_dict(self) -> dict[str, Any]:
        """Return plain values only, for the checkpoint."""
        values = {**asdict(self), "devices": list(self.devices), "lr": self.initial_lr}
        unused = [name for name in RECORDED_IF_USED if values[name] == DEFAULTS[name]]
        return without(values, unused)


DEFAULTS: dict[str, Any] = {field.name: field.default for field in fields(Config)}


def option(name: str, value: object) -> str:
    """Return a field and its value as they are typed: ``--lr 0.03``."""
    flag = name.replace("_", "-")
    if isinstance(value, bool):
        return f"--{flag}" if value else f"--no-{flag}"
    return f"--{flag} {','.join(value) if isinstance(value, (list, tuple)) else value}"


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
