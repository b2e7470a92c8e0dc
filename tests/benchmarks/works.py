"""The works that are measured: commands, inputs, contestants, and the budgets."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from tests.benchmarks.inputs import SMALL, Input

PLAIN = 400  # tensors of an input that is measured by its bytes
JUDGED = 1.0  # GiB from which on a ratio to cp is held against its budget: below, starting Python is all there is
TOP = 2.0  # GiB of the largest input for all works; larger ones are for growth


class Budget(NamedTuple):
    """The limits of a work; None: there is no such limit."""

    seconds: float | None = None
    to_cp: float | None = None  # times the seconds of `cp`
    to_torch: float | None = None  # times those of the best plain way with torch
    mib: int | None = None


class Work(NamedTuple):
    """One work of ckptkit. In `command`, ``{src}`` is the input, ``{twin}`` an equal file,
    ``{fresh}`` a copy of the input that may be changed; without a command it is that of `job` in
    `peers.LIBRARY`. `budgets` says on how many tensors it runs;
    `job` is a key of `peers.PROGRAMS`."""

    name: str
    kind: str  # of the input
    command: str
    job: str
    budgets: Mapping[int, Budget]
    sizes: str = "all"  # of the plain inputs: all, or the largest up to TOP ("one")

    @property
    def copies(self) -> int:
        """The largest number of files of the input's size that exist beside it at one time."""
        return 1 + ("{twin}" in self.command)


class Case(NamedTuple):
    """A work on an input."""

    work: Work
    input: Input
    peers: bool  # whether there is room and time for them

    @property
    def budget(self) -> Budget:
        return self.work.budgets[self.input.tensors]


def _moved(to_cp: float, mib: int, many: Mapping[int, Budget] | None = None) -> dict[int, Budget]:
    return {PLAIN: Budget(to_cp=to_cp, mib=mib), **(many or {})}


_READ = {
    PLAIN: Budget(seconds=0.12, mib=30), 1_000: Budget(seconds=0.2), 10_000: Budget(),
    100_000: Budget(seconds=1.8, mib=250),
}  # fmt: skip
_PRINTED = {10_000: Budget(), 100_000: Budget(seconds=2.5, mib=250)}
_REWRITTEN = {10_000: Budget(), 100_000: Budget(seconds=3, mib=400)}
_IN_PLACE = {PLAIN: Budget(seconds=0.2, mib=60)}
_COMPUTED = {PLAIN: Budget(mib=200)}
_LOADED = {PLAIN: Budget(to_torch=1.1)}
_FILLED = {PLAIN: Budget(to_torch=0.8)}
_START = {10: Budget(seconds=0.12)}

RULE = "convert {{src}} out.safetensors --rule 'module.layers.{{{{l}}}}.weight [o i] -> {}'"

WORKS = (
    Work("--help", "pth", "--help", "start", _START),
    Work("inspect, a small file", "pth", "inspect {src}", "none", _START),
    Work("inspect", "pth", "inspect {src}", "list", _READ),
    Work("inspect, safetensors", "safetensors", "inspect {src}", "list safetensors", {100_000: Budget(seconds=1.3)}),
    Work("inspect, experts", "names", "inspect {src}", "list safetensors", {69_120: Budget(seconds=0.9, mib=110)}),
    Work("inspect, 96 shards", "shards", "inspect {src}", "list shards", {500_000: Budget(seconds=6, mib=500)}),
    Work("inspect --json", "pth", "inspect --json {src}", "list", _PRINTED),
    Work("strip-module", "pth", "strip-module {src} out.pth", "strip", _moved(1.25, 40)),
    Work(
        "remap", "pth", "remap {src} out.pth --to cpu", "rewrite", _moved(1.25, 40, _REWRITTEN),
    ),
    Work("extract", "wrapped", "extract {src} out.pth --key model", "extract", _moved(1.25, 40), "one"),
    Work(
        ".pth to safetensors", "pth", "convert {src} out.safetensors", "to safetensors",
        _moved(1.25, 60, {10_000: Budget(), 100_000: Budget()}),
    ),
    Work(
        "cast to bfloat16", "pth", "convert {src} out.pth --cast bfloat16", "cast",
        {PLAIN: Budget(to_cp=1.3, to_torch=1.5, mib=64)}, sizes="one",
    ),
    # cp copies one of the two inputs
    Work("average of two", "pth", "average {src} {twin} out.pth", "average", _moved(1.5 * 2, 64), sizes="one"),
    Work("stats", "pth", "stats {src}", "stats", _moved(1.5, 64), sizes="one"),
    Work(
        "diff within a tolerance", "pth", "diff --values --atol 1e-6 {src} {twin}", "close",
        _moved(1.5 * 2, 64), sizes="one",
    ),
    Work(
        "legacy to zip", "legacy", "convert {src} out.pth", "from legacy", _moved(1.25, 60), sizes="one",
    ),
    Work("digest", "pth", "inspect --json --digest {src}", "digest", _COMPUTED, sizes="one"),
    Work("diff --values", "pth", "diff --values {src} {twin}", "equal", _COMPUTED, sizes="one"),
    Work(
        "strip-module --in-place", "pth", "strip-module --in-place {fresh}", "strip",
        {**_IN_PLACE, 10_000: Budget(), 100_000: Budget()},
    ),
    Work("remap --in-place", "pth", "remap --in-place {fresh} --to cpu", "rewrite", _IN_PLACE, sizes="one"),
    Work("rename --in-place", "pth", "rename --in-place {fresh} --sub ^module=m", "strip", _IN_PLACE, sizes="one"),
    Work("extract --in-place", "wrapped", "extract --in-place {fresh} --key model", "extract", _IN_PLACE, sizes="one"),
    Work(
        "safetensors to .pth", "safetensors", "convert {src} out.pth", "from safetensors", _moved(1.25, 60),
    ),
    Work(
        "strip-module, safetensors", "safetensors", "strip-module {src} out.safetensors", "strip safetensors",
        _moved(1.25, 60), sizes="one",
    ),
    Work(
        "strip-module --in-place, safetensors", "safetensors", "strip-module --in-place {fresh}", "strip safetensors",
        _IN_PLACE,
    ),
    Work("rules, stack", "safetensors", RULE.format("stack [l o i]"), "none", _moved(1.2, 130)),
    Work("rules, permute rows", "safetensors", RULE.format("rows [o l i]"), "none", _moved(1.6, 200), sizes="one"),
    Work("rules, transpose", "safetensors", RULE.format("turned [i (l o)]"), "none", _moved(2, 200), sizes="one"),
    Work(
        "rules, transpose of 8-bit numbers", "matrix", "convert {src} out.safetensors --rule 'w [o i] -> w [i o]'", "transpose",
        _moved(2, 200), sizes="one",
    ),
    Work(
        "rules, stack experts", "experts", "run mixtral {src} out.safetensors", "stack experts", _moved(1.2, 130),
        sizes="one",
    ),
    Work(
        "rules, torchtitan's Llama", "titan", "run torchtitan-llama3 {src} out.safetensors --arg h=16", "from torchtitan",
        _moved(1.6, 200), sizes="one",
    ),
    Work("DCP folder of 2 ranks", "dcp", "convert {src} out.safetensors", "dcp", _moved(1.6, 300), sizes="one"),
    Work("rank files of 4 ranks", "ranks", "convert {src} out.safetensors", "none", _moved(1.25, 64), sizes="one"),
    Work("columns of 4 parts", "columns", "convert {src} out.safetensors", "none", _moved(1.25, 64), sizes="one"),
    *(
        Work(
            f"dequantize {kind}", kind, "convert {src} out.safetensors --dequantize bfloat16",
            "dequantize" if kind == "fp8" else "none",
            _moved(to_cp, 100), sizes="one",
        )
        # cp copies the input: of codes of 8 bits the output is twice as large, of 4 bits nearly
        # four times
        for kind, to_cp in (
            ("fp8", 1.5 * 2), ("mxfp4", 1.5 * 3.76), ("mxfp4-transposed", 1.5 * 3.76), ("gptq", 1.5 * 3.9),
        )
    ),
    # cp copies the input, of which each byte makes up to 14 of the output
    *(
        Work(
            f"dequantize {kind}", kind, "convert {src} out.safetensors --dequantize float32", "gguf",
            _moved(1.5 * (1 + growth), 100), sizes="one",
        )
        for kind, growth in (
            ("gguf Q8_0", 3.8), ("gguf Q4_K", 7.1), ("gguf Q6_K", 4.9), ("gguf IQ2_XS", 13.8),
        )
    ),
    Work("run gguf", "gguf llama", "run gguf {src} out", "gguf model", _moved(1.5 * (1 + 3.6), 100), sizes="one"),
    Work(
        "shards of 500 MB", "experts", "convert {src} out --format sharded --shard-size 500MB", "shards",
        _moved(1.25, 64), sizes="one",
    ),
    # cp copies both states of the model; an output is one of them
    Work("delta make", "step", "delta make {src}/old.safetensors {src}/new.safetensors out", "delta", _moved(1.5, 100), sizes="one"),
    Work(
        "delta apply", "step", "delta apply {src}/old.safetensors {src}/delta out.safetensors", "none",
        _moved(1.3 / 2, 100), sizes="one",
    ),
    Work(
        "delta apply --in-place", "step", "delta apply --in-place {fresh}/old.safetensors {fresh}/delta", "none",
        {PLAIN: Budget(mib=100)}, sizes="one",
    ),
    Work(
        "lora merge", "lora", "lora merge {src}/base.safetensors {src}/adapter out.safetensors", "lora",
        _moved(2.5, 150), sizes="one",
    ),
    # cp copies the base and both models: all that is read, but for diff, which reads two of them
    *(
        Work(
            f"merge by {method}, {dtype}", f"models {dtype}",
            f"merge {{src}}/a/model.safetensors {{src}}/b/model.safetensors out.safetensors --method {method}"
            + ("" if method in ("linear", "slerp") else " --base {src}/base/model.safetensors")
            + (" --density 0.5 --density 0.5" if "ties" in method else ""),
            f"merge {method}", _moved(passes * (1 if base else 2 / 3), 100), sizes="one",
        )
        for dtype in ("bfloat16", "float32")
        for method, passes, base in (
            ("linear", 2, False), ("slerp", 3, False), ("task", 2, True), ("ties", 3, True), ("dare-ties", 3, True),
        )
    ),
    *(
        Work(
            f"diff, all elements differ, {dtype}", f"models {dtype}",
            "diff {src}/a/model.safetensors {src}/b/model.safetensors", "differ", _moved(2 * 2 / 3, 60), sizes="one",
        )
        for dtype in ("bfloat16", "float32")
    ),
    *(
        Work(
            f"cast {source} to {target}", source, f"convert {{src}} out.safetensors --cast {target}",
            # The output of a cast from 16 to 32 bits is twice as long as the input. A C program that only
            # reads the input and writes as many bytes in two threads takes 1.7 x cp.
            f"cast to {target}", _moved(2.2 if source.endswith("16") and target == "float32" else 1.5, 60), sizes="one",
        )
        for source, target in (
            ("safetensors", "float16"), ("safetensors", "bfloat16"), ("float16", "float32"), ("bfloat16", "float32"),
            ("float16", "bfloat16"), ("bfloat16", "float16"),
        )
    ),
    # one file eight times; cp copies it once
    Work("average of eight", "safetensors", "average " + "{src} " * 8 + "out.safetensors", "none", _moved(1.25 * 8, 60), sizes="one"),
    Work("load, every page read", "pth", "", "load", _LOADED, sizes="one"),
    Work("load, every page read, safetensors", "safetensors", "", "load safetensors", _LOADED, sizes="one"),
    Work("load_into", "pth", "", "fill", _FILLED, sizes="one"),
    Work("load_into, safetensors", "safetensors", "", "fill safetensors", _FILLED, sizes="one"),
    Work("ZeRO-3 folder of 2 ranks", "zero3", "convert {src} out.safetensors", "none", _moved(1.6, 300), sizes="one"),
)  # fmt: skip


def cases(sizes: Iterable[float], tensors: Iterable[int], only: str) -> Iterator[Case]:
    """Every work whose name has `only` in it, on every input that it is for; those on one input
    follow each other."""
    sizes, tensors = sorted(sizes), set(tensors)
    top = max((size for size in sizes if size <= TOP), default=sizes[0])
    found = []
    for work in WORKS:
        for count in work.budgets if only in work.name else ():
            if count == PLAIN:
                wanted = [size for size in sizes if work.sizes == "all" or size == top]
                found += [Case(work, Input(work.kind, size, count), size <= top) for size in wanted]
            elif count in tensors or count < PLAIN:
                found.append(Case(work, Input(work.kind, SMALL, count), True))
    inputs = dict.fromkeys(case.input for case in found)
    return (case for each in inputs for case in found if case.input == each)
