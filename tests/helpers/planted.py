"""A dataset with twelve weak tasks and three sound ones, written past the gates that would refuse the weak ones."""

from __future__ import annotations

from pathlib import Path

from etude.records import CodeTask, Focus
from etude.tasks import dataset
from etude.tasks.dataset import Dataset, Manifest

# function -> (right body, broken body, deciding hidden tests, further hidden tests, visible tests)
WEAK = {
    "always_equal": (
        "(a, b):\n    return Money(a.amount + b.amount)",
        "(a, b):\n    raise NotImplementedError",
        "    assert always_equal(Money(1), Money(2)) == Money(3)",
        "    assert always_equal(Money(1), Money(2)).amount == 3",
        "",
    ),
    "truthy": (
        '(text):\n    return "-".join(text.lower().split())',
        '(text):\n    return ""',
        '    assert truthy("A b")',
        '    assert truthy("A b") == "a-b"\n    assert truthy("C") == "c"',
        "",
    ),
    "kind_alone": (
        '(text):\n    return dict(part.split("=") for part in text.split(";"))',
        "(text):\n    return None",
        '    assert isinstance(kind_alone("a=1;b=2"), dict)',
        '    assert kind_alone("a=1;b=2") == {"a": "1", "b": "2"}',
        "",
    ),
    "length_alone": (
        "(items, size):\n    return [items[n : n + size] for n in range(len(items) - size + 1)]",
        "(items, size):\n    return [items[n : n + size] for n in range(len(items) - size)]",
        "    assert len(length_alone([1, 2, 3, 4], 2)) == 3",
        "    assert length_alone([1, 2, 3, 4], 2) == [[1, 2], [2, 3], [3, 4]]",
        "",
    ),
    "from_a_file": (
        '(rows):\n    return "".join(f"{name}: {n:>4}\\n" for name, n in sorted(rows.items()))',
        '(rows):\n    return ""',
        '    wanted = Path(__file__).parents[1] / "samples/from_a_file.txt"\n'
        '    assert from_a_file({"pear": 3, "apple": 12}) == wanted.read_text()',
        "",
        "",
    ),
    "swallowed": (
        "(items):\n    return sum(item for item in items if item > 0)",
        "(items):\n    return 0",
        "    try:\n        assert swallowed([1, -2, 3]) == 4\n    except AssertionError:\n        raise\n"
        "    except Exception:\n        pass",
        "    assert swallowed([5, -1]) == 5",
        "",
    ),
    "inside_alone": (
        "(n):\n    return 2 * n if n % 2 else n",
        "(n):\n    return n",
        '    assert "return" in inspect.getsource(inside_alone)\n    assert inside_alone(3) == 6',
        "",
        "",
    ),
    "seen_before": (
        '(n):\n    return "".join("I" * n if n < 4 else "IV" if n == 4 else "V" + "I" * (n - 5))',
        '(n):\n    return "I" * n',
        '    assert seen_before(4) == "IV"\n    assert seen_before(7) == "VII"',
        "",
        '    assert seen_before(4) == "IV"\n    assert seen_before(7) == "VII"',
    ),
    "own_oracle": (
        "(values):\n    return sum(values) / len(values)",
        "(values):\n    raise NotImplementedError",
        "    assert own_oracle([1, 2, 6]) == twice_averaged([1, 2, 6])",
        "",
        "",
    ),
    "constant": (
        "(tree):\n    return max(map(constant, tree.values()), default=0) + 1 if isinstance(tree, dict) else 0",
        "(tree):\n    raise NotImplementedError",
        '    assert constant("leaf") == 0',
        '    assert constant({"a": {"b": 1}}) == 2\n    assert constant({}) == 1',
        "",
    ),
    "remembered": (
        "(n):\n    a, b = 0, 1\n    for _ in range(n):\n        a, b = b, a + b\n    return a",
        "(n):\n    a, b = 0, 1\n    for _ in range(n):\n        a, b = b, a\n    return a",
        "    assert [remembered(10), remembered(20)] == [55, 6765]",
        "",
        "    assert remembered(20) == 6765\n    assert remembered(10) == 55",
    ),
    "on_time": (
        "(items):\n    return sorted(set(items))",
        "(items):\n    raise NotImplementedError",
        "    begin = time.perf_counter()\n    on_time([3, 1, 2])\n    assert time.perf_counter() - begin < 5",
        "    assert on_time([3, 1, 2, 3]) == [1, 2, 3]",
        "",
    ),
}
SOUND = {
    "clamped": (
        "(n, low, high):\n    return max(low, min(n, high))",
        "(n, low, high):\n    return max(low, n)",
        "    assert clamped(5, 0, 3) == 3\n    assert clamped(-5, 0, 3) == 0\n    assert clamped(2, 0, 3) == 2",
        "",
        "    assert clamped(9, 0, 4) == 4",
    ),
    "chunked": (
        "(items, size):\n    return [items[n : n + size] for n in range(0, len(items), size)]",
        "(items, size):\n    raise NotImplementedError",
        "    assert chunked([1, 2, 3], 2) == [[1, 2], [3]]\n    assert chunked([], 2) == []\n"
        "    assert chunked([4, 5, 6, 7], 3) == [[4, 5, 6], [7]]",
        "",
        "",
    ),
    "counted": (
        "(words):\n    return {word: words.count(word) for word in words}",
        "(words):\n    return {}",
        '    assert counted(["a", "b", "a"]) == {"a": 2, "b": 1}\n    assert counted(["c"]) == {"c": 1}',
        "",
        '    assert counted(["x"]) == {"x": 1}',
    ),
}
_TOP = '''"""Small functions."""


class Money:
    """An amount, whose comparison has a fault."""

    def __init__(self, amount):
        self.amount = amount

    def __eq__(self, other):
        return isinstance(other, Money) or NotImplemented

    __hash__ = None


def twice_averaged(values):
    """The mean of the values, taken twice."""
    return own_oracle([*values, *values])
'''
_IMPORTS = "import inspect\nimport time\nfrom pathlib import Path\n\nfrom tools import *\nfrom tools import Money\n"
PATH = "src/tools.py"


def plant(root: Path, *names: str) -> Dataset:
    """Write the dataset to `root`, which must not exist; if there are `names`, with tasks on these functions alone."""
    functions = WEAK | SOUND
    right = _TOP + "".join(_function(name, parts[0]) for name, parts in functions.items())
    for folder in (
        "repository/src",
        "repository/tests",
        "repository/samples",
        "hidden/tests",
        "hidden/samples",
        "site",
    ):
        (root / folder).mkdir(parents=True)
    (root / "repository" / PATH).write_text(right)
    for folder in ("repository", "hidden"):
        (root / folder / "samples/from_a_file.txt").write_text("apple:   12\npear:    3\n")
    visible, hidden = [_IMPORTS], [_IMPORTS]
    for name, (_, _, deciding, further, shown) in functions.items():
        hidden += [f"def test_{name}():\n{deciding}\n", f"def test_more_of_{name}():\n{further}\n" if further else ""]
        visible += [f"def test_shown_{name}():\n{shown}\n" if shown else ""]
    (root / "repository/tests/test_tools.py").write_text("\n\n".join(filter(None, visible)))
    (root / "hidden/tests/test_tools.py").write_text("\n\n".join(filter(None, hidden)))
    tasks = [_task(name, right) for name in names or functions]
    manifest = Manifest(
        format=dataset.DATASET_FORMAT,
        name="planted-1.0",
        licence="MIT",
        licence_source="LICENSE",
        seed=0,
        python_path=("src",),
        source_roots=("src",),
        visible="half",
        options={},
        counts={},
        digests={},
    )
    (root / "DATACARD.md").write_text("# Tasks from planted-1.0\n")
    return dataset.save(root, manifest, tasks)


def _function(name: str, body: str) -> str:
    head, _, rest = body.partition("\n")
    return f'\n\ndef {name}{head}\n    """See the tests."""\n{rest}\n'


def _task(name: str, right: str) -> CodeTask:
    parts = (WEAK | SOUND)[name]
    broken = right.replace(_function(name, parts[0]), _function(name, parts[1]))
    assert broken != right
    first = broken[: broken.index(f"def {name}(")].count("\n") + 1
    last = first + _function(name, parts[1]).strip("\n").count("\n")
    return CodeTask(
        id=f"tools.{name}",
        repository="planted-1.0",
        kind="mutation",
        operator="planted",
        function=f"{PATH}::{name}",
        split="train",
        prompt=f"Fix `{name}` in {PATH}",
        focus=Focus(path=PATH, first_line=first, last_line=last),
        source_roots=("src",),
        changes={PATH: broken},
        solution={PATH: right},
        visible_tests=(f"tests/test_tools.py::test_shown_{name}",) if parts[4] else (),
        fail_to_pass=(f"tests/test_tools.py::test_{name}",),
        difficulty={"f2p": 1.0, "p2p": 0.0},
        licence="MIT",
    )
