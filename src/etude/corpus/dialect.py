"""The special tokens of the bundled models, whose compact dialect is in `renderers/compact.py`."""

SPECIALS: tuple[str, ...] = (
    "<|endoftext|>", "<|pad|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|end|>", "<|call|>", "<|arg|>",
    "<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|file|>", *(f"<|reserved_{i}|>" for i in range(19)),
)  # fmt: skip
SPECIAL_IDS = {token: index for index, token in enumerate(SPECIALS)}
