"""Digits, noise, and CIFAR-10 as Python 2 pickled it."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from struct import pack

import numpy
import pytest
import torch

import ckptkit
from ckptkit.trainer import data
from ckptkit.trainer.config import Config
from ckptkit.trainer.data import READ, REDRAW

COUNT = 10  # images in a file


def python2_batch(images: numpy.ndarray, labels: list[int]) -> bytes:
    """Protocol 2 as Python 2 wrote it: its strings are BINSTRINGs, of bytes and of text alike."""

    def text(value: bytes) -> bytes:
        return b"U" + bytes([len(value)]) + value

    array = (
        b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\nK\x00\x85" + text(b"b") + b"tR(K\x01"
        + b"(M" + pack("<H", len(images)) + b"M" + pack("<H", 3072) + b"t"
        + b"cnumpy\ndtype\n(" + text(b"u1") + b"K\x00K\x01tR(K\x03" + text(b"|")
        + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
        + b"\x89T" + pack("<i", images.nbytes) + images.tobytes() + b"tb"
    )  # fmt: skip
    numbers = b"](" + b"".join(b"K" + bytes([each]) for each in labels) + b"e"
    name = b"](" + text(b"leptodactylus_pentadactylus_s_000004.png") * len(labels) + b"e"
    entries = text(b"data") + array + text(b"labels") + numbers + text(b"filenames") + name
    return b"\x80\x02}(" + entries + b"u."


@pytest.fixture
def cifar(tmp_path: Path) -> Path:
    """A folder as the official one, of a few images."""
    numbers = numpy.random.default_rng(0)
    for name in (*data.TRAIN_FILES, data.TEST_FILE):
        images = numbers.integers(0, 256, (COUNT, 3072), dtype=numpy.uint8)
        (tmp_path / name).write_bytes(python2_batch(images, list(range(COUNT))))
    return tmp_path


def test_digits_are_held_out_by_turns() -> None:
    pytest.importorskip("sklearn")
    found = data.load(Config())
    assert found.train[0].shape == (1437, 1, 32, 32)
    assert found.test[0].shape == (360, 1, 32, 32)
    assert found.train[0].min() >= 0
    assert found.train[0].max() <= 1
    assert sorted(set(found.test[1].tolist())) == list(range(10))


def test_noise_is_the_same_for_a_seed() -> None:
    one, same, other = (data.load(Config(data="random", seed=seed)) for seed in (1, 1, 2))
    assert torch.equal(one.train[0], same.train[0])
    assert not torch.equal(one.train[0], other.train[0])
    assert one.shape == (3, 32, 32)
    assert data.load(Config(data="random", model="mlp")).shape == (1000,)


def test_S15_cifar10_of_python_2(cifar: Path) -> None:
    found = data.load(Config(data=f"cifar10:{cifar}"))
    expected = pickle.loads((cifar / "test_batch").read_bytes(), encoding="bytes")
    assert found.train[0].shape == (5 * COUNT, 3, 32, 32)
    assert found.test[1].tolist() == expected[b"labels"]
    images = expected[b"data"].reshape(-1, 3, 32, 32)
    assert torch.equal(found.test[0], torch.from_numpy(images).float() / 255)


def test_cifar10_of_python_3(cifar: Path) -> None:
    batch = {b"data": numpy.full((COUNT, 3072), 255, numpy.uint8), b"labels": [9] * COUNT}
    (cifar / "test_batch").write_bytes(pickle.dumps(batch, protocol=4))
    found = data.load(Config(data=f"cifar10:{cifar}"))
    assert torch.equal(found.test[0], torch.ones(COUNT, 3, 32, 32))


class Hostile:
    """Makes a folder where it is unpickled by Python's own pickle."""

    def __init__(self, place: Path) -> None:
        self.place = str(place)

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (self.place,)


def test_a_cifar10_file_is_not_run(cifar: Path) -> None:
    batch = {b"data": Hostile(cifar / "made"), b"labels": [0]}
    (cifar / "data_batch_1").write_bytes(pickle.dumps(batch, protocol=2))
    with pytest.raises(ckptkit.CkptkitError, match="data_batch_1"):
        data.load(Config(data=f"cifar10:{cifar}"))
    assert not (cifar / "made").exists()


@pytest.mark.parametrize(
    "batch",
    [
        [1, 2],
        {"labels": [1]},
        {"data": numpy.zeros((2, 3072), numpy.uint8), "labels": [1]},
        {"data": numpy.zeros((2, 3072), numpy.float32), "labels": [1, 2]},
        {"data": numpy.zeros((2, 3072), numpy.uint8), "labels": [1, 10]},
        {"data": numpy.zeros((2, 3072), numpy.uint8), "labels": ["cat", "dog"]},
    ],
)
def test_other_pickles_are_refused(cifar: Path, batch: object) -> None:
    (cifar / "test_batch").write_bytes(pickle.dumps(batch, protocol=2))
    with pytest.raises(ckptkit.CkptkitError, match=r"test_batch: .*CIFAR-10"):
        data.load(Config(data=f"cifar10:{cifar}"))


def test_the_wrong_folder_is_told_from_the_right_one(tmp_path: Path) -> None:
    def hint() -> str:
        with pytest.raises(
            ckptkit.CkptkitError, match="is not the folder of CIFAR-10: data_batch_1 is missing"
        ) as caught:
            data.load(Config(data=f"cifar10:{tmp_path}"))
        return caught.value.hint or ""

    assert "cifar-10-python.tar.gz" in hint()
    for name in ("train", "meta"):
        (tmp_path / name).touch()
    assert "CIFAR-100" in hint()
    (tmp_path / "cifar-10-batches-py").mkdir()
    assert hint() == f"use --data cifar10:{tmp_path / 'cifar-10-batches-py'}"


@pytest.mark.parametrize("name", ["digit", "cifar10:", "cifar10"])
def test_unknown_data(name: str) -> None:
    with pytest.raises(ckptkit.CkptkitError, match="unknown data set") as caught:
        data.load(Config(data=name))
    assert caught.value.hint == "use --data with digits, random or cifar10:DIR"


def test_lines_are_neighbours_side_by_side() -> None:
    images = torch.arange(9.0).view(9, 1, 1, 1).expand(9, 1, 2, 2)
    lines, texts = READ.prepare(images, torch.arange(9))
    assert lines.shape == (2, 1, 2, 8)
    assert lines[1, 0].tolist() == [[4.0, 4.0, 5.0, 5.0, 6.0, 6.0, 7.0, 7.0]] * 2
    assert texts.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_reading_drops_blanks_and_repetitions() -> None:
    path = torch.tensor(
        [[0, 1, 1, 0, 1, 3], [1, 1, 1, 1, 0, 0]]
    )  # the blank is 0, digit n is n + 1
    scores = torch.nn.functional.one_hot(path, 4).float()
    assert READ.correct(scores, torch.tensor([[0, 0, 2], [0, 0, 0]])).tolist() == [1.0, 0.0]


def test_a_painting_is_right_where_it_is_on_the_same_side_of_grey() -> None:
    images, targets = REDRAW.prepare(torch.tensor([[0.0, 0.4, 0.6, 1.0]]), torch.zeros(1))
    assert targets.tolist() == [pytest.approx([-1.0, -0.2, 0.2, 1.0])]
    assert REDRAW.correct(torch.tensor([[-0.1, 0.1, 0.1, 0.1]]), images).tolist() == [0.75]


@pytest.mark.parametrize("model", ["cnn", "crnn"])
def test_validation_images_are_no_training_images(model: str) -> None:
    one, other = (data.load(Config(data="random", model=model, validation=held)) for held in (4, 0))
    assert one.validation is not None
    inputs = one.validation[0]
    assert len(inputs) + len(one.train[0]) == len(other.train[0])
    kept = {each.numpy().tobytes() for each in one.train[0]}
    assert not kept & {each.numpy().tobytes() for each in inputs}
    assert torch.equal(one.test[0], other.test[0])
    with pytest.raises(ckptkit.CkptkitError, match="holds out every image"):
        data.load(Config(data="random", model=model, validation=1))


def test_the_digits_are_trained_on_in_several_orders() -> None:
    pytest.importorskip("sklearn")
    lines, digits = (data.load(Config(model=model)).train for model in ("crnn", "cnn"))
    assert len(lines[0]) == 6 * len(digits[0]) // 4
    sums = [part.sum().item() for part in (lines[0], digits[0])]
    assert sums[0] == pytest.approx(6 * sums[1], rel=1e-3)
