"""The dialects of tool calls of model families. Names are those of vLLM's `--tool-call-parser`.

    hermes         Qwen2.5, Qwen3, Granite 4     <tool_call>{"name": ..., "arguments": {...}}</tool_call>
    qwen3_coder    Qwen3-Coder, Qwen3.5 and later, Nemotron 3, Step 3.5
                                                 <tool_call><function=f><parameter=a>...</parameter></function></tool_call>
    seed_oss       Seed-OSS                      the same between <seed:tool_call> tags
    glm45          GLM-4.5 to 4.7, GLM-5         <tool_call>f<arg_key>a</arg_key><arg_value>...</arg_value></tool_call>
    kimi_k2        Kimi-K2                       <|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{...}
    deepseek_v3    DeepSeek-V3, R1               <｜tool▁call▁begin｜>function<｜tool▁sep｜>f, JSON in a code block
    deepseek_v31   DeepSeek-V3.1                 <｜tool▁call▁begin｜>f<｜tool▁sep｜>{...}
    deepseek_v32   DeepSeek-V3.2                 <｜DSML｜invoke name="f"><｜DSML｜parameter name="a" string="true">...
    deepseek_v4    DeepSeek-V4                   the same between other tags
    minimax        MiniMax-M1                    <tool_calls>, a JSON object a line
    minimax_m2     MiniMax-M2                    <minimax:tool_call><invoke name="f"><parameter name="a">...
    mistral        Mistral, Ministral, Devstral  [TOOL_CALLS][{...}], or [TOOL_CALLS]f[ARGS]{...}
    nemotron_json  Nemotron Nano 2               <TOOLCALL>[{...}]</TOOLCALL>
    lfm2           LFM2                          <|tool_call_start|>[f(a=1)]<|tool_call_end|>
    olmo3          OLMo 3                        <function_calls>, a Python call a line
    openai         gpt-oss                       harmony: to=functions.f<|channel|>commentary json<|message|>{...}
    llama3_json    Llama 3.1 to 3.3              {"name": ..., "parameters": {...}} as the whole turn
    pythonic       Llama 3.2 and 4               [f(a=1)] as the whole turn

A model may differ from its family in this table: `trial` decides by the model's own template.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from etude.renderers.base import Tool, malformed
from etude.renderers.calls import (
    Broken,
    ParsedCall,
    Reader,
    call_of,
    headed_json,
    json_at,
    json_call,
    json_list,
    json_object,
    python_calls,
    sections,
    skip_space,
    tagged,
)


@dataclass(frozen=True)
class TurnParts:
    """A turn's text besides calls, its calls, and its reasoning in dialects with a place for it."""

    text: str
    calls: Sequence[ParsedCall]
    reasoning: str = ""


Parse = Callable[[str, Sequence[Tool]], TurnParts]


@dataclass(frozen=True)
class ToolDialect:
    """A syntax of tool calls. `stops` end a sampled turn even if the model's configuration lacks them; `ends` are
    tokens that equally close a turn. `call_id` makes the id of a call from its name, its number in the turn and the
    model's id, for templates that demand a form. `thinks`: the dialect marks reasoning itself; otherwise the template's
    tags of thoughts do."""

    name: str
    parse: Parse
    stops: tuple[str, ...] = ()
    ends: tuple[str, ...] = ()
    call_id: Callable[[str, int, str], str] | None = None
    thinks: bool = False


def _in_sections(*args: str | Reader, several: bool = False) -> Parse:
    *marks, read = args

    def parse(text: str, tools: Sequence[Tool]) -> TurnParts:
        opening, closing = map(str, marks)
        assert callable(read)
        return TurnParts(*sections(text, opening, closing, read, tools, several=several))

    return parse


def _xml(lines: bool) -> Reader:
    value = r"(?P<value>.*?)</parameter>(?=\s*(?:<parameter=|</function>))"
    return tagged(
        r"<function=(?P<name>[^>\n]*)>", rf"\s*<parameter=(?P<key>[^>\n]+)>{value}", r"\s*</function>", lines=lines
    )


def _invokes(tag: str, attribute: str = "") -> Reader:
    value = rf'<{tag}parameter name="(?P<key>[^"]+)"{attribute}>(?P<value>.*?)</{tag}parameter>'
    return tagged(
        rf'<{tag}invoke name="(?P<name>[^"]*)">',
        rf"\s*{value}(?=\s*(?:<{tag}parameter name=|</{tag}invoke>))",
        rf"\s*</{tag}invoke>",
    )


_DSML = _invokes("｜DSML｜", ' string="(?P<string>true|false)"')
_GLM = tagged(
    r"(?P<name>[^<\n]*)(?:\n\s*)?(?=<arg_key>|</tool_call>)",
    r"\s*<arg_key>(?P<key>[^<]*)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>(?=\s*(?:<arg_key>|</tool_call>))",
    r"\s*(?=</tool_call>)",
)
_KIMI = headed_json(
    r"<\|tool_call_begin\|>\s*(?P<id>(?:functions\.)?(?P<name>[^<\s]+?)(?::\d+)?)\s*<\|tool_call_argument_begin\|>\s*",
    r"\s*<\|tool_call_end\|>",
)
_DEEPSEEK_V3 = headed_json(
    r"<｜tool▁call▁begin｜>\w*<｜tool▁sep｜>(?P<name>[^\n<]+)\n```json\n", r"\s*```\s*<｜tool▁call▁end｜>"
)
_DEEPSEEK_V31 = headed_json(r"<｜tool▁call▁begin｜>(?P<name>[^<]+)<｜tool▁sep｜>", r"\s*<｜tool▁call▁end｜>")
_MISTRAL = headed_json(r"(?P<name>[^\[{<\s]+)\s*(?:\[CALL_ID\](?P<id>\w+))?\[ARGS\]\s*", "")


def _mistral(text: str, at: int, tools: Sequence[Tool]) -> tuple[list[ParsedCall], int]:
    return (json_list if text.startswith("[", at) else _MISTRAL)(text, at, tools)


def _python_until(closing: str) -> Reader:
    def read(text: str, at: int, tools: Sequence[Tool]) -> tuple[list[ParsedCall], int]:
        end = text.find(closing, at)
        if end < 0:
            raise Broken("not closed")
        return python_calls(text[at:end]), end

    return read


# Calls that are the whole turn

_BARE = re.compile(r'\{\s*"(?:name|type|function)"\s*:')
_BARE_BEGINNINGS = ('{"name":', '{"type":', '{"function":')
_PYTHON_TAG = "<|python_tag|>"


def _llama(text: str, tools: Sequence[Tool]) -> TurnParts:
    """Reads JSON objects, separated by `;`, with or without the tag of code before them."""
    body = text.strip()
    tag = body.startswith(_PYTHON_TAG)
    body = body.removeprefix(_PYTHON_TAG).lstrip()
    begun = "".join(body.split())
    if not tag and not _BARE.match(body) and not (begun and any(b.startswith(begun) for b in _BARE_BEGINNINGS)):
        return TurnParts(text, ())
    calls: list[ParsedCall] = []
    at = 0
    try:
        while True:
            value, at = json_at(body, at)
            if not tag and not (isinstance(value, dict) and {"parameters", "arguments"} & value.keys()):
                return TurnParts(text, ())  # an answer in JSON
            calls.append(json_call(value))
            at = skip_space(body, at)
            if not body.startswith(";", at):
                break
            at = skip_space(body, at + 1)
    except Broken as e:
        return TurnParts("", [*calls, ParsedCall(malformed(e.name, e.why))])
    return TurnParts(body[at:], calls)


_CALL_LIST = re.compile(r"\[\s*[A-Za-z_][\w.]*\(")


def _pythonic(text: str, tools: Sequence[Tool]) -> TurnParts:
    body = text.strip().removeprefix(_PYTHON_TAG).lstrip()
    if not _CALL_LIST.match(body):
        return TurnParts(text, ())
    try:
        return TurnParts("", python_calls(body))
    except Broken as e:
        return TurnParts("", [ParsedCall(malformed("", e.why))])


# Harmony, https://cookbook.openai.com/articles/openai-harmony

_RECIPIENT = re.compile(r"\bto=(?:functions\.)?([^\s<]+)")
_CUT_HEADER = re.compile(r"\s*(?:assistant)?\s*to=[\w.-]+\s*")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_MESSAGE_ENDS = ("<|end|>", "<|call|>", "<|return|>")


def _harmony(text: str, tools: Sequence[Tool]) -> TurnParts:
    """Reads messages with a header each: a call (to a function), reasoning (on the channel `analysis`), or text."""
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[ParsedCall] = []
    for message in text.split("<|start|>"):
        for end in _MESSAGE_ENDS:
            message = message.removesuffix(end)
        header, separator, body = message.partition("<|message|>")
        recipient, channel = _RECIPIENT.search(header), _CHANNEL.search(header)
        if not separator and channel is None and not _CUT_HEADER.fullmatch(header):
            texts.append(header.removeprefix("assistant") if calls or texts or thoughts else header)
        elif recipient is not None:
            calls.append(_harmony_call(recipient[1], body if separator else ""))
        elif channel is not None and channel[1] == "analysis":
            thoughts.append(body)
        else:
            texts.append(body)
    return TurnParts("\n".join(filter(None, texts)), calls, "\n".join(filter(None, thoughts)))


def _harmony_call(name: str, body: str) -> ParsedCall:
    try:
        value, end = json_at(body, skip_space(body, 0), name)
        if body[end:].strip():
            raise Broken("text after the arguments", name)
    except Broken as e:
        return ParsedCall(malformed(name, e.why))
    return call_of(name, value)


# The table


def _kimi_id(name: str, number: int, call_id: str) -> str:
    return call_id if call_id.startswith(f"functions.{name}:") else f"functions.{name}:{number}"


def _mistral_id(name: str, number: int, call_id: str) -> str:
    """An id of nine letters or digits, as Mistral's templates demand."""
    if re.fullmatch(r"[A-Za-z0-9]{9}", call_id):
        return call_id
    return re.sub(r"[^A-Za-z0-9]", "", call_id)[-7:].rjust(7, "0") + f"{number % 100:02d}"


_HARMONY_STOPS = ("<|call|>", "<|return|>")
_GLM_STOPS = ("<|observation|>", "<|user|>", "<|endoftext|>")
_LLAMA_ENDS = ("<|eot_id|>", "<|eom_id|>")
_TOOL_CALL = ("<tool_call>", "</tool_call>")
_DEEPSEEK = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")

DIALECTS: tuple[ToolDialect, ...] = (
    ToolDialect("hermes", _in_sections(*_TOOL_CALL, json_object)),
    ToolDialect("qwen3_coder", _in_sections(*_TOOL_CALL, _xml(lines=True))),
    ToolDialect("seed_oss", _in_sections("<seed:tool_call>", "</seed:tool_call>", _xml(lines=False))),
    ToolDialect("glm45", _in_sections(*_TOOL_CALL, _GLM), stops=_GLM_STOPS),
    ToolDialect(
        "kimi_k2",
        _in_sections("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", _KIMI, several=True),
        call_id=_kimi_id,
    ),
    ToolDialect("deepseek_v3", _in_sections(*_DEEPSEEK, _DEEPSEEK_V3, several=True)),
    ToolDialect("deepseek_v31", _in_sections(*_DEEPSEEK, _DEEPSEEK_V31, several=True)),
    ToolDialect(
        "deepseek_v32",
        _in_sections("<｜DSML｜function_calls>", "</｜DSML｜function_calls>", _DSML, several=True),
    ),
    ToolDialect("deepseek_v4", _in_sections("<｜DSML｜tool_calls>", "</｜DSML｜tool_calls>", _DSML, several=True)),
    ToolDialect("minimax", _in_sections("<tool_calls>", "</tool_calls>", json_object, several=True)),
    ToolDialect("minimax_m2", _in_sections("<minimax:tool_call>", "</minimax:tool_call>", _invokes(""), several=True)),
    ToolDialect("mistral", _in_sections("[TOOL_CALLS]", "", _mistral), call_id=_mistral_id),
    ToolDialect("nemotron_json", _in_sections("<TOOLCALL>", "</TOOLCALL>", json_list)),
    ToolDialect("lfm2", _in_sections("<|tool_call_start|>", "<|tool_call_end|>", _python_until("<|tool_call_end|>"))),
    ToolDialect("olmo3", _in_sections("<function_calls>", "</function_calls>", _python_until("</function_calls>"))),
    ToolDialect("openai", _harmony, stops=_HARMONY_STOPS, ends=(*_HARMONY_STOPS, "<|end|>"), thinks=True),
    ToolDialect("llama3_json", _llama, ends=_LLAMA_ENDS),
    ToolDialect("pythonic", _pythonic, ends=_LLAMA_ENDS),
)
