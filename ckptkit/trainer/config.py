"""Define the configuration of a training run, and its errors."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, fields
from functools import cache
from pathlib import Path
from string import Template
from typing import Any

from ckptkit import CkptkitError

SEGMENTED = ("mlp", "generator")  # models that checkpoint_sequential can split
PREFIXED = ("dp", "dp-balanced", "ddp")  # modes whose wrappers add `module.` to every key
# Default learning rates: for each model with SGD, and for all models with Adam.
LR = {"cnn": 0.03, "mlp": 0.001, "crnn": 0.05, "densenet": 0.05, "generator": 0.005}
ADAM_LR = 0.001
# Number of epochs between changes of the learning rate. The model crnn learns slowly, so its
# learning rate changes less often.
LR_STEP, LR_STEP_CRNN = 5, 8
DATA = "digits, random or cifar10:DIR"

# Options that a resumed run may change: devices, memory use and saved checkpoints.
CHANGEABLE = (
    "devices", "output_device", "parallel", "epochs", "segments", "memory_efficient",
    "preserve_rng", "save_form", "keep_module_prefix", "save_every", "save_best", "eval_every",
    "workers", "torch_compile", "foreach", "sync_batch_norm", "benchmark", "empty_cache",
)  # fmt: skip
# Options recorded in a checkpoint only if they differ from the default. So default runs write the
# same bytes as before these options existed.
RECORDED_IF_USED = (
    "optimizer", "weight_decay", "dropout", "preserve_rng", "eval_every", "save_best",
    "output_device", "workers", "sampler", "amp_dtype", "clip_norm_type", "ema", "torch_compile",
    "foreach", "sync_batch_norm", "benchmark", "empty_cache", "validation",
)  # fmt: skip
# Options that have an effect only with certain values of another option.
NEEDED: dict[str, tuple[str, tuple[Any, ...]]] = {
    "segments": ("model", SEGMENTED),
    "memory_efficient": ("model", ("densenet",)),
    "dropout": ("model", ("densenet",)),
    "keep_module_prefix": ("parallel", PREFIXED),
    "output_device": ("parallel", ("dp",)),
    "sync_batch_norm": ("parallel", ("ddp", "fsdp")),
    "amp_dtype": ("amp", (True,)),
}
# Options that cannot be combined, and the reason. True matches every value except 0 and "".
CONFLICTS: tuple[tuple[dict[str, Any], str], ...] = (
    (
        {"dropout": True, "preserve_rng": False},
        "recomputing would use another dropout mask, and compute wrong gradients",
    ),
    ({"save_best": True, "validation": 0}, "the test set must not select a checkpoint"),
    (
        {"deterministic": True, "benchmark": True},
        "cuDNN would choose algorithms by time, so runs would not be deterministic",
    ),
    (
        {"amp_dtype": "float16", "parallel": "fsdp"},
        "float16 needs loss scaling, which the trainer does not support with fsdp",
    ),
    ({"ema": True, "parallel": "fsdp"}, "the trainer does not support this"),
    ({"ema": True, "save_form": "bare"}, "a bare checkpoint cannot contain the moving average"),
)
VALIDATION = 10  # default with --save-best: hold out every tenth training image


class RequestError(CkptkitError):
    """Options contradict each other, or this machine does not support them."""

    exit_code = 2


class SavingError(CkptkitError):
    """A checkpoint cannot be written. The previous checkpoint is intact."""

    exit_code = 4


@cache
def table() -> dict[str, tuple[str, str]]:
    """Read `options.txt`. Map the name of each option to its kind and its help."""
    text = Path(__file__).with_name("options.txt").read_text("utf-8")
    text = Template(text).substitute(globals())
    rows = re.findall(r"^(\w+) ?([^:]*): (.*(?:\n .*)*)", text, re.MULTILINE)
    return {name: (kind, " ".join(help.split())) for name, kind, help in rows}


def choices(name: str) -> tuple[str, ...]:
    """Return the values that an option accepts."""
    return tuple(table()[name][0].strip("{}").split("|"))


@dataclass(frozen=True, kw_only=True)
class Config:
    """The options of one training run. On the CPU, equal configs produce files with equal bytes.

    `options.txt` contains the kind and the help of each option.
    """

    model: str = "cnn"
    data: str = "digits"
    width: float = 1.0
    dropout: float = 0.0
    devices: tuple[str, ...] = ()
    output_device: str = ""
    parallel: str = "none"
    epochs: int = 10
    batch_size: int = 32
    validation: int | None = None
    workers: int = 0
    sampler: str = "hand"
    accumulate: int = 1
    segments: int = 0
    memory_efficient: bool = False
    preserve_rng: bool = True
    clip_norm: float = 0.0
    clip_norm_type: float = 2.0
    optimizer: str = "sgd"
    lr: float | None = None
    momentum: float = 0.9
    weight_decay: float | None = None
    foreach: bool = True
    ema: float = 0.0
    lr_step: int | None = None
    lr_gamma: float = 0.3
    amp: bool = False
    amp_dtype: str = "bfloat16"
    torch_compile: str = ""
    sync_batch_norm: bool = False
    benchmark: bool = False
    empty_cache: bool = False
    seed: int = 0
    deterministic: bool = False
    eval_every: int = 0
    save_form: str = "wrapped"
    keep_module_prefix: bool = False
    save_every: int = 0
    save_best: bool = False

    def __post_init__(self) -> None:
        for name, (other, values) in NEEDED.items():
            value = getattr(self, name)
            if value != DEFAULTS[name] and getattr(self, other) not in values:
                needed = " or ".join(typed(other, each) for each in values)
                raise RequestError(f"{typed(name, value)} needs {needed}", hint=f"use {needed}")
        for options, why in CONFLICTS:
            given = {name: getattr(self, name) for name in options}
            if all(
                bool(given[name]) == each if isinstance(each, bool) else given[name] == each
                for name, each in options.items()
            ):
                words = [typed(name, value) for name, value in given.items()]
                hint = f"remove {words[0].split()[0]}"
                raise RequestError(f"{' '.join(words)}: {why}", hint=hint)

    @property
    def held_out(self) -> int:
        """N if every Nth training image is held out for validation, else 0."""
        if self.validation is None:
            return VALIDATION if self.save_best else 0
        return self.validation

    @property
    def initial_lr(self) -> float:
        """The learning rate of the first epoch."""
        if self.lr is not None:
            return self.lr
        return LR[self.model] if self.optimizer == "sgd" else ADAM_LR

    @property
    def epochs_per_lr(self) -> int:
        """The number of epochs between changes of the learning rate, or 0 for a constant rate."""
        if self.lr_step is not None:
            return self.lr_step
        return LR_STEP_CRNN if self.model == "crnn" else LR_STEP

    def as_dict(self) -> dict[str, Any]:
        """Return the options as plain values for the checkpoint."""
        values = {**asdict(self), "devices": list(self.devices), "lr": self.initial_lr}
        values |= {"lr_step": self.epochs_per_lr, "validation": self.held_out or None}
        used = {name: values.pop(name) for name in RECORDED_IF_USED}
        return values | {name: each for name, each in used.items() if each != DEFAULTS[name]}


MODELS, FORMS = choices("model"), choices("save_form")
DEFAULTS: dict[str, Any] = {field.name: field.default for field in fields(Config)}


def typed(name: str, value: object) -> str:
    """Return an option with its value as typed on the command line: ``--lr 0.03``."""
    flag = name.replace("_", "-")
    if isinstance(value, bool):
        return f"--{flag}" if value else f"--no-{flag}"
    return f"--{flag} {','.join(value) if isinstance(value, (list, tuple)) else value}"


@dataclass(frozen=True)
class RunFiles:
    """Files that a run reads and writes in addition to its checkpoint. None means no file."""

    resume: Path | None = None
    metrics: Path | None = None
    plot: Path | None = None
    memory_report: Path | None = None
    memory_snapshot: Path | None = None

    @classmethod
    def of(cls, options: dict[str, Any]) -> RunFiles:
        """Remove the files from `options`, and return them."""
        names = [each.name for each in fields(cls) if each.name in options]
        return cls(**{name: options.pop(name) for name in names})

    @property
    def written(self) -> list[Path]:
        """The files that the run writes."""
        written = self.metrics, self.plot, self.memory_report, self.memory_snapshot
        return [path for path in written if path]
