"""Text to batches: the cache, the packing against a slow plain version, and one order for every layout."""

from __future__ import annotations

import collections
import itertools
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.design.errors import PlanError
from plait.design.plan import Plan
from plait.runtime.batch import IGNORE, Batch
from plait.runtime.data import tokens
from plait.runtime.data.batches import Batches, global_batches, order
from plait.runtime.data.packing import row, rows
from plait.runtime.data.tokenizer import Bpe, Bytes
from plait.runtime.data.tokens import Corpus, documents, prepare

FIELDS = ("tokens", "targets", "positions", "document_ids", "sample_ids")
TEXT = "The quick brown fox, naïve as ever, jumps over the lazy dog: 東京 <|end|> \t\r\n\n  twice.\n"


def corpus_of(lengths: list[int]) -> Corpus:
    """Documents of the given lengths, the end token included; token i of the stream is i + 1000, so all differ."""
    offsets = np.cumsum([0, *lengths])
    stream = np.arange(1000, 1000 + offsets[-1], dtype=np.uint32)
    return Corpus(stream, offsets, 0.0, Bytes(), "")


def corpus_with(count: int, seq: int = 4) -> Corpus:
    """One long document of exactly `count` rows, and its end token."""
    return corpus_of([count * seq + 1])


def same(one: Batch, other: Batch) -> bool:
    return all(torch.equal(getattr(one, name), getattr(other, name)) for name in FIELDS)


def joined(parts: list[Batch]) -> Batch:
    return Batch(**{name: torch.cat([getattr(part, name) for part in parts]) for name in FIELDS})


def ids(batch: Batch) -> list[int]:
    """The sample ids of real rows."""
    return [i for i in batch.sample_ids.tolist() if i >= 0]


# --- packing ---


def slow_rows(lengths: list[int], seq: int) -> list[list[tuple[int, int, int, int]]]:
    """(token, target, position, document id) for every place, one token at a time."""
    stream = [(1000 + i, d) for i, d in enumerate(d for d, n in enumerate(lengths) for _ in range(n))]
    found = []
    for start in range(0, len(stream) - 1, seq):
        places, piece, position = [], -1, 0
        for at in range(start, start + seq):
            if at >= len(stream):
                places.append((0, IGNORE, 0, -1))
                continue
            token, document = stream[at]
            if at == start or stream[at - 1][1] != document:
                piece, position = piece + 1, 0
            follows = at + 1 < len(stream) and stream[at + 1][1] == document
            places.append((token, stream[at + 1][0] if follows else IGNORE, position, piece))
            position += 1
        found.append(places)
    return found


@settings(deadline=None, max_examples=200)
@given(st.lists(st.integers(2, 12), min_size=1, max_size=8), st.integers(1, 9), st.randoms())
def test_packing_equals_the_slow_version(lengths, seq, random):
    corpus, expected = corpus_of(lengths), slow_rows(lengths, seq)
    assert rows(corpus, seq) == len(expected)
    asked = list(range(len(expected)))
    random.shuffle(asked)
    batch = row(corpus, seq, np.array(asked))
    assert batch.sample_ids.tolist() == asked
    for name, column in zip(FIELDS[:4], range(4), strict=True):
        tensor = getattr(batch, name)
        assert tensor.dtype == torch.int64
        assert tensor.tolist() == [[place[column] for place in expected[i]] for i in asked], name


@settings(deadline=None, max_examples=100)
@given(st.lists(st.integers(2, 12), min_size=1, max_size=8), st.integers(1, 9))
def test_every_token_is_learnt_once_and_from_its_own_document(lengths, seq):
    corpus = corpus_of(lengths)
    batch = row(corpus, seq, np.arange(rows(corpus, seq)))
    firsts = {1000 + int(start) for start in corpus.offsets[:-1]}
    learnt = batch.targets[batch.targets != IGNORE].tolist()
    assert sorted(learnt) == sorted(set(corpus.stream.tolist()) - firsts)
    read = batch.tokens[batch.document_ids >= 0].tolist()
    last = 1000 + len(corpus.stream) - 1
    assert len(read) == len(set(read))
    assert set(corpus.stream.tolist()) - set(read) <= {last}
    if seq > 1:
        assert ((batch.targets != IGNORE).sum(1) > 0).all()


def test_packing_the_picture():
    batch = row(corpus_of([4, 2, 5]), 5, np.arange(2))
    assert batch.positions.tolist() == [[0, 1, 2, 3, 0], [0, 0, 1, 2, 3]]
    assert batch.document_ids.tolist() == [[0, 0, 0, 0, 1], [0, 1, 1, 1, 1]]
    assert (batch.targets == IGNORE).tolist() == [
        [False, False, False, True, False],
        [True, False, False, False, False],
    ]


def test_a_row_that_is_not_there_is_refused():
    with pytest.raises(IndexError, match="there are 3 rows of 4"):
        row(corpus_with(3), 4, np.array([0, 3]))
    assert row(corpus_with(3), 4, np.array([], int)).tokens.shape == (0, 4)


# --- the order ---


def test_order_is_pinned_and_depends_on_seed_and_epoch():
    assert order(10, 7, 0).tolist() == [8, 4, 1, 6, 3, 2, 7, 5, 9, 0]
    orders = {tuple(order(10, seed, epoch)) for seed in (7, 8) for epoch in (0, 1)}
    assert len(orders) == 4
    assert all(sorted(found) == list(range(10)) for found in orders)


@pytest.mark.parametrize("layout", [{"dp": 2}, {"dp": 4}, {"dp": 2, "tp": 2}, {"dp": 2, "pp": 2, "tp": 2}])
def test_every_layout_reads_the_same_global_batches(layout):
    corpus = corpus_with(10)
    plan = Plan(batch=8, seq=4, steps=5, **layout)
    expected = global_batches(corpus, Plan(batch=8, seq=4, steps=5), 9)
    assert len(expected) == 5
    assert [batch.rows for batch in expected] == [8] * 5
    taken = [list(Batches(corpus, plan, rank)) for rank in range(plan.world)]
    for step, batch in enumerate(expected):
        for tp, pp in itertools.product(range(plan.tp), range(plan.pp)):
            ranks = [plan.mesh.rank(pp=pp, dp=dp, tp=tp) for dp in range(plan.dp)]
            assert same(joined([taken[rank][step] for rank in ranks]), batch)
    assert all(same(a, b) for a, b in zip(expected, global_batches(corpus, plan, 9), strict=True))


@pytest.mark.parametrize("packing", ["stream", "sorted"])
def test_own_orders_go_through_all_of_the_data_on_every_dp_rank(packing):
    corpus = corpus_with(10)
    plan = Plan(batch=6, seq=4, epochs=2, dp=2, tp=2, data_order="own", packing=packing)
    taken = [list(Batches(corpus, plan, rank)) for rank in range(plan.world)]
    count = len({i for batch in taken[0] for i in ids(batch)})
    assert [batch.rows for batch in taken[0]] == [3] * (2 * -(-count // 3))
    orders = [[i for batch in batches for i in ids(batch)] for batches in taken]
    for found in orders:
        assert sorted(found[:count]) == sorted(found[count:]) == list(range(count))
    assert orders[0] == orders[1]  # they differ in tp alone
    assert orders[2] == orders[3]
    assert orders[0] != orders[2]
    whole = global_batches(corpus, plan, 3)
    assert all(same(a, joined([taken[0][step], taken[2][step]])) for step, a in enumerate(whole))
    resumed = Batches(corpus, plan, 3)
    first = Batches(corpus, plan, 0)
    next(first)
    resumed.restore(first.state)
    assert [ids(batch) for batch in resumed] == [ids(batch) for batch in taken[3][1:]]
    with pytest.raises(PlanError, match="The data stopped with data_order own and dp 2: resume with the same"):
        Batches(corpus, Plan(batch=6, seq=4, packing=packing), 0).restore(first.state)


def test_each_sample_once_an_epoch_and_the_last_batch_smaller():
    plan = Plan(batch=4, seq=4, epochs=2, steps=1)
    batches = Batches(corpus_with(10), plan, 0)
    assert batches.steps_total == 6
    taken = list(batches)
    assert [len(ids(batch)) for batch in taken] == [4, 4, 2, 4, 4, 2]
    first, second = ([i for b in half for i in ids(b)] for half in (taken[:3], taken[3:]))
    assert sorted(first) == sorted(second) == list(range(10))
    assert first != second
    assert first == order(10, plan.seed, 0).tolist()
    padding = taken[2].slice(2, 4)
    assert padding.sample_ids.tolist() == [-1, -1]
    assert padding.weight == 0
    assert (padding.document_ids == -1).all()


@pytest.mark.parametrize(("rows", "dp"), [(6, 4), (20, 4), (1, 2)])
def test_p058_p141_every_row_once_even_where_there_are_fewer_than_a_batch(rows, dp):
    """Nothing is dropped, so there is always a step; and no row comes twice before all have come."""
    plan = Plan(batch=8, seq=4, epochs=1, dp=dp)
    ranks = [list(Batches(corpus_with(rows), plan, rank)) for rank in range(dp)]
    assert {len(batches) for batches in ranks} == {-(-rows // 8)}
    assert sorted(i for batches in ranks for batch in batches for i in ids(batch)) == list(range(rows))


def test_steps_end_the_run_and_epochs_go_on_until_then():
    batches = Batches(corpus_with(3), Plan(batch=2, seq=4, steps=5), 0)
    assert batches.steps_total == 5
    assert [len(ids(batch)) for batch in batches] == [2, 1, 2, 1, 2]
    assert batches.state == {"epoch": 2, "row": 2}


@pytest.mark.parametrize(("count", "first", "then"), [(12, 4, 12), (30, 12, 12), (30, 10, 12)])
@pytest.mark.parametrize("dp", [4, 2, 3, 1])
def test_p087_resume_on_another_dp_reads_each_sample_once(count, first, then, dp):
    """Stopped after one step on dp 2, resumed on dp 4, 2, 3 or 1, in batches of the same or another size."""
    corpus = corpus_with(count)
    before = [Batches(corpus, Plan(batch=first, seq=4, epochs=1, dp=2), rank) for rank in range(2)]
    seen = [i for batches in before for i in ids(next(batches))]
    assert before[0].state == before[1].state == {"epoch": 0, "row": first}
    plan = Plan(batch=then, seq=4, epochs=1, dp=dp)
    after = [Batches(corpus, plan, rank) for rank in range(dp)]
    for batches in after:
        batches.restore(before[0].state)
    for parts in zip(*after, strict=True):
        assert {part.rows for part in parts} == {then // dp}
        seen += [i for part in parts for i in ids(part)]
    assert seen == order(count, plan.seed, 0).tolist()
    assert {tuple(batches.state.values()) for batches in after} == {(1, 0)}


@pytest.mark.parametrize("stop", range(8))
def test_resume_is_the_uninterrupted_run(stop):
    corpus, plan = corpus_with(10), Plan(batch=4, seq=4, steps=7)
    whole, first, second = (Batches(corpus, plan, 0) for _ in range(3))
    before = list(itertools.islice(first, stop))
    second.restore(first.state)
    resumed = before + list(second)
    assert all(same(a, b) for a, b in zip(resumed, whole, strict=True))


def test_steps_behind_a_resume_are_counted_in_batches_of_the_new_size():
    batches = Batches(corpus_with(20), Plan(batch=4, seq=4, steps=3), 0)
    batches.restore({"epoch": 0, "row": 5})
    assert [ids(batch) for batch in batches] == [order(20, 7, 0)[5:9].tolist()]


def test_resume_with_other_data_is_refused():
    with pytest.raises(PlanError, match="row 12 of epoch 0, but it has 10 rows"):
        Batches(corpus_with(10), Plan(batch=4, seq=4), 0).restore({"epoch": 0, "row": 12})


# --- tokenizers ---


@settings(deadline=None, max_examples=50)
@given(st.text())
def test_tokenizers_lose_nothing(text):
    for tokenizer in (Bytes(), BPE):
        found = tokenizer.encode(text)
        assert tokenizer.decode(found) == text
        assert tokenizer.end not in found
        assert tokenizer.encode_all([text, TEXT]) == [found, tokenizer.encode(TEXT)]


BPE = Bpe.train([TEXT * 20], 300)


def test_end_is_not_text_and_unknown_ids_do_no_harm():
    for tokenizer in (Bytes(), BPE):
        assert tokenizer.decode([*tokenizer.encode("a<|end|>"), tokenizer.end, 5000]) == "a<|end|>"


def test_bpe_has_the_vocabulary_it_was_asked_for(tmp_path):
    words = " ".join(f"{a}{b}{c}" for a, b, c in itertools.product("abcdefgh", "ijklmnop", "qrstuvwx"))
    (tmp_path / "words.txt").write_text(words)
    corpus = prepare(Plan(data=str(tmp_path)), 400, cache=tmp_path / "cache")
    assert corpus.tokenizer.decode([399]) != ""
    assert corpus.tokenizer.decode([400]) == ""
    assert corpus.stream.max() < 400
    assert len(corpus.stream) < len(words) / 1.5


# --- the corpus and its cache ---


@pytest.fixture
def texts(tmp_path) -> Path:
    folder = tmp_path / "texts"
    (folder / "deep").mkdir(parents=True)
    (folder / "b.txt").write_bytes(TEXT.encode())
    (folder / "a.md").write_bytes(b"caf\xe9 and more of it\n")
    (folder / "deep" / "c.py").write_bytes(b"import os\n" * 7)
    (folder / "binary.txt").write_bytes(b"\x7fELF\0\0\1\2 data")
    (folder / "blank.txt").write_bytes(b" \n")
    (folder / "notes.doc").write_bytes(b"not one of the endings")
    return folder


TEXTS = ["caf\ufffd and more of it\n", TEXT, "import os\n" * 7]


@pytest.mark.parametrize("kind", ["bytes", "bpe"])
def test_the_stream_is_the_documents_in_order(texts, tmp_path, kind, monkeypatch):
    monkeypatch.setattr(tokens, "PIECE", 16)
    monkeypatch.setattr(tokens, "ENCODED_TOGETHER", 2)
    corpus = prepare(Plan(data=str(texts), tokenizer=kind), 320, cache=tmp_path / "cache")
    assert [path.name for path in documents(str(texts))] == ["a.md", "b.txt", "c.py"]
    assert corpus.offsets.dtype == np.int64
    assert corpus.stream.dtype == np.uint16
    assert corpus.offsets[-1] == len(corpus.stream)
    pieces = [corpus.stream[a:b].tolist() for a, b in itertools.pairwise(corpus.offsets)]
    assert [piece[-1] for piece in pieces] == [corpus.tokenizer.end] * 3
    assert [corpus.tokenizer.decode(piece) for piece in pieces] == TEXTS
    size = sum((texts / name).stat().st_size for name in ("a.md", "b.txt", "deep/c.py"))
    assert corpus.description == f"3 documents, {size} bytes, {len(corpus.stream)} tokens ({kind})"
    counts = collections.Counter(corpus.stream.tolist())
    total = sum(counts.values())
    assert corpus.entropy == pytest.approx(-sum(n / total * math.log(n / total) for n in counts.values()), rel=1e-12)


def test_a_large_vocabulary_takes_four_bytes_a_token(texts, tmp_path):
    corpus = prepare(Plan(data=str(texts)), 70000, cache=tmp_path / "cache")
    assert corpus.stream.dtype == np.uint32


def counted(monkeypatch) -> list[int]:
    """One entry for every time that a corpus is really made."""
    made: list[int] = []
    build = tokens._build
    monkeypatch.setattr(tokens, "_build", lambda *args: (made.append(1), build(*args)))
    return made


def test_the_second_call_reads_the_cache(texts, tmp_path, monkeypatch):
    made, plan, cache = counted(monkeypatch), Plan(data=str(texts)), tmp_path / "cache"
    one, two = prepare(plan, 320, cache=cache), prepare(plan, 320, cache=cache)
    assert len(made) == 1
    assert isinstance(two.stream, np.memmap)
    assert np.array_equal(one.stream, two.stream)
    assert np.array_equal(one.offsets, two.offsets)
    assert (one.entropy, one.description) == (two.entropy, two.description)
    assert one.tokenizer.encode(TEXT) == two.tokenizer.encode(TEXT)
    prepare(plan, 321, cache=cache)
    prepare(plan.model_copy(update={"tokenizer": "bytes"}), 320, cache=cache)
    os.utime(texts / "b.txt", (1, 1))
    prepare(plan, 320, cache=cache)
    assert len(made) == 4
    assert not list(cache.glob("*.new"))


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)


DAMAGES = {
    "stream missing": lambda entry: (entry / "stream.npy").unlink(),
    "stream cut": lambda entry: os.truncate(entry / "stream.npy", 140),
    "stream empty": lambda entry: os.truncate(entry / "stream.npy", 0),
    "a flipped byte": lambda entry: flip(entry / "stream.npy"),
    "a flipped byte in the tokenizer": lambda entry: flip(entry / "tokenizer.json"),
    "tokenizer missing": lambda entry: (entry / "tokenizer.json").unlink(),
    "json cut": lambda entry: os.truncate(entry / "corpus.json", 30),
    "json of another kind": lambda entry: (entry / "corpus.json").write_text("[]"),
    "unfinished": lambda entry: shutil.move(entry, entry.with_name(entry.name + ".new")),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_entry_is_made_again(texts, tmp_path, monkeypatch, damage):
    plan, cache = Plan(data=str(texts)), tmp_path / "cache"
    expected = np.array(prepare(plan, 320, cache=cache).stream)
    (entry,) = [path for path in cache.iterdir() if path.is_dir()]
    DAMAGES[damage](entry)
    made = counted(monkeypatch)
    assert np.array_equal(prepare(plan, 320, cache=cache).stream, expected)
    prepare(plan, 320, cache=cache)
    assert len(made) == 1


RACER = """
import sys, time
from pathlib import Path
from plait.design.plan import Plan
from plait.runtime.data import tokens
texts, cache, log = sys.argv[1:]
build = tokens._build
def slow(*args):
    with open(log, "a") as file:
        file.write("made\\n")
    time.sleep(0.3)
    build(*args)
tokens._build = slow
assert "torch" not in sys.modules
print("ready", flush=True)
sys.stdin.readline()
corpus = tokens.prepare(Plan(data=texts), 320, cache=Path(cache))
print(len(corpus.stream), corpus.entropy, flush=True)
"""


def test_two_processes_at_once_make_it_once(texts, tmp_path):
    log = tmp_path / "log"
    command = [sys.executable, "-c", RACER, str(texts), str(tmp_path / "cache"), str(log)]
    racers = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert [racer.stdout.readline() for racer in racers] == ["ready\n"] * 2
    for racer in racers:
        racer.stdin.write("go\n")
        racer.stdin.flush()
    answers = [racer.communicate(timeout=30)[0] for racer in racers]
    assert [racer.returncode for racer in racers] == [0, 0]
    assert answers[0] == answers[1] != ""
    assert log.read_text() == "made\n"


def test_stdlib_is_the_sources_without_tests():
    found = documents("stdlib")
    names = {path.name for path in found}
    assert {"argparse.py", "dataclasses.py", "decoder.py"} <= names
    assert found == sorted(found)
    assert all(path.suffix == ".py" for path in found)
    assert not [p for p in found if {"test", "tests", "site-packages", "idlelib", "lib2to3"} & set(p.parent.parts)]


# --- refusals ---


def test_what_cannot_be_read_is_one_sentence(texts, tmp_path):
    single = texts / "notes.doc"
    assert documents(str(single)) == [single]
    for data, words in {
        texts / "notes.dox": "no file or directory .*notes.dox. Did you mean 'notes.doc'?",
        tmp_path / "nowhere" / "at all": "Name a text file, a directory, or 'stdlib'",
        texts / "binary.txt": "binary.txt is not text: its first 13 bytes hold NUL bytes",
        texts / "blank.txt": "blank.txt has no text in it",
        "stdlb": "Did you mean 'stdlib'?",
    }.items():
        with pytest.raises(PlanError, match=words):
            documents(str(data))
    for name in ("a.md", "b.txt", "deep/c.py"):
        (texts / name).unlink()
    with pytest.raises(PlanError, match=r"of its 2 files ending in .* none is text"):
        documents(str(texts))


def test_a_vocabulary_too_small_is_refused_with_the_numbers(texts, tmp_path):
    plan, cache = Plan(data=str(texts)), tmp_path / "cache"
    with pytest.raises(PlanError, match=r"vocabulary of 300 or more.* has 299: use tokenizer bytes"):
        prepare(plan, 299, cache=cache)
    prepare(plan, 300, cache=cache)
    plan = plan.model_copy(update={"tokenizer": "bytes"})
    with pytest.raises(PlanError, match=r"needs 257 ids .* vocabulary of 256"):
        prepare(plan, 256, cache=cache)
    assert prepare(plan, 257, cache=cache).stream.max() == 256


def test_a_cache_that_cannot_be_written_is_one_sentence(texts, tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(PlanError, match="cannot be written"):
        prepare(Plan(data=str(texts)), 320, cache=tmp_path / "file" / "cache")
