"""The split of tensors into files: huggingface_hub is the oracle."""

from __future__ import annotations

from itertools import islice

import pytest

from ckptkit.core.errors import LimitError, TensorError
from ckptkit.core.limits import LIMITS
from ckptkit.formats.shards import DEFAULT_SIZE, index_file, shard_names, split


@pytest.mark.parametrize(
    ("sizes", "limit", "expected"),
    [
        # of huggingface_hub's own documentation
        ([6, 6, 2, 6, 2, 2], 10, [[0], [1, 2], [3, 4, 5]]),
        ([], 10, [[]]),
        ([0], 10, [[0]]),
        ([5, 5], 10, [[0, 1]]),
        ([5, 5, 1], 10, [[0, 1], [2]]),
        ([11], 10, [[0]]),
        ([4, 11, 4], 10, [[1], [0, 2]]),
        ([11, 12], 10, [[0], [1]]),
        ([10, 0, 0], 10, [[0, 1, 2]]),
        ([0, 11], 10, [[1], [0]]),
    ],
)
def test_split(sizes: list[int], limit: int, expected: list[list[int]]) -> None:
    named = {str(n): size for n, size in enumerate(sizes)}
    assert split(named, limit) == [[str(n) for n in part] for part in expected]


def test_the_size_of_a_file_where_nobody_says_one() -> None:
    assert DEFAULT_SIZE == 5_000_000_000
    assert split({"a": 5_000_000_000, "b": 1}, None) == [["a"], ["b"]]
    assert split({"a": 4_999_999_999, "b": 1}, None) == [["a", "b"]]


def test_names() -> None:
    assert shard_names("model", ".safetensors", 1) == ["model.safetensors"]
    assert shard_names("pytorch_model", ".bin", 2) == [
        "pytorch_model-00001-of-00002.bin",
        "pytorch_model-00002-of-00002.bin",
    ]
    assert shard_names("model", ".safetensors", 123_456)[-1] == "model-123456-of-123456.safetensors"


def test_a_name_that_is_no_text() -> None:
    with pytest.raises(TensorError, match="cannot contain the name"):
        index_file("model.safetensors", {"\ud800": "a"}, {})


def test_an_index_that_no_reader_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    places = dict.fromkeys(map(str, islice(range(10**6), 100)), "x")
    (data,) = index_file("model", places, {}).segments
    monkeypatch.setattr("ckptkit.core.limits.LIMITS", type(LIMITS)(index_bytes=len(data)))  # type: ignore[arg-type]
    index_file("model", places, {})
    monkeypatch.setattr("ckptkit.core.limits.LIMITS", type(LIMITS)(index_bytes=len(data) - 1))  # type: ignore[arg-type]
    with pytest.raises(LimitError, match="index_bytes"):
        index_file("model", places, {})
