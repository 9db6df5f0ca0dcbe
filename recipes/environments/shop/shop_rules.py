"""Tasks in the repository of a small shop: mend a rule of prices.py. Run in this folder: `etude train shop.toml`."""

import re
from pathlib import Path

import etude

PRODUCT = Path(__file__).parent / "product"
RULES = (PRODUCT / "prices.py").read_text()
SIGNS = ("<", "<=", ">", ">=", "==", "!=")


class Rule(etude.Task, frozen=True):
    function: str
    file: str  # prices.py with a wrong rule

    @property
    def cluster(self):
        return self.function  # intervals of pass rates treat tasks of a function as one sample


async def edit(old: str, new: str, box: etude.Box) -> str:
    """Replaces `old`, which prices.py must have once, by `new`."""
    text = (await box.read("prices.py")).decode()
    if text.count(old) != 1:
        raise ValueError(f"prices.py has it {text.count(old)} times")
    await box.write("prices.py", text.replace(old, new).encode())
    return "ok"


class ShopRules(etude.Environment[Rule]):
    repository = PRODUCT
    pass_mark = 0.9

    def __init__(self, box_tools=("list", "read", "grep")):
        self.box_tools = tuple(box_tools)

    def tasks(self):
        for name, left, sign, right in re.findall(r"def (\w+).*\n    return (\w+) (\S+) (.+)", RULES):
            for number, wrong in enumerate(other for other in SIGNS if other != sign):
                line = f"    return {left} {wrong} {right}"
                file = RULES.replace(f"    return {left} {sign} {right}", line)
                prompt = f"Fix `{name}` in prices.py\ndef {name}({left}):\n{line}"
                split = "heldout" if name in ("is_minor", "sold_out") else "train"
                yield Rule(id=f"{name}-{number}", prompt=prompt, split=split, function=name, file=file)

    def files(self, task):
        return {"prices.py": task.file}

    def tools(self, episode):
        return [edit]

    @etude.reward(weight=0.9)
    async def right(self, episode):
        result = await episode.box.exec(f"python check.py {episode.task.function}", timeout=10)
        return result.rc == 0

    @etude.reward(weight=0.1)
    def short(self, episode):
        return len(episode.turns) <= 4
