"""What the stock clients of others get from a server of ours, as JSON: `PYTHON stock_clients.py URL CLIENT...`."""

import json
import sys

URL = sys.argv[1]
ASK = [
    {"role": "user", "content": "Fix `chunk` in src/pydash/arrays.py\ndef chunk(array, size=1):\n    return array\n"}
]
TOOL = {"type": "object", "properties": {}, "additionalProperties": False}
SCHEMA = {
    "type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"], "additionalProperties": False,
}  # fmt: skip


def of_openai():
    import openai

    client = openai.OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)
    chat = {"model": "nano", "messages": ASK, "seed": 3, "temperature": 0.0, "max_tokens": 200}
    call = client.chat.completions.create(**chat).choices[0].message.tool_calls[0]
    with client.chat.completions.stream(**{k: v for k, v in chat.items() if k != "seed"}) as stream:
        final = stream.get_final_completion()
    schema = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": SCHEMA}}
    formed = client.chat.completions.create(**chat | {"response_format": schema})
    response = client.responses.create(model="nano", input=ASK[0]["content"], max_output_tokens=200, temperature=0.0)
    with client.responses.stream(model="nano", input=ASK[0]["content"], max_output_tokens=300, temperature=0) as events:
        streamed = events.get_final_response()
    results = [
        {"type": "function_call_output", "call_id": item.call_id, "output": "ok"}
        for item in response.output
        if item.type == "function_call"
    ]
    going_on = [*results, {"role": "user", "content": "go on"}]
    second = client.responses.create(
        model="nano", input=going_on, previous_response_id=response.id, max_output_tokens=4
    )
    try:
        client.responses.create(model="nano", input="word " * 5000)
    except openai.BadRequestError as e:
        too_long = e.code
    return {
        "call": call.function.name, "streamed": final.choices[0].message.tool_calls[0].function.name,
        "schema": sorted(json.loads(formed.choices[0].message.content)),
        "model": client.models.retrieve("nano").id, "models": [card.id for card in client.models.list()],
        "response": [item.type for item in response.output], "response_stream": streamed.status,
        "second": second.usage.input_tokens > response.usage.input_tokens, "too_long": too_long,
    }  # fmt: skip


def of_anthropic():
    import anthropic

    client = anthropic.Anthropic(base_url=URL, api_key="none", max_retries=0)
    options = {"model": "nano", "max_tokens": 100, "messages": ASK}
    message = client.messages.create(**options, extra_body={"temperature": 0.0})
    with client.messages.stream(**options) as stream:
        final = stream.get_final_message()
    tools = [{"name": "list", "description": "", "input_schema": TOOL}]
    forced = client.messages.create(**options, tools=tools, tool_choice={"type": "tool", "name": "list"})
    counted = client.messages.count_tokens(model="nano", messages=ASK)
    try:
        client.messages.create(**options | {"messages": [{"role": "user", "content": "word " * 5000}]})
    except anthropic.BadRequestError as e:
        too_long = e.body["error"]["message"]
    return {
        "stop": message.stop_reason, "blocks": [block.type for block in message.content],
        "stream": final.usage.output_tokens > 0, "forced": [block.name for block in forced.content],
        "counted": counted.input_tokens == message.usage.input_tokens + message.usage.cache_read_input_tokens,
        "too_long": too_long[:18],
    }  # fmt: skip


def of_litellm():
    import litellm

    litellm.suppress_debug_info = True
    common = {"messages": ASK, "max_tokens": 200, "temperature": 0.0, "api_key": "none"}
    found = {}
    for model, base in (("openai/nano", f"{URL}/v1"), ("hosted_vllm/nano", f"{URL}/v1"), ("anthropic/nano", URL)):
        whole = litellm.completion(model=model, api_base=base, **common)
        parts = list(litellm.completion(model=model, api_base=base, stream=True, **common))
        called = [c for part in parts for c in part.choices[0].delta.tool_calls or ()]
        found[model] = [whole.choices[0].message.tool_calls[0].function.name, called[0].function.name]
    answer = litellm.responses(
        model="openai/nano", input="hello", max_output_tokens=4, api_base=f"{URL}/v1", api_key="x"
    )
    try:
        litellm.completion(
            model="openai/nano", api_base=f"{URL}/v1", **common | {"messages": [ASK[0] | {"content": "word " * 5000}]}
        )
    except litellm.ContextWindowExceededError:
        found["too_long"] = "ContextWindowExceededError"
    return found | {"responses": answer.status}


print(json.dumps({name: globals()[f"of_{name}"]() for name in sys.argv[2:]}))
