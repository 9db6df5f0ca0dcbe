"""`etude train CONFIG.toml`: reads the stage from the file and runs it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from etude import runfolder
from etude.config import RLConfig, read_toml, validate
from etude.errors import UserError

OUTPUTS = Path("outputs")


def train(path: Path, overrides: Sequence[str], *, resume: bool, dry_run: bool) -> None:
    """Runs the stage that `path` describes. With `resume`, `path` may also be the run folder itself."""
    if resume and path.is_dir():
        if overrides:
            raise UserError("a resumed run keeps its configuration; drop the overrides")
        return _rl(runfolder.load_config(path), path, resume=True, toml=None)
    data = read_toml(path, overrides)
    stage = data.get("stage", "rl")
    if stage == "rl":
        config = validate(RLConfig, data, str(path))
        if dry_run:
            return print(config.model_dump_json(indent=2))
        return _rl(config, OUTPUTS / config.name, resume=resume, toml=path)
    from etude.trainer.finetune.config import ApplyConfig, MidtrainConfig, SftConfig

    kinds = {"midtrain": MidtrainConfig, "sft": SftConfig, "apply": ApplyConfig}
    if stage not in kinds:
        raise UserError(f"{path}: unknown stage {stage!r}; use midtrain, sft, apply or rl")
    config = validate(kinds[stage], data, str(path))
    if dry_run:
        return print(config.model_dump_json(indent=2))
    from etude.trainer.finetune import apply, pretrain

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    if isinstance(config, MidtrainConfig):
        pretrain.midtrain(config)
    elif isinstance(config, SftConfig):
        pretrain.sft(config)
    else:
        apply.finetune(config, resume=resume)


def _rl(config: RLConfig, folder: Path, *, resume: bool, toml: Path | None) -> None:
    from etude.run.launch import train_rl

    if resume:
        if not folder.exists():
            raise UserError(f"{folder} holds no run yet; start it without --resume")
        saved = runfolder.load_config(folder)
        if toml is not None and saved != config:
            raise UserError(
                f"{toml} differs from the configuration {folder} was started with; resume the folder itself"
            )
        config = saved
    train_rl(config, folder, resume=resume, toml=toml)
