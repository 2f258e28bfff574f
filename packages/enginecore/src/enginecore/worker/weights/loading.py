"""Build a model from its files and fill it with its weights."""

from collections.abc import Callable
from functools import partial

import torch

from collectives import Communicator, ExpertPlacement, ParallelLinear
from enginecore.errors import ModelError
from enginecore.model_files import ModelFiles
from enginecore.worker.models.decoder import Decoder
from enginecore.worker.models.experts import ExpertWeights
from enginecore.worker.models.families import decoder_spec
from enginecore.worker.models.parallel import ModelParallel
from enginecore.worker.weights import checkpoint
from enginecore.worker.weights.naming import canonical
from enginecore.worker.weights.packing import Packer, check_quantization, quantized_layers
from pagedattn import Quantization

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
    quantization: Quantization | None = None,
    on_loaded: Callable[[int, int], object] | None = None,
    on_phase: Callable[[str], object] = lambda phase: None,
) -> Decoder:
    """Return the model of `files` on `device`, every parameter loaded and none left over.

    The weight of a linear layer is packed, and quantised, as soon as it is whole: what it was read as is kept
    of one layer at a time.

    `comm` is the tensor-parallel group; `ep` and `placements` spread experts as ModelParallel says; `layers`
    is what this pipeline stage has, all of them if None. Only what this rank holds is kept.
    `on_loaded` is told after each tensor how many are loaded, and of how many; whoever asks for that has
    `on_phase` told of each file, where there are several.

    Raises:
        ModelError: the architecture is not supported or cannot be cut for the ranks, or a tensor is missing,
            unknown or of a wrong shape.
    """
    parallel = ModelParallel(comm, ep, placements)
    model = empty_decoder(
        files, parallel, layers=layers, dtype=dtype, device=device, max_positions=max_positions
    )
    check_quantization(model, device, quantization)
    packer = Packer(dtype, device, None if quantization is None else quantized_layers(model, quantization))
    _fill(model, files, packer, on_loaded, on_phase)
    for layer in model.modules():
        if isinstance(layer, ParallelLinear | ExpertWeights):
            packer.pack(layer)  # a head that is tied to the embedding, experts of which this rank has none
    if model.embed is not None:
        packer.pack_embedding(model.embed, model.head)
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
def _fill(
    model: Decoder,
    files: ModelFiles,
    packer: Packer,
    on_loaded: Callable[[int, int], object] | None,
    on_phase: Callable[[str], object],
) -> None:
    def on_file(number: int, count: int) -> None:
        if on_loaded is not None and count > 1:
            on_phase(f"reading weights, file {number} of {count}")

    loaders = model.loaders()
    loaded: set[str] = set()
    layers = {name: _layer_of(loader) for name, loader in loaders.items()}
    packer.expect([layer for layer in layers.values() if layer is not None])
    for name, tensor in checkpoint.tensors(files, on_file):
        if name.endswith(_IGNORED_SUFFIXES) or (name == "lm_head.weight" and model.spec.tie_embeddings):
            continue
        try:
            for place, part in canonical(model.spec, name, tensor):
                if place in loaded:
                    raise ModelError(f"{files.path}: tensor {name} is there under another name too")
                if place in loaders:
                    with packer.loading(layers[place], part.dtype):
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


def _layer_of(loader: Callable[[torch.Tensor], None]) -> ParallelLinear | ExpertWeights | None:
    """Return the linear layer or experts that a loader, a method or a partial of one, fills."""
    method = loader.func if isinstance(loader, partial) else loader
    owner = getattr(method, "__self__", None)
    return owner if isinstance(owner, ParallelLinear | ExpertWeights) else None


def storage_dtype(files: ModelFiles) -> torch.dtype | None:
    """Return the type that config.json names for the weights (`dtype`, or the older `torch_dtype`)."""
    name = files.config.get("dtype") or files.config.get("torch_dtype")
    if name is None:
        return None
    found = getattr(torch, str(name).removeprefix("torch."), None)
    if not isinstance(found, torch.dtype):
        raise ModelError(f"config.json names dtype {name!r}, which torch does not know")
    return found
