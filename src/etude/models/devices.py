"""Checks that devices exist, before anything is loaded onto them."""

from __future__ import annotations

from etude.errors import UserError, first_line


def check_device(name: str, option: str) -> None:
    """Raises UserError unless tensors can be made on the device `name`, the value of `option`."""
    if name == "cpu":
        return
    import torch

    try:
        device = torch.device(name)
        if device.type == "meta":
            raise RuntimeError("its tensors hold no numbers")
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as e:
        why = first_line(e)
        if name.startswith("cuda") and torch.version.cuda is None:
            why = f"PyTorch {torch.__version__} is built without CUDA, so install a build with it"
        elif "device type" in why:  # followed by a list of all that PyTorch knows
            why = "PyTorch has no such device"
        raise UserError(f"{option} = {name!r} is not there: {why}; or take cpu") from None


def check_devices(kind: str, ranks: int) -> None:
    """Raises UserError unless this machine has a device of the kind `kind`, the value of trainer.device, for each of
    the ranks that it starts."""
    check_device(kind, "trainer.device")
    if kind == "cpu" or ranks == 1:
        return
    import torch

    if (count := torch.get_device_module(kind).device_count()) < ranks:
        raise UserError(
            f"trainer.mesh has {ranks} ranks with a device each, and {count} of trainer.device = {kind!r} can be seen "
            "here: set a smaller trainer.mesh, or start the ranks on more machines (docs/ranks.md)"
        )
