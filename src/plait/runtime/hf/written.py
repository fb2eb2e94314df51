"""A model as transformers writes it: the names and shapes of the tensors in its files, its config, its way to generate.

Which parameter becomes which tensors of a file is transformers' own mapping, turned round: experts that stand in one
stack are written one by one where the family's files have them so. A tied weight is written once, under its owner's name.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer, GenerationConfig
from transformers.core_model_loading import revert_weight_conversion

from ...design.errors import PlanError
from .read import TOKENIZER, build_on_meta, said

TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Written:
    """The model of a `config` that was described earlier (`described`), as files have it."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        values = dict(config)
        try:
            self._config = AutoConfig.for_model(values.pop("model_type"), **values)
            self._model = build_on_meta(self._config)
        except Exception as error:  # whatever a class raises about values that another version wrote
            raise PlanError(
                f"transformers cannot build the model that the checkpoint describes: {said(error)}."
            ) from None

    def tensors(self, name: str, whole: Tensor) -> dict[str, Tensor]:
        """The tensors of a file that a parameter becomes, by their names there; on the meta device for their shapes."""
        found: dict[str, Tensor] = revert_weight_conversion(self._model, {name: whole})
        return found

    def describe(self, folder: Path, dtype: str) -> list[Path]:
        """Writes the config, which says `dtype`, and the generation config: where. A text ends with what the tokenizer in
        the folder ends with, where that is another than the model had."""
        self._config.architectures = [type(self._model).__name__]
        self._config.dtype = TYPES[dtype]
        ends = getattr(self._config, "eos_token_id", None)
        if (folder / TOKENIZER).is_file():
            end = AutoTokenizer.from_pretrained(folder).eos_token_id
            if end is not None and end not in (ends if isinstance(ends, list) else [ends]):
                self._config.eos_token_id, self._config.bos_token_id = end, None
        self._config.save_pretrained(folder)
        GenerationConfig.from_model_config(self._config).save_pretrained(folder)
        return [folder / "config.json", folder / "generation_config.json"]
