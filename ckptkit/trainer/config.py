"""Define the configuration of a training run, and its errors."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from ckptkit import CkptkitError

MODELS = ("cnn", "mlp", "crnn", "densenet", "generator")
PARALLEL = ("none", "dp", "dp-balanced", "ddp", "fsdp")
OPTIMIZERS = ("sgd", "adam", "adamw")
FORMS = ("bare", "wrapped", "full")
SAMPLERS = ("hand", "distributed")
AMP_DTYPES = ("bfloat16", "float16")
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


def option(default: Any, help: str, **kind: Any) -> Any:
    """Return a field of Config that becomes an option of the command.

    `kind` may have `choices`, `metavar`, or limits of a number: `least` (default 0), `above`,
    `below`.
    """
    return field(default=default, metadata={"help": help, **kind})


@dataclass(frozen=True, kw_only=True)
class Config:
    """The options of one training run. On the CPU, equal configs produce files with equal bytes."""

    model: str = option("cnn", "Model to train.", choices=MODELS)
    data: str = option("digits", f"Data set: {DATA}.", metavar="DATA")
    width: float = option(1.0, "Factor for the number of channels.", above=0)
    dropout: float = option(0.0, "Dropout probability of a densenet.", below=1)
    devices: tuple[str, ...] = option(
        (),
        "Comma-separated devices. The model is on the first device. Default: all GPUs, or the CPU. "
        "cpu,cpu simulates two devices for dp.",
        metavar="A,B",
    )
    output_device: str = option(
        "", "Device that gathers the outputs of dp. Default: the first device.", metavar="DEVICE"
    )
    parallel: str = option(
        "none",
        "Parallelism over several devices. ddp and fsdp run under torchrun. torch recommends ddp "
        "over dp, also on one machine.",
        choices=PARALLEL,
    )
    epochs: int = option(
        10, "Total number of epochs, including the epochs before --resume.", least=1
    )
    batch_size: int = option(
        32,
        "Images per batch, over all devices and processes: with 32, each of two processes gets 16.",
        least=1,
    )
    validation: int | None = option(
        None,
        "Hold out every Nth training image (0: none). Each epoch is evaluated on these images. The "
        "test set is evaluated only once, at the end. "
        f"Default: {VALIDATION} with --save-best, else 0.",
        least=0,
    )
    workers: int = option(
        0, "Number of processes that load batches. For a GPU, batches are in pinned memory."
    )
    sampler: str = option(
        "hand",
        "How processes share the images. hand: each process takes a part of each batch. "
        "distributed: torch's DistributedSampler.",
        choices=SAMPLERS,
    )
    accumulate: int = option(
        1, "Number of batches whose gradients are accumulated for each step.", least=1
    )
    segments: int = option(
        0, "Split an mlp or generator into N segments, recomputed in the backward pass (0: no)."
    )
    memory_efficient: bool = option(
        False, "Recompute the bottlenecks of a densenet in the backward pass."
    )
    preserve_rng: bool = option(
        True, "Restore the random state before recomputing. Dropout requires this."
    )
    clip_norm: float = option(0.0, "Clip the norm of the gradients to this value (0: no clipping).")
    clip_norm_type: float = option(
        2.0, "Norm of --clip-norm: 2, 1, or inf for the largest element.", above=0
    )
    optimizer: str = option("sgd", "Optimizer.", choices=OPTIMIZERS)
    lr: float | None = option(
        None,
        f"Learning rate. Default: {ADAM_LR} for Adam; for SGD it depends on the model.",
        above=0,
    )
    momentum: float = option(0.9, "Momentum of SGD, or first beta of Adam.")
    weight_decay: float | None = option(None, "Weight decay. Default: the default of torch.")
    foreach: bool = option(
        True,
        "Let the optimizer update all parameters at once: fast on GPUs, but needs additional "
        "memory of the size of the model.",
    )
    ema: float = option(
        0.0, "Decay of a moving average of the weights, saved as 'ema' (0: none).", below=1
    )
    lr_step: int | None = option(
        None,
        "Epochs between changes of the learning rate (0: no change). "
        f"Default: {LR_STEP}, for a crnn {LR_STEP_CRNN}.",
        least=0,
    )
    lr_gamma: float = option(
        0.3, "Factor by which each change multiplies the learning rate.", above=0
    )
    amp: bool = option(False, "Compute in mixed precision (autocast).")
    amp_dtype: str = option(
        "bfloat16", "Dtype of --amp. float16 needs loss scaling.", choices=AMP_DTYPES
    )
    torch_compile: str = option(
        "", "Compile the model with this backend of torch.compile, e.g. inductor.", metavar="NAME"
    )
    sync_batch_norm: bool = option(
        False, "Let BatchNorm use the statistics of all processes. Only for ddp and fsdp on GPUs."
    )
    benchmark: bool = option(
        False,
        "Let cuDNN time its algorithms and use the fastest. Useful if all inputs have one shape.",
    )
    empty_cache: bool = option(
        False, "After each epoch, return unused memory of the allocator to the GPU."
    )
    seed: int = option(0, "Seed of all random number generators.")
    deterministic: bool = option(False, "Refuse nondeterministic algorithms.")
    eval_every: int = option(0, "Also evaluate every N steps (0: only after each epoch).")
    save_form: str = option(
        "wrapped",
        "Contents of the checkpoint. bare: state_dict; wrapped: state_dict and epoch; full: all "
        "that --resume needs.",
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

    # ruff: noqa: RUF009  (option returns a field)
    resume: Path | None = option(
        None,
        "Resume from a checkpoint of --save-form full, with the options of its run.",
        metavar="FILE",
    )
    metrics: Path | None = option(None, "Write metrics as JSON lines.", metavar="FILE")
    plot: Path | None = option(None, "Write a plot of loss and accuracy (PNG).", metavar="FILE")
    memory_report: Path | None = option(
        None, "Write the memory and the seconds of each step as JSON lines.", metavar="FILE"
    )
    memory_snapshot: Path | None = option(
        None, "Write all allocations on GPUs, for pytorch.org/memory_viz.", metavar="FILE"
    )

    @property
    def written(self) -> list[Path]:
        """The files that the run writes."""
        written = self.metrics, self.plot, self.memory_report, self.memory_snapshot
        return [path for path in written if path]
