"""Model families from other packages: `register`, and what a family is made of.

    from enginecore.models import DecoderSpec, common_spec, register

See docs/add-a-family.md.
"""

from enginecore.worker.models.families import Family, decoder_spec, register
from enginecore.worker.models.families.settings import (
    activation,
    common_spec,
    refuse,
    same_window,
    typed_windows,
)
from enginecore.worker.models.spec import DecoderSpec, ExpertSpec, RopeSpec, TensorNames, rope_spec

__all__ = [
    "DecoderSpec",
    "ExpertSpec",
    "Family",
    "RopeSpec",
    "TensorNames",
    "activation",
    "common_spec",
    "decoder_spec",
    "refuse",
    "register",
    "rope_spec",
    "same_window",
    "typed_windows",
]
