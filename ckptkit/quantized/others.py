"""Families that are named and not read: layouts of kernels, codebooks, rotated weights."""

from __future__ import annotations

from typing import NamedTuple

from ckptkit.quantized import group as g
from ckptkit.quantized.group import Family, Group, View


class Other(NamedTuple):
    """A family by its marks: codes, what must be beside them, their dtypes, what reads them."""

    name: str
    codes: str
    companions: tuple[str, ...]
    reader: str
    dtypes: tuple[str, ...] = ()


OTHERS = (
    Other("AQLM", "codes", ("codebooks", "scales"), "transformers with aqlm"),
    Other("EETQ", "weight", ("weight_scales",), "transformers with eetq", ("int8",)),
    Other("VPTQ", "indices", ("centroids.weight",), "vptq"),
    Other("VPTQ", "indices", ("centroids",), "vptq"),
    Other("EXL2", "q_weight", ("q_scale", "q_groups"), "exllamav2"),
    Other("EXL3", "trellis", ("suh", "svh"), "exllamav3"),
    Other("HIGGS", "weight", ("tables", "tables2"), "transformers with flute"),
    Other("SpQR", "dense_weights", ("row_offsets",), "transformers with spqr_quant"),
    Other("FP-Quant", "qweight", ("forward_hadamard_matrix",), "transformers with fp_quant"),
    Other("ParoQuant", "qweight", ("theta", "pairs"), "paroquant"),
    Other("QQQ", "B", ("s_channel", "s_group"), "GPTQModel"),
    Other("Marlin", "B", ("s",), "vLLM"),
    Other("compressed-tensors marlin-24", "weight_packed", ("meta",), "vLLM"),
    Other(
        "compressed-tensors sparse-bitmask",
        "compressed",
        ("bitmask", "row_offsets"),
        "compressed-tensors 0.10",
    ),
    Other(
        "compressed-tensors sparse-24-bitmask",
        "compressed",
        ("bitmask",),
        "compressed-tensors 0.10",
    ),
    Other("BitNet", "weight", ("weight_scale",), "transformers", ("uint8",)),
)
# quant_method in small letters: of these nothing is read, whatever the tensors look like
METHODS = {
    "aqlm": "AQLM", "eetq": "EETQ", "vptq": "VPTQ", "higgs": "HIGGS", "spqr": "SpQR",
    "bitnet": "BitNet", "quark": "Quark", "fp_quant": "FP-Quant", "fpquant": "FP-Quant",
    "sinq": "SINQ", "paroquant": "ParoQuant", "qqq": "QQQ", "exl2": "EXL2",
    "exl3": "EXL3", "marlin": "Marlin", "bitblas": "BitBLAS",
}  # fmt: skip


def recognize(view: View, mark: str) -> Group | None:
    """The first of the families whose codes are called `mark`, or that `mark` stands beside."""
    for other in OTHERS:
        for last in (other.codes, *other.companions):
            if mark.endswith(f".{last}"):
                found = _of(view, other, mark.removesuffix(f".{last}"))
                if found is not None:
                    return found
    return None


def _of(view: View, other: Other, stem: str) -> Group | None:
    codes = view.get(f"{stem}.{other.codes}", *other.dtypes)
    names = view.present(stem, (f".{each}" for each in other.companions))
    if (
        codes is None
        or len(names) < len(other.companions)
        or (other.name == "BitNet" and view.method != "bitnet")
    ):
        return None
    group = Group(
        other.name, other.name, f"{stem}.weight", codes.shape, (f"{stem}.{other.codes}", *names)
    )
    return g.refused(group, f"{other.name} is not read", f"{other.reader} reads it")


FAMILY = Family(
    "others", ", ".join(dict.fromkeys([*(each.name for each in OTHERS), *METHODS.values()])),
    recognize,
    marks=(
        "codebooks", "weight_scales", "indices", "q_weight", "trellis", "tables2", "dense_weights",
        "forward_hadamard_matrix", "theta", "s_channel", "s", "meta", "bitmask", "weight_scale",
    ),
    read=False,
)  # fmt: skip
