"""The Offers of this package's kinds of models. A kind's modules are imported when its function is called."""

from __future__ import annotations

from shardwright.train.config.catalog.kinds import Offers


def llama() -> Offers:
    from shardwright.train.models.native import context, hugging_face_tables, llama, plans

    return Offers(
        model=llama.Llama,
        tensor_plan=plans.llama_plan,
        uneven=plans.llama_uneven,
        divide_samples=context.divide_samples,
        key_map=hugging_face_tables.llama_keys,
        config_json=hugging_face_tables.llama_config,
        shapes={"llama": hugging_face_tables.llama_shape},
        layers=plans.llama_layers,
    )


def hybrid() -> Offers:
    from shardwright.train.models.native import context, hugging_face_tables, hybrid, plans

    return Offers(
        model=hybrid.Hybrid,
        tensor_plan=plans.hybrid_plan,
        uneven=plans.hybrid_uneven,
        divide_samples=context.divide_samples,
        check=context.check_hybrid,
        key_map=hugging_face_tables.hybrid_keys,
        config_json=hugging_face_tables.hybrid_config,
        shapes={
            "nemotron_h": hugging_face_tables.hybrid_shape,
            "shardwright_hybrid": hugging_face_tables.hybrid_shape,
        },
        expert_layers=plans.expert_layers,
        layers=plans.hybrid_layers,
    )


def hf() -> Offers:
    from shardwright.train.models.hf import checks, context, layers, transformers_model

    return Offers(
        model=transformers_model.HuggingFaceModel,
        key_map=transformers_model.key_map,
        config_json=transformers_model.config_json,
        divide_samples=context.divide_samples,
        check=checks.check,
        try_ahead=checks.try_ahead,
        layers=layers.layers_of,
        fingerprints=transformers_model.fingerprints,
    )


def python() -> Offers:
    from shardwright.train.models.foreign import python

    return Offers(
        model=python.PythonModel,
        divide_samples=python.divide_samples,
        check=python.check,
        fingerprints=python.fingerprints,
    )
