"""The tools of an environment's episode: its functions, and the built-in tools in `box_tools`."""

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from etude.errors import UserError
from etude.harness import FullTools, UsersBox
from etude.records import Task, ToolCall
from etude.renderers import COMPACT_PARAMETERS, SCHEMAS
from etude.sandbox import Box

BOX_TOOLS = frozenset({"list", "read", "grep", "search", "edit", "undo", "run", "output", "kill"})


class PythonTools(FullTools):
    """The functions of an environment as tools, and those of the built-in tools in `box_tools`. In the compact dialect
    arguments come by position, as text. Raises UserError for names and parameters that cannot be used."""

    def __init__(
        self,
        functions: Sequence[Callable[..., Any]],
        box_tools: Sequence[str],
        box: Box | None,
        task: Task,
        *,
        compact: bool,
    ) -> None:
        no_box: Any = None  # tools that need a box are not among the schemas then
        inner = box.inner if isinstance(box, UsersBox) else box
        super().__init__(no_box if inner is None else inner, task, names=(*box_tools, "finish"), functions=functions)
        self._users_box = no_box if box is None else box
        # The dialect has parameters for these names.
        for name in sorted(COMPACT_PARAMETERS.keys() & self._functions if compact else ()):
            if list(self._functions[name].parameters["properties"]) != list(COMPACT_PARAMETERS[name]):
                raise UserError(
                    f"the tool {name} of the environment must take the parameters of the model's own: "
                    f"({', '.join(COMPACT_PARAMETERS[name])})"
                )
        built_in = [schema for schema in SCHEMAS if schema["function"]["name"] in box_tools]
        self.schemas = (*(tool.schema for tool in self._functions.values()), *built_in)
        self._compact = compact

    def summary(self) -> str:
        """A line per tool, for prompts of the compact dialect, which does not show its built-in tools."""
        lines: list[str] = []
        for schema in self.schemas:
            about = schema["function"]
            if about["name"] in COMPACT_PARAMETERS:
                continue
            lines.append(f"{about['name']}({', '.join(about['parameters']['properties'])}): {about['description']}")
        return "\n".join(lines)

    async def call(self, call: ToolCall) -> str:
        """The result of a call as the model reads it. Raises only BoxError whose payer is "infra"."""
        tool = self._functions.get(call.name)
        if self._compact and tool is not None and call.arguments is not None:
            properties = tool.parameters["properties"]
            arguments = dict(zip(properties, call.arguments.values(), strict=False))
            extra = len(call.arguments) > len(arguments)
            arguments = {name: _converted(value, properties[name]) for name, value in arguments.items()}
            call = msgspec.structs.replace(call, arguments=arguments | ({"": ""} if extra else {}))
        return await super().call(call)


def _converted(value: object, about: dict[str, Any]) -> object:
    """The text of an argument as a value of the parameter's type, or the text itself if it cannot be converted."""
    if about["type"] == "string":
        return value
    try:
        return msgspec.json.decode(str(value))
    except msgspec.MsgspecError:
        return value
