"""From a Hugging Face config.json to what each layer of the model keeps. Reads JSON only, no checkpoint."""

from pdtx.models.build import MODEL_TYPES, context_length, layer_specs, state_sharding
from pdtx.models.growth import GrowthCurve, LayerKind, growth_curves, layer_kinds
from pdtx.models.load import load_config, preset_names
from pdtx.models.options import KV_CACHE_DTYPES

__all__ = [
    "KV_CACHE_DTYPES",
    "MODEL_TYPES",
    "GrowthCurve",
    "LayerKind",
    "context_length",
    "growth_curves",
    "layer_kinds",
    "layer_specs",
    "load_config",
    "preset_names",
    "state_sharding",
]
