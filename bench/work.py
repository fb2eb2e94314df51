"""The work that all contestants do: one model, its first weights, one global batch of fixed tokens, one AdamW.

    base   8 layers, hidden 256, vocabulary  4096 ( 8.9 M parameters), 8 rows of 256 tokens: speed
    mem    8 layers, hidden 768, vocabulary 16384 (82 M parameters),   8 rows of  64 tokens: memory
    small  4 layers, hidden  64, vocabulary   256, 8 rows of  32 tokens: what a step costs besides computation, and
                                                                         whether everything runs

The loss is the mean over the tokens that have a next one in their row, so a row of s tokens has s - 1 targets. The first
weights are plait's draw, written once as a transformers checkpoint, so that every contestant starts from the same bits.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

SEED = 7
LEARNING_RATE = 1e-3
WEIGHT_DECAY = 0.01
BETAS = (0.9, 0.999)
EPSILON = 1e-8


@dataclass(frozen=True)
class Work:
    """`rows` x `seq` tokens a step over all ranks; `folder` holds config/ and weights/ once `prepare` has run."""

    name: str
    hidden: int
    mlp: int
    layers: int
    heads: int
    vocabulary: int
    rows: int
    seq: int
    microbatches: int = 8
    """Of the pipelines; everyone else takes its rows in one."""
    fused: bool = True
    """Whether the peers' AdamW is torch's fused one, as plait's is, or torch's default."""
    folder: Path = field(default_factory=Path)

    @property
    def tokens_a_step(self) -> int:
        return self.rows * self.seq

    @property
    def config(self) -> dict[str, Any]:
        """What stands in config.json."""
        return {
            "model_type": "llama",
            "architectures": ["LlamaForCausalLM"],
            "hidden_size": self.hidden,
            "intermediate_size": self.mlp,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.heads,
            "vocab_size": self.vocabulary,
            "max_position_embeddings": 1024,
            "tie_word_embeddings": False,
            "use_cache": False,
        }

    @property
    def config_folder(self) -> Path:
        return self.folder / "config"

    @property
    def weights_folder(self) -> Path:
        return self.folder / "weights"


BASE = Work("base", hidden=256, mlp=768, layers=8, heads=8, vocabulary=4096, rows=8, seq=256)
MEM = Work("mem", hidden=768, mlp=2048, layers=8, heads=12, vocabulary=16384, rows=8, seq=64)
SMALL = Work("small", hidden=64, mlp=128, layers=4, heads=4, vocabulary=256, rows=8, seq=32)


def prepare(work: Work) -> None:
    """Writes the model's config and first weights. It computes, so it runs in a process of its own."""
    from plait.runtime.hf.read import read
    from plait.runtime.hf.whole import WholeModel

    work.config_folder.mkdir(parents=True)
    (work.config_folder / "config.json").write_text(json.dumps(work.config))
    whole = WholeModel(read(str(work.config_folder)), SEED, torch.float32)
    whole.module.save_pretrained(work.weights_folder)


def model(work: Work, **how: Any) -> Any:
    """The whole transformers model with the first weights, in training; `how` goes to from_pretrained."""
    loaded = AutoModelForCausalLM.from_pretrained(
        work.weights_folder, dtype=torch.float32, attn_implementation="sdpa", **how
    )
    return loaded.train()


def tokens(work: Work) -> Tensor:
    """The global batch, [rows, seq], the same in every step."""
    return torch.randint(work.vocabulary, (work.rows, work.seq), generator=torch.Generator().manual_seed(SEED))


def next_token_loss(logits: Tensor, tokens: Tensor) -> Tensor:
    """The mean loss of [b, s, V] logits on the tokens that they were computed from: as transformers' `labels=` gives."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


def decayed_apart(parameters: Iterable[nn.Parameter]) -> list[dict[str, Any]]:
    """The groups of an optimizer that decays matrices and no norms, as plait does."""
    everyone = list(parameters)
    groups = [
        {"params": [p for p in everyone if p.dim() > 1], "weight_decay": WEIGHT_DECAY},
        {"params": [p for p in everyone if p.dim() <= 1], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def adamw(work: Work, parameters: Iterable[nn.Parameter], **how: Any) -> torch.optim.Optimizer:
    how = {"fused": True} if work.fused else how
    return torch.optim.AdamW(decayed_apart(parameters), lr=LEARNING_RATE, betas=BETAS, eps=EPSILON, **how)
