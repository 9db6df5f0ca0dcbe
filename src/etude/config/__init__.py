"""Typed configuration, one class per stage. Unknown keys are errors. No torch; `cli/overlays.py` reads the TOML files.

Relative paths start at the current folder, where `outputs/` is written as well. A validated configuration holds
absolute paths, so that a run can be resumed from any folder.
"""

from __future__ import annotations

from etude.config.catalogue import CHAT_TEMPLATES, PRETRAINED, PretrainedModel, cache, pretrained
from etude.config.engine import EngineConfig, InferenceConfig, ServerConfig, WeightSource
from etude.config.live import CanaryConfig, ClusterConfig, GateConfig, LabelsConfig, LiveConfig, LiveGatewayConfig
from etude.config.run import (
    AgentConfig,
    CheatsConfig,
    EvalConfig,
    Guard,
    GuardsConfig,
    LengthCost,
    LoraConfig,
    LossConfig,
    Mask,
    ModelConfig,
    OnPolicyDistillConfig,
    RewardConfig,
    RLConfig,
    RolloutConfig,
    TrainerConfig,
    WeightsConfig,
)
from etude.config.sandbox import (
    SANDBOX_TYPES,
    ContainerSandboxConfig,
    NamespaceSandboxConfig,
    SandboxConfig,
    validate_sandbox,
)
from etude.config.sections import Section, bundled, bundled_model, find_model, import_object, keys, validate
from etude.config.tasks import (
    BuildConfig,
    EditTableConfig,
    TaskKind,
    TasksConfig,
    TaskSource,
    TracesConfig,
    WeightedSource,
)

__all__ = [
    "CHAT_TEMPLATES", "PRETRAINED", "SANDBOX_TYPES", "AgentConfig", "BuildConfig", "CanaryConfig", "CheatsConfig",
    "ClusterConfig", "ContainerSandboxConfig", "EditTableConfig", "EngineConfig", "EvalConfig", "GateConfig",
    "Guard", "GuardsConfig", "InferenceConfig", "LabelsConfig", "LengthCost", "LiveConfig", "LiveGatewayConfig",
    "LoraConfig", "LossConfig", "Mask", "ModelConfig", "NamespaceSandboxConfig", "OnPolicyDistillConfig",
    "PretrainedModel", "RLConfig", "RewardConfig", "RolloutConfig", "SandboxConfig", "Section", "ServerConfig",
    "TaskKind", "TaskSource", "TasksConfig", "TracesConfig", "TrainerConfig", "WeightSource", "WeightedSource",
    "WeightsConfig", "bundled", "bundled_model", "cache", "find_model", "import_object", "keys", "pretrained",
    "validate", "validate_sandbox",
]  # fmt: skip
