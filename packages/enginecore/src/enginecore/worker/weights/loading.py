"""Build a model from its files and fill it with its weights."""

from collections.abc import Callable

import torch

from collectives import Communicator, ExpertPlacement
from enginecore.errors import ModelError
from enginecore.model_files import ModelFiles
from enginecore.worker.models.decoder import Decoder
from enginecore.worker.models.families import decoder_spec
from enginecore.worker.models.parallel import ModelParallel
from enginecore.worker.weights import checkpoint
from enginecore.worker.weights.naming import canonical
from enginecore.worker.weights.packing import pack_linear_layers

_IGNORED_SUFFIXES = (".rotary_emb.inv_freq", ".masked_bias", ".attn.bias")
"""Buffers that older checkpoints carry and that are computed here."""


def load_decoder(
    files: ModelFiles,
    comm: Communicator,
    *,
    ep: Communicator | None = None,
    placements: tuple[ExpertPlacement, ...] = (),
    layers: range | None = None,
    dtype: torch.dtype,
    device: torch.device,
    max_positions: int,
    on_loaded: Callable[[int, int], object] | None = None,
) -> Decoder:
    """Return the model of `files` on `device`, every parameter loaded and none left over.

    `comm` is the tensor-parallel group; `ep` and `placements` spread experts as ModelParallel says; `layers`
    is what this pipeline stage has, all of them if None. Only what this rank holds is kept.
    `on_loaded` is told after each tensor how many are loaded, and of how many.

    Raises:
        ModelError: the architecture is not supported or cannot be cut for the ranks, or a tensor is missing,
            unknown or of a wrong shape.
    """
    parallel = ModelParallel(comm, ep, placements)
    model = empty_decoder(
        files, parallel, layers=layers, dtype=dtype, device=device, max_positions=max_positions
    )
    _fill(model, files, on_loaded)
    pack_linear_layers(model)
    return model.eval()


def empty_decoder(
    files: ModelFiles,
    parallel: ModelParallel,
    *,
    layers: range | None,
    dtype: torch.dtype,
    device: torch.device,
    max_positions: int,
) -> Decoder:
    """Return the model of `files` without its weights; on the device "meta" it takes no memory.

    Raises:
        ModelError: the architecture is not supported or cannot be cut for the ranks.
    """
    spec = decoder_spec(files.config)
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            return Decoder(spec, parallel, max_positions=max_positions, layers=layers)
    except ValueError as error:
        raise ModelError(f"{files.path}: {error}") from error
    finally:
        torch.set_default_dtype(default)


@torch.no_grad()
def _fill(model: Decoder, files: ModelFiles, on_loaded: Callable[[int, int], object] | None) -> None:
    loaders = model.loaders()
    loaded: set[str] = set()
    for name, tensor in checkpoint.tensors(files):
        if name.endswith(_IGNORED_SUFFIXES) or (name == "lm_head.weight" and model.spec.tie_embeddings):
            continue
        try:
            for place, part in canonical(model.spec, name, tensor):
                if place in loaders:
                    loaders[place](part)
                    loaded.add(place)
                    if on_loaded is not None:
                        on_loaded(len(loaded), len(loaders))
                elif not model.is_elsewhere(place):
                    raise ModelError(f"{files.path}: tensor {name} has no place in this architecture")
        except ModelError:
            raise
        except ValueError as error:
            raise ModelError(f"{files.path}: tensor {name}: {error}") from error
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
