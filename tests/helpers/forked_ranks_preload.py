"""What the server of `forked_ranks` imports, once for all ranks."""

import torch.distributed  # noqa: F401
import transformers.models.deepseek_v3.modeling_deepseek_v3
import transformers.models.gemma3.modeling_gemma3
import transformers.models.gpt_oss.modeling_gpt_oss
import transformers.models.qwen3_moe.modeling_qwen3_moe  # noqa: F401

import etude.trainer.finetune.packed
import etude.trainer.rl.execution
import etude.trainer.rl.process  # noqa: F401
