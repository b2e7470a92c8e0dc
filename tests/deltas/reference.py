"""Encoders and a decoder of deltas, written from the descriptions in `ckptkit.deltas.forms`."""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import blake3
import numpy as np
import torch
import xxhash
import zstandard
from safetensors import safe_open
from safetensors.torch import save_file

StateDict = Mapping[str, torch.Tensor]
HASHES: dict[str, Any] = {
    "xxh3-128": lambda data: xxhash.xxh3_128(data).hexdigest(),
    "blake3": lambda data: blake3.blake3(data).hexdigest(),
    "adler32": lambda data: f"{zlib.adler32(data):08x}",
    "sha256": lambda data: hashlib.sha256(data).hexdigest(),
}


def raw(tensor: torch.Tensor) -> bytes:
    """The elements, row-major, little-endian."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def frame(old: bytes, new: bytes, encoding: str) -> bytes:
    before, after = np.frombuffer(old, np.uint8), np.frombuffer(new, np.uint8)
    if encoding == "xor":
        data = (before ^ after).tobytes()
    else:
        places = np.flatnonzero(before != after).astype("<u4")
        data = len(places).to_bytes(4, "little") + places.tobytes() + after[places].tobytes()
    return zstandard.ZstdCompressor(level=1).compress(data)


def as_tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def write_slime(
    folder: Path,
    old: StateDict,
    new: StateDict,
    encoding: str = "xor",
    checksum: str = "xxh3-128",
    version: int = 1,
    base_version: int | None = None,
    said: Mapping[str, str] | None = None,
) -> Path:
    """Write a version folder as slime does, all in one file; `said` replaces entries of its index."""
    folder.mkdir(parents=True)
    changed = [name for name in new if raw(old[name]) != raw(new[name])]
    frames = {n: as_tensor(frame(raw(old[n]), raw(new[n]), encoding)) for n in changed}
    file = "model-00000-of-00001.safetensors"
    if frames:
        save_file(frames, folder / file, {n: HASHES[checksum](raw(new[n])) for n in changed})
    metadata = {
        "version": f"{version:06d}",
        "base_version": f"{version - 1 if base_version is None else base_version:06d}",
        "delta_encoding": encoding,
        "compression_format": "zstd",
        "checksum_format": checksum,
        **(said or {}),
    }
    index = {"metadata": metadata, "weight_map": dict.fromkeys(frames, file)}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def write_skyrl(folder: Path, old: StateDict, new: StateDict, version: int = 1) -> Path:
    folder.mkdir()
    changed = [name for name in new if raw(old[name]) != raw(new[name])]
    frames = {n: as_tensor(frame(raw(old[n]), raw(new[n]), "xor")) for n in changed}
    file = "delta-rank00000-file000000.safetensors"
    save_file(frames, folder / file)
    rows = [
        {
            "name": n,
            "dtype": str(new[n].dtype).removeprefix("torch."),
            "shape": [*new[n].shape],
            "uncompressed_num_bytes": new[n].nbytes,
            "compressed_num_bytes": len(frames[n]),
            "payload_file": file,
            "payload_key": n,
            "checksum": HASHES["xxh3-128"](raw(new[n])),
            "checksum_algorithm": "xxh3-128",
        }
        for n in changed
    ]
    manifest = {"version": version, "base_version": version - 1, "tensors": rows}
    manifest["payload_files"] = [file]
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


def write_trl(path: Path, old: StateDict, new: StateDict, encoding: str) -> Path:
    """Write a patch as TRL's branches do: `gap_delta` or `raw` of the later, "" for the first."""
    tensors: dict[str, torch.Tensor] = {}
    for name, after in new.items():
        flat = after.reshape(-1)
        places = torch.nonzero(flat != old[name].reshape(-1)).reshape(-1).to(torch.int32)
        values = flat[places.long()]
        if encoding == "":
            tensors |= {f"{name}.indices": places, f"{name}.values": values}
            continue
        coded = places
        if encoding == "gap_delta":
            gaps = np.diff(places.numpy().astype(np.int64), prepend=-1) - 1
            fits = not len(gaps) or gaps.max() <= 0xFFFF
            coded = torch.from_numpy(gaps.astype(np.uint16 if fits else np.uint32))
        tensors |= {f"{name}.idx": coded, f"{name}.val": values}
    said = {"sparse": "True", "model_version": "1"} | ({"encoding": encoding} if encoding else {})
    save_file(tensors, path, said)
    return path


def decoded(folder: Path, base: Mapping[str, bytes]) -> dict[str, bytes]:
    """Apply a folder of slime's format to the bytes of tensors, as its receiver does."""
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    said = index["metadata"]
    found = dict(base)
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "np") as file:
            sums = file.metadata()
            for name in file.keys():  # noqa: SIM118 - it is no dict
                data = zstandard.ZstdDecompressor().decompress(file.get_tensor(name).tobytes())
                made = np.frombuffer(base[name], np.uint8).copy()
                if said["delta_encoding"] == "xor":
                    made ^= np.frombuffer(data, np.uint8)
                else:
                    count = int.from_bytes(data[:4], "little")
                    places = np.frombuffer(data[4 : 4 + 4 * count], "<u4")
                    made[places] = np.frombuffer(data[4 + 4 * count :], np.uint8)
                found[name] = made.tobytes()
                assert sums[name] == HASHES[said["checksum_format"]](found[name])
                assert index["weight_map"][name] == path.name
    return found
