"""House limits and bans that no linter knows. ``python tools/tidy.py`` prints what breaks them.

The rules are in :data:`RULES`; each has a test that shows it firing. Docstrings do not count
towards the length of a function.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

MAX_FILE_LINES = 600
MAX_FILE_LINES_P90 = 400
MAX_FUNCTION_LINES = 70
MAX_FUNCTION_LINES_P90 = 35
MAX_PARAMETERS = 6
MAX_NESTING = 4

CODE_FOLDERS = ("src", "tests", "tools", "benchmarks", "examples")
TEXT_FOLDERS = ("docs", "recipes")
TEXT_SUFFIXES = (".md", ".yaml", ".yml", ".toml")

WRITERS = (
    "src/perdure/core/clock.py",
    "src/perdure/storage/",
    "src/perdure/cli/",
    "src/perdure/runtime/live_file.py",
)
"""Where files may be opened for writing."""
PROJECTIONS = (
    "src/perdure/runtime/metrics_files.py",
    "src/perdure/runtime/tensorboard_file.py",
)
"""Appends to files that every incarnation writes again from the log."""
TORCH_PLACES = (
    "src/perdure/models/",
    "src/perdure/algorithms/",
    "src/perdure/rollout/",
    "src/perdure/learner/",
    "src/perdure/publish/",
    "src/perdure/checkpoint/torch_",
    "src/perdure/standalone/torch_",
    "src/perdure/trainers/environment.py",
    "src/perdure/trainers/sanity.py",
)
PICKLER = "src/perdure/checkpoint/legacy.py"
"""The one file that pickles."""
ABANDONER = "src/perdure/runtime/verdicts.py"
"""The one file that leaves threads alone: with user code that hangs."""
GLOBAL_STREAMS = ("src/perdure/trainers/environment.py",)
"""Seeds the global streams once, for user code that draws from them."""

_Function = ast.FunctionDef | ast.AsyncFunctionDef
_BLOCKS = (ast.If, ast.For, ast.AsyncFor, ast.While, ast.With, ast.AsyncWith, ast.Try, ast.Match)

_WRONG_WORDS = {
    r"replay[ _-]?buffer": "experience log (or replay, for the off-policy view of it)",
    r"mini[ _-]?step": "local_update",
    r"weight[ _-]step": "policy_version",
    r"weight[ _-]sync": "publication",
    r"old[ _-]checkpoint": "policy anchor",
    r"generation[ _](?:number|id)\b": "incarnation",
}
"""Words of the glossary's last column that have no other honest use."""

_STREAM_STATE = ("getstate", "setstate", "get_state", "set_state")
"""A checkpoint saves the global streams of user code, so it may read and set them."""

_PRIVATE_PATH = re.compile(r"(?<![\w.~<])/(?:work|root|home|Users|opt|mnt|tmp)/\w")
_PACKAGE_HOST = re.compile(r"\b(?:pypi\.|pythonhosted\.|npmjs\.|conda\.anaconda)", re.IGNORECASE)
_UNFINISHED = re.compile(r"#.*\b(?:TO[D]O|FIX[M]E|X[X]X|HAC[K])\b")


@dataclass(frozen=True, slots=True, order=True)
class Finding:
    """One broken rule."""

    path: str
    line: int
    rule: str
    message: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.rule}: {self.message}"


@dataclass(frozen=True, slots=True)
class Source:
    """One Python file."""

    path: str
    text: str
    nodes: tuple[ast.AST, ...]
    """Every node of the tree; the module comes first."""

    @classmethod
    def parse(cls, path: str, text: str) -> Source:
        return cls(path, text, tuple(ast.walk(ast.parse(text, filename=path))))

    @property
    def module(self) -> ast.Module:
        module = self.nodes[0]
        assert isinstance(module, ast.Module)
        return module

    def within(self, *places: str) -> bool:
        """Whether the file lies below one of the places (path prefixes)."""
        return self.path.startswith(places)

    def calls(self) -> Iterator[tuple[ast.Call, str]]:
        """Every call and the dotted name of what is called."""
        for node in self.nodes:
            if isinstance(node, ast.Call):
                yield node, dotted_name(node.func)

    def functions(self) -> Iterator[_Function]:
        for node in self.nodes:
            if isinstance(node, _Function):
                yield node


Found = Iterator[tuple[int, str]]
Rule = Callable[[Source], Found]


def dotted_name(node: ast.expr) -> str:
    """``a.b.c`` of a name or attribute; ``().b`` where the start is no name."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{dotted_name(node.value)}.{node.attr}"
    return "()"


def file_length(source: Source) -> Found:
    """A file has at most 600 lines."""
    lines = source.text.count("\n")
    if lines > MAX_FILE_LINES:
        yield 1, f"{lines} lines, at most {MAX_FILE_LINES}: split it by what it is about"


def function_length(source: Source) -> Found:
    """A function has at most 70 lines."""
    for function in source.functions():
        lines = function_lines(function)
        if lines > MAX_FUNCTION_LINES:
            yield (
                function.lineno,
                f"{function.name} has {lines} lines, at most {MAX_FUNCTION_LINES}",
            )


def function_lines(function: _Function) -> int:
    """Lines of a function without its docstring."""
    lines = (function.end_lineno or function.lineno) - function.lineno + 1
    if ast.get_docstring(function) is not None:
        docstring = function.body[0]
        lines -= (docstring.end_lineno or docstring.lineno) - docstring.lineno + 1
    return lines


def parameters(source: Source) -> Found:
    """A function has at most 6 parameters."""
    for function in source.functions():
        arguments = function.args
        names = [a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
        count = len([name for name in names if name not in ("self", "cls")])
        if count > MAX_PARAMETERS and not source.within("tests/"):
            yield function.lineno, f"{function.name} has {count}, at most {MAX_PARAMETERS}"


def nesting(source: Source) -> Found:
    """Blocks nest at most 4 deep."""
    for function in source.functions():
        depth = max((_depth(node) for node in function.body), default=0)
        if depth > MAX_NESTING:
            yield function.lineno, f"{function.name} nests {depth} deep, at most {MAX_NESTING}"


def _depth(node: ast.AST) -> int:
    if isinstance(node, (*_Function.__args__, ast.ClassDef)):
        return 0
    children = list(ast.iter_child_nodes(node))
    inner = max((_depth(child) for child in children), default=0)
    if isinstance(node, ast.If) and len(node.orelse) == 1 and isinstance(node.orelse[0], ast.If):
        # An elif is no deeper than its if.
        body = max((_depth(child) for child in node.body), default=0) + 1
        return max(body, _depth(node.orelse[0]))
    return inner + isinstance(node, _BLOCKS)


def module_docstring(source: Source) -> Found:
    """A module says in its first line what it is for."""
    missing = bool(source.text.strip()) and ast.get_docstring(source.module) is None
    if missing and not source.within("tests/"):
        yield 1, "begin the file with a docstring"


def clock(source: Source) -> Found:
    """Time comes from a Clock."""
    if source.within("src/perdure/core/clock.py") or not source.within("src/"):
        return
    for line, module in _imports(source):
        if module == "time" or module.startswith("time."):
            yield line, "take a Clock (core/clock.py) instead of the module time"
    for call, name in source.calls():
        if name.endswith(("datetime.now", "datetime.utcnow", "datetime.today", "date.today")):
            yield call.lineno, "take a Clock (core/clock.py) instead of the date of today"


def randomness(source: Source) -> Found:
    """Random numbers come from keyed generators, never from a global stream."""
    if not source.within("src/") or source.within(*GLOBAL_STREAMS):
        return
    has_random = any(module == "random" for _, module in _imports(source))
    for call, name in source.calls():
        head, _, function = name.rpartition(".")
        in_numpy = head in ("np.random", "numpy.random") and function[:1].islower()
        global_stream = in_numpy or (has_random and head == "random" and function != "Random")
        if global_stream and function not in _STREAM_STATE:
            yield call.lineno, f"{name} draws from a global stream: use core/keyed_random.py"


def writing(source: Source) -> Found:
    """Files are written by the storage."""
    if not source.within("src/") or source.within(*WRITERS):
        return
    for call, name in source.calls():
        method = name.rpartition(".")[2]
        mode = _open_mode(call, name) if method in ("open", "fdopen") else ""
        if source.within(*PROJECTIONS):
            mode = mode.replace("a", "")
        if set(mode) & set("wax+") or method in ("write_text", "write_bytes"):
            yield call.lineno, f"{name} writes a file: go through a Storage"


def _open_mode(call: ast.Call, name: str) -> str:
    position = 1 if name in ("open", "io.open", "os.fdopen", "gzip.open") else 0
    given = [keyword.value for keyword in call.keywords if keyword.arg == "mode"]
    given += call.args[position : position + 1]
    constants = [node.value for node in given if isinstance(node, ast.Constant)]
    return next((value for value in constants if isinstance(value, str)), "")


def printing(source: Source) -> Found:
    """Only the command line prints."""
    if source.within("src/perdure/cli/") or not source.within("src/"):
        return
    for call, name in source.calls():
        if name in ("print", "sys.stdout.write", "sys.stderr.write"):
            yield call.lineno, "emit an event instead of printing"


def owned_tasks(source: Source) -> Found:
    """Tasks and threads have an owner who learns of their failure."""
    if not source.within("src/"):
        return
    for node in source.nodes:
        call = node.value if isinstance(node, ast.Expr) else None
        name = dotted_name(call.func) if isinstance(call, ast.Call) else ""
        if re.search(r"asyncio\.(create_task|ensure_future)$|(loop|\(\))\.create_task$", name):
            yield node.lineno, "a task needs an owner: start it in an asyncio.TaskGroup or keep it"
    for call, name in source.calls():
        daemon = [keyword.value for keyword in call.keywords if keyword.arg == "daemon"]
        if (
            name.rpartition(".")[2] == "Thread"
            and [ast.unparse(d) for d in daemon]
            not in (
                [],
                ["False"],
            )
            and source.path != ABANDONER
        ):
            yield call.lineno, "a daemon thread dies unheard: join it where it is owned"


def pickling(source: Source) -> Found:
    """Nothing is pickled, but for what a user has asked for."""
    if not source.within("src/") or source.path == PICKLER:
        return
    for line, module in _imports(source):
        if module.partition(".")[0] in ("pickle", "cloudpickle", "dill", "shelve"):
            yield line, "use safetensors and msgpack instead of pickle"
    for call, name in source.calls():
        if name in ("torch.load", "torch.save"):
            yield call.lineno, f"{name} pickles: use safetensors and msgpack"


def torch_places(source: Source) -> Found:
    """Torch is imported only where tensors are computed with."""
    if not source.within("src/") or source.within(*TORCH_PLACES):
        return
    for line, module in _imports(source):
        if module.partition(".")[0] == "torch":
            yield line, "torch belongs into models, algorithms, rollout, learner, publish"


def _imports(source: Source) -> Iterator[tuple[int, str]]:
    for node in source.nodes:
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            yield node.lineno, node.module


def glossary(source: Source) -> Found:
    """One word per thing (docs/glossary.md)."""
    if not source.within("src/"):
        return
    for number, line in enumerate(source.text.splitlines(), 1):
        for pattern, right in _WRONG_WORDS.items():
            if found := re.search(pattern, line, re.IGNORECASE):
                yield number, f"{found[0]!r} is called {right} here"


def unfinished(source: Source) -> Found:
    """No reminders to oneself, no skipped tests."""
    for number, line in enumerate(source.text.splitlines(), 1):
        if _UNFINISHED.search(line):
            yield number, "finish it or file an issue"
    for node in source.nodes:
        if isinstance(node, ast.Attribute):
            name = dotted_name(node)
            if re.fullmatch(r"pytest\.(mark\.(skip|skipif|xfail)|skip|xfail)", name):
                yield node.lineno, f"{name}: mend the test or delete it"


RULES: tuple[Rule, ...] = (
    file_length,
    function_length,
    parameters,
    nesting,
    module_docstring,
    clock,
    randomness,
    writing,
    printing,
    owned_tasks,
    pickling,
    torch_places,
    glossary,
    unfinished,
)


def check_source(source: Source) -> list[Finding]:
    """Every finding in one Python file."""
    found = [
        Finding(source.path, line, rule.__name__, message)
        for rule in RULES
        for line, message in rule(source)
    ]
    return sorted(found + check_text(source.path, source.text))


def check_text(path: str, text: str) -> list[Finding]:
    """Findings in any text: paths of somebody's machine, hosts of package indexes."""
    found: list[Finding] = []
    for number, line in enumerate(text.splitlines(), 1):
        if match := _PRIVATE_PATH.search(line):
            found.append(Finding(path, number, "machine_path", f"{match[0]!r} is one machine's"))
        if match := _PACKAGE_HOST.search(line):
            found.append(Finding(path, number, "package_host", f"{match[0]!r} names a host"))
    return found


def check_percentiles(sources: Sequence[Source]) -> list[Finding]:
    """Of the product's files and functions, nine in ten keep to the smaller limits."""
    product = [source for source in sources if source.within("src/")]
    files = [source.text.count("\n") for source in product]
    functions = [function_lines(f) for source in product for f in source.functions()]
    return [
        Finding("src", 1, rule, f"the 90th percentile is {_p90(lines)} lines, at most {limit}")
        for rule, lines, limit in (
            ("file_length_p90", files, MAX_FILE_LINES_P90),
            ("function_length_p90", functions, MAX_FUNCTION_LINES_P90),
        )
        if _p90(lines) > limit
    ]


def _p90(values: Sequence[int]) -> int:
    return sorted(values)[len(values) * 9 // 10] if values else 0


def check_tree(root: Path) -> list[Finding]:
    """Every finding in the repository at ``root``."""
    sources = [
        Source.parse(_relative(root, file), file.read_text("utf-8"))
        for file in _files(root, CODE_FOLDERS, (".py",))
    ]
    findings = [finding for source in sources for finding in check_source(source)]
    findings += check_percentiles(sources)
    texts = [*_files(root, TEXT_FOLDERS, TEXT_SUFFIXES)]
    texts += [f for f in sorted(root.iterdir()) if f.suffix in TEXT_SUFFIXES]
    for file in texts:
        findings += check_text(_relative(root, file), file.read_text("utf-8"))
    return findings


def _files(root: Path, folders: Sequence[str], suffixes: Sequence[str]) -> Iterator[Path]:
    for folder in folders:
        for file in sorted((root / folder).rglob("*")):
            if file.suffix in suffixes and file.is_file():
                yield file


def _relative(root: Path, file: Path) -> str:
    return str(PurePosixPath(file.relative_to(root)))


def main() -> int:
    """Print the findings; 1 if there are any."""
    findings = check_tree(Path(__file__).resolve().parent.parent)
    for finding in findings:
        print(finding)
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
