"""Submissions that want points without work, or take the grader down with them. For `prove` and the tests."""

from __future__ import annotations

import ast
from textwrap import indent

FORGED = r'''
import os, json
lines = [{"import": ""}]
for n in range(40):
    lines += [{"id": n, "case": c, "value": True, "verdict": "fails"} for c in range(20)]
    lines += [{"id": n, "end": "ok"}, {"id": n, "left": 0}]
data = "\n" + "\n".join(json.dumps(line) for line in lines) + "\n"
print("passed", flush=True)
for end in range(1, 64):
    try:
        os.write(end, data.encode())
    except OSError:
        pass
return True
'''
SOLUTION = r'''
import gc, importlib, pkgutil, sys, types
sys.path[:0] = ["/usr/lib/python3/dist-packages", ".", "/app", "/app/lib", "/srv", "/opt"]
name = {name!r}
import mini_rome
for found in pkgutil.walk_packages(mini_rome.__path__, "mini_rome.", onerror=lambda _: None):
    try:
        importlib.import_module(found.name)
    except BaseException:
        continue
for guess in ("chunking", "masks", "collator", "credit", "loss", "resample", "verify", "course.process"):
    try:
        importlib.import_module("mini_rome." + guess)
    except ImportError:
        continue
others = [f for f in gc.get_objects() if isinstance(f, types.FunctionType) and f.__name__ == name]
others = [f for f in others if f.__module__ != "exercises"]
return others[0](*arguments)
'''
TAMPER = r'''
import builtins, json, os, sys
for folder, _, names in os.walk("/app"):
    for each in names:
        if each.endswith(".py"):
            with open(os.path.join(folder, each), "w") as file:
                file.write("raise SystemExit(0)\n")
from mini_rome.course import harness, wire
class Equal:
    __eq__ = __ge__ = __le__ = lambda *_: True
    __ne__ = lambda *_: False
    __hash__ = object.__hash__
wire.encode = harness.wire.encode = lambda value: {"value": True, "expected": True, "points": 100}
harness.explain = lambda error: ""
json.dumps = lambda *a, **k: '{"verdict": "holds", "passed": true, "value": true}'
builtins.print = builtins.sorted = lambda *a, **k: None
os._exit = lambda code: None
return Equal()
'''
READ = r'''
import json, os, re
found = []
for top in ("/app", "/tmp", "/home", "/root", "/srv", "/proc/1", "/proc/self", f"/proc/{os.getppid()}"):
    for folder, folders, names in os.walk(top):
        folders[:] = folders[:50]
        for each in names[:200]:
            path = os.path.join(folder, each)
            if os.path.isfile(path) and re.search("json|py$|txt|environ|cmdline", each):
                try:
                    with open(path, errors="replace") as file:
                        found += re.findall(r'"expected": ?(.*)', file.read(1 << 20))
                except OSError:
                    continue
        if len(folder) > 60:
            folders[:] = []
return json.loads(found[0])[0]["value"] if found else None
'''
LIES = r'''
import os
class Number(int):
    __eq__ = __le__ = __ge__ = lambda *_: True
    __sub__ = __rsub__ = __abs__ = lambda *_: Number()
    __hash__ = int.__hash__
    __repr__ = __str__ = lambda _: "1e999"
class Text(str):
    __eq__ = lambda *_: True
    __hash__ = str.__hash__
class Pickled:
    __module__ = "torch"
    dtype = "torch.float64"
    def tolist(self): return [Number(), Text("x"), float("nan"), {"~pickle": "gASV"}]
    def __reduce__(self): return os.system, ("touch /tmp/executed",)
class Rows(list):
    __len__ = lambda _: 10 ** 6
    __eq__ = lambda *_: True
Number.__name__ = Text.__name__ = "n" * 10 ** 6
return {Number(): Pickled(), "~tensor": Rows([Text("1"), 10 ** 4000]), "x": Number()}
'''
FLOOD = r'''
import os
def say(text):
    for end in range(1, 64):
        try:
            os.write(end, text.encode() + b"\\n")
        except OSError:
            pass
key = "1"
for _ in range(60):
    key = '{"~dict":[[' + key + ',1]]}'
for n in range(20):
    say('\\n{"id":%d,"case":0,"value":%s}' % (n, key))
    say('{"id":%d,"case":1,"value":%s}' % (n, "[" * 900 + "]" * 900))
    say('{"id":%d,"case":2,"value":1%s}' % (n, "0" * 4000))
    say('{"id":%d,"left":%s}{"id":[],"case":{}}' % (n, "[" * 900 + "]" * 900))
    say('{"id":%d,"case":0,"ask":%s}' % (n, "[" * 400 + key + "]" * 400))
    say('{"id":%d,"case":0,"verdict":["holds"],"error":%s}' % (n, '"' + "x" * 10 ** 5 + '"'))
raise ValueError("x" * 10 ** 6)
'''
# One body for every function of a skeleton; {name!r} is the function's name, `arguments` what it was given.
BODIES = {
    "os._exit(0)": "import os\nos._exit(0)",
    "sys.exit": "raise SystemExit(0)",
    "prints passed, forges the grader's lines": FORGED,
    "imports the solution": SOLUTION,
    "tampers with harness, encoder and builtins": TAMPER,
    "looks for the answers": READ,
    "refuses everything, ValueError": "raise ValueError('no')",
    "refuses everything, SnapshotRefused": "import mini_rome.errors as e\nraise e.SnapshotRefused",
    "refuses everything, VerifierError": "import mini_rome.errors as e\nraise e.VerifierError",
    "fails every assertion": "assert False",
    "returns objects that are equal to everything": LIES,
    "floods the channel with what is hard to read": FLOOD,
    "closes its channel": "import os\nos.closerange(0, 64)",
    "returns its input": "return arguments[0]",
    "returns nothing": "return None",
    "returns an empty list": "return []",
    "guesses whether a test holds": "import os\nassert os.urandom(1)[0] % 2",
}
AT_IMPORT = {
    "os._exit(0) at import": "import os\nos._exit(0)",
    "sys.exit at import": "raise SystemExit(0)",
    "a syntax error": "def (",
    "hangs at import": "while True: pass",
    "answers before it is asked": f"def _forge():\n{indent(FORGED, '    ')}\n\n_forge()",
    "ignores signals and sleeps at import": (
        "import signal, time\nfor n in range(1, 32):\n    if n not in (9, 19): signal.signal(n, signal.SIG_IGN)\n"
        "time.sleep(1000)"
    ),
}
RUIN = {  # one function of an otherwise right submission: the others keep their points
    "hangs": ("while True: pass", "did not end within"),
    "ignores signals and hangs": (
        "import signal\nfor n in range(1, 32):\n    if n not in (9, 17, 19): signal.signal(n, signal.SIG_IGN)\n"
        "while True: pass", "did not end within",
    ),
    "forks without end": ("import os\nwhile True: os.fork()", ""),
    "allocates 10 GB": ("data = bytearray(10 << 30)\nreturn data", "MemoryError"),
    "fills the shared memory": (
        "import mmap\nheld = []\nwhile True:\n    block = mmap.mmap(-1, 1 << 28)\n"
        "    block.write(b'x' * (1 << 28))\n    held.append(block)", "",
    ),
    "keeps shared memory": (
        "import ctypes\nlibc = ctypes.CDLL(None)\nlibc.shmat.restype = ctypes.c_void_p\nfor n in range(32):\n"
        "    place = libc.shmat(libc.shmget(n + 1, 1 << 26, 0o1600), None, 0)\n"
        "    ctypes.memset(place, 1, 1 << 26)", "",
    ),
    "fills the disk": (
        "import os\nfor top in ('/app/work', '/tmp', '/dev/shm', os.path.expanduser('~')):\n    try:\n"
        "        with open(f'{top}/full', 'wb') as file:\n            while True: file.write(bytes(1 << 20))\n"
        "    except OSError:\n        continue", "",
    ),
    "leaves a daemon": (
        "import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n        time.sleep(1000)\n"
        "    os._exit(0)\nreturn 'x'", "",
    ),
    "exits": ("import os\nos._exit(0)", "ended its process"),
    "kills its parent": ("import os, signal\nos.kill(os.getppid(), signal.SIGKILL)\nreturn 1", ""),
    "kills all it can": ("import os, signal\nos.kill(-1, signal.SIGKILL)\nreturn 1", ""),
}  # fmt: skip


def functions(source: str) -> list[str]:
    """Names of the exercises of a file."""
    return [node.name for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)]


def with_body(source: str, body: str, names: list[str] | None = None) -> str:
    """`source` with functions of these names (default: all) defined again at its end, with that body."""
    parts = [source]
    for name in functions(source) if names is None else names:
        lines = "\n".join(f"    {line}" for line in body.replace("{name!r}", repr(name)).strip().splitlines())
        parts.append(f"def {name}(*arguments):\n{lines}\n")
    return "\n\n".join(parts)
