"""Each house rule fires on a bad file and is silent on a good one; the repository is tidy."""

from __future__ import annotations

from pathlib import Path

import pytest
import tidy

ROOT = Path(__file__).resolve().parents[2]
PRODUCT = "src/perdure/learner/x.py"
DOC = '"""What it is for."""\n'


def rules(path: str, text: str) -> set[str]:
    return {finding.rule for finding in tidy.check_source(tidy.Source.parse(path, text))}


def nested(depth: int) -> str:
    lines = ["def f(x):"]
    lines += [f"{'    ' * (level + 1)}if x > {level}:" for level in range(depth)]
    return "\n".join([*lines, f"{'    ' * (depth + 1)}pass\n"])


BAD = [
    ("file_length", PRODUCT, DOC + "x = 1\n" * tidy.MAX_FILE_LINES),
    ("function_length", PRODUCT, DOC + "def f():\n" + "    x = 1\n" * 70),
    ("parameters", PRODUCT, DOC + "def f(a, b, c, *, d, e, g, h): ...\n"),
    ("nesting", PRODUCT, DOC + nested(5)),
    ("module_docstring", PRODUCT, "x = 1\n"),
    ("module_docstring", "tools/x.py", "x = 1\n"),
    ("clock", PRODUCT, DOC + "import time\n"),
    ("clock", PRODUCT, DOC + "from time import monotonic\n"),
    ("clock", PRODUCT, DOC + "import datetime\nx = datetime.datetime.now()\n"),
    ("randomness", PRODUCT, DOC + "import random\nx = random.random()\n"),
    ("randomness", PRODUCT, DOC + "import random\nrandom.seed(1)\n"),
    ("randomness", PRODUCT, DOC + "import numpy as np\nx = np.random.rand(3)\n"),
    ("randomness", PRODUCT, DOC + "import numpy as np\nx = np.random.default_rng()\n"),
    ("writing", PRODUCT, DOC + 'open("a", "w")\n'),
    ("writing", PRODUCT, DOC + 'open("a", mode="ab")\n'),
    ("writing", PRODUCT, DOC + 'p.open("r+")\n'),
    ("writing", PRODUCT, DOC + 'p.write_text("a")\n'),
    ("writing", "src/perdure/runtime/metrics_files.py", DOC + 'p.open("w")\n'),
    ("printing", PRODUCT, DOC + "print(1)\n"),
    ("printing", PRODUCT, DOC + 'import sys\nsys.stderr.write("a")\n'),
    ("owned_tasks", PRODUCT, DOC + "import asyncio\nasyncio.create_task(f())\n"),
    ("owned_tasks", PRODUCT, DOC + "import asyncio\nasyncio.ensure_future(f())\n"),
    ("owned_tasks", PRODUCT, DOC + "loop.create_task(f())\n"),
    ("owned_tasks", PRODUCT, DOC + "import asyncio\nasyncio.get_event_loop().create_task(f())\n"),
    ("owned_tasks", PRODUCT, DOC + "x = threading.Thread(target=f, daemon=True)\n"),
    ("pickling", PRODUCT, DOC + "import pickle\n"),
    ("pickling", PRODUCT, DOC + 'torch.save(x, "a")\n'),
    ("torch_places", "src/perdure/experience/x.py", DOC + "import torch\n"),
    ("torch_places", "src/perdure/checkpoint/checkpointer.py", DOC + "from torch import nn\n"),
    ("glossary", PRODUCT, DOC + f"replay{'_'}buffer = 1\n"),
    ("glossary", PRODUCT, DOC + f"# one mini{'-'}step\n"),
    ("glossary", PRODUCT, f'"""Weight {"sync"}."""\n'),
    ("unfinished", PRODUCT, DOC + f"x = 1  # {'TO' + 'DO'}: more\n"),
    ("unfinished", "tests/unit/test_x.py", "import pytest\n@pytest.mark.skipif(1)\ndef f(): ...\n"),
    ("unfinished", "tests/unit/test_x.py", f'pytest.{"skip"}("later")\n'),
    ("machine_path", PRODUCT, DOC + f'x = "{"/ho" + "me"}/me/x"\n'),
    ("machine_path", "tests/unit/test_x.py", f'x = "{"/t" + "mp"}/x"\n'),
    ("package_host", PRODUCT, DOC + f"# see {'py' + 'pi'}.org\n"),
]


@pytest.mark.parametrize(("rule", "path", "text"), BAD)
def test_a_bad_file_is_found(rule: str, path: str, text: str) -> None:
    assert rule in rules(path, text)


GOOD = [
    (PRODUCT, DOC + "x = 1\n" * (tidy.MAX_FILE_LINES - 1)),
    (PRODUCT, DOC + 'def f():\n    """A.\n' + "    b\n" * 80 + '    """\n' + "    x = 1\n" * 60),
    (PRODUCT, DOC + "class A:\n    def f(self, a, b, c, *, d, e, g): ...\n"),
    (PRODUCT, DOC + nested(4)),
    (PRODUCT, DOC + "def f(x):\n    if x:\n        pass\n" + "    elif x:\n        pass\n" * 6),
    (PRODUCT, DOC + "random = 3\nrandom.integers(5)\n"),
    (PRODUCT, DOC + "import random\nx = random.Random(5)\ny = random.getstate()\n"),
    (PRODUCT, DOC + "import numpy as np\nx = np.random.Generator(np.random.Philox(key=1))\n"),
    (PRODUCT, DOC + 'open("a")\nopen("a", "rb")\np.open("r")\n'),
    (PRODUCT, DOC + "tasks.create_task(f())\nself._task = asyncio.create_task(f())\n"),
    (PRODUCT, DOC + "x = threading.Thread(target=f, daemon=False)\nimport torch\n"),
    ("src/perdure/core/clock.py", DOC + "import time\n"),
    ("src/perdure/storage/posix.py", DOC + 'open("a", "wb")\n'),
    ("src/perdure/runtime/metrics_files.py", DOC + 'p.open("a")\n'),
    ("src/perdure/cli/x.py", DOC + "print(1)\n"),
    ("src/perdure/checkpoint/torch_arena.py", DOC + "import torch\n"),
    ("benchmarks/x.py", DOC + "import time\nprint(time.monotonic())\n"),
    ("tests/unit/test_x.py", "def f(a, b, c, d, e, g, h): ...\n"),
    (PRODUCT, ""),
]


@pytest.mark.parametrize(("path", "text"), GOOD)
def test_a_good_file_is_left_alone(path: str, text: str) -> None:
    assert rules(path, text) == set()


def test_a_finding_says_where() -> None:
    source = tidy.Source.parse(PRODUCT, DOC + "x = 1\nprint(x)\n")
    (finding,) = tidy.check_source(source)
    assert str(finding) == f"{PRODUCT}:3: printing: emit an event instead of printing"


def test_nine_in_ten_functions_are_short() -> None:
    short = "".join(f"def s{n}():\n    pass\n\n" for n in range(8))
    long = "".join(f"def l{n}():\n" + "    x = 1\n" * 40 + "\n" for n in range(2))
    sources = [tidy.Source.parse(PRODUCT, DOC + short + long)]
    (finding,) = tidy.check_percentiles(sources)
    assert finding.rule == "function_length_p90"
    assert tidy.check_percentiles([tidy.Source.parse(PRODUCT, DOC + short * 3 + long)]) == []


def test_nine_in_ten_files_are_short() -> None:
    long = [tidy.Source.parse(PRODUCT, DOC + "x = 1\n" * 450) for _ in range(2)]
    short = [tidy.Source.parse(PRODUCT, DOC)] * 8
    assert {f.rule for f in tidy.check_percentiles(long + short)} == {"file_length_p90"}
    assert tidy.check_percentiles(long + short * 3) == []


def test_every_kind_of_file_is_looked_at(tmp_path: Path) -> None:
    bad = f"see {'/ho' + 'me'}/somebody\n"
    for name in ("docs/deep/a.md", "recipes/a.yaml", "README.md", "pyproject.toml"):
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(bad)
    code = tmp_path / "src" / "perdure" / "a.py"
    code.parent.mkdir(parents=True)
    code.write_text(f"# {bad}")
    found = {finding.path for finding in tidy.check_tree(tmp_path)}
    assert found == {
        "docs/deep/a.md",
        "recipes/a.yaml",
        "README.md",
        "pyproject.toml",
        "src/perdure/a.py",
    }


def test_the_repository_is_tidy() -> None:
    assert [str(finding) for finding in tidy.check_tree(ROOT)] == []
