"""Names of modules in adapters of image models: underscores that were dots, and two spellings.

kohya writes a module's name with underscores. U-Nets, Flux and the text encoder of OpenCLIP have
two spellings each: the original (sgm, Black Forest Labs), and that of diffusers and transformers.
Flux and OpenCLIP have q, k and v in one matrix where the others have three. A row of `_ROWS` is a
tensor rule: the name of a module in both spellings, and how its rows are cut.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from functools import cache
from itertools import accumulate
from math import prod
from typing import NamedTuple

from ckptkit.core.errors import AmbiguousError, UnsupportedError
from ckptkit.core.tensor import Shape
from ckptkit.core.text import shown, some, typed
from ckptkit.rules.names import Index, Pattern, Settings, Steps, axis_words, evaluate
from ckptkit.rules.notation import parse_rule

ORIGINAL, DIFFUSERS = "original", "diffusers"
UNET, FLUX, CLIP = "unet", "flux", "clip"

_RESNET = (
    ".{m:in_layers.2|emb_layers.1|out_layers.3|skip_connection}",
    ".{m:conv1|time_emb_proj|conv2|conv_shortcut}",
)
_FLUX_ROWS = """
double_blocks.{n}.img_attn.qkv [(p h) ...] -> transformer_blocks.{n}.attn.to_{p:q|k|v} [h ...]
double_blocks.{n}.txt_attn.qkv [(p h) ...] -> transformer_blocks.{n}.attn.add_{p:q|k|v}_proj [h ...]
double_blocks.{n}.img_attn.proj -> transformer_blocks.{n}.attn.to_out.0
double_blocks.{n}.txt_attn.proj -> transformer_blocks.{n}.attn.to_add_out
double_blocks.{n}.img_mlp.{m:0|2} -> transformer_blocks.{n}.ff.net.{m:0.proj|2}
double_blocks.{n}.txt_mlp.{m:0|2} -> transformer_blocks.{n}.ff_context.net.{m:0.proj|2}
double_blocks.{n}.img_mod.lin -> transformer_blocks.{n}.norm1.linear
double_blocks.{n}.txt_mod.lin -> transformer_blocks.{n}.norm1_context.linear
single_blocks.{n}.linear1 [(p h) ...] -> single_transformer_blocks.{n}.\
{p:attn.to_q|attn.to_k|attn.to_v|proj_mlp} [h ...] with h=1|1|1|4
single_blocks.{n}.linear2 -> single_transformer_blocks.{n}.proj_out
single_blocks.{n}.modulation.lin -> single_transformer_blocks.{n}.norm.linear
img_in -> x_embedder
txt_in -> context_embedder
{e:time_in|vector_in|guidance_in}.{m:in_layer|out_layer} -> time_text_embed.\
{e:timestep|text|guidance}_embedder.{m:linear_1|linear_2}
final_layer.linear -> proj_out
final_layer.adaLN_modulation.1 -> norm_out.linear
"""
_CLIP_ROWS = """
transformer.resblocks.{n}.attn.in_proj_weight [(p h) ...] -> \
text_model.encoder.layers.{n}.self_attn.{p:q|k|v}_proj [h ...]
transformer.resblocks.{n}.attn.out_proj -> text_model.encoder.layers.{n}.self_attn.out_proj
transformer.resblocks.{n}.mlp.{m:c_fc|c_proj} -> text_model.encoder.layers.{n}.mlp.{m:fc1|fc2}
token_embedding -> text_model.embeddings.token_embedding
"""
# Its rows are two halves, scale and shift, in another order.
_SWAPPED = "final_layer.adaLN_modulation.1"
# Components of names that are in no row: words between dots, whatever underscores they contain.
_WORDS = """
transformer_blocks single_transformer_blocks attn attn1 attn2 ff net proj proj_in proj_out to_q to_k
to_v to_out norm norm1 norm2 norm3 text_model encoder layers self_attn q_proj k_proj v_proj out_proj
mlp fc1 fc2 text_projection embeddings position_embedding final_layer_norm layer_norm1 layer_norm2
block layer SelfAttention DenseReluDense q k v o wi wi_0 wi_1 wo shared blocks cross_attn ffn k_img
v_img joint_blocks x_block context_block adaLN_modulation model gate_proj up_proj down_proj linear
decoder final_layer mid_block down_blocks up_blocks resnets attentions downsamplers upsamplers conv
query key value query_key_value dense lm_head embed_tokens
"""
_PREFIXES = {  # of the names of a component in a checkpoint, alone or with others
    "text_encoder": (
        "conditioner.embedders.0.transformer.", "cond_stage_model.transformer.",
        "cond_stage_model.model.", "text_encoders.clip_l.transformer.", "text_encoder.",
    ),
    "text_encoder_2": (
        "conditioner.embedders.1.model.", "text_encoders.clip_g.transformer.",
        "text_encoders.t5xxl.transformer.", "text_encoder_2.",
    ),
    "text_encoder_3": ("text_encoders.t5xxl.transformer.", "text_encoder_3."),
}  # fmt: skip
_IMAGES = "unet", "transformer", "transformer_2", "prior"  # components that make images
_MODELS = "model.diffusion_model.", "diffusion_model.", "unet.", "transformer.", "model."


def _unet_rows() -> Iterator[str]:
    """Yield the rows of U-Nets of SD 1.5, 2 and XL, which have blocks of the same numbers."""
    yield "input_blocks.0.0 -> conv_in"
    yield "{e:time_embed|label_emb.0}.{m:0|2} -> {e:time|add}_embedding.{m:linear_1|linear_2}"
    yield "out.2 -> conv_out"
    for number, name in enumerate(("resnets.0", "attentions.0", "resnets.1")):
        inner = (".{m:**}", ".{m:**}") if number == 1 else _RESNET
        yield f"middle_block.{number}{inner[0]} -> mid_block.{name}{inner[1]}"
    for b in range(4):
        yield f"input_blocks.{3 * b + 3}.0.op -> down_blocks.{b}.downsamplers.0.conv"
        for place in (2, 1):  # 1 where the block has no attention
            yield f"output_blocks.{3 * b + 2}.{place}.conv -> up_blocks.{b}.upsamplers.0.conv"
        for side, blocks, first, count in (("input", "down", 1, 2), ("output", "up", 0, 3)):
            for layer in range(count):
                at = f"{side}_blocks.{3 * b + layer + first}"
                yield f"{at}.0{_RESNET[0]} -> {blocks}_blocks.{b}.resnets.{layer}{_RESNET[1]}"
                yield f"{at}.1.{{m:**}} -> {blocks}_blocks.{b}.attentions.{layer}.{{m}}"


class Part(NamedTuple):
    """Rows of a module that are rows of the module `name` of the other spelling.

    The rows of the module are `units` equal shares: `length` of them, from `start` on, are those
    from `at` on of the other, which has `whole` shares.
    """

    name: str
    start: int = 0
    length: int = 1
    units: int = 1
    at: int = 0
    whole: int = 1


class Placed(NamedTuple):
    """Where a module's change belongs: its rows `start` to `stop` are added to a tensor's `at`."""

    tensor: str
    start: int
    stop: int
    at: int


class _Row:
    """A row of the tables, ready to be matched from both sides."""

    def __init__(self, family: str, line: str) -> None:
        rule = parse_rule(line)
        words = axis_words(rule)
        self.family = family
        self.sides = {
            ORIGINAL: Pattern(rule.left.name, words.left_kinds, {}),
            DIFFUSERS: Pattern(rule.right.name, words.right_kinds, {}),
        }
        self.parts = (words.labels("p") or 1) if "p" in words.scattered else 1
        given = evaluate(rule, Settings()).sizes.get("h", (1,) * self.parts)
        self.ends = tuple(accumulate((n or 1 for n in given), initial=0))

    def other(self, path: str, spelling: str) -> tuple[Part, ...] | None:
        """Return the parts of `path`, which has this spelling, in the other one."""
        values = self.sides[spelling].match(path, Steps(1))
        if values is None:
            return None
        plain = {words[0]: value for words, value in values.items()}
        target = self.sides[DIFFUSERS if spelling == ORIGINAL else ORIGINAL]
        found = []
        whole, ends = self.ends[-1], self.ends
        for number in range(self.parts) if spelling == ORIGINAL else (plain.get("p", 0),):
            assert isinstance(number, int)
            name = target.render({**plain, "p": number}, {})
            assert name is not None
            start, length = ends[number], ends[number + 1] - ends[number]
            if spelling == ORIGINAL:
                found.append(Part(name, start, length, whole, 0, length))
            else:
                found.append(Part(name, 0, length, length, start, whole))
        if _SWAPPED in (path, found[0].name):
            name = found[0].name
            return Part(name, 0, 1, 2, 1, 2), Part(name, 1, 1, 2, 0, 2)
        return tuple(found)


@cache
def _rows() -> tuple[_Row, ...]:
    tables = ((UNET, _unet_rows()), (FLUX, _lines(_FLUX_ROWS)), (CLIP, _lines(_CLIP_ROWS)))
    return tuple(_Row(family, line) for family, lines in tables for line in lines)


def _lines(text: str) -> list[str]:
    return text.strip().splitlines()


@cache
def spelled(path: str) -> tuple[str, str, tuple[tuple[Part, ...], ...]] | None:
    """Return the family and the spelling of a module's name, and what it is in the other spelling.

    That is one choice of parts, or two where the number of a layer depends on the model. None for a
    name that is not in the tables.
    """
    for spelling in (ORIGINAL, DIFFUSERS):
        found = [(row.family, parts) for row in _rows() if (parts := row.other(path, spelling))]
        if found:
            ways = found[:2] if spelling == DIFFUSERS and found[0][0] == UNET else found[:1]
            return found[0][0], spelling, tuple(parts for _, parts in ways)
    return None


# Underscores that were dots


def flat(name: str) -> str:
    """Return a name as kohya writes it."""
    return name.replace(".", "_")


@cache
def _vocabulary() -> frozenset[str]:
    known = set(_WORDS.split())
    for row in _rows():
        for side in row.sides.values():
            text = ["".join(each if isinstance(each, str) else "\0" for each in side.parts)]
            for part in side.parts:
                if isinstance(part, Index) and part.labels is not None:
                    text = [each.replace("\0", label, 1) for each in text for label in part.labels]
                elif isinstance(part, Index):
                    text = [each.replace("\0", "0", 1) for each in text]
            known.update(word for each in text for word in each.split("."))
    return frozenset(word for word in known if word and not word.isdigit())


def dotted(name: str) -> str:
    """Return the dotted name of a module that is written with underscores.

    It is split into known components, as few as possible. Raises UnsupportedError for an unknown
    component, AmbiguousError where two ways need as few.
    """
    pieces = name.split("_")
    best: list[list[tuple[str, ...]]] = [[()]]  # the shortest ways to write the first N pieces
    for end in range(1, len(pieces) + 1):
        ways: list[tuple[str, ...]] = []
        for start in range(max(0, end - 6), end):
            word = "_".join(pieces[start:end])
            if word in _vocabulary() or (word.isdigit() and end == start + 1):
                ways += [(*way, word) for way in best[start]]
        least = min(map(len, ways), default=0)
        best.append([way for way in ways if len(way) == least][:4])
    found = [".".join(way) for way in best[-1]]
    base = f"{typed('--base BASE', 'base=...')} takes the dots from the names of the base"
    if not found:
        raise UnsupportedError(
            f"which underscores of {shown(name)} were dots is unknown", hint=base
        )
    if len(found) > 1:
        raise AmbiguousError(f"{shown(name)} may be {some(found, 2)}", hint=base)
    return found[0]


# Names of a base


class BaseNames:
    """The names and shapes of a checkpoint, in which modules of adapters are looked up.

    `components` are those of the adapter: names of a text encoder without a prefix are meant only
    if the adapter has a single one.
    """

    def __init__(self, shapes: Mapping[str, Shape], components: Collection[str] = ()) -> None:
        self.shapes = shapes
        self._encoders = sum(each.startswith("text_encoder") for each in components)
        self._flat: dict[str, list[str]] = {}
        for name in shapes:
            self._flat.setdefault(flat(name.removesuffix(".weight")), []).append(name)

    def find(
        self, component: str, path: str, shape: Shape, *, underscores: bool = False
    ) -> tuple[Placed, ...]:
        """Return where the change of a module belongs, () if the base does not have the module.

        `shape` is that of the change, `path` the module's name, with `underscores` as kohya writes
        it. Raises AmbiguousError where several tensors could be meant.
        """
        choices: list[tuple[Part, ...]] = [(Part(path),)]
        if underscores:
            try:
                choices = [(Part(dotted(path)),)]
            except (UnsupportedError, AmbiguousError):
                choices = []
        choices += [parts for way in choices for parts in _others(way[0].name)]
        found: dict[tuple[str | None, ...], tuple[Part, ...]] = {}
        for prefix in self._prefixes(component):
            if underscores:
                for name in self._flat.get(flat(prefix) + path, ()):
                    found[(name,)] = (Part(path),)
            for parts in choices:
                names = tuple(self._tensor(prefix + part.name) for part in parts)
                if None not in names:
                    found.setdefault(names, parts)
        if len(found) > 1:
            fitting = {
                names: parts
                for names, parts in found.items()
                if all(self._fits(n, part, shape) for n, part in zip(names, parts, strict=True))
            }
            found = fitting or dict(list(found.items())[:1])
        if len(found) > 1:
            raise AmbiguousError(
                f"{shown(path)} may be {some([str(names[0]) for names in found], 4)}",
                hint=f"{typed('--sub REGEX=REPL', 'sub=...')} gives the name that is meant",
            )
        return tuple(
            Placed(
                str(name),
                part.start * shape[0] // part.units,
                (part.start + part.length) * shape[0] // part.units,
                part.at * shape[0] // part.units,
            )
            for names, parts in found.items()
            for name, part in zip(names, parts, strict=True)
        )

    def _prefixes(self, component: str) -> tuple[str, ...]:
        known = _PREFIXES.get(component, _MODELS if component in _IMAGES else ())
        alone = not component.startswith("text_encoder") or self._encoders < 2
        return (*known, f"{component}." if component else "", *(("",) if alone else ()))

    def _tensor(self, module: str) -> str | None:
        names = (f"{module}.weight", module)
        return next((name for name in names if name in self.shapes), None)

    def _fits(self, name: str | None, part: Part, shape: Shape) -> bool:
        return prod(self.shapes[name or ""]) * part.units == prod(shape) * part.whole


def _others(path: str) -> tuple[tuple[Part, ...], ...]:
    known = spelled(path)
    return () if known is None else known[2]
