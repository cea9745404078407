"""Reading a model piece by piece, so that no rank ever holds more of it than it keeps, and one module.

A model is made without its weights (parameters on the meta device, buffers real), and modules are filled from the
folder's safetensors files when it is known whether this rank keeps them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zbgrpo.errors import ModelError


class WeightFiles:
    """The tensors of a folder's safetensors files, by name."""

    def __init__(self, folder: Path) -> None:
        """Reads the files' headers; `ModelError` if one is damaged."""
        from safetensors import SafetensorError, safe_open

        self._folder = folder
        self._files: dict[str, Any] = {}  # name of a tensor -> open file
        try:
            for path in sorted(folder.glob("*.safetensors")):
                file = safe_open(str(path), framework="pt")
                self._files.update(dict.fromkeys(file.keys(), file))
        except (OSError, SafetensorError) as error:
            raise ModelError(f"model {folder}: {path.name} cannot be read: {error}") from error

    def holds_all_of(self, model: nn.Module) -> bool:
        """Whether every parameter is there under its own name and in its shape. A model whose files are written
        otherwise (other names, other formats) has to be loaded as a whole."""
        return bool(self._files) and all(
            name in self._files and list(self._files[name].get_slice(name).get_shape()) == list(parameter.shape)
            for name, parameter in model.named_parameters()
        )

    def read(self, name: str, like: Tensor, device: torch.device) -> Tensor:
        """The tensor `name` in the dtype of `like`."""
        tensor: Tensor = self._files[name].get_tensor(name)
        return tensor.to(device=device, dtype=like.dtype)

    def fill(self, module: nn.Module, prefix: str, device: torch.device, renamed: dict[str, str] | None = None) -> None:
        """Give every parameter of `module` that has no values yet those of the files. `prefix`: the module's own name,
        "" for the model; `renamed`: names of parameters that have another one in the files. Tied parameters stay so."""
        filled: dict[int, nn.Parameter] = {}
        for owner_name, owner in module.named_modules(prefix=prefix):
            for own, parameter in list(owner.named_parameters(recurse=False)):
                if parameter.device.type != "meta":
                    continue
                name = f"{owner_name}.{own}" if owner_name else own
                if id(parameter) not in filled:
                    values = self.read((renamed or {}).get(name, name), parameter, device)
                    filled[id(parameter)] = nn.Parameter(values, parameter.requires_grad)
                owner.register_parameter(own, filled[id(parameter)])


@contextmanager
def without_weights() -> Iterator[None]:
    """Modules made inside have their parameters on the meta device."""
    original = nn.Module.register_parameter

    def register(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and parameter.device.type != "meta":
            parameter = nn.Parameter(parameter.to("meta"), parameter.requires_grad)
        original(module, name, parameter)

    nn.Module.register_parameter = register  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = original  # type: ignore[method-assign]
