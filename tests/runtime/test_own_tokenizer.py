"""A model's own tokenizer: when it is taken, where documents begin and end in it, what is refused; and a run with it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from plait.design.errors import PlanError
from plait.design.plan import Plan
from plait.runtime.data.held_out import evaluation_part, training_part
from plait.runtime.data.tokenizer import Bpe, Bytes, Own
from plait.runtime.data.tokens import TokenizerFile, prepare
from plait.runtime.hf.read import read
from plait.runtime.training.launch import corpus
from tests.runtime.test_weights import instance, save

TEXT = "".join(f"line {n}: the quick brown fox </s> jumps\n" for n in range(40))


def tokenizer(
    folder: Path, *, begins: bool = True, ends: str | dict[str, str] | None = "</s>", size: int = 320
) -> Path:
    """tokenizer.json of a byte-level BPE with <s> = 0, </s> = 1 and <pad> = 2."""
    inner = tokenizers.Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    inner.train_from_iterator(
        [TEXT],
        trainers.BpeTrainer(
            vocab_size=size, special_tokens=["<s>", "</s>", "<pad>"], initial_alphabet=alphabet, show_progress=False
        ),
    )
    if begins:
        inner.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    inner.enable_truncation(16)
    inner.enable_padding(pad_id=2, pad_token="<pad>", length=64)
    folder.mkdir(exist_ok=True)
    inner.save(str(folder / "tokenizer.json"))
    if ends is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": ends}))
    return folder / "tokenizer.json"


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    folder = tmp_path / "texts"
    folder.mkdir()
    for name in ("a", "b"):
        (folder / f"{name}.txt").write_text(f"{name}: {TEXT}")
    return folder


def test_documents_begin_and_end_as_the_model_learnt(texts: Path, tmp_path: Path) -> None:
    own = TokenizerFile(tokenizer(tmp_path / "model"), learnt=True)
    found = prepare(Plan(data=str(texts)), 320, own=own, cache=tmp_path / "cache")
    assert isinstance(found.tokenizer, Own)
    assert (found.tokenizer.begin, found.tokenizer.end) == ((0,), 1)
    assert len(found.offsets) == 3
    assert "2 documents" in found.description
    assert found.description.endswith("(the model's own tokenizer)")
    for name, start, stop in zip("ab", found.offsets, found.offsets[1:], strict=False):
        ids = found.stream[start:stop].tolist()
        assert (ids[0], ids[-1]) == (0, 1)
        assert not {0, 1, 2} & set(ids[1:-1])  # neither padded nor cut, and "</s>" in a text is text
        assert found.tokenizer.decode(ids) == f"{name}: {TEXT}"
    again = prepare(Plan(data=str(texts), tokenizer="model"), 320, own=own, cache=tmp_path / "cache")
    assert np.array_equal(again.stream, found.stream)
    assert len([path for path in (tmp_path / "cache").iterdir() if path.is_dir()]) == 1
    assert again.tokenizer.encode("the fox") == found.tokenizer.encode("the fox")
    assert found.tokenizer.encode("the fox")[0] == 0


def test_what_is_evaluated_is_in_the_same_tokens(texts: Path, tmp_path: Path) -> None:
    own, cache = TokenizerFile(tokenizer(tmp_path / "model"), learnt=True), tmp_path / "cache"
    mine = tmp_path / "mine.txt"
    mine.write_text("a fox, too </s>\n")
    plan = Plan(data=str(texts), eval_every=1, eval_data=str(mine))
    whole = prepare(plan, 320, own=own, cache=cache)
    for _ in range(2):  # made, then read from the cache
        held = evaluation_part(whole, plan, cache=cache)
        assert held is not None
        assert isinstance(held.tokenizer, Own)
        assert held.tokenizer.fingerprint == whole.tokenizer.fingerprint
        assert held.stream.tolist() == [*whole.tokenizer.encode(mine.read_text()), 1]
        assert held.description.endswith("(the model's own tokenizer)")
    share = Plan(data=str(texts), eval_every=1, eval_share=0.5)
    part, rest = evaluation_part(whole, share), training_part(whole, share)
    assert part is not None
    assert sorted([*part.lengths, *rest.lengths]) == sorted(whole.lengths)
    for begin in (*part.begins, *rest.begins):
        assert whole.stream[begin] == 0


def test_another_tokenizer_gets_another_entry(texts: Path, tmp_path: Path) -> None:
    plan, cache = Plan(data=str(texts), tokenizer="model"), tmp_path / "cache"
    one = prepare(plan, 400, own=TokenizerFile(tokenizer(tmp_path / "one")), cache=cache)
    other = prepare(plan, 400, own=TokenizerFile(tokenizer(tmp_path / "other", begins=False, size=400)), cache=cache)
    assert (one.tokenizer.begin, other.tokenizer.begin) == ((0,), ())
    assert len(one.stream) != len(other.stream)


@pytest.mark.parametrize(
    ("named", "ids", "end"),
    [
        ("</s>", (2,), 1),
        ({"content": "<pad>"}, (1,), 2),
        (None, (2, 1), 2),
        ("<no such token>", (1,), 1),
    ],
    ids=["tokenizer_config.json", "as an object", "config.json alone", "a token that is not there"],
)
def test_what_ends_a_document(
    named: str | dict[str, str] | None, ids: tuple[int, ...], end: int, tmp_path: Path
) -> None:
    assert Own.read(tokenizer(tmp_path, ends=named), ids).end == end


def test_which_tokenizer_auto_is(texts: Path, tmp_path: Path) -> None:
    file, cache = tokenizer(tmp_path / "model"), tmp_path / "cache"

    def chosen(kind: str, own: TokenizerFile) -> type:
        return type(prepare(Plan(data=str(texts), tokenizer=kind), 320, own=own, cache=cache).tokenizer)

    assert chosen("auto", TokenizerFile()) is Bpe
    assert chosen("auto", TokenizerFile(file)) is Bpe  # random weights have learnt none
    assert chosen("model", TokenizerFile(file)) is Own
    assert chosen("auto", TokenizerFile(file, learnt=True)) is Own
    assert chosen("bytes", TokenizerFile(file, learnt=True)) is Bytes
    with pytest.raises(PlanError, match=r"has no tokenizer.json, and its weights have learnt one: put it beside"):
        chosen("auto", TokenizerFile(learnt=True))
    with pytest.raises(PlanError, match=r"has no tokenizer.json, and tokenizer model asks for it"):
        chosen("model", TokenizerFile())


def test_refusals(texts: Path, tmp_path: Path) -> None:
    plan = Plan(data=str(texts), tokenizer="model")

    def refused(file: Path, vocabulary: int, words: str) -> None:
        with pytest.raises(PlanError, match=words):
            prepare(plan, vocabulary, own=TokenizerFile(file), cache=tmp_path / "cache")

    file = tokenizer(tmp_path / "model")
    refused(file, 319, "gives ids up to 319, but the model has a vocabulary of 319")
    refused(tokenizer(tmp_path / "endless", ends=None), 320, "has no end of a document: name one as eos_token in")
    for text in ("", "{}", file.read_text()[:1000]):
        file.write_text(text)
        refused(file, 320, "is not a tokenizer .*: download or save it again")


def test_a_directory_brings_its_own(texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    folder = save(instance("llama", vocab_size=384, eos_token_id=[1, 2]), tmp_path / "model")
    tokenizer(folder, ends=None)
    model = read(str(folder))
    assert model.ends == (1, 2)
    found = corpus(Plan(model=str(folder), data=str(texts)), model)
    assert isinstance(found.tokenizer, Own)
    assert found.tokenizer.end == 1
    (folder / "model.safetensors").unlink()
    assert isinstance(corpus(Plan(model=str(folder), data=str(texts)), read(str(folder))).tokenizer, Bpe)
