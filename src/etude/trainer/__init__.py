"""Training: `rl/` is the trainer process of a run, `finetune/` holds the stages before reinforcement learning.

Both share the optimizer (float32 master weights under bfloat16 ones) and the checkpoints. The trainer never imports
inference: episodes come to it through the store and the ledger, and weights leave it as published versions.
"""

PUBLIC = (
    "finetune.applied_edits",
    "finetune.config",
    "finetune.data",
    "finetune.pretrain",
    "finetune.provenance",
    "rl.advantages",
    "rl.batch",
    "rl.memory_table",
    "rl.presets",
    "rl.trial",
)
