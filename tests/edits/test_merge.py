"""The deterministic merge: a pure function of two texts."""

import subprocess
import sys
import time

import pytest

from etude.edits import Edit, is_marker
from etude.edits.merge import merge
from etude.edits.sketch_blocks import NoPlace
from etude.errors import UserError

FILE = '''\
import os
import sys


class Stack:
    """Last in, first out."""

    def __init__(self):
        self.items = []

    def push(self, item):
        self.items.append(item)
        return item

    def pop(self):
        value = self.items[-1]
        del self.items[-1]
        return value

    def size(self):
        return len(self.items)


def main():
    stack = Stack()
    stack.push(1)
    print(stack.size())
'''


def edited(*changes: tuple[str, str]) -> str:
    text = FILE
    for old, new in changes:
        assert text.count(old) == 1
        text = text.replace(old, new)
    return text


MARK = "# ... existing code ...\n"
CASES = {
    "a line replaced between its neighbours": (
        f"{MARK}    def pop(self):\n        value = self.items.pop()\n        del self.items[-1]\n{MARK}",
        [("value = self.items[-1]\n", "value = self.items.pop()\n")],
    ),
    "neighbours without a marker between delete what lies between": (
        f"{MARK}        self.items.append(item)\n\n    def pop(self):\n{MARK}",
        [("        return item\n", "")],
    ),
    "two hunks, at the ends of the file": (
        f"import os\nimport re\n\n\nclass Stack:\n{MARK}"
        "    stack = Stack()\n    stack.push(2)\n    print(stack.size())\n",
        [("import sys\n", "import re\n"), ("stack.push(1)", "stack.push(2)")],
    ),
    "an insertion behind the enclosing class line": (
        f'{MARK}class Stack:\n    """Last in, first out."""\n\n    limit = 10\n\n    def __init__(self):\n{MARK}',
        [('out."""\n\n', 'out."""\n\n    limit = 10\n\n')],
    ),
    "an insertion at the end of a function, where nothing could be replaced": (
        f"{MARK}        del self.items[-1]\n        return value\n        raise SystemExit\n\n{MARK}",
        [("        return value\n", "        return value\n        raise SystemExit\n")],
    ),
    "new text at the end": (
        f"{MARK}\n\ndef extra():\n    return 1\n",
        [("    print(stack.size())\n", "    print(stack.size())\n\n\ndef extra():\n    return 1\n")],
    ),
    "new text at the start": (
        f"#!/usr/bin/env python\n{MARK}",
        [("import os\n", "#!/usr/bin/env python\nimport os\n")],
    ),
    "indentation of the whole sketch shifted": (
        "# ...\ndef push(self, item):\n    self.items.append(item)\n    self.count += 1\n    return item\n# ...\n",
        [("append(item)\n", "append(item)\n        self.count += 1\n")],
    ),
    "hunks in another order": (
        "# ...\ndef main():\n    stack = Stack(3)\n    stack.push(1)\n# ...\n"
        "    def push(self, item):\n        self.items.append([item])\n        return item\n# ...\n",
        [("stack = Stack()", "stack = Stack(3)"), ("append(item)", "append([item])")],
    ),
    "prose around a fenced block": (
        f"Here is the change:\n\n```python\n{MARK}def main():\n    stack = Stack(3)\n    stack.push(1)\n"
        "# rest of the code unchanged\n```\n\nIt sets a limit.\n",
        [("stack = Stack()", "stack = Stack(3)")],
    ),
    "one line that is clearly a new text of another": (
        "# ...\n        self.items.append([item])\n# ...\n",
        [("self.items.append(item)", "self.items.append([item])")],
    ),
    "blank lines between the text and its markers": (
        f"{MARK}\n    def size(self):\n        return len(self.items) + 1\n\n\ndef main():\n\n# ... rest ...\n",
        [("return len(self.items)", "return len(self.items) + 1")],
    ),
    "a changed line at the end of a block, of which a function has one": (
        f"{MARK}    def size(self):\n        return len(self.items) + 1\n{MARK}",
        [("return len(self.items)", "return len(self.items) + 1")],
    ),
    "markers forgotten at both ends": (
        "    def push(self, item):\n        self.items.append([item])\n        return item\n",
        [("append(item)", "append([item])")],
    ),
    "nothing changes": (f"{MARK}def main():\n    stack = Stack()\n{MARK}", []),
    "the whole file": (FILE.replace("push(1)", "push(7)"), [("push(1)", "push(7)")]),
}


@pytest.mark.parametrize("name", CASES)
def test_it_does_what_the_sketch_means(name):
    sketch, changes = CASES[name]
    result = merge(FILE, sketch)
    assert result.text == edited(*changes)
    assert not result.doubt


@pytest.mark.parametrize(
    "sketch", ["", "\n\n", "# ... existing code ...\n", "# ...\nfoo(bar, 17)\n# ...\n", "zebra = 1\n"]
)
def test_a_sketch_that_names_no_place_is_refused(sketch):
    with pytest.raises(NoPlace):
        merge(FILE, sketch)


DOUBTS = {
    "a new line, or another version of the next": (
        f"{MARK}    def push(self, item):\n        self.items.insert(0, item)\n{MARK}",
        "may replace the next line",
    ),
    "a new import, or another version of the next": (f"import os\nimport re\n{MARK}", "may replace the next line"),
    "a new first line, or another version of the first": (f"import abc\n{MARK}", "may replace others"),
    "no change, or the lines behind it deleted": (f"{MARK}def main():\n    stack = Stack()\n", "ends before"),
    "no change, or the lines before it deleted": (f"def main():\n    stack = Stack()\n{MARK}", "begins after"),
    "a definition twice": (
        f"{MARK}        return value\n\n    def size(self):\n        return 0\n\n\ndef main():\n{MARK}".replace(
            "        return 0", "        return 0\n\n    def size(self):\n        return len(self.items)"
        ),
        "twice",
    ),
    "the file's last lines left out": (FILE.partition("def main")[0], "ends before"),
}


@pytest.mark.parametrize("name", DOUBTS)
def test_a_sketch_that_may_mean_two_texts_is_in_doubt_and_refused_without_a_model(name):
    sketch, reason = DOUBTS[name]
    assert reason in merge(FILE, sketch).doubt
    with pytest.raises(UserError, match=reason):
        Edit(FILE, sketch).merged()
    assert Edit(FILE, sketch).draft().text  # for a model


ALIKE = """\
import unit


def test_empty():
    box = unit.make()
    assert box.size() == 0


def test_filled():
    box = unit.make()
    box.put(1)
    assert box.size() == 1


def test_cleared():
    box = unit.make()
    box.put(1)
    box.clear()
    assert box.size() == 0


def test_closed():
    box = unit.make()
    box.close()
"""
NEW = "def test_again():\n    box = unit.make()\n    box.put(1)\n    box.put(1)\n    assert box.size() == 1\n"


def test_a_place_without_loss_beats_a_chain_of_equal_lines():
    above, below = (
        "    box.clear()\n    assert box.size() == 0\n\n\n",
        "\n\ndef test_closed():\n    box = unit.make()\n",
    )
    sketch = f"# ...\n{above}{NEW}{below}# ...\n"
    result = merge(ALIKE, sketch)
    assert (result.text, result.doubt) == (ALIKE.replace("def test_closed", f"{NEW}\n\ndef test_closed"), "")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("import os", "import re"),
        ("    self.a = a", "    self.b = b"),
        ("def load(path):", "def loads(path):"),
        ('  <div className="list">', '    <ul className="list">'),
    ],
)
def test_a_new_line_that_only_resembles_a_line_is_in_doubt(old, new):
    """Between two markers it may be an addition."""
    assert merge(f"one()\n{old}\n\nthree()\n", f"# ...\n{new}\n# ...\n").doubt


@pytest.mark.parametrize(
    ("old", "new"), [("limit_of_all = 1", "limit_of_all = 2"), ("def f(a, b):", "def f(a, b, c):")]
)
def test_a_new_version_of_one_line_replaces_it(old, new):
    result = merge(f"one()\n{old}\n\nthree()\n", f"# ...\n{new}\n# ...\n")
    assert (result.text, result.doubt) == (f"one()\n{new}\n\nthree()\n", "")


def test_a_deletion_that_may_be_another_is_in_doubt():
    # Both deletions that end at the line of the next test are possible, and so is none.
    assert merge(ALIKE, "# ...\n    box = unit.make()\n    box.put(1)\n    box.clear()\n# ...\n").doubt
    sketch = "# ...\n    assert box.size() == 1\n\n\ndef test_closed():\n# ...\n"
    result = merge(ALIKE, sketch)
    start, end = ALIKE.index("def test_cleared"), ALIKE.index("def test_closed")
    assert (result.text, result.doubt) == (ALIKE[:start] + ALIKE[end:], "")


def test_a_block_does_not_delete_far_more_than_it_shows():
    text = (
        "def first():\n    return 1\n\n\n"
        + "".join(f"def f{i}():\n    return {i}\n\n\n" for i in range(2, 40))
        + "def last():\n    pass\n"
    )
    assert "would delete 76 lines" in merge(text, "# ...\n    return 1\n\n\ndef last():\n# ...\n").doubt


def test_a_result_that_no_longer_parses_is_in_doubt():
    sketch = f"{MARK}    def pop(self):\n        value = self.items[-1\n        del self.items[-1]\n{MARK}"
    assert merge(FILE, sketch, "python").doubt == "the result would no longer be valid python"
    assert not merge(FILE, sketch).doubt
    broken = FILE + ")\n"
    assert not merge(broken, sketch, "python").doubt


def test_bytes_stay():
    sketch = "a = 1\nb = 3\nc = 3\n"
    for text, expected in (
        ("a = 1\r\nb = 2\r\nc = 3\r\n", "a = 1\r\nb = 3\r\nc = 3\r\n"),
        ("\ufeffa = 1\nb = 2\nc = 3", "\ufeffa = 1\nb = 3\nc = 3"),
        ("a = 1  \nb = 2\nc = 3\t\n\x0c\n", "a = 1  \nb = 3\nc = 3\t\n\x0c\n"),
        ("a = 1\u2028x\nb = 2\rz\nc = 3\n", None),  # neither U+2028 nor a lone carriage return ends a line
    ):
        if expected is None:
            assert merge(text, "a = 1\u2028x\nb = 3\nc = 3\n").text == "a = 1\u2028x\nb = 3\nc = 3\n"
        else:
            assert merge(text, sketch).text == expected
    assert merge("a = 1", "a = 1\nb = 2\n").text == "a = 1\nb = 2"


def test_blanks_at_line_ends():
    text = "# Poem\n\nroses  \nviolets\n\nend\n"
    # New lines have the sketch's, old ones their own, whether or not the sketch shows them.
    for shown in ("roses  ", "roses"):
        sketch = f"# Poem\n\n{shown}\nviolets  \nsugar\t\n\nend\n"
        assert merge(text, sketch).text == "# Poem\n\nroses  \nviolets  \nsugar\t\n\nend\n"


@pytest.mark.parametrize("text", ["", "\n", "  \n\n"])
def test_an_empty_file_becomes_the_sketch(text):
    assert merge(text, "VERSION = '1'\n").text == "VERSION = '1'\n"
    marked = merge(text, f"{MARK}VERSION = '1'\n")
    assert (marked.text, bool(marked.doubt)) == ("VERSION = '1'\n", True)


TABS = "package a\n\nfunc F(x int) int {\n\tif x > 0 {\n\t\treturn 1\n\t}\n\treturn 0\n}\n"


@pytest.mark.parametrize("width", [2, 4, 8])
def test_levels_of_the_sketch_become_those_of_the_file(width):
    new = "\tif x < 0 {\n\t\treturn -1\n\t}\n"
    wanted = TABS.replace("\treturn 0", f"{new}\treturn 0")
    function = wanted[wanted.index("func") :]
    sketch = f"// ...\n{function}".expandtabs(width)
    assert merge(TABS, sketch) == merge(wanted, "// ...\nfunc F(x int) int {\n\tif x > 0 {\n// ...\n")
    spaces = TABS.replace("\t", "    ")
    assert merge(spaces, sketch).text == wanted.replace("\t", "    ")
    assert merge(spaces, f"// ...\n{wanted.partition('func')[1]}{wanted.partition('func')[2]}").text == wanted.replace(
        "\t", "    "
    )


def test_new_lines_in_spaces_for_a_file_in_tabs():
    makefile = "all:\n\tgcc a.c\n\nclean:\n\trm -f a.out\n"
    sketch = "# ...\nclean:\n    rm -f b.out\n    rm -f c.out\n"
    assert merge(makefile, sketch).text == makefile.replace("a.out", "b.out\n\trm -f c.out")


def test_wrapped_lines_keep_the_indentation_of_the_sketch():
    new = "def main():\n    with guard():\n        stack = Stack()\n        stack.push(1)\n    print(stack.size())\n"
    result = merge(FILE, f"{MARK}{new}")
    assert not result.doubt
    assert result.text == FILE.partition("def main")[0] + new


TOOL = "# Tool\n\nInstall it:\n\n```sh\npip install tool\n```\n\n## Use\n\nRun it.\n"


def test_fences_of_markdown_are_text():
    new = "Run it:\n\n```sh\ntool --help\n```\n"
    assert merge(TOOL, f"<!-- ... existing text ... -->\n## Use\n\n{new}").text == TOOL.replace("Run it.\n", new)
    sketch = "# Tool\n\nInstall it with pip:\n\n```sh\npip install tool\n```\n<!-- ... existing text ... -->\n"
    assert merge(TOOL, sketch).text == TOOL.replace("Install it:", "Install it with pip:")
    whole = TOOL.replace("Run it.", "Run it now.")
    assert merge(TOOL, f"Here you are:\n\n```markdown\n{whole}```\n").text == whole


def test_several_fenced_blocks_are_refused():
    with pytest.raises(NoPlace, match="several fenced blocks"):
        merge(FILE, "First:\n```python\nimport os\n```\nThen:\n```python\nimport re\n```\n")


def test_a_wording_without_dots_is_a_marker_only_where_lines_are_left_out():
    text = "class A:\n    def a(self):\n        return 1\n\n    def b(self):\n        return 2\n"
    new = text.replace("\n\n", "\n\n    # other methods\n\n")
    assert merge(text, new).text == new
    sketch = "class A:\n    # other methods\n    def b(self):\n        return 3\n"
    assert merge(text, sketch).text == text.replace("return 2", "return 3")
    sketch = "import os\nimport sys\n# the rest of the imports ...\n\n\nclass Stack:\n# ...\n"
    assert merge(FILE, sketch).text == FILE.replace("import sys\n", "import sys\n# the rest of the imports ...\n")


@pytest.mark.parametrize("line", ["...rest", "...rest,", "...existing,", "...remaining.map(f),", "...unchanged"])
def test_three_dots_that_touch_a_name_are_code(line):
    text = "function make(options) {\n  const { size } = options;\n  return { size };\n}\n"
    new = text.replace("{ size } =", f"{{\n    size,\n    {line}\n  }} =")
    assert merge(text, new).text == new


@pytest.mark.parametrize(
    ("line", "marker"),
    [
        ("# ... existing code ...", True),
        ("    // ... rest of the class", True),
        ("/* ... unchanged ... */", True),
        ("<!-- ... existing markup ... -->", True),
        ("-- …", True),
        ("... existing code ...", True),
        ("# the rest of the file is unchanged", True),
        ("    ...", False),
        ("# loading ...", False),
        ("x = rest", False),
        ("# the rest is easy", False),
    ],
)
def test_markers(line, marker):
    assert is_marker(line) is marker


def test_a_line_of_the_file_is_no_marker():
    text = "a\n# ...\nb\nc\n"
    assert merge(text, "a\n# ...\nbb = 2\nb\nc\n").text == "a\n# ...\nbb = 2\nb\nc\n"


def test_large_files_are_merged_in_linear_time():
    text = "".join(f"value_{i} = compute({i})\n    return\n" for i in range(5000))
    start = time.process_time()
    result = merge(text, "# ...\nvalue_4000 = compute(4000)\n    other()\n    return\n# ...\n")
    assert time.process_time() - start < 5.0  # seconds of this process; it takes some tenths
    assert result.text == text.replace("compute(4000)\n", "compute(4000)\n    other()\n")


@pytest.mark.parametrize(
    "text",
    [
        "\n\na\nb\n",
        "\x0c\na\nb\n",
        "\u2028\r\na\r\nb\r\n\r\n",
        "a  \r\nb\nc\nd\n",
        "a\n\x0c\r\nb\nc",
        "a\rb\r",
        "a\n\n\n",
        "\ufeff\n# the rest\n",
    ],
)
def test_a_sketch_of_the_whole_file_changes_nothing(text):
    assert merge(text, text).text == text


@pytest.mark.parametrize("sketch", ["\n\na\nx\nb\n\n", "\nx\n# ...\n", "# ...\nx\n\n\n"])
def test_blank_lines_around_a_sketch_are_not_written(sketch):
    text = merge("a\nb\n", sketch).text
    assert "x\n" in text
    assert "\n\n" not in "\n" + text


def test_large_sketches_and_long_lines_take_bounded_time():
    lines, start = [f"x{i} = {i}" for i in range(10_000)], time.monotonic()
    for sketch in ("\n".join(lines), "y\n" * 100_000, "\n# ...\n".join(lines[:4000:2])):
        with pytest.raises(UserError, match="at most"):
            Edit("\n".join(lines), sketch).draft()
    assert merge(f"x = 1\n{'ab' * 50_000}c\ny = 2\n", f"# ...\nx = 1\n{'ab' * 50_000}d\n# ...\n").doubt
    assert time.monotonic() - start < 10


def test_it_needs_no_torch():
    code = "import sys, etude.edits.merge, etude.edits.edit; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
