"""List all edits. An edit is a typed function that takes and returns a Checkpoint.

For each edit, an entry in `EDITS` defines the option of `convert`, the command, the recipe step,
the fix of `doctor` and the public name. `convert` applies edits in the order of `EDITS`. This
package uses core, compute, pickles, quantized and rules.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from ckptkit.core.checkpoint import Checkpoint

Step: TypeAlias = "Callable[[Checkpoint], Checkpoint]"


@dataclass(frozen=True, slots=True)
class Option:
    """One argument of an edit.

    - ``kind`` selects two parsers: the parser of command line words (`cli.options.KINDS`) and the
      parser of recipe values (`run.recipes.KINDS`).
    - ``convert`` is the name of the option in `convert`. None means that the name is the value of
      ``flag``, and "" means that `convert` has no option for this argument.
    - ``convert_help`` is the help of the option in `convert`.
    - ``recipe`` is the key in the dict of a recipe step. If the value of the step is this argument
      itself, ``recipe`` is "". If recipes cannot set the argument, ``recipe`` is None. For edits
      with several inputs, recipes give only the other inputs.
    """

    parameter: str
    kind: str
    flag: str = ""
    metavar: str | None = None
    help: str = ""
    convert: str | None = None
    convert_help: str = ""
    recipe: str | None = ""
    dest: str = ""  # parameter of the command (default: `parameter`)
    choices: tuple[str, ...] = ()
    default: str | None = None  # shown by --help
    required: bool = False
    rare: bool = False  # hidden from --help


@dataclass(frozen=True, slots=True)
class Edit:
    """An edit with its name in recipes, its function, and its command line interface."""

    word: str
    place: str  # module and name of the function, as "module:name"
    options: tuple[Option, ...] = ()
    about: str = ""  # first line of --help; the manual contains this line too
    in_convert: bool = False
    command: str = ""
    help: str = ""  # text of --help below the first line
    examples: tuple[str, ...] = ()  # arguments of the command in the examples of --help
    needs: str = ""  # message of the usage error if the command gets no option
    # For an edit with several inputs: position of a recipe's checkpoint, "first" or "last".
    several: str = ""
    has_key: bool = False  # True if the command has the option --key
    reads_parts: bool = False  # True if the command has the options for distributed checkpoints
    fixed: Mapping[str, Any] | None = None  # arguments that every recipe step passes
    public: bool = True

    @property
    def function(self) -> Callable[..., Checkpoint]:
        module, _, name = self.place.partition(":")
        function: Callable[..., Checkpoint] = getattr(import_module(f"ckptkit.{module}"), name)
        return function


_KEYS = Option(
    "key", "strings", "--key", "PATH",
    "Path of the weights, or of another dict to edit (repeatable).",
    convert="", recipe=None, dest="keys",
)  # fmt: skip

EDITS = (
    Edit(
        "drop-entry", "edits.structure:drop_entry",
        (Option("paths", "strings", "--drop-entry", "PATH",
                "Drop an entry, e.g. optimizer (repeatable).", dest="entries"),),
        "Drop entries; in a recipe, missing entries are skipped.",
        in_convert=True, fixed={"missing_ok": True}, public=False,
    ),
    Edit(
        "optimizer-keys", "edits.optimizers:key_optimizer",
        (Option("by", "choice", "--optimizer-keys", "KEYS",
                "Keys of the optimizer state: names (FSDP, DCP) or numbers (torch.optim).",
                dest="optimizer_keys", choices=("names", "numbers")),),
        "Use names or numbers as keys of the optimizer state.",
        in_convert=True,
    ),
    Edit(
        "set-metadata", "edits.structure:with_extras",
        (Option("metadata", "named", "--set-metadata", "NAME=TEXT",
                "Set metadata of safetensors (repeatable)."),),
        "Set entries of the metadata of safetensors.",
        in_convert=True, public=False,
    ),
    Edit(
        "dequantize", "edits.quantized:dequantize",
        (Option("dtype", "dtype", "--dequantize", "[DTYPE]",
                "Dequantize weights to bfloat16, float16 or float32. Default: the dtype of the "
                "model.", dest="dequantize"),),
        "Dequantize weights; a recipe accepts a file without quantized weights.",
        in_convert=True, fixed={"missing_ok": True},
    ),
    Edit("weights", "edits.structure:bare", about="Keep only the weights.", public=False),
    Edit(
        "ema", "edits.combine:ema",
        about="Extract the averaged (EMA) weights of a training run.",
        command="ema",
        help="""Finds these weights under the names of common training loops (state_dict_ema,
        model_ema, ema, shadow_params...). A list of tensors without names gets the names of the
        trained weights in the same file.""",
        examples=("last.pth ema.safetensors",),
    ),
    Edit(
        "extract", "edits.structure:extract",
        (Option("key", "first", "--key", "PATH",
                "Path of the weights or of another entry: keys joined by dots.",
                required=True),),
        "Write one entry as its own checkpoint.",
        command="extract", reads_parts=True,
        help="The reverse of wrap.",
        examples=("run.pth model.pth --key model",),
    ),
    Edit(
        "join", "edits.combine:join",
        (Option("checkpoints", "files"),
         Option("last_wins", "flag", "--last-wins", None,
                "On duplicate names, use the last tensor instead of failing.")),
        "Combine several checkpoints into one state_dict.",
        command="join", several="first", has_key=True,
        help="For models saved in parts: an encoder and a decoder, or the stages of a pipeline.",
        examples=("stage0.pt stage1.pt model.safetensors",),
    ),
    Edit(
        "merge", "edits.merging:merge",
        (Option("checkpoints", "files"),
         Option("method", "choice", "--method", None,
                "Method of merging; see `ckptkit help merging`.",
                choices=("linear", "slerp", "task", "ties", "dare-ties", "dare-linear",
                         "passthrough")),
         Option("base", "text", "--base", "BASE",
                "Base model to subtract from the fine-tuned models."),
         Option("weight", "settings", "--weight", "W[,GLOB=W...]",
                "Weight of each SRC, in order (repeatable). GLOB=W is the weight of the tensors "
                "whose names match GLOB. Default: 1."),
         Option("density", "settings", "--density", "D[,GLOB=D...]",
                "Fraction of the differences to keep, for each SRC in order (repeatable). "
                "Default: 1."),
         Option("scale", "number", "--scale", "X",
                "Factor of the sum of the differences. For passthrough: factor of the weights. "
                "For slerp: fraction of the second model. Default: 1, for slerp 0.5."),
         Option("normalize", "switch", "--normalize/--no-normalize", None,
                "Divide the weighted sum by the sum of --weight. Default: only for linear and "
                "ties."),
         Option("rescale", "switch", "--rescale/--no-rescale", None,
                "Scale the kept differences so that their L1 norm equals that of all differences. "
                "Default: only for dare-*."),
         Option("layers", "strings", "--layers", "START:STOP",
                "Range of layers of each SRC, in order (repeatable), for passthrough."),
         Option("dtype", "text", "--dtype", "DTYPE",
                "Compute in this dtype. Default: the dtype of the tensors."),
         Option("seed", "count", "--seed", "N",
                "Seed of the random choices of dare-*. Default: 0.")),
        "Merge the values of several models of one architecture.",
        command="merge", several="first", has_key=True,
        help="""The methods are those of mergekit. linear is the weighted mean. slerp interpolates
        on a sphere. task adds the differences from a base. ties drops small differences, and
        differences with the rarer sign. dare-ties and dare-linear drop random differences.
        passthrough stacks layers of several models. `ckptkit help merging` explains each method. To
        combine parts of one model, use join.""",
        examples=("a b merged --method slerp --scale 0.3",
                  "math code merged --method ties --base llama --density 0.5 --density 0.5",
                  "a a deeper --method passthrough --layers 0:24 --layers 16:32"),
    ),
    Edit(
        "average", "edits.combine:average",
        (Option("checkpoints", "files"),
         Option("weight", "settings", "--weight", "W",
                "Weight of each SRC, in order (repeatable). Default: equal weights.")),
        "Write the mean of the weights of several checkpoints.",
        command="average", several="last", has_key=True,
        help="""Sums elements in float64 and rounds once. Integer and bool buffers (such as
        num_batches_tracked), dtypes and order come from the last SRC. Names and shapes must be
        the same in all SRC.""",
        examples=("epoch8.pth epoch9.pth epoch10.pth mean.pth",
                  "--weight 0.9 --weight 0.1 old.pth new.pth mixed.pth"),
    ),
    Edit(
        "select", "edits.keys:select",
        (Option("keep", "strings", "--keep", "GLOB", "Keep only weights that match (repeatable).",
                recipe="keep"),
         Option("drop", "strings", "--drop", "GLOB", "Drop weights that match (repeatable).",
                recipe="drop")),
        "Keep or drop weights; in a recipe, globs of `drop` may match nothing.",
        in_convert=True, fixed={"missing_ok": True},
    ),
    Edit(
        "strip", "edits.keys:strip_prefix",
        (Option("prefix", "strings", "--prefix", "P",
                "Prefix to remove instead of 'module.' (repeatable).", convert="--strip",
                convert_help="Remove this prefix from the keys (repeatable).", dest="prefixes"),
         _KEYS),
        "Remove the leading 'module.' from the keys.",
        in_convert=True, command="strip-module",
        help="""DataParallel and torch.compile add such prefixes. Removes one prefix from each key
        and its _metadata. If no key has the prefix, exits with 1 and writes nothing.""",
        examples=("run.pth plain.pth",),
    ),
    Edit(
        "add", "edits.keys:add_prefix",
        (Option("prefix", "text", "--prefix", "P", "Prefix to add to each key.", convert="--add",
                convert_help="Add this prefix to each key.", default="module."), _KEYS),
        "Add the prefix 'module.' to the keys.",
        in_convert=True, command="add-module",
        help="""DataParallel and DistributedDataParallel need this prefix.

        The reverse of strip-module.""",
        examples=("plain.pth run.pth",),
    ),
    Edit(
        "rename", "edits.keys:rename",
        (Option("map", "map", "--map", "FILE", "JSON file that maps old names to new ones.",
                recipe="map"),
         Option("sub", "substitutions", "--sub", "REGEX=REPLACEMENT",
                "Replace matches in names, as re.sub does (repeatable).", recipe="sub")),
        "Rename keys with a table or with regular expressions.",
        in_convert=True, command="rename", has_key=True,
        help="""--map gives the new name of each listed key. The --sub expressions apply to all
        other keys, in order.""",
        examples=("run.pth new.pth --map names.json",
                  r"run.pth new.pth --sub '^encoder\.=backbone.'"),
        needs="nothing to rename: add --map FILE (not empty) or --sub REGEX=REPLACEMENT",
    ),
    Edit(
        "tie", "edits.keys:tie", (Option("names", "map"),),
        "Add names for weights: a mapping from new names to existing names.",
        public=False,
    ),
    Edit(
        "untie", "edits.keys:untie", (Option("names", "map"),),
        "Remove names of tied weights: a mapping from each removed name to the kept name.",
        public=False,
    ),
    Edit(
        "rules", "edits.rules:apply_rules",
        (Option("rules", "rules", "--rule", "RULE",
                "Rearrange tensors: LEFT -> RIGHT (repeatable; see `ckptkit help "
                "rules`).", recipe=None),
         Option("config", "config", "--config", "FILE",
                "Configuration with the sizes for rules. Default: config.json beside SRC.",
                recipe=None, rare=True),
         Option("args", "sizes", "--arg", "NAME=INT",
                "Argument NAME of the rules: a size (repeatable).", recipe=None, rare=True)),
        "Rearrange tensors by rules.",
        in_convert=True,
    ),
    Edit(
        "compute", "edits.elements:compute",
        (Option("expressions", "map"),),
        "Replace each element x of weights by x - 1, x + 1, log(-x) or -exp(x).",
        public=False,
    ),
    Edit(
        "resize", "edits.resizing:resize",
        (Option("keys", "strings", "--keys", "GLOB",
                "Select tensors whose names match (repeatable). Tensors that are tied to a "
                "selected tensor are resized too.",
                required=True, recipe="keys"),
         Option("rows", "count", "--rows", "N", "Rows of the matrices.", required=True,
                recipe="rows"),
         Option("fill", "choice", "--fill", None,
                "Fill new rows with the mean of the old rows, with zeros, or with normal random "
                "numbers.",
                choices=("mean", "zeros", "normal"), recipe="fill"),
         Option("seed", "count", "--seed", "N", "Seed of the random rows. Default: 0.",
                recipe="seed")),
        "Add or remove rows of matrices, such as embeddings.",
        command="resize", has_key=True,
        help="""Changes the size of a vocabulary. Updates vocab_size in config.json if it was the
        old number of rows.""",
        examples=("model wider --keys '*embed_tokens.weight' --keys lm_head.weight --rows 32064",),
    ),
    Edit(
        "lora", "lora.merge:merged",
        (Option("adapter", "text", recipe="adapter"), Option("weight", "number", recipe="weight")),
        "Add the weight updates of an adapter (such as LoRA) to the weights.",
        public=False,
    ),
    Edit(
        "cast", "edits.elements:cast",
        (Option("dtypes", "casts", "--cast", "[GLOB=]DTYPE",
                "Cast floating-point weights that match GLOB, or all other weights (repeatable).",
                dest="cast"),),
        "Cast floating-point weights: one dtype, or a mapping from globs to dtypes.",
        in_convert=True,
    ),
    Edit(
        "quantize", "edits.quantized:quantize",
        (Option("kind", "text", "--quantize", "KIND",
                "Quantize matrices to fp8-block or mxfp4.", dest="quantize"),),
        "Quantize the matrices of layers to fp8-block or mxfp4.",
        in_convert=True, public=False,
    ),
    Edit(
        "remap", "edits.devices:remap",
        (Option("devices", "text", "--to", "DEVICE",
                "Change all device tags to DEVICE, e.g. cpu.", dest="device"),
         Option("devices", "pairs", "--device", "A=B",
                "Change the device tag A to B (repeatable)."),
         Option("device_values", "flag", "--device-values", None,
                "Also change torch.device values outside tensors.",
                convert="", recipe=None)),
        "Change device tags (such as cuda:1 to cpu), without a GPU.",
        in_convert=True, command="remap",
        help="torch.load then puts the tensors on the new devices, as with map_location.",
        examples=("run.pth cpu.pth --to cpu", "run.pth moved.pth --device cuda:1=cuda:0"),
        needs="use either --to DEVICE or --device A=B",
    ),
    Edit(
        "compact", "edits.elements:compact",
        (Option("", "flag", "--compact", None, "Drop bytes that no tensor uses.",
                dest="compact"),),
        "Shorten storages to the bytes that tensors use.",
        in_convert=True,
    ),
    Edit(
        "wrap", "edits.structure:wrap",
        (Option("key", "text", "--key", "NAME", "Path of the checkpoint in DST: one new key.",
                required=True),
         Option("set", "json", "--set", "NAME=JSON",
                "Add an entry beside the checkpoint (repeatable).",
                recipe=None)),
        "Put a checkpoint under a key of a new dict.",
        command="wrap",
        help="DST contains {NAME: checkpoint}, plus the values of --set. The reverse of extract.",
        examples=("plain.pth run.pth --key state_dict",
                  "net.pth run.ckpt --key state_dict --set 'pytorch-lightning_version=\"2.6\"'"),
    ),
)  # fmt: skip

BY_WORD = {each.word: each for each in EDITS}
BY_COMMAND = {each.command: each for each in EDITS if each.command}
PUBLIC = {
    name: module
    for each in EDITS
    if each.public
    for module, _, name in (each.place.partition(":"),)
}


def step(word: str, **arguments: Any) -> Step:
    """Return a function that applies the edit `word` with these arguments. The module of the edit
    is imported when the function is called."""
    edit = BY_WORD[word]
    return lambda checkpoint: edit.function(checkpoint, **arguments)


# A fix of `doctor` maps names of edits to arguments. The key `OPTIONS` contains changes of
# `Options`, such as {"objects": "drop"}.
Fix = Mapping[str, Mapping[str, Any]]
OPTIONS = "options"


def together(fixes: list[Fix]) -> Fix:
    """Merge several fixes into one fix. The edits in the result are in the order of EDITS.

    If two fixes set the same argument to dicts, the result contains the items of both dicts. Tuples
    are concatenated. For values of other types, the result contains the value of the first fix.
    """
    made: dict[str, dict[str, Any]] = {}
    for fix in fixes:
        for word, arguments in fix.items():
            held = made.setdefault(word, {})
            for name, value in arguments.items():
                if isinstance(value, Mapping):
                    held[name] = {**held.get(name, {}), **value}
                elif isinstance(value, tuple):
                    held[name] = (*held.get(name, ()), *value)
                else:
                    held.setdefault(name, value)
    order = [OPTIONS, *BY_WORD]
    return {word: made[word] for word in sorted(made, key=order.index)}
