"""The README and the manual are true: their commands run and print what is shown; tests/readme.py
says how.

``python -m tests.test_readme`` puts today's output where it is another; given other files, it tests
or refreshes these: ``python -m tests.test_readme --check part.md``.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import click
import pytest

import ckptkit
from ckptkit.cli import COMMANDS, main
from tests import forked, readme
from tests.conftest import ENVIRONMENT, ROOT
from tests.readme import README, Session, is_shown, sandbox, shell

TEXT = README.read_text(encoding="utf-8")
MANUAL = sorted((Path(ckptkit.__file__).parent / "help").glob("*.md"))
PAGES = {path.stem: path.read_text(encoding="utf-8") for path in (README, *MANUAL)}
EVERYTHING = "\n".join(PAGES.values())
BYTES = 12_000  # of the README


def named(name: str) -> str:
    """The block that follows the line ``<!-- name -->``."""
    return TEXT.split(f"<!-- {name} -->\n```sh\n")[1].split("\n```")[0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sandbox(tmp_path_factory.mktemp("readme"))


def test_main_job(tmp_path: Path) -> None:
    """The first command, without what sets up."""
    lines = named("main job").splitlines()
    setup = [line for line in lines if "pip install" in line]
    assert len(setup) == 1
    done = shell("\n".join(line for line in lines if line not in setup), sandbox(tmp_path))
    assert done.returncode == 0, done.stdout
    for word in ("inspect", "strip-module", "remap", "diff", "convert"):
        assert f"ckptkit {word}" in "\n".join(lines)


def test_tests_command() -> None:
    assert named("tests").splitlines()[0].endswith("pytest")


def untrue(text: str, folder: Path) -> list[str]:
    """The commands that print something else than what is shown."""
    session = Session(folder)
    found = []
    for example in readme.examples(text):
        said = session.run(example.command)
        if example.shown is None and session.code:
            found.append(f"line {example.line}, setup: exit code {session.code}\n{said}")
        elif example.shown is not None and not is_shown(example.shown, said):
            found.append(f"line {example.line}: $ {example.command}\n{said}")
    return found


@pytest.mark.parametrize("name", PAGES)
def test_examples(name: str, tmp_path: Path) -> None:
    """In order: later ones use what earlier ones wrote."""
    assert untrue(PAGES[name], sandbox(tmp_path)) == []


def test_there_are_examples() -> None:
    assert len(list(readme.examples(TEXT))) >= 5
    assert len(README.read_bytes()) <= BYTES


@pytest.mark.parametrize(
    "name", [name for name, text in PAGES.items() if readme.blocks(text, "python")]
)
def test_library_runs(name: str, tmp_path: Path) -> None:
    done = forked.program(readme.program(PAGES[name], run=True), cwd=sandbox(tmp_path))
    assert done.returncode == 0, done.output


# What the types of pages do not depend on: the bodies of our functions, and most of torch.
MYPY = """[mypy]
ignore_missing_imports = True
[mypy-ckptkit.*]
ignore_errors = True
[mypy-torch._dynamo.*,torch._inductor.*,torch.onnx.*,torch.fx.*,torch.ao.*,torch.export.*,torch._export.*,torch.distributed.*,torch.testing.*,torch.jit.*,torch._functorch.*,torch._refs.*,torch._decomp.*,torch.distributions.*,torch._higher_order_ops.*,sympy.*,pydantic.*,pyparsing.*,matplotlib.*,fsspec.*,distributed.*,aiohttp.*,huggingface_hub.*]
follow_imports = skip
"""


def mistyped(pages: dict[str, str], folder: Path) -> str:
    """Return the errors of mypy --strict in the Python of pages; "" if there are none."""
    for name, text in pages.items():
        (folder / f"page_{name.replace('-', '_')}.py").write_text(readme.program(text, run=False))
    (folder / "mypy.ini").write_text(MYPY)
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--python-version", "3.11", "--no-pretty", "--config-file", str(folder / "mypy.ini"), "--cache-dir", ".mypy_cache/pages", *map(str, sorted(folder.glob("*.py")))],
        capture_output=True, encoding="utf-8", cwd=ROOT, env={**ENVIRONMENT, "MYPYPATH": str(ROOT)}, timeout=600,
    )  # fmt: skip
    return "" if done.returncode == 0 else done.stdout + done.stderr


def test_library_is_typed(tmp_path: Path) -> None:
    pytest.importorskip("mypy", reason="mypy is not installed")
    pages = {name: text for name, text in PAGES.items() if readme.blocks(text, "python")}
    assert "README" in pages
    assert mistyped(pages, tmp_path) == ""


def test_types_are_looked_at(tmp_path: Path) -> None:
    pytest.importorskip("mypy", reason="mypy is not installed")
    lines = [
        "import ckptkit",
        "ck: int = ckptkit.open(3)",
        "part: str = ckptkit.open('a')['model']",
        "row: str = ckptkit.open('a').weights['w'][0]",
        "made: str = ckptkit.open('a').weights['w'].torch()",
        "size: int = ckptkit.open('a').weights['w'].numel()",
    ]
    said = mistyped({"wrong": "\n".join(["", "```python", *lines, "```", ""])}, tmp_path)
    errors = [line for line in said.splitlines() if "page_wrong.py" in line]
    assert [int(line.split(":")[1]) for line in errors] == [4, 4, 5, 6, 7]
    assert all("arg-type" in line or "assignment" in line for line in errors)


def test_every_command_and_public_name_is_in_it() -> None:
    for command in COMMANDS:
        assert f"ckptkit {command}" in EVERYTHING, command
    for name in ckptkit.__all__:
        assert name.startswith("__") or re.search(
            rf"`[^`\n]*\b{name}\b|ckptkit\.{name}\b", EVERYTHING
        ), name


def calls(text: str) -> set[tuple[str, ...]]:
    """The command lines that stand in sentences, tables and blocks, their words as far as they can
    be told."""
    lines = "\n".join(block.text for block in readme.blocks(text, "console", "sh", "setup", "yaml"))
    found = re.findall(r"`ckptkit ([^`\n]+)`", text) + re.findall(
        r"^(?:\$ )?ckptkit ([^\n#|>\\]+)", lines, re.MULTILINE
    )
    return {tuple(words.split()) for words in found} - {
        ("inspekt", "run.pth")
    }  # which shows what a typo gives


def test_commands_and_options_exist() -> None:
    """Whatever their arguments stand for."""
    assert {words: wrong for words in calls(EVERYTHING) if (wrong := unknown(words))} == {}


def unknown(words: tuple[str, ...]) -> set[str]:
    """The options of a command line that the command does not have."""
    command: click.Command | None = main
    names = list(words)
    while (
        isinstance(command, click.Group) and names and not names[0].isupper() and names[0][0] != "-"
    ):
        command = command.get_command(click.Context(command), names.pop(0))
    assert command is not None, words
    known = {option for parameter in command.params for option in parameter.opts} | {
        "-h",
        "--help",
        "--version",
    }
    used = {
        word.split("=")[0].rstrip(",.;'\")") for word in names if re.match(r"['\"(]?--?[a-z]", word)
    }
    return set() if isinstance(command, click.Group) else used - known


def test_every_field_of_inspect_json_is_documented(folder: Path) -> None:
    documented = set(re.findall(r"`(\w+)`", PAGES["json"]))
    done = shell(
        "ckptkit inspect --json --digest fixtures/torch-zip/namespace_and_numpy.pth", folder
    )
    (file,) = json.loads(done.stdout)["files"]
    parts = [file, file["totals"], file["tensors"][0], file["values"][0], *file["objects"][:1]]
    assert {field for part in parts for field in part} <= documented


def test_installs_from_the_checkout() -> None:
    """The package index has another project of this name. Hints in the code are checked too."""
    other = re.compile(r"pip3? install (?:[^.\n]* )?['\"]?ckptkit")
    assert other.search("pip install 'ckptkit[delta]'") and other.search("pip install ckptkit")
    sources = (path.read_text("utf-8") for path in Path(ckptkit.__file__).parent.rglob("*.py"))
    assert [found[0] for text in (EVERYTHING, *sources) for found in other.finditer(text)] == []


PAGE = """
<!-- setup
printf 'one\\ntwo\\n' > made.txt
-->
```console
$ cat \\
    made.txt
one
...
$ false
$ echo $? of 1,234
1 of ...
```

<!-- not run: no such machine -->
```console
$ rm -rf everything
```
"""


def test_how_it_is_read(tmp_path: Path) -> None:
    found = [(example.command, example.shown) for example in readme.examples(PAGE)]
    cat = "cat \\\n    made.txt"
    assert found[1:] == [(cat, "one\n...\n"), ("false", ""), ("echo $? of 1,234", "1 of ...\n")]
    assert untrue(PAGE, tmp_path) == []
    assert untrue(PAGE.replace("one\n...", "two\n..."), tmp_path) == [
        f"line 6: $ {cat}\none\ntwo\n"
    ]
    assert untrue(PAGE.replace("> made.txt", "> made.txt; false"), tmp_path)[0].startswith(
        "line 3, setup: exit code 1"
    )


def test_how_it_is_refreshed(tmp_path: Path) -> None:
    """Correct lines are not changed, dots included."""
    assert readme.refreshed(PAGE, Session(tmp_path).run) == PAGE
    assert readme.refreshed(
        PAGE.replace("one\n...", "two\n..."), Session(tmp_path).run
    ) == PAGE.replace("\n...", "\ntwo")


def main_program(check: bool, paths: list[Path]) -> int:
    """Refresh or check the README, or other files as if each were one; the exit code."""
    wrong = 0
    for path in paths or [README]:
        text = path.read_text(encoding="utf-8")
        with tempfile.TemporaryDirectory() as name:
            where = sandbox(Path(name))
            if not check:
                path.write_text(readme.refreshed(text, Session(where).run), encoding="utf-8")
                continue
            for found in (
                *untrue(text, where),
                *filter(None, [mistyped({path.stem: text}, where)]),
            ):
                wrong = 1
                print(f"{path}: {found}")
    return wrong


if __name__ == "__main__":
    given = sys.argv[1:]
    sys.exit(main_program("--check" in given, [Path(each) for each in given if each != "--check"]))
