from __future__ import annotations

import os
import time

import numpy as np
import pytest
from models import CHATML, tiny

from specdec_cli import tiny as tiny_module
from specdec_cli.llama import ContextOptions, LlamaContext, Model
from specdec_cli.tiny import byte_level_vocabulary, write_tiny_model

QUANTS = ["f32", "q8_0", "q4_0", "q4_k", "mixed"]


def logits(path, tokens, **options):
    with Model(path) as model, LlamaContext(model, ContextOptions(256, threads=1, **options)) as context:
        context.sync(tokens)
        return context.score()[0].copy()


@pytest.mark.parametrize("quant", QUANTS)
def test_every_type_loads_and_computes_nearly_the_same(tmp_path, quant):
    tokens = list(b"any text")
    exact = logits(tiny(tmp_path, "exact", quant="f32", num_layers=1), tokens)
    rounded = logits(tiny(tmp_path, quant=quant, num_layers=1), tokens)
    # 4 bits lose 8 % of a normal weight; wrong nibbles or scales would leave no correlation.
    assert np.corrcoef(exact, rounded)[0, 1] > {"f32": 0.99999, "q8_0": 0.999}.get(quant, 0.9)


@pytest.mark.parametrize("quant", ["q8_0", "q4_0", "q4_k"])
def test_blocks_of_zeros(quant):
    _type_id, encode = tiny_module._ENCODERS[quant]
    assert set(encode(np.zeros((2, 256), np.float32))) <= {0, 0x80, 0x88}


def test_is_small_and_quick(tmp_path):
    started = time.perf_counter()
    path = tiny(tmp_path)
    assert time.perf_counter() - started < 1
    assert path.stat().st_size < 1_500_000


def test_same_seed_same_file(tmp_path):
    first, second, third = (tiny(tmp_path, str(seed), seed=seed // 2).read_bytes() for seed in (0, 1, 2))
    assert first == second
    assert first != third


def test_larger_vocabulary_and_more_layers_keep_the_weights(tmp_path):
    tokens = list(b"any text")
    small = logits(tiny(tmp_path, "small", quant="f32", num_layers=1), tokens)
    padded = logits(tiny(tmp_path, "padded", quant="f32", num_layers=1, num_vocab=384), tokens)
    np.testing.assert_allclose(padded[:320], small, atol=1e-4)
    assert not padded[320:].any()


def test_metadata(tmp_path):
    with Model(tiny(tmp_path, chat_template=CHATML, context_length=777, add_bos=True)) as model:
        assert model.chat_template == CHATML
        assert model.max_ctx == 777
        assert model.num_vocab == 320
        assert model.adds_bos
        tokens = model.tokenize("hi", add_special=True, parse_special=False)
        assert tokens[0] == model.bos == byte_level_vocabulary().tokens.index("<|endoftext|>")
        assert model.eos in model.stop_tokens
    with Model(tiny(tmp_path)) as model:
        assert model.chat_template is None
        assert not model.adds_bos


def test_vocabulary_too_small():
    with pytest.raises(ValueError, match="275"):
        byte_level_vocabulary(274)
    assert len(byte_level_vocabulary(275).tokens) == 275


def test_failed_write_leaves_nothing_behind(tmp_path, monkeypatch):
    path = tiny(tmp_path)
    before = path.read_bytes()

    def fail(*_args):
        raise OSError("disk full")

    monkeypatch.setattr(tiny_module, "_write_file", fail)
    with pytest.raises(OSError, match="disk full"):
        write_tiny_model(path, seed=1)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == [path.name]  # noqa: PTH208
