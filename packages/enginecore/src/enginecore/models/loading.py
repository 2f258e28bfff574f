"""Build a model from its files and fill it with its weights."""

import torch

from collectives import Communicator
from enginecore.errors import ModelError
from enginecore.model_files import ModelFiles
from enginecore.models.decoder import Decoder
from enginecore.models.families import decoder_spec
from enginecore.weights import checkpoint
from enginecore.weights.packing import can_pack, pack_linear_layers

_IGNORED_SUFFIXES = (".rotary_emb.inv_freq", ".masked_bias", ".attn.bias")
"""Buffers that older checkpoints carry and that are computed here."""


def load_decoder(
    files: ModelFiles, comm: Communicator, *, dtype: torch.dtype, device: torch.device, max_positions: int
) -> Decoder:
    """Return the model of `files` on `device`, every parameter loaded and none left over.

    Raises:
        ModelError: the architecture is not supported, or a tensor is missing, unknown or of a wrong shape.
    """
    spec = decoder_spec(files.config)
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            model = Decoder(spec, comm, max_positions=max_positions)
    finally:
        torch.set_default_dtype(default)
    _fill(model, files)
    if can_pack(dtype, device):
        pack_linear_layers(model)
    return model.eval()


def _fill(model: Decoder, files: ModelFiles) -> None:
    loaders = model.loaders()
    loaded = set()
    for name, tensor in checkpoint.tensors(files):
        if name in loaders:
            try:
                loaders[name](tensor)
            except ValueError as error:
                raise ModelError(f"{files.path}: tensor {name}: {error}") from error
            loaded.add(name)
        elif not (
            name.endswith(_IGNORED_SUFFIXES) or (name == "lm_head.weight" and model.spec.tie_embeddings)
        ):
            raise ModelError(f"{files.path}: tensor {name} has no place in this architecture")
    missing = [name for name in loaders if name not in loaded]
    if missing:
        raise ModelError(f"{files.path}: {len(missing)} tensors are in no file, first {missing[0]}")


def storage_dtype(files: ModelFiles) -> torch.dtype | None:
    """Return the type that config.json names for the weights (`dtype`, or the older `torch_dtype`)."""
    name = files.config.get("dtype") or files.config.get("torch_dtype")
    if name is None:
        return None
    found = getattr(torch, str(name).removeprefix("torch."), None)
    if not isinstance(found, torch.dtype):
        raise ModelError(f"config.json names dtype {name!r}, which torch does not know")
    return found
