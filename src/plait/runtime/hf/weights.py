"""Real weights: from the tensors in a model directory's files to the slices of any parameter by the model's own name.

    model.safetensors                              parameter                          on tp rank 1 of 2
    model.layers.0.mlp.gate_proj.weight      ->    the same name                ->    rows 32-63, read alone
    ...block_sparse_moe.experts.*.w1.weight  -.
    ...block_sparse_moe.experts.*.w3.weight  --->  ...mlp.experts.gate_up_proj  ->    made whole, then sliced

Which key of a file becomes which parameter is transformers' own mapping: old names, and experts that stand in the files
one by one. A tensor that lies in a file as the model has it is read in slices, and nothing else of it; what must be
converted is made whole, one tensor at a time, by transformers' own operations. Their shapes are known before anything is
read: the operations are first carried out without memory.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

from ...design.errors import PlanError
from .files import RANDOM, Stored, stored

TYPES = {"F64": "fp64", "F32": "fp32", "F16": "fp16", "BF16": "bf16"}
"""What weights may be stored as; all are converted to the run's compute type when read."""
COMPARED_ROWS = 4096
"""Rows of two tensors that are held at once when they must be equal."""


@dataclass(frozen=True)
class Source:
    """Where a tensor comes from: (pattern of the converter, key in a file), in order, and the converter that makes it of
    them. Without one it is the tensor of its only key. `first` is the name that the converter knows the result by,
    `rows` how many the tensor has, where the model has more."""

    first: str
    keys: tuple[tuple[str, str], ...]
    converter: Any = None
    rows: int = 0


@dataclass(frozen=True)
class Weights:
    """The weights of a directory, matched with a model: `sources` by the model's own names."""

    stored: Mapping[str, Stored]
    sources: Mapping[str, Source]

    @property
    def said(self) -> str:
        """Where they come from, in words."""
        files = sorted({self.stored[key].file.name for source in self.sources.values() for _, key in source.keys})
        types = {TYPES[self.stored[key].dtype] for source in self.sources.values() for _, key in source.keys}
        return f"{files[0] if len(files) == 1 else f'{len(files)} safetensors files'} in {', '.join(sorted(types))}"


class Reader:
    """Tensors by the model's names, read when they are sliced: `reader[name][0:4, 8:16]`. Keeps files open while it
    lives."""

    def __init__(self, weights: Weights, model: Any) -> None:
        self._weights, self._model = weights, model
        self._files: dict[Path, Any] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._weights.sources

    def get(self, name: str, otherwise: Any, drawn: Callable[[], Tensor]) -> Any:
        """A tensor, or where the files have none, `otherwise`. Rows that it has not are those of `drawn`, whole."""
        if name not in self:
            return otherwise
        rows = self._weights.sources[name].rows
        return _Grown(self[name], rows, drawn) if rows else self[name]

    def __getitem__(self, name: str) -> Any:
        """Something that is sliced as a tensor is; what a slice gives may be a view into a mapped file."""
        source = self._weights.sources[name]
        if source.converter is None:
            return self._open(source.keys[0][1])
        return _converted(source, lambda key: self._open(key)[...], self._model)[name]

    def _open(self, key: str) -> Any:
        file = self._weights.stored[key].file
        if file not in self._files:
            self._files[file] = safe_open(file, framework="pt")
        return _Sliced(self._files[file].get_slice(key))


class _Sliced:
    """A tensor in a file, read when it is sliced, as it is stored: a check computes in a mode that turns requests for
    fp32 into such for fp64, and those of safetensors itself are not meant."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getitem__(self, index: Any) -> Tensor:
        with torch._C.DisableTorchFunction():
            found: Tensor = self._inner[index]
        return found


class _Grown:
    """A tensor in a file, with rows behind it that it has not."""

    def __init__(self, inner: Any, rows: int, drawn: Callable[[], Tensor]) -> None:
        self._inner, self._rows, self._drawn = inner, rows, drawn

    def __getitem__(self, index: Any) -> Tensor:
        first, *others = index if isinstance(index, tuple) else (index,)
        if isinstance(first, slice) and first.stop is not None and first.stop <= self._rows:
            there: Tensor = self._inner[index]
            return there
        drawn = self._drawn()
        start, stop, _ = first.indices(len(drawn)) if isinstance(first, slice) else (0, len(drawn), 1)
        new = drawn[(slice(max(start, self._rows), stop), *others)]
        if start >= self._rows:
            return new
        old: Tensor = self._inner[(slice(start, self._rows), *others)]
        # Never rounded to the type of the file: a rank that has new rows alone does not round them either.
        wide = torch.promote_types(old.dtype, new.dtype)
        return torch.cat([old.to(wide), new.to(wide)])


def find(folder: Path, model: Any, aliases: Mapping[str, str], *, grows_from: int = 0) -> Weights | None:
    """The weights in `folder` for `model` (on the meta device), or None where there are none. `aliases` are the further
    names of tied parameters; with `grows_from` files may have so many rows of its vocabulary. Whatever does not fit
    is a `PlanError`."""
    here = stored(folder)
    return None if here is None else _Match(folder, here, model, aliases, grows_from=grows_from).weights()


class _Match:
    """The tensors of a directory against those that a model has."""

    def __init__(
        self, folder: Path, here: Mapping[str, Stored], model: Any, aliases: Mapping[str, str], *, grows_from: int
    ) -> None:  # fmt: skip
        ends = (model.get_input_embeddings(), model.get_output_embeddings()) if grows_from else ()
        ours = {id(tensor) for module in ends for tensor in module.parameters(recurse=False)}
        named = model.named_parameters(remove_duplicate=False)
        self._grows_from = grows_from
        self._grow = {name for name, tensor in named if id(tensor) in ours}
        self._folder, self._here, self._model, self._aliases = folder, here, model, aliases
        self._wanted: dict[str, Tensor] = model.state_dict()
        self._parameters = {name for name, _ in model.named_parameters()}

    def weights(self) -> Weights:
        sources = self._checked()
        missing = sorted(self._missing(sources), key=dot_natural_key)
        if missing:
            raise PlanError(
                f"{self._folder} lacks tensors of this model ({len(missing)} of {len(self._parameters)}, the first "
                f"{missing[0]}): its config.json describes another model, or its files are not all there. {RANDOM}"
            )
        surplus = [key for key in self._unused if not self._ignored(key)]
        if surplus:
            raise PlanError(
                f"{self._folder} holds tensors for which this model has no place ({len(surplus)} of {len(self._here)}, "
                f"the first {surplus[0]}): its config.json describes another model. Correct it, or load the model with "
                f"transformers and save it again, which leaves them out."
            )
        found = Weights(self._here, sources)
        self._refuse_untied(found)
        names = {alias: owner for alias, owner in self._aliases.items() if owner not in sources and alias in sources}
        own = {names.get(name, name): source for name, source in sources.items()}
        return Weights(self._here, {name: source for name, source in own.items() if name not in self._aliases})

    @cached_property
    def _sources(self) -> dict[str, Source]:
        """By the name that transformers' mapping gives to the keys of a file."""
        mapping = get_model_conversion_mapping(self._model)
        renamings = [one for one in mapping if isinstance(one, WeightRenaming)]
        converters = [one for one in mapping if isinstance(one, WeightConverter)]
        by_pattern = {pattern: one for one in converters for pattern in one.source_patterns}
        prefix, found = self._model.base_model_prefix, dict[str, Source]()
        for key in sorted(self._here, key=dot_natural_key):
            name, pattern = rename_source_key(key, renamings, converters, prefix, self._wanted)
            if name not in self._wanted and key in self._wanted:  # it bears its new name already
                name, pattern = rename_source_key(key, [], [], prefix, self._wanted)
            if name not in self._wanted:
                continue
            if pattern is None:
                found.setdefault(name, Source(name, (("", key),)))
            else:
                before = found.get(name, Source(name, (), by_pattern[pattern]))
                found[name] = Source(name, (*before.keys, (pattern, key)), before.converter)
        return found

    @property
    def _unused(self) -> list[str]:
        used = {key for source in self._sources.values() for _, key in source.keys}
        return [key for key in self._here if key not in used]

    def _checked(self) -> dict[str, Source]:
        """Every tensor that the files give, by name, its shape and type found right."""
        found = {}
        for source in self._sources.values():
            for name, shape in self._shapes(source).items():
                if name not in self._wanted:
                    continue
                wanted = tuple(self._wanted[name].shape)
                if name in self._grow and shape[1:] == wanted[1:] and shape[0] == self._grows_from < wanted[0]:
                    source = replace(source, rows=shape[0])
                elif shape != wanted:
                    raise PlanError(
                        f"{name} is {_size(shape)} in {self._file(source)}, but config.json makes it {_size(wanted)}: "
                        f"they are of different models. Correct config.json, or fetch both again."
                    )
                found[name] = source
        return found

    def _shapes(self, source: Source) -> dict[str, tuple[int, ...]]:
        for _, key in source.keys:
            if self._here[key].dtype not in TYPES:
                raise PlanError(
                    f"{key} in {self._file(source)} is stored as {self._here[key].dtype}: plait trains weights of "
                    f"{', '.join(TYPES.values())}, not quantised ones. Dequantise and save them with transformers."
                )
        if source.converter is None:
            return {source.first: self._here[source.keys[0][1]].shape}
        try:
            made = _converted(source, lambda key: torch.empty(self._here[key].shape, device="meta"), self._model)
        except Exception as error:  # an operation raises whatever torch does about tensors that do not go together
            raise PlanError(
                f"transformers cannot make {source.first} of {', '.join(key for _, key in source.keys[:3])}... in "
                f"{self._folder} ({' '.join(str(error).split())[:200]}): some are missing or damaged; fetch them again."
            ) from None
        return {name: tuple(value.shape) for name, value in made.items()}

    def _file(self, source: Source) -> Path:
        return self._here[source.keys[0][1]].file

    def _missing(self, sources: Mapping[str, Source]) -> set[str]:
        owners = {owner for alias, owner in self._aliases.items() if alias in sources}
        return self._parameters - set(sources) - owners

    def _ignored(self, key: str) -> bool:
        """What transformers leaves out too: tables that the model computes, once saved with it."""
        patterns = [*(self._model._keys_to_ignore_on_load_unexpected or ()), r"rotary_emb\.inv_freq"]
        buffers = {name for name, _ in self._model.named_buffers()}
        return key in buffers or any(re.search(pattern, key) for pattern in patterns)

    def _refuse_untied(self, weights: Weights) -> None:
        """Tied tensors of which the files have both must be one."""
        reader = Reader(weights, self._model)
        for alias, owner in self._aliases.items():
            both = alias in reader and owner in reader
            if both and not _equal(
                reader[alias], reader[owner], weights.sources[owner].rows or len(self._wanted[owner])
            ):
                raise PlanError(
                    f"{self._folder} has different values for {owner} and {alias}, which config.json ties: set "
                    f"tie_word_embeddings to false in it."
                )


def _converted(source: Source, tensors: Callable[[str], Tensor], model: Any) -> dict[str, Tensor]:
    """What transformers' converter makes of the tensors of `source`, by name."""
    converter = copy.deepcopy(source.converter)
    for pattern, key in source.keys:
        converter.add_tensor(source.first, key, pattern, lambda key=key: tensors(key))
    made = converter.convert(source.first, model=model, config=model.config)
    return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}


def _equal(one: Any, other: Any, rows: int) -> bool:
    """Bit for bit; by numpy, since this process is to be forked and torch may start threads."""
    starts = range(0, rows, COMPARED_ROWS)
    pairs = ((part[start : start + COMPARED_ROWS] for part in (one, other)) for start in starts)
    return all(np.array_equal(*(part.view(torch.uint8).numpy() for part in pair)) for pair in pairs)


def _size(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape)) or "one number"
