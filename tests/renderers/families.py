"""Model folders of the families whose chat templates are in `templates/`: the template, and a tokenizer of bytes with
the family's special tokens."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

TEMPLATES = Path(__file__).parent / "templates"
CHATML = "<|endoftext|> <|im_start|> <|im_end|>"
TOOL_CALL = " <tool_call> </tool_call>"
QWEN3 = TOOL_CALL + " <tool_response> </tool_response> <think> </think>"
DEEPSEEK = "<｜begin▁of▁sentence｜> <｜end▁of▁sentence｜> <｜User｜> <｜Assistant｜> "
DEEPSEEK_CALLS = (
    "<｜tool▁calls▁begin｜> <｜tool▁calls▁end｜> <｜tool▁call▁begin｜> <｜tool▁call▁end｜> <｜tool▁sep｜> "
    "<｜tool▁outputs▁begin｜> <｜tool▁outputs▁end｜> <｜tool▁output▁begin｜> <｜tool▁output▁end｜> "
)
GLM = "<|endoftext|> [gMASK] <sop> <|system|> <|user|> <|assistant|> <|observation|>"
MISTRAL = (
    "<s> </s> [INST] [/INST] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_CALLS] [TOOL_RESULTS] [/TOOL_RESULTS] "
    "[TOOL_CONTENT] [SYSTEM_PROMPT] [/SYSTEM_PROMPT] [ARGS] [CALL_ID] [THINK] [/THINK]"
)


@dataclass(frozen=True)
class Family:
    """A family: its template, its special and other added tokens, the token that ends a text. Then what is expected:
    the dialect, the calls a turn may have (None: any number), or a part of the refusal."""

    name: str
    eos: str
    special: str
    added: str = ""
    dialect: str = ""
    calls: int | None = None
    refusal: str = ""
    stops: str = ""  # further tokens of generation_config.json
    folder: Path = TEMPLATES  # of the template

    @property
    def template(self) -> str:
        return (self.folder / f"{self.name}.jinja").read_text(encoding="utf-8")

    @property
    def chatml(self) -> bool:
        """Whether its vocabulary has the tokens that mark turns as ChatML does."""
        return {"<|im_start|>", IM_END} <= set(self.special.split())

    def tokenizer(self) -> Tokenizer:
        alphabet = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
        made = Tokenizer(models.BPE(alphabet, []))
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        made.decoder = decoders.ByteLevel()
        made.add_special_tokens(self.special.split())
        made.add_tokens([AddedToken(name, normalized=False) for name in self.added.split()])
        return made

    def write(self, folder: Path) -> Path:
        """Writes a model folder without weights."""
        folder.mkdir()
        tokenizer = self.tokenizer()
        tokenizer.save(str(folder / "tokenizer.json"))
        tokens = {"eos_token": self.eos, "bos_token": self.special.split()[0]}
        (folder / "tokenizer_config.json").write_text(json.dumps(tokens))
        ids = [tokenizer.token_to_id(name) for name in (self.eos, *self.stops.split())]
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
        (folder / "chat_template.jinja").write_text(self.template, encoding="utf-8")
        return folder


IM_END, LATER = "<|im_end|>", "turns put together differ"
FAMILIES = (
    Family("qwen2.5", IM_END, CHATML, TOOL_CALL, "hermes"),
    Family("qwen3", IM_END, CHATML, QWEN3, "hermes"),
    Family("qwen3-2507", IM_END, CHATML, QWEN3, "hermes"),
    Family("qwen3-coder", IM_END, CHATML, QWEN3, "qwen3_coder"),
    Family("qwen3.5", IM_END, CHATML, QWEN3, "qwen3_coder"),
    Family("qwen3.6", IM_END, CHATML, QWEN3, "qwen3_coder"),
    Family("qwen3.8", IM_END, CHATML, QWEN3, "qwen3_coder"),
    Family("nemotron-3", IM_END, CHATML, QWEN3, "qwen3_coder"),
    Family("nemotron-nano-2", "<SPECIAL_12>", "<s> <SPECIAL_10> <SPECIAL_11> <SPECIAL_12>", "", "nemotron_json"),
    Family("step-3.5", IM_END, "<s> " + CHATML, QWEN3, "qwen3_coder"),
    Family("seed-oss", "<seed:eos>", "<seed:bos> <seed:eos>", "<seed:think> </seed:think> <seed:tool_call> "
           "</seed:tool_call>", "seed_oss"),
    Family("glm-4.5", "<|endoftext|>", GLM, QWEN3 + " <arg_key> </arg_key> <arg_value> </arg_value>", "glm45",
           stops="<|user|> <|observation|>"),
    Family("glm-4.7", "<|endoftext|>", GLM, QWEN3 + " <arg_key> </arg_key> <arg_value> </arg_value>", "glm45"),
    Family("kimi-k2", IM_END, "[BOS] [EOS] <|im_end|> <|im_user|> <|im_assistant|> <|im_system|> <|im_middle|>",
           "<|tool_calls_section_begin|> <|tool_calls_section_end|> <|tool_call_begin|> <|tool_call_argument_begin|> "
           "<|tool_call_end|>", "kimi_k2"),
    Family("deepseek-v3.1", "<｜end▁of▁sentence｜>", DEEPSEEK + DEEPSEEK_CALLS, "<think> </think>", "deepseek_v31"),
    Family("deepseek-v3.2", "<｜end▁of▁sentence｜>", DEEPSEEK, "<think> </think> ｜DSML｜", "deepseek_v32"),
    Family("deepseek-v4", "<｜end▁of▁sentence｜>", DEEPSEEK, "<think> </think> ｜DSML｜", "deepseek_v4"),
    Family("minimax-m2", "[e~[", "]~!b[ ]~b] [e~[", "<minimax:tool_call> </minimax:tool_call> <think> </think>",
           "minimax_m2"),
    Family("gpt-oss", "<|return|>", "<|startoftext|> <|endoftext|> <|return|> <|constrain|> <|channel|> <|start|> "
           "<|end|> <|message|> <|call|>", "", "openai", 1, stops="<|endoftext|> <|call|>"),
    Family("granite-4", "<|end_of_text|>", "<|end_of_text|> <|start_of_role|> <|end_of_role|>", TOOL_CALL, "hermes"),
    Family("llama-3.1", "<|eot_id|>", "<|begin_of_text|> <|end_of_text|> <|start_header_id|> <|end_header_id|> "
           "<|eom_id|> <|eot_id|> <|python_tag|>", "", "llama3_json", 1, stops="<|end_of_text|> <|eom_id|>"),
    Family("lfm2", IM_END, "<|startoftext|> <|im_start|> <|im_end|> <|tool_list_start|> <|tool_list_end|> "
           "<|tool_call_start|> <|tool_call_end|> <|tool_response_start|> <|tool_response_end|>", "", "lfm2"),
    Family("ministral-3", "</s>", MISTRAL, "", "mistral"),
    Family("mistral-small-3.2", "</s>", MISTRAL, "", "mistral"),
    Family("deepseek-v3", "<｜end▁of▁sentence｜>", DEEPSEEK + DEEPSEEK_CALLS, "<think> </think>", refusal=LATER),
    Family("gemma-4", "<turn|>", "<bos> <eos> <|turn> <turn|> <|channel> <channel|> <|think|> <|\"|> <|tool> <tool|> "
           "<|tool_call> <tool_call|> <|tool_response> <tool_response|>", stops="<|tool_response>",
           refusal="no dialect that is known here"),
    Family("phi-3.5", "<|end|>", "<|endoftext|> <|system|> <|user|> <|assistant|> <|end|>", refusal="no generation"),
    Family("smollm3", IM_END, CHATML, QWEN3, refusal="drops or repeats tool calls"),
)  # fmt: skip


def _plain(name: str, eos: str, special: str, refusal: str) -> Family:
    return Family(name, eos, special, refusal=refusal, folder=TEMPLATES / "without_tools")


# Of these none calls tools; those with the tokens of ChatML get the bundled template proposed.
DROPS, FAILS = "drops or repeats tool calls", "fails on a tool call"
S = "<s> </s>"
PHI3 = "<|endoftext|> <|system|> <|user|> <|assistant|> <|end|>"
WITHOUT_TOOLS = (
    _plain("smollm2", IM_END, CHATML, DROPS),
    _plain("openhermes-2.5", IM_END, f"{S} <|im_start|> {IM_END}", DROPS),
    _plain("chatml", IM_END, CHATML, DROPS),
    _plain("gemma-chatml", IM_END, f"<pad> <eos> <bos> <|im_start|> {IM_END}", DROPS),
    _plain("yi-chat", "<|endoftext|>", f"<|startoftext|> {CHATML}", DROPS),
    _plain("qwen2.5-vl", IM_END, CHATML + " <|vision_start|> <|vision_end|> <|image_pad|> <|video_pad|>", DROPS),
    _plain("phi-4", IM_END, CHATML + " <|im_sep|>", DROPS),
    _plain("phi-4-reasoning", IM_END, CHATML + " <|im_sep|>", DROPS),
    _plain("smolvlm", "<end_of_utterance>", CHATML + " <end_of_utterance>", FAILS),
    _plain("zephyr", "</s>", S, DROPS),
    _plain("openchat-3.5", "<|end_of_turn|>", S + " <|end_of_turn|>", DROPS),
    _plain("mistral-7b-v0.2", "</s>", S, FAILS),
    _plain("mistral-small-3", "</s>", S + " [INST] [/INST] [SYSTEM_PROMPT] [/SYSTEM_PROMPT]", FAILS),
    _plain("idefics3", "<end_of_utterance>", "<|begin_of_text|> <end_of_utterance>", FAILS),
    _plain("phi-3-mini", "<|end|>", PHI3, DROPS),
    _plain("phi-3-vision", "<|end|>", PHI3, DROPS),
    _plain("ling-lite", "<|endoftext|>", "<|startoftext|> <|endoftext|> <role> </role>", DROPS),
    _plain("gigachat-20b", "</s>", S + " <|message_sep|> <|role_sep|>", "fails on a conversation"),
    _plain("megrez-3b", "<|turn_end|>", "<|role_start|> <|role_end|> <|turn_end|>", DROPS),
    _plain("rwkv-world", "<|endoftext|>", "<|endoftext|>", DROPS),
    _plain("alpaca", "</s>", S, DROPS),
)
