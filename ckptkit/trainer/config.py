"""The configuration of a training run, and errors for requests that cannot be met."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from ckptkit import CkptkitError

MODELS = ("cnn", "mlp", "crnn", "densenet", "generator")
PARALLEL = ("none", "dp", "dp-balanced", "ddp", "fsdp")
OPTIMIZERS = ("sgd", "adam", "adamw")
FORMS = ("bare", "wrapped", "full")
SEGMENTED = ("mlp", "generator")  # models that checkpoint_sequential can split
PREFIXED = ("dp", "dp-balanced", "ddp")  # wrappers that put `module.` before every key
LR = {"cnn": 0.03, "mlp": 0.001, "crnn": 0.1, "densenet": 0.05, "generator": 0.005}  # of SGD
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


def option(default: Any, help: str, **kind: Any) -> Any:
    """Return a field of Config that is an option of the command.

    `kind` has the `choices`, the `metavar`, or the limits of a number: `least` (0 if not given),
    `above`, `below`.
    """
    return field(default=default, metadata={"help": help, **kind})


@dataclass(frozen=True, kw_only=True)
class Config:
    """One training run. Equal configs on the CPU give files of equal bytes."""

    model: str = option("cnn", "Model to train.", choices=MODELS)
    data: str = option("digits", f"Data set: {DATA}.", metavar="DATA")
    width: float = option(1.0, "Factor on the number of channels.", above=0)
    dropout: float = option(0.0, "Dropout probability of a densenet.", below=1)
    devices: tuple[str, ...] = option(
        (),
        "Devices, comma-separated; the model is held by the first. Default: all GPUs, or the CPU. "
        "cpu,cpu simulates two for dp.",
        metavar="A,B",
    )
    parallel: str = option(
        "none",
        "Parallelism over several devices; ddp and fsdp run under torchrun.",
        choices=PARALLEL,
    )
    epochs: int = option(10, "Number of epochs in total, those before --resume included.", least=1)
    batch_size: int = option(32, "Images per batch.", least=1)
    accumulate: int = option(1, "Batches whose gradients are accumulated for each step.", least=1)
    segments: int = option(
        0, "Segments of an mlp or generator to recompute in the backward pass (0: none)."
    )
    memory_efficient: bool = option(
        False, "Recompute the bottlenecks of a densenet in the backward pass."
    )
    preserve_rng: bool = option(
        True, "Restore the random state for what is recomputed; dropout needs it."
    )
    clip_norm: float = option(0.0, "Clip the norm of the gradients to this value (0: no clipping).")
    optimizer: str = option("sgd", "Optimizer.", choices=OPTIMIZERS)
    lr: float | None = option(
        None,
        f"Learning rate. Default: {ADAM_LR} for Adam; for SGD it depends on the model.",
        above=0,
    )
    momentum: float = option(0.9, "Momentum of SGD; first beta of Adam.")
    weight_decay: float | None = option(None, "Weight decay. Default: as torch has it.")
    lr_step: int = option(5, "Epochs between changes of the learning rate (0: no change).")
    lr_gamma: float = option(0.3, "Factor of each change of the learning rate.", above=0)
    amp: bool = option(False, "Compute in bfloat16 where that is safe.")
    seed: int = option(0, "Seed of all random number generators.")
    deterministic: bool = option(False, "Refuse nondeterministic algorithms.")
    eval_every: int = option(0, "Also evaluate every N steps (0: only after each epoch).")
    save_form: str = option(
        "wrapped",
        "Contents: the state_dict, with its epoch, or everything that --resume needs.",
        choices=FORMS,
    )
    keep_module_prefix: bool = option(
        False, "Keep the prefix 'module.' of the wrapper in the keys."
    )
    save_every: int = option(
        0, "Also save every N epochs, as OUT with .epochN (0: only at the end)."
    )
    save_best: bool = option(
        False, "Also save the checkpoint with the best accuracy, as OUT with .best."
    )

    def __post_init__(self) -> None:
        is_densenet, is_prefixed = self.model == "densenet", self.parallel in PREFIXED
        for is_wrong, message, hint in (
            (
                self.segments and self.model not in SEGMENTED,
                f"{self.model} has no segments",
                f"--model {' or '.join(SEGMENTED)} has",
            ),
            (
                self.memory_efficient and not is_densenet,
                f"{self.model} has no bottlenecks to recompute",
                "--model densenet has",
            ),
            (
                self.dropout and not is_densenet,
                f"{self.model} has no dropout",
                "--model densenet has",
            ),
            (
                self.dropout and not self.preserve_rng,
                "--no-preserve-rng would recompute with another dropout mask, and give wrong "
                "gradients",
                "without --dropout",
            ),
            (
                self.keep_module_prefix and not is_prefixed,
                f"--parallel {self.parallel} gives the keys no prefix to keep",
                f"{', '.join(PREFIXED)} do",
            ),
        ):
            if is_wrong:
                raise RequestError(message, hint=hint)

    @property
    def initial_lr(self) -> float:
        """Return the learning rate of the first epoch."""
        if self.lr is not None:
            return self.lr
        return LR[self.model] if self.optimizer == "sgd" else ADAM_LR

    def as_dict(self) -> dict[str, Any]:
        """Return plain values only, for the checkpoint."""
        values = {**asdict(self), "devices": list(self.devices), "lr": self.initial_lr}
        used = {name: values.pop(name) for name in RECORDED_IF_USED}
        return values | {name: each for name, each in used.items() if each != DEFAULTS[name]}


DEFAULTS: dict[str, Any] = {field.name: field.default for field in fields(Config)}


def typed(name: str, value: object) -> str:
    """Return a field and its value as they are typed: ``--lr 0.03``."""
    flag = name.replace("_", "-")
    if isinstance(value, bool):
        return f"--{flag}" if value else f"--no-{flag}"
    return f"--{flag} {','.join(value) if isinstance(value, (list, tuple)) else value}"


@dataclass(frozen=True)
class RunFiles:
    """Files that a run reads and writes beside its checkpoint; None for none."""

    resume: Path | None = None
    metrics: Path | None = None
    plot: Path | None = None
    memory_report: Path | None = None

    @property
    def written(self) -> list[Path]:
        """Return the files that the run writes."""
        return [path for path in (self.metrics, self.plot, self.memory_report) if path]
