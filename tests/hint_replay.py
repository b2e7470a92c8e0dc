"""Run every command that a message of the test suite printed, on the files it was printed for.

With ``CKPTKIT_HINTS=FOLDER`` in the environment, the tests keep the commands of each message there,
with copies of the files they name. ``python -m tests.hint_replay FOLDER`` runs them and prints those
that fail. Messages in which only names and numbers differ are kept `PER_MESSAGE` times in each test
process; a command is not kept if a file that it names is larger than `SMALL` bytes.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import stat
import sys
from collections import Counter
from contextlib import chdir, suppress
from glob import glob
from pathlib import Path
from typing import Any

from click.testing import CliRunner, Result

from ckptkit.cli import main
from ckptkit.core.errors import FormatError
from ckptkit.publish.in_place import journals_of, parse
from tests.hints import commands_in

PER_MESSAGE = int(os.environ.get("CKPTKIT_HINTS_PER_MESSAGE", "3"))
SMALL, FEW = 20_000_000, 200  # bytes and files of a folder that is copied with a file in it
ANSWERS = {"diff", "doctor", "scan", "verify", "check", "digest", "stats", "show"}  # 1 is an answer
_kept: Counter[str] = Counter()


def keep_all() -> None:
    """Keep the commands of the messages of each command that runs in this process from now on."""
    original = CliRunner.invoke

    def invoke(runner: CliRunner, cli: Any, args: Any = None, *more: Any, **named: Any) -> Result:
        result = original(runner, cli, args, *more, **named)
        if cli is main:
            keep(f"{result.stdout}\n{result.stderr}", tuple(args or ()), None)
        return result

    if os.environ.get("CKPTKIT_HINTS"):
        CliRunner.invoke = invoke  # type: ignore[method-assign]


def keep(text: str, typed: tuple[object, ...], cwd: Path | None) -> None:
    """Keep the commands in `text`, which ``ckptkit *typed`` printed in the folder `cwd`."""
    folder = os.environ.get("CKPTKIT_HINTS")
    if not folder or "ckptkit " not in text or _is_page(typed):
        return
    here = os.path.abspath(cwd or os.getcwd())
    for words in commands_in(text):
        if "-" in words or any(word.startswith("hf://") for word in words):
            continue  # standard input is gone, and the Hub is not reached here
        template = " ".join(re.sub(r"\S*[/.\d]\S*", "*", word) for word in words)
        if _kept[template] < PER_MESSAGE:
            case = Path(folder, f"{os.getpid()}-{_kept.total()}")
            case.mkdir(parents=True)
            try:
                _save(case, words, here, [str(word) for word in typed])
                _kept[template] += 1
            except Exception as error:
                shutil.rmtree(case)  # the next command of this process gets the same name
                if not isinstance(error, _TooLargeError):
                    raise


class _TooLargeError(Exception):
    """A file or folder that a command names is too large to be kept."""


def _is_page(typed: tuple[object, ...]) -> bool:
    """Return whether the output is a page of help, whose examples are tested elsewhere, or JSON."""
    return {"--help", "--help-all", "-h", "--json"} & {*typed} != set() or typed[:1] in [
        (),
        ("env",),
        ("help",),
        ("completion",),
    ]


def _save(case: Path, words: list[str], here: str, typed: list[str]) -> None:
    """Write the command, and copies of the files it names below ``case/files``."""
    files = case / "files"
    inside = f"{files}{here}"
    os.makedirs(inside)
    moved = [_moved(word, here, str(files)) for word in words]
    test = os.environ.get("PYTEST_CURRENT_TEST", "")
    about = {"words": moved, "printed": words, "typed": typed, "cwd": inside, "test": test}
    (case / "case.json").write_text(json.dumps(about))


def _moved(word: str, here: str, files: str) -> str:
    """Copy the files that `word` names or matches; return `word` for the copies."""
    if "\0" in word or len(os.fsencode(word)) > 1000:
        return word
    path = os.path.normpath(os.path.join(here, word))
    if os.path.lexists(path):
        _copy(path, files + path)
    elif matches := glob(path, recursive=True):
        for match in matches:
            _copy(match, files + match)
    elif os.path.isabs(word) and os.path.isdir(os.path.dirname(path)):
        os.makedirs(os.path.dirname(files + path), exist_ok=True)
    return files + word if os.path.isabs(word) else word


def _copy(path: str, to: str) -> None:
    """Copy a file or folder, with the folder that a file is in where that is small."""
    folder = path if os.path.isdir(path) else os.path.dirname(path)
    if _is_small(folder):
        target = to if folder == path else os.path.dirname(to)
        shutil.rmtree(target, ignore_errors=True)  # copied before: its links cannot be replaced
        shutil.copytree(folder, target, symlinks=True, ignore=_special, dirs_exist_ok=True)
        _adopt_journals(target)
    elif folder == path or os.path.getsize(path) > SMALL:
        raise _TooLargeError(path)
    elif os.path.isfile(path):
        os.makedirs(os.path.dirname(to), exist_ok=True)
        shutil.copy2(path, to)


def _adopt_journals(folder: str) -> None:
    """Make the journals of interrupted edits in place those of the copied files."""
    for path, file in journals_of(folder):
        with suppress(FormatError, OSError):
            journal = parse(Path(path).read_bytes())
            Path(path).write_bytes(journal._replace(inode=os.stat(file).st_ino).dump())


def _is_small(folder: str) -> bool:
    found = [os.path.join(at, name) for at, _, names in os.walk(folder) for name in names]
    return len(found) <= FEW and sum(os.lstat(path).st_size for path in found) <= SMALL


def _special(folder: str, names: list[str]) -> list[str]:
    """Return the names of what cannot be copied: pipes, sockets, devices."""
    kinds = {name: os.lstat(os.path.join(folder, name)).st_mode for name in names}
    plain = (stat.S_ISREG, stat.S_ISDIR, stat.S_ISLNK)
    return [name for name, mode in kinds.items() if not any(is_kind(mode) for is_kind in plain)]


def failure(case: Path) -> str | None:
    """Run the command of `case`; return a report if it fails, None if it works."""
    about = json.loads((case / "case.json").read_text())
    words = about["words"]
    with chdir(about["cwd"]):
        done = CliRunner().invoke(main, words[1:])
        if ": exists" in done.output:  # --force is what that message says to add
            done = CliRunner().invoke(main, [*words[1:], "--force"])
    is_answer = words[1] in ANSWERS or words[1:3] == ["lora", "check"]
    allowed = {0, 1} if is_answer else {0}
    unnamed = [
        word for word in about["printed"][2:] if re.fullmatch(r"[A-Z][A-Z_]*(\.\.\.)?", word)
    ]
    if done.exit_code in allowed and not unnamed:
        return None
    lines = [
        f"{shlex.join(about['printed'])} -> {done.exit_code}",
        f"  printed by: ckptkit {shlex.join(about['typed'])}",
        f"  in: {about['test']}",
        *(f"  | {line}" for line in done.output.splitlines()[-6:]),
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    cases = sorted(Path(sys.argv[1]).iterdir())
    failures = [report for case in cases if (report := failure(case))]
    print(*failures, sep="\n\n")
    print(f"{len(cases)} commands of messages run, {len(failures)} failed")
    sys.exit(1 if failures or not cases else 0)
