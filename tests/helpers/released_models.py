"""Makes small random models in the format of Hugging Face, with real tokenizers."""

import json

import sentencepiece
import torch

TEXT = [
    "the red house is near the river", "a small boat went down the river", "we saw the boat and the house",
    "the green boat is small", "a bird sat near the house", "the bird saw a red boat go down the river",
    "she went to the house", "he saw a bird near the small river", "green and red birds sat down",
]  # fmt: skip
SIZES = {
    "encoder_layers": 2, "decoder_layers": 1, "encoder_ffn_dim": 48, "decoder_ffn_dim": 40, "d_model": 16,
    "encoder_attention_heads": 4, "decoder_attention_heads": 2, "max_position_embeddings": 40,
}  # fmt: skip
SPECIAL = ("<s>", "<pad>", "</s>", "<unk>")


def random_model(kind, config, seed=1):
    """Return a model whose parameters, biases and norms included, are all random."""
    torch.manual_seed(seed)
    model = kind(config).eval()
    for parameter in filter(lambda each: each.requires_grad, model.parameters()):
        parameter.data += 0.15 * torch.randn(parameter.shape)
    return model


def pieces(folder, size=60):
    """Train a SentencePiece model; return the path of its file."""
    folder.mkdir(parents=True, exist_ok=True)
    sentencepiece.SentencePieceTrainer.Train(
        sentence_iterator=iter(TEXT), model_prefix=str(folder / "sentencepiece.bpe"), vocab_size=size,
        hard_vocab_limit=False, minloglevel=2,
    )  # fmt: skip
    return str(folder / "sentencepiece.bpe.model")


def gpt2_files(folder, merges=40):
    """Write vocab.json and merges.txt of a byte-level BPE; return the number of tokens."""
    from tokenizers import ByteLevelBPETokenizer

    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(TEXT, 256 + merges + 5, special_tokens=[*SPECIAL, "<mask>"])
    vocab = tokenizer.get_vocab()
    # <mask> is the last token, as in the released files.
    order = sorted((i, token) for token, i in vocab.items() if token != "<mask>")
    tokens = [*(token for _, token in order), "<mask>"]
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save_model(str(folder))
    (folder / "vocab.json").write_text(json.dumps({token: i for i, token in enumerate(tokens)}))
    return len(tokens)


def m2m100(folder):
    import transformers

    model = sentencepiece.SentencePieceProcessor(pieces(folder / "spm"))
    own = [*SPECIAL, *(model.IdToPiece(i) for i in range(3, model.GetPieceSize()))]
    (folder / "vocab.json").write_text(json.dumps({token: i for i, token in enumerate(own)}))
    tokenizer = transformers.M2M100Tokenizer(
        str(folder / "vocab.json"), str(folder / "spm" / "sentencepiece.bpe.model"), src_lang="en"
    )
    config = transformers.M2M100Config(vocab_size=len(own) + 108, **SIZES)
    return random_model(transformers.M2M100ForConditionalGeneration, config), tokenizer


def nllb(folder):
    import transformers

    tokenizer = transformers.NllbTokenizer(pieces(folder / "spm"), src_lang="eng_Latn")
    config = transformers.M2M100Config(vocab_size=len(tokenizer) + 2, **SIZES)
    return random_model(transformers.M2M100ForConditionalGeneration, config), tokenizer


def bart(folder):
    import transformers

    size = gpt2_files(folder)
    tokenizer = transformers.BartTokenizer(str(folder / "vocab.json"), str(folder / "merges.txt"))
    config = transformers.BartConfig(vocab_size=size, **SIZES)
    return random_model(transformers.BartForConditionalGeneration, config), tokenizer


def mbart(folder):
    import transformers

    tokenizer = transformers.MBartTokenizer(pieces(folder / "spm"), src_lang="en_XX", tgt_lang="ro_RO")
    config = transformers.MBartConfig(vocab_size=len(tokenizer), scale_embedding=True, **SIZES)
    return random_model(transformers.MBartForConditionalGeneration, config), tokenizer


def mbart50(folder):
    import transformers

    tokenizer = transformers.MBart50Tokenizer(pieces(folder / "spm"), src_lang="en_XX", tgt_lang="ro_RO")
    config = transformers.MBartConfig(vocab_size=len(tokenizer), scale_embedding=True, **SIZES)
    return random_model(transformers.MBartForConditionalGeneration, config), tokenizer


def xglm(folder):
    import transformers

    tokenizer = transformers.XGLMTokenizer(pieces(folder / "spm"))
    config = transformers.XGLMConfig(
        vocab_size=len(tokenizer), d_model=16, ffn_dim=48, num_layers=2, attention_heads=4,
        max_position_embeddings=40,
    )  # fmt: skip
    return random_model(transformers.XGLMForCausalLM, config), tokenizer


def opt(folder):
    import transformers

    size = gpt2_files(folder)
    tokenizer = transformers.GPT2Tokenizer(
        str(folder / "vocab.json"), str(folder / "merges.txt"), bos_token="</s>", eos_token="</s>",
        unk_token="</s>", pad_token="<pad>", add_bos_token=True,
    )  # fmt: skip
    config = transformers.OPTConfig(
        vocab_size=size + 3, hidden_size=16, word_embed_proj_dim=16, ffn_dim=48, num_hidden_layers=2,
        num_attention_heads=4, max_position_embeddings=40,
    )  # fmt: skip
    return random_model(transformers.OPTForCausalLM, config), tokenizer


ENCODER = {
    "hidden_size": 16, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 42, "type_vocab_size": 1, "layer_norm_eps": 1e-5,
}  # fmt: skip


def roberta(folder):
    import transformers

    size = gpt2_files(folder)
    tokenizer = transformers.RobertaTokenizer(str(folder / "vocab.json"), str(folder / "merges.txt"))
    config = transformers.RobertaConfig(vocab_size=size, **ENCODER)
    return random_model(transformers.RobertaForMaskedLM, config), tokenizer


def xlm_roberta(folder):
    import transformers

    tokenizer = transformers.XLMRobertaTokenizer(pieces(folder / "spm"))
    config = transformers.XLMRobertaConfig(vocab_size=len(tokenizer), **ENCODER)
    return random_model(transformers.XLMRobertaForMaskedLM, config), tokenizer


def fsmt(folder):
    import transformers

    words = sorted({word for line in TEXT for word in line.split()})
    letters = sorted({letter for word in words for letter in word})
    folder.mkdir(parents=True, exist_ok=True)
    sizes = []
    for name, some in (("src", words), ("tgt", words[:9])):
        pairs = {word[:i] for word in some for i in range(2, len(word))}
        ends = [f"{token}</w>" for token in (*letters, *some)]
        tokens = list(dict.fromkeys([*SPECIAL, *letters, *sorted(pairs), *ends]))
        (folder / f"vocab-{name}.json").write_text(json.dumps({t: i for i, t in enumerate(tokens)}))
        sizes.append(len(tokens))
    merges = ["t h", "th e</w>", "r i", "i s</w>", "a n", "an d</w>", "b o", "bo a", "boa t</w>"]
    (folder / "merges.txt").write_text("".join(f"{merge}\n" for merge in merges))
    config = transformers.FSMTConfig(
        langs=["en", "de"], src_vocab_size=sizes[0], tgt_vocab_size=sizes[1],
        **{**SIZES, "encoder_attention_heads": 2},
    )  # fmt: skip
    tokenizer = transformers.FSMTTokenizer(
        langs=["en", "de"], src_vocab_file=str(folder / "vocab-src.json"),
        tgt_vocab_file=str(folder / "vocab-tgt.json"), merges_file=str(folder / "merges.txt"),
    )  # fmt: skip
    return random_model(transformers.FSMTForConditionalGeneration, config), tokenizer


SPEECH = {
    "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "conv_dim": [12, 12, 12], "conv_kernel": [10, 3, 2], "conv_stride": [5, 2, 2], "conv_bias": True,
    "num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 4,
}  # fmt: skip
LARGE = {"feat_extract_norm": "layer", "do_stable_layer_norm": True, "conv_bias": False}


def wav2vec2(folder, **options):
    import transformers

    codes = {"codevector_dim": 8, "proj_codevector_dim": 8, "num_codevectors_per_group": 6}
    config = transformers.Wav2Vec2Config(**{**SPEECH, **codes, **options})
    return random_model(transformers.Wav2Vec2ForPreTraining, config), None


def wav2vec2_large(folder):
    return wav2vec2(folder, **LARGE)


def hubert(folder, **options):
    import transformers

    return random_model(transformers.HubertModel, transformers.HubertConfig(**{**SPEECH, **options})), None


def hubert_large(folder):
    return hubert(folder, **LARGE)


MODELS = {
    make.__name__: make
    for make in (
        m2m100,
        nllb,
        bart,
        mbart,
        mbart50,
        xglm,
        opt,
        roberta,
        xlm_roberta,
        fsmt,
        wav2vec2,
        wav2vec2_large,
        hubert,
        hubert_large,
    )
}


def saved(name, folder, **options):
    """Write a model and its tokenizer to a folder; return both."""
    folder.mkdir(parents=True, exist_ok=True)
    model, tokenizer = MODELS[name](folder)
    model.save_pretrained(folder, **options)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    return model, tokenizer
