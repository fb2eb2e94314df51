"""The files of a model directory: which safetensors files hold its weights, and which tensors each of them holds.

Only headers are read. What is not all there, damaged or in another format is refused here, before any rank starts, by a
sentence that says what to do.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open

from ...design.errors import PlanError

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
OTHER_FORMATS = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.h5", "*.msgpack", "*.gguf")
POINTER = b"version https://git-lfs"
RANDOM = "To train from random weights, copy config.json alone into a directory."


@dataclass(frozen=True)
class Stored:
    """One tensor of a file: `dtype` as safetensors writes it ("BF16")."""

    file: Path
    shape: tuple[int, ...]
    dtype: str


def stored(folder: Path) -> dict[str, Stored] | None:
    """Every tensor in the weights of a model directory, by its key; None where the directory holds no weights."""
    if (folder / SINGLE).is_file():
        return _headers(folder / SINGLE)
    if (folder / INDEX).is_file():
        return _sharded(folder)
    loose = sorted(path.name for path in folder.glob("*.safetensors"))
    if loose:
        raise PlanError(
            f"{folder} has {loose[0]}, but weights are read from {SINGLE} or from the files that {INDEX} names: download "
            f"the index too, or save the model again with save_pretrained. {RANDOM}"
        )
    others = sorted(path for pattern in OTHER_FORMATS for path in folder.glob(pattern))
    if others:
        raise PlanError(f"{folder} holds weights as {others[0].name}; plait reads safetensors. {_way_out(others[0])}")
    return None


def _way_out(file: Path) -> str:
    arguments = (
        f'"{file.parent}", gguf_file="{file.name}", quantization_config=GgufConfig(dequantize=True)'
        if file.suffix == ".gguf"
        else f'"{file.parent}"'
    )
    return f'Convert them once: AutoModelForCausalLM.from_pretrained({arguments}).save_pretrained("NEW"). {RANDOM}'


def _sharded(folder: Path) -> dict[str, Stored]:
    places = _index(folder / INDEX)
    names = list(dict.fromkeys(places.values()))
    odd = next((name for name in names if Path(name).name != name), None)
    if odd is not None:
        raise PlanError(f"{folder / INDEX} names {odd!r}, which is not a file beside it: save the model again.")
    absent = [name for name in names if not (folder / name).is_file()]
    if absent:
        raise PlanError(
            f"{folder} lacks files that its {INDEX} names ({len(absent)} of {len(names)}, the first {absent[0]}): "
            f"download the rest."
        )
    found: dict[str, Stored] = {}
    for name in names:
        here = _headers(folder / name)
        for key, place in places.items():
            if place == name and key not in here:
                raise PlanError(
                    f"{folder / INDEX} says that {key} is in {name}, where it is not: the two are of different "
                    f"downloads or saves. Fetch both again."
                )
        # A key that stands in two files is read from where the index says.
        found |= {key: value for key, value in here.items() if places.get(key, name) == name}
    return found


def _index(file: Path) -> Mapping[str, str]:
    try:
        places = json.loads(file.read_bytes().decode())["weight_map"]
        if not places or not all(isinstance(place, str) for place in places.values()):
            raise ValueError("its weight_map names no files")
    except OSError as error:
        raise PlanError(f"{file} cannot be read: {(error.strerror or 'unknown error').lower()}.") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise PlanError(
            f"{file} is not an index of weights ({type(error).__name__}: {error}): download it again."
        ) from None
    found: Mapping[str, str] = places
    return found


def _headers(file: Path) -> dict[str, Stored]:
    try:
        with file.open("rb") as raw:
            if raw.read(len(POINTER)) == POINTER:
                raise PlanError(f"{file} is a pointer of git-lfs and not the weights: run git lfs pull there.")
        with safe_open(file, framework="pt") as tensors:
            slices = {key: tensors.get_slice(key) for key in tensors.keys()}  # noqa: SIM118 (not a mapping)
            return {key: Stored(file, tuple(one.get_shape()), one.get_dtype()) for key, one in slices.items()}
    except SafetensorError as error:
        why = str(error).rpartition(": ")[2]
        raise PlanError(f"{file} is damaged or cut short ({why}): download or save it again.") from None
    except OSError as error:
        raise PlanError(f"{file} cannot be read: {(error.strerror or str(error)).lower()}.") from None
