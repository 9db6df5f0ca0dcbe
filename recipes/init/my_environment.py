"""Tasks, tools and a reward of your own: wrong comparisons. Run it with `etude train my_environment.toml`."""

from etude import Environment, Task

NAMES = {"<": "less below before", ">": "greater above after", "==": "same equal is", "!=": "different unlike other"}
CODE = "def {name}(a, b):\n    return a {sign} b"


class Comparison(Task, frozen=True, kw_only=True):
    answer: str  # the model reads the prompt alone


class MyEnvironment(Environment):
    def tasks(self):
        for right, names in NAMES.items():
            for name in names.split():
                for number, wrong in enumerate(sign for sign in NAMES if sign != right):
                    code, answer = CODE.format(name=name, sign=wrong), CODE.format(name=name, sign=right)
                    yield Comparison(id=f"{name}-{number}", prompt=f"Fix `{name}` in m.py\n{code}", answer=answer)

    def setup(self, episode):
        episode.state["code"] = episode.task.prompt.partition("\n")[2]

    def tools(self, episode):
        def edit(old: str, new: str) -> str:
            """Replaces `old`, a part of the function, by `new`."""
            known = old in episode.state["code"]
            episode.state["code"] = episode.state["code"].replace(old, new)
            return "ok" if known else "error: not found"

        return [edit]

    def reward(self, episode):
        return float(episode.state["code"] == episode.task.answer)
