"""Typed configuration, one class per stage. Unknown keys are errors. No torch; `cli/overlays.py` reads the TOML files.

Relative paths start at the current folder, where `outputs/` is written as well. A validated configuration holds
absolute paths, so that a run can be resumed from any folder.
"""

# pyright: reportUnusedImport=false
from etude.config.catalogue import CHAT_TEMPLATES, PRETRAINED, PretrainedModel, cache, pretrained
from etude.config.engine import EngineConfig, InferenceConfig, ServerConfig, WeightSource
from etude.config.fleet import EnginesTable, FleetConfig, PlayersTable, RanksTable, check_fleet, check_ranks_apart
from etude.config.live import LiveConfig
from etude.config.run import (
    AgentConfig,
    EvalConfig,
    Guard,
    GuardsConfig,
    LengthCost,
    LoraConfig,
    LossConfig,
    Mask,
    MeshConfig,
    ModelConfig,
    OnPolicyDistillConfig,
    RewardConfig,
    RLConfig,
    RolloutConfig,
    TrainerConfig,
    check_device_of_ranks,
)
from etude.config.sandbox import NamespaceSandboxConfig, SandboxConfig, validate_sandbox
from etude.config.sections import (
    Section,
    bundled,
    bundled_model,
    find_model,
    import_object,
    keys,
    load_toml,
    validate,
)
from etude.config.tasks import (
    MIN_DECIDED,
    AgreedRolloutsConfig,
    BuildConfig,
    DocumentBuildConfig,
    EditTableConfig,
    TasksConfig,
    TaskSource,
    TracesConfig,
)
