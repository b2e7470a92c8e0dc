"""The command line in this process, for tests that also use the package ckptkit."""

from tests.cli.conftest import ckptkit as command  # noqa: F401
