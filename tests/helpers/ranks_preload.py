"""What the server of `ranks` imports, once for all ranks."""

import torch.distributed  # noqa: F401
import transformers  # noqa: F401

import etude.trainer.rl.execution  # noqa: F401
