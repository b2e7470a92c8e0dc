"""URLs: what is one, and what of it may be shown."""

from __future__ import annotations

import pytest

from ckptkit import formats
from ckptkit.core.bytesource import Memory
from ckptkit.core.errors import FormatError
from ckptkit.core.text import behind_page, in_folder, is_url, shown_url, split_url
from ckptkit.remote.transport import refused

URLS = (
    "https://h/run.pth",
    "s3://b/run.pth",
    "hf://org/m/x",
    "simplecache::s3://b/x",
    "memory://x",
)
PATHS = ("run.pth", "/tmp/run.pth", "C:\\run.pth", "c://run.pth", "a::b", "./a://b", "", None)


def test_urls_and_paths() -> None:
    assert list(map(is_url, (*URLS, *PATHS))) == [True] * len(URLS) + [False] * len(PATHS)


@pytest.mark.parametrize(
    ("url", "safe"),
    [
        ("https://host/run.pth", "https://host/run.pth"),
        ("https://user:pa55@host/run.pth", "https://***@host/run.pth"),
        ("https://t0ken@host:81/run.pth", "https://***@host:81/run.pth"),
        ("https://user:p@55@host/run.pth", "https://***@host/run.pth"),
        ("https://host/run.pth?X-Amz-Signature=0", "https://host/run.pth?***"),
        ("https://host/a@b/run.pth", "https://host/a@b/run.pth"),
        ("HTTPS://user:pa55@host/run.pth", "HTTPS://***@host/run.pth"),
        ("sftp://user:pa55@host/run.pth", "sftp://user:***@host/run.pth"),
        ("abfs://container@account/run.pth", "abfs://container@account/run.pth"),
        ("hf://org/model@main/run.pth", "hf://org/model@main/run.pth"),
        ("simplecache::https://user:pa55@host/x?key=1", "simplecache::https://***@host/x?***"),
        ("what?.pth", "what?.pth"),
    ],
)
def test_secrets_are_masked(url: str, safe: str) -> None:
    assert shown_url(url) == safe


HUB, GITHUB = "https://huggingface.co", "https://github.com"


@pytest.mark.parametrize(
    ("page", "file"),
    [
        (f"{HUB}/org/model/blob/main/x.pth", f"{HUB}/org/model/resolve/main/x.pth"),
        (f"{HUB}/org/model/raw/main/a/x.pth?y", f"{HUB}/org/model/resolve/main/a/x.pth"),
        (f"{HUB}/datasets/o/d/blob/main/x", f"{HUB}/datasets/o/d/resolve/main/x"),
        (f"{GITHUB}/org/repo/blob/main/x.pth", f"{GITHUB}/org/repo/raw/main/x.pth"),
        (f"{HUB}/org/model/resolve/main/x.pth", None),
        ("https://example.org/org/model/blob/main/x.pth", None),
        ("runs/blob/x.pth", None),
    ],
)
def test_pages_about_files(page: str, file: str | None) -> None:
    assert behind_page(page) == file


def test_a_page_says_where_the_file_is() -> None:
    page = Memory(b"<!doctype html><html>", "https://huggingface.co/org/model/blob/main/x.pth")
    with pytest.raises(FormatError, match="is an HTML page") as caught:
        formats.read(page)
    assert (
        caught.value.hint
        == "the file itself is at https://huggingface.co/org/model/resolve/main/x.pth"
    )


def test_a_folder_keeps_the_query() -> None:
    folder, name = split_url("https://host/a/x.index.json?sig=1")
    assert (folder, name) == ("https://host/a?sig=1", "x.index.json")
    assert in_folder(folder, "y.bin") == "https://host/a/y.bin?sig=1"


@pytest.mark.parametrize(
    ("url", "folder", "other"),
    [
        ("memory://x.pth", "memory://", "memory://y"),
        ("memory:///x.pth", "memory:///", "memory:///y"),
        ("s3://bucket/x.pth", "s3://bucket/", "s3://bucket/y"),
        ("simplecache::memory://a/b/x.pth", "simplecache::memory://a/b/", "simplecache::memory://a/b/y"),
    ],
)  # fmt: skip
def test_a_root_may_contain_files(url: str, folder: str, other: str) -> None:
    found, name = split_url(url)
    assert (found.rstrip("/"), name) == (folder.rstrip("/"), "x.pth")
    assert in_folder(found, "y") == in_folder(folder, "y") == other


def test_a_repository_without_its_owner() -> None:
    error = ValueError("Repository id must be 'namespace/name', got 'gpt2'.")
    assert refused(error, "hf://gpt2").hint == "a repository has an owner: hf://OWNER/NAME"
    assert refused(error, "hf://org/gpt2").hint is None
